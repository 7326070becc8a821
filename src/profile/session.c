// Turns traced steps into events of a profile. A step's trace contains only its runs: a
// wait is the time between two runs, and a send is shown at the end of the run before it.
#include "profile/session.h"

#include <stdio.h>
#include <string.h>

#include "base/clock.h"

void jpp__profile_init(jpp_profile_session_t* session) {
  *session =
      (jpp_profile_session_t){.since_1970 = jpp__clock_real_now() - jpp__clock_now()};
  jpp__arena_init(&session->arena);
}

void jpp__profile_deinit(jpp_profile_session_t* session) {
  jpp_vec_deinit(&session->events);
  jpp_vec_deinit(&session->names);
  jpp__map_deinit(&session->numbers);
  jpp__arena_deinit(&session->arena);
}

static jpp_status_t* number_name(jpp_profile_session_t* session, const char* name,
                                 uint32_t* out_number) {
  uint32_t length = (uint32_t)strlen(name);
  const uint32_t* known = jpp__map_find(&session->numbers, name, length);
  if (known) {
    *out_number = *known;
    return NULL;
  }
  const char* kept = NULL;
  *out_number = (uint32_t)session->names.count;
  JPP_RETURN_IF_ERROR(jpp__arena_strndup(&session->arena, name, length, &kept));
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&session->names, kept));
  return jpp__map_add(&session->numbers, kept, length, *out_number, NULL);
}

// A walk along one rank's program and its runs.
typedef struct walk {
  jpp_profile_session_t* session;
  const jpp_trace_t* trace;
  uint32_t rank;
  const jpp_trace_run_t* run;  // the next run
  int64_t now;                 // when the previous run ended, from the step's start
} walk_t;

static jpp_status_t* add_event(const walk_t* walk, jpp_profile_line_t line,
                               const char* name, uint32_t microbatch, int64_t start,
                               int64_t end) {
  jpp_profile_session_t* session = walk->session;
  int64_t origin = session->since_1970 + walk->trace->start;
  jpp_profile_event_t event = {.rank = walk->rank,
                               .line = line,
                               .microbatch = microbatch,
                               .step = walk->trace->step,
                               .start = origin + start,
                               .duration = end > start ? end - start : 0};
  JPP_RETURN_IF_ERROR(number_name(session, name, &event.name));
  return JPP_VEC_PUSH(&session->events, event);
}

static jpp_status_t* add_run(walk_t* walk) {
  const jpp_trace_run_t* run = walk->run++;
  const char* task = walk->trace->plan->staged->tasks[run->task].name;
  if (run->start > walk->now) {
    char name[128];
    snprintf(name, sizeof(name), "wait for %s", task);
    JPP_RETURN_IF_ERROR(
        add_event(walk, JPP_PROFILE_WAITS, name, run->microbatch, walk->now, run->start));
  }
  walk->now = run->end;
  return add_event(walk, JPP_PROFILE_TASKS, task, run->microbatch, run->start, run->end);
}

static jpp_status_t* add_send(const walk_t* walk, const jpp_instr_t* instr) {
  char name[64];
  snprintf(name, sizeof(name), "send to rank %u",
           walk->trace->plan->channels[instr->target].dst);
  return add_event(walk, JPP_PROFILE_SENDS, name, instr->microbatch, walk->now,
                   walk->now);
}

// A task without ops has no run.
static bool is_next_run(const walk_t* walk, const jpp_instr_t* instr) {
  const jpp_trace_t* trace = walk->trace;
  return walk->run < trace->runs + trace->num_runs && walk->run->rank == walk->rank &&
         walk->run->task == instr->target && walk->run->microbatch == instr->microbatch;
}

static jpp_status_t* add_rank(walk_t* walk) {
  const jpp_program_t* program = &walk->trace->plan->programs[walk->rank];
  walk->now = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    switch ((jpp_instr_kind_t)instr->kind) {
      case JPP_INSTR_RUN:
        if (is_next_run(walk, instr)) JPP_RETURN_IF_ERROR(add_run(walk));
        break;
      case JPP_INSTR_SEND:
        JPP_RETURN_IF_ERROR(add_send(walk, instr));
        break;
      case JPP_INSTR_RECV:
      case JPP_INSTR_DELETE:
      case JPP_INSTR_MOVE:
      case JPP_INSTR_KIND_COUNT:
        break;
    }
  }
  return NULL;
}

// The ranks of other processes have no runs here.
static jpp_status_t* add_ranks(jpp_profile_session_t* session, const jpp_trace_t* trace) {
  walk_t walk = {.session = session, .trace = trace, .run = trace->runs};
  const jpp_trace_run_t* end = trace->runs + trace->num_runs;
  while (walk.run < end) {
    const jpp_trace_run_t* first = walk.run;
    walk.rank = first->rank;
    JPP_RETURN_IF_ERROR(add_rank(&walk));
    if (walk.run == first) break;
  }
  return NULL;
}

void jpp__profile_add_step(jpp_profile_session_t* session, const jpp_trace_t* trace) {
  size_t events = session->events.count;
  jpp_status_t* status = NULL;
  if (events < kJppProfileMaxEvents) status = add_ranks(session, trace);
  if (!status && events < kJppProfileMaxEvents) return;
  jpp_status_free(status);
  session->events.count = events;
  ++session->steps_lost;
}
