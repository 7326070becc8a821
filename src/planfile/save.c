// Writes a plan file: a head and a JSON header with all sizes, then the blobs, streamed
// so that constants are not copied. The file is written under another name, read back,
// and renamed if it is correct.
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#include "base/hash.h"
#include "base/json.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "jaxpp/version.h"
#include "planfile/format.h"

// --- The contents, serialized -----------------------------------------------------

typedef struct draft {
  const jpp_planfile_contents_t* contents;
  jpp_plan_hashes_t hashes;
  char* graph;        // the graph's text
  jpp_str_t numbers;  // value_bytes, schedules, layouts
  jpp_str_t header;
} draft_t;

static void append_number(jpp_str_t* str, uint32_t bytes, uint64_t number) {
  unsigned char text[8];
  jpp__planfile_put(text, bytes, number);
  jpp_str_append_n(str, (const char*)text, bytes);
}

static void append_schedule(jpp_str_t* str, const jpp_schedule_t* schedule) {
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      const jpp_schedule_task_t* task = &schedule->rows[r].tasks[i];
      append_number(
          str, 4,
          task->kind | (uint32_t)task->joins_next << 8 | (uint32_t)task->latency << 16);
      append_number(str, 4, task->stage);
      append_number(str, 4, task->microbatch);
    }
  }
}

static void append_layout(jpp_str_t* str, const jpp_planfile_layout_t* layout,
                          uint32_t devices, uint32_t ndim) {
  for (uint32_t i = 0; i < ndim; ++i) append_number(str, 8, (uint64_t)layout->dims[i]);
  for (uint64_t i = 0; i < (uint64_t)devices * ndim; ++i) {
    append_number(str, 8, (uint64_t)layout->starts[i]);
  }
}

static void append_numbers(const jpp_planfile_contents_t* contents, jpp_str_t* str) {
  const jpp_planned_t* planned = contents->planned;
  const jpp_graph_t* graph = planned->graph;
  for (uint32_t v = 0; v < planned->staged->num_values; ++v) {
    append_number(str, 8, planned->plan->value_bytes[v]);
  }
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    append_schedule(str, planned->schedules[l]);
  }
  if (!contents->layouts) return;
  for (uint32_t i = 0; i < graph->num_args + graph->num_outputs; ++i) {
    append_layout(str, &contents->layouts[i], contents->devices_per_rank,
                  jpp__planfile_type(graph, i)->ndim);
  }
}

// --- The header -----------------------------------------------------------------------

static json_t* hash_to_json(uint64_t hash) {
  char text[17];
  snprintf(text, sizeof(text), "%016llx", (unsigned long long)hash);
  return json_string(text);
}

static json_t* hashes_to_json(const jpp_plan_hashes_t* hashes) {
  return json_pack("{so so so so}", "arguments", hash_to_json(hashes->arguments), "graph",
                   hash_to_json(hashes->graph), "schedule",
                   hash_to_json(hashes->schedule), "program",
                   hash_to_json(hashes->program));
}

static json_t* ids_to_json(const uint32_t* ids, uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) jpp__json_append(&list, jpp__json_id(ids[i]));
  return list;
}

static json_t* sizes_to_json(const jpp_planfile_bytes_t* blobs, uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) {
    jpp__json_append(&list, json_integer((json_int_t)blobs[i].size));
  }
  return list;
}

static json_t* schedule_to_json(const jpp_schedule_t* schedule) {
  json_t* rows = json_array();
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    jpp__json_append(&rows, json_integer(schedule->rows[r].count));
  }
  return json_pack("{so sI so so}", "name", jpp__json_text(schedule->name),
                   "microbatches", (json_int_t)schedule->microbatches, "stage_rank",
                   jpp__json_ids(schedule->stage_rank, schedule->stages), "rows", rows);
}

static json_t* schedules_to_json(const jpp_planned_t* planned) {
  json_t* list = json_array();
  for (uint32_t l = 0; l < planned->graph->num_loops; ++l) {
    jpp__json_append(&list, schedule_to_json(planned->schedules[l]));
  }
  return list;
}

static json_t* axes_to_json(const jpp_planfile_contents_t* contents) {
  json_t* names = json_array();
  for (uint32_t a = 0; a < contents->num_axes; ++a) {
    jpp__json_append(&names, jpp__json_text(contents->axis_names[a]));
  }
  return json_pack(
      "{so so}", "names", names, "sizes",
      jpp__json_ids(contents->axis_sizes, contents->planned->ranks * contents->num_axes));
}

