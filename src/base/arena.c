// A bump allocator: blocks of doubling size, used from the front and released only
// together. Memory is zeroed because every block is allocated zeroed and no part of one
// is returned twice.
#include "base/arena.h"

#include <string.h>

enum { kAlignment = 16, kFirstBlock = 4096, kLargestBlock = 1 << 22 };

struct jpp_arena_block {
  jpp_arena_block_t* next;
  size_t used;
  size_t capacity;
  _Alignas(16) unsigned char data[];
};

void jpp__arena_init(jpp_arena_t* arena) { arena->blocks = NULL; }

void jpp__arena_deinit(jpp_arena_t* arena) {
  jpp_arena_block_t* block = arena->blocks;
  while (block) {
    jpp_arena_block_t* next = block->next;
    jpp_free(block);
    block = next;
  }
  arena->blocks = NULL;
}

static jpp_status_t* arena_add_block(jpp_arena_t* arena, size_t size) {
  size_t capacity = arena->blocks ? arena->blocks->capacity * 2 : kFirstBlock;
  if (capacity > kLargestBlock) capacity = kLargestBlock;
  if (capacity < size) capacity = size;
  jpp_arena_block_t* block = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*block) + capacity, (void**)&block));
  block->capacity = capacity;
  block->next = arena->blocks;
  arena->blocks = block;
  return NULL;
}

jpp_status_t* jpp__arena_alloc(jpp_arena_t* arena, size_t size, void** out_memory) {
  *out_memory = NULL;
  size = (size + kAlignment - 1) & ~(size_t)(kAlignment - 1);
  if (!arena->blocks || arena->blocks->capacity - arena->blocks->used < size) {
    JPP_RETURN_IF_ERROR(arena_add_block(arena, size));
  }
  *out_memory = arena->blocks->data + arena->blocks->used;
  arena->blocks->used += size;
  return NULL;
}

jpp_status_t* jpp__arena_copy(jpp_arena_t* arena, const void* data, size_t size,
                              void** out_memory) {
  JPP_RETURN_IF_ERROR(jpp__arena_alloc(arena, size, out_memory));
  if (size) memcpy(*out_memory, data, size);
  return NULL;
}

jpp_status_t* jpp__arena_strndup(jpp_arena_t* arena, const char* text, size_t length,
                                 const char** out_text) {
  *out_text = NULL;
  char* copy = NULL;
  JPP_RETURN_IF_ERROR(jpp__arena_alloc(arena, length + 1, (void**)&copy));
  memcpy(copy, text, length);
  *out_text = copy;
  return NULL;
}

jpp_status_t* jpp__arena_strdup(jpp_arena_t* arena, const char* text,
                                const char** out_text) {
  *out_text = NULL;
  return text ? jpp__arena_strndup(arena, text, strlen(text), out_text) : NULL;
}
