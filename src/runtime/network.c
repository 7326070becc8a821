// Parcels and their channels. The first shard of a message says what the others are: a
// shard's shape is known to the program that made it, not to the plan.
#include "runtime/network.h"

#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "device/wait.h"
#include "runtime/failure.h"
#include "runtime/peers.h"
#include "runtime/state.h"

enum { kNapNanoseconds = 50000, kFlushMs = 10000, kAbortMs = 200 };
enum { kCopiedAtOnce = 1 << 18 };  // bytes: less than a wake-up takes

// What a shard is, as it goes over the wire: processes of a job run on machines of one
// byte order, which the transport's handshake compares.
typedef struct wire_shape {
  uint32_t dtype;  // jpp_dtype_t
  uint32_t rank;
  int64_t dims[JPP_BUFFER_MAX_RANK];
} wire_shape_t;

// In host memory.
static uint64_t bytes_of(const wire_shape_t* shape) {
  uint64_t bytes = jpp_dtype_bits((jpp_dtype_t)shape->dtype) / 8;
  for (uint32_t i = 0; i < shape->rank; ++i) {
    bytes = jpp_bytes_multiply(bytes, (uint64_t)shape->dims[i]);
  }
  return bytes;
}

typedef struct parcel {
  struct jpp_outbox* outbox;
  uint64_t tag;
  uint64_t step;         // that it is of
  uint32_t source;       // the send, in the program
  wire_shape_t* shapes;  // [devices]
  jpp_shard_t* shards;   // [1 + devices] the shapes, then the data
  jpp_event_t** events;  // [devices] of the copies to the host
  void** data;           // [devices]
  bool busy;             // until the transport needs it no longer
} parcel_t;

struct jpp_outbox {
  jpp_runtime_t* runtime;
  jpp_link_t* link;
  uint64_t most_bytes;  // of a shard
  parcel_t* parcels;    // [slots] message n uses n % slots
  uint64_t filled, gone;
  bool unmade;  // the oldest one that is not gone waits for the device
  uint32_t busy;
  jpp_transport_memory_t* registered;  // all parcels' memory
};

// --- Open -----------------------------------------------------------------------------

// Of a shard in host memory, where types of 2 and 4 bits are not packed.
static uint64_t host_bytes(const jpp_plan_t* plan, uint32_t value) {
  jpp_dtype_t dtype = plan->staged->values[value].type.dtype;
  uint64_t of_eight = jpp_dtype_bits(dtype);
  return jpp_bytes_multiply(plan->value_bytes[value], of_eight) /
         jpp_dtype_device_bytes(dtype, 8);
}

static uint64_t most_bytes_of_link(const jpp_runtime_t* runtime, uint32_t channel) {
  const jpp_plan_t* plan = runtime->plan;
  const jpp_program_t* program = &plan->programs[plan->channels[channel].src];
  uint64_t most = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind != JPP_INSTR_SEND || instr->target != channel) continue;
    uint64_t bytes = host_bytes(plan, program->operand_values[instr->first_operand]);
    if (bytes > most) most = bytes;
  }
  return most;
}

static void parcel_sent(void* user, void* cookie) {
  (void)user;
  parcel_t* parcel = cookie;
  parcel->busy = false;
  --parcel->outbox->busy;
}

static size_t align(uint64_t bytes) { return (size_t)((bytes + 63) / 64 * 64); }

static jpp_status_t* make_parcel(jpp_outbox_t* outbox, parcel_t* parcel, char* memory) {
  jpp_arena_t* arena = &outbox->runtime->arena;
  uint32_t devices = outbox->runtime->devices_per_rank;
  parcel->outbox = outbox;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices + 1, &parcel->shards));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &parcel->events));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &parcel->data));
  parcel->shapes = (wire_shape_t*)memory;
  size_t shapes = devices * sizeof(wire_shape_t);
  parcel->shards[0] =
      (jpp_shard_t){.data = memory, .size = shapes, .memory = outbox->registered};
  memory += align(shapes);
  for (uint32_t d = 0; d < devices; ++d) {
    parcel->data[d] = memory;
    parcel->shards[1 + d] = (jpp_shard_t){.data = memory, .memory = outbox->registered};
    memory += align(outbox->most_bytes);
  }
  return NULL;
}