static json_t* shard_dims_to_json(const jpp_planfile_contents_t* contents) {
  const jpp_staged_t* staged = contents->planned->staged;
  json_t* list = json_array();
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const uint64_t* dims = contents->shard_dims ? contents->shard_dims[t] : NULL;
    uint32_t count = jpp__planfile_count_dims(staged, &staged->tasks[t]);
    json_t* row = dims ? json_array() : json_null();
    for (uint32_t i = 0; dims && i < count; ++i) {
      jpp__json_append(&row, json_integer((json_int_t)dims[i]));
    }
    jpp__json_append(&list, row);
  }
  return list;
}

static json_t* offload_to_json(const jpp_planned_t* planned) {
  json_t* list = json_array();
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    jpp__json_append(&list, json_boolean(planned->offload[r]));
  }
  return list;
}

// NULL if memory ran out.
static json_t* header_to_json(const draft_t* draft) {
  const jpp_planfile_contents_t* contents = draft->contents;
  const jpp_planned_t* planned = contents->planned;
  // -1 as JPP_NONE.
  const uint32_t* device_ids = (const uint32_t*)contents->device_ids;
  json_t* ids = ids_to_json(device_ids, planned->ranks * contents->devices_per_rank);
  return json_pack("{so so so sI so sI so so sI sI so so so so sI sI sb sI so so sI}",  //
                   "name", jpp__json_text(planned->graph->name),                        //
                   "platform", jpp__json_text(contents->platform),                      //
                   "format", jpp__json_text(contents->format),                          //
                   "ranks", (json_int_t)planned->ranks,                                 //
                   "offload", offload_to_json(planned),                                 //
                   "devices_per_rank", (json_int_t)contents->devices_per_rank,          //
                   "device_ids", ids,                                                   //
                   "axes", axes_to_json(contents),                                      //
                   "channel_slots", (json_int_t)contents->planned->channel_slots,       //
                   "steps_in_flight", (json_int_t)contents->steps_in_flight,            //
                   "hashes", hashes_to_json(&draft->hashes),                            //
                   "schedules", schedules_to_json(planned),                             //
                   "task_modules",                                                      //
                   ids_to_json(contents->task_modules, planned->staged->num_tasks),     //
                   "shard_dims", shard_dims_to_json(contents),                          //
                   "graph", (json_int_t)strlen(draft->graph),                           //
                   "values", (json_int_t)planned->staged->num_values,                   //
                   "layouts", contents->layouts != NULL,                                //
                   "compile_options", (json_int_t)contents->compile_options.size,       //
                   "modules", sizes_to_json(contents->modules, contents->num_modules),  //
                   "constants",
                   sizes_to_json(contents->constants, contents->num_constants),  //
                   "front", (json_int_t)contents->front.size);
}

static jpp_status_t* make_draft(const jpp_planfile_contents_t* contents, draft_t* draft) {
  *draft = (draft_t){.contents = contents};
  jpp_planned_hash(contents->planned, &draft->hashes);
  JPP_RETURN_IF_ERROR(jpp_graph_print(contents->planned->graph, &draft->graph));
  append_numbers(contents, &draft->numbers);
  jpp_status_t* error = draft->numbers.error;
  draft->numbers.error = NULL;
  JPP_RETURN_IF_ERROR(error);
  jpp__json_take(header_to_json(draft), JSON_COMPACT, &draft->header);
  jpp_str_append(&draft->header, "\n");
  error = draft->header.error;
  draft->header.error = NULL;
  return error;
}

// --- The file -------------------------------------------------------------------------

// Hashes everything that it writes. After a failure, which errno names, it writes nothing
// more.
typedef struct writer {
  FILE* file;
  uint64_t hash;
  bool failed;
} writer_t;

static void write_bytes(writer_t* writer, const void* data, size_t size) {
  if (writer->failed || !size) return;
  writer->hash = jpp__hash_bytes(writer->hash, data, size);
  writer->failed = fwrite(data, 1, size, writer->file) != size;
}

static void write_blobs(writer_t* writer, const jpp_planfile_bytes_t* blobs,
                        uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    write_bytes(writer, blobs[i].data, blobs[i].size);
  }
}

static uint64_t sum_sizes(const jpp_planfile_bytes_t* blobs, uint32_t count) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < count; ++i) sum += blobs[i].size;
  return sum;
}

static uint64_t file_size(const draft_t* draft) {
  const jpp_planfile_contents_t* contents = draft->contents;
  return JPP_PLANFILE_HEAD_SIZE + draft->header.length + strlen(draft->graph) +
         draft->numbers.length + contents->compile_options.size +
         sum_sizes(contents->modules, contents->num_modules) +
         sum_sizes(contents->constants, contents->num_constants) + contents->front.size;
}

