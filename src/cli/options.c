// Flags: one table for parsing and for the help.
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"

typedef enum flag_type {
  FLAG_BOOL,
  FLAG_OFF,  // sets a bool to false
  FLAG_U32,
  FLAG_INDEX,  // a whole number of at least 0
  FLAG_BYTES,
  FLAG_NUMBER,
  FLAG_TEXT
} flag_type_t;

typedef struct flag {
  jpp_cli_flag_t bit;
  const char* name;
  const char* value;  // the value's name in the help; NULL: the flag takes no value
  flag_type_t type;
  size_t offset;  // in jpp_cli_options_t
  const char* help;
} flag_t;

#define FIELD(name) offsetof(jpp_cli_options_t, name)

static const flag_t kFlags[] = {
    {JPP_FLAG_AFTER, "--after", "PART", FLAG_TEXT, FIELD(after),
     "print the result of one part: graph, schedule, partition, program or check"},
    {JPP_FLAG_SCHEDULE, "--schedule", "NAME", FLAG_TEXT, FIELD(schedule),
     "the schedule of the loops, by name or as a CSV file; overrides the graph's"},
    {JPP_FLAG_STAGES, "--stages", "N", FLAG_U32, FIELD(stages), "pipeline stages"},
    {JPP_FLAG_RANKS, "--ranks", "N", FLAG_U32, FIELD(ranks), "pipeline ranks"},
    {JPP_FLAG_MICROBATCHES, "--microbatches", "N", FLAG_U32, FIELD(microbatches),
     "microbatches of a step"},
    {JPP_FLAG_SLOTS, "--slots", "N", FLAG_U32, FIELD(slots),
     "messages that a channel can hold; default 2"},
    {JPP_FLAG_FUSE, "--fuse", NULL, FLAG_BOOL, FIELD(fuse),
     "fuse each forward and backward of the steady state"},
    {JPP_FLAG_JSON, "--json", NULL, FLAG_BOOL, FIELD(json), "print JSON"},
    {JPP_FLAG_CSV, "--csv", NULL, FLAG_BOOL, FIELD(csv),
     "print CSV as torch.distributed.pipelining reads it"},
    {JPP_FLAG_CSV, "--comms", NULL, FLAG_BOOL, FIELD(communication),
     "with --csv: with sends and receives"},
    {JPP_FLAG_COST, "--cost", "F,B,W", FLAG_TEXT, FIELD(cost),
     "a rank's forward, input and weight gradient of a microbatch"},
    {JPP_FLAG_COST, "--costs", "FILE", FLAG_TEXT, FIELD(costs),
     "lines 'STAGE F B W', or the trace of a measured step"},
    {JPP_FLAG_LATENCY, "--latency", "T", FLAG_NUMBER, FIELD(latency),
     "from the end of a task to the use of its result on another rank"},
    {JPP_FLAG_TIMES, "--transfer", "T", FLAG_NUMBER, FIELD(transfer),
     "during which a message occupies its channel"},
    {JPP_FLAG_TIMES, "--message-bytes", "BYTES", FLAG_BYTES, FIELD(message_bytes),
     "of a message; with --bandwidth, instead of --transfer"},
    {JPP_FLAG_TIMES, "--bandwidth", "B", FLAG_NUMBER, FIELD(bandwidth),
     "bytes that a channel carries per unit of time"},
    {JPP_FLAG_TIMES, "--streams", "N", FLAG_U32, FIELD(streams),
     "per rank; those after the first run weight gradients and fused pairs concurrently; "
     "default 1"},
    {JPP_FLAG_TIMES, "--overlap", NULL, FLAG_OFF, FIELD(no_overlap),
     "ranks keep computing while they send; the default"},
    {JPP_FLAG_TIMES, "--no-overlap", NULL, FLAG_BOOL, FIELD(no_overlap),
     "ranks stop computing while they send"},
    {JPP_FLAG_TIMES, "--optimizer", "T", FLAG_NUMBER, FIELD(optimizer),
     "the optimizer's step"},
    {JPP_FLAG_TIMES, "--optimizer-free", NULL, FLAG_BOOL, FIELD(optimizer_free),
     "ranks update without waiting for each other"},
    {JPP_FLAG_TIMES, "--offload", NULL, FLAG_BOOL, FIELD(offload),
     "ranks over the memory limit, or all, leave their activations on the host"},
    {JPP_FLAG_TIMES, "--recompute", NULL, FLAG_BOOL, FIELD(recompute),
     "they keep the inputs of their stages, and run forwards again for backwards"},
    {JPP_FLAG_SPMD, "--spmd", NULL, FLAG_BOOL, FIELD(spmd),
     "the same stages as a pipeline in one SPMD program"},
    {JPP_FLAG_OUTPUT, "-o", "FILE", FLAG_TEXT, FIELD(output),
     "write to FILE, .svg, .html or .json (a trace); else draw to the terminal"},
    {JPP_FLAG_COLOR, "--color", NULL, FLAG_BOOL, FIELD(color), "draw in colours"},
    {JPP_FLAG_TRACE, "--trace", NULL, FLAG_BOOL, FIELD(trace),
     "print a Chrome / Perfetto trace"},
    {JPP_FLAG_MEMORY, "--memory-limit", "BYTES", FLAG_BYTES, FIELD(memory_limit),
     "for the activations of a rank; also 512KiB, 1.5GiB"},
    {JPP_FLAG_PLAN_MEMORY, "--memory-limit", "BYTES", FLAG_BYTES, FIELD(memory_limit),
     "per device, for everything that a step keeps; also 512KiB, 1.5GiB"},
    {JPP_FLAG_MEMORY, "--activation-bytes", "BYTES", FLAG_BYTES, FIELD(activation_bytes),
     "of one stage and microbatch; default 1"},
    {JPP_FLAG_HOST, "--input-bytes", "BYTES", FLAG_BYTES, FIELD(input_bytes),
     "of these, a stage's input, which is what recomputation keeps"},
    {JPP_FLAG_HOST, "--host-bandwidth", "B", FLAG_NUMBER, FIELD(host_bandwidth),
     "bytes per unit of time between a rank and the host, each way, for offloading"},
    {JPP_FLAG_PLUGIN, "--plugin", "PATH", FLAG_TEXT, FIELD(plugin),
     "the PJRT plugin; default JPP_PLUGIN, then the CPU plugin installed beside jaxpp"},
    {JPP_FLAG_RUN, "--steps", "N", FLAG_U32, FIELD(steps), "steps to run; default 10"},
    {JPP_FLAG_RUN, "--seed", "N", FLAG_U32, FIELD(seed),
     "random f64, f32 and bf16 arguments between 0 and 0.1, instead of zeros"},
    {JPP_FLAG_MACHINE, "--cores", "N", FLAG_U32, FIELD(cores),
     "shared by the devices; default: on CPUs, those of this host"},
    {JPP_FLAG_MACHINE, "--threads", "T", FLAG_NUMBER, FIELD(threads),
     "cores that a run keeps busy; default: 1.5 per device, if there are as many"},
    {JPP_FLAG_MACHINE, "-n", "N", FLAG_U32, FIELD(processes),
     "processes, among which the ranks are divided; default 1"},
    {JPP_FLAG_MACHINE, "--call", "MS", FLAG_NUMBER, FIELD(call),
     "spent by the issuing thread on each run, send or receive"},
    {JPP_FLAG_MACHINE, "--latency", "MS", FLAG_NUMBER, FIELD(latency),
     "of a message to another process; default: as in the trace"},
    {JPP_FLAG_MACHINE, "--bandwidth", "B", FLAG_NUMBER, FIELD(bandwidth),
     "bytes per millisecond between ranks of different processes"},
    {JPP_FLAG_MACHINE, "--host-bandwidth", "B", FLAG_NUMBER, FIELD(host_bandwidth),
     "bytes per millisecond between a rank and pinned host memory, each way"},
    {JPP_FLAG_MACHINE, "--steps", "N", FLAG_U32, FIELD(steps),
     "steps to predict, some of them in flight together; default 1"},
    {JPP_FLAG_SECONDS, "--seconds", "T", FLAG_NUMBER, FIELD(seconds),
     "to search for; default 5"},
    {JPP_FLAG_LAUNCH, "-n", "N", FLAG_U32, FIELD(processes), "processes; default 1"},
    {JPP_FLAG_LAUNCH, "--restarts", "N", FLAG_U32, FIELD(restarts),
     "how often to restart the job after a failure; default 0"},
    {JPP_FLAG_LAUNCH, "--restart-delay", "S", FLAG_NUMBER, FIELD(restart_delay),
     "seconds to wait before a restart; default 0"},
    {JPP_FLAG_LAUNCH, "--grace", "S", FLAG_NUMBER, FIELD(grace),
     "seconds for processes to end before they are killed; default 30 after "
     "Ctrl-C or SIGTERM, 10 after a failure"},
    {JPP_FLAG_LAUNCH, "--log-dir", "DIR", FLAG_TEXT, FIELD(log_dir),
     "write each process' output to DIR/process-N.log as well"},
    {JPP_FLAG_LAUNCH, "--nodes", "N", FLAG_U32, FIELD(nodes),
     "hosts that run this command; default 1"},
    {JPP_FLAG_LAUNCH, "--node", "K", FLAG_INDEX, FIELD(node),
     "the number of this host, from 0"},
    {JPP_FLAG_LAUNCH, "--coordinator", "HOST:PORT", FLAG_TEXT, FIELD(coordinator),
     "where the processes meet: an address of node 0 and a free port there"},
    {JPP_FLAG_LAUNCH, "--share-cores", NULL, FLAG_BOOL, FIELD(share_cores),
     "do not divide cores and threads between the processes"},
    {JPP_FLAG_HELP, "--help", NULL, FLAG_BOOL, FIELD(help), "print this help"},
};
enum { kFlagCount = sizeof(kFlags) / sizeof(*kFlags) };
static_assert(kFlagCount <= 64, "jpp_cli_options_t.given has 64 bits");

