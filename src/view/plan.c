// The text form of each part of a plan, by the part's own printer.
#include "base/null.h"
#include "base/str.h"
#include "jaxpp/view.h"
#include "view/planned.h"

static jpp_status_t* append_schedule(const jpp_schedule_t* schedule, jpp_str_t* str) {
  char *text = NULL, *picture = NULL;
  jpp_status_t* status = jpp_schedule_print(schedule, &text);
  if (!status) status = jpp_schedule_draw(schedule, &picture);
  if (!status) jpp_str_appendf(str, "%s%s", text, picture);
  jpp_text_free(text);
  jpp_text_free(picture);
  return status;
}

static jpp_status_t* print_schedules(const jpp_planned_t* planned, char** out_text) {
  jpp_str_t str = {0};
  jpp_status_t* status = NULL;
  for (uint32_t i = 0; i < planned->graph->num_loops && !status; ++i) {
    status = append_schedule(planned->schedules[i], &str);
  }
  return jpp__str_finish_unless(status, &str, out_text);
}

jpp_status_t* jpp__planned_expect(const jpp_planned_t* planned, jpp_plan_part_t part) {
  const void* const made[] = {
      [JPP_PART_GRAPH] = planned->graph,      [JPP_PART_SCHEDULE] = planned->schedules,
      [JPP_PART_PARTITION] = planned->staged, [JPP_PART_PROGRAM] = planned->plan,
      [JPP_PART_CHECK] = planned->report,
  };
  _Static_assert(sizeof(made) / sizeof(*made) == JPP_PART_COUNT, "one a part");
  const char* name = jpp_plan_part_name(part);
  if (name && made[part]) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "expected a part that the planner made, found %s",
                         name ? name : "none");
}

jpp_status_t* jpp_planned_print(const jpp_planned_t* planned, jpp_plan_part_t part,
                                char** out_text) {
  JPP_RETURN_IF_NULL(planned, out_text);
  *out_text = NULL;
  JPP_RETURN_IF_ERROR(jpp__planned_expect(planned, part));
  switch (part) {
    case JPP_PART_GRAPH:
      return jpp_graph_print(planned->graph, out_text);
    case JPP_PART_SCHEDULE:
      return print_schedules(planned, out_text);
    case JPP_PART_PARTITION:
      return jpp_staged_print(planned->staged, out_text);
    case JPP_PART_PROGRAM:
      return jpp_plan_print(planned->plan, out_text);
    case JPP_PART_CHECK:
      return jpp_check_report_print(planned->report, out_text);
    case JPP_PART_COUNT:
      break;
  }
  return NULL;
}
