// The fake's collective: the partitions of one execution meet, on whatever nodes they
// are, and the last one to come computes the results of all. No thread waits at a
// rendezvous: a task that comes early stays until another one completes it.
//
// Each node counts its executions over the same devices, so the n-th of one node meets
// the n-th of the others; if their programs differ, all of them fail.
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "fake/device/fake.h"

static int compare_ids(const void* a, const void* b) {
  uint32_t x = *(const uint32_t*)a, y = *(const uint32_t*)b;
  return (x > y) - (x < y);
}

static bool ids_equal(const uint32_t* a, uint32_t a_count, const uint32_t* b,
                      uint32_t b_count) {
  return a_count == b_count && memcmp(a, b, a_count * sizeof(*a)) == 0;
}

// --- Joining --------------------------------------------------------------------------

static jpp_status_t* clique_of(fake_client_t* client, const fake_program_t* program,
                               fake_clique_t** out_clique) {
  uint32_t count = program->device_count;
  fake_clique_t* clique = NULL;
  size_t size = sizeof(*clique) + count * sizeof(clique->devices[0]);
  JPP_RETURN_IF_ERROR(jpp_alloc(size, (void**)&clique));
  clique->device_count = count;
  memcpy(clique->devices, program->devices, count * sizeof(clique->devices[0]));
  qsort(clique->devices, count, sizeof(clique->devices[0]), compare_ids);
  for (fake_clique_t* known = client->cliques; known; known = known->next) {
    if (!ids_equal(known->devices, known->device_count, clique->devices, count)) continue;
    jpp_free(clique);
    *out_clique = known;
    return NULL;
  }
  clique->next = client->cliques;
  client->cliques = clique;
  *out_clique = clique;
  return NULL;
}

static jpp_status_t* rendezvous_create(const fake_clique_t* clique,
                                       fake_rendezvous_t** out_rendezvous) {
  uint32_t count = clique->device_count;
  fake_rendezvous_t* rendezvous = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*rendezvous), (void**)&rendezvous));
  jpp_status_t* status = JPP_ALLOC_ARRAY(count, &rendezvous->devices);
  if (!status) status = JPP_ALLOC_ARRAY(count, &rendezvous->tasks);
  if (!status) status = JPP_ALLOC_ARRAY(count, &rendezvous->args);
  if (status) {
    fake_rendezvous_destroy(rendezvous);
    return status;
  }
  rendezvous->device_count = count;
  rendezvous->number = clique->executions;
  memcpy(rendezvous->devices, clique->devices, count * sizeof(clique->devices[0]));
  *out_rendezvous = rendezvous;
  return NULL;
}

void fake_rendezvous_destroy(fake_rendezvous_t* rendezvous) {
  jpp_free(rendezvous->devices);
  jpp_free(rendezvous->tasks);
  jpp_free(rendezvous->args);
  jpp_status_free(rendezvous->error);
  jpp_free(rendezvous);
}

// Returns the error that keeps the client's execution from meeting the others, or NULL.
static jpp_status_t* check_others(const fake_client_t* client,
                                  const fake_rendezvous_t* rendezvous,
                                  const fake_program_t* program) {
  if (rendezvous->program != program->identity) {
    return jpp_status_make(
        JPP_EXECUTION_ERROR,
        "execute: execution %llu over %u devices is of one program on node %u and of "
        "another one on node %u; expected all nodes to execute the same programs in the "
        "same order",
        (unsigned long long)rendezvous->number, rendezvous->device_count,
        rendezvous->node, client->options.node_id);
  }
  const jpp_client_info_t* info = &client->base.info;
  for (uint32_t i = 0; i < info->global_device_count; ++i) {
    const jpp_global_device_t* device = &info->global_devices[i];
    uint32_t id = (uint32_t)device->id;
    if (!client->job->left[device->node]) continue;
    if (!bsearch(&id, rendezvous->devices, rendezvous->device_count, sizeof(id),
                 compare_ids)) {
      continue;
    }
    return jpp_status_make(JPP_PEER_ERROR,
                           "execute: node %u, whose device %u takes part, has destroyed "
                           "its client",
                           device->node, id);
  }
  return NULL;
}

// Requires the job's mutex.
static jpp_status_t* find_or_open(fake_client_t* client, const fake_clique_t* clique,
                                  const fake_program_t* program,
                                  fake_rendezvous_t** out_rendezvous) {
  fake_rendezvous_t* rendezvous = client->job->open;
  while (rendezvous && !(rendezvous->number == clique->executions &&
                         ids_equal(rendezvous->devices, rendezvous->device_count,
                                   clique->devices, clique->device_count))) {
    rendezvous = rendezvous->next;
  }
  if (!rendezvous) {
    JPP_RETURN_IF_ERROR(rendezvous_create(clique, &rendezvous));
    rendezvous->program = program->identity;
    rendezvous->node = client->options.node_id;
    rendezvous->next = client->job->open;
    client->job->open = rendezvous;
  }
  if (!rendezvous->error) rendezvous->error = check_others(client, rendezvous, program);
  *out_rendezvous = rendezvous;
  return NULL;
}

