// Parcels: filled, passed to the transport in order, and reused when the transport has
// sent them. A parcel has a shard for each device of the receiver; if the sender has
// another number of devices, each of them has the whole value.
#include "runtime/cluster/outbox.h"

#include <sched.h>
#include <string.h>

#include "device/wait.h"
#include "runtime/cluster/wire.h"
#include "runtime/step/failure.h"
#include "runtime/step/state.h"

enum { kCopiedAtOnce = 1 << 18 };  // bytes: copying them takes less time than a wakeup

typedef struct parcel {
  struct jpp_outbox* outbox;
  uint64_t tag;
  uint64_t step;             // the step whose value it holds
  uint32_t source;           // the SEND's index in the program
  jpp_wire_shape_t* shapes;  // [devices]
  jpp_shard_t* shards;       // [1 + devices] the shapes, then the data
  void** data;               // [devices] in host memory
  jpp_buffer_t** copies;     // [devices] copies in device memory, owned by the parcel
  // Copies whose addresses were given to the transport.
  uint32_t lent;
  // [devices] ready when the copies, or the shards in `data`, are there.
  jpp_event_t** events;
  jpp_event_waiter_t* waiters;  // [devices]
  atomic_uint watched;          // events whose callback has not run
  bool busy;                    // the transport may still read it
} parcel_t;

struct jpp_outbox {
  jpp_runtime_t* runtime;
  jpp_link_t* link;
  uint64_t most_bytes;  // of the largest shard
  parcel_t* parcels;    // [slots] message n uses n % slots
  uint64_t filled, gone;
  bool unmade;  // the device has not made the oldest unsent parcel's value
  uint32_t busy;
  jpp_transport_memory_t* registered;  // registers the memory of all parcels
};

static parcel_t* oldest(const jpp_outbox_t* outbox) {
  return &outbox->parcels[outbox->gone % outbox->link->plan->slots];
}

// --- Create ---------------------------------------------------------------------------

static size_t align(uint64_t bytes) { return (size_t)((bytes + 63) / 64 * 64); }

// Allocates host memory for the shards; shards on devices need none.
static size_t shard_room(const jpp_outbox_t* outbox) {
  return outbox->runtime->device_messages ? 0 : align(outbox->most_bytes);
}

static jpp_status_t* make_parcel(jpp_outbox_t* outbox, parcel_t* parcel, char* memory) {
  jpp_arena_t* arena = &outbox->runtime->arena;
  uint32_t devices = outbox->link->num_devices;
  parcel->outbox = outbox;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices + 1, &parcel->shards));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &parcel->events));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &parcel->data));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &parcel->copies));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &parcel->waiters));
  parcel->shapes = (jpp_wire_shape_t*)memory;
  size_t shapes = devices * sizeof(jpp_wire_shape_t);
  parcel->shards[0] =
      (jpp_shard_t){.data = memory, .size = shapes, .memory = outbox->registered};
  memory += align(shapes);
  for (uint32_t d = 0; d < devices && !outbox->runtime->device_messages; ++d) {
    parcel->data[d] = memory;
    parcel->shards[1 + d] = (jpp_shard_t){.data = memory, .memory = outbox->registered};
    memory += shard_room(outbox);
  }
  return NULL;
}

jpp_status_t* jpp__outbox_create(jpp_runtime_t* runtime, jpp_link_t* link,
                                 uint64_t most_bytes) {
  uint32_t devices = link->num_devices, slots = link->plan->slots;
  jpp_outbox_t* outbox = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, 1, &outbox));
  outbox->runtime = runtime;
  outbox->link = link;
  outbox->most_bytes = most_bytes;
  size_t bytes = align(devices * sizeof(jpp_wire_shape_t)) + devices * shard_room(outbox);
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, slots, &outbox->parcels));
  link->outbox = outbox;
  char* memory = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, bytes * slots, &memory));
  JPP_RETURN_IF_ERROR(jpp_transport_register(runtime->network, memory, bytes * slots,
                                             &outbox->registered));
  for (uint32_t i = 0; i < slots; ++i) {
    JPP_RETURN_IF_ERROR(make_parcel(outbox, &outbox->parcels[i], memory + i * bytes));
  }
  return NULL;
}

// --- Reuse ----------------------------------------------------------------------------

void jpp__outbox_sent(void* user, void* cookie) {
  (void)user;
  parcel_t* parcel = cookie;
  const jpp_runtime_t* runtime = parcel->outbox->runtime;
  for (uint32_t d = 0; d < parcel->outbox->link->num_devices; ++d) {
    jpp_buffer_t* copy = parcel->copies[d];
    if (d < parcel->lent) jpp_client_buffer_reclaim(runtime->client, copy);
    jpp_client_buffer_destroy(runtime->client, copy);
    parcel->copies[d] = NULL;
  }
  parcel->lent = 0;
  parcel->busy = false;
  --parcel->outbox->busy;
}

