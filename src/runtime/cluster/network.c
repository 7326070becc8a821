// Opens, drives, aborts and closes the channels to other processes together.
#include "runtime/cluster/network.h"

#include <time.h>

#include "base/clock.h"
#include "jaxpp/job.h"
#include "runtime/cluster/forecast.h"
#include "runtime/cluster/inbox.h"
#include "runtime/cluster/outbox.h"
#include "runtime/cluster/peer_state.h"
#include "runtime/cluster/wire.h"
#include "runtime/step/state.h"

// Devices, and aborts by this process, have no descriptor to poll.
enum { kNapNanoseconds = 50000, kLongNapNanoseconds = 1000000 };
// The same between two steps, when only other processes may wait for this one.
enum {
  kIdleNapNanoseconds = kJppNetworkPeriodUs * 1000,
  kLongIdleNapNanoseconds = 50000000
};
enum { kFlushMs = 10000, kAbortMs = 200 };

// --- Open -----------------------------------------------------------------------------

// The bytes of one shard of a message, as jpp__wire_bytes() counts them.
static uint64_t shard_bytes(const jpp_runtime_t* runtime, uint32_t value) {
  const jpp_plan_t* plan = runtime->plan;
  jpp_dtype_t dtype = plan->staged->values[value].type.dtype;
  uint64_t of_eight = jpp_dtype_bits(dtype);
  if (runtime->device_messages) return plan->value_bytes[value];
  return jpp__bytes_multiply(plan->value_bytes[value], of_eight) /
         jpp_dtype_device_bytes(dtype, 8);
}

static uint64_t most_bytes_of_link(const jpp_runtime_t* runtime, uint32_t channel) {
  const jpp_plan_t* plan = runtime->plan;
  const jpp_program_t* program = &plan->programs[plan->channels[channel].src];
  uint64_t most = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind != JPP_INSTR_SEND || instr->target != channel) continue;
    uint64_t bytes = shard_bytes(runtime, program->operand_values[instr->first_value]);
    if (bytes > most) most = bytes;
  }
  return most;
}

// `bytes` and `on_device` have room for a message's shards.
static jpp_status_t* open_link(jpp_runtime_t* runtime, jpp_link_t* link, uint64_t* bytes,
                               bool* on_device) {
  uint32_t index = (uint32_t)(link - runtime->links);
  uint32_t devices = link->num_devices;
  uint64_t most = most_bytes_of_link(runtime, index);
  uint32_t sender = runtime->rank_process[link->plan->src];
  JPP_RETURN_IF_ERROR(sender == runtime->process ? jpp__outbox_create(runtime, link, most)
                                                 : jpp__inbox_create(runtime, link));
  bytes[0] = devices * sizeof(jpp_wire_shape_t);
  for (uint32_t d = 0; d < devices; ++d) {
    bytes[1 + d] = most;
    on_device[1 + d] = true;
  }
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = index,
                             .src_actor = link->plan->src,
                             .dst_actor = link->plan->dst,
                             .src_process = sender,
                             .dst_process = runtime->rank_process[link->plan->dst],
                             .slots = link->plan->slots,
                             .capacity = devices + 1,
                             .bytes = bytes,
                             .sent = jpp__outbox_sent,
                             .on_device = runtime->device_messages ? on_device : NULL};
  return jpp_transport_open_channel(runtime->network, &spec, &link->channel);
}

// A transport can access the memory of one device only.
static jpp_status_t* check_devices(const jpp_runtime_t* runtime) {
  if (!runtime->device_messages) return NULL;
  uint32_t first = JPP_NONE;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    for (uint32_t d = 0;
         jpp__runtime_has_rank(runtime, r) && d < runtime->actors[r].num_devices; ++d) {
      uint32_t device = runtime->actors[r].devices[d];
      if (first == JPP_NONE) first = device;
      if (device == first) continue;
      return jpp_status_make(
          JPP_UNSUPPORTED,
          "expected one device in each process, as messages between devices require, "
          "found devices %u and %u in process %u; start a process for each device, or "
          "use the transport that sends from host memory (JPP_TRANSPORT=ucx)",
          first, device, runtime->process);
    }
  }
  return NULL;
}

