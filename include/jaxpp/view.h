// View: renders schedules, simulations and measured steps for people: as drawings for the
// terminal, SVG, HTML, Chrome traces and JSON. Nothing is decided here, and only commands
// and front ends use it.
//
// All texts are freed with jpp_text_free().
//
// Threads: any thread, several at once: functions only read what they are given.
#ifndef JAXPP_VIEW_H_
#define JAXPP_VIEW_H_

#include "jaxpp/plan.h"
#include "jaxpp/predict.h"
#include "jaxpp/runtime.h"
#include "jaxpp/schedule.h"
#include "jaxpp/simulate.h"

//===-- Plans ----------------------------------------------------------------------===//

// Prints one part of a plan in its text form; schedules with a drawing each.
// JPP_INVALID_ARGUMENT for a part that was not made.
JPP_API jpp_status_t* jpp_planned_print(const jpp_planned_t* planned,
                                        jpp_plan_part_t part,
                                        char** out_text) JPP_MUST_USE;
// The same as JSON; JPP_PART_COUNT: an object with all parts. Bytes in names that are
// not UTF-8 become U+FFFD.
JPP_API jpp_status_t* jpp_planned_print_json(const jpp_planned_t* planned,
                                             jpp_plan_part_t part,
                                             char** out_text) JPP_MUST_USE;
// A page for the user: sizes, the work of each stage, costs, peak bytes by kind, and the
// large loop-invariant values that a rank keeps. The plan must have all its parts.
// `costs` are the plan's, to which collectives may have been added; NULL: as
// jpp_plan_costs() counts them.
JPP_API jpp_status_t* jpp_planned_summarize(const jpp_planned_t* planned,
                                            JPP_OPTIONAL const jpp_plan_costs_t* costs,
                                            char** out_text) JPP_MUST_USE;

//===-- Schedules ------------------------------------------------------------------===//

// A list per rank of null (idle), {"kind": "F"|"B"|"I"|"W", "stage": s, "microbatch": m}
// or, for a FusedTask, a list of these. One line per rank.
JPP_API jpp_status_t* jpp_schedule_print_json(const jpp_schedule_t* schedule,
                                              char** out_text) JPP_MUST_USE;

// A picture of the timeline: a line per rank, a column per latency unit, "." for a
// bubble. Forwards show the last digit of the microbatch; BWD and BWD_I a to j, BWD_W A
// to J for the same digit. Lines are cut at JPP_SCHEDULE_DRAW_COLUMNS. Fails as
// jpp_schedule_timeline().
enum { JPP_SCHEDULE_DRAW_COLUMNS = 160 };
JPP_API jpp_status_t* jpp_schedule_draw(const jpp_schedule_t* schedule,
                                        char** out_text) JPP_MUST_USE;

//===-- Simulations ----------------------------------------------------------------===//

// An object with makespan, bubble_global, bubble_span, step, utilisation, tasks and, as
// lists of the ranks, peak_microbatches, host_peak_microbatches and activations ("kept").
JPP_API jpp_status_t* jpp_simulation_print_json(const jpp_simulation_t* simulation,
                                                char** out_text) JPP_MUST_USE;
// A summary of a few lines.
JPP_API jpp_status_t* jpp_simulation_print(const jpp_simulation_t* simulation,
                                           char** out_text) JPP_MUST_USE;
// Prints the costs of the same stages as one SPMD program, with and without
// rematerialisation.
JPP_API jpp_status_t* jpp_spmd_print(const jpp_spmd_simulation_t* kept,
                                     const jpp_spmd_simulation_t* rematerialised,
                                     char** out_text) JPP_MUST_USE;
JPP_API jpp_status_t* jpp_spmd_print_json(const jpp_spmd_simulation_t* kept,
                                          const jpp_spmd_simulation_t* rematerialised,
                                          char** out_text) JPP_MUST_USE;
// The Chrome trace format of jpp_trace_to_json(); a unit of time is a millisecond.
// Streams are processes, ranks their threads.
JPP_API jpp_status_t* jpp_simulation_to_trace(const jpp_simulation_t* simulation,
                                              char** out_text) JPP_MUST_USE;

// One row per rank with its tasks: forwards, backwards (of inputs) and weight gradients
// in three colours, darker for later stages of a rank, microbatch numbers where they fit,
// bubbles in the background's colour, streams one above the other; below each row the
// microbatches that it keeps over time; title and legend. JPP_INVALID_ARGUMENT for more
// tasks than a picture can show (1,000,000).
JPP_API jpp_status_t* jpp_plot_svg(const jpp_simulation_t* simulation,
                                   char** out_text) JPP_MUST_USE;

// The same as an HTML page in one file, without network access: the wheel zooms, dragging
// moves, and a tooltip describes the task under the pointer.
JPP_API jpp_status_t* jpp_plot_html(const jpp_simulation_t* simulation,
                                    char** out_text) JPP_MUST_USE;

// One line per rank, and one more for each further stream, `columns` wide: forwards show
// the microbatch's last digit, backwards a letter, weight gradients a capital letter,
// bubbles '.'. With `color` ANSI colours by kind.
JPP_API jpp_status_t* jpp_plot_text(const jpp_simulation_t* simulation, uint32_t columns,
                                    bool color, char** out_text) JPP_MUST_USE;

