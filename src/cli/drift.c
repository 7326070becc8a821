// jaxpp drift: where a predicted step and a measured one part.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/vec.h"
#include "cli/cli.h"
#include "cli/json.h"

typedef struct event {
  const char* name;
  uint32_t rank;
  double start, duration;  // microseconds
} event_t;

typedef struct trace {
  json_t* root;
  JPP_VEC(event_t) events;
  double begin, end;
} trace_t;

static jpp_status_t* add_events(json_t* list, trace_t* trace) {
  size_t i;
  json_t* item;
  json_array_foreach(list, i, item) {
    const char* phase = json_string_value(json_object_get(item, "ph"));
    event_t event = {
        .name = json_string_value(json_object_get(item, "name")),
        .rank = (uint32_t)json_integer_value(json_object_get(item, "tid")),
        .start = json_number_value(json_object_get(item, "ts")),
        .duration = json_number_value(json_object_get(item, "dur")),
    };
    if (!phase || strcmp(phase, "X") != 0 || !event.name) continue;
    bool first = !trace->events.count;
    if (first || event.start < trace->begin) trace->begin = event.start;
    double end = event.start + event.duration;
    if (first || end > trace->end) trace->end = end;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&trace->events, event));
  }
  return NULL;
}

static jpp_status_t* read_trace(const char* file, trace_t* trace) {
  char* text = NULL;
  size_t length = 0;
  json_error_t error;
  JPP_RETURN_IF_ERROR(jpp_cli_read_file(file, &text, &length));
  trace->root = json_loadb(text ? text : "", length, 0, &error);
  jpp_free(text);
  if (!trace->root) {
    return jpp_status_make(JPP_PARSE_ERROR, "%s:%d: %s", file, error.line, error.text);
  }
  JPP_RETURN_IF_ERROR(add_events(json_object_get(trace->root, "traceEvents"), trace));
  if (trace->events.count) return NULL;
  return jpp_status_make(JPP_PARSE_ERROR, "%s:1: expected traceEvents with ph \"X\"",
                         file);
}

static void trace_deinit(trace_t* trace) {
  jpp_vec_deinit(&trace->events);
  json_decref(trace->root);
}

typedef struct pair {
  const event_t* predicted;
  const event_t* measured;
} pair_t;

typedef JPP_VEC(pair_t) pair_vec_t;

static jpp_status_t* match(const trace_t* predicted, const trace_t* measured,
                           pair_vec_t* pairs) {
  jpp_map_t names = {0};
  jpp_status_t* status = NULL;
  for (size_t i = 0; i < measured->events.count && !status; ++i) {
    const char* name = measured->events.data[i].name;
    uint32_t length = (uint32_t)strlen(name);
    if (!jpp_map_find(&names, name, length)) {
      status = jpp_map_put(&names, name, length, (uint32_t)i);
    }
  }
  for (size_t i = 0; i < predicted->events.count && !status; ++i) {
    const event_t* event = &predicted->events.data[i];
    uint32_t* found = jpp_map_find(&names, event->name, (uint32_t)strlen(event->name));
    if (!found) continue;
    status = JPP_VEC_PUSH(pairs, (pair_t){event, &measured->events.data[*found]});
  }
  jpp_map_deinit(&names);
  return status;
}

static double drift_of(const pair_t* pair) {
  return pair->measured->duration - pair->predicted->duration;
}

static int by_drift(const void* a, const void* b) {
  double x = fabs(drift_of(a)), y = fabs(drift_of(b));
  return (x < y) - (x > y);
}

enum { kMostTasks = 20 };

static void append_tasks(pair_vec_t* pairs, jpp_str_t* out) {
  qsort(pairs->data, pairs->count, sizeof(pair_t), by_drift);
  jpp_str_append(out,
                 "task                 rank  predicted   measured      drift (ms)\n");
  for (size_t i = 0; i < pairs->count && i < kMostTasks; ++i) {
    const pair_t* pair = &pairs->data[i];
    jpp_str_appendf(out, "%-20s %4u %10.3f %10.3f %+10.3f\n", pair->predicted->name,
                    pair->measured->rank, pair->predicted->duration / 1000,
                    pair->measured->duration / 1000, drift_of(pair) / 1000);
  }
  if (pairs->count > kMostTasks) {
    jpp_str_appendf(out, "... and %zu tasks that drift less\n",
                    pairs->count - kMostTasks);
  }
}

// Busy time and end of each rank.
static void append_ranks(const trace_t* predicted, const trace_t* measured,
                         jpp_str_t* out) {
  uint32_t ranks = 0;
  for (size_t i = 0; i < predicted->events.count; ++i) {
    uint32_t rank = predicted->events.data[i].rank;
    if (rank >= ranks && rank < 1u << 20) ranks = rank + 1;
  }
  jpp_str_append(out, "rank  busy predicted   measured  end predicted   measured (ms)\n");
  const trace_t* traces[] = {predicted, measured};
  for (uint32_t r = 0; r < ranks; ++r) {
    double busy[2] = {0}, end[2] = {0};
    for (uint32_t k = 0; k < 2; ++k) {
      for (size_t i = 0; i < traces[k]->events.count; ++i) {
        const event_t* event = &traces[k]->events.data[i];
        if (event->rank != r) continue;
        busy[k] += event->duration;
        end[k] = fmax(end[k], event->start + event->duration - traces[k]->begin);
      }
    }
    jpp_str_appendf(out, "%4u %15.3f %10.3f %14.3f %10.3f\n", r, busy[0] / 1000,
                    busy[1] / 1000, end[0] / 1000, end[1] / 1000);
  }
}

static void append_drift(const trace_t* predicted, const trace_t* measured,
                         pair_vec_t* pairs, jpp_str_t* out) {
  double before = (predicted->end - predicted->begin) / 1000;
  double after = (measured->end - measured->begin) / 1000;
  jpp_str_appendf(out,
                  "makespan: predicted %.3f ms, measured %.3f ms, drift %+.3f ms "
                  "(%+.1f%%)\n%zu of %zu predicted tasks were measured\n",
                  before, after, after - before,
                  before > 0 ? 100 * (after / before - 1) : 0, pairs->count,
                  predicted->events.count);
  append_ranks(predicted, measured, out);
  append_tasks(pairs, out);
}

jpp_status_t* jpp_cli_drift(const jpp_cli_options_t* options, jpp_str_t* out) {
  trace_t predicted = {0}, measured = {0};
  pair_vec_t pairs = {0};
  jpp_status_t* status = read_trace(options->words[0], &predicted);
  if (!status) status = read_trace(options->words[1], &measured);
  if (!status) status = match(&predicted, &measured, &pairs);
  if (!status) append_drift(&predicted, &measured, &pairs, out);
  jpp_vec_deinit(&pairs);
  trace_deinit(&measured);
  trace_deinit(&predicted);
  return status;
}
