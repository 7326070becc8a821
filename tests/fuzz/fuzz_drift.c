// Traces as JSON: `jaxpp drift` says where two part, `jaxpp plot` draws one.
#include "base/utf8.h"
#include "cli/cli.h"
#include "cli/trace.h"
#include "fuzz.h"

static void draw_svg(const uint8_t* data, size_t size) {
  jpp_cli_trace_t trace;
  jpp_str_t out = {0};
  if (fuzz_ok(jpp_cli_trace_parse("input", (const char*)data, size, &trace))) {
    FUZZ_CHECK(fuzz_ok(jpp_cli_trace_draw_svg(&trace, "input", &out)));
    FUZZ_CHECK(jpp_utf8_is_valid(out.data, out.length));
  }
  jpp_str_deinit(&out);
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
