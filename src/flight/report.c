// Aligns the files of a flight recorder and reports which rank waits for which.
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "base/alloc.h"
#include "base/null.h"
#include "base/str.h"
#include "base/utf8.h"
#include "base/vec.h"
#include "flight/waits.h"
#include "jaxpp/flight.h"

// Nanoseconds after which a process counts as silent; a live process records that it is
// alive many times a second.
static const int64_t kSilent = 1000000000;

// A file in memory.
typedef struct flight_file {
  char* name;
  jpp_flight_head_t* head;  // owned; the rest of the file follows it
  const jpp_flight_row_t* rows;
  const jpp_flight_instr_t* instrs;
  const char* texts;
  int64_t last;  // the last sign of life, CLOCK_REALTIME
} flight_file_t;

typedef JPP_VEC(flight_file_t) files_t;

// The file and row that describe a rank.
typedef struct source {
  const flight_file_t* file;  // NULL: none
  const jpp_flight_row_t* row;
} source_t;

typedef struct report {
  files_t files;              // sorted by runtime, process and age, the newest first
  int64_t end;                // the last sign of life of any process of the runtime
  JPP_VEC(source_t) sources;  // by rank
  JPP_VEC(jpp_flight_place_t) places;  // the same
  jpp_str_t* out;
} report_t;

// --- Reading --------------------------------------------------------------------------

static bool is_text(const char* text, uint64_t size) {
  return memchr(text, 0, size) != NULL;
}

static bool rows_are_sound(const flight_file_t* file, uint64_t num_instrs) {
  uint64_t first = 0;
  for (uint32_t r = 0; r < file->head->num_rows; ++r) {
    const jpp_flight_row_t* row = &file->rows[r];
    if (row->first_instr != first || row->at > row->num_instrs) return false;
    first += row->num_instrs;
    if (first > num_instrs) return false;
  }
  return first == num_instrs;
}

static bool instrs_are_sound(const flight_file_t* file, uint64_t num_instrs) {
  for (uint64_t i = 0; i < num_instrs; ++i) {
    const jpp_flight_instr_t* instr = &file->instrs[i];
    uint64_t size = file->head->texts_size;
    if (instr->kind > JPP_FLIGHT_RECV || instr->text >= size) return false;
    if (!is_text(file->texts + instr->text, size - instr->text)) return false;
  }
  return true;
}

// What is wrong with the file, or NULL.
static const char* check_file(flight_file_t* file, uint64_t size) {
  static const char kDamaged[] = "it is damaged or was cut off";
  const jpp_flight_head_t* head = file->head;
  if (size < sizeof(*head)) return kDamaged;
  if (head->magic != kJppFlightMagic) {
    return "expected a flight recorder's file of this version and byte order";
  }
  uint64_t rows = head->num_rows, rest = size - sizeof(*head);
  if (head->size != size || rows > rest / sizeof(jpp_flight_row_t)) return kDamaged;
  rest -= rows * sizeof(jpp_flight_row_t);
  if (head->texts_size > rest) return kDamaged;
  rest -= head->texts_size;
  file->rows = (const jpp_flight_row_t*)(head + 1);
  file->instrs = (const jpp_flight_instr_t*)(file->rows + rows);
  uint64_t num_instrs = rest / sizeof(jpp_flight_instr_t);
  file->texts = (const char*)(file->instrs + num_instrs);
  bool sound = rest % sizeof(jpp_flight_instr_t) == 0 &&
               is_text(head->host, sizeof(head->host)) &&
               is_text(head->failure, sizeof(head->failure)) &&
               rows_are_sound(file, num_instrs) && instrs_are_sound(file, num_instrs);
  return sound ? NULL : kDamaged;
}

static int64_t latest(int64_t a, int64_t b) { return a > b ? a : b; }

static const jpp_flight_note_t* last_note(const jpp_flight_row_t* row) {
  return row->count ? &row->notes[(row->count - 1) % kJppFlightNotes] : NULL;
}

static int64_t last_sign(const flight_file_t* file) {
  const jpp_flight_head_t* head = file->head;
  int64_t last = latest(head->alive, latest(head->failed, head->ended));
  for (uint32_t r = 0; r < head->num_rows; ++r) {
    const jpp_flight_note_t* note = last_note(&file->rows[r]);
    if (note) last = latest(last, note->time);
  }
  return last + head->realtime;
}

