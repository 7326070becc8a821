// Reads a plan file. The file's size bounds every allocation, and nothing in the file is
// trusted: the graph goes through the parser, the schedules through their proof, and the
// result through the planner and the checker.
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/json.h"
#include "base/null.h"
#include "base/str.h"
#include "jaxpp/version.h"
#include "planfile/format.h"

typedef struct storage {
  jpp_planfile_t file;  // first member: the caller's struct
  unsigned char* bytes;
  size_t size;
  jpp_arena_t arena;
  jpp_graph_t* graph;
  jpp_schedule_t** schedules;  // [num_loops]
  jpp_planned_t* planned;
} storage_t;

// --- The head -------------------------------------------------------------------------

static jpp_status_t* damaged(const char* path, const char* format, ...) JPP_PRINTF(2, 3);
static jpp_status_t* damaged(const char* path, const char* format, ...) {
  char what[256];
  va_list args;
  va_start(args, format);
  vsnprintf(what, sizeof(what), format, args);
  va_end(args);
  return jpp_status_make(JPP_PARSE_ERROR,
                         "plan file %s: damaged or cut off: %s; copy or save it again",
                         path, what);
}

static jpp_status_t* check_magic(const char* path, const unsigned char* bytes,
                                 size_t size) {
  size_t length = size < JPP_PLANFILE_MAGIC_SIZE ? size : JPP_PLANFILE_MAGIC_SIZE;
  if (!size || memcmp(bytes, JPP_PLANFILE_MAGIC, length) != 0) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "plan file %s: expected a file that begins with \"jaxpp plan "
                           "file\", as save() writes it, found other contents%s",
                           path, size ? "" : ", an empty one");
  }
  if (size >= JPP_PLANFILE_HEAD_SIZE) return NULL;
  return damaged(path, "expected at least %d bytes, found %zu", JPP_PLANFILE_HEAD_SIZE,
                 size);
}

// The maker's name may be from any version, and may be damaged.
static void copy_maker(const unsigned char* bytes, char text[JPP_PLANFILE_MAKER_SIZE]) {
  size_t i = 0;
  for (; i + 1 < JPP_PLANFILE_MAKER_SIZE; ++i) {
    unsigned char letter = bytes[JPP_PLANFILE_MAKER_AT + i];
    if (letter < ' ' || letter > '~') break;
    text[i] = (char)letter;
  }
  text[i] = 0;
}

// `bytes` begin a file of `size` bytes, and contain at least the head.
static jpp_status_t* check_head(const char* path, const unsigned char* bytes,
                                uint64_t size) {
  char maker[JPP_PLANFILE_MAKER_SIZE];
  uint64_t format = jpp__planfile_get(bytes + JPP_PLANFILE_FORMAT_AT, 4);
  copy_maker(bytes, maker);
  if (format > JPP_PLANFILE_FORMAT) {
    return jpp_status_make(
        JPP_UNSUPPORTED,
        "plan file %s: format %u, written by %s; expected at most format %d, the newest "
        "that jaxpp %s reads; use a version as new as the one that wrote it",
        path, (unsigned)format, *maker ? maker : "a newer version", JPP_PLANFILE_FORMAT,
        jpp_version());
  }
  uint64_t expected = jpp__planfile_get(bytes + JPP_PLANFILE_SIZE_AT, 8);
  if (expected == size) return NULL;
  return damaged(path, "expected %llu bytes, found %llu", (unsigned long long)expected,
                 (unsigned long long)size);
}

static jpp_status_t* check_hash(const storage_t* storage) {
  uint64_t expected = jpp__planfile_get(storage->bytes + JPP_PLANFILE_HASH_AT, 8);
  uint64_t found = jpp__planfile_hash(storage->bytes, storage->size);
  if (expected == found) return NULL;
  return damaged(storage->file.path, "expected the checksum %016llx, found %016llx",
                 (unsigned long long)expected, (unsigned long long)found);
}

// --- The header -----------------------------------------------------------------------

typedef struct reader {
  storage_t* storage;
  const char* path;
  const json_t* header;
  size_t at;  // offset of the next blob
} reader_t;