static jpp_status_t* make_outbox(jpp_runtime_t* runtime, jpp_link_t* link,
                                 uint64_t most_bytes) {
  uint32_t devices = runtime->devices_per_rank, slots = link->plan->slots;
  size_t parcel_bytes =
      align(devices * sizeof(wire_shape_t)) + devices * align(most_bytes);
  jpp_outbox_t* outbox = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, 1, &outbox));
  outbox->runtime = runtime;
  outbox->link = link;
  outbox->most_bytes = most_bytes;
  link->outbox = outbox;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, slots, &outbox->parcels));
  char* memory = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, parcel_bytes * slots, &memory));
  JPP_RETURN_IF_ERROR(jpp_transport_register(runtime->network, memory,
                                             parcel_bytes * slots, &outbox->registered));
  for (uint32_t i = 0; i < slots; ++i) {
    JPP_RETURN_IF_ERROR(
        make_parcel(outbox, &outbox->parcels[i], memory + i * parcel_bytes));
  }
  return NULL;
}

static jpp_status_t* open_link(jpp_runtime_t* runtime, uint32_t index, uint64_t* bytes) {
  jpp_link_t* link = &runtime->links[index];
  uint32_t devices = runtime->devices_per_rank;
  uint64_t most = most_bytes_of_link(runtime, index);
  uint32_t sender = runtime->rank_process[link->plan->src];
  if (sender == runtime->process) JPP_RETURN_IF_ERROR(make_outbox(runtime, link, most));
  bytes[0] = devices * sizeof(wire_shape_t);
  for (uint32_t d = 0; d < devices; ++d) bytes[1 + d] = most;
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = index,
                             .src_actor = link->plan->src,
                             .dst_actor = link->plan->dst,
                             .src_process = sender,
                             .dst_process = runtime->rank_process[link->plan->dst],
                             .slots = link->plan->slots,
                             .capacity = devices + 1,
                             .bytes = bytes,
                             .sent = parcel_sent};
  return jpp_transport_open_channel(runtime->network, &spec, &link->channel);
}

jpp_status_t* jpp_network_open(jpp_runtime_t* runtime) {
  JPP_RETURN_IF_ERROR(jpp_peers_open(runtime));
  uint64_t* bytes = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(runtime->devices_per_rank + 1, &bytes));
  jpp_status_t* status = NULL;
  for (uint32_t i = 0; i < runtime->plan->num_channels && !status; ++i) {
    if (runtime->links[i].remote) status = open_link(runtime, i, bytes);
  }
  jpp_free(bytes);
  return status;
}

static jpp_status_t* warm_up_links(jpp_runtime_t* runtime, uint32_t* out_waiting) {
  *out_waiting = 0;
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    bool done = true;
    if (link->remote) {
      JPP_RETURN_IF_ERROR_IN(jpp_channel_warm_up(link->channel, &done),
                             "channel from rank %u to rank %u", link->plan->src,
                             link->plan->dst);
    }
    if (!done) ++*out_waiting;
  }
  return NULL;
}

static void nap(void) {
  struct timespec pause = {.tv_nsec = kNapNanoseconds};
  nanosleep(&pause, NULL);
}

jpp_status_t* jpp_network_warm_up(jpp_runtime_t* runtime, uint32_t timeout_ms) {
  int64_t end = jpp_clock_now_ms() + timeout_ms;
  for (uint32_t waiting = 1; waiting;) {
    bool some = false;
    JPP_RETURN_IF_ERROR(warm_up_links(runtime, &waiting));
    jpp_transport_progress(runtime->network, &some);
    if (waiting && jpp_clock_now_ms() > end) {
      return jpp_status_make(JPP_PEER_ERROR,
                             "%u channels to other processes did not answer within %u ms",
                             waiting, timeout_ms);
    }
    if (!some) nap();
  }
  return NULL;
}

// --- Close ----------------------------------------------------------------------------

static void drop_parcels(jpp_outbox_t* outbox) {
  for (; outbox->gone < outbox->filled; ++outbox->gone) {
    parcel_t* parcel = &outbox->parcels[outbox->gone % outbox->link->plan->slots];
    for (uint32_t d = 0; d < outbox->runtime->devices_per_rank; ++d) {
      jpp_event_t* event = parcel->events[d];
      if (!event) continue;
      // The device writes to the parcel until then.
      jpp_status_free(jpp_client_event_await(outbox->runtime->client, event));
      jpp_client_event_destroy(outbox->runtime->client, event);
      parcel->events[d] = NULL;
    }
    parcel_sent(NULL, parcel);  // the transport never had it
  }
}