static jpp_status_t* read_stream(FILE* stream, flight_file_t* file) {
  struct stat info;
  if (fstat(fileno(stream), &info) != 0 || !S_ISREG(info.st_mode)) {
    return jpp_status_make(JPP_PARSE_ERROR, "expected a regular file");
  }
  uint64_t size = (uint64_t)info.st_size;
  JPP_RETURN_IF_ERROR(jpp_alloc(size < sizeof(*file->head) ? sizeof(*file->head) : size,
                                (void**)&file->head));
  if (fread(file->head, 1, size, stream) != size) {
    return jpp_status_make(JPP_PARSE_ERROR, "it cannot be read");
  }
  const char* wrong = check_file(file, size);
  if (wrong) return jpp_status_make(JPP_PARSE_ERROR, "%s", wrong);
  file->last = last_sign(file);
  return NULL;
}

static jpp_status_t* read_file(const char* folder, const char* name,
                               flight_file_t* file) {
  jpp_str_t path = {0};
  jpp_str_appendf(&path, "%s/%s", folder, name);
  JPP_RETURN_IF_ERROR(jpp_str_finish(&path, &file->name));
  FILE* stream = fopen(file->name, "rbe");
  jpp_status_t* status =
      stream ? read_stream(stream, file)
             : jpp_status_make(JPP_INVALID_ARGUMENT, "%s", strerror(errno));
  if (stream) fclose(stream);
  return status ? jpp_status_annotate(status, "%s", file->name) : NULL;
}

static void free_file(flight_file_t* file) {
  jpp_free(file->name);
  jpp_free(file->head);
}

static bool is_flight(const char* name) {
  const char* suffix = strrchr(name, '.');
  return suffix && strcmp(suffix, ".flight") == 0;
}

static jpp_status_t* read_entries(DIR* entries, const char* folder, files_t* files) {
  for (const struct dirent* entry; (entry = readdir(entries));) {
    if (!is_flight(entry->d_name)) continue;
    flight_file_t file = {0};
    jpp_status_t* status = read_file(folder, entry->d_name, &file);
    if (!status) status = JPP_VEC_PUSH(files, file);
    if (status) {
      free_file(&file);
      return status;
    }
  }
  if (files->count) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "%s: expected files *.flight, which a job with JPP_FLIGHT=%s "
                         "leaves there; found none",
                         folder, folder);
}

static jpp_status_t* read_folder(const char* folder, files_t* files) {
  DIR* entries = opendir(folder);
  if (!entries) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: %s", folder, strerror(errno));
  }
  jpp_status_t* status = read_entries(entries, folder, files);
  closedir(entries);
  return status;
}

static int compare_numbers(int64_t a, int64_t b) { return (a > b) - (a < b); }

static int compare_files(const void* left, const void* right) {
  const jpp_flight_head_t* a = ((const flight_file_t*)left)->head;
  const jpp_flight_head_t* b = ((const flight_file_t*)right)->head;
  int order = compare_numbers(a->runtime, b->runtime);
  if (!order) order = compare_numbers(a->process, b->process);
  return order ? order : compare_numbers(b->begun + b->realtime, a->begun + a->realtime);
}

// --- Ranks ----------------------------------------------------------------------------

static jpp_flight_job_t job_of(const report_t* report) {
  return (jpp_flight_job_t){.places = report->places.data, .count = report->places.count};
}

static const source_t* source_of(const report_t* report,
                                 const jpp_flight_place_t* place) {
  return &report->sources.data[place - report->places.data];
}

static bool is_silent(const report_t* report, const flight_file_t* file) {
  return !file->head->ended && report->end - file->last > kSilent;
}

// --- Text -----------------------------------------------------------------------------

static double seconds_before_end(const report_t* report, int64_t time) {
  return (double)(report->end - time) / 1e9;
}

static void append_time(int64_t realtime, jpp_str_t* out) {
  time_t seconds = (time_t)(realtime / 1000000000);
  struct tm parts;
  char text[32] = "";
  if (gmtime_r(&seconds, &parts)) strftime(text, sizeof(text), "%F %T", &parts);
  jpp_str_appendf(out, "%s.%03d UTC", text, (int)(realtime % 1000000000 / 1000000));
}

static void append_text(const char* text, jpp_str_t* out) {
  jpp_str_append_utf8(out, text, strlen(text));
}

static void append_instr(const report_t* report, const jpp_flight_place_t* place,
                         uint32_t instr) {
  const char* texts = source_of(report, place)->file->texts;
  append_text(texts + place->instrs[instr].text, report->out);
}