// The checksum is correct, so another program wrote the file.
static jpp_status_t* malformed(const reader_t* r, const char* what,
                               const char* expected) {
  return jpp_status_make(JPP_PARSE_ERROR, "plan file %s: %s: expected %s", r->path, what,
                         expected);
}

static jpp_status_t* read_number(const reader_t* r, const json_t* value, const char* what,
                                 uint64_t most, uint64_t* out_number) {
  json_int_t number = json_is_integer(value) ? json_integer_value(value) : -1;
  *out_number = 0;
  if (number < 0 || (uint64_t)number > most) {
    return malformed(r, what, "a whole number that is not too large");
  }
  *out_number = (uint64_t)number;
  return NULL;
}

static jpp_status_t* get_u32(const reader_t* r, const json_t* object, const char* key,
                             uint32_t* out_number) {
  uint64_t number = 0;
  jpp_status_t* status =
      read_number(r, json_object_get(object, key), key, UINT32_MAX - 1, &number);
  *out_number = (uint32_t)number;
  return status;
}

static jpp_status_t* get_text(const reader_t* r, const json_t* object, const char* key,
                              const char** out_text) {
  const char* text = json_string_value(json_object_get(object, key));
  if (!text) return malformed(r, key, "a text");
  return jpp__arena_strdup(&r->storage->arena, text, out_text);
}

static jpp_status_t* get_array(const reader_t* r, const json_t* object, const char* key,
                               const json_t** out_array, uint32_t* out_count) {
  *out_array = json_object_get(object, key);
  if (!json_is_array(*out_array)) return malformed(r, key, "a list");
  *out_count = (uint32_t)json_array_size(*out_array);
  return NULL;
}

// Reads numbers below JPP_NONE, which is written as null.
static jpp_status_t* get_ids(const reader_t* r, const json_t* object, const char* key,
                             uint32_t* out_count, uint32_t** out_ids) {
  const json_t* list = NULL;
  JPP_RETURN_IF_ERROR(get_array(r, object, key, &list, out_count));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, *out_count, out_ids));
  for (uint32_t i = 0; i < *out_count; ++i) {
    const json_t* value = json_array_get(list, i);
    uint64_t number = JPP_NONE;
    if (!json_is_null(value)) {
      JPP_RETURN_IF_ERROR(read_number(r, value, key, JPP_NONE - 1, &number));
    }
    (*out_ids)[i] = (uint32_t)number;
  }
  return NULL;
}

static jpp_status_t* get_hash(const reader_t* r, const char* key, uint64_t* out_hash) {
  const json_t* hashes = json_object_get(r->header, "hashes");
  const char* text = json_string_value(json_object_get(hashes, key));
  char* end = NULL;
  *out_hash = text && strlen(text) == 16 ? strtoull(text, &end, 16) : 0;
  return end && !*end ? NULL : malformed(r, "hashes", "numbers of 16 digits");
}

// --- Blobs ----------------------------------------------------------------------------

static jpp_status_t* take_blob(reader_t* r, const char* what, uint64_t size,
                               jpp_planfile_bytes_t* out_blob) {
  *out_blob = (jpp_planfile_bytes_t){0};
  if (size > r->storage->size - r->at) return malformed(r, what, "bytes that are there");
  *out_blob = (jpp_planfile_bytes_t){r->storage->bytes + r->at, (size_t)size};
  r->at += (size_t)size;
  return NULL;
}

static jpp_status_t* get_blob(reader_t* r, const char* key,
                              jpp_planfile_bytes_t* out_blob) {
  uint64_t size = 0;
  const json_t* value = json_object_get(r->header, key);
  JPP_RETURN_IF_ERROR(read_number(r, value, key, INT64_MAX, &size));
  return take_blob(r, key, size, out_blob);
}

