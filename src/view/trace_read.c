// Reads traces and writes them again: the traces that the processes of a job took of the
// same steps, one or more, become one.
//
// The processes' clocks align their traces on one axis: CLOCK_REALTIME, which is the same
// within a host, and differs between hosts as much as their clocks do.
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/json.h"
#include "base/null.h"
#include "jaxpp/view.h"
#include "view/chrome.h"

static const double kMostTime = 1e15;  // 31 years of microseconds

typedef struct read_spans {
  jpp_spans_t base;
  json_t** roots;  // [num_roots] they own the names
  uint32_t num_roots;
  const char* titled;  // the name of the text that gave the title
} read_spans_t;

// --- One text -------------------------------------------------------------------------

static bool is_time(double time, double least) {
  return time >= least && time <= kMostTime;
}

static uint32_t number_or_none(const json_t* number) {
  json_int_t value = json_is_integer(number) ? json_integer_value(number) : -1;
  return value >= 0 && value < JPP_NONE ? (uint32_t)value : JPP_NONE;
}

static json_t* events_of(json_t* root) {
  return json_is_array(root) ? root : json_object_get(root, "traceEvents");
}

static jpp_task_kind_t kind_of(const char* name) {
  // "bwd_i_2" also begins with "bwd", so longer names come first.
  static const jpp_task_kind_t kLongestFirst[] = {JPP_TASK_FWD, JPP_TASK_BWD_I,
                                                  JPP_TASK_BWD_W, JPP_TASK_BWD};
  for (size_t i = 0; i < sizeof(kLongestFirst) / sizeof(*kLongestFirst); ++i) {
    const char* kind = jpp_task_kind_name(kLongestFirst[i]);
    if (!strncmp(name, kind, strlen(kind))) return kLongestFirst[i];
  }
  return JPP_TASK_OUTER;
}

static bool has_phase(const json_t* event, const char* wanted) {
  const char* phase = json_string_value(json_object_get(event, "ph"));
  return phase && !strcmp(phase, wanted);
}

// Adds the event `index` of a text, if it is a run of a task; `offset`, in microseconds,
// is added to the text's times.
static jpp_status_t* add_event(const char* file, size_t index, const json_t* event,
                               double offset, read_spans_t* read) {
  const char* name = json_string_value(json_object_get(event, "name"));
  const json_t* args = json_object_get(event, "args");
  if (!has_phase(event, "X") || !name) return NULL;
  double start = json_number_value(json_object_get(event, "ts")) + offset;
  double duration = json_number_value(json_object_get(event, "dur"));
  jpp_span_t span = {.name = name,
                     .kind = kind_of(name),
                     .rank = number_or_none(json_object_get(event, "tid")),
                     .stage = number_or_none(json_object_get(args, "stage")),
                     .microbatch = number_or_none(json_object_get(args, "microbatch")),
                     .start = start / 1000,
                     .end = (start + duration) / 1000};
  if (span.rank == JPP_NONE || !is_time(start, -kMostTime) || !is_time(duration, 0)) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:1: traceEvents[%zu], '%.60s': expected a rank as tid, and "
                           "ts and dur (at least 0) of at most %g microseconds",
                           file, index, name, kMostTime);
  }
  jpp_spans_t* spans = &read->base;
  if (!spans->count || span.start < spans->begin) spans->begin = span.start;
  if (!spans->count || span.end > spans->end) spans->end = span.end;
  ((jpp_span_t*)spans->spans)[spans->count++] = span;
  return NULL;
}

// The name of the step, if the event has it, otherwise NULL.
static const char* title_of(const json_t* event) {
  const char* name = json_string_value(json_object_get(event, "name"));
  if (!has_phase(event, "M") || !name || strcmp(name, "process_name") != 0) return NULL;
  return json_string_value(json_object_get(json_object_get(event, "args"), "name"));
}

static jpp_status_t* check_title(const char* file, const char* title,
                                 read_spans_t* read) {
  if (!read->base.title) {
    read->base.title = title;
    read->titled = file;
    return NULL;
  }
  if (!title || !strcmp(title, read->base.title)) return NULL;
  return jpp_status_make(
      JPP_PARSE_ERROR,
      "%s is a trace of '%.60s', %s of '%.60s'; expected the same step "
      "of each process",
      read->titled, read->base.title, file, title);
}

static jpp_status_t* add_text(const char* file, const json_t* events, int64_t nanoseconds,
                              read_spans_t* read) {
  size_t before = read->base.count;
  const char* title = NULL;
  for (size_t i = 0; i < json_array_size(events); ++i) {
    const json_t* event = json_array_get(events, i);
    if (!title) title = title_of(event);
    JPP_RETURN_IF_ERROR(add_event(file, i, event, (double)nanoseconds / 1e3, read));
  }
  if (read->base.count == before) {
    return jpp_status_make(JPP_PARSE_ERROR, "%s:1: expected traceEvents with ph \"X\"",
                           file);
  }
  return check_title(file, title, read);
}

