// Arena: memory that is freed all at once. One arena holds one artefact.
#ifndef JPP_BASE_ARENA_H_
#define JPP_BASE_ARENA_H_

#include <stddef.h>
#include <stdint.h>

#include "base/alloc.h"

typedef struct jpp_arena_block jpp_arena_block_t;

typedef struct jpp_arena {
  jpp_arena_block_t* blocks;  // newest first; only the newest has free space
} jpp_arena_t;

void jpp__arena_init(jpp_arena_t* arena);
// Frees every block; the arena may be used again.
void jpp__arena_deinit(jpp_arena_t* arena);

// Zeroed, 16-byte aligned memory that lives as long as the arena.
jpp_status_t* jpp__arena_alloc(jpp_arena_t* arena, size_t size,
                               void** out_memory) JPP_MUST_USE;
jpp_status_t* jpp__arena_copy(jpp_arena_t* arena, const void* data, size_t size,
                              void** out_memory) JPP_MUST_USE;
// Copies `length` bytes of `text` and ends them with NUL.
jpp_status_t* jpp__arena_strndup(jpp_arena_t* arena, const char* text, size_t length,
                                 const char** out_text) JPP_MUST_USE;
// NULL stays NULL.
jpp_status_t* jpp__arena_strdup(jpp_arena_t* arena, const char* text,
                                const char** out_text) JPP_MUST_USE;

// Zeroed array of `count` elements of *out's type.
#define JPP_ARENA_ARRAY(arena, count, out) \
  jpp__arena_alloc((arena), jpp__bytes_multiply((count), sizeof(**(out))), (void**)(out))

#endif  // JPP_BASE_ARENA_H_
