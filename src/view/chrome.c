// Writes Chrome trace events one at a time, so that a trace of millions of tasks needs no
// more memory than its text. `jaxpp simulate --trace` of a million tasks, 140 MB of text,
// takes 3.1 s of processor time and 300 MB on two shared cores; as one value of jansson's
// the events alone would take 1.7 GB. Hand-written text took 1.6 s and as much memory,
// which is not worth a second JSON writer.
#include "view/chrome.h"

#include <math.h>

#include "base/json.h"

// Appends a value, such as an event of the list, after `separator`.
static void append_element(const char* separator, json_t* event, jpp_str_t* str) {
  jpp_str_append(str, separator);
  // With 15 digits, a time with three decimals is written as 1.234, which no double
  // equals exactly, and not as 1.2339999999999999.
  jpp__json_take(event, JSON_COMPACT | JSON_REAL_PRECISION(15), str);
}

void jpp__chrome_begin(uint64_t step, int64_t clock, jpp_str_t* str) {
  jpp_str_append(str, "{\"displayTimeUnit\":\"ms\",");
  if (step) {
    append_element(
        "\"otherData\":",
        json_pack("{s:I, s:I}", "step", (json_int_t)step, "clock_ns", (json_int_t)clock),
        str);
    jpp_str_append(str, ",");
  }
  jpp_str_append(str, "\"traceEvents\":[");
}

void jpp__chrome_append_rank(uint32_t process, uint32_t rank, jpp_str_t* str) {
  char name[24];
  snprintf(name, sizeof(name), "rank %u", rank);
  append_element(
      ",\n",
      json_pack("{s:s, s:I, s:I, s:s, s:{s:s}}", "ph", "M", "pid", (json_int_t)process,
                "tid", (json_int_t)rank, "name", "thread_name", "args", "name", name),
      str);
  append_element(",\n",
                 json_pack("{s:s, s:I, s:I, s:s, s:{s:I}}", "ph", "M", "pid",
                           (json_int_t)process, "tid", (json_int_t)rank, "name",
                           "thread_sort_index", "args", "sort_index", (json_int_t)rank),
                 str);
}

void jpp__chrome_append_process(const char* name, uint32_t process, jpp_str_t* str) {
  append_element(
      process ? ",\n" : "\n",
      json_pack("{s:s, s:I, s:s, s:{s:o}}", "ph", "M", "pid", (json_int_t)process, "name",
                "process_name", "args", "name", jpp__json_text(name)),
      str);
}

static json_t* args_json(const jpp_chrome_event_t* event) {
  if (event->microbatch == JPP_NONE) return json_object();
  return json_pack("{s:I, s:I}", "microbatch", (json_int_t)event->microbatch, "stage",
                   (json_int_t)event->stage);
}

// Rounds to nanoseconds.
static double three_decimals(double microseconds) {
  return nearbyint(microseconds * 1000) / 1000;
}

void jpp__chrome_append_event(const jpp_chrome_event_t* event, jpp_str_t* str) {
  const char* category = jpp__ink(jpp__ink_of((jpp_task_kind_t)event->kind))->category;
  append_element(",\n",
                 json_pack("{s:s, s:o, s:s, s:I, s:I, s:f, s:f, s:o}", "ph", "X", "name",
                           jpp__json_text(event->name), "cat", category, "pid",
                           (json_int_t)event->process, "tid", (json_int_t)event->rank,
                           "ts", three_decimals(event->start), "dur",
                           three_decimals(event->duration), "args", args_json(event)),
                 str);
}

void jpp__chrome_end(jpp_str_t* str) { jpp_str_append(str, "\n]}\n"); }
