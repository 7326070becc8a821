// Executes a plan's programs event by event. There are two kinds of events: a message
// arrives, and the earliest job of a host ends, a run on a device or a call of an issuing
// thread. Everything else follows at the time of the event that allows it.
#include "jaxpp/predict.h"

#include <math.h>

#include "base/null.h"
#include "base/struct_size.h"
#include "predict/cores.h"
#include "predict/heap.h"
#include "predict/machine.h"
#include "predict/wiring.h"

// The progress of a rank's issuing.
typedef struct actor {
  uint32_t at;    // the next instruction
  uint32_t next;  // the next rank of its process; JPP_NONE: the last
} actor_t;

typedef struct process {
  uint32_t first;      // its lowest rank; JPP_NONE: it has none
  uint32_t turn;       // the rank that it is visiting
  uint32_t step;       // the step that it is issuing or will begin next
  uint32_t remaining;  // instructions of that step that have not been issued
  bool begun;          // whether it has begun that step
  bool has_run;        // the visit has issued a run
  bool advanced;       // the current round has issued an instruction
  bool calling;        // its thread is in a call
  bool woken;          // it is in `wake` already
} process_t;

// Runs that were issued, in order.
typedef struct device {
  uint64_t first, last;  // runs; kNoRun: none
  bool busy;             // the first one is running
} device_t;

typedef struct run_state {
  uint64_t next;     // the next run in its device's queue
  uint32_t missing;  // messages that have not arrived
  bool done;
} run_state_t;

typedef struct message_state {
  bool sent;  // its send was issued
  bool arrived;
  uint64_t reader;  // the issued run that waits for it; kNoRun
} message_state_t;

typedef struct host {
  jpp_cores_t cores;
  jpp_heap_t jobs;  // by the `work` at which they end: devices first, then processes
} host_t;

static const uint64_t kNoRun = UINT64_MAX;

typedef struct predictor {
  const jpp_plan_t* plan;
  const double* task_times;
  const uint64_t* first_times;  // NULL: one time for each task
  jpp_machine_t machine;
  jpp_wiring_t wiring;
  uint32_t ranks, steps, in_flight;
  double now;
  actor_t* actors;          // [ranks]
  process_t* processes;     // [ranks]
  device_t* devices;        // [ranks]
  host_t* hosts;            // [ranks]
  uint32_t* credits;        // [channels] free slots
  double* link_free;        // [wiring.num_links]
  run_state_t* run_states;  // [steps * runs]
  message_state_t* states;  // [steps * messages]
  jpp_task_run_t* runs;     // [steps * runs]
  uint32_t* runs_left;      // [ranks * steps] by process
  jpp_heap_t arrivals;      // arrival times of messages
  jpp_heap_t wake;          // processes that may continue, the lowest first
} predictor_t;

// --- Jobs on the cores of a host ------------------------------------------------------

static void start_job(predictor_t* p, uint32_t host, double load, double time,
                      uint64_t job) {
  host_t* on = &p->hosts[host];
  jpp__cores_advance(&on->cores, p->now);
  on->cores.load += load;
  jpp__heap_push(&on->jobs, on->cores.work + time, job);
}

static uint64_t end_job(predictor_t* p, host_t* on) {
  jpp_heap_entry_t job = jpp__heap_pop(&on->jobs);
  // Exact, so that jobs that end together do so.
  on->cores.work = job.time;
  on->cores.now = p->now;
  on->cores.load -= job.id < p->ranks ? p->machine.threads : 1;
  return job.id;
}

static void wake_process(predictor_t* p, uint32_t process) {
  if (p->processes[process].woken) return;
  p->processes[process].woken = true;
  jpp__heap_push(&p->wake, 0, process);
}

// --- Devices and links ----------------------------------------------------------------

static double time_of(const predictor_t* p, const jpp_task_run_t* run) {
  if (!p->first_times) return p->task_times[run->task];
  const jpp_staged_t* staged = p->plan->staged;
  uint64_t first = p->first_times[run->task];
  uint64_t count = p->first_times[run->task + 1] - first, number = run->step;
  if (run->microbatch != JPP_NONE) {
    uint32_t loop = staged->tasks[run->task].loop;
    number = number * staged->graph->loops[loop].microbatches + run->microbatch;
  }
  return count ? p->task_times[first + number % count] : 0;
}