static jpp_status_t* open_waits(jpp_runtime_t* runtime, uint32_t rank,
                                const jpp_forecast_t* forecast) {
  const jpp_actor_t* actor = &runtime->actors[rank];
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    jpp_actor_instr_t* instr = &actor->instrs[i];
    if (!instr->link || !instr->link->remote) continue;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, 1, &instr->wait));
    if (forecast->step <= 0) continue;
    instr->wait->share = forecast->waits[rank][instr->source] / forecast->step;
  }
  return NULL;
}

static jpp_status_t* open_all_waits(jpp_runtime_t* runtime) {
  jpp_arena_t scratch;
  jpp_forecast_t forecast;
  jpp__arena_init(&scratch);
  jpp_status_t* status = jpp__forecast_make(runtime->plan, &scratch, &forecast);
  for (uint32_t r = 0; r < runtime->plan->ranks && !status; ++r) {
    status = open_waits(runtime, r, &forecast);
  }
  jpp__arena_deinit(&scratch);
  return status;
}

jpp_status_t* jpp__network_open(jpp_runtime_t* runtime) {
  uint32_t shards = runtime->devices_per_rank + 1;
  uint64_t* bytes = NULL;
  bool* on_device = NULL;
  runtime->device_messages = jpp_transport_takes_device_memory(runtime->network);
  JPP_RETURN_IF_ERROR(check_devices(runtime));
  JPP_RETURN_IF_ERROR(jpp__wakeup_open(&runtime->wakeup));
  JPP_RETURN_IF_ERROR(jpp__peer_state_open(runtime));
  JPP_RETURN_IF_ERROR(open_all_waits(runtime));
  jpp_status_t* status = JPP_ALLOC_ARRAY(shards, &bytes);
  if (!status) status = JPP_ALLOC_ARRAY(shards, &on_device);
  for (uint32_t i = 0; i < runtime->num_remote_links && !status; ++i) {
    status = open_link(runtime, runtime->remote_links[i], bytes, on_device);
  }
  jpp_free(bytes);
  jpp_free(on_device);
  return status;
}

static jpp_status_t* warm_up_links(jpp_runtime_t* runtime, uint32_t* out_waiting) {
  *out_waiting = 0;
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    jpp_link_t* link = runtime->remote_links[i];
    bool done = true;
    JPP_RETURN_IF_ERROR_IN(jpp_channel_warm_up(link->channel, &done),
                           "channel from rank %u to rank %u", link->plan->src,
                           link->plan->dst);
    if (!done) ++*out_waiting;
  }
  return NULL;
}

static void nap(void) {
  struct timespec pause = {.tv_nsec = kNapNanoseconds};
  nanosleep(&pause, NULL);
}

jpp_status_t* jpp__network_warm_up(jpp_runtime_t* runtime, uint32_t timeout_ms) {
  int64_t end = jpp__clock_now_ms() + timeout_ms;
  for (uint32_t waiting = 1; waiting;) {
    bool some = false;
    JPP_RETURN_IF_ERROR(warm_up_links(runtime, &waiting));
    jpp_transport_progress(runtime->network, &some);
    if (waiting && jpp__clock_now_ms() > end) {
      return jpp_status_make(JPP_PEER_ERROR,
                             "%u channels to other processes did not answer within %u ms",
                             waiting, timeout_ms);
    }
    if (!some) nap();
  }
  return NULL;
}

// --- Close ----------------------------------------------------------------------------

// Whether another process may still need a message that it has not received. A channel
// that failed has credits, too.
static bool is_wanted(const jpp_runtime_t* runtime) {
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    const jpp_link_t* link = runtime->remote_links[i];
    if (!link->outbox || !link->channel) continue;
    if (jpp__outbox_is_busy(link->outbox)) return true;
    if (jpp_channel_credits(link->channel) < link->plan->slots) return true;
  }
  return false;
}

// Waits for a bounded time: until all sent messages have been received or, after a
// failure, until the others have been told.
static void await_delivery(jpp_runtime_t* runtime) {
  bool broken = false;
  int64_t end = jpp__clock_now_ms() + kFlushMs;
  while (jpp__clock_now_ms() < end) {
    if (!broken && atomic_load(&runtime->broken)) {
      broken = true;
      end = jpp__clock_now_ms() + kAbortMs;
    }
    if (!broken && !is_wanted(runtime)) break;
    if (!jpp__network_progress(runtime)) nap();
  }
}

