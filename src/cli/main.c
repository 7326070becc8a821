// jaxpp: finds the command, runs it, and writes its output.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/version.h"

enum {
  kPlanFlags = JPP_FLAG_SCHEDULE | JPP_FLAG_STAGES | JPP_FLAG_RANKS | JPP_FLAG_SLOTS |
               JPP_FLAG_FUSE | JPP_FLAG_JSON,
  kScheduleFlags =
      JPP_FLAG_STAGES | JPP_FLAG_RANKS | JPP_FLAG_MICROBATCHES | JPP_FLAG_FUSE,
  kCostFlags = JPP_FLAG_COST | JPP_FLAG_LATENCY,
  kMemoryFlags = JPP_FLAG_MEMORY | JPP_FLAG_HOST,
};

static const jpp_cli_command_t kCommands[] = {
    {"plan", "FILE", 1,
     kPlanFlags | JPP_FLAG_AFTER | JPP_FLAG_PLAN_MEMORY | JPP_FLAG_PLUGIN,
     "plan the graph in a file ('-': standard input), or show the plan that save() wrote",
     jpp_cli_plan},
    {"run", "PLAN", 1, JPP_FLAG_RUN | JPP_FLAG_PLUGIN | JPP_FLAG_JSON,
     "run a plan that save() wrote, without Python", jpp_cli_run},
    {"schedule list", "", 0, JPP_FLAG_JSON, "list the built-in schedules",
     jpp_cli_schedule_list},
    {"schedule show", "NAME|FILE", 1, kScheduleFlags | JPP_FLAG_JSON | JPP_FLAG_CSV,
     "print a schedule's task lists and draw it", jpp_cli_schedule_show},
    {"verify", "NAME|FILE", 1, kScheduleFlags | JPP_FLAG_SLOTS | JPP_FLAG_MEMORY,
     "prove that a schedule can run", jpp_cli_verify},
    {"simulate", "NAME|FILE", 1,
     kScheduleFlags | kCostFlags | JPP_FLAG_TIMES | kMemoryFlags | JPP_FLAG_JSON |
         JPP_FLAG_TRACE | JPP_FLAG_SPMD,
     "simulate the time, bubbles and memory of a schedule", jpp_cli_simulate},
    {"schedule search", "", 0,
     kScheduleFlags | kCostFlags | kMemoryFlags | JPP_FLAG_SECONDS | JPP_FLAG_JSON |
         JPP_FLAG_CSV,
     "search for a schedule for stages of unequal cost", jpp_cli_schedule_search},
    {"plot", "NAME|FILE...", 1,
     kScheduleFlags | kCostFlags | JPP_FLAG_TIMES | kMemoryFlags | JPP_FLAG_OUTPUT |
         JPP_FLAG_COLOR | JPP_FLAG_MORE_WORDS,
     "draw a schedule, or the traces of a job's processes", jpp_cli_plot},
    {"predict", "PLAN TRACE...", 2,
     JPP_FLAG_MACHINE | JPP_FLAG_JSON | JPP_FLAG_TRACE | JPP_FLAG_MORE_WORDS,
     "predict a step of a plan that save() wrote from traces of its tasks",
     jpp_cli_predict},
    {"drift", "PREDICTED MEASURED...", 2, JPP_FLAG_MORE_WORDS,
     "show where a measured trace departs from a simulated one", jpp_cli_drift},
    {"launch", "-- COMMAND ...", 0, JPP_FLAG_LAUNCH,
     "start the processes of a job on this host", jpp_cli_launch},
    {"flight", "FOLDER", 1, 0,
     "show the last instruction of every rank of a job, and which ranks wait for which",
     jpp_cli_flight},
    {"options", "", 0, JPP_FLAG_JSON, "list the environment variables that are read",
     jpp_cli_environment},
};
enum { kCommandCount = sizeof(kCommands) / sizeof(*kCommands) };

static void append_usage(const jpp_cli_command_t* command, jpp_str_t* out) {
  jpp_str_appendf(out, "jaxpp %s%s%s", command->name, *command->words ? " " : "",
                  command->words);
}

static void append_command_line(const jpp_cli_command_t* command, jpp_str_t* out) {
  size_t start = out->length;
  jpp_str_append(out, "  ");
  append_usage(command, out);
  int used = (int)(out->length - start);
  jpp_str_appendf(out, "%*s%s\n", used < 32 ? 32 - used : 1, "", command->help);
}

static void append_help(jpp_str_t* out) {
  jpp_str_append(out,
                 "jaxpp: plans of pipeline-parallel training steps\n\n"
                 "usage: jaxpp COMMAND [FLAGS]\n\n");
  for (size_t i = 0; i < kCommandCount; ++i) {
    append_command_line(&kCommands[i], out);
  }
  jpp_str_append(out,
                 "\n  jaxpp COMMAND --help          a command's flags\n  jaxpp --version "
                 "              the library's version\n\nExit status: 0 success; 1 the "
                 "plan or schedule cannot run; 2 bad flags, file or text.\n");
}

// The number of words that the command's name takes on the command line; 0 if they do not
// match.
static int match_command(const jpp_cli_command_t* command, int count,
                         char* const* words) {
  const char* name = command->name;
  for (int i = 0; i < count; ++i) {
    size_t length = strcspn(name, " ");
    if (strlen(words[i]) != length || memcmp(words[i], name, length) != 0) return 0;
    if (!name[length]) return i + 1;
    name += length + 1;
  }
  return 0;
}

