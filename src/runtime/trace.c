// Records when every task ran. While a step is issued, only two times of each run are
// stored: when it was issued and when its results were ready. Their meaning is worked out
// afterwards.
#include <sched.h>
#include <time.h>

#include "runtime/state.h"

int64_t jpp_trace_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// --- Memory for traces ----------------------------------------------------------------

static void name_runs(jpp_actor_t* actor) {
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    if (instr->kind != JPP_INSTR_RUN) continue;
    const jpp_instr_t* source = &actor->program->instrs[instr->source];
    actor->trace[instr->run] = (jpp_trace_run_t){.rank = actor->program->rank,
                                                 .task = source->target,
                                                 .microbatch = source->microbatch};
  }
}

static jpp_status_t* allocate_actor_trace(jpp_actor_t* actor, jpp_trace_run_t* runs) {
  jpp_runtime_t* runtime = actor->runtime;
  size_t waiters = (size_t)actor->num_runs * runtime->devices_per_rank;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, waiters, &actor->waiters));
  actor->trace = runs;
  name_runs(actor);
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
      case JPP_INSTR_KIND_COUNT:
        break;
    }
  }
}

static jpp_status_t* allocate_scratch(jpp_runtime_t* runtime) {
  uint32_t registers = 0, messages = 0;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    uint32_t count = runtime->plan->programs[r].num_registers;
    if (count > registers) registers = count;
    number_messages(&runtime->actors[r]);
  }
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    link->first_message = messages;
    messages += link->sends > link->recvs ? link->sends : link->recvs;
  }
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, registers, &runtime->register_ends));
  return JPP_ARENA_ARRAY(&runtime->arena, messages, &runtime->message_ends);
}

jpp_status_t* jpp_trace_allocate(jpp_runtime_t* runtime) {
  uint32_t ranks = runtime->plan->ranks;
  uint64_t runs = 0;
  jpp_trace_run_t* all = NULL;
  for (uint32_t r = 0; r < ranks; ++r) runs += runtime->actors[r].num_runs;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, runs, &all));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, ranks, &runtime->trace_peaks));
  runtime->trace = (jpp_trace_t){.plan = runtime->plan,
                                 .num_runs = runs,
                                 .runs = all,
                                 .peak_live_bytes = runtime->trace_peaks};
  for (uint32_t r = 0; r < ranks; ++r) {
    JPP_RETURN_IF_ERROR(allocate_actor_trace(&runtime->actors[r], all));
    all += runtime->actors[r].num_runs;
  }
  return allocate_scratch(runtime);
}

// --- While a step runs ----------------------------------------------------------------

void jpp_trace_begin(jpp_runtime_t* runtime) {
  runtime->traced = false;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_actor_t* actor = &runtime->actors[r];
    actor->live_bytes = actor->peak_live_bytes = actor->given_bytes;
  }
  runtime->trace_start = jpp_trace_now();
}

void jpp_trace_count(jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  actor->live_bytes += (uint64_t)instr->live_bytes;
  if (actor->live_bytes > actor->peak_live_bytes) {
    actor->peak_live_bytes = actor->live_bytes;
  }
}

// Any thread, no lock held. The waiter is the runtime's again once `pending` is lower.
static void run_ended(void* user, jpp_status_t* status) {
  jpp_run_waiter_t* waiter = user;
  waiter->end = jpp_trace_now();
  jpp_status_free(status);
  atomic_fetch_sub_explicit(waiter->pending, 1, memory_order_release);
}

