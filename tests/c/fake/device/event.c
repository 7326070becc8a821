// Events of the fake device: handles to a completion, which they share with the task that
// sets it.
#include "fake/device/fake.h"

// Takes a reference, so that the caller may destroy the event in the meantime.
static jpp_status_t* event_retain_locked(jpp_event_t* event, const char* what,
                                         fake_completion_t** out_completion) {
  JPP_RETURN_IF_ERROR(fake_handle_check_locked(event, FAKE_EVENT, what));
  *out_completion = ((fake_handle_t*)event)->completion;
  ++(*out_completion)->refs;
  return NULL;
}

jpp_status_t* fake_event_await(jpp_client_t* base, jpp_event_t* event) {
  fake_client_t* client = fake_client(base);
  fake_completion_t* completion = NULL;
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = event_retain_locked(event, "await", &completion);
  if (!status) {
    while (!completion->done) pthread_cond_wait(&client->changed, &client->mutex);
    status = jpp_status_clone(completion->error);
    fake_completion_release_locked(completion);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

jpp_status_t* fake_event_is_ready(jpp_client_t* base, jpp_event_t* event,
                                  bool* out_ready) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = fake_handle_check_locked(event, FAKE_EVENT, "event state");
  if (!status) *out_ready = ((fake_handle_t*)event)->completion->done;
  pthread_mutex_unlock(&client->mutex);
  return status;
}

jpp_status_t* fake_event_on_ready(jpp_client_t* base, jpp_event_t* event,
                                  jpp_event_waiter_t* waiter) {
  fake_client_t* client = fake_client(base);
  jpp_status_t* told = NULL;
  bool done = false;
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = fake_handle_check_locked(event, FAKE_EVENT, "event callback");
  if (!status) {
    fake_completion_t* completion = ((fake_handle_t*)event)->completion;
    done = completion->done;
    if (done) {
      told = jpp_status_clone(completion->error);
    } else {
      waiter->next = completion->waiters;
      completion->waiters = waiter;
    }
  }
  pthread_mutex_unlock(&client->mutex);
  if (done) waiter->callback(waiter->user, told);
  return status;
}

void fake_event_destroy(jpp_client_t* base, jpp_event_t* event) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  fake_handle_destroy_locked(client, event);
  pthread_mutex_unlock(&client->mutex);
}