static jpp_status_t* get_blobs(reader_t* r, const char* key, uint32_t* out_count,
                               const jpp_planfile_bytes_t** out_blobs) {
  const json_t* list = NULL;
  jpp_planfile_bytes_t* blobs = NULL;
  JPP_RETURN_IF_ERROR(get_array(r, r->header, key, &list, out_count));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, *out_count, &blobs));
  *out_blobs = blobs;
  for (uint32_t i = 0; i < *out_count; ++i) {
    uint64_t size = 0;
    JPP_RETURN_IF_ERROR(read_number(r, json_array_get(list, i), key, INT64_MAX, &size));
    JPP_RETURN_IF_ERROR(take_blob(r, key, size, &blobs[i]));
  }
  return NULL;
}

static jpp_status_t* take_i64s(reader_t* r, uint64_t count, const int64_t** out_numbers) {
  jpp_planfile_bytes_t blob;
  int64_t* numbers = NULL;
  JPP_RETURN_IF_ERROR(take_blob(r, "layouts", jpp__bytes_multiply(count, 8), &blob));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, count, &numbers));
  const unsigned char* at = blob.data;
  for (uint64_t i = 0; i < count; ++i) {
    numbers[i] = (int64_t)jpp__planfile_get(at + 8 * i, 8);
  }
  *out_numbers = numbers;
  return NULL;
}

// --- Schedules ------------------------------------------------------------------------

static jpp_status_t* read_entries(reader_t* r, uint64_t count,
                                  jpp_schedule_task_t** out_tasks) {
  jpp_planfile_bytes_t blob;
  JPP_RETURN_IF_ERROR(
      take_blob(r, "rows", jpp__bytes_multiply(count, JPP_PLANFILE_ENTRY_SIZE), &blob));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, count, out_tasks));
  const unsigned char* at = blob.data;
  for (uint64_t i = 0; i < count; ++i, at += JPP_PLANFILE_ENTRY_SIZE) {
    (*out_tasks)[i] =
        (jpp_schedule_task_t){.kind = at[0],
                              .joins_next = at[1] != 0,
                              .latency = (uint16_t)jpp__planfile_get(at + 2, 2),
                              .stage = (uint32_t)jpp__planfile_get(at + 4, 4),
                              .microbatch = (uint32_t)jpp__planfile_get(at + 8, 4)};
    if (at[0] >= JPP_TASK_OUTER) return malformed(r, "rows", "kinds of tasks");
  }
  return NULL;
}

// Each stage has at least one entry for each microbatch, so the number of entries in the
// file bounds both.
static jpp_status_t* check_sizes(const reader_t* r, const jpp_schedule_rows_t* rows,
                                 uint64_t entries) {
  uint64_t pairs = jpp__bytes_multiply(rows->stages, rows->microbatches);
  if (!pairs || pairs > entries) {
    return malformed(r, "microbatches", "no more than the schedule's rows have");
  }
  for (uint32_t s = 0; s < rows->stages; ++s) {
    if (rows->stage_rank[s] >= rows->ranks)
      return malformed(r, "stage_rank", "numbers of ranks");
  }
  return NULL;
}

static jpp_status_t* read_schedule(reader_t* r, const json_t* json,
                                   jpp_schedule_t** out_schedule) {
  uint32_t *counts = NULL, *stage_rank = NULL;
  jpp_schedule_row_t* rows = NULL;
  jpp_schedule_task_t* tasks = NULL;
  jpp_schedule_rows_t from = {0};
  uint64_t entries = 0;
  JPP_RETURN_IF_ERROR(get_text(r, json, "name", &from.name));
  JPP_RETURN_IF_ERROR(get_u32(r, json, "microbatches", &from.microbatches));
  JPP_RETURN_IF_ERROR(get_ids(r, json, "stage_rank", &from.stages, &stage_rank));
  JPP_RETURN_IF_ERROR(get_ids(r, json, "rows", &from.ranks, &counts));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, from.ranks, &rows));
  for (uint32_t i = 0; i < from.ranks; ++i) entries += counts[i];
  JPP_RETURN_IF_ERROR(read_entries(r, entries, &tasks));
  for (uint32_t i = 0; i < from.ranks; ++i) {
    rows[i] = (jpp_schedule_row_t){tasks, counts[i]};
    tasks += counts[i];
  }
  from.rows = rows;
  from.stage_rank = stage_rank;
  JPP_RETURN_IF_ERROR(check_sizes(r, &from, entries));
  return jpp_schedule_from_rows(&from, out_schedule);
}

