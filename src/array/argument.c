// Decides how an array becomes an argument of a step: used unchanged, borrowed, or copied
// through the host.
//
// It compares blocks instead of the shardings that produce them, so that shardings with
// other names and meshes count as equal if they cut an array in the same way.
#include "array/argument.h"

#include "array/block.h"
#include "base/alloc.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "jaxpp/array_argument.h"

static uint32_t count_local_ranks(const jpp_wanted_t* wanted) {
  uint32_t count = 0;
  for (uint32_t r = 0; r < wanted->num_ranks; ++r)
    count += jpp__wanted_is_local(wanted, r);
  return count;
}

// The given block that equals the wanted block of a rank's device, or JPP_NONE.
static uint32_t find_block(const jpp_wanted_t* wanted, const jpp_given_t* given,
                           uint32_t rank, uint32_t device) {
  for (uint32_t b = 0; b < given->num_blocks; ++b) {
    const jpp_given_block_t* block = &given->blocks[b];
    bool there =
        block->rank == JPP_ANY_RANK || (block->rank == rank && block->device == device);
    if (there && jpp__block_equal(block->bounds, jpp__wanted_block(wanted, device),
                                  wanted->ndim)) {
      return b;
    }
  }
  return UINT32_MAX;
}

// --- Use ------------------------------------------------------------------------------

// Whether the array of a part has the wanted blocks, on one rank or, if the step cannot
// move it, on all wanted ranks.
static bool has_part(const jpp_wanted_t* wanted, const jpp_given_t* given,
                     uint32_t part) {
  uint64_t matching = 0;
  for (uint32_t b = 0; b < given->num_blocks; ++b) {
    const jpp_given_block_t* block = &given->blocks[b];
    if (block->part != part) continue;
    if (block->device >= wanted->devices_per_rank ||
        !jpp__block_equal(block->bounds, jpp__wanted_block(wanted, block->device),
                          wanted->ndim)) {
      return false;
    }
    bool counts = wanted->can_move;
    for (uint32_t r = 0; r < wanted->num_ranks && !counts; ++r) {
      counts = wanted->ranks[r] == block->rank;
    }
    matching += counts;
  }
  if (wanted->can_move) return matching > 0;
  return matching == (uint64_t)wanted->num_ranks * wanted->devices_per_rank;
}

static bool find_part(const jpp_wanted_t* wanted, const jpp_given_t* given,
                      uint32_t* out_part) {
  if (given->home != JPP_HOME_CLIENT || given->devices != wanted->devices) return false;
  for (uint32_t b = 0; b < given->num_blocks; ++b) {
    uint32_t part = given->blocks[b].part;
    if (b && part == given->blocks[b - 1].part) continue;
    if (has_part(wanted, given, part)) {
      *out_part = part;
      return true;
    }
  }
  return false;
}

// --- Borrow ---------------------------------------------------------------------------

// Adds a rank to the decision if all its blocks are given.
static void borrow_on(const jpp_wanted_t* wanted, const jpp_given_t* given, uint32_t rank,
                      jpp_decision_t* decision) {
  uint32_t* blocks = decision->blocks + decision->num_blocks;
  for (uint32_t d = 0; d < wanted->devices_per_rank; ++d) {
    blocks[d] = find_block(wanted, given, rank, d);
    if (blocks[d] == UINT32_MAX) return;
  }
  decision->num_blocks += wanted->devices_per_rank;
  decision->ranks[decision->num_ranks++] = rank;
}

static bool has_number(const uint32_t* numbers, uint32_t count, uint32_t number) {
  for (uint32_t i = 0; i < count; ++i) {
    if (numbers[i] == number) return true;
  }
  return false;
}

// Borrows on ranks that do not need the array, but from which the step can copy it to one
// that does.
static void borrow_elsewhere(const jpp_wanted_t* wanted, const jpp_given_t* given,
                             jpp_decision_t* decision) {
  for (uint32_t b = 0; b < given->num_blocks; ++b) {
    uint32_t rank = given->blocks[b].rank;
    if (rank >= JPP_NO_RANK || has_number(decision->ranks, decision->num_ranks, rank)) {
      continue;
    }
    borrow_on(wanted, given, rank, decision);
  }
}