jpp_status_t* fake_rendezvous_join_locked(fake_client_t* client, fake_task_t* tasks) {
  const fake_program_t* program = tasks->program;
  fake_clique_t* clique = NULL;
  fake_rendezvous_t* rendezvous = NULL;
  JPP_RETURN_IF_ERROR(clique_of(client, program, &clique));
  pthread_mutex_lock(&client->job->mutex);
  jpp_status_t* status = find_or_open(client, clique, program, &rendezvous);
  pthread_mutex_unlock(&client->job->mutex);
  if (status) return status;
  ++clique->executions;
  for (fake_task_t* task = tasks; task; task = task->next) {
    task->rendezvous = rendezvous;
    ++client->meeting;
  }
  return NULL;
}

// --- Meeting --------------------------------------------------------------------------

static fake_task_t** place_of(const fake_rendezvous_t* rendezvous, uint32_t id) {
  const uint32_t* found = bsearch(&id, rendezvous->devices, rendezvous->device_count,
                                  sizeof(id), compare_ids);
  return &rendezvous->tasks[found - rendezvous->devices];
}

// Computes the results of one partition; `args` holds the arguments of all partitions.
static void compute_results(const fake_task_t* task, fake_value_t* const* const* args) {
  const fake_program_t* program = task->program;
  task->run(task);
  for (uint32_t k = 0; k < program->result_count; ++k) {
    const fake_result_t* result = &program->results[k];
    if (!fake_op_is_collective(result->op)) continue;
    fake_collective_compute(result, program->device_count, args,
                            task->values[task->input_count + k]);
  }
}

// All tasks have come.
static void complete_all(const fake_rendezvous_t* rendezvous) {
  uint32_t count = rendezvous->device_count;
  const fake_program_t* program = rendezvous->tasks[0]->program;
  for (uint32_t p = 0; p < count; ++p) {
    rendezvous->args[p] = (*place_of(rendezvous, program->devices[p]))->values;
  }
  for (uint32_t i = 0; i < count; ++i) {
    compute_results(rendezvous->tasks[i], rendezvous->args);
  }
  for (uint32_t i = 0; i < count; ++i) fake_task_complete(rendezvous->tasks[i], NULL);
}

// Takes the tasks that have come, as a list. Requires the job's mutex.
static fake_task_t* take_tasks(fake_rendezvous_t* rendezvous) {
  fake_task_t* tasks = NULL;
  for (uint32_t i = 0; i < rendezvous->device_count; ++i) {
    fake_task_t* task = rendezvous->tasks[i];
    if (!task) continue;
    rendezvous->tasks[i] = NULL;
    task->next = tasks;
    tasks = task;
  }
  return tasks;
}

// Takes ownership of the tasks.
static void fail_tasks(fake_task_t* tasks, const jpp_status_t* error) {
  while (tasks) {
    fake_task_t* next = tasks->next;
    tasks->next = NULL;
    fake_task_complete(tasks, jpp_status_clone(error));
    tasks = next;
  }
}

// Requires the job's mutex.
static void close_rendezvous(fake_job_t* job, const fake_rendezvous_t* rendezvous) {
  fake_rendezvous_t** link = &job->open;
  while (*link != rendezvous) link = &(*link)->next;
  *link = rendezvous->next;
}

void fake_rendezvous_arrive(fake_task_t* task, jpp_status_t* error) {
  fake_rendezvous_t* rendezvous = task->rendezvous;
  fake_job_t* job = task->client->job;
  error = jpp_status_annotate(error, "device %u of node %u", task->device_id,
                              task->client->options.node_id);
  pthread_mutex_lock(&job->mutex);
  if (rendezvous->error) {
    jpp_status_free(error);
  } else {
    rendezvous->error = error;
  }
  *place_of(rendezvous, task->device_id) = task;
  bool all = ++rendezvous->arrived == rendezvous->device_count;
  if (all) close_rendezvous(job, rendezvous);
  jpp_status_t* failed = jpp_status_clone(rendezvous->error);
  fake_task_t* tasks = failed ? take_tasks(rendezvous) : NULL;
  pthread_mutex_unlock(&job->mutex);
  fail_tasks(tasks, failed);
  if (all && !failed) complete_all(rendezvous);
  if (all) fake_rendezvous_destroy(rendezvous);
  jpp_status_free(failed);
}

// True if the client's devices take part, and others as well.
static bool needs_node(const fake_rendezvous_t* rendezvous, const fake_client_t* client) {
  uint32_t own = 0;
  for (uint32_t i = 0; i < rendezvous->device_count; ++i) {
    // Smaller ids wrap around.
    own += rendezvous->devices[i] - client->first_id < client->options.device_count;
  }
  return own > 0 && own < rendezvous->device_count;
}

void fake_rendezvous_abandon(fake_client_t* client) {
  fake_job_t* job = client->job;
  fake_task_t* tasks = NULL;
  jpp_status_t* error =
      jpp_status_make(JPP_PEER_ERROR, "execute: node %u has destroyed its client",
                      client->options.node_id);
  pthread_mutex_lock(&job->mutex);
  for (fake_rendezvous_t* open = job->open; open; open = open->next) {
    if (open->error || !needs_node(open, client)) continue;
    open->error = jpp_status_clone(error);
    fake_task_t** last = &tasks;
    while (*last) last = &(*last)->next;
    *last = take_tasks(open);
  }
  pthread_mutex_unlock(&job->mutex);
  fail_tasks(tasks, error);
  jpp_status_free(error);
}
