#include "test_store.h"

#include <stdio.h>
#include <time.h>

#include "jaxpp/alloc.h"
#include "test_util.h"

void test_store_init(test_store_t* store) {
  *store = (test_store_t){0};
  pthread_mutex_init(&store->mutex, NULL);
  pthread_cond_init(&store->changed, NULL);
}

void test_store_deinit(test_store_t* store) {
  pthread_cond_destroy(&store->changed);
  pthread_mutex_destroy(&store->mutex);
}

static int find_key(const test_store_t* store, const char* key) {
  for (uint32_t i = 0; i < store->count; ++i) {
    if (strcmp(store->keys[i], key) == 0) return (int)i;
  }
  return -1;
}

static bool has_fault(const test_store_t* store, test_fault_t fault, const char* key) {
  return store->fault == fault && strcmp(store->key, key) == 0;
}

static jpp_status_t* store_get(void* user, const char* key, uint32_t timeout_ms,
                               void** out_value, size_t* out_size) {
  test_store_t* store = user;
  if (has_fault(store, TEST_FAULT_GET, key)) {
    return jpp_status_make(JPP_PEER_ERROR, "the store is gone");
  }
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += timeout_ms / 1000;
  until.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  pthread_mutex_lock(&store->mutex);
  int late = 0, at = find_key(store, key);
  while (at < 0 && late == 0) {
    late = pthread_cond_timedwait(&store->changed, &store->mutex, &until);
    at = find_key(store, key);
  }
  jpp_status_t* status = NULL;
  if (at >= 0) {
    *out_size = store->sizes[at];
    status = jpp_alloc(*out_size, out_value);
    if (!status) memcpy(*out_value, store->values[at], *out_size);
  }
  pthread_mutex_unlock(&store->mutex);
  return status;
}

static jpp_status_t* store_put(void* user, const char* key, const void* value,
                               size_t size) {
  test_store_t* store = user;
  if (has_fault(store, TEST_FAULT_PUT, key)) {
    return jpp_status_make(JPP_PEER_ERROR, "the store is full");
  }
  if (has_fault(store, TEST_FAULT_SILENT, key)) return NULL;
  if (has_fault(store, TEST_FAULT_VALUE, key)) {
    value = store->value;
    size = strlen(store->value);
  }
  pthread_mutex_lock(&store->mutex);
  assert_true(find_key(store, key) < 0);  // each key is set once
  snprintf(store->keys[store->count], sizeof(store->keys[0]), "%s", key);
  memcpy(store->values[store->count], value, size);
  store->sizes[store->count++] = size;
  pthread_cond_broadcast(&store->changed);
  pthread_mutex_unlock(&store->mutex);
  return NULL;
}

jpp_key_value_store_t test_store_calls(test_store_t* store) {
  return (jpp_key_value_store_t){.user = store, .get = store_get, .put = store_put};
}

bool test_store_has(test_store_t* store, const char* key, const char* value) {
  pthread_mutex_lock(&store->mutex);
  int at = find_key(store, key);
  bool has = at >= 0 && store->sizes[at] == strlen(value) &&
             memcmp(store->values[at], value, strlen(value)) == 0;
  pthread_mutex_unlock(&store->mutex);
  return has;
}
