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
  uint32_t* stage_rank;   // [stages]
  uint32_t* limits;       // [ranks]
  uint32_t most_pending;  // weight gradients
  bool split, forward_first, early_first;
  bool equal_costs;  // all costs count as equal, and links take no time
} recipe_t;

typedef struct search {
  const jpp_search_options_t* options;
  jpp_arena_t arena;
  uint64_t most;                   // number of stage activations that fit on a rank
  double room;                     // the same, with a fraction
  bool exceeds;                    // activations may exceed the limit: they need not stay
  jpp_greedy_cost_t* split_costs;  // [stages], in ticks
  jpp_greedy_cost_t* whole_costs;
  jpp_greedy_cost_t* equal_costs;
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

// Whether the ranks of a simulated schedule keep at most what the limit holds.
static bool fits_limit(const search_t* search, const jpp_simulation_t* simulation) {
  const jpp_schedule_t* schedule = simulation->schedule;
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    uint32_t stages = 0;
    for (uint32_t s = 0; s < schedule->stages; ++s) {
      stages += schedule->stage_rank[s] == r;
    }
    double kept = simulation->ranks[r].peak * stages;
    if (kept > search->room * (1 + 1e-12)) return false;
  }
  return true;
}

static jpp_status_t* measure_schedule(const search_t* search,
                                      const jpp_schedule_t* schedule,
                                      jpp_activations_t activations, double* out_makespan,
                                      bool* out_fits) {
  const jpp_search_options_t* given = search->options;
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .stage_costs = given->costs,
                                    .latency = given->latency,
                                    .activations = activations,
                                    .memory_limit = given->memory_limit,
                                    .activation_bytes = given->activation_bytes,
                                    .input_bytes = given->input_bytes,
                                    .host_bandwidth = given->host_bandwidth};
  jpp_simulation_t* simulation = NULL;
  jpp_status_t* status = jpp_schedule_simulate(schedule, &options, &simulation);
  *out_fits = !status && fits_limit(search, simulation);
  // The schedule is proved: a rank has no room for one of its tasks.
  if (status && jpp_status_code(status) == JPP_SCHEDULE_ERROR) {
    jpp_status_free(status);
    status = NULL;
  }
  if (simulation) *out_makespan = simulation->makespan;
  jpp_simulation_destroy(simulation);
  return status;
}

// Whether a makespan beats the best one so far. `best` is 0 before any was found.
static bool is_shorter(double makespan, double best) {
  return best == 0 || makespan < best * (1 - 1e-12);
}

// Finds out how the schedule's activations fit. Keeping them is never slower than the
// alternatives, which are therefore tried only for a schedule that does not fit but would
// be the best of them.
static jpp_status_t* choose_activations(search_t* search, const jpp_schedule_t* schedule,
                                        jpp_activations_t* out_activations,
                                        double* out_makespan, bool* out_fits) {
  const jpp_search_options_t* options = search->options;
  const bool tried[] = {true, options->host_bandwidth > 0, options->input_bytes > 0};
  double* bests = search->result->makespans;
  double kept = 0;
  *out_makespan = 0;
  *out_fits = false;
  for (uint32_t a = 0; a < JPP_ACTIVATIONS_COUNT; ++a) {
    double makespan = 0;
    bool fits = false;
    if (!tried[a] || (a && !is_shorter(kept, bests[a]))) continue;
    JPP_RETURN_IF_ERROR(
        measure_schedule(search, schedule, (jpp_activations_t)a, &makespan, &fits));
    if (!a) kept = makespan;
    if (!fits) continue;
    if (is_shorter(makespan, bests[a])) bests[a] = makespan;
    if (!*out_fits || makespan < *out_makespan) {
      *out_activations = (jpp_activations_t)a;
      *out_makespan = makespan;
    }
    *out_fits = true;
    if (!a) break;
  }
  return NULL;
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
  jpp_activations_t activations = JPP_ACTIVATIONS_KEPT;
  jpp_status_t* status = poll_caller(search);
  if (!status) {
    status = choose_activations(search, schedule, &activations, &makespan, &fits);
  }
  ++search->result->tried;
  jpp_search_result_t* result = search->result;
  // Of equally long schedules, one whose activations stay is better.
  bool stays = result->activations && !activations;
  double longest = result->makespan * (stays ? 1 + 1e-12 : 1 - 1e-12);
  *out_better = !status && fits && (!result->schedule || makespan < longest);
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
  result->activations = activations;
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
  jpp_greedy_cost_t* own_costs =
      recipe->split ? search->split_costs : search->whole_costs;
  jpp_greedy_options_t greedy = {
      .costs = recipe->equal_costs ? search->equal_costs : own_costs,
      .limits = recipe->limits,
      .split = recipe->split,
      .most_pending = recipe->most_pending,
      .forward_first = recipe->forward_first,
      .early_first = recipe->early_first,
      .link = recipe->equal_costs ? 0 : search->link};
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
    if (recipe->limits[r] < stages) return false;
    if (recipe->limits[r] > search->most && !search->exceeds) return false;
  }
  return true;
}

