// jaxpp plot.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/trace.h"
#include "jaxpp/view.h"

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

// --- A trace --------------------------------------------------------------------------

static jpp_status_t* draw_trace(const jpp_cli_options_t* options, jpp_cli_trace_t* trace,
                                jpp_str_t* out) {
  const char* file = options->output;
  if (!file) {
    jpp_cli_trace_draw(trace, options->words[0], kColumns, options->color, out);
    return NULL;
  }
  if (!ends_with(file, ".svg")) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "-o: a trace is drawn as .svg or in the terminal, found '%s'",
                           file);
  }
  jpp_str_t str = {0};
  char* text = NULL;
  jpp_status_t* status = jpp_cli_trace_draw_svg(trace, options->words[0], &str);
  if (!status) status = jpp_str_finish(&str, &text);
  if (!status) status = write_file(file, text);
  jpp_str_deinit(&str);
  jpp_free(text);
  return status;
}

// Whether words[0] is a trace. If so, draws it.
static jpp_status_t* plot_trace(const jpp_cli_options_t* options, bool* out_is_trace,
                                jpp_str_t* out) {
  const char* file = options->words[0];
  char* text = NULL;
  size_t length = 0;
  *out_is_trace = false;
  if (!jpp_cli_names_file(file)) return NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_read_file(file, &text, &length));
  *out_is_trace = jpp_cli_is_trace(text);
  jpp_cli_trace_t trace = {0};
  jpp_status_t* status = NULL;
  if (*out_is_trace) status = jpp_cli_trace_parse(file, text, length, &trace);
  if (*out_is_trace && !status) status = draw_trace(options, &trace, out);
  jpp_cli_trace_deinit(&trace);
  jpp_free(text);
  return status;
}

jpp_status_t* jpp_cli_plot(const jpp_cli_options_t* options, jpp_str_t* out) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  jpp_simulation_t* simulation = NULL;
  bool is_trace = false;
  JPP_RETURN_IF_ERROR(plot_trace(options, &is_trace, out));
  if (is_trace) return NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_schedule(options, &slots, &schedule));
  jpp_status_t* status = jpp_cli_simulation(options, schedule, &simulation);
  if (!status) status = draw(options, simulation, out);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
  return status;
}
