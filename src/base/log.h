// Log: what the library decided, a line a message on standard error, for people who want
// to know why a step is planned and run as it is. Off unless JPP_LOG names a level.
//
// An error that a caller gets is not logged besides: the log has what no call returns.
// The step loop logs nothing. Threads: any thread, any lock may be held.
#ifndef JPP_BASE_LOG_H_
#define JPP_BASE_LOG_H_

#include <stdatomic.h>
#include <stdbool.h>

#include "jaxpp/export.h"

typedef enum jpp_log_level {
  JPP_LOG_OFF,
  JPP_LOG_ERROR,    // something failed that no caller is told of
  JPP_LOG_WARNING,  // something works, but not as it was meant to
  JPP_LOG_INFO,     // what was decided for a step
  JPP_LOG_DEBUG,    // and for each of its parts
  JPP_LOG_LEVEL_COUNT
} jpp_log_level_t;

// Messages up to this level are written; JPP_LOG_LEVEL_COUNT until the first message asks
// the environment.
extern _Atomic int jpp_log_most;

// Reads JPP_LOG into jpp_log_most. Says once on standard error if it is no level.
void jpp_log_read_level(void);

static inline bool jpp_log_enabled(jpp_log_level_t level) {
  int most = atomic_load_explicit(&jpp_log_most, memory_order_relaxed);
  if (most == JPP_LOG_LEVEL_COUNT) {
    jpp_log_read_level();
    most = atomic_load_explicit(&jpp_log_most, memory_order_relaxed);
  }
  return (int)level <= most;
}

void jpp_log_write(jpp_log_level_t level, const char* file, int line, const char* format,
                   ...) JPP_PRINTF(4, 5);

// Arguments are evaluated, and the text is made, only where the level is enabled.
#define JPP_LOG(level, ...)                                    \
  do {                                                         \
    if (jpp_log_enabled(level)) {                              \
      jpp_log_write((level), __FILE__, __LINE__, __VA_ARGS__); \
    }                                                          \
  } while (0)

#endif  // JPP_BASE_LOG_H_
