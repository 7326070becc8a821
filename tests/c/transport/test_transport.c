// The conformance suite of transports, run on every driver that moves messages, and what
// is particular to the list of drivers.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>

#include "base/alloc.h"
#include "jaxpp/transport.h"
#include "test_util.h"

typedef struct fixture {
  jpp_transport_t* transport;
  jpp_channel_t* channel;
  uint32_t released;
  uintptr_t released_sum;
} fixture_t;

static jpp_status_t* create_transport(const char* driver,
                                      jpp_transport_t** out_transport) {
  jpp_transport_options_t options = {.struct_size = sizeof(options), .driver = driver};
  return jpp_transport_create(&options, out_transport);
}

static void count_release(void* user, void* buffer) {
  fixture_t* fixture = user;
  ++fixture->released;
  fixture->released_sum += (uintptr_t)buffer;
}

static void fixture_open(fixture_t* fixture, uint32_t slots, uint32_t capacity) {
  *fixture = (fixture_t){0};
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .src_actor = 1,
                             .dst_actor = 2,
                             .slots = slots,
                             .capacity = capacity,
                             .release = count_release,
                             .user = fixture};
  ASSERT_OK(create_transport("inproc", &fixture->transport));
  ASSERT_OK(jpp_transport_open_channel(fixture->transport, &spec, &fixture->channel));
}

static void fixture_close(fixture_t* fixture) {
  jpp_channel_close(fixture->channel);
  jpp_transport_destroy(fixture->transport);
}

static bool send_number(jpp_channel_t* channel, uintptr_t number, uint32_t count) {
  void* buffers[4] = {(void*)number, (void*)(number + 1), (void*)(number + 2), NULL};
  jpp_message_t message = {.buffers = buffers, .count = count, .tag = number * 10};
  bool done = false;
  ASSERT_OK(jpp_channel_try_send(channel, &message, &done));
  return done;
}

static bool recv_number(jpp_channel_t* channel, uintptr_t expected, uint32_t count) {
  void* buffers[4] = {0};
  jpp_message_t message = {.buffers = buffers};
  bool done = false;
  ASSERT_OK(jpp_channel_try_recv(channel, &message, &done));
  if (!done) return false;
  assert_int_equal(message.tag, expected * 10);
  assert_int_equal(message.count, count);
  for (uint32_t i = 0; i < count; ++i) {
    assert_int_equal((uintptr_t)buffers[i], expected + i);
  }
  return true;
}

static void test_messages_come_in_order_up_to_the_slots(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 3, 2);
  assert_false(recv_number(fixture.channel, 0, 0));
  for (uintptr_t round = 0; round < 5; ++round) {
    for (uintptr_t i = 0; i < 3; ++i) assert_true(send_number(fixture.channel, i, 2));
    assert_false(send_number(fixture.channel, 9, 2));
    assert_true(recv_number(fixture.channel, 0, 2));
    assert_true(send_number(fixture.channel, 3, 1));
    assert_true(recv_number(fixture.channel, 1, 2));
    assert_true(recv_number(fixture.channel, 2, 2));
    assert_true(recv_number(fixture.channel, 3, 1));
    assert_false(recv_number(fixture.channel, 0, 0));
  }
  fixture_close(&fixture);
  assert_int_equal(fixture.released, 0);
}

static void test_message_without_buffers_carries_its_tag(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 1, 1);
  assert_true(send_number(fixture.channel, 7, 0));
  assert_true(recv_number(fixture.channel, 7, 0));
  fixture_close(&fixture);
}

static void test_too_many_buffers_are_refused(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 1, 1);
  void* buffers[2] = {NULL, NULL};
  jpp_message_t message = {.buffers = buffers, .count = 2, .tag = 5};
  bool done = true;
  ASSERT_FAILS(jpp_channel_try_send(fixture.channel, &message, &done),
               JPP_INVALID_ARGUMENT,
               "channel from actor 1 to 2: expected 1 buffers at most, found 2");
  assert_false(done);
  fixture_close(&fixture);
}

static void test_abort_reaches_both_ends_and_the_first_one_stays(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 2, 1);
  assert_true(send_number(fixture.channel, 1, 1));
  jpp_status_t* first = jpp_status_make(JPP_EXECUTION_ERROR, "actor 1 failed");
  jpp_status_t* second = jpp_status_make(JPP_CANCELLED, "stopped");
  jpp_channel_abort(fixture.channel, first);
  jpp_channel_abort(fixture.channel, second);
  jpp_status_free(first);
  jpp_status_free(second);
  void* buffers[1] = {NULL};
  jpp_message_t message = {.buffers = buffers};
  bool done = false;
  for (int i = 0; i < 2; ++i) {
    ASSERT_FAILS(jpp_channel_try_send(fixture.channel, &message, &done),
                 JPP_EXECUTION_ERROR, "actor 1 failed");
    ASSERT_FAILS(jpp_channel_try_recv(fixture.channel, &message, &done),
                 JPP_EXECUTION_ERROR, "actor 1 failed");
    assert_false(done);
  }
  fixture_close(&fixture);
  assert_int_equal(fixture.released, 1);
}

// The receiver has not looked since the messages were sent.
static void test_reset_leaves_nothing_to_receive(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 3, 1);
  assert_true(send_number(fixture.channel, 10, 1));
  assert_true(send_number(fixture.channel, 20, 1));
  jpp_channel_reset(fixture.channel);
  assert_false(recv_number(fixture.channel, 10, 1));
  assert_true(send_number(fixture.channel, 30, 1));
  assert_true(recv_number(fixture.channel, 30, 1));
  assert_false(recv_number(fixture.channel, 30, 1));
  fixture_close(&fixture);
  assert_int_equal(fixture.released, 2);
}

