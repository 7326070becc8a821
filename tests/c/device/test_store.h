// A key-value store for tests of nodes, which fails on request.
#ifndef TESTS_C_DEVICE_TEST_STORE_H_
#define TESTS_C_DEVICE_TEST_STORE_H_

#include <pthread.h>

#include "jaxpp/device.h"

enum { kTestKeys = 64 };

typedef enum test_fault {
  TEST_FAULT_NONE,
  TEST_FAULT_GET,     // `get` fails
  TEST_FAULT_PUT,     // `put` fails
  TEST_FAULT_SILENT,  // `put` stores nothing
  TEST_FAULT_VALUE,   // `put` stores another value
} test_fault_t;

typedef struct test_store {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  char keys[kTestKeys][64];
  char values[kTestKeys][64];
  size_t sizes[kTestKeys];
  uint32_t count;
  // Sets the fault for this key; TEST_FAULT_VALUE stores the given value instead.
  test_fault_t fault;
  const char* key;
  const char* value;
} test_store_t;

void test_store_init(test_store_t* store);
void test_store_deinit(test_store_t* store);
jpp_key_value_store_t test_store_calls(test_store_t* store);
// True if this text was put under some key.
bool test_store_has(test_store_t* store, const char* key, const char* value);

#endif  // TESTS_C_DEVICE_TEST_STORE_H_
