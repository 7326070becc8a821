// `--costs FILE`: lines of numbers, or the trace of a measured step as JSON.
#include "cli/cli.h"
#include "fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz_file_t file = fuzz_file_open(data, size);
  jpp_cost_t* costs = NULL;
  bool halved = false;
  bool ok = fuzz_ok(jpp_cli_read_costs(file.path, 4, &costs, &halved));
  FUZZ_CHECK(ok == (costs != NULL));
  jpp_free(costs);
  fuzz_file_close(&file);
  return 0;
}
