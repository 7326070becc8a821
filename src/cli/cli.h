// The jaxpp command: thin over the library. Every command fills `out`, which main()
// writes to standard output in one go; what goes wrong is a status, which main() turns
// into one line on standard error and an exit status.
#ifndef JPP_CLI_CLI_H_
#define JPP_CLI_CLI_H_

#include "base/str.h"
#include "cli/planned.h"

enum { JPP_CLI_MAX_WORDS = 3 };

// What the command line says. 0 and NULL: not given.
typedef struct jpp_cli_options {
  const char* words[JPP_CLI_MAX_WORDS];  // that are no flags, behind the command
  uint32_t num_words;
  const char* after;
  const char* schedule;
  uint32_t stages, ranks, microbatches;
  uint32_t slots;
  bool fuse, json, help;
} jpp_cli_options_t;

typedef jpp_status_t* (*jpp_cli_run_t)(const jpp_cli_options_t* options, jpp_str_t* out);

typedef struct jpp_cli_command {
  const char* name;   // "schedule show"
  const char* words;  // "FILE"; what stands behind the name, for the help
  uint32_t num_words;
  uint32_t flags;  // bits of jpp_cli_flag_t
  const char* help;
  jpp_cli_run_t run;
} jpp_cli_command_t;

typedef enum jpp_cli_flag {
  JPP_FLAG_AFTER = 1 << 0,
  JPP_FLAG_SCHEDULE = 1 << 1,
  JPP_FLAG_STAGES = 1 << 2,
  JPP_FLAG_RANKS = 1 << 3,
  JPP_FLAG_MICROBATCHES = 1 << 4,
  JPP_FLAG_SLOTS = 1 << 5,
  JPP_FLAG_FUSE = 1 << 6,
  JPP_FLAG_JSON = 1 << 7,
  JPP_FLAG_HELP = 1 << 8,
} jpp_cli_flag_t;

// Reads what stands behind the command's name. JPP_INVALID_ARGUMENT says what is wrong.
jpp_status_t* jpp_cli_parse(const jpp_cli_command_t* command, int count,
                            char* const* words,
                            jpp_cli_options_t* out_options) JPP_MUST_USE;
// A line for each flag of the set.
void jpp_cli_flags_help(uint32_t flags, jpp_str_t* out);

// --- Commands -------------------------------------------------------------------------

jpp_status_t* jpp_cli_plan(const jpp_cli_options_t* options, jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_verify(const jpp_cli_options_t* options,
                             jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_schedule_list(const jpp_cli_options_t* options,
                                    jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_schedule_show(const jpp_cli_options_t* options,
                                    jpp_str_t* out) JPP_MUST_USE;

#endif  // JPP_CLI_CLI_H_
