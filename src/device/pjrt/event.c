// Events through PJRT. A plugin calls back on a thread of its own, and does not own the
// waiter.
#include "device/pjrt/pjrt.h"

jpp_status_t* jpp__pjrt_event_await(jpp_client_t* base, jpp_event_t* event) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Event_Await, args);
  args.event = (PJRT_Event*)event;
  return jpp__pjrt_status(api, api->PJRT_Event_Await(&args), JPP_EXECUTION_ERROR,
                          "device");
}

jpp_status_t* jpp__pjrt_event_is_ready(jpp_client_t* base, jpp_event_t* event,
                                       bool* out_ready) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Event_IsReady, args);
  args.event = (PJRT_Event*)event;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Event_IsReady(&args),
                                       JPP_EXECUTION_ERROR, "event state"));
  *out_ready = args.is_ready;
  return NULL;
}

static void event_call_waiter(PJRT_Error* error, void* user_arg) {
  jpp_event_waiter_t* waiter = user_arg;
  const PJRT_Api* api = waiter->driver_data;
  waiter->callback(waiter->user,
                   jpp__pjrt_status(api, error, JPP_EXECUTION_ERROR, "device"));
}

jpp_status_t* jpp__pjrt_event_on_ready(jpp_client_t* base, jpp_event_t* event,
                                       jpp_event_waiter_t* waiter) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  waiter->driver_data = api;
  JPP_PJRT_ARGS(Event_OnReady, args);
  args.event = (PJRT_Event*)event;
  args.callback = event_call_waiter;
  args.user_arg = waiter;
  return jpp__pjrt_status(api, api->PJRT_Event_OnReady(&args), JPP_EXECUTION_ERROR,
                          "event callback");
}

void jpp__pjrt_event_destroy(jpp_client_t* base, jpp_event_t* event) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Event_Destroy, args);
  args.event = (PJRT_Event*)event;
  jpp__pjrt_ignore(api, api->PJRT_Event_Destroy(&args));
}
