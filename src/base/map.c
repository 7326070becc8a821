// A hash table with linear probing, at most half full. Entries are never removed, so a
// probe can stop at the first free slot.
#include "base/map.h"

#include <string.h>

#include "base/hash.h"

static bool is_same(const jpp_map_entry_t* a, const jpp_map_entry_t* b) {
  return a->hash == b->hash && a->length == b->length &&
         memcmp(a->key, b->key, a->length) == 0;
}

// The entry with the same key, or the free one for it.
static jpp_map_entry_t* map_slot(const jpp_map_t* map, const jpp_map_entry_t* wanted) {
  uint32_t i = wanted->hash & (map->capacity - 1);
  while (map->entries[i].key && !is_same(&map->entries[i], wanted)) {
    i = (i + 1) & (map->capacity - 1);
  }
  return &map->entries[i];
}

static jpp_map_entry_t make_entry(const char* key, uint32_t length, uint32_t value) {
  uint64_t hash = jpp__hash_bytes(JPP_HASH_START, key, length);
  return (jpp_map_entry_t){
      .key = key, .length = length, .hash = (uint32_t)hash, .value = value};
}

uint32_t* jpp__map_find(const jpp_map_t* map, const char* key, uint32_t length) {
  if (!map->capacity) return NULL;
  jpp_map_entry_t wanted = make_entry(key, length, 0);
  jpp_map_entry_t* entry = map_slot(map, &wanted);
  return entry->key ? &entry->value : NULL;
}

static jpp_status_t* map_grow(jpp_map_t* map) {
  jpp_map_t grown = {.capacity = map->capacity ? map->capacity * 2 : 64};
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(grown.capacity, &grown.entries));
  for (uint32_t i = 0; i < map->capacity; ++i) {
    const jpp_map_entry_t* entry = &map->entries[i];
    if (entry->key) *map_slot(&grown, entry) = *entry;
  }
  grown.count = map->count;
  jpp_free(map->entries);
  *map = grown;
  return NULL;
}

jpp_status_t* jpp__map_add(jpp_map_t* map, const char* key, uint32_t length,
                           uint32_t value, bool* out_added) {
  if (map->count * 2 >= map->capacity) JPP_RETURN_IF_ERROR(map_grow(map));
  jpp_map_entry_t made = make_entry(key, length, value);
  jpp_map_entry_t* entry = map_slot(map, &made);
  bool added = !entry->key;
  if (out_added) *out_added = added;
  if (!added) return NULL;
  *entry = made;
  ++map->count;
  return NULL;
}

void jpp__map_deinit(jpp_map_t* map) {
  jpp_free(map->entries);
  *map = (jpp_map_t){0};
}
