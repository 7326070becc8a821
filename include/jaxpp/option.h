// Options: the environment variables that this project reads, in one table, which
// `jaxpp options` prints. The library, the command and Python read the environment only
// through it, so that every variable is documented and misspelt ones can be named.
//
// Threads: any thread, as long as no thread changes the environment at the same time
// (setenv()).
#ifndef JAXPP_OPTION_H_
#define JAXPP_OPTION_H_

#include <stdbool.h>
#include <stdint.h>

#include "jaxpp/status.h"

// Rows of the table. New rows are added at the end.
typedef enum jpp_option {
  JPP_OPTION_PLUGIN,
  JPP_OPTION_LOG,
  JPP_OPTION_DUMP,
  JPP_OPTION_FLIGHT,
  JPP_OPTION_STEPS_IN_FLIGHT,
  JPP_OPTION_ADDRESS,
  JPP_OPTION_TRANSPORT,
  JPP_OPTION_PEER_TIMEOUT,
  JPP_OPTION_STALL_TIMEOUT,
  JPP_OPTION_STEP_TIMEOUT,
  JPP_OPTION_NUM_PROCESSES,
  JPP_OPTION_PROCESS_ID,
  JPP_OPTION_RESTART,
  JPP_OPTION_UCX,
  JPP_OPTION_COORDINATOR,
  JPP_OPTION_XLA_FLAGS,
  JPP_OPTION_TF_LOG,
  JPP_OPTION_PREALLOCATE,
  JPP_OPTION_SHARE_MEMORY,
  JPP_OPTION_NCCL,
  JPP_OPTION_CUDA,
  JPP_OPTION_GRACE,
  JPP_OPTION_REPORT,
  JPP_OPTION_COUNT
} jpp_option_t;

// A row of the table; lifetime static.
typedef struct jpp_option_info {
  const char* name;           // "JPP_LOG"
  const char* values;         // "LEVEL"
  const char* default_value;  // the value when the variable is not set
  const char* help;           // one line
} jpp_option_info_t;

// The row of an option below JPP_OPTION_COUNT.
JPP_API const jpp_option_info_t* jpp_option_info(jpp_option_t option);
// JPP_OPTION_COUNT for a name that is not in the table.
JPP_API jpp_option_t jpp_option_find(const char* name);
// Its value in the environment, borrowed until the environment changes; NULL when not set
// or empty.
JPP_API const char* jpp_option_get(jpp_option_t option);

// A time in seconds, as milliseconds; 0 when not set. JPP_INVALID_ARGUMENT unless the
// value is a number above 0 and at most 1000000.
JPP_API jpp_status_t* jpp_option_get_ms(jpp_option_t option,
                                        uint32_t* out_ms) JPP_MUST_USE;

// A sentence that names variables in the environment that look like options but have no
// effect: JPP_... that is spelt almost like a row of the table, and JAXPP_..., which
// belongs to another implementation. NULL when there are none. Free with jpp_text_free().
JPP_API jpp_status_t* jpp_options_misspelt(char** out_text) JPP_MUST_USE;

#endif  // JAXPP_OPTION_H_
