// Records when every task ran. While a step is issued, only two times of each run are
// stored: when it was issued and when its results were ready. Everything else is computed
// afterwards.
#include <pthread.h>
#include <sched.h>
#include <time.h>

#include "base/clock.h"
#include "runtime/step/state.h"

// --- The observer -----------------------------------------------------------------

// How long removing an observer waits for the steps in flight.
enum { kLastStepsMs = 2000 };

static atomic_bool g_observed;  // without an observer, steps skip the lock
static pthread_mutex_t g_observer_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_observer_changed = PTHREAD_COND_INITIALIZER;
static jpp_trace_observer_t g_observer;  // this and the next two: under the mutex
static void* g_observer_user;
static uint32_t g_observed_steps;  // begun with the observer set, and not done

static void await_observed_steps(void) {
  struct timespec deadline;
  clock_gettime(CLOCK_REALTIME, &deadline);
  deadline.tv_sec += kLastStepsMs / 1000;
  while (g_observed_steps) {
    if (pthread_cond_timedwait(&g_observer_changed, &g_observer_mutex, &deadline)) return;
  }
}

void jpp_trace_observe(jpp_trace_observer_t observer, void* user) {
  pthread_mutex_lock(&g_observer_mutex);
  atomic_store(&g_observed, observer != NULL);
  if (!observer) await_observed_steps();
  g_observer = observer;
  g_observer_user = user;
  pthread_mutex_unlock(&g_observer_mutex);
}

static bool begin_observed_step(void) {
  if (!atomic_load(&g_observed)) return false;
  pthread_mutex_lock(&g_observer_mutex);
  ++g_observed_steps;
  pthread_mutex_unlock(&g_observer_mutex);
  return true;
}

// `trace`: NULL for a step that failed.
static void end_observed_step(const jpp_trace_t* trace) {
  pthread_mutex_lock(&g_observer_mutex);
  if (trace && g_observer) g_observer(g_observer_user, trace);
  --g_observed_steps;
  pthread_cond_broadcast(&g_observer_changed);
  pthread_mutex_unlock(&g_observer_mutex);
}

// --- Memory for traces ----------------------------------------------------------------

static jpp_status_t* allocate_step(jpp_runtime_t* runtime, uint64_t num_runs,
                                   jpp_step_trace_t* step) {
  jpp_arena_t* arena = &runtime->arena;
  uint32_t ranks = runtime->plan->ranks;
  jpp_trace_run_t* runs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, num_runs, &runs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &step->peaks));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &step->actors));
  step->trace = (jpp_trace_t){.plan = runtime->plan,
                              .num_runs = num_runs,
                              .runs = runs,
                              .peak_live_bytes = step->peaks};
  for (uint32_t r = 0; r < ranks; ++r) {
    const jpp_actor_t* actor = &runtime->actors[r];
    size_t waiters = (size_t)actor->num_runs * runtime->devices_per_rank;
    step->actors[r].runs = runs;
    for (uint32_t i = 0; i < actor->num_instrs; ++i) {
      const jpp_actor_instr_t* instr = &actor->instrs[i];
      if (instr->kind != JPP_INSTR_RUN) continue;
      const jpp_instr_t* source = &actor->program->instrs[instr->source];
      runs[instr->run] = (jpp_trace_run_t){.rank = actor->program->rank,
                                           .task = source->target,
                                           .microbatch = source->microbatch};
    }
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, waiters, &step->actors[r].waiters));
    runs += actor->num_runs;
  }
  return NULL;
}

static void number_messages(jpp_actor_t* actor) {
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    jpp_actor_instr_t* instr = &actor->instrs[i];
    switch ((jpp_instr_kind_t)instr->kind) {
      case JPP_INSTR_SEND:
        instr->message = instr->link->sends++;
        break;
      case JPP_INSTR_RECV:
        instr->message = instr->link->recvs++;
        break;
      case JPP_INSTR_RUN:
      case JPP_INSTR_DELETE:
      case JPP_INSTR_MOVE:
      case JPP_INSTR_KIND_COUNT:
        break;
    }
  }
}

jpp_status_t* jpp__trace_allocate(jpp_runtime_t* runtime) {
  jpp_tracer_t* tracer = &runtime->tracer;
  uint64_t runs = 0;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) runs += runtime->actors[r].num_runs;
  tracer->count = 2 * runtime->queue.count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, tracer->count, &tracer->steps));
  for (uint32_t i = 0; i < tracer->count; ++i) {
    JPP_RETURN_IF_ERROR(allocate_step(runtime, runs, &tracer->steps[i]));
  }
  uint32_t registers = 0, messages = 0;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    uint32_t count = runtime->actors[r].program->num_registers;
    if (count > registers) registers = count;
    number_messages(&runtime->actors[r]);
  }
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    link->first_message = messages;
    messages += link->sends > link->recvs ? link->sends : link->recvs;
  }
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, registers, &tracer->register_ends));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, runtime->plan->ranks, &tracer->heads));
  return JPP_ARENA_ARRAY(&runtime->arena, messages, &tracer->message_ends);
}

