// Carries out the decision about an argument of a step. A source is asked only for the
// contents that the decision names.
#include "array/argument.h"
#include "base/alloc.h"
#include "base/null.h"
#include "base/struct_size.h"

// The parameters of jpp_argument_take(), checked.
typedef struct taking {
  jpp_wanted_t wanted;
  jpp_source_t source;
  jpp_client_t* client;
  const uint32_t* devices;
  uint32_t num_devices;
} taking_t;

static jpp_status_t* missing_function(const taking_t* taking, const char* name) {
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "%s: expected a source whose function `%s` is set, found NULL",
                         taking->wanted.name, name);
}

static jpp_status_t* use_part(const taking_t* taking, uint32_t part,
                              jpp_array_t** out_array) {
  const jpp_source_t* source = &taking->source;
  if (!source->part) return missing_function(taking, "part");
  jpp_array_t* array = NULL;
  JPP_RETURN_IF_ERROR(source->part(source->user, part, &array));
  jpp_array_hold(array);
  *out_array = array;
  return NULL;
}

// --- Upload ---------------------------------------------------------------------------

// `strides` has room for [num_blocks][ndim].
static jpp_status_t* read_blocks(const taking_t* taking, const jpp_decision_t* decision,
                                 int64_t* strides, jpp_host_block_t* blocks) {
  const jpp_wanted_t* wanted = &taking->wanted;
  const jpp_source_t* source = &taking->source;
  for (uint32_t b = 0; b < decision->num_blocks; ++b) {
    const int64_t* bounds = source->given->blocks[decision->blocks[b]].bounds;
    int64_t* dense = strides + (size_t)b * wanted->ndim;
    int64_t stride = jpp_dtype_bits(wanted->dtype) / 8;
    for (uint32_t i = wanted->ndim; i-- > 0;) {
      dense[i] = stride;
      stride *= bounds[2 * i + 1] - bounds[2 * i];
    }
    blocks[b] = (jpp_host_block_t){.bounds = bounds, .byte_strides = dense};
    JPP_RETURN_IF_ERROR(source->read(source->user, decision->blocks[b], &blocks[b]));
  }
  return NULL;
}

static jpp_status_t* upload_blocks(const taking_t* taking, const jpp_decision_t* decision,
                                   jpp_array_t** out_array) {
  const jpp_wanted_t* wanted = &taking->wanted;
  uint32_t count = decision->num_blocks;
  if (count && !taking->source.read) return missing_function(taking, "read");
  jpp_host_block_t* blocks = NULL;
  int64_t* strides = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(count, &blocks);
  if (!status) status = JPP_ALLOC_ARRAY((size_t)count * wanted->ndim, &strides);
  if (!status) status = read_blocks(taking, decision, strides, blocks);
  if (!status) {
    status = jpp__argument_upload(wanted, taking->client, taking->devices, blocks, count,
                                  out_array);
  }
  jpp_free(strides);
  jpp_free(blocks);
  return status;
}

// --- Borrow ---------------------------------------------------------------------------

static jpp_status_t* borrow_blocks(const taking_t* taking, const jpp_decision_t* decision,
                                   jpp_array_t** out_array) {
  const jpp_source_t* source = &taking->source;
  if (!source->lend) {
    return jpp_status_make(JPP_UNSUPPORTED, "expected a source that lends its memory");
  }
  uint32_t per_rank = taking->wanted.devices_per_rank;
  const jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                                     .client = taking->client,
                                     .num_ranks = decision->num_ranks,
                                     .devices_per_rank = per_rank,
                                     .ranks = decision->ranks};
  jpp_foreign_memory_t* memory = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(decision->num_blocks, &memory));
  void (*release)(void* owner) = NULL;
  void* owner = NULL;
  jpp_status_t* status = source->lend(source->user, decision->blocks,
                                      decision->num_blocks, memory, &release, &owner);
  for (uint32_t b = 0; b < decision->num_blocks; ++b) {
    size_t first = (size_t)decision->ranks[b / per_rank] * per_rank;
    memory[b].device = taking->devices[first + b % per_rank];
  }
  if (!status) status = jpp_array_borrow(&layout, memory, release, owner, out_array);
  jpp_free(memory);
  return status;
}

static jpp_status_t* copy_blocks(const taking_t* taking, jpp_array_t** out_array) {
  jpp_given_t on_host;
  jpp_decision_t decision;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_given_t, blocks, taking->source.given, &on_host));
  on_host.home = JPP_HOME_HOST;
  JPP_RETURN_IF_ERROR(jpp_argument_decide(&taking->wanted, &on_host, &decision));
  jpp_status_t* status = upload_blocks(taking, &decision, out_array);
  jpp_decision_free(&decision);
  return status;
}

static jpp_status_t* borrow_or_copy(const taking_t* taking,
                                    const jpp_decision_t* decision,
                                    jpp_array_t** out_array) {
  jpp_status_t* status = borrow_blocks(taking, decision, out_array);
  jpp_status_code_t code = jpp_status_code(status);
  if (code != JPP_UNSUPPORTED && code != JPP_INVALID_ARGUMENT) return status;
  jpp_status_free(status);
  return copy_blocks(taking, out_array);
}

// --- Both -----------------------------------------------------------------------------

static jpp_status_t* check_devices(const taking_t* taking, const uint32_t* ranks,
                                   uint32_t num_ranks) {
  const jpp_wanted_t* wanted = &taking->wanted;
  for (uint32_t r = 0; r < num_ranks; ++r) {
    uint64_t expected = ((uint64_t)ranks[r] + 1) * wanted->devices_per_rank;
    if (expected <= taking->num_devices) continue;
    return jpp_status_make(
        JPP_INVALID_ARGUMENT, "%s, on rank %u: expected at least %llu devices, found %u",
        wanted->name, ranks[r], (unsigned long long)expected, taking->num_devices);
  }
  return NULL;
}

static jpp_status_t* carry_out(const taking_t* taking, const jpp_decision_t* decision,
                               jpp_array_t** out_array) {
  if (decision->action == JPP_ACTION_USE) {
    return use_part(taking, decision->part, out_array);
  }
  const jpp_wanted_t* wanted = &taking->wanted;
  JPP_RETURN_IF_ERROR(check_devices(taking, wanted->ranks, wanted->num_ranks));
  JPP_RETURN_IF_ERROR(check_devices(taking, decision->ranks, decision->num_ranks));
  if (decision->action == JPP_ACTION_BORROW) {
    return borrow_or_copy(taking, decision, out_array);
  }
  return upload_blocks(taking, decision, out_array);
}

jpp_status_t* jpp_argument_take(const jpp_wanted_t* wanted, const jpp_source_t* source,
                                jpp_client_t* client, const uint32_t* devices,
                                uint32_t num_devices, jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(wanted, source, client, devices, out_array);
  *out_array = NULL;
  taking_t taking = {.client = client, .devices = devices, .num_devices = num_devices};
  jpp_decision_t decision;
  JPP_RETURN_IF_ERROR(jpp__wanted_read(wanted, &taking.wanted));
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_source_t, read, source, &taking.source));
  JPP_RETURN_IF_ERROR(
      jpp_argument_decide(&taking.wanted, taking.source.given, &decision));
  jpp_status_t* status = carry_out(&taking, &decision, out_array);
  jpp_decision_free(&decision);
  return status;
}