static void start_run(predictor_t* p, uint32_t device) {
  device_t* d = &p->devices[device];
  if (d->busy || d->first == kNoRun || p->run_states[d->first].missing) return;
  jpp_task_run_t* run = &p->runs[d->first];
  d->busy = true;
  run->start = p->now;
  start_job(p, p->machine.rank_host[run->rank], p->machine.threads, time_of(p, run),
            device);
}

// Called when the message's value exists and its send was issued.
static void depart(predictor_t* p, uint64_t message) {
  const jpp_wired_message_t* wired =
      &p->wiring.messages[message % p->wiring.num_messages];
  const jpp_link_speed_t* speed =
      wired->channel == JPP_NONE ? &p->machine.host : &p->machine.links[wired->link];
  double* link_free = &p->link_free[wired->link];
  *link_free = fmax(p->now, *link_free);
  if (speed->bandwidth > 0) *link_free += wired->bytes / speed->bandwidth;
  jpp__heap_push(&p->arrivals, *link_free + speed->latency, message);
}

// The results of `source` in this step exist: its messages leave if their sends were
// issued.
static void release_messages(predictor_t* p, uint32_t step, uint32_t source) {
  uint64_t first = (uint64_t)step * p->wiring.num_messages;
  for (uint32_t m = p->wiring.first_made[source]; m != JPP_NONE;
       m = p->wiring.messages[m].next_of_same) {
    if (p->states[first + m].sent) depart(p, first + m);
  }
}

static void end_run(predictor_t* p, uint32_t device) {
  device_t* d = &p->devices[device];
  uint64_t ended = d->first;
  jpp_task_run_t* run = &p->runs[ended];
  run->end = p->now;
  p->run_states[ended].done = true;
  d->busy = false;
  d->first = p->run_states[ended].next;
  if (d->first == kNoRun) d->last = kNoRun;
  release_messages(p, run->step, (uint32_t)(ended % p->wiring.num_runs));
  uint32_t process = p->machine.rank_process[run->rank];
  if (!--p->runs_left[(size_t)process * p->steps + run->step]) wake_process(p, process);
  start_run(p, device);
}

static bool crosses(const predictor_t* p, const jpp_plan_channel_t* channel) {
  return p->machine.rank_process[channel->src] != p->machine.rank_process[channel->dst];
}

static void arrive(predictor_t* p, uint64_t message) {
  uint32_t number = (uint32_t)(message % p->wiring.num_messages);
  const jpp_wired_message_t* wired = &p->wiring.messages[number];
  message_state_t* state = &p->states[message];
  state->arrived = true;
  release_messages(p, (uint32_t)(message / p->wiring.num_messages),
                   p->wiring.num_runs + number);
  if (state->reader != kNoRun) {
    --p->run_states[state->reader].missing;
    start_run(p, p->machine.rank_device[wired->rank]);
  }
  if (wired->channel != JPP_NONE && crosses(p, &p->plan->channels[wired->channel])) {
    wake_process(p, p->machine.rank_process[wired->rank]);
  }
}

// --- Issuing --------------------------------------------------------------------------

static void issue_run(predictor_t* p, uint32_t step, uint32_t rank,
                      const jpp_wired_instr_t* instr) {
  uint64_t number = (uint64_t)step * p->wiring.num_runs + instr->number;
  run_state_t* run = &p->run_states[number];
  run->next = kNoRun;
  for (uint32_t i = 0; i < instr->num_needs; ++i) {
    uint32_t message = p->wiring.needs[instr->first_need + i];
    message_state_t* need = &p->states[(uint64_t)step * p->wiring.num_messages + message];
    // An earlier run of the rank may wait for it already, and this run is queued after
    // that one.
    if (need->arrived || need->reader != kNoRun) continue;
    need->reader = number;
    ++run->missing;
  }
  uint32_t device = p->machine.rank_device[rank];
  device_t* d = &p->devices[device];
  if (d->last == kNoRun) {
    d->first = number;
  } else {
    p->run_states[d->last].next = number;
  }
  d->last = number;
  start_run(p, device);
}

static bool source_exists(const predictor_t* p, uint32_t step, uint32_t source) {
  if (source == JPP_NONE) return true;
  uint32_t runs = p->wiring.num_runs;
  if (source < runs) return p->run_states[(uint64_t)step * runs + source].done;
  return p->states[(uint64_t)step * p->wiring.num_messages + source - runs].arrived;
}