// If the array cannot be borrowed, leaves the decision's lists empty; they have room for
// every rank.
static bool borrow(const jpp_wanted_t* wanted, const jpp_given_t* given,
                   jpp_decision_t* decision) {
  if (given->home != JPP_HOME_FOREIGN || wanted->donated ||
      wanted->memory != JPP_MEMORY_DEVICE || given->dtype != wanted->dtype ||
      given->bytes < wanted->least_borrowed) {
    return false;
  }
  uint32_t local = count_local_ranks(wanted);
  for (uint32_t r = 0; r < wanted->num_ranks; ++r) {
    if (jpp__wanted_is_local(wanted, r))
      borrow_on(wanted, given, wanted->ranks[r], decision);
  }
  if (wanted->can_move && local && !decision->num_ranks) {
    borrow_elsewhere(wanted, given, decision);
  }
  if (decision->num_ranks && (wanted->can_move || decision->num_ranks == local)) {
    return true;
  }
  decision->num_ranks = decision->num_blocks = 0;
  return false;
}

// --- Upload ---------------------------------------------------------------------------

// Whether an earlier block has the same elements.
static bool is_repeated(const jpp_given_t* given, uint32_t block) {
  const int64_t* bounds = given->blocks[block].bounds;
  for (uint32_t b = 0; b < block; ++b) {
    const jpp_given_block_t* earlier = &given->blocks[b];
    if (earlier->is_local && jpp__block_equal(earlier->bounds, bounds, given->ndim)) {
      return true;
    }
  }
  return false;
}

jpp_status_t* jpp__argument_missing(const jpp_wanted_t* wanted, uint32_t device,
                                    uint64_t found) {
  const int64_t* block = jpp__wanted_block(wanted, device);
  jpp_str_t str = {0};
  for (uint32_t i = 0; i < wanted->ndim; ++i) {
    jpp_str_appendf(&str, "%s%lld:%lld", i ? ", " : "", (long long)block[2 * i],
                    (long long)block[2 * i + 1]);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status =
      jpp_status_make(JPP_MESH_ERROR,
                      "%s: expected this process to hold the part that its ranks need, "
                      "[%s], found %llu of "
                      "its %llu elements",
                      wanted->name, text, (unsigned long long)found,
                      (unsigned long long)jpp__block_size(block, wanted->ndim));
  jpp_free(text);
  return status;
}

// Lists the given blocks that cover a device's block. Given blocks are equal or disjoint.
static jpp_status_t* cover(const jpp_wanted_t* wanted, const jpp_given_t* given,
                           uint32_t device, jpp_decision_t* decision) {
  const int64_t* block = jpp__wanted_block(wanted, device);
  int64_t common[JPP_BUFFER_MAX_RANK * 2];
  uint64_t found = 0;
  for (uint32_t b = 0; b < given->num_blocks; ++b) {
    if (!given->blocks[b].is_local || is_repeated(given, b) ||
        !jpp__block_intersect(given->blocks[b].bounds, block, wanted->ndim, common)) {
      continue;
    }
    found += jpp__block_size(common, wanted->ndim);
    if (has_number(decision->blocks, decision->num_blocks, b)) continue;
    decision->blocks[decision->num_blocks++] = b;
  }
  if (found >= jpp__block_size(block, wanted->ndim)) return NULL;
  return jpp__argument_missing(wanted, device, found);
}

static jpp_status_t* upload(const jpp_wanted_t* wanted, const jpp_given_t* given,
                            jpp_decision_t* decision) {
  decision->action = JPP_ACTION_UPLOAD;
  if (!count_local_ranks(wanted)) return NULL;
  for (uint32_t d = 0; d < wanted->devices_per_rank; ++d) {
    JPP_RETURN_IF_ERROR(cover(wanted, given, d, decision));
  }
  return NULL;
}

// --- The decision ---------------------------------------------------------------------

jpp_status_t* jpp__argument_check_block(const jpp_wanted_t* wanted,
                                        const int64_t* block) {
  if (jpp__block_is_valid(block, wanted->ndim)) return NULL;
  return jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "%s: expected a block that begins at 0 or later and does not end "
      "before it begins",
      wanted->name);
}

