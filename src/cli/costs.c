// --costs FILE: the times of a stage's tasks, from lines or from a measured step.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/file.h"

typedef struct costs_reader {
  const char* file;
  uint32_t stages;
  jpp_cost_t* costs;  // [stages]
  uint32_t* lines;    // [stages] the line with the stage's costs; 0: not seen yet
  uint32_t line;      // from 1
} costs_reader_t;

// --- Lines ----------------------------------------------------------------------------

// Reads the next word of a line into `word`; returns false at the end of the line, or if
// there is no room.
static bool next_word(const char** at, char* word, size_t size) {
  *at += strspn(*at, " \t\r");
  size_t length = strcspn(*at, " \t\r");
  if (!length || length >= size) return false;
  memcpy(word, *at, length);
  word[length] = 0;
  *at += length;
  return true;
}

static bool read_stage(const char** at, uint32_t stages, uint32_t* out_stage) {
  char word[16], *end = NULL;
  if (!next_word(at, word, sizeof(word)) || *word < '0' || *word > '9') return false;
  unsigned long stage = strtoul(word, &end, 10);
  *out_stage = (uint32_t)stage;
  return !*end && stage < stages;
}

static bool read_cost(const char** at, double* out_cost) {
  char word[64], *end = NULL;
  if (!next_word(at, word, sizeof(word))) return false;
  *out_cost = strtod(word, &end);
  return !*end && isfinite(*out_cost) && *out_cost >= 0;
}

static bool read_fields(const char* at, uint32_t stages, uint32_t* out_stage,
                        jpp_cost_t* out_cost) {
  return read_stage(&at, stages, out_stage) && read_cost(&at, &out_cost->forward) &&
         read_cost(&at, &out_cost->backward) && read_cost(&at, &out_cost->weight) &&
         !at[strspn(at, " \t\r")];
}

static jpp_status_t* read_line(costs_reader_t* reader, char* line) {
  uint32_t stage = 0;
  jpp_cost_t cost;
  char* comment = strchr(line, '#');
  if (comment) *comment = 0;
  if (!line[strspn(line, " \t\r")]) return NULL;
  if (!read_fields(line, reader->stages, &stage, &cost)) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:%u: expected 'STAGE F B W' with a stage below %u and "
                           "numbers of at least 0, found '%.60s'",
                           reader->file, reader->line, reader->stages, line);
  }
  if (reader->lines[stage]) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:%u: stage %u has its costs in line %u already; expected a "
                           "line for each of %u stages",
                           reader->file, reader->line, stage, reader->lines[stage],
                           reader->stages);
  }
  reader->lines[stage] = reader->line;
  reader->costs[stage] = cost;
  return NULL;
}

// Lines "STAGE F B W"; '#' begins a comment.
static jpp_status_t* read_lines(costs_reader_t* reader, char* text, size_t length) {
  for (char *at = text, *end = text + length; at < end;) {
    size_t size = strcspn(at, "\n");
    ++reader->line;
    if (at + size < end && !at[size]) {
      return jpp_status_make(JPP_PARSE_ERROR, "%s:%u: expected text, found a NUL byte",
                             reader->file, reader->line);
    }
    at[size] = 0;
    JPP_RETURN_IF_ERROR(read_line(reader, at));
    at += size + 1;
  }
  for (uint32_t s = 0; s < reader->stages; ++s) {
    if (reader->lines[s]) continue;
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:%u: the file ends without costs of stage %u; expected a "
                           "line for each of %u stages",
                           reader->file, reader->line ? reader->line : 1, s,
                           reader->stages);
  }
  return NULL;
}

// --- A measured step ------------------------------------------------------------------

// Of a task, which may be divided into parts.
typedef struct mean {
  double sum;      // ms, of all parts
  uint32_t count;  // of first parts
} mean_t;

typedef struct stage_means {
  mean_t forward, whole, input, weight;
} stage_means_t;