static void copy_recipe(const search_t* search, const recipe_t* from, recipe_t* to) {
  for (uint32_t s = 0; s < search->options->stages; ++s) {
    to->stage_rank[s] = from->stage_rank[s];
  }
  for (uint32_t r = 0; r < search->options->ranks; ++r) to->limits[r] = from->limits[r];
  to->most_pending = from->most_pending;
  to->split = from->split;
  to->forward_first = from->forward_first;
  to->early_first = from->early_first;
  to->equal_costs = from->equal_costs;
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

// Limits each rank to `limit` activations, or to what its memory holds if they have to
// stay there.
static void set_limits(const search_t* search, uint64_t limit, uint32_t* limits) {
  uint64_t most = search->exceeds ? INT32_MAX : search->most;
  for (uint32_t r = 0; r < search->options->ranks; ++r) {
    limits[r] = (uint32_t)(limit < most ? limit : most);
  }
}

// Lets ranks keep what their distance to the last stage needs, as in 1F1B, and weight
// gradients that are put off. Only ranks early in the pipeline then exceed the limit.
static void taper_limits(const search_t* search, uint32_t per_rank, recipe_t* recipe) {
  uint32_t stages = search->options->stages;
  for (uint32_t r = 0; r < search->options->ranks; ++r) {
    uint64_t needed = recipe->most_pending;
    for (uint32_t s = 0; s < stages; ++s) {
      if (recipe->stage_rank[s] == r) needed += (stages - s - 1) / per_rank + 1;
    }
    if (needed < search->most) needed = search->most;
    if (needed < recipe->limits[r]) recipe->limits[r] = (uint32_t)needed;
  }
}

static bool is_search_over(const search_t* search) {
  return seconds_now() - search->start > search->options->seconds ||
         search->result->makespan <= search->result->bound * (1 + 1e-9);
}

// The placements and priorities that list schedules start from, by number.
enum { kStarts = kPlacements * 8 };

static void start_trial(search_t* search, uint32_t start) {
  recipe_t* trial = &search->trial;
  place_stages_by(search, (placement_t)(start % kPlacements), trial->stage_rank);
  trial->split = start / kPlacements % 2 == 0 && !search->options->whole_backwards;
  trial->forward_first = start / kPlacements / 2 % 2;
  trial->early_first = start / kPlacements / 4 % 2;
}

static jpp_status_t* try_placements(search_t* search, uint32_t per_rank) {
  enum { kLevels = 6 };
  uint32_t levels = search->exceeds ? 2 * (kLevels + 1) : kLevels;
  for (uint32_t n = 0; n < kStarts * levels; ++n) {
    recipe_t* trial = &search->trial;
    start_trial(search, n % kStarts);
    uint64_t most = (uint64_t)per_rank * search->options->ranks;
    uint32_t level = n / kStarts % (kLevels + 1);
    set_limits(search, level < kLevels ? most * (level + 1) / 3 + per_rank : search->most,
               trial->limits);
    if (search->exceeds) {
      trial->most_pending = (uint32_t)search->most / 2 + n / kStarts / (kLevels + 1);
      if (!trial->most_pending) trial->most_pending = 1;
      taper_limits(search, per_rank, trial);
    }
    JPP_RETURN_IF_ERROR(try_trial(search));
    if (search->result->schedule && is_search_over(search)) break;
  }
  return NULL;
}

// Tries the smallest limits with which a schedule can run, whatever the costs.
static jpp_status_t* try_smallest_limits(search_t* search, uint32_t per_rank) {
  search->trial.equal_costs = true;
  for (uint32_t start = 0; start < kStarts; ++start) {
    if (start % kPlacements == PLACE_BALANCED) continue;
    start_trial(search, start);
    set_limits(search, per_rank, search->trial.limits);
    JPP_RETURN_IF_ERROR(try_trial(search));
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
  trial->equal_costs = false;
  switch (random_below(search, search->exceeds ? 9 : 8)) {
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
    case 8:
      trial->most_pending = random_below(search, (uint32_t)search->most + 1) + 1;
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
  search->room =
      options->memory_limit ? (double)options->memory_limit / (double)bytes : INFINITY;
  search->exceeds =
      options->memory_limit && (options->host_bandwidth > 0 || options->input_bytes > 0);
  recipe_t* recipes[] = {&search->best, &search->trial};
  for (uint32_t i = 0; i < 2; ++i) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &recipes[i]->stage_rank));
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->ranks, &recipes[i]->limits));
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &search->split_costs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &search->whole_costs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, options->stages, &search->equal_costs));
  double unit = ticks_per_unit(options);
  for (uint32_t s = 0; s < options->stages; ++s) {
    const jpp_cost_t* cost = &options->costs[s];
    search->split_costs[s] =
        (jpp_greedy_cost_t){to_ticks(cost->forward, unit), to_ticks(cost->backward, unit),
                            to_ticks(cost->weight, unit)};
    search->whole_costs[s] = (jpp_greedy_cost_t){
        to_ticks(cost->forward, unit), to_ticks(cost->backward + cost->weight, unit), 1};
    search->equal_costs[s] = (jpp_greedy_cost_t){1, 1, 1};
  }
  search->link = options->latency > 0 ? to_ticks(options->latency, unit) : 0;
  place_stages_by(search, PLACE_LOOPED, search->best.stage_rank);
  set_limits(search, 2 * (uint64_t)options->stages, search->best.limits);
  search->best.split = !options->whole_backwards;
  search->best.most_pending = search->trial.most_pending = UINT32_MAX;
  search->result->bound = lower_bound(options);
  return NULL;
}

