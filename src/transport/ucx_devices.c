// Translates addresses to the devices that UCX may use. UCX cannot listen at an address,
// but only on named interfaces; without names it uses all of them.
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "base/str.h"
#include "transport/ucx_library.h"

enum { kMostText = 128 };  // of an address or a name

static bool address_text(const struct ifaddrs* entry, char text[kMostText]) {
  if (!entry->ifa_addr) return false;
  int family = entry->ifa_addr->sa_family;
  if (family != AF_INET && family != AF_INET6) return false;
  socklen_t size =
      family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
  if (getnameinfo(entry->ifa_addr, size, text, kMostText, NULL, 0, NI_NUMERICHOST)) {
    return false;
  }
  text[strcspn(text, "%")] = 0;  // without an IPv6 address' scope
  return true;
}

// The RDMA devices that belong to the interface's hardware, under UCX's names.
static void append_rdma(jpp_str_t* devices, const char* interface) {
  char path[kMostText + 64];
  unsigned port = 0;
  snprintf(path, sizeof(path), "/sys/class/net/%s/dev_port", interface);
  FILE* file = fopen(path, "r");
  if (file) {
    if (fscanf(file, "%u", &port) != 1) port = 0;
    fclose(file);
  }
  snprintf(path, sizeof(path), "/sys/class/net/%s/device/infiniband", interface);
  DIR* folder = opendir(path);
  for (struct dirent* entry; folder && (entry = readdir(folder));) {
    if (entry->d_name[0] == '.') continue;
    jpp_str_appendf(devices, ",%s:%u", entry->d_name, port + 1);
  }
  if (folder) closedir(folder);
}

static jpp_status_t* refuse_address(const struct ifaddrs* all, const char* wanted) {
  jpp_str_t list = {0};
  char* text = NULL;
  for (const struct ifaddrs* entry = all; entry; entry = entry->ifa_next) {
    char address[kMostText];
    if (!address_text(entry, address)) continue;
    jpp_str_appendf(&list, "%s%s (%s)", list.length ? ", " : "", address,
                    entry->ifa_name);
  }
  JPP_RETURN_IF_ERROR(jpp_str_finish(&list, &text));
  jpp_status_t* status = jpp_status_make(JPP_INVALID_ARGUMENT,
                                         "expected an address of this host: %s; found %s",
                                         text ? text : "none", wanted);
  jpp_free(text);
  return status;
}

static bool is_address(const char* text) {
  unsigned char bytes[sizeof(struct in6_addr)];
  return inet_pton(AF_INET, text, bytes) == 1 || inet_pton(AF_INET6, text, bytes) == 1;
}

// Appends the devices of an address, or a device's name, which UCX checks.
static jpp_status_t* append_device(jpp_str_t* devices, const struct ifaddrs* all,
                                   const char* wanted) {
  const char* comma = devices->length ? "," : "";
  if (!is_address(wanted)) {
    jpp_str_appendf(devices, "%s%s", comma, wanted);
    if (if_nametoindex(wanted)) append_rdma(devices, wanted);
    return NULL;
  }
  for (const struct ifaddrs* entry = all; entry; entry = entry->ifa_next) {
    char address[kMostText];
    if (!address_text(entry, address) || strcmp(address, wanted) != 0) continue;
    jpp_str_appendf(devices, "%s%s", comma, entry->ifa_name);
    append_rdma(devices, entry->ifa_name);
    return NULL;
  }
  return refuse_address(all, wanted);
}

static jpp_status_t* append_devices(jpp_str_t* devices, const struct ifaddrs* all,
                                    const char* addresses) {
  while (*addresses) {
    char wanted[kMostText];
    size_t length = strcspn(addresses, ",");
    if (length == 0 || length >= sizeof(wanted)) {
      return jpp_status_make(JPP_INVALID_ARGUMENT,
                             "expected addresses or interfaces with commas between them, "
                             "found '%s'",
                             addresses);
    }
    memcpy(wanted, addresses, length);
    wanted[length] = 0;
    JPP_RETURN_IF_ERROR(append_device(devices, all, wanted));
    addresses += length + (addresses[length] == ',');
  }
  return NULL;
}

jpp_status_t* jpp__ucx_find_devices(const char* addresses, char** out_devices) {
  *out_devices = NULL;
  struct ifaddrs* all = NULL;
  jpp_str_t devices = {0};
  if (getifaddrs(&all)) {
    return jpp_status_make(JPP_INTERNAL_ERROR, "network interfaces: %s", strerror(errno));
  }
  jpp_status_t* status = append_devices(&devices, all, addresses);
  freeifaddrs(all);
  return jpp__str_finish_unless(status, &devices, out_devices);
}