static void append_process(const report_t* report, const flight_file_t* file) {
  const jpp_flight_head_t* head = file->head;
  jpp_str_appendf(report->out, "process %u (host ", head->process);
  append_text(head->host, report->out);
  jpp_str_appendf(report->out, ", process id %u): %llu steps called, %llu done",
                  head->pid, (unsigned long long)head->submitted,
                  (unsigned long long)head->finished);
  if (is_silent(report, file)) {
    jpp_str_appendf(report->out, "; silent for the last %.3f s",
                    seconds_before_end(report, file->last));
  }
  if (head->ended) {
    jpp_str_appendf(report->out, "; left %.3f s before the end",
                    seconds_before_end(report, head->ended + head->realtime));
  }
  jpp_str_append(report->out, "\n");
  if (!head->failed) return;
  jpp_str_appendf(report->out, "  failed %.3f s before the end: ",
                  seconds_before_end(report, head->failed + head->realtime));
  append_text(head->failure, report->out);
  jpp_str_append(report->out, "\n");
}

// Appends the rank's activity, if it waits for no other rank.
static void append_state(const report_t* report, const jpp_flight_place_t* place) {
  unsigned long long step = (unsigned long long)place->step;
  const jpp_flight_head_t* head = source_of(report, place)->file->head;
  if (jpp__flight_next_instr(place)) {
    jpp_str_appendf(report->out, "step %llu, ", step);
    append_instr(report, place, place->at);
  } else if (place->step > head->finished) {
    jpp_str_appendf(report->out,
                    "step %llu: all instructions issued, the devices have not finished",
                    step);
  } else {
    jpp_str_appendf(report->out, "between steps, %llu done", step);
  }
}

static void append_other_end(const report_t* report, const jpp_flight_place_t* place,
                             const jpp_flight_instr_t* instr) {
  const jpp_flight_place_t* peer = NULL;
  if (instr->peer < report->places.count) peer = &report->places.data[instr->peer];
  bool receives = instr->kind == JPP_FLIGHT_RECV;
  if (!peer || !peer->known) {
    jpp_str_appendf(report->out, "; there is no file of rank %u", instr->peer);
  } else if (receives) {
    bool sent = jpp__flight_has_sent(peer, instr, place->step);
    jpp_str_appendf(report->out,
                    sent ? "; rank %u has sent it" : "; rank %u has not sent it",
                    instr->peer);
  } else {
    bool full = jpp__flight_is_full(place, peer, instr);
    jpp_str_appendf(report->out,
                    full ? "; rank %u has no free slot" : "; rank %u has a free slot",
                    instr->peer);
  }
}

static void append_rank(const report_t* report, const jpp_flight_place_t* place) {
  const jpp_flight_instr_t* instr = jpp__flight_next_instr(place);
  const source_t* source = source_of(report, place);
  const jpp_flight_note_t* note = last_note(source->row);
  jpp_str_appendf(report->out, "  rank %u: ", source->row->rank);
  append_state(report, place);
  if (instr && instr->kind != JPP_FLIGHT_LOCAL) append_other_end(report, place, instr);
  jpp_str_append(report->out, "\n");
  if (!note || note->instr >= place->num_instrs) return;
  jpp_str_appendf(report->out, "    last issued, %.3f s before the end: ",
                  seconds_before_end(report, note->time + source->file->head->realtime));
  append_instr(report, place, note->instr);
  jpp_str_appendf(report->out, " (step %llu)\n", (unsigned long long)note->step);
}

static void append_way(const report_t* report, const jpp_flight_place_t* place) {
  jpp_flight_job_t job = job_of(report);
  const jpp_flight_place_t* last = jpp__flight_append_way(&job, place, report->out);
  if (!last) {
    jpp_str_append(report->out, ", and so on in a circle\n");
    return;
  }
  jpp_str_appendf(report->out, ", which waits for no other rank: ");
  append_state(report, last);
  jpp_str_appendf(report->out, " (process %u",
                  source_of(report, last)->file->head->process);
  if (last->silent) {
    jpp_str_append(report->out,
                   ", silent: it was killed or stopped, or its machine hangs");
  }
  jpp_str_append(report->out, ")\n");
}

// Chains of waits that are part of another chain are left out.
static bool is_waited_for(const jpp_flight_job_t* job, const jpp_flight_place_t* place) {
  for (size_t r = 0; r < job->count; ++r) {
    const jpp_flight_place_t* other = &job->places[r];
    if (other->known && jpp__flight_waits_for(job, other) == place) return true;
  }
  return false;
}

