// Writes Chrome trace events one at a time, so that a trace of millions of tasks needs no
// more memory than its text.
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
