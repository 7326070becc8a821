// Writes Chrome trace events one at a time, so that a trace of millions of tasks needs no
// more memory than its text. jansson, which writes plans (base/json.h), has no numbers of
// three decimals: a time would be 1.2344999999999999. It costs more, too: on two shared
// cores a million events, 128 MB of text, take 1.5 s and 130 MB here; by jansson 2.9 s
// written event by event, and as one value 4.6 s and 1.7 GB.
#include "view/chrome.h"

#include "base/utf8.h"

void jpp_chrome_begin(jpp_str_t* str) {
  jpp_str_append(str, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
}

static void append_thread(uint32_t process, uint32_t rank, jpp_str_t* str) {
  jpp_str_appendf(str,
                  ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%u,\"name\":\"thread_name\","
                  "\"args\":{\"name\":\"rank %u\"}}",
                  process, rank, rank);
  jpp_str_appendf(str,
                  ",\n{\"ph\":\"M\",\"pid\":%u,\"tid\":%u,"
                  "\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%u}}",
                  process, rank, rank);
}

void jpp_chrome_append_process(const char* name, uint32_t process, uint32_t ranks,
                               jpp_str_t* str) {
  jpp_str_appendf(str,
                  "%s{\"ph\":\"M\",\"pid\":%u,\"name\":\"process_name\",\"args\":"
                  "{\"name\":",
                  process ? ",\n" : "", process);
  jpp_str_append_json(str, name);
  jpp_str_append(str, "}}");
  for (uint32_t r = 0; r < ranks; ++r) append_thread(process, r, str);
}

void jpp_chrome_append_event(const jpp_chrome_event_t* event, jpp_str_t* str) {
  jpp_str_append(str, ",\n{\"ph\":\"X\",\"name\":");
  jpp_str_append_json(str, event->name);
  jpp_str_appendf(str, ",\"cat\":\"%s\",\"pid\":%u,\"tid\":%u,\"ts\":%.3f,\"dur\":%.3f",
                  jpp_ink(jpp_ink_of((jpp_task_kind_t)event->kind))->category,
                  event->process, event->rank, event->start, event->duration);
  jpp_str_append(str, ",\"args\":{");
  if (event->microbatch != JPP_NONE) {
    jpp_str_appendf(str, "\"microbatch\":%u,\"stage\":%u", event->microbatch,
                    event->stage);
  }
  jpp_str_append(str, "}}");
}

void jpp_chrome_end(jpp_str_t* str) { jpp_str_append(str, "\n]}\n"); }