static bool is_help(const char* word) {
  return !strcmp(word, "--help") || !strcmp(word, "-h") || !strcmp(word, "help");
}

// The number of commands that begin with the word, as in "schedule list" and "schedule
// show".
static int count_group(const char* word) {
  size_t length = strlen(word);
  int count = 0;
  for (size_t i = 0; i < kCommandCount; ++i) {
    const char* name = kCommands[i].name;
    count += !strncmp(name, word, length) && name[length] == ' ';
  }
  return count;
}

static void append_group_help(const char* word, jpp_str_t* out) {
  size_t length = strlen(word);
  for (size_t i = 0; i < kCommandCount; ++i) {
    const char* name = kCommands[i].name;
    if (!strncmp(name, word, length) && name[length] == ' ') {
      append_command_line(&kCommands[i], out);
    }
  }
  jpp_str_appendf(out, "\n  jaxpp %s COMMAND --help    a command's flags\n", word);
}

// `words` begins with the name of a group, but none of its commands follows.
static jpp_status_t* run_group(int count, char* const* words, jpp_str_t* out) {
  if (count == 1 || is_help(words[1])) {
    append_group_help(words[0], out);
    return NULL;
  }
  jpp_str_t str = {0};
  char* text = NULL;
  const char* separator = "";
  size_t length = strlen(words[0]);
  for (size_t i = 0; i < kCommandCount; ++i) {
    const char* name = kCommands[i].name;
    if (strncmp(name, words[0], length) != 0 || name[length] != ' ') continue;
    jpp_str_appendf(&str, "%s%s", separator, name + length + 1);
    separator = ", ";
  }
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(JPP_INVALID_ARGUMENT,
                                         "jaxpp %s: expected one of %s after it, found "
                                         "'%s'; jaxpp %s --help says what they do",
                                         words[0], text, words[1], words[0]);
  jpp_text_free(text);
  return status;
}

static jpp_status_t* run_command(const jpp_cli_command_t* command, int count,
                                 char* const* words, jpp_str_t* out) {
  jpp_cli_options_t options;
  JPP_RETURN_IF_ERROR(jpp_cli_parse(command, count, words, &options));
  if (!options.help) return command->run(&options, out);
  append_usage(command, out);
  jpp_str_appendf(out, " [FLAGS]: %s\n\n", command->help);
  jpp_cli_flags_help(command->flags | JPP_FLAG_HELP, out);
  return NULL;
}

static jpp_status_t* run_words(int count, char* const* words, jpp_str_t* out) {
  if (!count || is_help(words[0])) {
    append_help(out);
    return NULL;
  }
  if (!strcmp(words[0], "--version")) {
    if (count > 1) {
      return jpp_status_make(JPP_INVALID_ARGUMENT,
                             "--version: expected nothing after it, found '%s'",
                             words[1]);
    }
    jpp_str_append(out, "jaxpp " JPP_VERSION "\n");
    return NULL;
  }
  for (size_t i = 0; i < kCommandCount; ++i) {
    int used = match_command(&kCommands[i], count, words);
    if (used) return run_command(&kCommands[i], count - used, words + used, out);
  }
  if (count_group(words[0])) return run_group(count, words, out);
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "unknown command '%s'; jaxpp --help lists the commands",
                         words[0]);
}

static jpp_status_t* write_out(const char* text, size_t length) {
  errno = 0;
  bool written = fwrite(text, 1, length, stdout) == length;
  if (fflush(stdout) == 0 && written) return NULL;
  if (errno == EPIPE) return NULL;  // the reader has closed the pipe
  return jpp_status_make(JPP_INVALID_ARGUMENT, "standard output: %s", strerror(errno));
}

// 1: a valid request, but an invalid plan. 2: an invalid request.
static int exit_status(const jpp_status_t* status) {
  switch (jpp_status_code(status)) {
    case JPP_OK:
      return 0;
    case JPP_MARKS_ERROR:
    case JPP_SCHEDULE_ERROR:
    case JPP_PROGRAM_ERROR:
    case JPP_EXECUTION_ERROR:
    case JPP_OUT_OF_MEMORY:
    case JPP_INTERNAL_ERROR:
      return 1;
    default:
      return 2;
  }
}

// Files and their names may contain any bytes; readers of errors expect UTF-8.
static void print_error(const jpp_status_t* status) {
  const char* message = jpp_status_message(status);
  jpp_str_t text = {0};
  jpp_str_append_utf8(&text, message, strlen(message));
  fprintf(stderr, "jaxpp: error: %s\n", text.error ? message : text.data);
  jpp_str_deinit(&text);
}

int main(int argc, char** argv) {
  jpp_str_t out = {0};
  char* text = NULL;
  jpp_status_t* status = jpp_cli_warn_of_options();
  if (!status) status = run_words(argc - 1, argv + 1, &out);
  size_t length = out.length;
  if (!status) status = jpp_str_finish(&out, &text);
  if (!status) status = write_out(text, length);
  if (status) print_error(status);
  int result = exit_status(status);
  jpp_status_free(status);
  jpp_str_deinit(&out);
  jpp_text_free(text);
  return result;
}
