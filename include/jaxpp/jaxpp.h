// Includes the whole library. Each subject has a header; they follow the order in which
// data flows, and each opens with what goes in, what comes out and which threads may call
// what.
#ifndef JAXPP_JAXPP_H_
#define JAXPP_JAXPP_H_

// clang-format off
#include "jaxpp/version.h"
#include "jaxpp/status.h"
#include "jaxpp/dtype.h"
#include "jaxpp/memory.h"
#include "jaxpp/alloc.h"
#include "jaxpp/str.h"
#include "jaxpp/file.h"
#include "jaxpp/option.h"
#include "jaxpp/log.h"

// The planner.
#include "jaxpp/task.h"
#include "jaxpp/schedule.h"
#include "jaxpp/schedule_csv.h"
#include "jaxpp/simulate.h"
#include "jaxpp/search.h"
#include "jaxpp/graph.h"
#include "jaxpp/partition.h"
#include "jaxpp/partition_cut.h"
#include "jaxpp/program.h"
#include "jaxpp/check.h"
#include "jaxpp/predict.h"
#include "jaxpp/plan.h"
#include "jaxpp/advise.h"

// What runs a plan.
#include "jaxpp/device.h"
#include "jaxpp/array.h"
#include "jaxpp/array_argument.h"
#include "jaxpp/transport.h"
#include "jaxpp/job.h"
#include "jaxpp/job_ranks.h"
#include "jaxpp/runtime.h"
#include "jaxpp/planfile.h"
#include "jaxpp/flight.h"
#include "jaxpp/profile.h"

// What people look at.
#include "jaxpp/view.h"
// clang-format on

#endif  // JAXPP_JAXPP_H_
