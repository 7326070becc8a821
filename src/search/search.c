// Searches for a short schedule: built-in schedules first, then greedy ones on several
// placements, then random changes of the best one (hill climbing) until the time is up or
// the lower bound is reached.
#include "jaxpp/search.h"

#include <math.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "search/greedy.h"
#include "simulate/simulation.h"

// The parameters of a list schedule.
typedef struct recipe {
  uint32_t* stage_rank;  // [stages]
  uint32_t* limits;      // [ranks]
  bool split, forward_first, early_first;
} recipe_t;

typedef struct search {
  const jpp_search_options_t* options;
  jpp_arena_t arena;
  uint64_t most;                   // number of stage activations that fit on a rank
  jpp_greedy_cost_t* split_costs;  // [stages], in ticks
  jpp_greedy_cost_t* whole_costs;
  uint32_t link;
  double start, last_report, last_poll;
  uint64_t random;
  recipe_t best;   // the recipe of result->schedule, unless that is built in
  recipe_t trial;  // a random change of `best`
  jpp_search_result_t* result;
} search_t;

static double seconds_now(void) { return 1e-9 * (double)jpp__clock_now(); }

// A linear congruential generator with Knuth's MMIX constants, so that a search with a
// seed is the same on every platform.
static uint32_t random_below(search_t* search, uint32_t bound) {
  search->random = search->random * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)((search->random >> 33) % bound);
}

static double stage_work(const jpp_cost_t* cost) {
  return cost->forward + cost->backward + cost->weight;
}

// No schedule is shorter than any of: all work divided evenly; a microbatch's path
// through all stages and back; a stage's work after the forwards of the stages before it.
static double lower_bound(const jpp_search_options_t* options) {
  double all = 0, way = 0, before = 0, bound = 0;
  for (uint32_t s = 0; s < options->stages; ++s) {
    double work = options->microbatches * stage_work(&options->costs[s]);
    bound = fmax(bound, before + work);
    before += options->costs[s].forward;
    way += options->costs[s].forward + options->costs[s].backward;
    all += work;
  }
  way += options->costs[0].weight;
  return fmax(fmax(bound, way), all / options->ranks);
}

static jpp_status_t* measure_schedule(const search_t* search,
                                      const jpp_schedule_t* schedule,
                                      double* out_makespan, bool* out_fits) {
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .stage_costs = search->options->costs,
                                    .latency = search->options->latency};
  jpp_simulation_t* simulation = NULL;
  JPP_RETURN_IF_ERROR(jpp_schedule_simulate(schedule, &options, &simulation));
  *out_makespan = simulation->makespan;
  jpp_simulation_destroy(simulation);
  uint32_t* peaks = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(schedule->ranks, &peaks));
  jpp_status_t* status = jpp_schedule_peak_microbatches(schedule, schedule->ranks, peaks);
  *out_fits = true;
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    if (peaks[r] > search->most) *out_fits = false;
  }
  jpp_free(peaks);
  return status;
}

static jpp_status_t* poll_caller(search_t* search) {
  double seconds = seconds_now() - search->start;
  if (!search->options->poll || seconds - search->last_poll < 0.02) return NULL;
  search->last_poll = seconds;
  return search->options->poll(search->options->context);
}

// Takes ownership: the shortest schedule so far that fits becomes the result, any other
// is destroyed.
static jpp_status_t* keep_if_better(search_t* search, jpp_schedule_t* schedule,
                                    bool* out_better) {
  double makespan = 0;
  bool fits = false;
  jpp_status_t* status = poll_caller(search);
  if (!status) status = measure_schedule(search, schedule, &makespan, &fits);
  ++search->result->tried;
  jpp_search_result_t* result = search->result;
  *out_better =
      !status && fits && (!result->schedule || makespan < result->makespan * (1 - 1e-12));
  if (*out_better && search->options->accept) {
    status = search->options->accept(search->options->context, schedule, out_better);
    *out_better = *out_better && !status;
  }
  if (!*out_better) {
    jpp_schedule_destroy(schedule);
    return status;
  }
  jpp_schedule_destroy(result->schedule);
  result->schedule = schedule;
  result->makespan = makespan;
  return NULL;
}

