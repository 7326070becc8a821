// Declarations that the views of a plan share.
#ifndef JPP_VIEW_PLANNED_H_
#define JPP_VIEW_PLANNED_H_

#include <jansson.h>

#include "jaxpp/plan.h"

// JPP_INVALID_ARGUMENT unless the part was made.
jpp_status_t* jpp__planned_expect(const jpp_planned_t* planned,
                                  jpp_plan_part_t part) JPP_MUST_USE;

// A rank's list in the form of jpp_schedule_print_json(); NULL if memory ran out.
json_t* jpp__schedule_row_json(const jpp_schedule_row_t* row);

#endif  // JPP_VIEW_PLANNED_H_