// Whether a message is on its way that a peer may still want: one that has left is no
// help to who has not received it yet. A channel that failed has credits.
static bool is_wanted(const jpp_runtime_t* runtime) {
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    const jpp_link_t* link = &runtime->links[i];
    if (!link->outbox || !link->channel) continue;
    if (link->outbox->busy) return true;
    if (jpp_channel_credits(link->channel) < link->plan->slots) return true;
  }
  return false;
}

// For a bounded time: until all that was sent is received or, after a failure, until the
// others have been told.
static void say_goodbye(jpp_runtime_t* runtime) {
  bool broken = atomic_load(&runtime->broken);
  int64_t end = jpp_clock_now_ms() + (broken ? kAbortMs : kFlushMs);
  while ((broken || is_wanted(runtime)) && jpp_clock_now_ms() < end) {
    if (!jpp_network_progress(runtime)) nap();
  }
}

static void close_link(jpp_runtime_t* runtime, jpp_link_t* link) {
  if (link->outbox) drop_parcels(link->outbox);
  if (link->remote) {
    jpp_channel_close(link->channel);
    link->channel = NULL;
  }
  // What the transport still reads is known to it until it is destroyed.
  if (link->outbox && !link->outbox->busy) {
    jpp_transport_unregister(runtime->network, link->outbox->registered);
  }
}

void jpp_network_close(jpp_runtime_t* runtime) {
  if (!runtime->network) return;
  if (runtime->links) say_goodbye(runtime);
  for (uint32_t i = 0; runtime->links && i < runtime->plan->num_channels; ++i) {
    close_link(runtime, &runtime->links[i]);
  }
  jpp_transport_destroy(runtime->network);
}

// --- Progress -------------------------------------------------------------------------

static jpp_status_t* finish_copies(const parcel_t* parcel, bool* out_ready) {
  jpp_client_t* client = parcel->outbox->runtime->client;
  *out_ready = true;
  for (uint32_t d = 0; d < parcel->outbox->runtime->devices_per_rank; ++d) {
    jpp_event_t** event = &parcel->events[d];
    if (!*event) continue;
    JPP_RETURN_IF_ERROR(jpp_client_event_is_ready(client, *event, out_ready));
    if (!*out_ready) return NULL;
    jpp_status_t* status = jpp_client_event_await(client, *event);
    jpp_client_event_destroy(client, *event);
    *event = NULL;
    JPP_RETURN_IF_ERROR(status);
  }
  return NULL;
}

// Hands the oldest parcel over, if it is complete and the receiver has a slot.
static jpp_status_t* let_go(jpp_outbox_t* outbox, bool* out_done) {
  parcel_t* parcel = &outbox->parcels[outbox->gone % outbox->link->plan->slots];
  bool ready = false;
  *out_done = false;
  JPP_RETURN_IF_ERROR(finish_copies(parcel, &ready));
  outbox->unmade = !ready;
  if (!ready) return NULL;
  JPP_RETURN_IF_ERROR(jpp_channel_try_send_bytes(
      outbox->link->channel, parcel->tag, parcel->shards,
      outbox->runtime->devices_per_rank + 1, parcel, out_done));
  outbox->gone += *out_done;
  return NULL;
}

// A parcel that can not go: its step fails of the same cause, or the channel is broken,
// which the next send tells.
static bool send_parcels(jpp_outbox_t* outbox) {
  bool some = false, done = true;
  while (outbox->gone < outbox->filled && done) {
    jpp_status_t* status = let_go(outbox, &done);
    if (status) {
      jpp_runtime_break(outbox->runtime, status);
      jpp_status_free(status);
      return true;
    }
    some |= done;
  }
  return some;
}

static bool progress_locked(jpp_runtime_t* runtime) {
  bool moved = false, some = false;
  jpp_flight_alive(&runtime->flight);
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    jpp_outbox_t* outbox = runtime->links[i].outbox;
    if (outbox && !atomic_load(&runtime->broken)) some |= send_parcels(outbox);
  }
  jpp_transport_progress(runtime->network, &moved);
  return some || moved;
}

