// A plan on one page: sizes, the work of stages, costs, peaks.
#include <stdlib.h>
#include <string.h>

#include "base/null.h"
#include "base/str.h"
#include "base/vec.h"
#include "jaxpp/view.h"
#include "view/planned.h"

enum { kNumberWidth = 10 };  // "1023.9 MiB"

static void append_bytes(uint64_t bytes, jpp_str_t* out) {
  static const char* const kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double scaled = (double)bytes;
  int unit = 0;
  for (; scaled >= 1024 && unit < 4; ++unit) scaled /= 1024;
  jpp_str_appendf(out, unit ? "%.1f %s" : "%.0f %s", scaled, kUnits[unit]);
}

// --- Stages ---------------------------------------------------------------------------

// A stage that does this much more work than the average slows the others down.
static const double kHeavy = 1.25;

static double whole_cost(const jpp_cost_t* cost) {
  return cost->forward + cost->backward + cost->weight;
}

static void append_stages(const jpp_planned_t* planned, uint32_t index, jpp_str_t* out) {
  const jpp_schedule_t* schedule = planned->schedules[index];
  double total = 0, heaviest = 0;
  uint32_t heavy = 0;
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    jpp_cost_t cost = jpp_staged_stage_cost(planned->staged, index, s);
    double work = whole_cost(&cost);
    total += work;
    if (work <= heaviest) continue;
    heaviest = work;
    heavy = s;
  }
  jpp_str_append(out, "  stage  rank    forward   backward FLOPs a microbatch  share\n");
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    jpp_cost_t cost = jpp_staged_stage_cost(planned->staged, index, s);
    jpp_str_appendf(out, "  %5u %5u %10.3g %10.3g %24.0f%%\n", s, schedule->stage_rank[s],
                    cost.forward, cost.backward + cost.weight,
                    total > 0 ? 100 * whole_cost(&cost) / total : 0);
  }
  if (schedule->stages > 1 && heaviest * schedule->stages > kHeavy * total) {
    jpp_str_appendf(out,
                    "  stage %u does %.1f times the work of an average stage, and the "
                    "others wait for it: move layers to its neighbours\n",
                    heavy, heaviest * schedule->stages / total);
  }
}

static void append_loop(const jpp_planned_t* planned, uint32_t index, jpp_str_t* out) {
  const jpp_schedule_t* schedule = planned->schedules[index];
  const jpp_loop_t* loop = &planned->graph->loops[index];
  jpp_str_appendf(out, "loop at %s: schedule %s, %u stages, %u microbatches%s\n",
                  loop->where ? loop->where : "?", schedule->name, schedule->stages,
                  schedule->microbatches,
                  planned->staged->loops[index].has_backward ? "" : ", forward only");
  append_stages(planned, index, out);
}

static jpp_status_t* append_costs(const jpp_plan_t* plan, const jpp_plan_costs_t* given,
                                  jpp_str_t* out) {
  jpp_plan_costs_t* counted = NULL;
  char* text = NULL;
  if (!given) JPP_RETURN_IF_ERROR(jpp_plan_costs(plan, &counted));
  jpp_status_t* status = jpp_plan_costs_print(given ? given : counted, &text);
  if (text) jpp_str_append(out, text);
  jpp_text_free(text);
  jpp_plan_costs_destroy(counted);
  return status;
}

// --- Memory at the peaks --------------------------------------------------------------

static bool any_of_kind(const jpp_check_report_t* report, int kind) {
  for (uint32_t r = 0; r < report->plan->ranks; ++r) {
    if (report->actors[r].bytes_at_peak[kind]) return true;
  }
  return false;
}

// Right-aligned; each kind's column has the width of its name.
static void append_cell(uint64_t bytes, int width, jpp_str_t* out) {
  jpp_str_t cell = {0};
  append_bytes(bytes, &cell);
  jpp_str_appendf(out, "  %*s", width, cell.data ? cell.data : "");
  jpp_str_deinit(&cell);
}

static int column_width(int kind) {
  int width = (int)strlen(jpp_bytes_kind_name((jpp_bytes_kind_t)kind));
  return width < kNumberWidth ? kNumberWidth : width;
}

static void append_peak(const jpp_check_report_t* report, uint32_t rank, jpp_str_t* out) {
  const jpp_check_actor_t* actor = &report->actors[rank];
  jpp_str_appendf(out, "%4u", rank);
  for (int k = 0; k < JPP_BYTES_KIND_COUNT; ++k) {
    if (!any_of_kind(report, k)) continue;
    append_cell(actor->bytes_at_peak[k], column_width(k), out);
  }
  append_cell(actor->peak_bytes, kNumberWidth, out);
  jpp_str_appendf(out, "  %u\n", actor->peak_instr);
}

// Appends nothing if no rank uses any.
static void append_host_peaks(const jpp_check_report_t* report, jpp_str_t* out) {
  bool any = false;
  for (uint32_t r = 0; r < report->plan->ranks; ++r) {
    any = any || report->actors[r].peak_host_bytes;
  }
  if (!any) return;
  jpp_str_append(out, "\npeak in pinned_host of each rank, for each of its devices:\n");
  for (uint32_t r = 0; r < report->plan->ranks; ++r) {
    jpp_str_appendf(out, "%4u", r);
    append_cell(report->actors[r].peak_host_bytes, kNumberWidth, out);
    jpp_str_append(out, "\n");
  }
}

