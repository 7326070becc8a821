// Searches for a schedule under memory limits: a schedule is accepted only if the step
// planned under it fits.
#include "advise/candidates.h"
#include "base/alloc.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"

typedef struct acceptor {
  jpp_candidates_t candidates;
  const jpp_schedule_t** schedules;  // [loops]
  uint32_t loop;
  // The caller's options, converted to the current version.
  const jpp_search_options_t* options;
} acceptor_t;

static jpp_status_t* accept_if_fits(void* context, const jpp_schedule_t* schedule,
                                    bool* out_accept) {
  acceptor_t* a = context;
  jpp_planned_t* planned = NULL;
  uint64_t peak = 0;
  a->schedules[a->loop] = schedule;
  *out_accept = false;
  JPP_RETURN_IF_ERROR(jpp__candidates_plan(&a->candidates, a->schedules, &planned));
  *out_accept = jpp__candidates_fit(&a->candidates, planned->plan, schedule->name, &peak);
  jpp_planned_destroy(planned);
  return NULL;
}

static void forward_progress(void* context, const jpp_search_progress_t* progress) {
  const acceptor_t* a = context;
  if (a->options->progress) a->options->progress(a->options->context, progress);
}

static jpp_status_t* forward_poll(void* context) {
  const acceptor_t* a = context;
  return a->options->poll ? a->options->poll(a->options->context) : NULL;
}

// Whether no schedule was within the limits.
static bool is_refusal(const acceptor_t* a, const jpp_status_t* status) {
  return status && a->candidates.limits && jpp_status_code(status) == JPP_OUT_OF_MEMORY;
}

// Replaces the search's error with one that says how much memory would have sufficed,
// which only the candidates know. Another search under that limit succeeds, even if it
// measures other times.
static jpp_status_t* explain_refusal(const acceptor_t* a, jpp_status_t* status) {
  const jpp_candidates_t* candidates = &a->candidates;
  if (!candidates->smallest_name) return status;
  uint64_t least = candidates->limits->bytes[0];
  for (uint32_t r = 1; r < a->options->ranks; ++r) {
    if (candidates->limits->bytes[r] < least) least = candidates->limits->bytes[r];
  }
  jpp_status_free(status);
  return jpp_status_make(
      JPP_OUT_OF_MEMORY,
      "memory limit: expected a schedule of %u stage%s on %u rank%s with %u microbatch%s "
      "that takes at most %llu bytes on each device, found none; of those that do not "
      "depend on measured times, the smallest takes %llu bytes. More ranks, or smaller "
      "microbatches, need less",
      a->options->stages, jpp__plural(a->options->stages), a->options->ranks,
      jpp__plural(a->options->ranks), a->options->microbatches,
      a->options->microbatches == 1 ? "" : "es", (unsigned long long)least,
      (unsigned long long)candidates->smallest);
}

// `smallest`: as in jpp_search_options_t.
static jpp_status_t* search_under_limits(acceptor_t* a, bool smallest,
                                         jpp_search_result_t* out_result) {
  jpp_search_options_t under_limits = *a->options;
  under_limits.accept = a->candidates.limits ? accept_if_fits : NULL;
  under_limits.smallest = smallest;
  under_limits.progress = forward_progress;
  under_limits.poll = forward_poll;
  under_limits.context = a;
  return jpp_schedule_search(&under_limits, out_result);
}

static jpp_status_t* prepare(const jpp_advise_search_t* step, acceptor_t* a) {
  uint32_t loops = step->graph->num_loops;
  JPP_RETURN_IF_ERROR(
      jpp__candidates_init(&a->candidates, step->graph, step->like, step->limits));
  a->candidates.offload = step->offload;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &a->schedules));
  for (uint32_t l = 0; l < loops; ++l) a->schedules[l] = step->schedules[l];
  return NULL;
}

static jpp_status_t* search_for_step(const jpp_advise_search_t* step, acceptor_t* a,
                                     jpp_search_result_t* out_result) {
  JPP_RETURN_IF_ERROR(prepare(step, a));
  jpp_status_t* status = search_under_limits(a, false, out_result);
  if (step->offload_over && is_refusal(a, status)) {
    jpp_status_free(status);
    a->candidates.offload_over = step->offload_over;
    status = search_under_limits(a, false, out_result);
  }
  if (is_refusal(a, status)) {
    jpp_status_free(status);
    a->candidates.smallest_name = NULL;
    status = search_under_limits(a, true, out_result);
  }
  out_result->offloads = !status && a->candidates.offload_over;
  return is_refusal(a, status) ? explain_refusal(a, status) : status;
}

jpp_status_t* jpp_advise_search(const jpp_advise_search_t* step,
                                const jpp_search_options_t* options,
                                jpp_search_result_t* out_result) {
  JPP_RETURN_IF_NULL(step, options, out_result);
  JPP_RETURN_IF_NULL(step->graph, step->schedules, step->like);
  *out_result = (jpp_search_result_t){0};
  jpp_search_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_search_options_t, host_bandwidth, options, &full));
  acceptor_t a = {.loop = step->loop, .options = &full};
  jpp_status_t* status = search_for_step(step, &a, out_result);
  jpp__candidates_deinit(&a.candidates);
  jpp_free(a.schedules);
  return status;
}
