// Replaces ucx.c in builds without the headers of UCX.
#include "transport/driver.h"

static jpp_status_t* missing_create(const jpp_transport_options_t* options,
                                    jpp_transport_t** out_transport) {
  (void)options, (void)out_transport;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "this library was built without UCX's headers; install the "
                         "Python package libucx-cu13 (or libucx-cu12) or Debian's "
                         "libucx-dev, and build it again");
}

// Without a transport, nothing else can be called.
const jpp_transport_vtable_t jpp_transport_ucx = {.name = "ucx",
                                                  .create = missing_create};