// Drops a parcel that was never passed to the transport.
static void drop_parcel(parcel_t* parcel) {
  jpp_client_t* client = parcel->outbox->runtime->client;
  for (uint32_t d = 0; d < parcel->outbox->link->num_devices; ++d) {
    // Until then, the device writes to the parcel.
    jpp_status_free(jpp__wait_end_of(client, &parcel->events[d]));
  }
  jpp__outbox_sent(NULL, parcel);
}

void jpp__outbox_drop(jpp_outbox_t* outbox) {
  for (; outbox->gone < outbox->filled; ++outbox->gone) drop_parcel(oldest(outbox));
}

void jpp__outbox_close(jpp_outbox_t* outbox) {
  // The events are ready or destroyed; a callback may still run a moment later.
  for (uint32_t i = 0; i < outbox->link->plan->slots; ++i) {
    while (atomic_load(&outbox->parcels[i].watched)) sched_yield();
  }
  // While the transport may still read the memory, it stays registered, until the
  // transport is destroyed.
  if (!outbox->busy) {
    jpp_transport_unregister(outbox->runtime->network, outbox->registered);
  }
}

bool jpp__outbox_is_busy(const jpp_outbox_t* outbox) { return outbox->busy != 0; }

bool jpp__outbox_is_unmade(const jpp_outbox_t* outbox, uint64_t* out_step,
                           uint32_t* out_instr) {
  const parcel_t* parcel = oldest(outbox);
  *out_step = parcel->step;
  *out_instr = parcel->source;
  return outbox->gone < outbox->filled && outbox->unmade;
}

// --- Fill -----------------------------------------------------------------------------

// If the device's memory is the host's and the value exists already, as with small tasks,
// it is copied here: the plugin would copy it on another thread, which first has to wake
// up.
static jpp_status_t* copy_what_is_there(parcel_t* parcel, uint32_t device,
                                        const jpp_buffer_shape_t* shape,
                                        jpp_buffer_t* buffer, bool* out_copied) {
  jpp_client_t* client = parcel->outbox->runtime->client;
  size_t bytes = parcel->shards[1 + device].size;
  void* contents = NULL;
  *out_copied = false;
  bool packed = jpp_dtype_device_bytes(shape->dtype, 8) != jpp_dtype_bits(shape->dtype);
  if (!parcel->outbox->runtime->on_host || packed || bytes > kCopiedAtOnce) return NULL;
  JPP_RETURN_IF_ERROR(jpp__wait_is_buffer_ready(client, buffer, out_copied));
  if (!*out_copied) return NULL;
  JPP_RETURN_IF_ERROR(jpp__wait_buffer(client, buffer, "send", NULL));
  jpp_status_t* status = jpp_client_buffer_lend(client, buffer, &contents);
  *out_copied = !status;
  jpp_status_free(status);  // the plugin's own copy reports the error better
  if (!*out_copied) return NULL;
  if (bytes) memcpy(parcel->data[device], contents, bytes);
  jpp_client_buffer_reclaim(client, buffer);
  return NULL;
}

static jpp_status_t* copy_to_host(parcel_t* parcel, uint32_t device,
                                  const jpp_buffer_shape_t* shape, jpp_buffer_t* buffer) {
  bool copied = false;
  JPP_RETURN_IF_ERROR(copy_what_is_there(parcel, device, shape, buffer, &copied));
  if (copied) return NULL;
  return jpp_client_buffer_to_host(parcel->outbox->runtime->client, buffer,
                                   parcel->data[device], parcel->shards[1 + device].size,
                                   &parcel->events[device]);
}

static jpp_status_t* copy_on_device(const jpp_actor_t* actor, parcel_t* parcel,
                                    uint32_t device, jpp_buffer_t* buffer) {
  jpp_client_t* client = actor->runtime->client;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_copy_to_device(
      client, buffer, actor->devices[device % actor->num_devices],
      &parcel->copies[device]));
  return jpp_client_buffer_ready_event(client, parcel->copies[device],
                                       &parcel->events[device]);
}

// Any thread. The owner may reuse the parcel once `watched` has been decremented.
static void copy_is_made(void* user, jpp_status_t* status) {
  parcel_t* parcel = user;
  jpp_status_free(status);  // the event reports it, too
  jpp__wakeup_call(&parcel->outbox->runtime->wakeup);
  atomic_fetch_sub(&parcel->watched, 1);
}

// Wakes the issuing thread when a copy is done.
static jpp_status_t* watch_copy(parcel_t* parcel, uint32_t device) {
  if (!parcel->events[device]) return NULL;
  parcel->waiters[device] =
      (jpp_event_waiter_t){.callback = copy_is_made, .user = parcel};
  atomic_fetch_add(&parcel->watched, 1);
  jpp_status_t* status = jpp_client_event_on_ready(
      parcel->outbox->runtime->client, parcel->events[device], &parcel->waiters[device]);
  if (status) atomic_fetch_sub(&parcel->watched, 1);
  return status;
}