static bool is_blocked(const predictor_t* p, uint32_t step,
                       const jpp_wired_instr_t* instr) {
  if (instr->kind != JPP_INSTR_SEND && instr->kind != JPP_INSTR_RECV) return false;
  uint32_t channel = p->wiring.messages[instr->number].channel;
  if (instr->kind == JPP_INSTR_SEND) return !p->credits[channel];
  const message_state_t* state =
      &p->states[(uint64_t)step * p->wiring.num_messages + instr->number];
  return crosses(p, &p->plan->channels[channel]) ? !state->arrived : !state->sent;
}

// Issues the next instruction of the process.
static void issue_instr(predictor_t* p, process_t* process) {
  actor_t* actor = &p->actors[process->turn];
  const jpp_wired_instr_t* instr = &p->wiring.instrs[process->turn][actor->at++];
  uint64_t message = (uint64_t)process->step * p->wiring.num_messages + instr->number;
  --process->remaining;
  if (instr->kind == JPP_INSTR_RUN) {
    issue_run(p, process->step, process->turn, instr);
  } else if (instr->kind == JPP_INSTR_SEND || instr->kind == JPP_INSTR_MOVE) {
    const jpp_wired_message_t* wired = &p->wiring.messages[instr->number];
    if (wired->channel != JPP_NONE) --p->credits[wired->channel];
    p->states[message].sent = true;
    if (source_exists(p, process->step, wired->source)) depart(p, message);
  } else if (instr->kind == JPP_INSTR_RECV) {
    uint32_t channel = p->wiring.messages[instr->number].channel;
    ++p->credits[channel];
    wake_process(p, p->machine.rank_process[p->plan->channels[channel].src]);
  }
}

// Begins the next step of the process if it may; returns whether it did.
static bool begin_step(predictor_t* p, process_t* process) {
  uint32_t step = process->step;
  if (step == p->steps) return false;
  const uint32_t* left =
      &p->runs_left[(size_t)p->machine.rank_process[process->first] * p->steps];
  if (step >= p->in_flight && left[step - p->in_flight]) return false;
  process->begun = true;
  process->remaining = 0;
  for (uint32_t r = process->first; r != JPP_NONE; r = p->actors[r].next) {
    p->actors[r].at = 0;
    process->remaining += p->plan->programs[r].num_instrs;
  }
  return true;
}

// Returns false if all ranks of the process are blocked.
static bool take_next_turn(predictor_t* p, process_t* process) {
  process->has_run = false;
  process->turn = p->actors[process->turn].next;
  if (process->turn != JPP_NONE) return true;
  process->turn = process->first;
  if (!process->remaining) {
    process->begun = false;
    ++process->step;
    return true;
  }
  bool advanced = process->advanced;
  process->advanced = false;
  return advanced;
}

static bool takes_time(const predictor_t* p, const jpp_wired_instr_t* instr) {
  if (p->machine.call == 0 || instr->kind == JPP_INSTR_DELETE) return false;
  if (instr->kind != JPP_INSTR_RUN) return true;
  // The runtime skips tasks without ops.
  return p->plan->staged->tasks[p->wiring.runs[instr->number].task].num_ops > 0;
}

static void advance_process(predictor_t* p, uint32_t number) {
  process_t* process = &p->processes[number];
  while (!process->calling && (process->begun || begin_step(p, process))) {
    uint32_t rank = process->turn, at = p->actors[rank].at;
    bool ended = at == p->plan->programs[rank].num_instrs;
    const jpp_wired_instr_t* instr = ended ? NULL : &p->wiring.instrs[rank][at];
    if (ended || (instr->kind == JPP_INSTR_RUN && process->has_run) ||
        is_blocked(p, process->step, instr)) {
      if (!take_next_turn(p, process)) return;
      continue;
    }
    process->advanced = true;
    process->has_run |= instr->kind == JPP_INSTR_RUN;
    if (takes_time(p, instr)) {
      process->calling = true;
      start_job(p, p->machine.rank_host[rank], 1, p->machine.call,
                (uint64_t)p->ranks + number);
    } else {
      issue_instr(p, process);
    }
  }
}

// --- The clock ------------------------------------------------------------------------

static double end_of_first_job(const host_t* host) {
  double left = host->jobs.entries[0].time - host->cores.work;
  return host->cores.now + fmax(left, 0) / jpp__cores_speed(&host->cores);
}