jpp_status_t* jpp_trace_watch(jpp_actor_t* actor, uint32_t run, int64_t issued) {
  jpp_runtime_t* runtime = actor->runtime;
  size_t first = (size_t)run * runtime->devices_per_rank;
  actor->trace[run].issued = issued - runtime->trace_start;
  for (uint32_t d = 0; d < runtime->devices_per_rank; ++d) {
    jpp_run_waiter_t* waiter = &actor->waiters[first + d];
    *waiter = (jpp_run_waiter_t){.base = {.callback = run_ended, .user = waiter},
                                 .pending = &runtime->trace_pending};
    atomic_fetch_add_explicit(&runtime->trace_pending, 1, memory_order_relaxed);
    jpp_status_t* status = jpp_client_event_on_ready(
        runtime->client, actor->events[first + d], &waiter->base);
    if (!status) continue;
    atomic_fetch_sub_explicit(&runtime->trace_pending, 1, memory_order_relaxed);
    return status;
  }
  return NULL;
}

// An event may be ready a moment before its callbacks have run.
void jpp_trace_drain(jpp_runtime_t* runtime) {
  while (atomic_load_explicit(&runtime->trace_pending, memory_order_acquire)) {
    sched_yield();
  }
}

// --- Afterwards -----------------------------------------------------------------------

static void find_run_ends(jpp_actor_t* actor) {
  const jpp_runtime_t* runtime = actor->runtime;
  const jpp_run_waiter_t* waiter = actor->waiters;
  for (uint32_t run = 0; run < actor->num_runs; ++run) {
    int64_t end = 0;
    for (uint32_t d = 0; d < runtime->devices_per_rank; ++d, ++waiter) {
      if (waiter->end > end) end = waiter->end;
    }
    actor->trace[run].end = end - runtime->trace_start;
  }
}

static int64_t later(int64_t a, int64_t b) { return a > b ? a : b; }

// When the device could begin, from when each register was filled.
static int64_t find_run_start(const jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  const jpp_trace_run_t* run = &actor->trace[instr->run];
  int64_t start = run->issued;
  if (instr->run) start = later(start, run[-1].end);
  for (uint32_t i = 0; i < instr->num_args; ++i) {
    start = later(start, actor->runtime->register_ends[instr->operands[i]]);
  }
  return start < run->end ? start : run->end;
}

static int64_t* message_end(const jpp_actor_instr_t* instr, jpp_runtime_t* runtime) {
  return &runtime->message_ends[instr->link->first_message + instr->message];
}

// When the registers that the instruction fills are full.
static int64_t end_of_results(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                              bool starts) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      return actor->trace[instr->run].end;
    case JPP_INSTR_RECV:
      return starts ? *message_end(instr, actor->runtime) : 0;
    case JPP_INSTR_SEND:
    case JPP_INSTR_DELETE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return 0;
}

// Follows an actor's registers through its program. A message is there when the run that
// made it has ended; the copy's own time is not measured. Messages are filled in on the
// first walk over all actors (`starts` false), and taken on the second.
static void follow_registers(jpp_actor_t* actor, bool starts) {
  int64_t* ends = actor->runtime->register_ends;
  for (uint32_t i = 0; i < actor->program->num_registers; ++i) ends[i] = 0;
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    if (instr->kind == JPP_INSTR_SEND) {
      *message_end(instr, actor->runtime) = ends[instr->operands[0]];
    } else if (instr->kind == JPP_INSTR_RUN && starts) {
      actor->trace[instr->run].start = find_run_start(actor, instr);
    }
    int64_t end = end_of_results(actor, instr, starts);
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      ends[instr->operands[instr->num_args + k]] = end;
    }
  }
}

void jpp_trace_finish(jpp_runtime_t* runtime) {
  runtime->trace.length = jpp_trace_now() - runtime->trace_start;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    runtime->trace_peaks[r] = runtime->actors[r].peak_live_bytes;
    find_run_ends(&runtime->actors[r]);
    follow_registers(&runtime->actors[r], false);
  }
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r)
    follow_registers(&runtime->actors[r], true);
  runtime->traced = true;
}

void jpp_runtime_set_tracing(jpp_runtime_t* runtime, bool enabled) {
  atomic_store(&runtime->tracing_wanted, enabled);
}

const jpp_trace_t* jpp_runtime_last_trace(const jpp_runtime_t* runtime) {
  return runtime->traced ? &runtime->trace : NULL;
}