static void append_waits(const report_t* report) {
  bool some = false;
  jpp_flight_job_t job = job_of(report);
  for (size_t r = 0; r < job.count; ++r) {
    const jpp_flight_place_t* place = &job.places[r];
    if (!place->known || !jpp__flight_waits_for(&job, place)) continue;
    if (is_waited_for(&job, place) && jpp__flight_follow(&job, place)) continue;
    append_way(report, place);
    some = true;
  }
  if (!some) jpp_str_append(report->out, "no rank waits for another one\n");
}

// --- A runtime ------------------------------------------------------------------------

static jpp_status_t* place_rank(report_t* report, const flight_file_t* file,
                                const jpp_flight_row_t* row) {
  enum { kMostRanks = 1 << 20 };
  if (row->rank >= kMostRanks) {
    return jpp_status_make(JPP_PARSE_ERROR, "%s: it is damaged: rank %u", file->name,
                           row->rank);
  }
  while (report->places.count <= row->rank) {
    if (report->sources.count == report->places.count) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&report->sources, (source_t){0}));
    }
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&report->places, (jpp_flight_place_t){0}));
  }
  report->sources.data[row->rank] = (source_t){.file = file, .row = row};
  report->places.data[row->rank] =
      (jpp_flight_place_t){.known = true,
                           .num_instrs = row->num_instrs,
                           .instrs = file->instrs + row->first_instr,
                           .step = row->step,
                           .at = row->at};
  return NULL;
}

// The files [first, end) belong to one runtime; the newest file of each process is used.
static jpp_status_t* report_runtime(report_t* report, size_t first, size_t end) {
  const flight_file_t* files = report->files.data;
  uint32_t processes = 0, older = 0;
  report->sources.count = report->places.count = 0;
  report->end = 0;
  for (size_t f = first; f < end; ++f) {
    if (f > first && files[f].head->process == files[f - 1].head->process) {
      ++older;
      continue;
    }
    ++processes;
    report->end = latest(report->end, files[f].last);
    for (uint32_t r = 0; r < files[f].head->num_rows; ++r) {
      JPP_RETURN_IF_ERROR(place_rank(report, &files[f], &files[f].rows[r]));
    }
  }
  for (size_t r = 0; r < report->places.count; ++r) {
    jpp_flight_place_t* place = &report->places.data[r];
    place->silent = place->known && is_silent(report, report->sources.data[r].file);
  }
  jpp_str_appendf(report->out, "runtime %u: %u processes, until ",
                  files[first].head->runtime, processes);
  append_time(report->end, report->out);
  if (older) jpp_str_appendf(report->out, "; %u older files are not shown", older);
  jpp_str_append(report->out, "\n");
  for (size_t f = first; f < end; ++f) {
    if (f > first && files[f].head->process == files[f - 1].head->process) continue;
    append_process(report, &files[f]);
    for (uint32_t r = 0; r < files[f].head->num_rows; ++r) {
      append_rank(report, &report->places.data[files[f].rows[r].rank]);
    }
  }
  append_waits(report);
  return NULL;
}

static jpp_status_t* report_all(report_t* report) {
  files_t* files = &report->files;
  qsort(files->data, files->count, sizeof(*files->data), compare_files);
  for (size_t first = 0, end; first < files->count; first = end) {
    end = first + 1;
    while (end < files->count &&
           files->data[end].head->runtime == files->data[first].head->runtime) {
      ++end;
    }
    if (first) jpp_str_append(report->out, "\n");
    JPP_RETURN_IF_ERROR(report_runtime(report, first, end));
  }
  return NULL;
}

jpp_status_t* jpp_flight_report(const char* folder, char** out_text) {
  JPP_RETURN_IF_NULL(folder, out_text);
  jpp_str_t out = {0};
  report_t report = {.out = &out};
  *out_text = NULL;
  jpp_status_t* status = read_folder(folder, &report.files);
  if (!status) status = report_all(&report);
  for (size_t f = 0; f < report.files.count; ++f) free_file(&report.files.data[f]);
  jpp_vec_deinit(&report.files);
  jpp_vec_deinit(&report.sources);
  jpp_vec_deinit(&report.places);
  if (!status) status = jpp_str_finish(&out, out_text);
  jpp_str_deinit(&out);
  return status;
}