// Writes everything except the hash, for which it leaves room.
static void write_head(writer_t* writer, const draft_t* draft) {
  unsigned char head[JPP_PLANFILE_HEAD_SIZE] = {0};
  memcpy(head, JPP_PLANFILE_MAGIC, JPP_PLANFILE_MAGIC_SIZE);
  jpp__planfile_put(head + JPP_PLANFILE_FORMAT_AT, 4, JPP_PLANFILE_FORMAT);
  snprintf((char*)head + JPP_PLANFILE_MAKER_AT, JPP_PLANFILE_MAKER_SIZE, "jaxpp %s",
           jpp_version());
  jpp__planfile_put(head + JPP_PLANFILE_SIZE_AT, 8, file_size(draft));
  jpp__planfile_put(head + JPP_PLANFILE_HEADER_SIZE_AT, 8, draft->header.length);
  write_bytes(writer, head, JPP_PLANFILE_HASH_AT);
  uint64_t hash = writer->hash;
  write_bytes(writer, head + JPP_PLANFILE_HASH_AT, 8);
  writer->hash = hash;
  write_bytes(writer, head + JPP_PLANFILE_HEADER_SIZE_AT, 8);
}

static bool write_draft(FILE* file, const draft_t* draft) {
  const jpp_planfile_contents_t* contents = draft->contents;
  writer_t writer = {.file = file, .hash = JPP_HASH_START};
  write_head(&writer, draft);
  write_bytes(&writer, draft->header.data, draft->header.length);
  write_bytes(&writer, draft->graph, strlen(draft->graph));
  write_bytes(&writer, draft->numbers.data, draft->numbers.length);
  write_blobs(&writer, &contents->compile_options, 1);
  write_blobs(&writer, contents->modules, contents->num_modules);
  write_blobs(&writer, contents->constants, contents->num_constants);
  write_blobs(&writer, &contents->front, 1);
  unsigned char hash[8];
  jpp__planfile_put(hash, 8, writer.hash);
  if (!writer.failed) {
    writer.failed = fseek(writer.file, JPP_PLANFILE_HASH_AT, SEEK_SET) != 0;
  }
  write_bytes(&writer, hash, sizeof(hash));
  return !writer.failed && fflush(file) == 0 && fsync(fileno(file)) == 0;
}

// Removes the file if it fails, with errno set.
static FILE* open_file(int descriptor, const char* name) {
  FILE* file = fdopen(descriptor, "wb");
  if (file) return file;
  int error = errno;
  close(descriptor);
  unlink(name);
  errno = error;
  return NULL;
}

// Creates a file beside `path`; the caller frees its name. Returns NULL with errno set.
static FILE* open_scratch(const char* path, char** out_name) {
  static atomic_uint count;
  for (int tries = 0; tries < 100; ++tries) {
    jpp_str_t name = {0};
    jpp_str_appendf(&name, "%s.%d.%u", path, (int)getpid(), atomic_fetch_add(&count, 1));
    jpp_status_t* status = jpp_str_finish(&name, out_name);
    jpp_status_free(status);
    if (status) {
      errno = ENOMEM;
      return NULL;
    }
    int descriptor = open(*out_name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor >= 0) return open_file(descriptor, *out_name);
    jpp_free(*out_name);
    *out_name = NULL;
    if (errno != EEXIST) return NULL;
  }
  return NULL;
}

static jpp_status_t* not_written(const char* path, int error) {
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "plan file %s: cannot be written: %s; expected a folder with "
                         "space that this process may write to",
                         path, strerror(error));
}

static jpp_status_t* read_back(const char* scratch) {
  jpp_planfile_t* file = NULL;
  jpp_status_t* status = jpp_planfile_load(scratch, &file);
  jpp_planfile_destroy(file);
  return jpp_status_annotate(status, "what was written does not read back");
}

static jpp_status_t* write_file(const draft_t* draft, const char* path) {
  char* scratch = NULL;
  FILE* file = open_scratch(path, &scratch);
  if (!file) {
    int failure = errno;
    jpp_free(scratch);
    return not_written(path, failure);
  }
  bool written = write_draft(file, draft);
  int error = errno;
  if (fclose(file) != 0 && written) {
    written = false;
    error = errno;
  }
  jpp_status_t* status = written ? read_back(scratch) : not_written(path, error);
  if (!status && rename(scratch, path) != 0) status = not_written(path, errno);
  if (status) unlink(scratch);
  jpp_free(scratch);
  return status;
}

jpp_status_t* jpp_planfile_save(const jpp_planfile_contents_t* contents,
                                const char* path) {
  JPP_RETURN_IF_NULL(contents, path);
  jpp_planfile_contents_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_planfile_contents_t, front, contents, &full));
  JPP_RETURN_IF_NULL(full.planned, full.device_ids, full.task_modules);
  JPP_RETURN_IF_ERROR_IN(jpp__planfile_check(&full), "plan file %s", path);
  draft_t draft;
  jpp_status_t* status = make_draft(&full, &draft);
  if (!status) status = write_file(&draft, path);
  jpp_free(draft.graph);
  jpp_str_deinit(&draft.numbers);
  jpp_str_deinit(&draft.header);
  return status;
}
