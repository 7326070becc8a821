// Compiled programs in a folder, a file each. A file is written under another name and
// then renamed, so readers see all of it or nothing.
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/str.h"
#include "device/driver.h"

static const char kMagic[8] = "JPPCODE1";

typedef struct file_head {
  char magic[8];
  uint64_t size;  // bytes that follow
  uint64_t hash;  // of them
} file_head_t;

// FNV-1a: tells a damaged file, not a forged one.
static uint64_t hash_bytes(const void* bytes, size_t size) {
  uint64_t hash = UINT64_C(0xcbf29ce484222325);
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ ((const unsigned char*)bytes)[i]) * UINT64_C(0x100000001b3);
  }
  return hash;
}

// --- Reading --------------------------------------------------------------------------

static bool read_head(FILE* file, file_head_t* head) {
  return fread(head, sizeof(*head), 1, file) == 1 &&
         memcmp(head->magic, kMagic, sizeof(kMagic)) == 0;
}

// False for a size that the file does not have, before memory is asked for.
static bool has_size(FILE* file, const file_head_t* head) {
  if (fseek(file, 0, SEEK_END) != 0) return false;
  long end = ftell(file);
  return end >= 0 && (uint64_t)end - sizeof(*head) == head->size &&
         fseek(file, sizeof(*head), SEEK_SET) == 0;
}

static bool read_code(FILE* file, void** out_bytes, size_t* out_size) {
  file_head_t head;
  if (!read_head(file, &head) || !has_size(file, &head)) return false;
  jpp_status_t* status = jpp_alloc(head.size, out_bytes);
  if (status) {
    jpp_status_free(status);
    return false;
  }
  *out_size = head.size;
  return fread(*out_bytes, 1, head.size, file) == head.size &&
         hash_bytes(*out_bytes, head.size) == head.hash;
}

// NULL if there is no such file, or none that can be used.
static jpp_executable_t* load(jpp_client_t* client, const char* path) {
  FILE* file = fopen(path, "rb");
  if (!file) return NULL;
  void* bytes = NULL;
  size_t size = 0;
  jpp_executable_t* executable = NULL;
  if (read_code(file, &bytes, &size)) {
    jpp_status_free(client->vtable->executable_load(client, bytes, size, &executable));
  }
  fclose(file);
  jpp_free(bytes);
  return executable;
}

// --- Writing --------------------------------------------------------------------------

static bool write_code(int descriptor, const void* bytes, size_t size) {
  FILE* file = fdopen(descriptor, "wb");
  if (!file) {
    close(descriptor);
    return false;
  }
  file_head_t head = {.size = size, .hash = hash_bytes(bytes, size)};
  memcpy(head.magic, kMagic, sizeof(kMagic));
  bool written =
      fwrite(&head, sizeof(head), 1, file) == 1 && fwrite(bytes, 1, size, file) == size;
  return fclose(file) == 0 && written;
}

static bool write_and_rename(const char* scratch, const char* path, const void* bytes,
                             size_t size) {
  int descriptor = open(scratch, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return false;
  if (write_code(descriptor, bytes, size) && rename(scratch, path) == 0) return true;
  unlink(scratch);
  return false;
}

static jpp_status_t* make_path(const char* folder, const char* key, const char* suffix,
                               char** out_path) {
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "%s/jaxpp-%s%s", folder, key, suffix);
  return jpp_str_finish(&str, out_path);
}

static jpp_status_t* keep_bytes(const char* folder, const char* key, const char* path,
                                const void* bytes, size_t size, bool* out_kept) {
  static atomic_uint count;
  char suffix[32];
  snprintf(suffix, sizeof(suffix), ".%d.%u", (int)getpid(), atomic_fetch_add(&count, 1));
  char* scratch = NULL;
  JPP_RETURN_IF_ERROR(make_path(folder, key, suffix, &scratch));
  *out_kept = write_and_rename(scratch, path, bytes, size);
  jpp_free(scratch);
  return NULL;
}

// Whether the program is now in the folder. That it can not be kept is no error.
static bool keep(jpp_client_t* client, jpp_executable_t* executable, const char* folder,
                 const char* key, const char* path) {
  void* bytes = NULL;
  size_t size = 0;
  bool kept = false;
  jpp_status_t* status =
      client->vtable->executable_serialize(client, executable, &bytes, &size);
  if (!status) status = keep_bytes(folder, key, path, bytes, size, &kept);
  jpp_status_free(status);
  jpp_free(bytes);
  return kept;
}

// --- The call -------------------------------------------------------------------------

jpp_status_t* jpp_client_compile_cached(jpp_client_t* client,
                                        const jpp_compile_request_t* request,
                                        const char* folder, const char* key,
                                        jpp_executable_t** out_executable,
                                        jpp_cache_outcome_t* out_outcome) {
  *out_outcome = JPP_CACHE_NOT_KEPT;
  char* path = NULL;
  JPP_RETURN_IF_ERROR(make_path(folder, key, "", &path));
  *out_executable = load(client, path);
  jpp_status_t* status = NULL;
  if (*out_executable) {
    *out_outcome = JPP_CACHE_LOADED;
  } else {
    status = jpp_client_compile(client, request, out_executable);
    bool kept = !status && keep(client, *out_executable, folder, key, path);
    if (kept) *out_outcome = JPP_CACHE_KEPT;
  }
  jpp_free(path);
  return status;
}
