// Included by every C test: the headers that cmocka needs, in its order, checks of
// statuses, and random numbers.
#ifndef TESTS_C_TEST_UTIL_H_
#define TESTS_C_TEST_UTIL_H_

// clang-format off
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>
// clang-format on
#include <stdlib.h>
#include <string.h>

#include "jaxpp/status.h"

// Reads an environment variable that only tests use; NULL if it is unset or empty.
static inline const char* test_variable(const char* name) {
  const char* value = getenv(name);
  return value && *value ? value : NULL;
}

// The next number below `bound` of a sequence; `state` is its seed.
static inline uint32_t test_random_below(uint64_t* state, uint32_t bound) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33) % bound;
}

#define ASSERT_OK(expr)                                                 \
  do {                                                                  \
    jpp_status_t* test_status_ = (expr);                                \
    if (test_status_) fail_msg("%s", jpp_status_message(test_status_)); \
  } while (0)

// Checks that the call fails with this code and a message that contains this text.
#define ASSERT_FAILS(expr, expected_code, expected_text)                                 \
  do {                                                                                   \
    jpp_status_t* test_status_ = (expr);                                                 \
    assert_string_equal(jpp_status_code_name(jpp_status_code(test_status_)),             \
                        jpp_status_code_name(expected_code));                            \
    if (!strstr(jpp_status_message(test_status_), (expected_text)))                      \
      fail_msg("'%s' is not in: %s", (expected_text), jpp_status_message(test_status_)); \
    jpp_status_free(test_status_);                                                       \
  } while (0)

#endif  // TESTS_C_TEST_UTIL_H_
