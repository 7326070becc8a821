// Compares where ranks are in their programs, transfer by transfer.
#include "flight/waits.h"

const jpp_flight_instr_t* jpp__flight_next_instr(const jpp_flight_place_t* place) {
  return place->step && place->at < place->num_instrs ? &place->instrs[place->at] : NULL;
}

// The SEND that matches a receive; num_instrs if there is none.
static uint32_t find_send(const jpp_flight_place_t* sender,
                          const jpp_flight_instr_t* receive) {
  for (uint32_t i = 0; i < sender->num_instrs; ++i) {
    const jpp_flight_instr_t* instr = &sender->instrs[i];
    if (instr->kind == JPP_FLIGHT_SEND && instr->channel == receive->channel &&
        instr->tag == receive->tag) {
      return i;
    }
  }
  return sender->num_instrs;
}

static bool is_before(uint64_t step, uint32_t at, uint64_t other_step,
                      uint32_t other_at) {
  return step < other_step || (step == other_step && at < other_at);
}

// Whether the sender has issued it.
static bool is_past_send(const jpp_flight_place_t* sender,
                         const jpp_flight_instr_t* receive, uint64_t step) {
  return is_before(step, find_send(sender, receive), sender->step, sender->at);
}

// Whether the sender has issued it, and it waits for the sender's device.
static bool is_owed(const jpp_flight_place_t* sender, const jpp_flight_instr_t* receive,
                    uint64_t step) {
  return sender->unsent_step && is_past_send(sender, receive, step) &&
         !is_before(step, find_send(sender, receive), sender->unsent_step,
                    sender->unsent);
}

bool jpp__flight_has_sent(const jpp_flight_place_t* sender,
                          const jpp_flight_instr_t* receive, uint64_t step) {
  return is_past_send(sender, receive, step) && !is_owed(sender, receive, step);
}

// The number of transfers of the channel that the rank has done in its step, and the
// number in a whole step.
static uint64_t count_transfers(const jpp_flight_place_t* place, uint32_t channel,
                                uint64_t* out_of_step) {
  uint64_t done = 0;
  *out_of_step = 0;
  for (uint32_t i = 0; i < place->num_instrs; ++i) {
    const jpp_flight_instr_t* instr = &place->instrs[i];
    if (instr->kind == JPP_FLIGHT_LOCAL || instr->channel != channel) continue;
    done += i < place->at;
    ++*out_of_step;
  }
  return done;
}

bool jpp__flight_is_full(const jpp_flight_place_t* sender,
                         const jpp_flight_place_t* receiver,
                         const jpp_flight_instr_t* send) {
  uint64_t of_step, sent = count_transfers(sender, send->channel, &of_step);
  sent += sender->step * of_step;
  uint64_t received = count_transfers(receiver, send->channel, &of_step);
  received += receiver->step * of_step;
  return sent >= received + send->slots;
}

// Whether a send waits for earlier sends that wait for its own device.
static bool waits_for_itself(const jpp_flight_place_t* place,
                             const jpp_flight_instr_t* send) {
  return place->unsent_step && place->unsent < place->num_instrs &&
         place->instrs[place->unsent].channel == send->channel;
}

const jpp_flight_place_t* jpp__flight_waits_for(const jpp_flight_job_t* job,
                                                const jpp_flight_place_t* place) {
  const jpp_flight_instr_t* instr = jpp__flight_next_instr(place);
  if (!instr || instr->kind == JPP_FLIGHT_LOCAL || instr->peer >= job->count) return NULL;
  const jpp_flight_place_t* peer = &job->places[instr->peer];
  if (!peer->known) return NULL;
  // Messages that a stopped process has sent may not have left it.
  bool waits = peer->silent;
  if (instr->kind == JPP_FLIGHT_RECV) {
    waits |= !jpp__flight_has_sent(peer, instr, place->step);
  } else {
    waits |= !waits_for_itself(place, instr) && jpp__flight_is_full(place, peer, instr);
  }
  return waits ? peer : NULL;
}

// Whether the chain of waits ends at `peer`, for which `place` waits: its device causes
// the wait, whatever its own program waits for.
static bool is_end(const jpp_flight_place_t* place, const jpp_flight_place_t* peer) {
  const jpp_flight_instr_t* instr = jpp__flight_next_instr(place);
  return instr->kind == JPP_FLIGHT_RECV && is_owed(peer, instr, place->step);
}

// The next rank of the chain; NULL: the chain ends at `place`.
static const jpp_flight_place_t* next_on_way(const jpp_flight_job_t* job,
                                             const jpp_flight_place_t* place,
                                             bool* ends) {
  const jpp_flight_place_t* next = *ends ? NULL : jpp__flight_waits_for(job, place);
  *ends = next && is_end(place, next);
  return next;
}

const jpp_flight_place_t* jpp__flight_follow(const jpp_flight_job_t* job,
                                             const jpp_flight_place_t* place) {
  bool ends = false;
  for (size_t i = 0; i <= job->count; ++i) {
    const jpp_flight_place_t* next = next_on_way(job, place, &ends);
    if (!next) return place;
    place = next;
  }
  return NULL;
}

const jpp_flight_place_t* jpp__flight_append_way(const jpp_flight_job_t* job,
                                                 const jpp_flight_place_t* place,
                                                 jpp_str_t* out) {
  enum { kOfCircle = 3 };
  const jpp_flight_place_t* last = jpp__flight_follow(job, place);
  size_t most = last ? job->count : kOfCircle;
  bool ends = false;
  jpp_str_appendf(out, "rank %zu waits", (size_t)(place - job->places));
  for (size_t i = 0; i < most && (place = next_on_way(job, place, &ends)); ++i) {
    jpp_str_appendf(out, "%s for rank %zu", i ? ", that" : "",
                    (size_t)(place - job->places));
  }
  return last;
}
