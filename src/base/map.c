// A hash table with linear probing, at most half full. Entries are never removed, so a
// probe can stop at the first free slot.
#include "base/map.h"

#include <string.h>

#include "base/hash.h"

static jpp_map_entry_t* map_slot(const jpp_map_t* map, const char* key, uint32_t length) {
  uint64_t hash = jpp__hash_bytes(JPP_HASH_START, key, length);
  uint32_t i = (uint32_t)hash & (map->capacity - 1);
  for (;; i = (i + 1) & (map->capacity - 1)) {
    jpp_map_entry_t* entry = &map->entries[i];
    if (!entry->key) return entry;
    if (entry->length == length && memcmp(entry->key, key, length) == 0) return entry;
  }
}

uint32_t* jpp__map_find(const jpp_map_t* map, const char* key, uint32_t length) {
  if (!map->capacity) return NULL;
  jpp_map_entry_t* entry = map_slot(map, key, length);
  return entry->key ? &entry->value : NULL;
}

static jpp_status_t* map_grow(jpp_map_t* map) {
  jpp_map_t grown = {.capacity = map->capacity ? map->capacity * 2 : 64};
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(grown.capacity, &grown.entries));
  for (uint32_t i = 0; i < map->capacity; ++i) {
    const jpp_map_entry_t* entry = &map->entries[i];
    if (entry->key) *map_slot(&grown, entry->key, entry->length) = *entry;
  }
  grown.count = map->count;
  jpp_free(map->entries);
  *map = grown;
  return NULL;
}

jpp_status_t* jpp__map_put(jpp_map_t* map, const char* key, uint32_t length,
                           uint32_t value) {
  if (map->count * 2 >= map->capacity) JPP_RETURN_IF_ERROR(map_grow(map));
  jpp_map_entry_t* entry = map_slot(map, key, length);
  *entry = (jpp_map_entry_t){.key = key, .length = length, .value = value};
  ++map->count;
  return NULL;
}

void jpp__map_deinit(jpp_map_t* map) {
  jpp_free(map->entries);
  *map = (jpp_map_t){0};
}
