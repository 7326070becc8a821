// Shared by the tests of the NCCL driver: each begins without faults of the stub and must
// leave nothing in it.
#ifndef TESTS_C_TRANSPORT_NCCL_TESTS_H_
#define TESTS_C_TRANSPORT_NCCL_TESTS_H_

#include "pair.h"
#include "stub_nccl.h"

enum { kBig = 20000 };

static inline void expect_nothing_left(void) {
  stub_counts_t live = stub_live();
  assert_int_equal(live.comms, 0);
  assert_int_equal(live.streams, 0);
  assert_int_equal(live.events, 0);
  assert_int_equal(live.blocks, 0);
  assert_int_equal(live.contexts, 0);
  assert_int_equal(live.current, 0);
}

static inline int begin_test(void** state) {
  (void)state;
  stub_set_faults(&(stub_faults_t){0});
  return 0;
}

static inline int end_test(void** state) {
  (void)state;
  expect_nothing_left();
  return 0;
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, begin_test, end_test)
#define TEST_ON(name, driver) \
  { #name " on " driver, name, begin_test, end_test, (void*)(driver) }

#endif  // TESTS_C_TRANSPORT_NCCL_TESTS_H_
