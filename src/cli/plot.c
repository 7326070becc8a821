// jaxpp plot.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/file.h"

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

// The picture's format, from the ending of -o's name.
typedef struct picture {
  const char* ending;
  jpp_status_t* (*of_simulation)(const jpp_simulation_t* simulation, char** out_text);
  jpp_status_t* (*of_spans)(const jpp_spans_t* spans, char** out_text);
} picture_t;

static const picture_t kPictures[] = {
    {".svg", jpp_plot_svg, jpp_spans_svg},
    {".html", jpp_plot_html, jpp_spans_html},
    {".json", jpp_simulation_to_trace, jpp_spans_to_json},
};

static jpp_status_t* find_picture(const char* file, const picture_t** out_picture) {
  for (size_t i = 0; i < sizeof(kPictures) / sizeof(*kPictures); ++i) {
    *out_picture = &kPictures[i];
    if (ends_with(file, kPictures[i].ending)) return NULL;
  }
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "-o: expected a name that ends in .svg, .html or .json, found "
                         "'%s'",
                         file);
}

// Writes a text to the file or, without a file, to the terminal.
static jpp_status_t* write_or_append(jpp_status_t* status, char* text, const char* file,
                                     jpp_str_t* out) {
  if (!status && file) status = write_file(file, text);
  if (!status && !file) jpp_str_append(out, text);
  jpp_text_free(text);
  return status;
}

static jpp_status_t* draw_simulation(const jpp_cli_options_t* options,
                                     const jpp_simulation_t* simulation, jpp_str_t* out) {
  const picture_t* picture = NULL;
  const char* file = options->output;
  char* text = NULL;
  if (file) JPP_RETURN_IF_ERROR(find_picture(file, &picture));
  jpp_status_t* status = file
                             ? picture->of_simulation(simulation, &text)
                             : jpp_plot_text(simulation, kColumns, options->color, &text);
  return write_or_append(status, text, file, out);
}

// --- Traces ---------------------------------------------------------------------------

static jpp_status_t* draw_spans(const jpp_cli_options_t* options,
                                const jpp_spans_t* spans, jpp_str_t* out) {
  const picture_t* picture = NULL;
  const char* file = options->output;
  char* text = NULL;
  if (file) JPP_RETURN_IF_ERROR(find_picture(file, &picture));
  jpp_status_t* status = file ? picture->of_spans(spans, &text)
                              : jpp_spans_draw(spans, kColumns, options->color, &text);
  return write_or_append(status, text, file, out);
}

// Whether words[0] is a trace.
static jpp_status_t* find_trace(const jpp_cli_options_t* options, bool* out_is_trace) {
  char* text = NULL;
  size_t length = 0;
  *out_is_trace = false;
  if (!jpp_cli_names_file(options->words[0])) return NULL;
  JPP_RETURN_IF_ERROR(jpp_file_read(options->words[0], &text, &length));
  *out_is_trace = jpp_spans_is_trace(text);
  jpp_text_free(text);
  return NULL;
}

static jpp_status_t* plot_traces(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_spans_t* spans = NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_refuse_flags(
      options, ~(uint32_t)(JPP_FLAG_OUTPUT | JPP_FLAG_COLOR), "traces"));
  JPP_RETURN_IF_ERROR(jpp_cli_read_traces(options->words, options->num_words, &spans));
  jpp_status_t* status = draw_spans(options, spans, out);
  jpp_spans_destroy(spans);
  return status;
}

jpp_status_t* jpp_cli_plot(const jpp_cli_options_t* options, jpp_str_t* out) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  jpp_simulation_t* simulation = NULL;
  bool is_trace = false;
  if (options->output) {
    JPP_RETURN_IF_ERROR(jpp_cli_refuse_flags(options, JPP_FLAG_COLOR, "-o"));
  }
  JPP_RETURN_IF_ERROR(find_trace(options, &is_trace));
  if (is_trace) return plot_traces(options, out);
  if (options->num_words > 1) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "jaxpp plot: expected one schedule, or only traces, found '%s' after '%s'",
        options->words[1], options->words[0]);
  }
  JPP_RETURN_IF_ERROR(jpp_cli_schedule(options, &slots, &schedule));
  jpp_status_t* status = jpp_cli_simulation(options, schedule, &simulation);
  if (!status) status = draw_simulation(options, simulation, out);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
  return status;
}