// --- Several texts -------------------------------------------------------------------

static json_int_t note_of(const json_t* root, const char* name) {
  return json_integer_value(json_object_get(json_object_get(root, "otherData"), name));
}

// Checks that the text can be joined with others.
static jpp_status_t* check_notes(const char* file, const json_t* root) {
  if (note_of(root, "clock_ns") > 0 && note_of(root, "step") > 0) return NULL;
  return jpp_status_make(
      JPP_PARSE_ERROR,
      "%s:1: expected step and clock_ns in otherData, by which traces of several "
      "steps and processes are joined: it was not written by trace_json() of a step",
      file);
}

// A text that has runs of a rank, from this step on.
typedef struct rank_text {
  uint32_t rank, text;
  json_int_t step;
} rank_text_t;

static int compare_rank_texts(const void* left, const void* right) {
  const rank_text_t *a = left, *b = right;
  if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
  if (a->step != b->step) return a->step < b->step ? -1 : 1;
  return (a->text > b->text) - (a->text < b->text);
}

// Checks that only one text has runs of a rank and step.
static jpp_status_t* check_single(const jpp_trace_text_t* texts, const rank_text_t* list,
                                  size_t count) {
  for (size_t i = 1; i < count; ++i) {
    const rank_text_t *a = &list[i - 1], *b = &list[i];
    if (a->rank != b->rank || a->step != b->step) continue;
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s and %s both have runs of rank %u in step %lld; expected "
                           "traces of different ranks of one job, or of different steps: "
                           "give each trace once, and none of an earlier job",
                           texts[a->text].name, texts[b->text].name, b->rank,
                           (long long)b->step);
  }
  return NULL;
}

// Checks that two ranks have the same steps, [num_a] and [num_b].
static jpp_status_t* check_same_steps(const jpp_trace_text_t* texts, const rank_text_t* a,
                                      size_t num_a, const rank_text_t* b, size_t num_b) {
  size_t both = num_a < num_b ? num_a : num_b, same = 0;
  while (same < both && a[same].step == b[same].step) ++same;
  if (same < both) {
    return jpp_status_make(
        JPP_PARSE_ERROR,
        "%s begins with step %lld, %s with step %lld; expected the same "
        "steps of each process",
        texts[a[same].text].name, (long long)a[same].step, texts[b[same].text].name,
        (long long)b[same].step);
  }
  if (num_a == num_b) return NULL;
  const rank_text_t* more = num_a > num_b ? &a[same] : &b[same];
  return jpp_status_make(JPP_PARSE_ERROR,
                         "%s has step %lld of rank %u; expected a trace of that step of "
                         "rank %u, too: the same steps of each process",
                         texts[more->text].name, (long long)more->step, more->rank,
                         num_a > num_b ? b->rank : a->rank);
}

// How many entries at the front of the list have the same rank.
static size_t count_of_rank(const rank_text_t* list, size_t count) {
  size_t same = 0;
  while (same < count && list[same].rank == list[0].rank) ++same;
  return same;
}

static jpp_status_t* check_steps(const jpp_trace_text_t* texts, const rank_text_t* list,
                                 size_t count) {
  size_t of_first = count_of_rank(list, count), of_next = 0;
  for (size_t begin = of_first; begin < count; begin += of_next) {
    const rank_text_t* next = &list[begin];
    of_next = count_of_rank(next, count - begin);
    JPP_RETURN_IF_ERROR(check_same_steps(texts, list, of_first, next, of_next));
  }
  return NULL;
}

// Checks that all ranks ran the same steps, and that no two texts have runs of the same
// rank and step. The runs of text t, which are not sorted yet, end at ends[t].
static jpp_status_t* check_ranks(const jpp_trace_text_t* texts, const size_t* ends,
                                 const read_spans_t* read) {
  rank_text_t* list = NULL;
  size_t count = 0;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(read->base.count, &list));
  for (uint32_t text = 0; text < read->num_roots; ++text) {
    rank_text_t row = {.text = text, .step = note_of(read->roots[text], "step")};
    for (size_t i = text ? ends[text - 1] : 0; i < ends[text]; ++i) {
      row.rank = read->base.spans[i].rank;
      list[i] = row;
    }
  }
  qsort(list, read->base.count, sizeof(*list), compare_rank_texts);
  for (size_t i = 0; i < read->base.count; ++i) {
    if (!i || compare_rank_texts(&list[i], &list[i - 1])) list[count++] = list[i];
  }
  jpp_status_t* status = check_single(texts, list, count);
  if (!status) status = check_steps(texts, list, count);
  jpp_free(list);
  return status;
}