static const flag_t* find_flag(uint32_t flags, const char* name, size_t length) {
  for (size_t i = 0; i < kFlagCount; ++i) {
    const flag_t* flag = &kFlags[i];
    bool same = strlen(flag->name) == length && !memcmp(flag->name, name, length);
    if (same && (flags & flag->bit)) return flag;
  }
  return NULL;
}

static jpp_status_t* parse_count(const flag_t* flag, const char* text,
                                 uint32_t* out_count) {
  char* end = NULL;
  errno = 0;
  unsigned long least = flag->type == FLAG_INDEX ? 0 : 1;
  unsigned long count = *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;
  if (!end || *end || errno || count < least || count > INT32_MAX) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s: expected a whole number from %lu to %d, found '%s'",
                           flag->name, least, INT32_MAX, text);
  }
  *out_count = (uint32_t)count;
  return NULL;
}

// Returns 0 for anything else.
static uint64_t unit_bytes(const char* unit) {
  static const char* const kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
  for (uint32_t i = 0; i < sizeof(kUnits) / sizeof(*kUnits); ++i) {
    if (!strcmp(unit, kUnits[i])) return 1ull << 10 * i;
  }
  return 0;
}

// strtod() also reads hexadecimal numbers, which no flag takes.
static bool is_decimal(const char* text) { return !strpbrk(text, "xX"); }

