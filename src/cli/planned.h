// A graph file taken through the planner, as far as it is asked for.
#ifndef JPP_CLI_PLANNED_H_
#define JPP_CLI_PLANNED_H_

#include "base/str.h"
#include "jaxpp/check.h"

// What the planner makes, in order.
typedef enum jpp_part {
  JPP_PART_GRAPH,
  JPP_PART_SCHEDULE,
  JPP_PART_PARTITION,
  JPP_PART_PROGRAM,
  JPP_PART_CHECK,
  JPP_PART_COUNT,
} jpp_part_t;

typedef struct jpp_plan_request {
  const char* file;      // "-": standard input
  const char* schedule;  // NULL: what each loop says; the same for stages and ranks
  uint32_t stages, ranks;
  uint32_t slots;  // of each channel; 0: the library's choice
  bool fuse;
  jpp_part_t last;        // nothing behind it is made
  uint64_t memory_limit;  // of each device, bytes; 0: none. Takes the last part
} jpp_plan_request_t;

typedef struct jpp_planned {
  jpp_graph_t* graph;
  uint32_t ranks;
  jpp_schedule_t** schedules;  // [graph->num_loops]
  jpp_staged_t* staged;
  jpp_plan_t* plan;
  jpp_check_report_t* report;
} jpp_planned_t;

// On failure what was made stays in *out_planned: deinit it in any case.
jpp_status_t* jpp_planned_init(const jpp_plan_request_t* request,
                               jpp_planned_t* out_planned) JPP_MUST_USE;
void jpp_planned_deinit(jpp_planned_t* planned);

const char* jpp_part_name(jpp_part_t part);
// The part's text form.
jpp_status_t* jpp_part_print(const jpp_planned_t* planned, jpp_part_t part,
                             jpp_str_t* out) JPP_MUST_USE;
// A few lines for people: sizes, stages a rank, transfers, peak bytes.
void jpp_planned_summarize(const jpp_planned_t* planned, jpp_str_t* out);
// The part as JSON; JPP_PART_COUNT: an object with all of them.
jpp_status_t* jpp_part_print_json(const jpp_planned_t* planned, jpp_part_t part,
                                  jpp_str_t* out) JPP_MUST_USE;

#endif  // JPP_CLI_PLANNED_H_