//===-- Measured steps -------------------------------------------------------------===//

// One run of a task.
typedef struct jpp_span {
  const char* name;  // borrowed: "bwd_i_2__0"
  uint8_t kind;      // jpp_task_kind_t
  uint32_t rank;
  uint32_t stage, microbatch;  // JPP_NONE: outside the loops
  double start, end;           // ms
} jpp_span_t;

typedef struct jpp_spans {
  const char* title;
  const jpp_span_t* spans;  // [count] by rank, then start
  size_t count;
  uint32_t ranks;     // rows to draw, even without spans; 0: only ranks with spans
  double begin, end;  // of the drawing, ms
  // Of a measured step, the first of several: its number, from 1, and the time that
  // corresponds to 0 ms: CLOCK_REALTIME, nanoseconds. 0: unknown.
  uint64_t step;
  int64_t clock;
} jpp_spans_t;

// A trace that was written by jpp_trace_to_json() or jpp_simulation_to_trace().
// Its layout is final.
typedef struct jpp_trace_text {
  // The file's name, for errors, and the title if the text has none.
  const char* name;
  const char* text;
  size_t length;
} jpp_trace_text_t;

// Whether a text is JSON, as opposed to the other formats that jaxpp reads.
JPP_API bool jpp_spans_is_trace(const char* text);

// Reads a trace; or several, [count], that the processes of a job took of the same steps,
// one or more, as one, on one time axis, by the processes' clocks. JPP_PARSE_ERROR for a
// text that is not a trace or has no task run; for two traces of the same rank and step;
// if not all ranks have the same steps; and for several traces, if one does not say when
// its step began.
JPP_API jpp_status_t* jpp_spans_read(const jpp_trace_text_t* texts, uint32_t count,
                                     jpp_spans_t** out_spans) JPP_MUST_USE;
// For the result of jpp_spans_read() only. Takes NULL.
JPP_API void jpp_spans_destroy(jpp_spans_t* spans);
// As jpp_trace_to_json().
JPP_API jpp_status_t* jpp_spans_to_json(const jpp_spans_t* spans,
                                        char** out_text) JPP_MUST_USE;

// One line per rank, `columns` wide, with the share of the time in which it is busy:
// forwards show the microbatch's last digit, backwards a letter for it, tasks outside
// loops '#', idle time '.'. With `color` ANSI colours by kind. JPP_INVALID_ARGUMENT for
// zero columns or an empty span of time.
JPP_API jpp_status_t* jpp_spans_draw(const jpp_spans_t* spans, uint32_t columns,
                                     bool color, char** out_text) JPP_MUST_USE;
// Draws the spans as a picture, or as a page like jpp_plot_html(). JPP_INVALID_ARGUMENT
// for more spans than a picture can show (1,000,000).
JPP_API jpp_status_t* jpp_spans_svg(const jpp_spans_t* spans,
                                    char** out_text) JPP_MUST_USE;
JPP_API jpp_status_t* jpp_spans_html(const jpp_spans_t* spans,
                                     char** out_text) JPP_MUST_USE;

//===-- Predictions ----------------------------------------------------------------===//

// jpp_predict() with task times from a trace: jpp_predict_task_times() computes them from
// its runs of the plan's tasks, which are found by name. A task runs once a step for each
// microbatch; further runs count as further steps. The trace may be of another plan that
// has these tasks, with another schedule or fewer microbatches. If it has more ranks than
// the plan, they ran on one host. A link without latency gets the trace's latency
// (jpp_predict_latency()). The options' task times are not read. Errors: those of
// jpp_predict(), JPP_INVALID_ARGUMENT, which names the task, for a task without a run,
// and JPP_PARSE_ERROR for a rank of 2^20 or more.
JPP_API jpp_status_t* jpp_spans_predict(const jpp_spans_t* trace, const jpp_plan_t* plan,
                                        const jpp_predict_options_t* options,
                                        jpp_prediction_t** out_prediction) JPP_MUST_USE;
// Prints the step's time and bubble, one line per rank with its peak bytes, and one per
// link with its bytes.
JPP_API jpp_status_t* jpp_prediction_print(const jpp_prediction_t* prediction,
                                           char** out_text) JPP_MUST_USE;
// An object with makespan, period, bubble, ranks (a list) and links (a list).
JPP_API jpp_status_t* jpp_prediction_print_json(const jpp_prediction_t* prediction,
                                                char** out_text) JPP_MUST_USE;
// The format of jpp_trace_to_json().
JPP_API jpp_status_t* jpp_prediction_to_trace(const jpp_prediction_t* prediction,
                                              char** out_text) JPP_MUST_USE;

//===-- Traces of the runtime ------------------------------------------------------===//

// Chrome trace format, which Perfetto and chrome://tracing open: one process, a thread
// per rank, complete ("X") events named after their tasks ("fwd_2__0"), times in
// microseconds from the start of the first step, whose number and clock are in otherData.
JPP_API jpp_status_t* jpp_trace_to_json(const jpp_trace_t* const* traces, uint32_t count,
                                        char** out_text) JPP_MUST_USE;

#endif  // JAXPP_VIEW_H_
