// Log: decisions of the library that no call returns, for readers who want to know why a
// step is planned and run as it is. JPP_LOG writes them to standard error; a program can
// receive the messages itself.
//
// Threads: any thread may set the callback, but not from within a callback.
#ifndef JAXPP_LOG_H_
#define JAXPP_LOG_H_

#include "jaxpp/export.h"

typedef enum jpp_log_level {
  JPP_LOG_OFF,
  JPP_LOG_ERROR,    // a failure that no call returns
  JPP_LOG_WARNING,  // something works, but not as intended
  JPP_LOG_INFO,     // a decision about a step
  JPP_LOG_DEBUG,    // a decision about a part of a step
  JPP_LOG_LEVEL_COUNT
} jpp_log_level_t;

// `source` is the file and line in the library that logged the message
// ("plan/plan.c:81"), `text` is one line without a newline. Both are borrowed for the
// call.
//
// Any thread, several at once, with any lock of the library held: must not block, nor
// call the library.
typedef void (*jpp_log_callback_t)(void* user, jpp_log_level_t level, const char* source,
                                   const char* text);

// Sends all messages up to level `most` to `callback`, and none to standard error,
// whatever JPP_LOG says. A NULL callback restores JPP_LOG. Waits while another thread is
// in the former callback, which is not called any more afterwards.
JPP_API void jpp_log_set_callback(jpp_log_level_t most,
                                  JPP_OPTIONAL jpp_log_callback_t callback,
                                  JPP_OPTIONAL void* user);

#endif  // JAXPP_LOG_H_
