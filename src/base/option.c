// The table of options, and the only reads of the environment.
#include "jaxpp/option.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/null.h"
#include "base/str.h"

static const jpp_option_info_t kOptions[JPP_OPTION_COUNT] = {
    [JPP_OPTION_PLUGIN] = {"JPP_PLUGIN", "PATH", "that of the mesh's devices",
                           "the PJRT plugin that runs steps unless plugin= names one; in "
                           "Python also a platform with an installed plugin: cuda, rocm"},
    [JPP_OPTION_LOG] = {"JPP_LOG", "error|warning|info|debug|off", "off",
                        "log decisions to standard error, up to this level"},
    [JPP_OPTION_DUMP] =
        {"JPP_DUMP", "FOLDER", "none",
         "write each step there in every form that the planner and JAX give it"},
    [JPP_OPTION_FLIGHT] = {"JPP_FLIGHT", "FOLDER", "none",
                           "keep a record of the last instructions there, which jaxpp "
                           "flight reads"},
    [JPP_OPTION_STEPS_IN_FLIGHT] =
        {"JPP_STEPS_IN_FLIGHT", "0 to 64", "2",
         "how many steps may run at a time unless steps_in_flight= is given; 0: each "
         "call waits for its step"},
    [JPP_OPTION_ADDRESS] =
        {"JPP_ADDRESS", "ADDRESS", "the interface that reaches the coordinator",
         "the address at which the job's other processes reach this one"},
    [JPP_OPTION_TRANSPORT] = {"JPP_TRANSPORT", "NAME", "ucx",
                              "the driver between the processes of a job: ucx, or nccl "
                              "from GPU to GPU"},
    [JPP_OPTION_UCX] = {"JPP_UCX", "PATH",
                        "the package libucx-cu13 or -cu12, then the system",
                        "libucp.so.0, the library UCX that connects processes"},
    [JPP_OPTION_NCCL] = {"JPP_NCCL", "PATH",
                         "the package nvidia-nccl-cu13 or -cu12, then the system",
                         "libnccl.so.2, the library NCCL of the transport nccl"},
    [JPP_OPTION_PEER_TIMEOUT] = {"JPP_PEER_TIMEOUT", "SECONDS", "10",
                                 "how long another process may be silent before it "
                                 "counts as dead"},
    [JPP_OPTION_STALL_TIMEOUT] = {"JPP_STALL_TIMEOUT", "SECONDS", "600",
                                  "how long a step waits for other processes before it "
                                  "fails"},
    [JPP_OPTION_STEP_TIMEOUT] =
        {"JPP_STEP_TIMEOUT", "SECONDS", "60",
         "the shortest such wait once all processes have begun the step"},
    [JPP_OPTION_GRACE] = {"JPP_GRACE", "SECONDS", "5",
                          "how long a process may take to end by itself once its job "
                          "has failed"},
    [JPP_OPTION_NUM_PROCESSES] = {"JPP_NUM_PROCESSES", "N", "none",
                                  "how many processes the job has; set by jaxpp launch"},
    [JPP_OPTION_PROCESS_ID] = {"JPP_PROCESS_ID", "N", "none",
                               "the number of this process, from 0; set by jaxpp launch"},
    [JPP_OPTION_RESTART] = {"JPP_RESTART", "N", "0",
                            "how many times the job was restarted; set by jaxpp launch"},
    [JPP_OPTION_REPORT] = {"JPP_REPORT", "DESCRIPTOR:INODE", "none",
                           "the pipe by which processes report a failed process to jaxpp "
                           "launch, which sets it"},
    [JPP_OPTION_COORDINATOR] =
        {"JAX_COORDINATOR_ADDRESS", "HOST:PORT", "none",
         "JAX's own: the address of process 0; set by jaxpp launch"},
    [JPP_OPTION_XLA_FLAGS] = {"XLA_FLAGS", "FLAGS", "none",
                              "XLA's own; part of the compilation cache's keys"},
    [JPP_OPTION_TF_LOG] = {"TF_CPP_MIN_LOG_LEVEL", "0 to 3", "2",
                           "the plugin's own log; its errors come as exceptions"},
    [JPP_OPTION_PREALLOCATE] =
        {"XLA_PYTHON_CLIENT_PREALLOCATE", "true or false", "false",
         "JAX's own: whether a client allocates most of a GPU's memory when it starts"},
    [JPP_OPTION_SHARE_MEMORY] = {"JPP_SHARE_MEMORY", "0|1", "1 on CPUs and CUDA",
                                 "share memory between JAX's arrays and steps, or copy "
                                 "on the device; 0: copy through the host"},
    [JPP_OPTION_CUDA] = {"JPP_CUDA", "PATH", "the system's",
                         "libcuda.so.1, the driver that the transport nccl uses"},
};

