// Checks the rules of jaxpp/device.h for buffers on the driver that the command line
// names: contents, loans and borrowed memory.
#include <pthread.h>
#include <unistd.h>

#include "conformance.h"

static void test_host_array_survives_the_round_trip(void** state) {
  jpp_client_t* client = client_of(state);
  static const jpp_dtype_t kDtypes[] = {
      JPP_DTYPE_BOOL,     JPP_DTYPE_S8,       JPP_DTYPE_U16,    JPP_DTYPE_BF16,
      JPP_DTYPE_S32,      JPP_DTYPE_F32,      JPP_DTYPE_F64,    JPP_DTYPE_C128,
      JPP_DTYPE_F8E4M3FN, JPP_DTYPE_S2,       JPP_DTYPE_U2,     JPP_DTYPE_S4,
      JPP_DTYPE_U4,       JPP_DTYPE_F4E2M1FN, JPP_DTYPE_F8E3M4, JPP_DTYPE_F8E4M3,
      JPP_DTYPE_F8E8M0FNU};
  unsigned char data[6 * 16];
  for (size_t i = 0; i < sizeof(data); ++i) data[i] = (unsigned char)(i % 2);
  for (size_t d = 0; d < sizeof(kDtypes) / sizeof(kDtypes[0]); ++d) {
    int64_t dims[2] = {2, 3};
    jpp_host_array_t array = {.struct_size = sizeof(array),
                              .data = data,
                              .dtype = kDtypes[d],
                              .rank = 2,
                              .dims = dims};
    size_t bytes = 6 * jpp_dtype_bits(kDtypes[d]) / 8;
    jpp_buffer_t* buffer = NULL;
    ASSERT_OK(jpp_client_buffer_from_host(client, &array,
                                          test_device(client, (uint32_t)d), &buffer));
    jpp_buffer_shape_t shape;
    ASSERT_OK(jpp_client_buffer_shape(client, buffer, &shape));
    assert_int_equal(shape.dtype, kDtypes[d]);
    assert_int_equal(shape.rank, 2);
    assert_int_equal(shape.dims[0], 2);
    assert_int_equal(shape.dims[1], 3);
    unsigned char back[sizeof(data)] = {0};
    ASSERT_OK(jpp_client_buffer_read(client, buffer, back, bytes));
    assert_memory_equal(back, data, bytes);
    jpp_client_buffer_destroy(client, buffer);
  }
}

static void test_scalar_and_empty_arrays(void** state) {
  jpp_client_t* client = client_of(state);
  int32_t value = 42;
  int32_t back = 0;
  jpp_host_array_t scalar = {
      .struct_size = sizeof(scalar), .data = &value, .dtype = JPP_DTYPE_S32};
  jpp_buffer_t* buffer = NULL;
  ASSERT_OK(jpp_client_buffer_from_host(client, &scalar, 0, &buffer));
  ASSERT_OK(jpp_client_buffer_read(client, buffer, &back, sizeof(back)));
  assert_int_equal(back, 42);
  jpp_client_buffer_destroy(client, buffer);
  int64_t dims[2] = {0, 3};
  jpp_host_array_t empty = {.struct_size = sizeof(empty),
                            .data = &value,
                            .dtype = JPP_DTYPE_S32,
                            .rank = 2,
                            .dims = dims};
  ASSERT_OK(jpp_client_buffer_from_host(client, &empty, 0, &buffer));
  ASSERT_OK(jpp_client_buffer_read(client, buffer, &back, 0));
  ASSERT_OK(jpp_client_buffer_read(client, buffer, NULL, 0));
  jpp_client_buffer_destroy(client, buffer);
}

static void test_byte_strides_are_followed(void** state) {
  jpp_client_t* client = client_of(state);
  float data[6] = {0, 1, 2, 3, 4, 5};
  int64_t dims[2] = {3, 2};
  int64_t strides[2] = {sizeof(float), 3 * sizeof(float)};  // the transpose of [2, 3]
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 2,
                            .dims = dims,
                            .byte_strides = strides};
  jpp_buffer_t* buffer = NULL;
  ASSERT_OK(jpp_client_buffer_from_host(client, &array, test_device(client, 1), &buffer));
  float back[6] = {0};
  ASSERT_OK(jpp_client_buffer_read(client, buffer, back, sizeof(back)));
  const float expected[6] = {0, 3, 1, 4, 2, 5};
  assert_memory_equal(back, expected, sizeof(expected));
  jpp_client_buffer_destroy(client, buffer);
}

// Returns the address of the contents.
static void* look_at(jpp_client_t* client, jpp_buffer_t* buffer) {
  void* pointer = NULL;
  ASSERT_OK(jpp_client_buffer_lend(client, buffer, &pointer));
  jpp_client_buffer_reclaim(client, buffer);
  assert_non_null(pointer);
  return pointer;
}

static void test_lent_contents_stay_where_they_are(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* one = test_upload(client, 0, 1);
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, one, one, &sum));
  test_expect(client, sum, 2, 2);
  void *first = NULL, *second = NULL, *pointer = NULL;
  ASSERT_OK(jpp_client_buffer_lend(client, sum, &first));
  ASSERT_OK(jpp_client_buffer_lend(client, sum, &second));
  pointer = look_at(client, sum);
  assert_ptr_equal(first, pointer);
  assert_ptr_equal(second, pointer);
  jpp_client_buffer_reclaim(client, sum);
  if (test_is_host(client)) assert_float_equal(((const float*)first)[3], 8, 0);
  jpp_client_buffer_reclaim(client, sum);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_buffer_destroy(client, one);
  jpp_client_executable_destroy(client, add);
}

