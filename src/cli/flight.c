// jaxpp flight: a report on the flight recorders of a job.
#include "jaxpp/flight.h"

#include "cli/cli.h"

jpp_status_t* jpp_cli_flight(const jpp_cli_options_t* options, jpp_str_t* out) {
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_flight_report(options->words[0], &text));
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}