static jpp_status_t* try_built_ins(search_t* search) {
  const jpp_search_options_t* options = search->options;
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = options->stages,
                                  .ranks = options->ranks,
                                  .microbatches = options->microbatches};
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const char* name = jpp_schedule_info_at(i)->name;
    jpp_schedule_t* schedule = NULL;
    jpp_status_t* status = jpp_schedule_build(name, &params, &schedule);
    if (jpp_schedule_is_misfit(status)) {
      jpp_status_free(status);
      continue;
    }
    JPP_RETURN_IF_ERROR(status);
    if (options->whole_backwards && jpp_schedule_splits_backward(schedule)) {
      jpp_schedule_destroy(schedule);
      continue;
    }
    bool better = false;
    JPP_RETURN_IF_ERROR(keep_if_better(search, schedule, &better));
    if (better) search->result->built_in = name;
  }
  search->result->built_in_makespan = search->result->makespan;
  return NULL;
}

// --- List schedules --------------------------------------------------------------------

static jpp_status_t* build_by_recipe(const search_t* search, const recipe_t* recipe,
                                     jpp_schedule_t** out_schedule) {
  const jpp_search_options_t* options = search->options;
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = options->stages,
                                  .ranks = options->ranks,
                                  .microbatches = options->microbatches};
  jpp_schedule_draft_t draft;
  JPP_RETURN_IF_ERROR(jpp__schedule_draft_create("searched", &params, &draft));
  for (uint32_t s = 0; s < options->stages; ++s) {
    draft.stage_rank[s] = recipe->stage_rank[s];
  }
  jpp_greedy_options_t greedy = {
      .costs = recipe->split ? search->split_costs : search->whole_costs,
      .limits = recipe->limits,
      .split = recipe->split,
      .forward_first = recipe->forward_first,
      .early_first = recipe->early_first,
      .link = search->link};
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = jpp__schedule_greedy(&greedy, &scratch, &draft);
  jpp__arena_deinit(&scratch);
  if (!status) status = jpp_schedule_verify(draft.schedule);
  if (status) {
    jpp_schedule_destroy(draft.schedule);
    return status;
  }
  *out_schedule = draft.schedule;
  return NULL;
}

// Whether each rank has room for one activation of each of its stages.
static bool is_possible(const search_t* search, const recipe_t* recipe) {
  for (uint32_t r = 0; r < search->options->ranks; ++r) {
    uint32_t stages = 0;
    for (uint32_t s = 0; s < search->options->stages; ++s) {
      stages += recipe->stage_rank[s] == r;
    }
    if (recipe->limits[r] < stages || recipe->limits[r] > search->most) return false;
  }
  return true;
}

static void copy_recipe(const search_t* search, const recipe_t* from, recipe_t* to) {
  for (uint32_t s = 0; s < search->options->stages; ++s) {
    to->stage_rank[s] = from->stage_rank[s];
  }
  for (uint32_t r = 0; r < search->options->ranks; ++r) to->limits[r] = from->limits[r];
  to->split = from->split;
  to->forward_first = from->forward_first;
  to->early_first = from->early_first;
}

static jpp_status_t* try_trial(search_t* search) {
  if (!is_possible(search, &search->trial)) return NULL;
  jpp_schedule_t* schedule = NULL;
  bool better = false;
  JPP_RETURN_IF_ERROR(build_by_recipe(search, &search->trial, &schedule));
  JPP_RETURN_IF_ERROR(keep_if_better(search, schedule, &better));
  if (better) copy_recipe(search, &search->trial, &search->best);
  return NULL;
}

typedef enum placement {
  PLACE_LOOPED,
  PLACE_V,         // up and down the ranks, as often as there are stages
  PLACE_BLOCKS,    // neighbouring stages on a rank, the same number on each
  PLACE_BALANCED,  // neighbouring stages on a rank, equal work on each
  kPlacements
} placement_t;

static void place_stages_by(const search_t* search, placement_t how,
                            uint32_t* stage_rank) {
  const jpp_search_options_t* options = search->options;
  uint32_t ranks = options->ranks;
  double all = 0, before = 0;
  for (uint32_t s = 0; s < options->stages; ++s) all += stage_work(&options->costs[s]);
  for (uint32_t s = 0; s < options->stages; ++s) {
    uint32_t turn = s % ranks;
    double work = stage_work(&options->costs[s]);
    uint32_t balanced = all > 0 ? (uint32_t)((before + work / 2) / all * ranks) : 0;
    const uint32_t rank[] = {
        [PLACE_LOOPED] = turn,
        [PLACE_V] = s / ranks % 2 ? ranks - 1 - turn : turn,
        [PLACE_BLOCKS] = (uint32_t)((uint64_t)s * ranks / options->stages),
        [PLACE_BALANCED] = balanced < ranks ? balanced : ranks - 1,
    };
    stage_rank[s] = rank[how];
    before += work;
  }
}

