// How the clients of a job find each other, like XLA's GPU clients: each puts its figures
// into the key-value store and waits for those of the others. The clients share memory
// afterwards, so they must be in one process.
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "fake/device/fake.h"

enum { kDefaultTimeoutMs = 60000 };

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static fake_job_t* g_jobs;  // guarded by g_mutex, as is the next variable
static uint64_t g_job_count;

// --- Jobs -----------------------------------------------------------------------------

static jpp_status_t* job_create(uint32_t num_nodes, fake_job_t** out_job) {
  fake_job_t* job = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*job), (void**)&job));
  job->num_nodes = num_nodes;
  job->refs = 1;
  pthread_mutex_init(&job->mutex, NULL);
  pthread_mutex_lock(&g_mutex);
  job->id = ++g_job_count;
  job->next = g_jobs;
  g_jobs = job;
  pthread_mutex_unlock(&g_mutex);
  *out_job = job;
  return NULL;
}

// Takes a reference; returns NULL if the job no longer exists.
static fake_job_t* job_find(uint64_t id) {
  pthread_mutex_lock(&g_mutex);
  fake_job_t* job = g_jobs;
  while (job && job->id != id) job = job->next;
  if (job) ++job->refs;
  pthread_mutex_unlock(&g_mutex);
  return job;
}

static void job_release(fake_job_t* job) {
  pthread_mutex_lock(&g_mutex);
  bool last = --job->refs == 0;
  fake_job_t** link = &g_jobs;
  while (last && *link != job) link = &(*link)->next;
  if (last) *link = job->next;
  pthread_mutex_unlock(&g_mutex);
  if (!last) return;
  while (job->open) {
    fake_rendezvous_t* rendezvous = job->open;
    job->open = rendezvous->next;
    fake_rendezvous_destroy(rendezvous);
  }
  pthread_mutex_destroy(&job->mutex);
  jpp_free(job);
}

// --- The store ------------------------------------------------------------------------

static jpp_status_t* put_number(const fake_client_t* client, const char* key,
                                uint64_t number) {
  const jpp_key_value_store_t* store = client->options.store;
  char text[32];
  int size = snprintf(text, sizeof(text), "%llu", (unsigned long long)number);
  JPP_RETURN_IF_ERROR_IN(store->put(store->user, key, text, (size_t)size), "fake: put");
  return NULL;
}

static bool parse_number(const char* bytes, size_t size, uint64_t most,
                         uint64_t* out_number) {
  uint64_t number = 0;
  for (size_t i = 0; i < size; ++i) {
    if (bytes[i] < '0' || bytes[i] > '9' || number > most) return false;
    number = number * 10 + (uint64_t)(bytes[i] - '0');
  }
  *out_number = number;
  return size > 0 && number > 0 && number <= most;
}

// Reads a number from 1 to `most` that a node has put.
static jpp_status_t* get_number(const fake_client_t* client, uint32_t node,
                                const char* key, uint64_t most, uint64_t* out_number) {
  const jpp_key_value_store_t* store = client->options.store;
  uint32_t timeout_ms = client->options.node_timeout_ms;
  if (!timeout_ms) timeout_ms = kDefaultTimeoutMs;
  void* value = NULL;
  size_t size = 0;
  JPP_RETURN_IF_ERROR_IN(store->get(store->user, key, timeout_ms, &value, &size),
                         "fake: node %u waited for node %u", client->options.node_id,
                         node);
  if (!value) {
    return jpp_status_make(JPP_PEER_ERROR,
                           "fake: node %u waited %u ms for node %u of %u, which has not "
                           "put %s; expected every node to make its client",
                           client->options.node_id, timeout_ms, node,
                           client->options.num_nodes, key);
  }
  bool good = parse_number(value, size, most, out_number);
  jpp_free(value);
  if (good) return NULL;
  return jpp_status_make(JPP_PEER_ERROR,
                         "fake: node %u: expected %s of node %u to be a number from 1 to "
                         "%llu, found %zu bytes that are something else",
                         client->options.node_id, key, node, (unsigned long long)most,
                         size);
}

// --- Meeting --------------------------------------------------------------------------

static jpp_status_t* join_job(fake_client_t* client) {
  const jpp_fake_options_t* options = &client->options;
  uint64_t id = 0;
  if (options->node_id == 0) {
    JPP_RETURN_IF_ERROR(job_create(options->num_nodes, &client->job));
    return options->num_nodes == 1 ? NULL
                                   : put_number(client, "fake/job", client->job->id);
  }
  JPP_RETURN_IF_ERROR(get_number(client, 0, "fake/job", UINT64_MAX / 16, &id));
  client->job = job_find(id);
  if (client->job && client->job->num_nodes == options->num_nodes) return NULL;
  return jpp_status_make(
      JPP_PEER_ERROR,
      "fake: node %u of %u: expected node 0 to be a client of this process that has as "
      "many nodes, found %s",
      options->node_id, options->num_nodes, client->job ? "one of others" : "none");
}

static jpp_status_t* exchange_counts(fake_client_t* client, uint32_t* counts) {
  const jpp_fake_options_t* options = &client->options;
  char key[48];
  snprintf(key, sizeof(key), "fake/devices/%u", options->node_id);
  if (options->num_nodes > 1) {
    JPP_RETURN_IF_ERROR(put_number(client, key, options->device_count));
  }
  for (uint32_t node = 0; node < options->num_nodes; ++node) {
    uint64_t count = options->device_count;
    if (node != options->node_id) {
      snprintf(key, sizeof(key), "fake/devices/%u", node);
      JPP_RETURN_IF_ERROR(get_number(client, node, key, JPP_FAKE_MAX_DEVICES, &count));
    }
    counts[node] = (uint32_t)count;
  }
  return NULL;
}

// The client's own devices come first, then the others in order.
static jpp_status_t* fill_devices(fake_client_t* client, const uint32_t* counts) {
  const jpp_fake_options_t* options = &client->options;
  uint32_t total = 0, others = options->device_count;
  for (uint32_t node = 0; node < options->num_nodes; ++node) {
    if (node == options->node_id) client->first_id = total;
    total += counts[node];
  }
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(total, &client->global_devices));
  int32_t id = 0;
  for (uint32_t node = 0; node < options->num_nodes; ++node) {
    for (uint32_t i = 0; i < counts[node]; ++i, ++id) {
      bool own = node == options->node_id;
      if (own)
        client->devices[i] =
            (jpp_device_info_t){.id = id, .kind = "fake", .hardware_id = (int32_t)i};
      client->global_devices[own ? i : others++] =
          (jpp_global_device_t){.id = id, .node = node, .kind = "fake"};
    }
  }
  client->base.info.global_devices = client->global_devices;
  client->base.info.global_device_count = total;
  return NULL;
}

jpp_status_t* fake_nodes_join(fake_client_t* client) {
  uint32_t counts[JPP_FAKE_MAX_NODES];
  JPP_RETURN_IF_ERROR(join_job(client));
  JPP_RETURN_IF_ERROR(exchange_counts(client, counts));
  return fill_devices(client, counts);
}

void fake_nodes_leave(fake_client_t* client) {
  if (!client->job) return;
  pthread_mutex_lock(&client->job->mutex);
  client->job->left[client->options.node_id] = true;
  pthread_mutex_unlock(&client->job->mutex);
  fake_rendezvous_abandon(client);
}

void fake_nodes_release(fake_client_t* client) {
  if (client->job) job_release(client->job);
  while (client->cliques) {
    fake_clique_t* clique = client->cliques;
    client->cliques = clique->next;
    jpp_free(clique);
  }
  jpp_free(client->global_devices);
}