// --- While a step is issued -----------------------------------------------------------

void jpp__trace_begin(jpp_runtime_t* runtime, jpp_step_t* step) {
  step->trace = NULL;
  bool observed = begin_observed_step();
  if (atomic_load(&runtime->tracer.wanted) || observed) {
    step->trace = &runtime->tracer.steps[step->number % runtime->tracer.count];
    step->trace->complete = false;
    step->trace->observed = observed;
    step->trace->trace.step = step->number;
    step->trace->trace.start = jpp__clock_now();
    step->trace->trace.clock = jpp__clock_real_now();
  }
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_actor_t* actor = &runtime->actors[r];
    actor->step->trace = step->trace ? &step->trace->actors[r] : NULL;
    actor->live_bytes = actor->given_bytes;
    if (step->trace) actor->step->trace->peak_live_bytes = actor->given_bytes;
  }
}

void jpp__trace_count(jpp_actor_t* actor, int64_t bytes) {
  actor->live_bytes += (uint64_t)bytes;
  uint64_t* peak = &actor->step->trace->peak_live_bytes;
  if (actor->live_bytes > *peak) *peak = actor->live_bytes;
}

// Any thread, no lock held. The runtime may reuse the waiter once `pending` has been
// decremented.
static void run_ended(void* user, jpp_status_t* status) {
  jpp_run_waiter_t* waiter = user;
  waiter->end = jpp__clock_now();
  jpp_status_free(status);
  atomic_fetch_sub_explicit(waiter->pending, 1, memory_order_release);
}

jpp_status_t* jpp__trace_watch(jpp_actor_t* actor, uint32_t run, int64_t issued) {
  jpp_runtime_t* runtime = actor->runtime;
  jpp_step_trace_t* step = runtime->step->trace;
  size_t first = (size_t)run * runtime->devices_per_rank;
  actor->step->trace->runs[run].issued = issued - step->trace.start;
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    jpp_run_waiter_t* waiter = &actor->step->trace->waiters[first + d];
    *waiter = (jpp_run_waiter_t){.base = {.callback = run_ended, .user = waiter},
                                 .pending = &step->pending};
    atomic_fetch_add_explicit(&step->pending, 1, memory_order_relaxed);
    jpp_status_t* status = jpp_client_event_on_ready(
        runtime->client, actor->step->events[first + d], &waiter->base);
    if (!status) continue;
    atomic_fetch_sub_explicit(&step->pending, 1, memory_order_relaxed);
    return status;
  }
  return NULL;
}

// --- Afterwards -----------------------------------------------------------------------

// An event may be ready a moment before its callbacks have run.
void jpp__trace_drain(jpp_step_t* step) {
  while (atomic_load_explicit(&step->trace->pending, memory_order_acquire)) sched_yield();
}

static void find_run_ends(const jpp_actor_t* actor, jpp_step_trace_t* step) {
  jpp_actor_trace_t* trace = &step->actors[actor->program->rank];
  const jpp_run_waiter_t* waiter = trace->waiters;
  for (uint32_t run = 0; run < actor->num_runs; ++run) {
    int64_t end = 0;
    for (uint32_t d = 0; d < actor->runtime->devices_per_rank; ++d, ++waiter) {
      if (waiter->end > end) end = waiter->end;
    }
    trace->runs[run].end = end - step->trace.start;
    trace->last_end = end;
  }
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

// A walk along an actor's program with the times of one step.
typedef struct walk {
  const jpp_actor_t* actor;
  jpp_trace_run_t* runs;
  int64_t* message_ends;
  int64_t* register_ends;
} walk_t;

// When the run was issued and its arguments existed, given when each register was filled.
static int64_t find_run_start(const walk_t* walk, const jpp_actor_instr_t* instr) {
  const jpp_trace_run_t* run = &walk->runs[instr->run];
  int64_t start = run->issued;
  for (uint32_t i = 0; i < instr->num_args; ++i) {
    start = later(start, walk->register_ends[instr->operands[i]]);
  }
  return start < run->end ? start : run->end;
}

static int64_t* message_end(const walk_t* walk, const jpp_actor_instr_t* instr) {
  return &walk->message_ends[instr->link->first_message + instr->message];
}

// When the registers that the instruction fills are full.
static int64_t end_of_results(const walk_t* walk, const jpp_actor_instr_t* instr,
                              bool starts) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      return walk->runs[instr->run].end;
    case JPP_INSTR_RECV:
      return starts ? *message_end(walk, instr) : 0;
    case JPP_INSTR_MOVE:
      return walk->register_ends[instr->operands[0]];
    case JPP_INSTR_SEND:
    case JPP_INSTR_DELETE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return 0;
}

