// jaxpp drift: shows where a predicted step and a measured one differ.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

// A task of a microbatch, as one: a plan may divide it into parts, such as fwd_0__1 and
// fwd_0_part2__1.
typedef struct task_time {
  const char* name;  // of its first part
  uint32_t rank;
  double duration;  // ms, of all parts
} task_time_t;

typedef struct task_times {
  task_time_t* data;  // [count] by name
  size_t count;
} task_times_t;

typedef struct pair {
  const task_time_t* predicted;
  const task_time_t* measured;
} pair_t;

typedef struct pairs {
  pair_t* data;  // [count]
  size_t count;
} pairs_t;

static double duration_of(const jpp_span_t* span) { return span->end - span->start; }

// Skips "_part" and a number.
static const char* skip_part(const char* at) {
  if (strncmp(at, "_part", 5) != 0) return at;
  size_t digits = strspn(at + 5, "0123456789");
  return digits ? at + 5 + digits : at;
}

// Compares names of tasks; all parts of a task are equal.
static int compare_tasks(const char* a, const char* b) {
  for (;; ++a, ++b) {
    a = skip_part(a);
    b = skip_part(b);
    if (*a != *b || !*a) return (*a > *b) - (*a < *b);
  }
}

static int by_name(const void* a, const void* b) {
  const jpp_span_t* x = *(const jpp_span_t* const*)a;
  const jpp_span_t* y = *(const jpp_span_t* const*)b;
  int order = compare_tasks(x->name, y->name);
  if (!order) order = strcmp(x->name, y->name);
  return order ? order : (x > y) - (x < y);
}

static jpp_status_t* refuse_second_run(const jpp_span_t* span) {
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "rank %u runs %s twice; expected the trace of one step, as "
                         "trace_json() returns it without steps=",
                         span->rank, span->name);
}

// Adds up the parts of each task; if several ranks run it, the first one counts.
static jpp_status_t* add_parts(const jpp_spans_t* trace, task_times_t* times) {
  jpp_status_t* status = NULL;
  const jpp_span_t** index = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(trace->count, &times->data));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(trace->count, &index));
  for (size_t i = 0; i < trace->count; ++i) index[i] = &trace->spans[i];
  qsort((void*)index, trace->count, sizeof(*index), by_name);
  for (size_t i = 0; i < trace->count && !status; ++i) {
    const jpp_span_t* span = index[i];
    task_time_t* last = times->count ? &times->data[times->count - 1] : NULL;
    if (i && !strcmp(index[i - 1]->name, span->name)) {
      if (index[i - 1]->rank == span->rank) status = refuse_second_run(span);
    } else if (last && !compare_tasks(last->name, span->name)) {
      last->duration += duration_of(span);
    } else {
      times->data[times->count++] = (task_time_t){
          .name = span->name, .rank = span->rank, .duration = duration_of(span)};
    }
  }
  jpp_free((void*)index);
  return status;
}

static int compare_name(const void* name, const void* time) {
  return compare_tasks(name, ((const task_time_t*)time)->name);
}

// Pairs each predicted task with the measured one, if there is one.
static jpp_status_t* match_names(const task_times_t* predicted,
                                 const task_times_t* measured, pairs_t* pairs) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(predicted->count, &pairs->data));
  for (size_t i = 0; i < predicted->count; ++i) {
    const task_time_t* found =
        bsearch(predicted->data[i].name, measured->data, measured->count,
                sizeof(*measured->data), compare_name);
    if (found) pairs->data[pairs->count++] = (pair_t){&predicted->data[i], found};
  }
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
                    pair->measured->rank, pair->predicted->duration,
                    pair->measured->duration, drift_of(pair));
  }
  if (pairs->count > kMostTasks) {
    jpp_str_appendf(out, "... and %zu tasks that drift less\n",
                    pairs->count - kMostTasks);
  }
}

typedef struct rank_times {
  double busy, end;
} rank_times_t;

// Sums up the spans of the rank, which begin at *at, and moves *at past them.
static rank_times_t take_rank(const jpp_spans_t* trace, uint32_t rank, size_t* at) {
  rank_times_t times = {0};
  for (; *at < trace->count && trace->spans[*at].rank == rank; ++*at) {
    const jpp_span_t* span = &trace->spans[*at];
    times.busy += duration_of(span);
    times.end = fmax(times.end, span->end - trace->begin);
  }
  return times;
}

// The rank of the next span; JPP_NONE after the last.
static uint32_t next_rank(const jpp_spans_t* trace, size_t at) {
  return at < trace->count ? trace->spans[at].rank : JPP_NONE;
}

enum { kMostRanks = 64 };

// Busy time and end of each rank that either trace names.
static void append_ranks(const jpp_spans_t* predicted, const jpp_spans_t* measured,
                         jpp_str_t* out) {
  size_t p = 0, m = 0, ranks = 0;
  jpp_str_append(out, "rank  busy predicted   measured  end predicted   measured (ms)\n");
  while (p < predicted->count || m < measured->count) {
    uint32_t rank = next_rank(predicted, p), other = next_rank(measured, m);
    if (other < rank) rank = other;
    rank_times_t before = take_rank(predicted, rank, &p);
    rank_times_t after = take_rank(measured, rank, &m);
    if (++ranks > kMostRanks) continue;
    jpp_str_appendf(out, "%4u %15.3f %10.3f %14.3f %10.3f\n", rank, before.busy,
                    after.busy, before.end, after.end);
  }
  if (ranks > kMostRanks) {
    jpp_str_appendf(out, "... and %zu more ranks\n", ranks - kMostRanks);
  }
}

jpp_status_t* jpp_cli_drift(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_spans_t *predicted = NULL, *measured = NULL;
  task_times_t predicted_times = {0}, measured_times = {0};
  pairs_t pairs = {0};
  const char* const* files = options->words;
  jpp_status_t* status = jpp_cli_read_traces(files, 1, &predicted);
  if (!status) {
    status = jpp_cli_read_traces(files + 1, options->num_words - 1, &measured);
  }
  if (!status) {
    status = jpp_status_annotate(add_parts(predicted, &predicted_times), "PREDICTED");
  }
  if (!status) {
    status = jpp_status_annotate(add_parts(measured, &measured_times), "MEASURED");
  }
  if (!status) status = match_names(&predicted_times, &measured_times, &pairs);
  if (!status) {
    double before = predicted->end - predicted->begin;
    double after = measured->end - measured->begin;
    jpp_str_appendf(out,
                    "makespan: predicted %.3f ms, measured %.3f ms, drift %+.3f ms "
                    "(%+.1f%%)\n%zu of %zu predicted tasks were measured\n",
                    before, after, after - before,
                    before > 0 ? 100 * (after / before - 1) : 0, pairs.count,
                    predicted_times.count);
    append_ranks(predicted, measured, out);
    append_tasks(&pairs, out);
  }
  jpp_free(pairs.data);
  jpp_free(measured_times.data);
  jpp_free(predicted_times.data);
  jpp_spans_destroy(measured);
  jpp_spans_destroy(predicted);
  return status;
}