// When the next event happens; INFINITY if there is none. *out_host is the host whose
// first job ends then; NULL: a message arrives.
static double find_event(const predictor_t* p, host_t** out_host) {
  double at = p->arrivals.count ? p->arrivals.entries[0].time : INFINITY;
  *out_host = NULL;
  for (uint32_t h = 0; h < p->ranks; ++h) {
    if (!p->hosts[h].jobs.count) continue;
    double end = end_of_first_job(&p->hosts[h]);
    if (end >= at) continue;
    at = end;
    *out_host = &p->hosts[h];
  }
  return at;
}

// The clocks of two hosts round differently: events this close count as simultaneous.
static bool is_now(const predictor_t* p, double at) { return at <= p->now * (1 + 1e-12); }

static void take_event(predictor_t* p, host_t* host) {
  if (!host) {
    arrive(p, jpp__heap_pop(&p->arrivals).id);
    return;
  }
  uint64_t job = end_job(p, host);
  if (job < p->ranks) {
    end_run(p, (uint32_t)job);
    return;
  }
  uint32_t process = (uint32_t)(job - p->ranks);
  p->processes[process].calling = false;
  issue_instr(p, &p->processes[process]);
  wake_process(p, process);
}

static jpp_status_t* execute_programs(predictor_t* p) {
  for (;;) {
    host_t* host = NULL;
    double at = find_event(p, &host);
    if (p->wake.count && !is_now(p, at)) {
      // A thread continues when all simultaneous events have happened.
      uint32_t process = (uint32_t)jpp__heap_pop(&p->wake).id;
      p->processes[process].woken = false;
      advance_process(p, process);
      continue;
    }
    if (isinf(at)) break;
    if (!is_now(p, at)) p->now = at;
    take_event(p, host);
  }
  for (uint32_t r = 0; r < p->ranks; ++r) {
    const process_t* process = &p->processes[p->machine.rank_process[r]];
    if (process->step == p->steps) continue;
    if (p->actors[r].at == p->plan->programs[r].num_instrs) continue;
    return jpp_status_make(
        JPP_PROGRAM_ERROR, "prediction: rank %u waits for ever at instruction %u, %s", r,
        p->actors[r].at, jpp_instr_kind_name(p->wiring.instrs[r][p->actors[r].at].kind));
  }
  return NULL;
}

// --- Setting up -----------------------------------------------------------------------

static jpp_status_t* allocate_runs(predictor_t* p, jpp_arena_t* arena,
                                   jpp_arena_t* scratch) {
  uint64_t runs = (uint64_t)p->steps * p->wiring.num_runs;
  uint64_t messages = (uint64_t)p->steps * p->wiring.num_messages;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, runs, &p->runs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, runs, &p->run_states));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, messages, &p->states));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, messages, &p->arrivals.entries));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(scratch, (uint64_t)p->ranks * p->steps, &p->runs_left));
  for (uint64_t m = 0; m < messages; ++m) p->states[m].reader = kNoRun;
  for (uint64_t i = 0; i < runs; ++i) {
    const jpp_wired_run_t* wired = &p->wiring.runs[i % p->wiring.num_runs];
    uint32_t step = (uint32_t)(i / p->wiring.num_runs);
    p->runs[i] = (jpp_task_run_t){.rank = wired->rank,
                                  .task = wired->task,
                                  .microbatch = wired->microbatch,
                                  .step = step};
    ++p->runs_left[(size_t)p->machine.rank_process[wired->rank] * p->steps + step];
  }
  return NULL;
}

static jpp_status_t* allocate_hosts(predictor_t* p, jpp_arena_t* scratch) {
  uint32_t* jobs = NULL;  // largest number of each host
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->ranks, &p->hosts));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->ranks, &jobs));
  for (uint32_t r = 0; r < p->ranks; ++r) jobs[p->machine.rank_host[r]] += 2;
  for (uint32_t h = 0; h < p->ranks; ++h) {
    host_t* host = &p->hosts[h];
    host->cores.count = p->machine.cores;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, jobs[h], &host->jobs.entries));
  }
  return NULL;
}

static jpp_status_t* allocate_predictor(predictor_t* p, jpp_arena_t* arena,
                                        jpp_arena_t* scratch) {
  JPP_RETURN_IF_ERROR(allocate_runs(p, arena, scratch));
  JPP_RETURN_IF_ERROR(allocate_hosts(p, scratch));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->ranks, &p->actors));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->ranks, &p->processes));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->ranks, &p->devices));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->ranks, &p->wake.entries));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->plan->num_channels, &p->credits));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, p->wiring.num_links, &p->link_free));
  for (uint32_t c = 0; c < p->plan->num_channels; ++c) {
    p->credits[c] = p->plan->channels[c].slots;
  }
  for (uint32_t r = 0; r < p->ranks; ++r) {
    p->devices[r] = (device_t){.first = kNoRun, .last = kNoRun};
    p->processes[r].first = JPP_NONE;
  }
  for (uint32_t r = p->ranks; r-- > 0;) {
    process_t* process = &p->processes[p->machine.rank_process[r]];
    p->actors[r].next = process->first;
    process->first = process->turn = r;
  }
  for (uint32_t r = p->ranks; r-- > 0;) wake_process(p, p->machine.rank_process[r]);
  return NULL;
}

