#include "conformance.h"

#include <stdio.h>

static const char* g_driver;

int conformance_begin(void** state) {
  *state = test_client_create(g_driver);
  return 0;
}

int conformance_end(void** state) {
  jpp_client_t* client = *state;
  jpp_fake_stats_t stats = {0};
  if (strcmp(jpp_client_info(client)->driver, "fake") == 0) {
    jpp_status_free(jpp_fake_stats(client, &stats));
  }
  jpp_client_destroy(client);
  bool clean = !stats.live_buffers && !stats.live_events && !stats.live_executables &&
               !stats.live_bytes && !stats.misuses;
  if (!clean) print_error("handles were left, or destroyed twice\n");
  return clean ? 0 : -1;
}

int conformance_run(int argc, char** argv, const char* suite,
                    const struct CMUnitTest* tests, size_t count) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s fake|fake-threads|pjrt\n", argv[0]);
    return 2;
  }
  g_driver = argv[1];
  if (strncmp(g_driver, "pjrt", 4) == 0 && test_skip_without_plugin()) return 0;
  return _cmocka_run_group_tests(suite, tests, count, NULL, NULL);
}