static jpp_status_t* run_search(search_t* search) {
  JPP_RETURN_IF_ERROR(prepare_search(search));
  JPP_RETURN_IF_ERROR(try_built_ins(search));
  uint32_t per_rank = (search->options->stages - 1) / search->options->ranks + 1;
  JPP_RETURN_IF_ERROR(search->options->smallest ? try_smallest_limits(search, per_rank)
                                                : try_placements(search, per_rank));
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
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "search: expected at least 1 stage, rank and microbatch, found "
        "%u, %u and %u",
        options->stages, options->ranks, options->microbatches);
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
  JPP_RETURN_IF_ERROR(jpp__simulation_check_host(
      options->activation_bytes, options->input_bytes, options->host_bandwidth));
  return jpp__simulation_check_costs(options->costs, options->stages);
}

jpp_status_t* jpp_schedule_search(const jpp_search_options_t* options,
                                  jpp_search_result_t* out_result) {
  JPP_RETURN_IF_NULL(options, out_result);
  *out_result = (jpp_search_result_t){0};
  jpp_search_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_search_options_t, host_bandwidth, options, &full));
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
    JPP_LOG(JPP_LOG_INFO,
            "search: %s takes %g, at least %g; best built-in: %s, %g; "
            "activations are %s",
            out_result->schedule->name, out_result->makespan, out_result->bound,
            out_result->built_in ? out_result->built_in : "none",
            out_result->built_in_makespan, jpp_activations_name(out_result->activations));
    return NULL;
  }
  jpp_schedule_destroy(out_result->schedule);
  *out_result = (jpp_search_result_t){0};
  return status;
}
