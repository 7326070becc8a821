// Arrays of ids: creates one in which no id is set, and compares ids for sorting.
#ifndef JPP_TASK_IDS_H_
#define JPP_TASK_IDS_H_

#include <string.h>

#include "base/arena.h"
#include "jaxpp/task.h"

// An array of `count` ids in `arena`, all JPP_NONE.
static inline jpp_status_t* jpp__ids_create(jpp_arena_t* arena, size_t count,
                                            uint32_t** out_ids) {
  _Static_assert(JPP_NONE == UINT32_MAX, "all bits of JPP_NONE are set");
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, count, out_ids));
  memset(*out_ids, 0xff, count * sizeof(**out_ids));
  return NULL;
}

// For qsort().
static inline int jpp__ids_compare(const void* a, const void* b) {
  uint32_t x = *(const uint32_t*)a, y = *(const uint32_t*)b;
  return x < y ? -1 : x > y;
}

#endif  // JPP_TASK_IDS_H_