static jpp_status_t* read_schedules(reader_t* r) {
  const json_t* list = NULL;
  uint32_t count = 0, loops = r->storage->graph->num_loops;
  JPP_RETURN_IF_ERROR(get_array(r, r->header, "schedules", &list, &count));
  if (count != loops) return malformed(r, "schedules", "one for each loop");
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, loops, &r->storage->schedules));
  for (uint32_t l = 0; l < loops; ++l) {
    JPP_RETURN_IF_ERROR(
        read_schedule(r, json_array_get(list, l), &r->storage->schedules[l]));
  }
  return NULL;
}

// --- The plan -------------------------------------------------------------------------

typedef struct measured {
  const reader_t* reader;
  const unsigned char* bytes;  // of each value, u64
  uint32_t count;
} measured_t;

// Implements jpp_plan_options_t.measure, on the loading thread.
static jpp_status_t* give_bytes(void* context, const jpp_staged_t* staged,
                                uint64_t* out_bytes) {
  const measured_t* m = context;
  if (m->count != staged->num_values) {
    return malformed(m->reader, "values", "one for each value of the partition");
  }
  for (uint32_t v = 0; v < m->count; ++v) {
    out_bytes[v] = jpp__planfile_get(m->bytes + 8 * (size_t)v, 8);
    if (jpp__bytes_fit(out_bytes[v])) continue;
    return malformed(m->reader, "values", "bytes that can be counted");
  }
  return NULL;
}

static jpp_status_t* get_offload(const reader_t* r, uint32_t ranks, bool** out_offload) {
  const json_t* list = NULL;
  uint32_t count = 0;
  JPP_RETURN_IF_ERROR(get_array(r, r->header, "offload", &list, &count));
  if (count != ranks) return malformed(r, "offload", "one for each rank");
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, ranks, out_offload));
  for (uint32_t k = 0; k < count; ++k) {
    (*out_offload)[k] = json_is_true(json_array_get(list, k));
  }
  return NULL;
}

static jpp_status_t* plan_again(const reader_t* r, measured_t* measured) {
  storage_t* storage = r->storage;
  jpp_loop_schedule_t* loops = NULL;
  bool* offload = NULL;
  uint32_t ranks = 0, slots = 0;
  JPP_RETURN_IF_ERROR(get_u32(r, r->header, "ranks", &ranks));
  JPP_RETURN_IF_ERROR(get_u32(r, r->header, "channel_slots", &slots));
  JPP_RETURN_IF_ERROR(get_offload(r, ranks, &offload));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&storage->arena, storage->graph->num_loops, &loops));
  for (uint32_t l = 0; l < storage->graph->num_loops; ++l) {
    loops[l] = (jpp_loop_schedule_t){.struct_size = sizeof(*loops),
                                     .given = storage->schedules[l]};
  }
  jpp_plan_options_t options = {.struct_size = sizeof(options),
                                .ranks = ranks,
                                .offload = offload,
                                .loops = loops,
                                .channel_slots = slots,
                                .measure = give_bytes,
                                .context = measured};
  JPP_RETURN_IF_ERROR_IN(jpp_plan_graph(storage->graph, &options, &storage->planned),
                         "plan file %s", r->path);
  storage->file.contents.planned = storage->planned;
  return NULL;
}

static jpp_status_t* check_plan(const reader_t* r) {
  const jpp_planfile_t* file = &r->storage->file;
  jpp_plan_hashes_t found;
  jpp_planned_hash(r->storage->planned, &found);
  const char* difference = jpp_plan_hashes_difference(&file->hashes, &found);
  if (!difference) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "plan file %s: jaxpp %s plans it differently than %s, which wrote it: their %s "
      "differs; save it again with this version, or use the one that wrote it",
      r->path, jpp_version(), file->maker, difference);
}

