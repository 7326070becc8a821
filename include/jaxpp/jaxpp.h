// All of the library. A header a subject, in the order in which data flows; each opens
// with what goes in, what comes out and which threads may call what.
#ifndef JAXPP_JAXPP_H_
#define JAXPP_JAXPP_H_

#include "jaxpp/version.h"

// What every call answers with, and what arrays are made of.
#include "jaxpp/dtype.h"
#include "jaxpp/status.h"

// The planner.
#include "jaxpp/check.h"
#include "jaxpp/graph.h"
#include "jaxpp/partition.h"
#include "jaxpp/program.h"
#include "jaxpp/schedule.h"
#include "jaxpp/schedule_csv.h"
#include "jaxpp/schedule_plot.h"
#include "jaxpp/schedule_search.h"
#include "jaxpp/schedule_simulate.h"

// What runs a plan.
#include "jaxpp/device.h"
#include "jaxpp/device_fake.h"
#include "jaxpp/runtime.h"
#include "jaxpp/transport.h"

#endif  // JAXPP_JAXPP_H_