static jpp_status_t* check_times(const jpp_staged_t* staged,
                                 const jpp_predict_options_t* options) {
  const uint64_t* firsts = options->first_times;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    uint64_t end = firsts ? firsts[t + 1] : t + 1;
    for (uint64_t i = firsts ? firsts[t] : t; i < end; ++i) {
      if (jpp__machine_takes(options->task_times[i])) continue;
      return jpp_status_make(
          JPP_INVALID_ARGUMENT, "task %s: expected a time from 0 to %g, found %g",
          staged->tasks[t].name, JPP_LONGEST_TIME, options->task_times[i]);
    }
    if (!firsts || firsts[t] <= end) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "task %s: expected ascending first_times, found %llu and %llu",
                           staged->tasks[t].name, (unsigned long long)firsts[t],
                           (unsigned long long)end);
  }
  return NULL;
}

// --- The result -----------------------------------------------------------------------

typedef struct storage {
  jpp_prediction_t prediction;
  jpp_arena_t arena;
} storage_t;

static jpp_status_t* sum_up(const predictor_t* p, storage_t* storage) {
  double* busy = NULL;
  double all = 0, last = 0, makespan = 0;
  jpp_prediction_t* out = &storage->prediction;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&storage->arena, p->ranks, &busy));
  *out = (jpp_prediction_t){.plan = p->plan,
                            .steps = p->steps,
                            .num_runs = (uint64_t)p->steps * p->wiring.num_runs,
                            .runs = p->runs,
                            .busy = busy};
  for (uint64_t i = 0; i < out->num_runs; ++i) {
    const jpp_task_run_t* run = &p->runs[i];
    last = fmax(last, run->end);
    if (run->step) continue;
    makespan = fmax(makespan, run->end);
    busy[run->rank] += run->end - run->start;
    all += run->end - run->start;
  }
  out->makespan = makespan;
  out->period = p->steps > 1 ? (last - makespan) / (p->steps - 1) : makespan;
  out->bubble = makespan > 0 ? 1 - all / (p->ranks * makespan) : 0;
  return NULL;
}

static jpp_status_t* predict_into(const jpp_plan_t* plan,
                                  const jpp_predict_options_t* options,
                                  jpp_arena_t* scratch, storage_t* storage) {
  predictor_t p = {.plan = plan,
                   .task_times = options->task_times,
                   .first_times = options->first_times,
                   .ranks = plan->ranks,
                   .steps = options->steps ? options->steps : 1,
                   .in_flight = options->steps_in_flight ? options->steps_in_flight : 2};
  JPP_RETURN_IF_ERROR(check_times(plan->staged, options));
  JPP_RETURN_IF_ERROR(
      jpp__machine_complete(options->machine, plan->ranks, scratch, &p.machine));
  JPP_RETURN_IF_ERROR(jpp__wiring_create(plan, scratch, &p.wiring));
  JPP_RETURN_IF_ERROR(allocate_predictor(&p, &storage->arena, scratch));
  JPP_RETURN_IF_ERROR(execute_programs(&p));
  return sum_up(&p, storage);
}

jpp_status_t* jpp_predict(const jpp_plan_t* plan, const jpp_predict_options_t* options,
                          jpp_prediction_t** out_prediction) {
  JPP_RETURN_IF_NULL(plan, options, out_prediction);
  *out_prediction = NULL;
  jpp_predict_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_predict_options_t, steps_in_flight, options, &full));
  JPP_RETURN_IF_NULL(full.task_times);
  storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = predict_into(plan, &full, &scratch, storage);
  jpp__arena_deinit(&scratch);
  if (status) {
    jpp_prediction_destroy(&storage->prediction);
    return status;
  }
  *out_prediction = &storage->prediction;
  return NULL;
}

void jpp_prediction_destroy(jpp_prediction_t* prediction) {
  if (!prediction) return;
  storage_t* storage = (storage_t*)prediction;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}