static jpp_status_t* read_plan(reader_t* r) {
  storage_t* storage = r->storage;
  jpp_planfile_bytes_t text, values;
  measured_t measured = {.reader = r};
  jpp_plan_hashes_t* hashes = &storage->file.hashes;
  JPP_RETURN_IF_ERROR(get_hash(r, "arguments", &hashes->arguments));
  JPP_RETURN_IF_ERROR(get_hash(r, "graph", &hashes->graph));
  JPP_RETURN_IF_ERROR(get_hash(r, "schedule", &hashes->schedule));
  JPP_RETURN_IF_ERROR(get_hash(r, "program", &hashes->program));
  JPP_RETURN_IF_ERROR(get_u32(r, r->header, "values", &measured.count));
  JPP_RETURN_IF_ERROR(get_blob(r, "graph", &text));
  JPP_RETURN_IF_ERROR(
      take_blob(r, "values", jpp__bytes_multiply(measured.count, 8), &values));
  measured.bytes = values.data;
  JPP_RETURN_IF_ERROR(jpp_graph_parse(text.data, text.size, r->path, &storage->graph));
  JPP_RETURN_IF_ERROR(read_schedules(r));
  JPP_RETURN_IF_ERROR(plan_again(r, &measured));
  return check_plan(r);
}

// --- Contents besides the plan -------------------------------------------------------

static jpp_status_t* read_axes(reader_t* r, uint32_t ranks) {
  jpp_planfile_contents_t* contents = &r->storage->file.contents;
  const json_t *axes = json_object_get(r->header, "axes"), *names = NULL;
  const char** texts = NULL;
  uint32_t count = 0, *sizes = NULL;
  JPP_RETURN_IF_ERROR(get_array(r, axes, "names", &names, &contents->num_axes));
  JPP_RETURN_IF_ERROR(get_ids(r, axes, "sizes", &count, &sizes));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, contents->num_axes, &texts));
  if (count != (uint64_t)ranks * contents->num_axes) {
    return malformed(r, "axes", "a size of each on each rank");
  }
  for (uint32_t a = 0; a < contents->num_axes; ++a) {
    const char* name = json_string_value(json_array_get(names, a));
    if (!name) return malformed(r, "axes", "names");
    JPP_RETURN_IF_ERROR(jpp__arena_strdup(&r->storage->arena, name, &texts[a]));
  }
  contents->axis_names = texts;
  contents->axis_sizes = sizes;
  return NULL;
}

// Checked before planning: the file must have devices for exactly this number of ranks.
static jpp_status_t* read_devices(reader_t* r) {
  jpp_planfile_contents_t* contents = &r->storage->file.contents;
  uint32_t ranks = 0, count = 0, *ids = NULL;
  JPP_RETURN_IF_ERROR(get_text(r, r->header, "platform", &contents->platform));
  JPP_RETURN_IF_ERROR(get_text(r, r->header, "format", &contents->format));
  JPP_RETURN_IF_ERROR(get_u32(r, r->header, "ranks", &ranks));
  JPP_RETURN_IF_ERROR(
      get_u32(r, r->header, "devices_per_rank", &contents->devices_per_rank));
  JPP_RETURN_IF_ERROR(
      get_u32(r, r->header, "steps_in_flight", &contents->steps_in_flight));
  JPP_RETURN_IF_ERROR(get_ids(r, r->header, "device_ids", &count, &ids));
  if (!count || count != (uint64_t)ranks * contents->devices_per_rank) {
    return malformed(r, "device_ids", "as many as ranks times devices_per_rank");
  }
  contents->device_ids = (const int32_t*)ids;
  return read_axes(r, ranks);
}

static jpp_status_t* read_layouts(reader_t* r) {
  const jpp_graph_t* graph = r->storage->graph;
  jpp_planfile_contents_t* contents = &r->storage->file.contents;
  jpp_planfile_layout_t* layouts = NULL;
  if (!json_is_true(json_object_get(r->header, "layouts"))) return NULL;
  uint64_t count = (uint64_t)graph->num_args + graph->num_outputs;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, count, &layouts));
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t ndim = jpp__planfile_type(graph, i)->ndim;
    JPP_RETURN_IF_ERROR(take_i64s(r, ndim, &layouts[i].dims));
    JPP_RETURN_IF_ERROR(
        take_i64s(r, ndim * contents->devices_per_rank, &layouts[i].starts));
  }
  contents->layouts = layouts;
  return NULL;
}