typedef struct lend_job {
  jpp_client_t* client;
  jpp_buffer_t* buffer;
  const void* contents;
  int failures;
} lend_job_t;

static void* lend_many_times(void* user) {
  lend_job_t* job = user;
  for (int i = 0; i < 2000; ++i) {
    void* first = NULL;
    void* second = NULL;
    jpp_status_t* status = jpp_client_buffer_lend(job->client, job->buffer, &first);
    if (!status) status = jpp_client_buffer_lend(job->client, job->buffer, &second);
    job->failures += status || first != job->contents || second != job->contents;
    jpp_status_free(status);
    if (first) jpp_client_buffer_reclaim(job->client, job->buffer);
    if (second) jpp_client_buffer_reclaim(job->client, job->buffer);
  }
  return NULL;
}

static void test_threads_borrow_the_same_buffer(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_buffer_t* buffer = test_upload(client, 0, 1);
  test_expect(client, buffer, 1, 1);
  void* contents = NULL;
  contents = look_at(client, buffer);
  lend_job_t jobs[4];
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) {
    jobs[i] = (lend_job_t){.client = client, .buffer = buffer, .contents = contents};
    assert_int_equal(pthread_create(&threads[i], NULL, lend_many_times, &jobs[i]), 0);
  }
  for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 4; ++i) assert_int_equal(jobs[i].failures, 0);
  jpp_client_buffer_destroy(client, buffer);
}

static void test_what_is_gone_can_not_be_lent(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD_DONATE);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* b = test_upload(client, 0, 2);
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, a, b, &sum));
  void* pointer = client;
  ASSERT_FAILS(jpp_client_buffer_lend(client, a, &pointer), JPP_DONATED_ERROR, "lend");
  assert_null(pointer);
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, b);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

// One buffer lends memory that another one borrows, as between two clients.
static void test_borrowed_memory_is_used_where_it_is(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* owner = test_upload(client, 0, 5);
  test_expect(client, owner, 5, 1);
  _Atomic uint32_t released = 0;
  jpp_buffer_t* view = test_borrow(client, owner, &released);
  test_expect(client, view, 5, 1);
  void *memory = NULL, *pointer = NULL;
  memory = look_at(client, owner);
  pointer = look_at(client, view);
  assert_ptr_equal(pointer, memory);
  jpp_buffer_t *sum = NULL, *copy = NULL;
  ASSERT_OK(test_execute(client, add, view, owner, &sum));
  // A copy to the buffer's own device too, for a caller that will overwrite it.
  for (uint32_t d = 0; d < 2; ++d) {
    ASSERT_OK(
        jpp_client_buffer_copy_to_device(client, view, test_device(client, d), &copy));
    test_expect(client, copy, 5, 1);
    pointer = look_at(client, copy);
    assert_ptr_not_equal(pointer, memory);
    jpp_client_buffer_destroy(client, copy);
  }
  test_expect(client, sum, 10, 2);
  assert_int_equal(released, 0);
  jpp_client_buffer_destroy(client, view);
  while (!released) usleep(100);
  assert_int_equal(released, 1);
  test_expect(client, owner, 5, 1);  // still belongs to the owner
  jpp_client_buffer_reclaim(client, owner);
  jpp_client_buffer_destroy(client, owner);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

static void never_release(void* memory, void* user) {
  (void)memory, (void)user;
  fail();
}

static void test_what_can_not_be_borrowed_is_refused(void** state) {
  jpp_client_t* client = client_of(state);
  float memory[4] = {0};
  int64_t dims[1] = {-1};
  jpp_foreign_memory_t foreign = {
      .memory = memory,
      .shape = {.dtype = JPP_DTYPE_F32, .rank = 1, .dims = dims},
      .release = never_release};
  jpp_buffer_t* view = (jpp_buffer_t*)client;
  ASSERT_FAILS(jpp_client_buffer_borrow(client, &foreign, &view), JPP_INVALID_ARGUMENT,
               "negative");
  assert_null(view);
  dims[0] = 4;
  foreign.device = jpp_client_info(client)->device_count;
  ASSERT_FAILS(jpp_client_buffer_borrow(client, &foreign, &view), JPP_DEVICES_ERROR,
               "device index");
  foreign.shape.dtype = JPP_DTYPE_INVALID;
  foreign.device = 0;
  ASSERT_FAILS(jpp_client_buffer_borrow(client, &foreign, &view), JPP_INVALID_ARGUMENT,
               "dtype");
}

static void test_read_into_too_little_room_fails(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_buffer_t* buffer = test_upload(client, 0, 1);
  float data[4];
  ASSERT_FAILS(jpp_client_buffer_read(client, buffer, data, 8), JPP_INVALID_ARGUMENT,
               "copy to host");
  jpp_client_buffer_destroy(client, buffer);
}

int main(int argc, char** argv) {
  const struct CMUnitTest tests[] = {
      ON_CLIENT(test_host_array_survives_the_round_trip),
      ON_CLIENT(test_scalar_and_empty_arrays),
      ON_CLIENT(test_byte_strides_are_followed),
      ON_CLIENT(test_lent_contents_stay_where_they_are),
      ON_CLIENT(test_threads_borrow_the_same_buffer),
      ON_CLIENT(test_what_is_gone_can_not_be_lent),
      ON_CLIENT(test_borrowed_memory_is_used_where_it_is),
      ON_CLIENT(test_what_can_not_be_borrowed_is_refused),
      ON_CLIENT(test_read_into_too_little_room_fails),
  };
  return conformance_run(argc, argv, "device buffers", tests,
                         sizeof(tests) / sizeof(*tests));
}
