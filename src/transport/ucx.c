// The driver for UCX: packets are active messages of one worker. Small data travel with
// their packet and are copied into the slot. Large data are announced, and UCX fetches
// them from the sender's memory into the slot over the fastest route that both processes
// support: shared memory, RDMA or TCP.
//
// Endpoints are created in the error mode in which UCX reports dead peers. UCX notices
// them by the lost connection and by periodic keepalive requests.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/str.h"
#include "transport/net.h"
#include "transport/ucx_library.h"

enum {
  kPacketId = 1,         // the id of our active messages
  kLeastFetched = 8192,  // larger data are announced, because they need several packets
};

typedef struct ucx_transport {
  jpp_net_t net;
  const jpp_ucx_t* ucx;
  ucp_context_h context;
  ucp_worker_h worker;
  uint32_t closing;  // endpoints
} ucx_transport_t;

struct jpp_transport_memory {
  ucp_mem_h handle;
};

static ucx_transport_t* transport_of(jpp_net_t* net) { return (ucx_transport_t*)net; }

// --- Packets --------------------------------------------------------------------------

static void ucx_sent(void* request, ucs_status_t status, void* user) {
  jpp_net_op_t* op = user;
  const jpp_ucx_t* ucx = transport_of(op->peer->net)->ucx;
  ucx->ucp_request_free(request);
  if (status != UCS_OK) {
    jpp__net_peer_failed(op->peer, "a send failed: %s", ucx->ucs_status_string(status));
  }
  jpp__net_op_done(op);
}

static bool ucx_send(jpp_net_t* net, jpp_net_op_t* op, const void* data, size_t size,
                     const jpp_transport_memory_t* memory) {
  const ucx_transport_t* transport = transport_of(net);
  if (op->peer->status) return true;
  bool fetched = op->packet.kind == JPP_PACKET_DATA && size >= kLeastFetched;
  ucp_request_param_t param = {
      .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
                      UCP_OP_ATTR_FIELD_FLAGS | (memory ? UCP_OP_ATTR_FIELD_MEMH : 0),
      .flags = fetched ? UCP_AM_SEND_FLAG_RNDV : UCP_AM_SEND_FLAG_EAGER,
      .cb.send = ucx_sent,
      .user_data = op,
      .memh = memory ? memory->handle : NULL};
  ucs_status_ptr_t request = transport->ucx->ucp_am_send_nbx(
      op->peer->endpoint, kPacketId, &op->packet, sizeof(op->packet), data, size, &param);
  if (!UCS_PTR_IS_ERR(request)) return request == NULL;
  jpp__net_peer_failed(op->peer, "a send failed: %s",
                       transport->ucx->ucs_status_string(UCS_PTR_STATUS(request)));
  return true;
}

static void ucx_fetched(void* request, ucs_status_t status, size_t size, void* shard) {
  (void)size;
  jpp_net_peer_t* peer = jpp__net_shard_peer(shard);
  const jpp_ucx_t* ucx = transport_of(peer->net)->ucx;
  ucx->ucp_request_free(request);
  if (status != UCS_OK) {
    jpp__net_peer_failed(peer, "a receive failed: %s", ucx->ucs_status_string(status));
  }
  jpp__net_received(shard, status == UCS_OK);
}

static ucs_status_t ucx_fetch(const ucx_transport_t* transport, void* announced,
                              size_t size, const jpp_net_place_t* place) {
  const jpp_ucx_t* ucx = transport->ucx;
  ucp_request_param_t param = {
      .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
      .cb.recv_am = ucx_fetched,
      .user_data = place->shard};
  ucs_status_ptr_t request =
      ucx->ucp_am_recv_data_nbx(transport->worker, announced, place->data, size, &param);
  if (UCS_PTR_IS_ERR(request)) {
    jpp__net_peer_failed(jpp__net_shard_peer(place->shard), "a receive failed: %s",
                         ucx->ucs_status_string(UCS_PTR_STATUS(request)));
  }
  if (!UCS_PTR_IS_PTR(request)) jpp__net_received(place->shard, request == NULL);
  return UCS_INPROGRESS;  // UCX frees what it announced
}