// Follows an actor's registers through its program. A message or a moved value exists
// when the run that made it has ended; the time of the copy itself is not measured. The
// first walk over all actors (`starts` false) records when messages exist, and the second
// one uses these times.
static void follow_registers(const walk_t* walk, bool starts) {
  const jpp_actor_t* actor = walk->actor;
  int64_t* ends = walk->register_ends;
  for (uint32_t i = 0; i < actor->program->num_registers; ++i) ends[i] = 0;
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    if (instr->kind == JPP_INSTR_SEND) {
      *message_end(walk, instr) = ends[instr->operands[0]];
    } else if (instr->kind == JPP_INSTR_RUN && starts) {
      walk->runs[instr->run].start = find_run_start(walk, instr);
    }
    int64_t end = end_of_results(walk, instr, starts);
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      ends[instr->operands[instr->num_args + k]] = end;
    }
  }
}

static jpp_step_trace_t* trace_of(const jpp_tracer_t* tracer, uint64_t step) {
  jpp_step_trace_t* found = &tracer->steps[step % tracer->count];
  return found->complete && found->trace.step == step ? found : NULL;
}

static void follow_actors(jpp_runtime_t* runtime, jpp_step_trace_t* step, bool starts) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    walk_t walk = {.actor = &runtime->actors[r],
                   .runs = step->actors[r].runs,
                   .message_ends = runtime->tracer.message_ends,
                   .register_ends = runtime->tracer.register_ends};
    follow_registers(&walk, starts);
  }
}

static bool share_device(const jpp_runtime_t* runtime, uint32_t a, uint32_t b) {
  const jpp_actor_t* actors = runtime->actors;
  return actors[a].devices[0] == actors[b].devices[0];
}

// Of the runs of all ranks on the rank's devices, the one that ended next; NULL after the
// last one. `heads` counts the runs of each rank that were returned.
static jpp_trace_run_t* next_on_device(const jpp_runtime_t* runtime,
                                       const jpp_step_trace_t* step, uint32_t rank,
                                       uint32_t* heads) {
  jpp_trace_run_t* next = NULL;
  for (uint32_t r = rank; r < runtime->plan->ranks; ++r) {
    if (heads[r] == runtime->actors[r].num_runs || !share_device(runtime, r, rank)) {
      continue;
    }
    jpp_trace_run_t* run = &step->actors[r].runs[heads[r]];
    if (!next || run->end < next->end) next = run;
  }
  if (next) ++heads[next->rank];
  return next;
}

// A client that queues runs executes those of a device one at a time, whichever of the
// device's ranks they belong to. One that runs programs inside calls has finished a
// rank's previous run when the next one is issued.
static void wait_for_devices(jpp_runtime_t* runtime, jpp_step_trace_t* step) {
  uint32_t* heads = runtime->tracer.heads;
  const jpp_step_trace_t* before = trace_of(&runtime->tracer, step->trace.step - 1);
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) heads[r] = 0;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    int64_t idle_since = 0;
    for (uint32_t o = r; before && o < runtime->plan->ranks; ++o) {
      if (!share_device(runtime, o, r)) continue;
      idle_since = later(idle_since, before->actors[o].last_end - step->trace.start);
    }
    for (jpp_trace_run_t* run; (run = next_on_device(runtime, step, r, heads));) {
      int64_t start = later(run->start, idle_since);
      run->start = start < run->end ? start : run->end;
      idle_since = later(idle_since, run->end);
    }
  }
}

void jpp__trace_finish(jpp_runtime_t* runtime, jpp_step_t* step, bool success) {
  jpp_step_trace_t* found = step->trace;
  if (success) {
    found->trace.length = jpp__clock_now() - found->trace.start;
    for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
      found->peaks[r] = found->actors[r].peak_live_bytes;
      find_run_ends(&runtime->actors[r], found);
    }
    follow_actors(runtime, found, false);
    follow_actors(runtime, found, true);
    if (!jpp_client_info(runtime->client)->runs_in_call) wait_for_devices(runtime, found);
  }
  if (found->observed) end_observed_step(success ? &found->trace : NULL);
  found->complete = success;
  runtime->tracer.last = step->number;
}

void jpp_runtime_set_tracing(jpp_runtime_t* runtime, bool enabled) {
  atomic_store(&runtime->tracer.wanted, enabled);
}

const jpp_trace_t* jpp_runtime_trace(const jpp_runtime_t* runtime, uint32_t back) {
  const jpp_tracer_t* tracer = &runtime->tracer;
  if (back >= tracer->last || back >= runtime->queue.count) return NULL;
  const jpp_step_trace_t* found = trace_of(tracer, tracer->last - back);
  return found ? &found->trace : NULL;
}

const jpp_trace_t* jpp_runtime_last_trace(const jpp_runtime_t* runtime) {
  return jpp_runtime_trace(runtime, 0);
}