// Limits each rank to `limit` activations, or to what its memory holds.
static void set_limits(const search_t* search, uint64_t limit, uint32_t* limits) {
  for (uint32_t r = 0; r < search->options->ranks; ++r) {
    limits[r] = (uint32_t)(limit < search->most ? limit : search->most);
  }
}

static bool is_search_over(const search_t* search) {
  return seconds_now() - search->start > search->options->seconds ||
         search->result->makespan <= search->result->bound * (1 + 1e-9);
}

static jpp_status_t* try_placements(search_t* search) {
  uint32_t per_rank = (search->options->stages - 1) / search->options->ranks + 1;
  for (uint32_t n = 0; n < kPlacements * 8 * 6; ++n) {
    recipe_t* trial = &search->trial;
    place_stages_by(search, (placement_t)(n % kPlacements), trial->stage_rank);
    trial->split = n / kPlacements % 2 == 0 && !search->options->whole_backwards;
    trial->forward_first = n / kPlacements / 2 % 2;
    trial->early_first = n / kPlacements / 4 % 2;
    uint64_t most = (uint64_t)per_rank * search->options->ranks;
    set_limits(search, most * (n / kPlacements / 8 + 1) / 3 + per_rank, trial->limits);
    JPP_RETURN_IF_ERROR(try_trial(search));
    if (search->result->schedule && is_search_over(search)) break;
  }
  return NULL;
}

// Makes a random change: moves a stage to another rank, swaps two stages, or changes a
// limit or a priority.
static void mutate_trial(search_t* search) {
  const jpp_search_options_t* options = search->options;
  recipe_t* trial = &search->trial;
  uint32_t s = random_below(search, options->stages);
  uint32_t t = random_below(search, options->stages);
  uint32_t r = random_below(search, options->ranks), rank = trial->stage_rank[s];
  switch (random_below(search, 8)) {
    case 0:
      trial->stage_rank[s] = r;
      break;
    case 1:
    case 2:
      trial->stage_rank[s] = trial->stage_rank[t];
      trial->stage_rank[t] = rank;
      break;
    case 3:
      trial->forward_first = !trial->forward_first;
      break;
    case 4:
      trial->early_first = !trial->early_first;
      break;
    case 5:
      if (!options->whole_backwards) trial->split = !trial->split;
      break;
    default:
      trial->limits[r] += random_below(search, 2) ? 1 : trial->limits[r] > 1 ? -1 : 0;
  }
}

static void report_progress(search_t* search) {
  double seconds = seconds_now() - search->start;
  if (!search->options->progress || seconds - search->last_report < 1) return;
  search->last_report = seconds;
  jpp_search_progress_t progress = {seconds, search->result->tried,
                                    search->result->makespan, search->result->bound};
  search->options->progress(search->options->context, &progress);
}

static jpp_status_t* climb(search_t* search) {
  while (!is_search_over(search)) {
    copy_recipe(search, &search->best, &search->trial);
    for (uint32_t i = random_below(search, 4) + 1; i-- > 0;) mutate_trial(search);
    JPP_RETURN_IF_ERROR(poll_caller(search));
    JPP_RETURN_IF_ERROR(try_trial(search));
    report_progress(search);
  }
  return NULL;
}

// --- Setting up -----------------------------------------------------------------------

// About a thousand ticks in the shortest cost.
static double ticks_per_unit(const jpp_search_options_t* options) {
  double shortest = INFINITY, longest = 0;
  for (uint32_t s = 0; s < options->stages; ++s) {
    const double costs[] = {options->costs[s].forward, options->costs[s].backward,
                            options->costs[s].weight};
    for (uint32_t i = 0; i < 3; ++i) {
      if (costs[i] > 0) shortest = fmin(shortest, costs[i]);
      longest = fmax(longest, costs[i]);
    }
  }
  if (!(longest > 0)) return 1;
  return fmin(1000 / shortest, 1e8 / longest);
}

enum { kMostTicks = 1000000000 };  // exceeded only by a latency far beyond all costs