// NULL for a task that belongs to no stage.
static mean_t* mean_of(stage_means_t* means, jpp_task_kind_t kind) {
  switch (kind) {
    case JPP_TASK_FWD:
      return &means->forward;
    case JPP_TASK_BWD:
      return &means->whole;
    case JPP_TASK_BWD_I:
      return &means->input;
    case JPP_TASK_BWD_W:
      return &means->weight;
    case JPP_TASK_IDLE:
    case JPP_TASK_OUTER:
    case JPP_TASK_KIND_COUNT:
      break;
  }
  return NULL;
}

static double milliseconds(const mean_t* mean) {
  return mean->count ? mean->sum / mean->count : 0;
}

// A whole backward counts half as input gradient.
static jpp_status_t* set_cost(const costs_reader_t* reader, uint32_t stage,
                              const stage_means_t* means) {
  // The forward may be part of the backward's task.
  if (!means->forward.count && !means->whole.count && !means->input.count) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:1: the trace has no task of stage %u; expected a step "
                           "of %u stages",
                           reader->file, stage, reader->stages);
  }
  double half = milliseconds(&means->whole) / 2;
  jpp_cost_t* cost = &reader->costs[stage];
  cost->forward = milliseconds(&means->forward);
  cost->backward = means->input.count ? milliseconds(&means->input) : half;
  cost->weight = means->weight.count ? milliseconds(&means->weight) : half;
  return NULL;
}

static jpp_status_t* add_spans(const costs_reader_t* reader, const jpp_spans_t* trace,
                               stage_means_t* means) {
  for (size_t i = 0; i < trace->count; ++i) {
    const jpp_span_t* span = &trace->spans[i];
    jpp_task_kind_t kind = (jpp_task_kind_t)span->kind;
    if (span->stage == JPP_NONE || kind == JPP_TASK_OUTER) continue;
    if (span->stage >= reader->stages) {
      return jpp_status_make(
          JPP_PARSE_ERROR,
          "%s:1: the trace has stage %u (%.60s), the schedule stages 0 "
          "to %u",
          reader->file, span->stage, span->name, reader->stages - 1);
    }
    mean_t* mean = mean_of(&means[span->stage], kind);
    if (!mean) continue;
    mean->sum += span->end - span->start;
    mean->count += !strstr(span->name, "_part");
  }
  return NULL;
}

static jpp_status_t* read_means(const costs_reader_t* reader, const jpp_spans_t* trace,
                                stage_means_t* means, bool* out_halved) {
  JPP_RETURN_IF_ERROR(add_spans(reader, trace, means));
  for (uint32_t s = 0; s < reader->stages; ++s) {
    JPP_RETURN_IF_ERROR(set_cost(reader, s, &means[s]));
    if (means[s].whole.count && !means[s].input.count) *out_halved = true;
  }
  return NULL;
}

static jpp_status_t* read_trace(const costs_reader_t* reader, const char* text,
                                size_t length, bool* out_halved) {
  jpp_trace_text_t source = {.name = reader->file, .text = text, .length = length};
  jpp_spans_t* trace = NULL;
  stage_means_t* means = NULL;
  jpp_status_t* status = jpp_spans_read(&source, 1, &trace);
  if (!status) status = JPP_ALLOC_ARRAY(reader->stages, &means);
  if (!status) status = read_means(reader, trace, means, out_halved);
  jpp_free(means);
  jpp_spans_destroy(trace);
  return status;
}

jpp_status_t* jpp_cli_read_costs(const char* file, uint32_t stages,
                                 jpp_cost_t** out_costs, bool* out_halved) {
  *out_costs = NULL;
  *out_halved = false;
  char* text = NULL;
  size_t length = 0;
  costs_reader_t reader = {.file = file, .stages = stages};
  JPP_RETURN_IF_ERROR(jpp_file_read(file, &text, &length));
  jpp_status_t* status = JPP_ALLOC_ARRAY(stages, &reader.costs);
  if (!status) status = JPP_ALLOC_ARRAY(stages, &reader.lines);
  if (!status) {
    status = jpp_spans_is_trace(text) ? read_trace(&reader, text, length, out_halved)
                                      : read_lines(&reader, text, length);
  }
  jpp_text_free(text);
  jpp_free(reader.lines);
  if (status) {
    jpp_free(reader.costs);
    return status;
  }
  *out_costs = reader.costs;
  return NULL;
}
