// Two traces as JSON, of which `jaxpp drift` says where they part.
#include "cli/cli.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_file_t file = fuzz_file_open(data, size);
  jpp_cli_options_t options = {.words = {file.path, file.path}, .num_words = 2};
  jpp_str_t out = {0};
  fuzz_ok(jpp_cli_drift(&options, &out));
  jpp_str_deinit(&out);
  fuzz_file_close(&file);
  return 0;
}
