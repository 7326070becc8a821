// Shared by the conformance suites: each test gets a client of the driver that the
// command line names, and must not leak a handle of it.
#ifndef TESTS_C_DEVICE_CONFORMANCE_H_
#define TESTS_C_DEVICE_CONFORMANCE_H_

#include "driver_under_test.h"

static inline jpp_client_t* client_of(void** state) { return *state; }
int conformance_begin(void** state);
int conformance_end(void** state);
#define ON_CLIENT(test) \
  cmocka_unit_test_setup_teardown(test, conformance_begin, conformance_end)

// Returns the exit status of the program.
int conformance_run(int argc, char** argv, const char* suite,
                    const struct CMUnitTest* tests, size_t count);

#endif  // TESTS_C_DEVICE_CONFORMANCE_H_