bool jpp_network_progress(jpp_runtime_t* runtime) {
  if (!runtime->network) return false;
  atomic_fetch_add_explicit(&runtime->pulse.rounds, 1, memory_order_relaxed);
  pthread_mutex_lock(&runtime->network_mutex);
  bool some = progress_locked(runtime);
  pthread_mutex_unlock(&runtime->network_mutex);
  return some;
}

static jpp_status_t* find_failed_link(const jpp_runtime_t* runtime) {
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    const jpp_link_t* link = &runtime->links[i];
    if (link->remote) JPP_RETURN_IF_ERROR(jpp_channel_status(link->channel));
  }
  return NULL;
}

void jpp_network_beat(jpp_runtime_t* runtime) {
  pthread_mutex_lock(&runtime->network_mutex);
  progress_locked(runtime);
  pthread_mutex_unlock(&runtime->network_mutex);
}

void jpp_network_check(jpp_runtime_t* runtime) {
  pthread_mutex_lock(&runtime->network_mutex);
  jpp_status_t* status = find_failed_link(runtime);
  pthread_mutex_unlock(&runtime->network_mutex);
  if (status) jpp_runtime_break(runtime, status);
  jpp_status_free(status);
}

bool jpp_network_is_unmade(const jpp_outbox_t* outbox, uint64_t* out_step,
                           uint32_t* out_instr) {
  const parcel_t* parcel = &outbox->parcels[outbox->gone % outbox->link->plan->slots];
  *out_step = parcel->step;
  *out_instr = parcel->source;
  return outbox->gone < outbox->filled && outbox->unmade;
}

void jpp_network_abort(jpp_runtime_t* runtime, const jpp_status_t* status) {
  for (uint32_t i = 0; runtime->links && i < runtime->plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    if (link->remote && link->channel) jpp_channel_abort(link->channel, status);
  }
}

// --- Send -----------------------------------------------------------------------------

// What the host's device has made already, as it does with small tasks, is copied at
// once: the plugin's own copy is done by another thread, which has to wake up first.
static jpp_status_t* copy_what_is_there(parcel_t* parcel, uint32_t device,
                                        const jpp_buffer_shape_t* shape,
                                        jpp_buffer_t* buffer, bool* out_copied) {
  jpp_client_t* client = parcel->outbox->runtime->client;
  size_t bytes = parcel->shards[1 + device].size;
  void* contents = NULL;
  *out_copied = false;
  bool packed = jpp_dtype_device_bytes(shape->dtype, 8) != jpp_dtype_bits(shape->dtype);
  if (!parcel->outbox->runtime->on_host || packed || bytes > kCopiedAtOnce) return NULL;
  JPP_RETURN_IF_ERROR(jpp_wait_is_buffer_ready(client, buffer, out_copied));
  if (!*out_copied) return NULL;
  JPP_RETURN_IF_ERROR(jpp_wait_buffer(client, buffer, "send", NULL));
  jpp_status_t* status = jpp_client_buffer_lend(client, buffer, &contents);
  *out_copied = !status;
  jpp_status_free(status);  // the plugin's copy says it better
  if (!*out_copied) return NULL;
  if (bytes) memcpy(parcel->data[device], contents, bytes);
  jpp_client_buffer_reclaim(client, buffer);
  return NULL;
}

static jpp_status_t* fill_shard(parcel_t* parcel, uint32_t device, jpp_buffer_t* buffer) {
  jpp_client_t* client = parcel->outbox->runtime->client;
  jpp_buffer_shape_t shape;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_shape(client, buffer, &shape));
  wire_shape_t* wire = &parcel->shapes[device];
  *wire = (wire_shape_t){.dtype = shape.dtype, .rank = shape.rank};
  for (uint32_t i = 0; i < shape.rank; ++i) wire->dims[i] = shape.dims[i];
  uint64_t bytes = bytes_of(wire);
  if (bytes > parcel->outbox->most_bytes) {
    return jpp_status_make(
        JPP_INTERNAL_ERROR, "expected at most %llu bytes of a shard, found %llu",
        (unsigned long long)parcel->outbox->most_bytes, (unsigned long long)bytes);
  }
  parcel->shards[1 + device].size = (size_t)bytes;
  bool copied = false;
  JPP_RETURN_IF_ERROR(copy_what_is_there(parcel, device, &shape, buffer, &copied));
  if (copied) return NULL;
  return jpp_client_buffer_to_host(client, buffer, parcel->data[device], (size_t)bytes,
                                   &parcel->events[device]);
}