static jpp_status_t* parse_texts(const jpp_trace_text_t* texts, uint32_t count,
                                 read_spans_t* read) {
  size_t events = 0;
  jpp_span_t* spans = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &read->roots));
  for (uint32_t i = 0; i < count; ++i) {
    json_t** root = &read->roots[i];
    JPP_RETURN_IF_ERROR(
        jpp__json_read(texts[i].name, texts[i].text, texts[i].length, root));
    ++read->num_roots;
    events += json_array_size(events_of(*root));
  }
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(events, &spans));
  read->base.spans = spans;
  return NULL;
}

static int compare_spans(const void* left, const void* right) {
  const jpp_span_t *a = left, *b = right;
  if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
  return (a->start > b->start) - (a->start < b->start);
}

static jpp_status_t* add_texts(const jpp_trace_text_t* texts, uint32_t count,
                               read_spans_t* read) {
  size_t* ends = NULL;
  jpp_status_t* status = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &ends));
  for (uint32_t i = 0; i < count && !status; ++i) {
    json_t* root = read->roots[i];
    int64_t offset = note_of(root, "clock_ns") - read->base.clock;
    status = add_text(texts[i].name, events_of(root), offset, read);
    ends[i] = read->base.count;
  }
  if (!status && count > 1) status = check_ranks(texts, ends, read);
  jpp_free(ends);
  return status;
}

static jpp_status_t* read_texts(const jpp_trace_text_t* texts, uint32_t count,
                                read_spans_t* read) {
  jpp_spans_t* spans = &read->base;
  JPP_RETURN_IF_ERROR(parse_texts(texts, count, read));
  for (uint32_t i = 0; i < count; ++i) {
    const json_t* root = read->roots[i];
    if (count > 1) JPP_RETURN_IF_ERROR(check_notes(texts[i].name, root));
    json_int_t clock = note_of(root, "clock_ns"), step = note_of(root, "step");
    if (!i || clock < spans->clock) spans->clock = clock;
    if (step < 0) step = 0;
    if (!i || (uint64_t)step < spans->step) spans->step = (uint64_t)step;
  }
  JPP_RETURN_IF_ERROR(add_texts(texts, count, read));
  if (!spans->title) spans->title = texts[0].name;
  // A trace without duration is still drawn, on an axis of one microsecond.
  if (spans->end <= spans->begin) spans->end = spans->begin + 1e-3;
  qsort((void*)spans->spans, spans->count, sizeof(*spans->spans), compare_spans);
  return NULL;
}

jpp_status_t* jpp_spans_read(const jpp_trace_text_t* texts, uint32_t count,
                             jpp_spans_t** out_spans) {
  JPP_RETURN_IF_NULL(texts, out_spans);
  for (uint32_t i = 0; i < count; ++i) JPP_RETURN_IF_NULL(texts[i].text);
  read_spans_t* read = NULL;
  *out_spans = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &read));
  jpp_status_t* status = read_texts(texts, count, read);
  if (status) {
    jpp_spans_destroy(&read->base);
  } else {
    *out_spans = &read->base;
  }
  return status;
}

void jpp_spans_destroy(jpp_spans_t* spans) {
  read_spans_t* read = (read_spans_t*)spans;
  if (!read) return;
  for (uint32_t i = 0; i < read->num_roots; ++i) json_decref(read->roots[i]);
  jpp_free(read->roots);
  jpp_free((void*)spans->spans);
  jpp_free(read);
}

bool jpp_spans_is_trace(const char* text) {
  char first = text[strspn(text, " \n\r\t")];
  return first == '{' || first == '[';
}

// --- Writing --------------------------------------------------------------------

jpp_status_t* jpp_spans_to_json(const jpp_spans_t* spans, char** out_text) {
  JPP_RETURN_IF_NULL(spans, out_text);
  jpp_str_t str = {0};
  jpp__chrome_begin(spans->step, spans->clock, &str);
  jpp__chrome_append_process(spans->title, 0, &str);
  for (size_t i = 0; i < spans->count; ++i) {
    uint32_t rank = spans->spans[i].rank;
    if (!i || spans->spans[i - 1].rank != rank) jpp__chrome_append_rank(0, rank, &str);
  }
  for (size_t i = 0; i < spans->count; ++i) {
    const jpp_span_t* span = &spans->spans[i];
    jpp_chrome_event_t event = {.name = span->name,
                                .kind = span->kind,
                                .rank = span->rank,
                                .start = span->start * 1e3,
                                .duration = (span->end - span->start) * 1e3,
                                .stage = span->stage,
                                .microbatch = span->microbatch};
    jpp__chrome_append_event(&event, &str);
  }
  jpp__chrome_end(&str);
  return jpp_str_finish(&str, out_text);
}
