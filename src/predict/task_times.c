// Task times from measured runs. One sweep over the starts and ends of all runs follows
// the `work` of each host (cores.h); a run's time is the amount by which that advanced
// between its start and its end.
#include <stdlib.h>

#include "base/null.h"
#include "predict/cores.h"
#include "predict/machine.h"

typedef struct edge {
  double time;
  uint64_t run;
  bool end;
} edge_t;

static int compare_edges(const void* left, const void* right) {
  const edge_t *a = left, *b = right;
  if (a->time != b->time) return a->time < b->time ? -1 : 1;
  if (a->end != b->end) return a->end - b->end;
  return (a->run > b->run) - (a->run < b->run);
}

static jpp_status_t* check_runs(const jpp_task_run_t* runs, uint64_t num_runs,
                                uint32_t ranks, uint32_t num_tasks) {
  for (uint64_t i = 0; i < num_runs; ++i) {
    const jpp_task_run_t* run = &runs[i];
    bool known = run->rank < ranks && run->task < num_tasks;
    if (known && run->end >= run->start && run->end - run->start <= JPP_LONGEST_TIME) {
      continue;
    }
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "run %llu: expected a rank below %u, a task below %u and an "
                           "end after its start, found %u, %u and %g after %g",
                           (unsigned long long)i, ranks, num_tasks, run->rank, run->task,
                           run->end, run->start);
  }
  return NULL;
}

// `took`: [num_runs], by run. `order`: [num_runs] the runs, by their start.
static jpp_status_t* measure_runs(const jpp_machine_t* machine,
                                  const jpp_task_run_t* runs, uint64_t num_runs,
                                  uint32_t ranks, jpp_arena_t* scratch, double* took,
                                  uint64_t* order) {
  edge_t* edges = NULL;
  jpp_cores_t* hosts = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, 2 * num_runs, &edges));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &hosts));
  for (uint32_t h = 0; h < ranks; ++h) hosts[h].count = machine->cores;
  for (uint64_t i = 0; i < num_runs; ++i) {
    edges[2 * i] = (edge_t){runs[i].start, i, false};
    edges[2 * i + 1] = (edge_t){runs[i].end, i, true};
  }
  qsort(edges, 2 * num_runs, sizeof(*edges), compare_edges);
  uint64_t started = 0;
  for (uint64_t e = 0; e < 2 * num_runs; ++e) {
    const edge_t* edge = &edges[e];
    jpp_cores_t* host = &hosts[machine->rank_host[runs[edge->run].rank]];
    jpp__cores_advance(host, edge->time);
    if (edge->end) {
      host->load -= machine->threads;
      took[edge->run] += host->work;
    } else {
      host->load += machine->threads;
      took[edge->run] -= host->work;
      order[started++] = edge->run;
    }
  }
  return NULL;
}

// Lists the times by task.
static jpp_status_t* list_times(const jpp_task_run_t* runs, uint64_t num_runs,
                                const double* took, const uint64_t* order,
                                uint32_t num_tasks, jpp_arena_t* scratch,
                                double* out_times, uint64_t* out_first_times) {
  uint64_t* next = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, num_tasks, &next));
  for (uint32_t t = 0; t <= num_tasks; ++t) out_first_times[t] = 0;
  for (uint64_t i = 0; i < num_runs; ++i) ++out_first_times[runs[i].task + 1];
  for (uint32_t t = 0; t < num_tasks; ++t) {
    next[t] = out_first_times[t];
    out_first_times[t + 1] += next[t];
  }
  for (uint64_t i = 0; i < num_runs; ++i) {
    out_times[next[runs[order[i]].task]++] = took[order[i]];
  }
  return NULL;
}

jpp_status_t* jpp_predict_task_times(const jpp_machine_t* machine, uint32_t ranks,
                                     const jpp_task_run_t* runs, uint64_t num_runs,
                                     uint32_t num_tasks, double* out_times,
                                     uint64_t* out_first_times) {
  JPP_RETURN_IF_NULL(machine, runs, out_times, out_first_times);
  JPP_RETURN_IF_ERROR(check_runs(runs, num_runs, ranks, num_tasks));
  jpp_machine_t full;
  double* took = NULL;
  uint64_t* order = NULL;
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = jpp__machine_complete(machine, ranks, &scratch, &full);
  if (!status) status = JPP_ARENA_ARRAY(&scratch, num_runs, &took);
  if (!status) status = JPP_ARENA_ARRAY(&scratch, num_runs, &order);
  if (!status) status = measure_runs(&full, runs, num_runs, ranks, &scratch, took, order);
  if (!status) {
    status = list_times(runs, num_runs, took, order, num_tasks, &scratch, out_times,
                        out_first_times);
  }
  jpp__arena_deinit(&scratch);
  return status;
}