// Called by ucp_worker_progress().
static ucs_status_t ucx_arrived(void* user, const void* head, size_t head_size,
                                void* data, size_t size,
                                const ucp_am_recv_param_t* param) {
  ucx_transport_t* transport = user;
  bool announced = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
  jpp_net_place_t place;
  jpp__net_arrived(&transport->net, head, head_size, announced ? NULL : data, size,
                   &place);
  return place.data ? ucx_fetch(transport, data, size, &place) : UCS_OK;
}

// --- Endpoints ------------------------------------------------------------------------

// Called by ucp_worker_progress(), which allows the endpoint to be closed only
// afterwards.
static void ucx_peer_failed(void* user, ucp_ep_h endpoint, ucs_status_t status) {
  (void)endpoint;
  jpp_net_peer_t* peer = user;
  jpp__net_peer_failed(peer, "the connection was lost: %s",
                       transport_of(peer->net)->ucx->ucs_status_string(status));
}

static jpp_status_t* ucx_connect(jpp_transport_t* base, uint32_t process,
                                 const void* address, size_t size) {
  ucx_transport_t* transport = (ucx_transport_t*)base;
  jpp_net_peer_t* peer = &transport->net.peers[process];
  jpp_address_t opened;
  JPP_RETURN_IF_ERROR(
      jpp__net_open_address(&transport->net, process, address, size, &opened));
  ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                          UCP_EP_PARAM_FIELD_ERR_HANDLER,
                            .address = opened.route,
                            .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                            .err_handler = {.cb = ucx_peer_failed, .arg = peer}};
  ucp_ep_h endpoint = NULL;
  ucs_status_t made =
      transport->ucx->ucp_ep_create(transport->worker, &params, &endpoint);
  JPP_RETURN_IF_ERROR_IN(jpp__ucx_error(transport->ucx, made, "ucp_ep_create"),
                         "process %u at %s", process, peer->name);
  peer->endpoint = endpoint;
  jpp__net_greet(peer);
  return NULL;
}

static void ucx_closed(void* request, ucs_status_t status, void* user) {
  (void)status;
  ucx_transport_t* transport = user;
  transport->ucx->ucp_request_free(request);
  --transport->closing;
}

// Operations in flight end with an error.
static void ucx_close_endpoint(ucx_transport_t* transport, jpp_net_peer_t* peer) {
  ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK |
                                               UCP_OP_ATTR_FIELD_USER_DATA |
                                               UCP_OP_ATTR_FIELD_FLAGS,
                               .flags = UCP_EP_CLOSE_FLAG_FORCE,
                               .cb.send = ucx_closed,
                               .user_data = transport};
  ucp_ep_h endpoint = peer->endpoint;
  peer->endpoint = NULL;
  ++transport->closing;
  ucs_status_ptr_t request = transport->ucx->ucp_ep_close_nbx(endpoint, &param);
  if (!UCS_PTR_IS_PTR(request)) --transport->closing;
}

static void ucx_progress(jpp_transport_t* base, bool* out_some) {
  ucx_transport_t* transport = (ucx_transport_t*)base;
  *out_some = transport->ucx->ucp_worker_progress(transport->worker) != 0;
  jpp__net_progress(&transport->net, out_some);
  if (transport->net.failed) {
    transport->net.failed = false;
    for (uint32_t i = 0; i < transport->net.base.num_processes; ++i) {
      jpp_net_peer_t* peer = &transport->net.peers[i];
      if (peer->endpoint && peer->status) ucx_close_endpoint(transport, peer);
    }
  }
}