// A whole number of bytes, or a number with a unit.
static jpp_status_t* parse_bytes(const flag_t* flag, const char* text,
                                 uint64_t* out_bytes) {
  char* end = NULL;
  bool starts = *text >= '0' && *text <= '9' && is_decimal(text);
  double number = starts ? strtod(text, &end) : 0;
  uint64_t unit = end ? unit_bytes(end) : 0;
  double bytes = number * (double)unit;
  if (bytes < 1 || bytes > 9e15 || (unit == 1 && bytes != (double)(uint64_t)bytes)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s: expected a whole number of bytes, or a number of KiB, "
                           "MiB, GiB or TiB, found '%s'",
                           flag->name, text);
  }
  *out_bytes = (uint64_t)bytes;
  return NULL;
}

static jpp_status_t* parse_number(const flag_t* flag, const char* text,
                                  double* out_number) {
  char* end = NULL;
  double number = strtod(text, &end);
  if (end == text || *end || !is_decimal(text) || !(number >= 0 && number < 1e300)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s: expected a number of at least 0, found '%s'", flag->name,
                           text);
  }
  *out_number = number;
  return NULL;
}

static jpp_status_t* set_flag(const flag_t* flag, const char* value,
                              jpp_cli_options_t* options) {
  void* field = (char*)options + flag->offset;
  if (flag->type == FLAG_U32 || flag->type == FLAG_INDEX)
    return parse_count(flag, value, field);
  if (flag->type == FLAG_BYTES) return parse_bytes(flag, value, field);
  if (flag->type == FLAG_NUMBER) return parse_number(flag, value, field);
  if (flag->type == FLAG_TEXT) *(const char**)field = value;
  if (!flag->value) *(bool*)field = flag->type == FLAG_BOOL;
  return NULL;
}

