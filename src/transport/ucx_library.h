// UCX, loaded at run time: the functions of libucp that ucx.c calls. The library is the
// one that JPP_UCX names, else the one in the Python package libucx-cu13 or libucx-cu12
// beside this library, else the system's. Once loaded, it stays loaded, because it may
// have hooked the process's memory calls.
#ifndef JPP_TRANSPORT_UCX_LIBRARY_H_
#define JPP_TRANSPORT_UCX_LIBRARY_H_

#include <ucp/api/ucp.h>

#include "jaxpp/status.h"

// The name of each function and its index in the table.
#define JPP_UCX_FUNCTIONS(F)        \
  F(ucp_init_version)               \
  F(ucp_cleanup)                    \
  F(ucp_get_version_string)         \
  F(ucp_config_read)                \
  F(ucp_config_modify)              \
  F(ucp_config_release)             \
  F(ucp_worker_create)              \
  F(ucp_worker_destroy)             \
  F(ucp_worker_progress)            \
  F(ucp_worker_get_address)         \
  F(ucp_worker_release_address)     \
  F(ucp_worker_set_am_recv_handler) \
  F(ucp_worker_get_efd)             \
  F(ucp_worker_arm)                 \
  F(ucp_ep_create)                  \
  F(ucp_ep_close_nbx)               \
  F(ucp_am_send_nbx)                \
  F(ucp_am_recv_data_nbx)           \
  F(ucp_request_free)               \
  F(ucp_request_check_status)       \
  F(ucp_tag_send_nbx)               \
  F(ucp_tag_recv_nbx)               \
  F(ucp_mem_map)                    \
  F(ucp_mem_unmap)                  \
  F(ucs_status_string)

typedef struct jpp_ucx {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a member is declared
#define JPP_UCX_MEMBER(name) __typeof__(&name) name;
  JPP_UCX_FUNCTIONS(JPP_UCX_MEMBER)
#undef JPP_UCX_MEMBER
} jpp_ucx_t;

// The value of UCX_NET_DEVICES with which UCX listens at these addresses, separated by
// commas, and nowhere else: names of interfaces and of their RDMA devices. Free with
// jpp_free(). JPP_INVALID_ARGUMENT lists the addresses that this host has.
jpp_status_t* jpp__ucx_find_devices(const char* addresses,
                                    char** out_devices) JPP_MUST_USE;

// Lifetime static. `devices`: those of the first transport, from jpp__ucx_find_devices();
// UCX hooks memory calls only if one of them is an RDMA device or the user sets
// UCX_MEM_EVENTS. JPP_UNSUPPORTED says what to install. Any thread.
jpp_status_t* jpp__ucx_load(const char* devices, const jpp_ucx_t** out_ucx) JPP_MUST_USE;

// NULL for UCS_OK.
jpp_status_t* jpp__ucx_error(const jpp_ucx_t* ucx, ucs_status_t status,
                             const char* call) JPP_MUST_USE;

#endif  // JPP_TRANSPORT_UCX_LIBRARY_H_