static void append_peaks(const jpp_check_report_t* report, jpp_str_t* out) {
  jpp_str_append(out, "\nmemory at the peak of each rank, on each of its devices:\nrank");
  for (int k = 0; k < JPP_BYTES_KIND_COUNT; ++k) {
    if (!any_of_kind(report, k)) continue;
    jpp_str_appendf(out, "  %*s", column_width(k),
                    jpp_bytes_kind_name((jpp_bytes_kind_t)k));
  }
  jpp_str_appendf(out, "  %*s  instruction\n", kNumberWidth, "all");
  for (uint32_t r = 0; r < report->plan->ranks; ++r) append_peak(report, r, out);
}

// --- Values kept for a loop -----------------------------------------------------------

// On one rank, the loop-invariant values of one line of a loop's body.
typedef struct kept {
  uint32_t rank;
  const char *name, *where;  // of their ops
  uint64_t bytes;
} kept_t;
typedef JPP_VEC(kept_t) kept_vec_t;

// A line is listed if its values take this part of the rank's peak.
static const double kManyBytes = 0.05;

static int compare_kept(const void* a, const void* b) {
  const kept_t *left = a, *right = b;
  if (left->rank != right->rank) return left->rank < right->rank ? -1 : 1;
  int names = strcmp(left->name, right->name);
  return names ? names : strcmp(left->where, right->where);
}

static jpp_status_t* collect_kept(const jpp_plan_t* plan, const jpp_task_t* task,
                                  kept_vec_t* kept) {
  const jpp_staged_t* staged = plan->staged;
  if (task->loop != JPP_NONE) return NULL;
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    uint32_t value = task->outputs[i];
    const jpp_op_t* op = &staged->ops[staged->values[value].producer];
    bool is_call = op->kind == JPP_OP_CALL || op->kind == JPP_OP_ADD;
    if (op->loop == JPP_NONE || !is_call) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(kept, (kept_t){.rank = task->rank,
                                                    .name = op->name,
                                                    .where = op->where ? op->where : "?",
                                                    .bytes = plan->value_bytes[value]}));
  }
  return NULL;
}

// Adds up the values of each line. Returns the number of lines.
static size_t merge_kept(kept_t* kept, size_t count) {
  size_t merged = 0;
  if (count) qsort(kept, count, sizeof(*kept), compare_kept);
  for (size_t i = 0; i < count; ++i) {
    if (merged && compare_kept(&kept[merged - 1], &kept[i]) == 0) {
      kept[merged - 1].bytes += kept[i].bytes;
    } else {
      kept[merged++] = kept[i];
    }
  }
  return merged;
}

// Appends nothing if the values are small on all ranks.
static jpp_status_t* append_kept(const jpp_planned_t* planned, jpp_str_t* out) {
  const jpp_staged_t* staged = planned->staged;
  kept_vec_t kept = {0};
  jpp_status_t* status = NULL;
  bool any = false;
  for (uint32_t t = 0; !status && t < staged->num_tasks; ++t) {
    status = collect_kept(planned->plan, &staged->tasks[t], &kept);
  }
  size_t count = status ? 0 : merge_kept(kept.data, kept.count);
  for (size_t i = 0; i < count; ++i) {
    const kept_t* line = &kept.data[i];
    uint64_t peak = planned->plan->programs[line->rank].peak_bytes;
    if ((double)line->bytes < kManyBytes * (double)peak) continue;
    if (!any) {
      jpp_str_append(out, "\ncomputed once, before the loop, and kept for its tasks:\n");
    }
    any = true;
    jpp_str_appendf(out, "%4u", line->rank);
    append_cell(line->bytes, kNumberWidth, out);
    jpp_str_appendf(out, "  %s at %s\n", line->name, line->where);
  }
  jpp_vec_deinit(&kept);
  return status;
}

jpp_status_t* jpp_planned_summarize(const jpp_planned_t* planned,
                                    const jpp_plan_costs_t* costs, char** out_text) {
  JPP_RETURN_IF_NULL(planned, out_text);
  const jpp_staged_t* staged = planned->staged;
  const jpp_graph_t* graph = planned->graph;
  jpp_str_t str = {0};
  *out_text = NULL;
  JPP_RETURN_IF_ERROR(jpp__planned_expect(planned, JPP_PART_CHECK));
  jpp_str_appendf(&str, "graph %s: %u ops, %u values, %u arguments, %u outputs\n",
                  graph->name, graph->num_ops, graph->num_values, graph->num_args,
                  graph->num_outputs);
  for (uint32_t i = 0; i < graph->num_loops; ++i) append_loop(planned, i, &str);
  jpp_str_appendf(&str, "%u tasks, %u accumulators, %u channels\n\n", staged->num_tasks,
                  staged->num_accumulators, planned->plan->num_channels);
  jpp_status_t* status = append_costs(planned->plan, costs, &str);
  append_peaks(planned->report, &str);
  append_host_peaks(planned->report, &str);
  if (!status) status = append_kept(planned, &str);
  if (!status) return jpp_str_finish(&str, out_text);
  jpp_str_deinit(&str);
  return status;
}