static jpp_status_t* ucx_arm(jpp_transport_t* base, int* out_descriptor,
                             bool* out_armed) {
  ucx_transport_t* transport = (ucx_transport_t*)base;
  const jpp_ucx_t* ucx = transport->ucx;
  ucs_status_t status = ucx->ucp_worker_get_efd(transport->worker, out_descriptor);
  JPP_RETURN_IF_ERROR(jpp__ucx_error(ucx, status, "ucp_worker_get_efd"));
  if (atomic_load(&transport->net.work) || transport->net.some) return NULL;
  status = ucx->ucp_worker_arm(transport->worker);
  *out_armed = status == UCS_OK;
  return status == UCS_ERR_BUSY ? NULL : jpp__ucx_error(ucx, status, "ucp_worker_arm");
}

// --- Memory ---------------------------------------------------------------------------

static jpp_status_t* ucx_register(jpp_transport_t* base, void* data, size_t size,
                                  jpp_transport_memory_t** out_memory) {
  const ucx_transport_t* transport = (const ucx_transport_t*)base;
  jpp_transport_memory_t* memory = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &memory));
  ucp_mem_map_params_t params = {
      .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
      .address = data,
      .length = size};
  ucs_status_t status =
      transport->ucx->ucp_mem_map(transport->context, &params, &memory->handle);
  if (status != UCS_OK) {
    jpp_free(memory);
    return jpp__ucx_error(transport->ucx, status, "ucp_mem_map");
  }
  *out_memory = memory;
  return NULL;
}

static void ucx_unregister(jpp_transport_t* base, jpp_transport_memory_t* memory) {
  const ucx_transport_t* transport = (const ucx_transport_t*)base;
  transport->ucx->ucp_mem_unmap(transport->context, memory->handle);
  jpp_free(memory);
}

// --- Create and destroy ---------------------------------------------------------------

// Four keepalive requests fit into the time after which a peer counts as dead.
static ucs_status_t ucx_configure(const jpp_ucx_t* ucx, ucp_config_t* config,
                                  const char* devices, uint32_t timeout_ms) {
  char interval[32];
  uint32_t quarter = timeout_ms / 4 + 1;
  snprintf(interval, sizeof(interval), "%ums", quarter < 1000 ? quarter : 1000);
  ucs_status_t status = ucx->ucp_config_modify(config, "NET_DEVICES", devices);
  if (status == UCS_OK) {
    status = ucx->ucp_config_modify(config, "KEEPALIVE_INTERVAL", interval);
  }
  // Without this option UCX would not use shared memory, where only keepalive requests
  // detect a dead peer.
  if (status == UCS_OK) {
    status = ucx->ucp_config_modify(config, "MM_ERROR_HANDLING", "y");
  }
  return status;
}

static ucs_status_t ucx_make_context(ucx_transport_t* transport, const char* devices) {
  const jpp_ucx_t* ucx = transport->ucx;
  ucp_config_t* config = NULL;
  ucs_status_t status = ucx->ucp_config_read(NULL, NULL, &config);
  if (status != UCS_OK) return status;
  status = ucx_configure(ucx, config, devices, transport->net.peer_timeout_ms);
  ucp_params_t params = {
      .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS,
      .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
      .estimated_num_eps = transport->net.base.num_processes};
  // The first release with everything that is used here; later ones are compatible.
  if (status == UCS_OK) {
    status = ucx->ucp_init_version(1, 13, &params, config, &transport->context);
  }
  ucx->ucp_config_release(config);
  return status;
}

static ucs_status_t ucx_make_worker(ucx_transport_t* transport) {
  const jpp_ucx_t* ucx = transport->ucx;
  ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                .thread_mode = UCS_THREAD_MODE_SERIALIZED};
  ucs_status_t status =
      ucx->ucp_worker_create(transport->context, &params, &transport->worker);
  if (status != UCS_OK) return status;
  ucp_am_handler_param_t handler = {
      .field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS |
                    UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG,
      .id = kPacketId,
      .flags = UCP_AM_FLAG_WHOLE_MSG,
      .cb = ucx_arrived,
      .arg = transport};
  return ucx->ucp_worker_set_am_recv_handler(transport->worker, &handler);
}