static jpp_status_t* fill_shard(const jpp_actor_t* actor, parcel_t* parcel,
                                uint32_t device, jpp_buffer_t* buffer) {
  const jpp_runtime_t* runtime = actor->runtime;
  jpp_buffer_shape_t shape;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_shape(runtime->client, buffer, &shape));
  jpp_wire_shape_t* wire = &parcel->shapes[device];
  *wire = (jpp_wire_shape_t){.dtype = shape.dtype, .rank = shape.rank};
  for (uint32_t i = 0; i < shape.rank; ++i) wire->dims[i] = shape.dims[i];
  uint64_t bytes = jpp__wire_bytes(wire, runtime->device_messages);
  if (bytes > parcel->outbox->most_bytes) {
    return jpp_status_make(
        JPP_INTERNAL_ERROR, "expected at most %llu bytes of a shard, found %llu",
        (unsigned long long)parcel->outbox->most_bytes, (unsigned long long)bytes);
  }
  parcel->shards[1 + device].size = (size_t)bytes;
  return runtime->device_messages ? copy_on_device(actor, parcel, device, buffer)
                                  : copy_to_host(parcel, device, &shape, buffer);
}

jpp_status_t* jpp__outbox_send(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                               bool* out_done) {
  jpp_outbox_t* outbox = instr->link->outbox;
  parcel_t* parcel = &outbox->parcels[outbox->filled % instr->link->plan->slots];
  if (parcel->busy || atomic_load(&parcel->watched)) return NULL;
  size_t first = (size_t)instr->operands[0] * actor->runtime->devices_per_rank;
  jpp_buffer_t** shards = actor->regs + first;
  parcel->tag = instr->tag;
  parcel->step = actor->runtime->begun;
  parcel->source = instr->source;
  parcel->busy = true;
  ++outbox->busy;
  jpp_status_t* status = NULL;
  for (uint32_t d = 0; d < instr->link->num_devices && !status; ++d) {
    status = fill_shard(actor, parcel, d, shards[d % actor->num_devices]);
    if (!status) status = watch_copy(parcel, d);
  }
  if (status) {
    drop_parcel(parcel);
    return status;
  }
  ++outbox->filled;
  *out_done = true;
  return NULL;
}

// --- Send -----------------------------------------------------------------------------

static jpp_status_t* finish_copies(const parcel_t* parcel, bool* out_ready) {
  jpp_client_t* client = parcel->outbox->runtime->client;
  *out_ready = true;
  for (uint32_t d = 0; d < parcel->outbox->link->num_devices; ++d) {
    jpp_event_t** event = &parcel->events[d];
    if (!*event) continue;
    JPP_RETURN_IF_ERROR(jpp_client_event_is_ready(client, *event, out_ready));
    if (!*out_ready) return NULL;
    JPP_RETURN_IF_ERROR(jpp__wait_end_of(client, event));
  }
  return NULL;
}

static jpp_status_t* lend_copies(parcel_t* parcel) {
  const jpp_runtime_t* runtime = parcel->outbox->runtime;
  if (!runtime->device_messages) return NULL;
  for (; parcel->lent < parcel->outbox->link->num_devices; ++parcel->lent) {
    void* data = NULL;
    JPP_RETURN_IF_ERROR(
        jpp_client_buffer_lend(runtime->client, parcel->copies[parcel->lent], &data));
    parcel->shards[1 + parcel->lent].data = data;
  }
  return NULL;
}

// Sends the oldest parcel if it is complete and the receiver has a slot.
static jpp_status_t* send_oldest(jpp_outbox_t* outbox, bool* out_done) {
  parcel_t* parcel = oldest(outbox);
  bool ready = false;
  *out_done = false;
  jpp_status_t* status = finish_copies(parcel, &ready);
  if (status) {
    const jpp_actor_t* sender = &outbox->runtime->actors[outbox->link->plan->src];
    return jpp__failure_locate(sender, parcel->source, status);
  }
  outbox->unmade = !ready;
  if (!ready) return NULL;
  JPP_RETURN_IF_ERROR(lend_copies(parcel));
  JPP_RETURN_IF_ERROR(
      jpp_channel_try_send_bytes(outbox->link->channel, parcel->tag, parcel->shards,
                                 outbox->link->num_devices + 1, parcel, out_done));
  outbox->gone += *out_done;
  return NULL;
}

// Breaks the runtime if a parcel cannot be sent, because its value has failed, which its
// step reports too, or because the channel has.
bool jpp__outbox_progress(jpp_outbox_t* outbox) {
  bool some = false, done = true;
  while (outbox->gone < outbox->filled && done) {
    jpp_status_t* status = send_oldest(outbox, &done);
    if (status) {
      jpp__runtime_break(outbox->runtime, status);
      jpp_status_free(status);
      return true;
    }
    some |= done;
  }
  return some;
}
