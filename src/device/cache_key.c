// The name under which a compiled program is stored: a digest of everything that
// determines its code.
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>

#include "base/hash.h"
#include "base/null.h"
#include "base/sha256.h"
#include "device/driver.h"
#include "jaxpp/option.h"

// Adds a part with its length, so that different lists of parts never give the same
// bytes.
static void add_part(jpp_sha256_t* hash, const void* data, uint64_t size) {
  jpp__sha256_add(hash, &size, sizeof(size));
  if (size) jpp__sha256_add(hash, data, size);
}

static void add_text(jpp_sha256_t* hash, const char* text) {
  add_part(hash, text, strlen(text));
}

static pthread_once_t g_once = PTHREAD_ONCE_INIT;
static uint8_t g_processor[kJppSha256Size];

// Adds the model and features of the processors, on which code compiled for this machine
// may depend. A line that many processors share counts once.
static void add_processors(jpp_sha256_t* hash) {
  static const char* const kNames[] = {"model name", "flags", "Features", "CPU part"};
  enum { kMostKinds = 64 };
  struct utsname machine;
  add_text(hash, uname(&machine) == 0 ? machine.machine : "");
  FILE* file = fopen("/proc/cpuinfo", "re");
  if (!file) return;
  uint64_t seen[kMostKinds];
  uint32_t count = 0;
  char line[1 << 14];
  while (count < kMostKinds && fgets(line, sizeof(line), file)) {
    bool wanted = false;
    for (size_t i = 0; i < sizeof(kNames) / sizeof(*kNames); ++i) {
      wanted |= strncmp(line, kNames[i], strlen(kNames[i])) == 0;
    }
    uint64_t of_line = jpp__hash_bytes(JPP_HASH_START, line, strlen(line));
    for (uint32_t i = 0; wanted && i < count; ++i) wanted = seen[i] != of_line;
    if (!wanted) continue;
    seen[count++] = of_line;
    add_text(hash, line);
  }
  fclose(file);
}

static void read_processor(void) {
  jpp_sha256_t hash;
  jpp__sha256_begin(&hash);
  add_processors(&hash);
  jpp__sha256_end(&hash, g_processor);
}

// Adds XLA_FLAGS, which plugins read as well, without the flags that do not change code.
static void add_xla_flags(jpp_sha256_t* hash) {
  static const char* const kNoCode[] = {"--xla_force_host_platform_device_count=",
                                        "--xla_dump_"};
  static const char kSpaces[] = " \t\n\r\f\v";
  const char* at = jpp_option_get(JPP_OPTION_XLA_FLAGS);
  while (at && *(at += strspn(at, kSpaces))) {
    size_t length = strcspn(at, kSpaces);
    bool changes_code = true;
    for (size_t i = 0; i < sizeof(kNoCode) / sizeof(*kNoCode); ++i) {
      changes_code &= strncmp(at, kNoCode[i], strlen(kNoCode[i])) != 0;
    }
    if (changes_code) add_part(hash, at, length);
    at += length;
  }
}

static void add_program(jpp_sha256_t* hash, const jpp_client_t* client,
                        const jpp_compile_request_t* request) {
  const jpp_client_info_t* info = &client->info;
  const char* code = request->identity ? request->identity : request->code;
  size_t size = request->identity ? request->identity_size : request->code_size;
  add_part(hash, code, size);
  add_text(hash, request->format);
  add_part(hash, request->options, request->options ? request->options_size : 0);
  jpp__sha256_add(hash, &request->device_count, sizeof(request->device_count));
  if (jpp__compile_fits_all_devices(client)) return;
  for (uint32_t i = 0; i < request->device_count; ++i) {
    uint32_t device = request->devices[i];
    int32_t id =
        device < info->global_device_count ? info->global_devices[device].id : -1;
    jpp__sha256_add(hash, &id, sizeof(id));
  }
}

jpp_status_t* jpp_client_cache_key(const jpp_client_t* client,
                                   const jpp_compile_request_t* request, char* out_key) {
  JPP_RETURN_IF_NULL(client, request, out_key);
  jpp_compile_request_t full;
  JPP_RETURN_IF_ERROR(jpp__compile_request_read(request, &full));
  jpp_sha256_t hash;
  uint8_t digest[kJppSha256Size];
  jpp__sha256_begin(&hash);
  add_program(&hash, client, &full);
  add_text(&hash, client->info.driver);
  add_text(&hash, client->info.platform_name);
  add_text(&hash, client->info.platform_version);
  jpp__sha256_add(&hash, &client->build, sizeof(client->build));
  pthread_once(&g_once, read_processor);
  jpp__sha256_add(&hash, g_processor, sizeof(g_processor));
  add_xla_flags(&hash);
  jpp__sha256_end(&hash, digest);
  for (int i = 0; i < kJppSha256Size; ++i) {
    snprintf(out_key + 2 * i, 3, "%02x", digest[i]);
  }
  return NULL;
}