jpp_status_t* jpp__wanted_read(const jpp_wanted_t* given, jpp_wanted_t* out_wanted) {
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_wanted_t, least_borrowed, given, out_wanted));
  const jpp_wanted_t* wanted = out_wanted;
  JPP_RETURN_IF_NULL(wanted->name);
  if (wanted->num_ranks) JPP_RETURN_IF_NULL(wanted->ranks);
  if (wanted->devices_per_rank) JPP_RETURN_IF_NULL(wanted->blocks);
  if (wanted->ndim > JPP_BUFFER_MAX_RANK) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "%s: found %u dimensions, expected at most %d", wanted->name,
                           wanted->ndim, JPP_BUFFER_MAX_RANK);
  }
  for (uint32_t d = 0; d < wanted->devices_per_rank; ++d) {
    JPP_RETURN_IF_ERROR(jpp__argument_check_block(wanted, jpp__wanted_block(wanted, d)));
  }
  return NULL;
}

static jpp_status_t* read_given(const jpp_wanted_t* wanted, const jpp_given_t* from,
                                jpp_given_t* out_given) {
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_given_t, blocks, from, out_given));
  const jpp_given_t* given = out_given;
  if (given->deletion_reason) {
    return jpp_status_make(JPP_DONATED_ERROR, "%s: expected an array, found one that %s",
                           wanted->name, given->deletion_reason);
  }
  if (given->num_blocks) JPP_RETURN_IF_NULL(given->blocks);
  if (given->ndim != wanted->ndim) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: expected %u dimensions, found %u",
                           wanted->name, wanted->ndim, given->ndim);
  }
  for (uint32_t b = 0; b < given->num_blocks; ++b) {
    if (wanted->ndim) JPP_RETURN_IF_NULL(given->blocks[b].bounds);
    JPP_RETURN_IF_ERROR(jpp__argument_check_block(wanted, given->blocks[b].bounds));
  }
  return NULL;
}

static jpp_status_t* decide(const jpp_wanted_t* wanted, const jpp_given_t* given,
                            jpp_decision_t* decision) {
  if (find_part(wanted, given, &decision->part)) return NULL;
  // Room for every rank of either side, or for every block.
  size_t ranks = (size_t)wanted->num_ranks + given->num_blocks;
  size_t blocks = (ranks + 1) * wanted->devices_per_rank + given->num_blocks;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(ranks, &decision->ranks));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(blocks, &decision->blocks));
  if (!borrow(wanted, given, decision)) return upload(wanted, given, decision);
  decision->action = JPP_ACTION_BORROW;
  return NULL;
}

jpp_status_t* jpp_argument_decide(const jpp_wanted_t* wanted, const jpp_given_t* given,
                                  jpp_decision_t* out_decision) {
  JPP_RETURN_IF_NULL(wanted, given, out_decision);
  *out_decision = (jpp_decision_t){0};
  jpp_wanted_t full;
  jpp_given_t from;
  JPP_RETURN_IF_ERROR(jpp__wanted_read(wanted, &full));
  JPP_RETURN_IF_ERROR(read_given(&full, given, &from));
  jpp_status_t* status = decide(&full, &from, out_decision);
  if (status) jpp_decision_free(out_decision);
  return status;
}

void jpp_decision_free(jpp_decision_t* decision) {
  if (!decision) return;
  jpp_free(decision->ranks);
  jpp_free(decision->blocks);
  *decision = (jpp_decision_t){0};
}
