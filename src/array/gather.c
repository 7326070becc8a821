// Makes an argument of a step from blocks in host memory.
//
// If one host block contains a device's block, it is uploaded from there, with strides. A
// block that spans several host blocks is assembled first.
#include "array/argument.h"
#include "array/block.h"
#include "base/alloc.h"
#include "base/null.h"

static size_t element_bytes(const jpp_wanted_t* wanted) {
  return jpp_dtype_bits(wanted->dtype) / 8;
}

// The address of an element, by its index in the whole array; the block contains it.
static const char* address_in(const jpp_host_block_t* block, const int64_t* index,
                              uint32_t ndim) {
  const char* data = block->data;
  for (uint32_t i = 0; i < ndim; ++i) {
    data += (index[2 * i] - block->bounds[2 * i]) * block->byte_strides[i];
  }
  return data;
}

// --- Copies ---------------------------------------------------------------------------

typedef struct copy {
  uint32_t ndim;
  size_t element;  // bytes
  int64_t extents[JPP_BUFFER_MAX_RANK];
  const int64_t* from_strides;  // bytes
  int64_t to_strides[JPP_BUFFER_MAX_RANK];
} copy_t;

static void copy_axis(const copy_t* copy, uint32_t axis, const char* from, char* to) {
  if (axis == copy->ndim) {
    memcpy(to, from, copy->element);
    return;
  }
  bool dense =
      axis + 1 == copy->ndim && copy->from_strides[axis] == (int64_t)copy->element;
  if (dense) {
    memcpy(to, from, (size_t)copy->extents[axis] * copy->element);
    return;
  }
  for (int64_t i = 0; i < copy->extents[axis]; ++i) {
    copy_axis(copy, axis + 1, from + i * copy->from_strides[axis],
              to + i * copy->to_strides[axis]);
  }
}

// Copies the common part of a host block and a wanted block. Returns the number of
// elements.
static uint64_t copy_common(const jpp_wanted_t* wanted, const int64_t* block,
                            const jpp_host_block_t* from, char* data) {
  int64_t common[JPP_BUFFER_MAX_RANK * 2];
  if (!jpp__block_intersect(from->bounds, block, wanted->ndim, common)) return 0;
  copy_t copy = {.ndim = wanted->ndim,
                 .element = element_bytes(wanted),
                 .from_strides = from->byte_strides};
  int64_t stride = (int64_t)copy.element;
  for (uint32_t i = wanted->ndim; i-- > 0;) {
    copy.extents[i] = common[2 * i + 1] - common[2 * i];
    copy.to_strides[i] = stride;
    data += (common[2 * i] - block[2 * i]) * stride;
    stride *= block[2 * i + 1] - block[2 * i];
  }
  copy_axis(&copy, 0, address_in(from, common, wanted->ndim), data);
  return jpp__block_size(common, wanted->ndim);
}

static bool is_repeated(const jpp_host_block_t* blocks, uint32_t index, uint32_t ndim) {
  for (uint32_t i = 0; i < index; ++i) {
    if (jpp__block_equal(blocks[i].bounds, blocks[index].bounds, ndim)) return true;
  }
  return false;
}

static jpp_status_t* gather(const jpp_wanted_t* wanted, uint32_t device,
                            const jpp_host_block_t* blocks, uint32_t num_blocks,
                            char* data) {
  const int64_t* block = jpp__wanted_block(wanted, device);
  uint64_t found = 0;
  for (uint32_t b = 0; b < num_blocks; ++b) {
    if (is_repeated(blocks, b, wanted->ndim)) continue;
    found += copy_common(wanted, block, &blocks[b], data);
  }
  if (found >= jpp__block_size(block, wanted->ndim)) return NULL;
  return jpp__argument_missing(wanted, device, found);
}

static uint64_t bytes_of_block(const jpp_wanted_t* wanted, uint32_t device) {
  uint64_t size = jpp__block_size(jpp__wanted_block(wanted, device), wanted->ndim);
  return jpp__bytes_multiply(size, element_bytes(wanted));
}

static jpp_status_t* check_blocks(const jpp_wanted_t* wanted,
                                  const jpp_host_block_t* blocks, uint32_t num_blocks) {
  if (num_blocks) JPP_RETURN_IF_NULL(blocks);
  for (uint32_t b = 0; b < num_blocks && wanted->ndim; ++b) {
    JPP_RETURN_IF_NULL(blocks[b].bounds, blocks[b].byte_strides);
    JPP_RETURN_IF_ERROR(jpp__argument_check_block(wanted, blocks[b].bounds));
  }
  return NULL;
}

jpp_status_t* jpp_argument_gather(const jpp_wanted_t* wanted, uint32_t device,
                                  const jpp_host_block_t* blocks, uint32_t num_blocks,
                                  void* data, size_t size) {
  JPP_RETURN_IF_NULL(wanted, blocks, data);
  jpp_wanted_t full;
  JPP_RETURN_IF_ERROR(jpp__wanted_read(wanted, &full));
  JPP_RETURN_IF_ERROR(check_blocks(&full, blocks, num_blocks));
  if (device >= full.devices_per_rank) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s: expected a device of the rank, found device %u of %u",
                           full.name, device, full.devices_per_rank);
  }
  JPP_RETURN_IF_ERROR(
      jpp__check_count("bytes of a block", bytes_of_block(&full, device), size));
  return gather(&full, device, blocks, num_blocks, data);
}

