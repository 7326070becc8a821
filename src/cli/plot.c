// jaxpp plot.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/schedule_plot.h"

enum { kColumns = 120 };

static bool ends_with(const char* text, const char* tail) {
  size_t length = strlen(text), tail_length = strlen(tail);
  return length >= tail_length && !strcmp(text + length - tail_length, tail);
}

static jpp_status_t* write_file(const char* file, const char* text) {
  errno = 0;
  FILE* stream = fopen(file, "w");
  bool written = stream && fputs(text, stream) >= 0;
  int error = errno;
  if (stream && fclose(stream) != 0) {
    written = false;
    error = errno;
  }
  if (written) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "-o: %s: %s", file, strerror(error));
}

static jpp_status_t* draw(const jpp_cli_options_t* options,
                          const jpp_simulation_t* simulation, jpp_str_t* out) {
  char* text = NULL;
  const char* file = options->output;
  if (!file) {
    JPP_RETURN_IF_ERROR(jpp_plot_text(simulation, kColumns, options->color, &text));
    jpp_str_append(out, text);
    jpp_text_free(text);
    return NULL;
  }
  if (ends_with(file, ".html")) {
    JPP_RETURN_IF_ERROR(jpp_plot_html(simulation, &text));
  } else if (ends_with(file, ".svg")) {
    JPP_RETURN_IF_ERROR(jpp_plot_svg(simulation, &text));
  } else if (ends_with(file, ".json")) {
    JPP_RETURN_IF_ERROR(jpp_simulation_to_trace(simulation, &text));
  } else {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "-o: expected a name that ends in .svg, .html or .json, found "
                           "'%s'",
                           file);
  }
  jpp_status_t* status = write_file(file, text);
  jpp_text_free(text);
  return status;
}

jpp_status_t* jpp_cli_plot(const jpp_cli_options_t* options, jpp_str_t* out) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  jpp_simulation_t* simulation = NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_schedule(options, &slots, &schedule));
  jpp_status_t* status = jpp_cli_simulation(options, schedule, &simulation);
  if (!status) status = draw(options, simulation, out);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
  return status;
}
