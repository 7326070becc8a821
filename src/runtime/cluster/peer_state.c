// Writes the notes of this process's ranks, and reads the notes of other processes.
#include "runtime/cluster/peer_state.h"

#include "flight/waits.h"
#include "runtime/cluster/outbox.h"
#include "runtime/observe/recorder.h"
#include "runtime/step/failure.h"
#include "runtime/step/state.h"

// A row of a process' note.
typedef struct rank_note {
  uint64_t step;  // the step that was begun last
  // The step of the oldest unsent message; 0: none.
  uint64_t unsent_step;
  // Position in the program; its length: all instructions are issued.
  uint32_t at;
  uint32_t unsent;  // the SEND of the oldest unsent message
} rank_note_t;

// --- Notes ----------------------------------------------------------------------------

static void write_row(const jpp_runtime_t* runtime, uint32_t rank, rank_note_t* row) {
  const jpp_actor_t* actor = &runtime->actors[rank];
  *row = (rank_note_t){.step = atomic_load(&runtime->begun),
                       .at = atomic_load(&actor->shown)};
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    const jpp_link_t* link = runtime->remote_links[i];
    uint64_t step = 0;
    uint32_t instr = 0;
    if (!link->outbox || link->plan->src != rank) continue;
    if (!jpp__outbox_is_unmade(link->outbox, &step, &instr)) continue;
    bool first = !row->unsent_step || step < row->unsent_step ||
                 (step == row->unsent_step && instr < row->unsent);
    if (!first) continue;
    row->unsent_step = step;
    row->unsent = instr;
  }
}

static void write_note(void* user, void* note) {
  const jpp_runtime_t* runtime = user;
  rank_note_t* rows = note;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    if (!jpp__runtime_has_rank(runtime, r)) continue;
    write_row(runtime, r, &rows[runtime->peer_state.row_of[r]]);
  }
}

// Returns NULL if nothing is known of the rank.
static const rank_note_t* read_row(const jpp_runtime_t* runtime, uint32_t rank) {
  const rank_note_t* rows =
      jpp_transport_note(runtime->network, runtime->rank_process[rank]);
  return rows ? &rows[runtime->peer_state.row_of[rank]] : NULL;
}

jpp_status_t* jpp__peer_state_open(jpp_runtime_t* runtime) {
  jpp_peer_state_t* peer_state = &runtime->peer_state;
  uint32_t ranks = runtime->plan->ranks, processes = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, ranks, &peer_state->row_of));
  for (uint32_t r = 0; r < ranks; ++r) {
    for (uint32_t before = 0; before < r; ++before) {
      peer_state->row_of[r] += runtime->rank_process[before] == runtime->rank_process[r];
    }
    if (peer_state->row_of[r] >= peer_state->rows)
      peer_state->rows = peer_state->row_of[r] + 1;
    processes += peer_state->row_of[r] == 0;
  }
  peer_state->all = processes == jpp_transport_num_processes(runtime->network);
  return jpp_transport_open_notes(runtime->network,
                                  peer_state->rows * (uint32_t)sizeof(rank_note_t),
                                  write_note, runtime);
}

static bool have_begun_locked(const jpp_runtime_t* runtime, uint64_t step) {
  for (uint32_t r = 0; runtime->peer_state.all && r < runtime->plan->ranks; ++r) {
    const rank_note_t* row = read_row(runtime, r);
    if (!row || row->step < step) return false;
  }
  return runtime->peer_state.all;
}

bool jpp__peer_state_all_begun(jpp_runtime_t* runtime, uint64_t step) {
  pthread_mutex_lock(&runtime->network_mutex);
  bool all = have_begun_locked(runtime, step);
  pthread_mutex_unlock(&runtime->network_mutex);
  return all;
}

// --- Who waits for whom ---------------------------------------------------------------