// --- Upload ---------------------------------------------------------------------------

static bool contains(const int64_t* outer, const int64_t* inner, uint32_t ndim) {
  for (uint32_t i = 0; i < ndim; ++i) {
    if (inner[2 * i] < outer[2 * i] || inner[2 * i + 1] > outer[2 * i + 1]) return false;
  }
  return true;
}

// The shards of one rank, and the memory assembled for them.
typedef struct staged_shards {
  jpp_host_array_t* shards;  // [devices_per_rank]
  int64_t* dims;             // [devices_per_rank][ndim]
  char** assembled;          // [devices_per_rank]
} staged_shards_t;

static jpp_status_t* stage_shard(const jpp_wanted_t* wanted, uint32_t device,
                                 const jpp_host_block_t* blocks, uint32_t num_blocks,
                                 staged_shards_t* staged) {
  const int64_t* block = jpp__wanted_block(wanted, device);
  int64_t* dims = staged->dims + (size_t)device * wanted->ndim;
  for (uint32_t i = 0; i < wanted->ndim; ++i) dims[i] = block[2 * i + 1] - block[2 * i];
  jpp_host_array_t* shard = &staged->shards[device];
  *shard = (jpp_host_array_t){.struct_size = sizeof(*shard),
                              .dtype = wanted->dtype,
                              .rank = wanted->ndim,
                              .dims = dims};
  for (uint32_t b = 0; b < num_blocks; ++b) {
    if (!contains(blocks[b].bounds, block, wanted->ndim)) continue;
    shard->data = address_in(&blocks[b], block, wanted->ndim);
    shard->byte_strides = blocks[b].byte_strides;
    return NULL;
  }
  for (uint32_t d = 0; d < device; ++d) {
    bool same = jpp__block_equal(jpp__wanted_block(wanted, d), block, wanted->ndim);
    if (same) shard->data = staged->shards[d].data;
    if (same) return NULL;
  }
  char** data = &staged->assembled[device];
  JPP_RETURN_IF_ERROR(jpp_alloc((size_t)bytes_of_block(wanted, device), (void**)data));
  shard->data = *data;
  return gather(wanted, device, blocks, num_blocks, *data);
}

static jpp_status_t* upload(const jpp_wanted_t* wanted, const jpp_array_layout_t* layout,
                            const uint32_t* devices, const jpp_host_block_t* blocks,
                            uint32_t num_blocks, staged_shards_t* staged,
                            jpp_array_t** out_array) {
  uint32_t count = layout->num_ranks ? wanted->devices_per_rank : 0;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(wanted->devices_per_rank, &staged->shards));
  JPP_RETURN_IF_ERROR(
      JPP_ALLOC_ARRAY((size_t)wanted->devices_per_rank * wanted->ndim, &staged->dims));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(wanted->devices_per_rank, &staged->assembled));
  for (uint32_t d = 0; d < count; ++d) {
    JPP_RETURN_IF_ERROR(stage_shard(wanted, d, blocks, num_blocks, staged));
  }
  return jpp_array_upload(layout, staged->shards, devices, out_array);
}

jpp_status_t* jpp__argument_upload(const jpp_wanted_t* wanted, jpp_client_t* client,
                                   const uint32_t* devices,
                                   const jpp_host_block_t* blocks, uint32_t num_blocks,
                                   jpp_array_t** out_array) {
  JPP_RETURN_IF_ERROR(check_blocks(wanted, blocks, num_blocks));
  uint32_t per_rank = wanted->devices_per_rank;
  // One allocation for the local ranks and the devices of each.
  uint32_t* ranks = NULL;
  JPP_RETURN_IF_ERROR(
      JPP_ALLOC_ARRAY((size_t)wanted->num_ranks * (per_rank + 1), &ranks));
  uint32_t* own_devices = ranks + wanted->num_ranks;
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = client,
                               .devices_per_rank = per_rank,
                               .ranks = ranks,
                               .memory = wanted->memory};
  for (uint32_t r = 0; r < wanted->num_ranks; ++r) {
    if (!jpp__wanted_is_local(wanted, r)) continue;
    for (uint32_t d = 0; d < per_rank; ++d) {
      own_devices[(size_t)layout.num_ranks * per_rank + d] =
          devices[(size_t)wanted->ranks[r] * per_rank + d];
    }
    ranks[layout.num_ranks++] = wanted->ranks[r];
  }
  staged_shards_t staged = {0};
  jpp_status_t* status =
      upload(wanted, &layout, own_devices, blocks, num_blocks, &staged, out_array);
  for (uint32_t d = 0; d < per_rank && staged.assembled; ++d) {
    jpp_free(staged.assembled[d]);
  }
  jpp_free(staged.assembled);
  jpp_free(staged.dims);
  jpp_free(staged.shards);
  jpp_free(ranks);
  return status;
}
