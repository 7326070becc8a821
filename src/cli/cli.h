// The jaxpp command: thin over the library. Every command fills `out`, which main()
// writes to standard output in one go; an error is a status, which main() turns into one
// line on standard error and an exit status.
#ifndef JPP_CLI_CLI_H_
#define JPP_CLI_CLI_H_

#include <time.h>

#include "jaxpp/alloc.h"
#include "jaxpp/simulate.h"
#include "jaxpp/str.h"
#include "jaxpp/view.h"

enum { JPP_CLI_MAX_WORDS = 1024 };

// The command line; 0 and NULL mean not given.
typedef struct jpp_cli_options {
  const char* words[JPP_CLI_MAX_WORDS];  // words after the command that are not flags
  uint32_t num_words;
  uint64_t given;  // a bit for each flag of the table in options.c
  const char* after;
  const char* schedule;
  uint32_t stages, ranks, microbatches;
  uint32_t processes, restarts, nodes, node;
  double grace, restart_delay;  // seconds; grace -1: not given
  const char* log_dir;
  const char* coordinator;
  bool share_cores;
  char* const* command;  // the words after "--", ended by a NULL
  uint32_t slots, streams;
  bool fuse, json, help;
  bool csv, communication, color, no_overlap, optimizer_free, trace, spmd;
  bool offload, recompute;
  const char* cost;   // "F,B,W"
  const char* costs;  // a file
  const char* output;
  const char* plugin;
  uint32_t steps, seed, cores;
  double latency, transfer, optimizer, bandwidth, host_bandwidth, call, threads;
  double seconds;                                                       // -1: not given
  uint64_t memory_limit, activation_bytes, input_bytes, message_bytes;  // bytes
} jpp_cli_options_t;

typedef jpp_status_t* (*jpp_cli_run_t)(const jpp_cli_options_t* options, jpp_str_t* out);

typedef struct jpp_cli_command {
  const char* name;   // "schedule show"
  const char* words;  // "FILE"; the words after the name, for the help
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
  JPP_FLAG_CSV = 1 << 9,
  JPP_FLAG_COST = 1 << 10,
  JPP_FLAG_TIMES = 1 << 11,  // transfer, overlap, streams, optimizer, offload
  JPP_FLAG_OUTPUT = 1 << 12,
  JPP_FLAG_COLOR = 1 << 13,
  JPP_FLAG_TRACE = 1 << 14,
  JPP_FLAG_MEMORY = 1 << 15,  // memory-limit, activation-bytes
  JPP_FLAG_SECONDS = 1 << 16,
  JPP_FLAG_PLAN_MEMORY = 1 << 17,  // memory-limit for all kinds of bytes
  JPP_FLAG_LATENCY = 1 << 18,
  JPP_FLAG_LAUNCH = 1 << 19,  // flags of launch, and a command after "--"
  JPP_FLAG_RUN = 1 << 20,     // steps, seed
  JPP_FLAG_SPMD = 1 << 21,
  JPP_FLAG_MORE_WORDS = 1 << 22,  // any number of words after num_words
  JPP_FLAG_MACHINE = 1 << 23,     // cores, processes, links
  JPP_FLAG_HOST = 1 << 24,        // host-bandwidth, input-bytes
  JPP_FLAG_PLUGIN = 1 << 25,
} jpp_cli_flag_t;

// Parses the words after the command's name. JPP_INVALID_ARGUMENT says what is wrong.
jpp_status_t* jpp_cli_parse(const jpp_cli_command_t* command, int count,
                            char* const* words,
                            jpp_cli_options_t* out_options) JPP_MUST_USE;
// Refuses the flags of the set, which would be ignored: "--stages does not apply to
// WHAT".
jpp_status_t* jpp_cli_refuse_flags(const jpp_cli_options_t* options, uint32_t flags,
                                   const char* what) JPP_MUST_USE;
// Appends a line for each flag of the set.
void jpp_cli_flags_help(uint32_t flags, jpp_str_t* out);

// --- Commands -------------------------------------------------------------------------

jpp_status_t* jpp_cli_environment(const jpp_cli_options_t* options,
                                  jpp_str_t* out) JPP_MUST_USE;
// Exits with the status of the first process that fails.
jpp_status_t* jpp_cli_flight(const jpp_cli_options_t* options,
                             jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_launch(const jpp_cli_options_t* options,
                             jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_plan(const jpp_cli_options_t* options, jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_run(const jpp_cli_options_t* options, jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_verify(const jpp_cli_options_t* options,
                             jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_plot(const jpp_cli_options_t* options, jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_drift(const jpp_cli_options_t* options,
                            jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_predict(const jpp_cli_options_t* options,
                              jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_simulate(const jpp_cli_options_t* options,
                               jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_schedule_search(const jpp_cli_options_t* options,
                                      jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_schedule_list(const jpp_cli_options_t* options,
                                    jpp_str_t* out) JPP_MUST_USE;
jpp_status_t* jpp_cli_schedule_show(const jpp_cli_options_t* options,
                                    jpp_str_t* out) JPP_MUST_USE;

// --- Shared by the commands on schedules ----------------------------------------------

// Builds the schedule named words[0], or reads it as a CSV file if no built-in schedule
// has that name and such a file exists. *out_slots: see jpp_schedule_from_csv().
jpp_status_t* jpp_cli_schedule(const jpp_cli_options_t* options, uint32_t* out_slots,
                               jpp_schedule_t** out_schedule) JPP_MUST_USE;

// Checks that --csv, --comms and --json go together.
jpp_status_t* jpp_cli_check_csv(const jpp_cli_options_t* options) JPP_MUST_USE;

// The time of --transfer, or of --message-bytes and --bandwidth.
jpp_status_t* jpp_cli_transfer(const jpp_cli_options_t* options,
                               double* out_transfer) JPP_MUST_USE;
// Simulates with --cost or --costs (1,1,1 without) and the flags for times.
jpp_status_t* jpp_cli_simulation(const jpp_cli_options_t* options,
                                 const jpp_schedule_t* schedule,
                                 jpp_simulation_t** out_simulation) JPP_MUST_USE;

// Whether the name is that of a file, not of a built-in schedule.
bool jpp_cli_names_file(const char* name);
// Reads a schedule's file; sizes given by flags must match it. *out_slots (may be NULL)
// as above.
jpp_status_t* jpp_cli_read_csv(const jpp_cli_options_t* options, const char* file,
                               uint32_t* out_slots,
                               jpp_schedule_t** out_schedule) JPP_MUST_USE;

// Reads one trace, or joins the traces of a job's processes.
jpp_status_t* jpp_cli_read_traces(const char* const* files, uint32_t count,
                                  jpp_spans_t** out_spans) JPP_MUST_USE;

// Reads the costs of --costs FILE, [stages]; free with jpp_free(). *out_halved says
// whether the file is a trace with whole backwards: half of a backward counts for each
// kind of gradient.
jpp_status_t* jpp_cli_read_costs(const char* file, uint32_t stages,
                                 jpp_cost_t** out_costs, bool* out_halved) JPP_MUST_USE;
// Notes this on standard error.
void jpp_cli_note_halves(const char* file);

// Milliseconds of a monotonic clock.
static inline double jpp_cli_now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

// Warns on standard error about variables that look like misspelt options.
jpp_status_t* jpp_cli_warn_of_options(void) JPP_MUST_USE;

#endif  // JPP_CLI_CLI_H_