static jpp_status_t* read_task_modules(reader_t* r) {
  uint32_t count = 0, *ids = NULL;
  JPP_RETURN_IF_ERROR(get_ids(r, r->header, "task_modules", &count, &ids));
  if (count != r->storage->planned->staged->num_tasks) {
    return malformed(r, "task_modules", "one for each task");
  }
  r->storage->file.contents.task_modules = ids;
  return NULL;
}

static jpp_status_t* read_shard_dims(reader_t* r) {
  const jpp_staged_t* staged = r->storage->planned->staged;
  const json_t* list = NULL;
  const uint64_t** table = NULL;
  uint32_t count = 0;
  JPP_RETURN_IF_ERROR(get_array(r, r->header, "shard_dims", &list, &count));
  if (count != staged->num_tasks) return malformed(r, "shard_dims", "one for each task");
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, count, &table));
  for (uint32_t t = 0; t < count; ++t) {
    const json_t* row = json_array_get(list, t);
    uint32_t expected = jpp__planfile_count_dims(staged, &staged->tasks[t]);
    uint64_t* dims = NULL;
    if (json_is_null(row)) continue;
    if (json_array_size(row) != expected) {
      return malformed(r, "shard_dims",
                       "a number for each dimension of a task's results");
    }
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&r->storage->arena, expected, &dims));
    for (uint32_t i = 0; i < expected; ++i) {
      JPP_RETURN_IF_ERROR(
          read_number(r, json_array_get(row, i), "shard_dims", INT64_MAX, &dims[i]));
    }
    table[t] = dims;
  }
  r->storage->file.contents.shard_dims = table;
  return NULL;
}

static jpp_status_t* read_contents(reader_t* r) {
  jpp_planfile_contents_t* contents = &r->storage->file.contents;
  JPP_RETURN_IF_ERROR(read_devices(r));
  JPP_RETURN_IF_ERROR(read_plan(r));
  JPP_RETURN_IF_ERROR(read_task_modules(r));
  JPP_RETURN_IF_ERROR(read_shard_dims(r));
  JPP_RETURN_IF_ERROR(read_layouts(r));
  JPP_RETURN_IF_ERROR(get_blob(r, "compile_options", &contents->compile_options));
  JPP_RETURN_IF_ERROR(
      get_blobs(r, "modules", &contents->num_modules, &contents->modules));
  JPP_RETURN_IF_ERROR(
      get_blobs(r, "constants", &contents->num_constants, &contents->constants));
  JPP_RETURN_IF_ERROR(get_blob(r, "front", &contents->front));
  if (r->at != r->storage->size)
    return malformed(r, "the end", "no bytes behind the plan");
  jpp_status_t* status = jpp__planfile_check(contents);
  if (!status || jpp_status_code(status) == JPP_OUT_OF_MEMORY) return status;
  jpp_status_t* parse = jpp_status_make(JPP_PARSE_ERROR, "plan file %s: %s", r->path,
                                        jpp_status_message(status));
  jpp_status_free(status);
  return parse;
}

static jpp_status_t* read_storage(storage_t* storage) {
  reader_t r = {.storage = storage, .path = storage->file.path};
  char maker[JPP_PLANFILE_MAKER_SIZE];
  JPP_RETURN_IF_ERROR(check_magic(r.path, storage->bytes, storage->size));
  JPP_RETURN_IF_ERROR(check_head(r.path, storage->bytes, storage->size));
  JPP_RETURN_IF_ERROR(check_hash(storage));
  copy_maker(storage->bytes, maker);
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(&storage->arena, maker, &storage->file.maker));
  storage->file.contents.struct_size = sizeof(storage->file.contents);
  jpp_planfile_bytes_t header;
  json_t* json = NULL;
  r.at = JPP_PLANFILE_HEAD_SIZE;
  uint64_t size = jpp__planfile_get(storage->bytes + JPP_PLANFILE_HEADER_SIZE_AT, 8);
  JPP_RETURN_IF_ERROR(take_blob(&r, "header", size, &header));
  JPP_RETURN_IF_ERROR(jpp__json_read(r.path, header.data, header.size, &json));
  r.header = json;
  jpp_status_t* status = read_contents(&r);
  json_decref(json);
  return status;
}