static jpp_status_t* fill_parcel(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                 bool* out_done) {
  jpp_outbox_t* outbox = instr->link->outbox;
  parcel_t* parcel = &outbox->parcels[outbox->filled % instr->link->plan->slots];
  if (parcel->busy) return NULL;
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_buffer_t** shards = actor->regs + (size_t)instr->operands[0] * devices;
  parcel->tag = instr->tag;
  parcel->step = actor->runtime->begun;
  parcel->source = instr->source;
  parcel->busy = true;
  ++outbox->busy;
  ++outbox->filled;
  for (uint32_t d = 0; d < devices; ++d) {
    JPP_RETURN_IF_ERROR(fill_shard(parcel, d, shards[d]));
  }
  *out_done = true;
  return NULL;
}

jpp_status_t* jpp_network_send(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                               bool* out_done) {
  pthread_mutex_lock(&actor->runtime->network_mutex);
  jpp_status_t* status = fill_parcel(actor, instr, out_done);
  pthread_mutex_unlock(&actor->runtime->network_mutex);
  return status;
}

// --- Receive --------------------------------------------------------------------------

static jpp_status_t* check_shape(const jpp_runtime_t* runtime,
                                 const jpp_actor_instr_t* instr,
                                 const wire_shape_t* shape, uint64_t size) {
  uint32_t value = (uint32_t)(instr->tag >> 32);
  jpp_dtype_t dtype = runtime->plan->staged->values[value].type.dtype;
  bool fits = shape->dtype == (uint32_t)dtype && shape->rank <= JPP_BUFFER_MAX_RANK;
  for (uint32_t i = 0; fits && i < shape->rank; ++i) fits = shape->dims[i] >= 0;
  if (fits && bytes_of(shape) == size) return NULL;
  return jpp_status_make(
      JPP_PEER_ERROR, "expected a shard of %%%u (%s), found %llu bytes of another kind",
      value, jpp_dtype_name(dtype), (unsigned long long)size);
}

static jpp_status_t* unpack(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                            const jpp_received_t* received) {
  jpp_runtime_t* runtime = actor->runtime;
  uint32_t devices = runtime->devices_per_rank;
  jpp_buffer_t** shards = actor->regs + (size_t)instr->operands[0] * devices;
  if (received->tag != instr->tag) {
    return jpp_failure_mismatch(actor, instr, received->tag);
  }
  if (received->count != devices + 1 ||
      received->sizes[0] != devices * sizeof(wire_shape_t)) {
    return jpp_status_make(JPP_PEER_ERROR, "expected %u shards, found %u", devices + 1,
                           received->count);
  }
  const wire_shape_t* shapes = received->data[0];
  for (uint32_t d = 0; d < devices; ++d) {
    JPP_RETURN_IF_ERROR(check_shape(runtime, instr, &shapes[d], received->sizes[1 + d]));
    jpp_host_array_t array = {.data = received->data[1 + d],
                              .dtype = (jpp_dtype_t)shapes[d].dtype,
                              .rank = shapes[d].rank,
                              .dims = shapes[d].dims};
    JPP_RETURN_IF_ERROR(jpp_client_buffer_from_host(runtime->client, &array,
                                                    actor->devices[d], &shards[d]));
  }
  return NULL;
}

static jpp_status_t* take_message(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                  bool* out_done) {
  jpp_channel_t* channel = instr->link->channel;
  jpp_received_t received;
  JPP_RETURN_IF_ERROR(jpp_channel_try_recv_bytes(channel, &received, out_done));
  if (!*out_done) return NULL;
  jpp_status_t* status = unpack(actor, instr, &received);
  jpp_channel_release(channel, received.slot);
  return status;
}

jpp_status_t* jpp_network_recv(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                               bool* out_done) {
  pthread_mutex_lock(&actor->runtime->network_mutex);
  jpp_status_t* status = take_message(actor, instr, out_done);
  pthread_mutex_unlock(&actor->runtime->network_mutex);
  return status;
}
