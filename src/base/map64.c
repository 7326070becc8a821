#include "base/map64.h"

#include <string.h>

// Fibonacci hashing: the golden ratio times 2^64.
static jpp_map64_entry_t* map_slot(const jpp_map64_t* map, uint64_t key) {
  uint64_t hash = key * UINT64_C(0x9E3779B97F4A7C15);
  uint32_t i = (uint32_t)(hash >> 32) & (map->capacity - 1);
  while (map->entries[i].key != UINT64_MAX && map->entries[i].key != key) {
    i = (i + 1) & (map->capacity - 1);
  }
  return &map->entries[i];
}

uint32_t* jpp_map64_find(const jpp_map64_t* map, uint64_t key) {
  if (!map->capacity) return NULL;
  jpp_map64_entry_t* entry = map_slot(map, key);
  return entry->key == key ? &entry->value : NULL;
}

static jpp_status_t* map_grow(jpp_map64_t* map) {
  jpp_map64_t grown = {.capacity = map->capacity ? map->capacity * 2 : 64};
  grown.count = map->count;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(grown.capacity, &grown.entries));
  memset(grown.entries, 0xff, grown.capacity * sizeof(*grown.entries));
  for (uint32_t i = 0; i < map->capacity; ++i) {
    const jpp_map64_entry_t* entry = &map->entries[i];
    if (entry->key != UINT64_MAX) *map_slot(&grown, entry->key) = *entry;
  }
  jpp_free(map->entries);
  *map = grown;
  return NULL;
}

jpp_status_t* jpp_map64_set(jpp_map64_t* map, uint64_t key, uint32_t value) {
  if (map->count * 2 >= map->capacity) JPP_RETURN_IF_ERROR(map_grow(map));
  jpp_map64_entry_t* entry = map_slot(map, key);
  map->count += entry->key != key;
  *entry = (jpp_map64_entry_t){.key = key, .value = value};
  return NULL;
}

void jpp_map64_deinit(jpp_map64_t* map) {
  jpp_free(map->entries);
  *map = (jpp_map64_t){0};
}