void jpp__network_close(jpp_runtime_t* runtime) {
  if (!runtime->network) return;
  if (runtime->num_remote_links) await_delivery(runtime);
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    jpp_link_t* link = runtime->remote_links[i];
    if (link->outbox) jpp__outbox_drop(link->outbox);
    if (link->inbox) jpp__inbox_close(link->inbox);
    jpp_channel_close(link->channel);
    link->channel = NULL;
    if (link->outbox) jpp__outbox_close(link->outbox);
  }
  jpp_transport_destroy(runtime->network);
  jpp__wakeup_close(&runtime->wakeup);
}

// --- Progress -------------------------------------------------------------------------

static bool progress_locked(jpp_runtime_t* runtime) {
  bool moved = false, some = false;
  jpp__flight_alive(&runtime->flight);
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    const jpp_link_t* link = runtime->remote_links[i];
    if (link->inbox) some |= jpp__inbox_progress(link->inbox);
    if (!link->outbox || atomic_load(&runtime->broken)) continue;
    some |= jpp__outbox_progress(link->outbox);
  }
  jpp_transport_progress(runtime->network, &moved);
  return some || moved;
}

bool jpp__network_progress(jpp_runtime_t* runtime) {
  if (!runtime->network) return false;
  atomic_fetch_add_explicit(&runtime->heartbeat.rounds, 1, memory_order_relaxed);
  pthread_mutex_lock(&runtime->network_mutex);
  bool some = progress_locked(runtime);
  pthread_mutex_unlock(&runtime->network_mutex);
  return some;
}

// Whether slots wait for devices, which cannot wake the issuing thread.
static bool awaits_devices(const jpp_runtime_t* runtime) {
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    const jpp_link_t* link = runtime->remote_links[i];
    if (link->inbox && jpp__inbox_awaits_device(link->inbox)) return true;
  }
  return false;
}

void jpp__network_wait(jpp_runtime_t* runtime, bool between_steps) {
  int descriptor = -1;
  bool armed = false, some = false;
  pthread_mutex_lock(&runtime->network_mutex);
  some = progress_locked(runtime);
  if (!some) {
    jpp_status_free(jpp_transport_arm(runtime->network, &descriptor, &armed));
  }
  bool polls = descriptor < 0 || awaits_devices(runtime);
  pthread_mutex_unlock(&runtime->network_mutex);
  if (!some && (armed || descriptor < 0)) {
    int64_t nap = between_steps ? kIdleNapNanoseconds : kNapNanoseconds;
    int64_t longest = between_steps ? kLongIdleNapNanoseconds : kLongNapNanoseconds;
    jpp__wakeup_sleep(&runtime->wakeup, descriptor, polls ? nap : longest);
  }
}

void jpp__network_beat(jpp_runtime_t* runtime) {
  pthread_mutex_lock(&runtime->network_mutex);
  progress_locked(runtime);
  pthread_mutex_unlock(&runtime->network_mutex);
}

void jpp__network_check(jpp_runtime_t* runtime) {
  jpp_status_t* status = NULL;
  pthread_mutex_lock(&runtime->network_mutex);
  for (uint32_t i = 0; i < runtime->num_remote_links && !status; ++i) {
    status = jpp_channel_status(runtime->remote_links[i]->channel);
  }
  pthread_mutex_unlock(&runtime->network_mutex);
  if (status) status = jpp_job_explain(status);
  if (status) jpp__runtime_break(runtime, status);
  jpp_status_free(status);
}

void jpp__network_abort(jpp_runtime_t* runtime, const jpp_status_t* status) {
  for (uint32_t i = 0; i < runtime->num_remote_links; ++i) {
    jpp_link_t* link = runtime->remote_links[i];
    if (link->channel) jpp_channel_abort(link->channel, status);
  }
}

// --- Messages -------------------------------------------------------------------------

jpp_status_t* jpp__network_send(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                bool* out_done) {
  pthread_mutex_lock(&actor->runtime->network_mutex);
  jpp_status_t* status = jpp__outbox_send(actor, instr, out_done);
  pthread_mutex_unlock(&actor->runtime->network_mutex);
  return status;
}

jpp_status_t* jpp__network_recv(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                bool* out_done) {
  pthread_mutex_lock(&actor->runtime->network_mutex);
  jpp_status_t* status = jpp__inbox_recv(actor, instr, out_done);
  pthread_mutex_unlock(&actor->runtime->network_mutex);
  return status;
}