static jpp_status_t* find_place(const jpp_runtime_t* runtime, uint32_t rank,
                                jpp_arena_t* arena, jpp_flight_place_t* place) {
  rank_note_t row;
  if (jpp__runtime_has_rank(runtime, rank)) {
    write_row(runtime, rank, &row);
  } else {
    const rank_note_t* known = read_row(runtime, rank);
    if (!known) return NULL;
    row = *known;
  }
  place->known = row.at <= runtime->plan->programs[rank].num_instrs;
  place->step = row.step;
  place->at = row.at;
  place->unsent_step = row.unsent_step;
  place->unsent = row.unsent;
  const jpp_program_t* program = &runtime->plan->programs[rank];
  jpp_flight_instr_t* instrs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, program->num_instrs, &instrs));
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    instrs[i] = jpp__recorder_instr(runtime->plan, program, &program->instrs[i]);
  }
  place->instrs = instrs;
  place->num_instrs = program->num_instrs;
  return NULL;
}

// "instruction 6, fwd_1 of microbatch 2"
static const char* describe_instr(const jpp_runtime_t* runtime, uint32_t rank,
                                  uint32_t at, char text[kJppPlaceSize]) {
  jpp__failure_describe_instr(runtime->plan, rank, at, text);
  return jpp__failure_behind_rank(text);
}

// Describes the rank at the end of a chain of waits.
static void append_state(const jpp_runtime_t* runtime, uint32_t rank,
                         const jpp_flight_place_t* place, jpp_str_t* out) {
  const jpp_program_t* program = &runtime->plan->programs[rank];
  unsigned long long begun = (unsigned long long)atomic_load(&runtime->begun);
  char text[kJppPlaceSize];
  if (place->unsent_step && place->unsent < program->num_instrs) {
    jpp_str_appendf(out, ", whose devices have not finished step %llu: %s",
                    (unsigned long long)place->unsent_step,
                    describe_instr(runtime, rank, place->unsent, text));
  } else if (place->step < begun) {
    jpp_str_appendf(out, ", which has not begun step %llu", begun);
  } else if (place->at < program->num_instrs) {
    jpp_str_appendf(out, ", which has reached %s",
                    describe_instr(runtime, rank, place->at, text));
  } else {
    jpp_str_append(out, ", which has issued all of its step");
  }
}

static void append_process(const jpp_runtime_t* runtime, uint32_t rank, jpp_str_t* out) {
  uint32_t process = runtime->rank_process[rank];
  if (process == runtime->process) {
    jpp_str_append(out, " (in this process)");
  } else {
    jpp_str_appendf(out, " (process %u at %s)", process,
                    jpp_transport_peer_name(runtime->network, process));
  }
}

static void append_wait(const jpp_runtime_t* runtime, const jpp_flight_job_t* job,
                        jpp_str_t* out) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_flight_place_t* place = &job->places[r];
    if (!jpp__runtime_has_rank(runtime, r) || !place->known) continue;
    const jpp_flight_place_t* last = place;
    if (jpp__flight_waits_for(job, place)) {
      jpp_str_append(out, "; ");
      last = jpp__flight_append_way(job, place, out);
    } else if (place->unsent_step) {
      jpp_str_appendf(out, "; it is rank %u", r);
    } else {
      continue;
    }
    if (!last) return;
    append_state(runtime, (uint32_t)(last - job->places), last, out);
    append_process(runtime, (uint32_t)(last - job->places), out);
    return;
  }
}

static jpp_status_t* explain_locked(const jpp_runtime_t* runtime, jpp_str_t* out) {
  jpp_arena_t arena;
  jpp_flight_place_t* places = NULL;
  uint32_t ranks = runtime->plan->ranks;
  jpp__arena_init(&arena);
  jpp_status_t* status = JPP_ARENA_ARRAY(&arena, ranks, &places);
  for (uint32_t r = 0; r < ranks && !status; ++r) {
    status = find_place(runtime, r, &arena, &places[r]);
  }
  if (!status) {
    append_wait(runtime, &(jpp_flight_job_t){.places = places, .count = ranks}, out);
  }
  jpp__arena_deinit(&arena);
  return status;
}

jpp_status_t* jpp__peer_state_explain(jpp_runtime_t* runtime, jpp_str_t* out) {
  pthread_mutex_lock(&runtime->network_mutex);
  jpp_status_t* status = explain_locked(runtime, out);
  pthread_mutex_unlock(&runtime->network_mutex);
  return status;
}