static void test_reset_releases_what_waits_and_clears_the_abort(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 3, 3);
  assert_true(send_number(fixture.channel, 10, 1));
  assert_true(recv_number(fixture.channel, 10, 1));
  assert_true(send_number(fixture.channel, 20, 2));
  assert_true(send_number(fixture.channel, 30, 3));
  jpp_status_t* status = jpp_status_make(JPP_CANCELLED, "stopped");
  jpp_channel_abort(fixture.channel, status);
  jpp_status_free(status);
  jpp_channel_reset(fixture.channel);
  assert_int_equal(fixture.released, 5);
  assert_int_equal(fixture.released_sum, 20 + 21 + 30 + 31 + 32);
  for (uintptr_t i = 0; i < 3; ++i) assert_true(send_number(fixture.channel, i, 1));
  assert_false(send_number(fixture.channel, 3, 1));
  for (uintptr_t i = 0; i < 3; ++i) assert_true(recv_number(fixture.channel, i, 1));
  assert_true(send_number(fixture.channel, 40, 1));
  fixture_close(&fixture);
  assert_int_equal(fixture.released, 6);
}

#define THREAD_MESSAGES 20000

static void* send_all(void* user) {
  for (uintptr_t i = 0; i < THREAD_MESSAGES; ++i) {
    while (!send_number(user, i, i % 4)) sched_yield();
  }
  return NULL;
}

static void test_two_threads_lose_and_reorder_nothing(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 5, 4);
  pthread_t sender;
  assert_int_equal(pthread_create(&sender, NULL, send_all, fixture.channel), 0);
  for (uintptr_t i = 0; i < THREAD_MESSAGES; ++i) {
    while (!recv_number(fixture.channel, i, i % 4)) sched_yield();
  }
  pthread_join(sender, NULL);
  fixture_close(&fixture);
  assert_int_equal(fixture.released, 0);
}

typedef struct until_abort {
  jpp_channel_t* channel;
  jpp_status_t* status;
} until_abort_t;

static void* recv_until_abort(void* user) {
  until_abort_t* end = user;
  void* buffers[4];
  jpp_message_t message = {.buffers = buffers};
  bool done = false;
  while (!end->status) {
    end->status = jpp_channel_try_recv(end->channel, &message, &done);
    sched_yield();
  }
  return NULL;
}

static void test_abort_from_a_third_thread_ends_a_waiting_receiver(void** state) {
  (void)state;
  fixture_t fixture;
  fixture_open(&fixture, 1, 4);
  until_abort_t end = {.channel = fixture.channel};
  pthread_t receiver;
  assert_int_equal(pthread_create(&receiver, NULL, recv_until_abort, &end), 0);
  jpp_status_t* status = jpp_status_make(JPP_CANCELLED, "stopped by a third");
  jpp_channel_abort(fixture.channel, status);
  jpp_status_free(status);
  pthread_join(receiver, NULL);
  ASSERT_FAILS(end.status, JPP_CANCELLED, "stopped by a third");
  fixture_close(&fixture);
}

static void test_open_survives_every_failed_allocation(void** state) {
  (void)state;
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec), .slots = 2, .capacity = 2};
  for (int64_t n = 0;; ++n) {
    jpp_transport_t* transport = NULL;
    jpp_channel_t* channel = NULL;
    jpp__alloc_fail_after(n);
    jpp_status_t* status = create_transport("inproc", &transport);
    if (!status) status = jpp_transport_open_channel(transport, &spec, &channel);
    jpp__alloc_fail_after(-1);
    jpp_channel_close(channel);
    jpp_transport_destroy(transport);
    if (!status) break;
    ASSERT_FAILS(status, JPP_OUT_OF_MEMORY, "host memory");
  }
}

static void test_channel_without_slots_is_refused(void** state) {
  (void)state;
  jpp_transport_t* transport = NULL;
  jpp_channel_t* channel = NULL;
  jpp_channel_spec_t spec = {
      .struct_size = sizeof(spec), .src_actor = 3, .dst_actor = 4, .capacity = 1};
  ASSERT_OK(create_transport("inproc", &transport));
  ASSERT_FAILS(jpp_transport_open_channel(transport, &spec, &channel),
               JPP_INVALID_ARGUMENT, "channel from actor 3 to 4: expected at least 1");
  assert_null(channel);
  jpp_transport_destroy(transport);
}

static void test_drivers_are_listed_and_found_by_name(void** state) {
  (void)state;
  jpp_transport_t* transport = NULL;
  ASSERT_FAILS(create_transport("carrier-pigeon", &transport), JPP_INVALID_ARGUMENT,
               "expected transport inproc or ucx or nccl, found 'carrier-pigeon'");
  assert_null(transport);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_drivers_are_listed_and_found_by_name),
      cmocka_unit_test(test_messages_come_in_order_up_to_the_slots),
      cmocka_unit_test(test_message_without_buffers_carries_its_tag),
      cmocka_unit_test(test_too_many_buffers_are_refused),
      cmocka_unit_test(test_abort_reaches_both_ends_and_the_first_one_stays),
      cmocka_unit_test(test_reset_leaves_nothing_to_receive),
      cmocka_unit_test(test_reset_releases_what_waits_and_clears_the_abort),
      cmocka_unit_test(test_two_threads_lose_and_reorder_nothing),
      cmocka_unit_test(test_abort_from_a_third_thread_ends_a_waiting_receiver),
      cmocka_unit_test(test_open_survives_every_failed_allocation),
      cmocka_unit_test(test_channel_without_slots_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
