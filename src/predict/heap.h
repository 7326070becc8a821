// Heap: the smallest of several times, each with an id; equal times are ordered by id.
#ifndef JPP_PREDICT_HEAP_H_
#define JPP_PREDICT_HEAP_H_

#include <stdbool.h>
#include <stdint.h>

typedef struct jpp_heap_entry {
  double time;
  uint64_t id;
} jpp_heap_entry_t;

typedef struct jpp_heap {
  jpp_heap_entry_t* entries;  // [capacity] owned by the caller
  size_t count;
} jpp_heap_t;

static inline bool jpp__heap_before(jpp_heap_entry_t a, jpp_heap_entry_t b) {
  return a.time < b.time || (a.time == b.time && a.id < b.id);
}

// The caller has made room for it.
static inline void jpp__heap_push(jpp_heap_t* heap, double time, uint64_t id) {
  jpp_heap_entry_t entry = {time, id};
  size_t at = heap->count++;
  for (; at && jpp__heap_before(entry, heap->entries[(at - 1) / 2]); at = (at - 1) / 2) {
    heap->entries[at] = heap->entries[(at - 1) / 2];
  }
  heap->entries[at] = entry;
}

// The heap must not be empty.
static inline jpp_heap_entry_t jpp__heap_pop(jpp_heap_t* heap) {
  jpp_heap_entry_t first = heap->entries[0], last = heap->entries[--heap->count];
  size_t at = 0;
  for (size_t child = 1; child < heap->count; child = 2 * at + 1) {
    if (child + 1 < heap->count &&
        jpp__heap_before(heap->entries[child + 1], heap->entries[child])) {
      ++child;
    }
    if (!jpp__heap_before(heap->entries[child], last)) break;
    heap->entries[at] = heap->entries[child];
    at = child;
  }
  heap->entries[at] = last;
  return first;
}

#endif  // JPP_PREDICT_HEAP_H_
