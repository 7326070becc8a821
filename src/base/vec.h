// Vec: a growable array on the heap, typed by the struct that JPP_VEC() declares.
//
//   typedef JPP_VEC(uint32_t) jpp_u32_vec_t;
//   jpp_u32_vec_t ids = {0};
//   JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&ids, 7));
//   jpp_vec_deinit(&ids);
#ifndef JPP_BASE_VEC_H_
#define JPP_BASE_VEC_H_

#include <stdint.h>

#include "base/arena.h"

#define JPP_VEC(type) \
  struct {            \
    type* data;       \
    size_t count;     \
    size_t capacity;  \
  }

typedef JPP_VEC(uint32_t) jpp_u32_vec_t;
typedef JPP_VEC(uint64_t) jpp_u64_vec_t;

// Makes room for `extra` more elements of `element_size` bytes.
jpp_status_t* jpp__vec_reserve_bytes(void** data, size_t count, size_t* capacity,
                                     size_t element_size, size_t extra) JPP_MUST_USE;

#define JPP_VEC_RESERVE(vec, extra)                                            \
  jpp__vec_reserve_bytes((void**)&(vec)->data, (vec)->count, &(vec)->capacity, \
                         sizeof(*(vec)->data), (extra))

// Appends one element; a status expression. `value` is evaluated only on success.
#define JPP_VEC_PUSH(vec, ...)                                             \
  ({                                                                       \
    jpp_status_t* jpp_vec_status_ =                                        \
        (vec)->count < (vec)->capacity ? NULL : JPP_VEC_RESERVE((vec), 1); \
    if (!jpp_vec_status_) (vec)->data[(vec)->count++] = (__VA_ARGS__);     \
    jpp_vec_status_;                                                       \
  })

// Frees the elements' storage; the vec is empty and usable again.
#define jpp_vec_deinit(vec) \
  do {                      \
    jpp_free((vec)->data);  \
    (vec)->data = NULL;     \
    (vec)->count = 0;       \
    (vec)->capacity = 0;    \
  } while (0)

// Copies the elements into an arena, for a builder that is done.
#define JPP_VEC_TO_ARENA(vec, arena, out)                                    \
  jpp__arena_copy((arena), (vec)->data, (vec)->count * sizeof(*(vec)->data), \
                  (void**)(out))

#endif  // JPP_BASE_VEC_H_
