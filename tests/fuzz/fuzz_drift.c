// Traces as JSON: `jaxpp drift` says where two part, `jaxpp plot` draws one.
#include "base/utf8.h"
#include "cli/cli.h"
#include "cli/trace.h"
#include "fuzz.h"

static void draw_svg(const uint8_t* data, size_t size) {
  jpp_cli_trace_t trace;
  jpp_spans_t spans = {0};
  char* text = NULL;
  if (fuzz_ok(jpp_cli_trace_parse("input", (const char*)data, size, &trace)) &&
      fuzz_ok(jpp_cli_trace_spans(&trace, "input", &spans))) {
    FUZZ_CHECK(fuzz_ok(jpp_spans_svg(&spans, &text)));
    FUZZ_CHECK(jpp_utf8_is_valid(text, strlen(text)));
  }
  jpp_text_free(text);
  jpp_free((void*)spans.spans);
  jpp_cli_trace_deinit(&trace);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_file_t file = fuzz_file_open(data, size);
  jpp_cli_options_t options = {.words = {file.path, file.path}, .num_words = 2};
  jpp_str_t out = {0};
  fuzz_ok(jpp_cli_drift(&options, &out));
  jpp_str_deinit(&out);
  fuzz_ok(jpp_cli_plot(&options, &out));
  jpp_str_deinit(&out);
  draw_svg(data, size);
  fuzz_file_close(&file);
  return 0;
}
