// Map64: uint64 keys to uint32, open addressing. Keys are any but UINT64_MAX.
#ifndef JPP_BASE_MAP64_H_
#define JPP_BASE_MAP64_H_

#include "base/alloc.h"

typedef struct jpp_map64_entry {
  uint64_t key;
  uint32_t value;
} jpp_map64_entry_t;

typedef struct jpp_map64 {
  jpp_map64_entry_t* entries;
  uint32_t count, capacity;  // capacity is a power of two, or 0
} jpp_map64_t;

// NULL when the key is not there. Valid until the next set.
JPP_API uint32_t* jpp_map64_find(const jpp_map64_t* map, uint64_t key);
// Adds the key or replaces what is under it.
JPP_API jpp_status_t* jpp_map64_set(jpp_map64_t* map, uint64_t key,
                                    uint32_t value) JPP_MUST_USE;
JPP_API void jpp_map64_deinit(jpp_map64_t* map);

#endif  // JPP_BASE_MAP64_H_
