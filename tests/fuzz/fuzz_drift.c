// Traces as JSON, which `jaxpp drift` compares and `jaxpp plot` draws: a trace that was
// read can be drawn, and written and read again.
#include "base/utf8.h"
#include "cli/cli.h"
#include "fuzz.h"

static void draw_and_write(const uint8_t* data, size_t size) {
  jpp_trace_text_t source = {.name = "input", .text = (const char*)data, .length = size};
  jpp_spans_t *spans = NULL, *again = NULL;
  char* text = NULL;
  if (!fuzz_ok(jpp_spans_read(&source, 1, &spans))) return;
  FUZZ_CHECK(fuzz_ok(jpp_spans_svg(spans, &text)));
  FUZZ_CHECK(jpp__utf8_is_valid(text, strlen(text)));
  jpp_text_free(text);
  FUZZ_CHECK(fuzz_ok(jpp_spans_to_json(spans, &text)));
  source = (jpp_trace_text_t){.name = "again", .text = text, .length = strlen(text)};
  FUZZ_CHECK(fuzz_ok(jpp_spans_read(&source, 1, &again)));
  FUZZ_CHECK(again->count == spans->count);
  jpp_text_free(text);
  jpp_spans_destroy(again);
  jpp_spans_destroy(spans);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_file_t file = fuzz_file_open(data, size);
  jpp_cli_options_t options = {.words = {file.path, file.path}, .num_words = 2};
  jpp_str_t out = {0};
  fuzz_ok(jpp_cli_drift(&options, &out));
  jpp_str_deinit(&out);
  fuzz_ok(jpp_cli_plot(&options, &out));
  jpp_str_deinit(&out);
  draw_and_write(data, size);
  fuzz_file_close(&file);
  return 0;
}