// --- Files ----------------------------------------------------------------------------

void jpp_planfile_destroy(jpp_planfile_t* file) {
  if (!file) return;
  storage_t* storage = (storage_t*)file;
  jpp_planned_destroy(storage->planned);
  for (uint32_t l = 0; storage->schedules && l < storage->graph->num_loops; ++l) {
    jpp_schedule_destroy(storage->schedules[l]);
  }
  jpp_graph_destroy(storage->graph);
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage->bytes);
  jpp_free(storage);
}

// Allocates storage with room for `size` bytes.
static jpp_status_t* create_storage(const char* path, size_t size,
                                    storage_t** out_storage) {
  storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp__arena_init(&storage->arena);
  storage->size = size;
  jpp_status_t* status = jpp__arena_strdup(&storage->arena, path, &storage->file.path);
  if (!status) status = jpp_alloc(size, (void**)&storage->bytes);
  if (status) {
    jpp_planfile_destroy(&storage->file);
    return jpp_status_annotate(status, "plan file %s", path);
  }
  *out_storage = storage;
  return NULL;
}

// Takes over the storage.
static jpp_status_t* finish_storage(storage_t* storage, jpp_planfile_t** out_file) {
  jpp_status_t* status = read_storage(storage);
  if (status) {
    jpp_planfile_destroy(&storage->file);
    return status;
  }
  *out_file = &storage->file;
  return NULL;
}

jpp_status_t* jpp_planfile_read(const char* path, const void* bytes, size_t size,
                                jpp_planfile_t** out_file) {
  JPP_RETURN_IF_NULL(path, bytes, out_file);
  storage_t* storage = NULL;
  *out_file = NULL;
  JPP_RETURN_IF_ERROR(create_storage(path, size, &storage));
  if (size) memcpy(storage->bytes, bytes, size);
  return finish_storage(storage, out_file);
}

static jpp_status_t* not_readable(const char* path, const char* why) {
  return jpp_status_make(JPP_INVALID_ARGUMENT, "plan file %s: cannot be read: %s", path,
                         why);
}

// Reads the head first, so that a large file of another kind is not read completely.
static jpp_status_t* read_file(FILE* stream, const char* path, storage_t** out_storage) {
  unsigned char head[JPP_PLANFILE_HEAD_SIZE];
  struct stat info;
  if (fstat(fileno(stream), &info) != 0) return not_readable(path, strerror(errno));
  if (!S_ISREG(info.st_mode)) return not_readable(path, "it is not a regular file");
  size_t got = fread(head, 1, sizeof(head), stream);
  if (ferror(stream)) return not_readable(path, strerror(errno));
  JPP_RETURN_IF_ERROR(check_magic(path, head, got));
  JPP_RETURN_IF_ERROR(check_head(path, head, (uint64_t)info.st_size));
  JPP_RETURN_IF_ERROR(create_storage(path, (size_t)info.st_size, out_storage));
  unsigned char* bytes = (*out_storage)->bytes;
  memcpy(bytes, head, sizeof(head));
  size_t rest = (*out_storage)->size - sizeof(head);
  errno = 0;
  if (fread(bytes + sizeof(head), 1, rest, stream) == rest) return NULL;
  return not_readable(path, ferror(stream) ? strerror(errno) : "it became shorter");
}

jpp_status_t* jpp_planfile_load(const char* path, jpp_planfile_t** out_file) {
  JPP_RETURN_IF_NULL(path, out_file);
  *out_file = NULL;
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  int descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  FILE* stream = descriptor < 0 ? NULL : fdopen(descriptor, "rb");
  if (!stream) {
    jpp_status_t* status = not_readable(path, strerror(errno));
    if (descriptor >= 0) close(descriptor);
    return status;
  }
  storage_t* storage = NULL;
  jpp_status_t* status = read_file(stream, path, &storage);
  fclose(stream);
  if (!status) return finish_storage(storage, out_file);
  if (storage) jpp_planfile_destroy(&storage->file);
  return status;
}
