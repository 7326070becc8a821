// Chrome: writes traces in the Chrome trace format, which Perfetto opens as well:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#ifndef JPP_VIEW_CHROME_H_
#define JPP_VIEW_CHROME_H_

#include "base/str.h"
#include "view/ink.h"

// A complete event: one run of a task.
typedef struct jpp_chrome_event {
  const char* name;
  uint8_t kind;  // jpp_task_kind_t
  uint32_t process, rank;
  double start, duration;      // microseconds
  uint32_t stage, microbatch;  // JPP_NONE: outside the loops
} jpp_chrome_event_t;

// `step`: the first measured step, which began at `clock` (CLOCK_REALTIME, nanoseconds);
// 0: not measured.
void jpp__chrome_begin(uint64_t step, int64_t clock, jpp_str_t* str);
void jpp__chrome_append_process(const char* name, uint32_t process, jpp_str_t* str);
// Appends a thread of a process.
void jpp__chrome_append_rank(uint32_t process, uint32_t rank, jpp_str_t* str);
void jpp__chrome_append_event(const jpp_chrome_event_t* event, jpp_str_t* str);
void jpp__chrome_end(jpp_str_t* str);

#endif  // JPP_VIEW_CHROME_H_