const jpp_option_info_t* jpp_option_info(jpp_option_t option) {
  return &kOptions[option];
}

jpp_option_t jpp_option_find(const char* name) {
  int option = 0;
  while (option < JPP_OPTION_COUNT && strcmp(kOptions[option].name, name) != 0) ++option;
  return (jpp_option_t)option;
}

const char* jpp_option_get(jpp_option_t option) {
  const char* value = getenv(kOptions[option].name);
  return value && *value ? value : NULL;
}

jpp_status_t* jpp_option_get_ms(jpp_option_t option, uint32_t* out_ms) {
  JPP_RETURN_IF_NULL(out_ms);
  const char* value = jpp_option_get(option);
  *out_ms = 0;
  if (!value) return NULL;
  char* end = NULL;
  double seconds = strtod(value, &end);
  if (*end || !(seconds >= 0.001 && seconds <= 1e6)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s='%s': expected seconds, above 0 and at most 1000000",
                           kOptions[option].name, value);
  }
  *out_ms = (uint32_t)(seconds * 1000);
  return NULL;
}

// --- Misspelt names -------------------------------------------------------------------

enum { kLongestName = 31 };

static uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The number of letters to change, add or remove to turn one name into the other
// (Levenshtein distance); `a` has at most kLongestName.
static uint32_t edit_distance(const char* a, size_t a_length, const char* b) {
  uint32_t
      row[kLongestName + 1];  // distances from the first i letters of `a` to those of `b`
  for (uint32_t i = 0; i <= a_length; ++i) row[i] = i;
  for (; *b; ++b) {
    uint32_t diagonal = row[0]++;
    for (size_t i = 1; i <= a_length; ++i) {
      uint32_t changed = diagonal + (a[i - 1] != *b);
      diagonal = row[i];
      row[i] = least(changed, least(diagonal, row[i - 1]) + 1);
    }
  }
  return row[a_length];
}

// The option that a variable of the environment, "NAME=value", misspells;
// JPP_OPTION_COUNT for none.
static jpp_option_t find_alike(const char* name, size_t length) {
  jpp_option_t alike = JPP_OPTION_COUNT;
  uint32_t nearest = 3;  // more than two letters: a different name
  if (length > kLongestName || strncmp(name, "JPP_", 4) != 0) return alike;
  for (int option = 0; option < JPP_OPTION_COUNT; ++option) {
    uint32_t distance = edit_distance(name, length, kOptions[option].name);
    if (distance == 0) return JPP_OPTION_COUNT;
    if (distance >= nearest) continue;
    nearest = distance;
    alike = (jpp_option_t)option;
  }
  return alike;
}

jpp_status_t* jpp_options_misspelt(char** out_text) {
  JPP_RETURN_IF_NULL(out_text);
  *out_text = NULL;
  jpp_str_t str = {0};
  for (char* const* at = environ; at && *at; ++at) {
    size_t length = strcspn(*at, "=");
    const char* before = str.length ? ", " : "the environment has ";
    if (!strncmp(*at, "JAXPP_", 6)) {
      jpp_str_appendf(&str, "%s%.*s (of another implementation)", before, (int)length,
                      *at);
      continue;
    }
    jpp_option_t alike = find_alike(*at, length);
    if (alike == JPP_OPTION_COUNT) continue;
    jpp_str_appendf(&str, "%s%.*s (is %s meant?)", before, (int)length, *at,
                    kOptions[alike].name);
  }
  if (!str.length && !str.error) return NULL;
  jpp_str_append(
      &str, ", which nothing reads; `jaxpp options` lists the variables that are read");
  return jpp_str_finish(&str, out_text);
}
