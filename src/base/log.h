// The writing side of jaxpp/log.h. Off unless JPP_LOG names a level or a program has set
// a callback.
//
// An error that a call returns is not logged as well.
// The step loop logs nothing. Threads: any thread, any lock may be held.
#ifndef JPP_BASE_LOG_H_
#define JPP_BASE_LOG_H_

#include <stdatomic.h>
#include <stdbool.h>

#include "jaxpp/log.h"

// Messages up to this level are written; JPP_LOG_LEVEL_COUNT until the first message has
// read the environment.
extern _Atomic int jpp_log_most;

// Reads JPP_LOG into jpp_log_most. Warns once on standard error if it is not a level.
void jpp__log_read_level(void);

static inline bool jpp__log_enabled(jpp_log_level_t level) {
  int most = atomic_load_explicit(&jpp_log_most, memory_order_relaxed);
  if (most == JPP_LOG_LEVEL_COUNT) {
    jpp__log_read_level();
    most = atomic_load_explicit(&jpp_log_most, memory_order_relaxed);
  }
  return (int)level <= most;
}

void jpp__log_write(jpp_log_level_t level, const char* file, int line, const char* format,
                    ...) JPP_PRINTF(4, 5);

// Evaluates the arguments and formats the text only if the level is enabled.
#define JPP_LOG(level, ...)                                     \
  do {                                                          \
    if (jpp__log_enabled(level)) {                              \
      jpp__log_write((level), __FILE__, __LINE__, __VA_ARGS__); \
    }                                                           \
  } while (0)

#endif  // JPP_BASE_LOG_H_
