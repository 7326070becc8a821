// A key-value store for tests of nodes, which fails where told.
#ifndef TESTS_C_DEVICE_TEST_STORE_H_
#define TESTS_C_DEVICE_TEST_STORE_H_

#include <pthread.h>

#include "jaxpp/device.h"

enum { kTestKeys = 64 };

typedef enum test_fault {
  TEST_FAULT_NONE,
  TEST_FAULT_GET,     // an error of `get`
  TEST_FAULT_PUT,     // an error of `put`
  TEST_FAULT_SILENT,  // nothing is put
  TEST_FAULT_VALUE,   // something else is put
} test_fault_t;

typedef struct test_store {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  char keys[kTestKeys][64];
  char values[kTestKeys][64];
  size_t sizes[kTestKeys];
  uint32_t count;
  // What happens to this key; with TEST_FAULT_VALUE the value that is there instead.
  test_fault_t fault;
  const char* key;
  const char* value;
} test_store_t;

void test_store_init(test_store_t* store);
void test_store_deinit(test_store_t* store);
jpp_key_value_store_t test_store_calls(test_store_t* store);
// Whether somebody has put this text.
bool test_store_has(test_store_t* store, const char* key, const char* value);

#endif  // TESTS_C_DEVICE_TEST_STORE_H_
