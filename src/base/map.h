// Map: short texts to uint32 ids, open addressing. Keys are borrowed.
#ifndef JPP_BASE_MAP_H_
#define JPP_BASE_MAP_H_

#include "base/alloc.h"

typedef struct jpp_map_entry {
  const char* key;  // NULL: free
  uint32_t length, hash;
  uint32_t value;
} jpp_map_entry_t;

typedef struct jpp_map {
  jpp_map_entry_t* entries;
  uint32_t count, capacity;  // capacity is a power of two, or 0
} jpp_map_t;

// The id under a key, or NULL. Valid until the next put.
uint32_t* jpp__map_find(const jpp_map_t* map, const char* key, uint32_t length);
// Adds a key unless the map has it; then its id stays and *out_added is false. The key
// must outlive the map; `out_added` may be NULL.
jpp_status_t* jpp__map_add(jpp_map_t* map, const char* key, uint32_t length,
                           uint32_t value, bool* out_added) JPP_MUST_USE;
void jpp__map_deinit(jpp_map_t* map);

#endif  // JPP_BASE_MAP_H_
