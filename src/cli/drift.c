// jaxpp drift: where a predicted step and a measured one part.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/trace.h"

typedef struct pair {
  const jpp_cli_event_t* predicted;
  const jpp_cli_event_t* measured;
} pair_t;

typedef struct pairs {
  pair_t* data;  // [count]
  size_t count;
} pairs_t;

static int by_name(const void* a, const void* b) {
  const jpp_cli_event_t* x = *(const jpp_cli_event_t* const*)a;
  const jpp_cli_event_t* y = *(const jpp_cli_event_t* const*)b;
  int order = strcmp(x->name, y->name);
  return order ? order : (x > y) - (x < y);
}

// The trace's events, the first of each name, sorted by it.
static jpp_status_t* index_names(const jpp_cli_trace_t* trace,
                                 const jpp_cli_event_t*** out_index, size_t* out_count) {
  const jpp_cli_event_t** index = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(trace->num_events, &index));
  for (size_t i = 0; i < trace->num_events; ++i) index[i] = &trace->events[i];
  qsort((void*)index, trace->num_events, sizeof(*index), by_name);
  *out_count = 0;
  for (size_t i = 0; i < trace->num_events; ++i) {
    if (i && !strcmp(index[i]->name, index[*out_count - 1]->name)) continue;
    index[(*out_count)++] = index[i];
  }
  *out_index = index;
  return NULL;
}

static int compare_name(const void* name, const void* event) {
  return strcmp(name, (*(const jpp_cli_event_t* const*)event)->name);
}

// The predicted events, each with the first measured one of its name, where there is any.
static jpp_status_t* match_names(const jpp_cli_trace_t* predicted,
                                 const jpp_cli_trace_t* measured, pairs_t* pairs) {
  const jpp_cli_event_t** index = NULL;
  size_t count = 0;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(predicted->num_events, &pairs->data));
  JPP_RETURN_IF_ERROR(index_names(measured, &index, &count));
  for (size_t i = 0; i < predicted->num_events; ++i) {
    const jpp_cli_event_t* event = &predicted->events[i];
    const jpp_cli_event_t** found =
        bsearch(event->name, (void*)index, count, sizeof(*index), compare_name);
    if (found) pairs->data[pairs->count++] = (pair_t){event, *found};
  }
  jpp_free((void*)index);
  return NULL;
}

static double drift_of(const pair_t* pair) {
  return pair->measured->duration - pair->predicted->duration;
}

static int by_drift(const void* a, const void* b) {
  double x = fabs(drift_of(a)), y = fabs(drift_of(b));
  return (x < y) - (x > y);
}

enum { kMostTasks = 20 };

static void append_tasks(pairs_t* pairs, jpp_str_t* out) {
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

typedef struct rank_times {
  double busy, end;
} rank_times_t;

// Of the events from *at on that are of the rank; *at moves behind them.
static rank_times_t take_rank(const jpp_cli_trace_t* trace, uint32_t rank, size_t* at) {
  rank_times_t times = {0};
  for (; *at < trace->num_events && trace->events[*at].rank == rank; ++*at) {
    const jpp_cli_event_t* event = &trace->events[*at];
    times.busy += event->duration;
    times.end = fmax(times.end, event->start + event->duration - trace->begin);
  }
  return times;
}

// The lowest rank from there on; JPP_NONE behind the last.
static uint32_t next_rank(const jpp_cli_trace_t* trace, size_t at) {
  return at < trace->num_events ? trace->events[at].rank : JPP_NONE;
}

enum { kMostRanks = 64 };

// Busy time and end of each rank that either trace names.
static void append_ranks(const jpp_cli_trace_t* predicted,
                         const jpp_cli_trace_t* measured, jpp_str_t* out) {
  size_t p = 0, m = 0, ranks = 0;
  jpp_str_append(out, "rank  busy predicted   measured  end predicted   measured (ms)\n");
  while (p < predicted->num_events || m < measured->num_events) {
    uint32_t rank = next_rank(predicted, p), other = next_rank(measured, m);
    if (other < rank) rank = other;
    rank_times_t before = take_rank(predicted, rank, &p);
    rank_times_t after = take_rank(measured, rank, &m);
    if (++ranks > kMostRanks) continue;
    jpp_str_appendf(out, "%4u %15.3f %10.3f %14.3f %10.3f\n", rank, before.busy / 1000,
                    after.busy / 1000, before.end / 1000, after.end / 1000);
  }
  if (ranks > kMostRanks) {
    jpp_str_appendf(out, "... and %zu more ranks\n", ranks - kMostRanks);
  }
}

static void append_drift(const jpp_cli_trace_t* predicted,
                         const jpp_cli_trace_t* measured, pairs_t* pairs,
                         jpp_str_t* out) {
  double before = (predicted->end - predicted->begin) / 1000;
  double after = (measured->end - measured->begin) / 1000;
  jpp_str_appendf(out,
                  "makespan: predicted %.3f ms, measured %.3f ms, drift %+.3f ms "
                  "(%+.1f%%)\n%zu of %zu predicted tasks were measured\n",
                  before, after, after - before,
                  before > 0 ? 100 * (after / before - 1) : 0, pairs->count,
                  predicted->num_events);
  append_ranks(predicted, measured, out);
  append_tasks(pairs, out);
}

jpp_status_t* jpp_cli_drift(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_cli_trace_t predicted = {0}, measured = {0};
  pairs_t pairs = {0};
  jpp_status_t* status = jpp_cli_trace_read(options->words[0], &predicted);
  if (!status) status = jpp_cli_trace_read(options->words[1], &measured);
  if (!status) {
    jpp_cli_trace_sort(&predicted);
    jpp_cli_trace_sort(&measured);
  }
  if (!status) status = match_names(&predicted, &measured, &pairs);
  if (!status) append_drift(&predicted, &measured, &pairs, out);
  jpp_free(pairs.data);
  jpp_cli_trace_deinit(&measured);
  jpp_cli_trace_deinit(&predicted);
  return status;
}