static jpp_status_t* ucx_publish(ucx_transport_t* transport, const char* address) {
  const jpp_ucx_t* ucx = transport->ucx;
  char host[64] = "", name[kJppMostNameSize + 1];
  gethostname(host, sizeof(host) - 1);
  snprintf(name, sizeof(name), "%s (host %s, process id %d)", address, host,
           (int)getpid());
  ucp_address_t* route = NULL;
  size_t size = 0;
  ucs_status_t status = ucx->ucp_worker_get_address(transport->worker, &route, &size);
  JPP_RETURN_IF_ERROR(jpp__ucx_error(ucx, status, "ucp_worker_get_address"));
  jpp_status_t* published = jpp__net_publish(&transport->net, name, route, size);
  ucx->ucp_worker_release_address(transport->worker, route);
  return published;
}

static jpp_status_t* ucx_begin(ucx_transport_t* transport,
                               const jpp_transport_options_t* options,
                               const char* devices) {
  JPP_RETURN_IF_ERROR_IN(
      jpp__ucx_error(transport->ucx, ucx_make_context(transport, devices), "ucp_init"),
      "devices %s", devices);
  JPP_RETURN_IF_ERROR_IN(
      jpp__ucx_error(transport->ucx, ucx_make_worker(transport), "ucp_worker_create"),
      "devices %s", devices);
  JPP_LOG(JPP_LOG_INFO, "process %u listens at %s, on the devices %s", options->process,
          options->address, devices);
  return ucx_publish(transport, options->address);
}

static void ucx_free(ucx_transport_t* transport) {
  if (transport->worker) transport->ucx->ucp_worker_destroy(transport->worker);
  if (transport->context) transport->ucx->ucp_cleanup(transport->context);
  jpp__net_deinit(&transport->net);
  jpp_free(transport);
}

static const jpp_net_port_t kPort = {.send = ucx_send};

static jpp_status_t* ucx_create(const jpp_transport_options_t* options,
                                jpp_transport_t** out_transport) {
  ucx_transport_t* transport = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &transport));
  char* devices = NULL;
  jpp_status_t* status = jpp__net_init(&transport->net, &kPort, options);
  if (!status) status = jpp__ucx_find_devices(options->address, &devices);
  if (!status) status = jpp__ucx_load(devices, &transport->ucx);
  if (!status) status = ucx_begin(transport, options, devices);
  jpp_free(devices);
  if (status) {
    ucx_free(transport);
    return status;
  }
  *out_transport = &transport->net.base;
  return NULL;
}

static bool has_pending(const ucx_transport_t* transport) {
  uint32_t pending = transport->closing;
  for (uint32_t i = 0; i < transport->net.base.num_processes; ++i) {
    pending += transport->net.peers[i].busy;
  }
  return pending != 0;
}

static void ucx_destroy(jpp_transport_t* base) {
  ucx_transport_t* transport = (ucx_transport_t*)base;
  jpp__net_leave(&transport->net);
  for (uint32_t i = 0; i < transport->net.base.num_processes; ++i) {
    jpp_net_peer_t* peer = &transport->net.peers[i];
    if (peer->endpoint) ucx_close_endpoint(transport, peer);
  }
  int64_t until = jpp__clock_now_ms() + transport->net.peer_timeout_ms;
  while (has_pending(transport) && jpp__clock_now_ms() < until) {
    transport->ucx->ucp_worker_progress(transport->worker);
  }
  ucx_free(transport);
}

static const jpp_bytes_vtable_t kBytes = {
    .connect = ucx_connect,
    .progress = ucx_progress,
    .arm = ucx_arm,
    .register_memory = ucx_register,
    .unregister_memory = ucx_unregister,
    JPP_NET_BYTES_ROWS,
};

const jpp_transport_vtable_t jpp_transport_ucx = {
    .name = "ucx",
    .bytes = &kBytes,
    .create = ucx_create,
    .destroy = ucx_destroy,
    JPP_NET_ROWS,
};
