// The names of memories.
#include "jaxpp/memory.h"

#include <stddef.h>
#include <string.h>

const char* jpp_memory_name(jpp_memory_t memory) {
  static const char* const kNames[] = {
      [JPP_MEMORY_DEVICE] = "device",
      [JPP_MEMORY_PINNED_HOST] = "pinned_host",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_MEMORY_COUNT, "a name a memory");
  return (unsigned)memory < JPP_MEMORY_COUNT ? kNames[memory] : NULL;
}

jpp_memory_t jpp_memory_parse(const char* name, uint32_t length) {
  for (int i = 0; i < JPP_MEMORY_COUNT; ++i) {
    const char* known = jpp_memory_name((jpp_memory_t)i);
    if (strlen(known) == length && memcmp(known, name, length) == 0) {
      return (jpp_memory_t)i;
    }
  }
  return JPP_MEMORY_COUNT;
}
