// The fake device's task queue and its worker threads. A worker takes the oldest task
// whose inputs are done; tasks are queued in call order, so the oldest one can run,
// unless it waits for a task that waits for other nodes.
#include <time.h>

#include "fake/device/fake.h"

jpp_status_t* fake_task_create(uint32_t input_count, uint32_t output_count,
                               fake_task_t** out_task) {
  size_t values = (size_t)input_count + output_count;
  fake_task_t* task = NULL;
  *out_task = NULL;
  JPP_RETURN_IF_ERROR(
      jpp_alloc(sizeof(*task) + values * sizeof(task->values[0]), (void**)&task));
  jpp_status_t* status = fake_completion_create(&task->completion);
  if (status) {
    jpp_free(task);
    return status;
  }
  task->input_count = input_count;
  task->output_count = output_count;
  *out_task = task;
  return NULL;
}

void fake_task_discard_locked(fake_task_t* task) {
  if (!task) return;
  for (uint32_t i = 0; i < task->input_count + task->output_count; ++i) {
    fake_value_release_locked(task->values[i]);
  }
  fake_completion_release_locked(task->completion);
  jpp_status_free(task->failure);
  jpp_free(task);
}

// Returns the error that keeps the task from running. Its inputs are done, so their
// errors no longer change.
static jpp_status_t* task_check(const fake_task_t* task) {
  if (task->failure) return jpp_status_clone(task->failure);
  for (uint32_t i = 0; i < task->input_count; ++i) {
    const jpp_status_t* error = task->values[i]->completion->error;
    if (error) return jpp_status_clone(error);
  }
  return NULL;
}

// Takes ownership of the task.
static void task_run(fake_task_t* task) {
  jpp_status_t* error = task_check(task);
  if ((!error || task->failure) && task->latency_us) {
    struct timespec latency = {.tv_sec = task->latency_us / 1000000,
                               .tv_nsec = (long)(task->latency_us % 1000000) * 1000};
    nanosleep(&latency, NULL);
  }
  if (task->rendezvous) {
    fake_rendezvous_arrive(task, error);
    return;
  }
  if (!error) task->run(task);
  fake_task_complete(task, error);
}

static bool task_can_run_locked(const fake_task_t* task) {
  for (uint32_t i = 0; i < task->input_count; ++i) {
    if (!task->values[i]->completion->done) return false;
  }
  return true;
}

static fake_task_t* queue_take_locked(fake_client_t* client) {
  fake_task_t* previous = NULL;
  for (fake_task_t* task = client->first_task; task; task = task->next) {
    if (task_can_run_locked(task)) {
      if (previous) {
        previous->next = task->next;
      } else {
        client->first_task = task->next;
      }
      if (client->last_task == task) client->last_task = previous;
      task->next = NULL;
      return task;
    }
    previous = task;
  }
  return NULL;
}

// Runs every task that is ready; for clients without workers.
static void queue_drain(fake_client_t* client) {
  for (;;) {
    pthread_mutex_lock(&client->mutex);
    fake_task_t* task = queue_take_locked(client);
    pthread_mutex_unlock(&client->mutex);
    if (!task) return;
    task_run(task);
  }
}

void fake_task_complete(fake_task_t* task, jpp_status_t* error) {
  fake_client_t* client = task->client;
  bool has_met = task->rendezvous != NULL;
  jpp_status_t* told = jpp_status_clone(error);
  pthread_mutex_lock(&client->mutex);
  jpp_event_waiter_t* waiter = task->completion->waiters;
  task->completion->waiters = NULL;
  task->completion->error = error;
  task->completion->done = true;
  fake_task_discard_locked(task);
  pthread_cond_broadcast(&client->changed);
  pthread_mutex_unlock(&client->mutex);
  while (waiter) {
    jpp_event_waiter_t* next = waiter->next;
    waiter->callback(waiter->user, jpp_status_clone(told));
    waiter = next;
  }
  jpp_status_free(told);
  if (!has_met) return;
  // The client lives until this thread, which may belong to another client, is done with
  // it.
  if (!client->options.threads) queue_drain(client);
  pthread_mutex_lock(&client->mutex);
  --client->meeting;
  pthread_cond_broadcast(&client->changed);
  pthread_mutex_unlock(&client->mutex);
}

void fake_task_submit(fake_client_t* client, fake_task_t* task) {
  task->client = client;
  pthread_mutex_lock(&client->mutex);
  if (client->last_task) {
    client->last_task->next = task;
  } else {
    client->first_task = task;
  }
  client->last_task = task;
  pthread_cond_broadcast(&client->changed);
  pthread_mutex_unlock(&client->mutex);
  if (!client->options.threads) queue_drain(client);
}

static void* worker_main(void* user) {
  fake_client_t* client = user;
  pthread_mutex_lock(&client->mutex);
  while (client->first_task || !client->stopping) {
    bool held = client->held && !client->stopping;
    fake_task_t* task = held ? NULL : queue_take_locked(client);
    if (!task) {
      pthread_cond_wait(&client->changed, &client->mutex);
      continue;
    }
    pthread_mutex_unlock(&client->mutex);
    task_run(task);
    pthread_mutex_lock(&client->mutex);
  }
  pthread_mutex_unlock(&client->mutex);
  return NULL;
}

jpp_status_t* fake_workers_start(fake_client_t* client) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(client->options.threads, &client->threads));
  for (uint32_t i = 0; i < client->options.threads; ++i) {
    int error = pthread_create(&client->threads[i], NULL, worker_main, client);
    if (error) {
      return jpp_status_make(JPP_OUT_OF_MEMORY, "worker %u of the fake: error %d", i,
                             error);
    }
    ++client->thread_count;
  }
  return NULL;
}

void fake_workers_stop(fake_client_t* client) {
  pthread_mutex_lock(&client->mutex);
  client->stopping = true;
  pthread_cond_broadcast(&client->changed);
  pthread_mutex_unlock(&client->mutex);
  for (uint32_t i = 0; i < client->thread_count; ++i) {
    pthread_join(client->threads[i], NULL);
  }
  pthread_mutex_lock(&client->mutex);
  while (client->meeting) pthread_cond_wait(&client->changed, &client->mutex);
  pthread_mutex_unlock(&client->mutex);
}