static uint32_t to_ticks(double cost, double per_unit) {
  double found = nearbyint(cost * per_unit);
  return found < 1 ? 1 : found < kMostTicks ? (uint32_t)found : kMostTicks;
}

static jpp_status_t* prepare_search(search_t* search) {
  const jpp_search_options_t* options = search->options;
  jpp_arena_t* arena = &search->arena;
  uint64_t bytes = options->activation_bytes ? options->activation_bytes : 1;
  search->most = options->memory_limit ? options->memory_limit / bytes : INT32_MAX;
  if (search->most > INT32_MAX) search->most = INT32_MAX;
  recipe_t* recipes[] = {&search->best, &search->trial};
  for (uint32_t i = 0; i < 2; ++i) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &recipes[i]->stage_rank));
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->ranks, &recipes[i]->limits));
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &search->split_costs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &search->whole_costs));
  double unit = ticks_per_unit(options);
  for (uint32_t s = 0; s < options->stages; ++s) {
    const jpp_cost_t* cost = &options->costs[s];
    search->split_costs[s] =
        (jpp_greedy_cost_t){to_ticks(cost->forward, unit), to_ticks(cost->backward, unit),
                            to_ticks(cost->weight, unit)};
    search->whole_costs[s] = (jpp_greedy_cost_t){
        to_ticks(cost->forward, unit), to_ticks(cost->backward + cost->weight, unit), 1};
  }
  search->link = options->latency > 0 ? to_ticks(options->latency, unit) : 0;
  place_stages_by(search, PLACE_LOOPED, search->best.stage_rank);
  set_limits(search, 2 * (uint64_t)options->stages, search->best.limits);
  search->best.split = !options->whole_backwards;
  search->result->bound = lower_bound(options);
  return NULL;
}

static jpp_status_t* run_search(search_t* search) {
  JPP_RETURN_IF_ERROR(prepare_search(search));
  JPP_RETURN_IF_ERROR(try_built_ins(search));
  JPP_RETURN_IF_ERROR(try_placements(search));
  if (search->result->schedule) return climb(search);
  if (search->options->accept) {
    return jpp_status_make(JPP_OUT_OF_MEMORY, "none of %llu schedules was accepted",
                           (unsigned long long)search->result->tried);
  }
  return jpp_status_make(
      JPP_OUT_OF_MEMORY,
      "no schedule of %u stage%s on %u rank%s fits: the limit holds %llu activation%s a "
      "rank, and each of its stages needs one",
      search->options->stages, jpp__plural(search->options->stages),
      search->options->ranks, jpp__plural(search->options->ranks),
      (unsigned long long)search->most, jpp__plural(search->most));
}

static jpp_status_t* check_search_options(const jpp_search_options_t* options) {
  if (!options->stages || !options->ranks || !options->microbatches) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "search: expected at least 1 stage, rank and microbatch");
  }
  if (!isfinite(options->seconds) || options->seconds < 0) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "search: expected a number of seconds of at least 0, found %g",
                           options->seconds);
  }
  if (!jpp__simulation_takes(options->latency)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "search: expected a latency of 0 or from %g to %g, found %g",
                           JPP_SHORTEST_TIME, JPP_LONGEST_TIME, options->latency);
  }
  return jpp__simulation_check_costs(options->costs, options->stages);
}

jpp_status_t* jpp_schedule_search(const jpp_search_options_t* options,
                                  jpp_search_result_t* out_result) {
  JPP_RETURN_IF_NULL(options, out_result);
  *out_result = (jpp_search_result_t){0};
  jpp_search_options_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_search_options_t, context, options, &full));
  JPP_RETURN_IF_NULL(full.costs);
  JPP_RETURN_IF_ERROR(check_search_options(&full));
  search_t search = {.options = &full,
                     .start = seconds_now(),
                     .random = full.seed + 0x9e3779b97f4a7c15ull,
                     .result = out_result};
  jpp__arena_init(&search.arena);
  jpp_status_t* status = run_search(&search);
  jpp__arena_deinit(&search.arena);
  if (!status) {
    JPP_LOG(JPP_LOG_INFO, "search: %s takes %g, at least %g; best built-in: %s, %g",
            out_result->schedule->name, out_result->makespan, out_result->bound,
            out_result->built_in ? out_result->built_in : "none",
            out_result->built_in_makespan);
    return NULL;
  }
  jpp_schedule_destroy(out_result->schedule);
  *out_result = (jpp_search_result_t){0};
  return status;
}
