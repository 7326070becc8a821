// The library's only way to the heap. A failed allocation becomes a status, and a counter
// lets a test make the n-th allocation fail, which proves that every caller handles it.
#include "base/alloc.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/null.h"

static _Atomic int64_t g_fail_after = -1;

void jpp__alloc_fail_after(int64_t successes) { atomic_store(&g_fail_after, successes); }

// Sets errno, as malloc() does when it fails.
static bool alloc_must_fail(void) {
  if (atomic_load_explicit(&g_fail_after, memory_order_relaxed) < 0) return false;
  if (atomic_fetch_sub(&g_fail_after, 1) != 0) return false;
  errno = ENOMEM;
  return true;
}

static jpp_status_t* alloc_failed(size_t size) {
  return jpp_status_make(JPP_OUT_OF_MEMORY, "host memory: allocation of %zu bytes failed",
                         size);
}

jpp_status_t* jpp_alloc(size_t size, void** out_memory) {
  JPP_RETURN_IF_NULL(out_memory);
  *out_memory = alloc_must_fail() ? NULL : calloc(1, size ? size : 1);
  return *out_memory ? NULL : alloc_failed(size);
}

jpp_status_t* jpp_alloc_array(size_t count, size_t size, void** out_memory) {
  JPP_RETURN_IF_NULL(out_memory);
  return jpp_alloc(jpp__bytes_multiply(count, size), out_memory);
}

jpp_status_t* jpp__realloc(void** memory, size_t size) {
  void* grown = alloc_must_fail() ? NULL : realloc(*memory, size ? size : 1);
  if (!grown) return alloc_failed(size);
  *memory = grown;
  return NULL;
}

void jpp_free(void* memory) { free(memory); }
