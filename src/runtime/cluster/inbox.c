// Messages, checked and copied to the devices of a rank.
#include "runtime/cluster/inbox.h"

#include "device/wait.h"
#include "runtime/cluster/wire.h"
#include "runtime/step/failure.h"
#include "runtime/step/state.h"

// A slot from which devices copy.
typedef struct arrival {
  uint32_t slot;
  jpp_event_t** events;  // [devices] ready when the copies are done
} arrival_t;

struct jpp_inbox {
  jpp_runtime_t* runtime;
  jpp_link_t* link;
  arrival_t* arrivals;  // [slots] message n uses n % slots
  uint64_t taken, returned;
};

jpp_status_t* jpp__inbox_create(jpp_runtime_t* runtime, jpp_link_t* link) {
  jpp_inbox_t* inbox = NULL;
  uint32_t slots = link->plan->slots;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, 1, &inbox));
  inbox->runtime = runtime;
  inbox->link = link;
  link->inbox = inbox;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, slots, &inbox->arrivals));
  for (uint32_t i = 0; i < slots; ++i) {
    JPP_RETURN_IF_ERROR(
        JPP_ARENA_ARRAY(&runtime->arena, link->num_devices, &inbox->arrivals[i].events));
  }
  return NULL;
}

// --- Slots in device memory -----------------------------------------------------------

static arrival_t* oldest(const jpp_inbox_t* inbox) {
  return &inbox->arrivals[inbox->returned % inbox->link->plan->slots];
}

// If a copy fails, its value is failed, and so are the tasks that take it.
static bool is_copied(const jpp_inbox_t* inbox, const arrival_t* arrival) {
  for (uint32_t d = 0; d < inbox->link->num_devices; ++d) {
    bool ready = true;
    if (!arrival->events[d]) continue;
    jpp_status_free(
        jpp_client_event_is_ready(inbox->runtime->client, arrival->events[d], &ready));
    if (!ready) return false;
  }
  return true;
}

static void return_oldest(jpp_inbox_t* inbox) {
  jpp_client_t* client = inbox->runtime->client;
  arrival_t* arrival = oldest(inbox);
  for (uint32_t d = 0; d < inbox->link->num_devices; ++d) {
    jpp_status_free(jpp__wait_end_of(client, &arrival->events[d]));
  }
  jpp_channel_release(inbox->link->channel, arrival->slot);
  ++inbox->returned;
}

bool jpp__inbox_awaits_device(const jpp_inbox_t* inbox) {
  return inbox->returned < inbox->taken;
}

bool jpp__inbox_progress(jpp_inbox_t* inbox) {
  bool some = false;
  while (inbox->returned < inbox->taken && is_copied(inbox, oldest(inbox))) {
    return_oldest(inbox);
    some = true;
  }
  return some;
}

void jpp__inbox_close(jpp_inbox_t* inbox) {
  while (inbox->returned < inbox->taken) return_oldest(inbox);
}

// The inbox keeps the slot until its copy is done, even if the plugin releases it
// earlier.
static void ignore_release(void* memory, void* user) { (void)memory, (void)user; }

static jpp_status_t* copy_on_device(jpp_client_t* client, const jpp_wire_shape_t* shape,
                                    void* data, uint32_t device, jpp_event_t** out_event,
                                    jpp_buffer_t** out_buffer) {
  jpp_foreign_memory_t slot = {.memory = data,
                               .shape = {.dtype = (jpp_dtype_t)shape->dtype,
                                         .rank = shape->rank,
                                         .dims = shape->dims},
                               .device = device,
                               .release = ignore_release};
  jpp_buffer_t* view = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_borrow(client, &slot, &view));
  jpp_status_t* status =
      jpp_client_buffer_copy_to_device(client, view, device, out_buffer);
  if (!status) status = jpp_client_buffer_ready_event(client, *out_buffer, out_event);
  jpp_client_buffer_destroy(client, view);
  return status;
}

// --- Messages -------------------------------------------------------------------------

static jpp_status_t* check_shape(const jpp_runtime_t* runtime,
                                 const jpp_actor_instr_t* instr,
                                 const jpp_wire_shape_t* shape, uint64_t size) {
  uint32_t value = (uint32_t)(instr->tag >> 32);
  jpp_dtype_t dtype = runtime->plan->staged->values[value].type.dtype;
  bool fits = shape->dtype == (uint32_t)dtype && shape->rank <= JPP_BUFFER_MAX_RANK;
  for (uint32_t i = 0; fits && i < shape->rank; ++i) fits = shape->dims[i] >= 0;
  if (fits && jpp__wire_bytes(shape, runtime->device_messages) == size) return NULL;
  return jpp_status_make(
      JPP_PEER_ERROR, "expected a shard of %%%u (%s), found %llu bytes of another kind",
      value, jpp_dtype_name(dtype), (unsigned long long)size);
}

static jpp_status_t* check_message(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                   const jpp_received_t* received) {
  uint32_t devices = actor->num_devices;
  if (received->tag != instr->tag) {
    return jpp__failure_mismatch(actor, instr, received->tag);
  }
  if (received->count != devices + 1 ||
      received->sizes[0] != devices * sizeof(jpp_wire_shape_t)) {
    return jpp_status_make(JPP_PEER_ERROR, "expected %u shards, found %u", devices + 1,
                           received->count);
  }
  const jpp_wire_shape_t* shapes = received->data[0];
  for (uint32_t d = 0; d < devices; ++d) {
    JPP_RETURN_IF_ERROR(
        check_shape(actor->runtime, instr, &shapes[d], received->sizes[1 + d]));
  }
  return NULL;
}

// `events`: of the copies that are not done yet.
static jpp_status_t* unpack(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                            const jpp_received_t* received, jpp_event_t** events) {
  jpp_runtime_t* runtime = actor->runtime;
  size_t first = (size_t)instr->operands[0] * runtime->devices_per_rank;
  jpp_buffer_t** shards = actor->regs + first;
  JPP_RETURN_IF_ERROR(check_message(actor, instr, received));
  const jpp_wire_shape_t* shapes = received->data[0];
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    void* data = received->data[1 + d];
    if (runtime->device_messages && received->sizes[1 + d]) {
      JPP_RETURN_IF_ERROR(copy_on_device(runtime->client, &shapes[d], data,
                                         actor->devices[d], &events[d], &shards[d]));
      continue;
    }
    jpp_host_array_t array = {.struct_size = sizeof(array),
                              .data = data,
                              .dtype = (jpp_dtype_t)shapes[d].dtype,
                              .rank = shapes[d].rank,
                              .dims = shapes[d].dims};
    JPP_RETURN_IF_ERROR(jpp_client_buffer_from_host(runtime->client, &array,
                                                    actor->devices[d], &shards[d]));
  }
  return NULL;
}

jpp_status_t* jpp__inbox_recv(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                              bool* out_done) {
  jpp_inbox_t* inbox = instr->link->inbox;
  jpp_received_t received;
  JPP_RETURN_IF_ERROR(
      jpp_channel_try_recv_bytes(instr->link->channel, &received, out_done));
  if (!*out_done) return NULL;
  arrival_t* arrival = &inbox->arrivals[inbox->taken++ % instr->link->plan->slots];
  arrival->slot = received.slot;
  jpp_status_t* status = unpack(actor, instr, &received, arrival->events);
  jpp__inbox_progress(inbox);
  return status;
}