// Reads the flag at words[*at], "--name value" or "--name=value"; *at moves to its end.
static jpp_status_t* parse_flag(const jpp_cli_command_t* command, int count,
                                char* const* words, int* at, jpp_cli_options_t* options) {
  const char* word = !strcmp(words[*at], "-h") ? "--help" : words[*at];
  size_t length = strcspn(word, "=");
  const char* value = word[length] ? word + length + 1 : NULL;
  const flag_t* flag = find_flag(command->flags | JPP_FLAG_HELP, word, length);
  if (!flag) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "jaxpp %s has no flag '%s'; jaxpp %s --help lists its flags",
                           command->name, word, command->name);
  }
  if (!flag->value && value) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s takes no value, found '%s'",
                           flag->name, value);
  }
  if (flag->value && !value) {
    if (*at + 1 == count) {
      return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: expected %s after it", flag->name,
                             flag->value);
    }
    value = words[++*at];
  }
  options->given |= UINT64_C(1) << (flag - kFlags);
  return set_flag(flag, value, options);
}

jpp_status_t* jpp_cli_parse(const jpp_cli_command_t* command, int count,
                            char* const* words, jpp_cli_options_t* out_options) {
  jpp_cli_options_t options = {.grace = -1, .seconds = -1};
  *out_options = options;
  bool launches = command->flags & JPP_FLAG_LAUNCH;
  bool more = command->flags & JPP_FLAG_MORE_WORDS;
  uint32_t most = more ? JPP_CLI_MAX_WORDS : command->num_words;
  for (int i = 0; i < count; ++i) {
    if (launches && !strcmp(words[i], "--")) {
      options.command = words + i + 1;
      break;
    }
    if (words[i][0] == '-' && words[i][1]) {
      JPP_RETURN_IF_ERROR(parse_flag(command, count, words, &i, &options));
    } else if (options.num_words == most) {
      return jpp_status_make(
          JPP_INVALID_ARGUMENT, "jaxpp %s: expected %s, found '%s' after it",
          command->name, command->num_words ? command->words : "flags only", words[i]);
    } else {
      options.words[options.num_words++] = words[i];
    }
  }
  if (options.num_words < command->num_words && !options.help) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "jaxpp %s: expected %s", command->name,
                           command->words);
  }
  if (launches && !options.help && (!options.command || !options.command[0])) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "jaxpp %s: expected %s", command->name,
                           command->words);
  }
  *out_options = options;
  return NULL;
}

jpp_status_t* jpp_cli_refuse_flags(const jpp_cli_options_t* options, uint32_t flags,
                                   const char* what) {
  for (size_t i = 0; i < kFlagCount; ++i) {
    if (!(kFlags[i].bit & flags) || !(options->given >> i & 1)) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s does not apply to %s",
                           kFlags[i].name, what);
  }
  return NULL;
}

void jpp_cli_flags_help(uint32_t flags, jpp_str_t* out) {
  for (size_t i = 0; i < kFlagCount; ++i) {
    const flag_t* flag = &kFlags[i];
    if (!(flags & flag->bit)) continue;
    const char* value = flag->value ? flag->value : "";
    int width = 23 - (int)strlen(flag->name);
    jpp_str_appendf(out, "  %s %-*s %s\n", flag->name, width, value, flag->help);
  }
}
