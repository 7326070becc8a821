// Compiled programs in a folder, one file each. A file is written under a temporary name
// and then renamed, so that readers see a complete file or none. It contains its key, so
// that a file that was copied over another one is detected.
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/null.h"
#include "base/str.h"
#include "device/driver.h"

static const char kMagic[8] = "JPPCODE3";

// The key and then the code follow it.
typedef struct file_head {
  char magic[8];
  uint64_t key_size;
  uint64_t code_size;
  uint64_t hash;  // of key and code
} file_head_t;

// A program in memory and its key.
typedef struct entry {
  const char* key;
  const void* code;
  size_t code_size;
} entry_t;

static uint64_t hash_entry(const entry_t* entry) {
  uint64_t hash = jpp__hash_bytes(JPP_HASH_START, entry->key, strlen(entry->key));
  return jpp__hash_bytes(hash, entry->code, entry->code_size);
}

// --- Reading --------------------------------------------------------------------------

// NULL for anything but a regular file. Opening a pipe would wait for its writer.
static FILE* open_regular(const char* path) {
  int descriptor = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (descriptor < 0) return NULL;
  struct stat info;
  bool regular = fstat(descriptor, &info) == 0 && S_ISREG(info.st_mode);
  FILE* file = regular ? fdopen(descriptor, "rb") : NULL;
  if (!file) close(descriptor);
  return file;
}

// Compares the header's sizes with the file's, before memory is allocated for them.
static bool read_head(FILE* file, const char* key, file_head_t* head) {
  struct stat info;
  if (fread(head, sizeof(*head), 1, file) != 1 || fstat(fileno(file), &info) != 0) {
    return false;
  }
  uint64_t follows = (uint64_t)info.st_size - sizeof(*head);
  return memcmp(head->magic, kMagic, sizeof(kMagic)) == 0 &&
         head->key_size == strlen(key) && head->key_size <= follows &&
         head->code_size == follows - head->key_size;
}

static bool reads_key(FILE* file, const char* key) {
  for (const char* at = key; *at; ++at) {
    if (fgetc(file) != (unsigned char)*at) return false;
  }
  return true;
}

static bool read_code(FILE* file, const char* key, void** out_bytes, size_t* out_size) {
  file_head_t head;
  if (!read_head(file, key, &head) || !reads_key(file, key)) return false;
  jpp_status_t* status = jpp_alloc(head.code_size, out_bytes);
  if (status) {
    jpp_status_free(status);
    return false;
  }
  *out_size = head.code_size;
  entry_t entry = {key, *out_bytes, *out_size};
  return fread(*out_bytes, 1, *out_size, file) == *out_size &&
         hash_entry(&entry) == head.hash;
}

// Returns NULL if there is no such file, or it cannot be used.
static jpp_executable_t* load_program(jpp_client_t* client,
                                      const jpp_compile_request_t* request,
                                      const char* path, const char* key) {
  FILE* file = open_regular(path);
  if (!file) return NULL;
  void* bytes = NULL;
  size_t size = 0;
  jpp_executable_t* executable = NULL;
  if (read_code(file, key, &bytes, &size)) {
    jpp_status_t* status = jpp__compile_load(client, *request, bytes, size, &executable);
    if (status) JPP_LOG(JPP_LOG_WARNING, "%s: %s", path, jpp_status_message(status));
    jpp_status_free(status);
  }
  fclose(file);
  jpp_free(bytes);
  return executable;
}

// --- Writing --------------------------------------------------------------------------

static bool write_entry(int descriptor, const entry_t* entry) {
  FILE* file = fdopen(descriptor, "wb");
  if (!file) {
    close(descriptor);
    return false;
  }
  file_head_t head = {.key_size = strlen(entry->key),
                      .code_size = entry->code_size,
                      .hash = hash_entry(entry)};
  memcpy(head.magic, kMagic, sizeof(kMagic));
  bool written = fwrite(&head, sizeof(head), 1, file) == 1 &&
                 fwrite(entry->key, 1, head.key_size, file) == head.key_size &&
                 fwrite(entry->code, 1, entry->code_size, file) == entry->code_size;
  return fclose(file) == 0 && written;
}

static bool write_and_rename(const char* scratch, const char* path,
                             const entry_t* entry) {
  int descriptor = open(scratch, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) return false;
  if (write_entry(descriptor, entry) && rename(scratch, path) == 0) return true;
  unlink(scratch);
  return false;
}

static jpp_status_t* make_path(const char* folder, const char* key, const char* suffix,
                               char** out_path) {
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "%s/jaxpp-%s%s", folder, key, suffix);
  return jpp_str_finish(&str, out_path);
}

static jpp_status_t* keep_entry(const char* folder, const char* path,
                                const entry_t* entry, jpp_cache_outcome_t* out_outcome) {
  static atomic_uint count;
  char suffix[32];
  snprintf(suffix, sizeof(suffix), ".%d.%u", (int)getpid(), atomic_fetch_add(&count, 1));
  char* scratch = NULL;
  JPP_RETURN_IF_ERROR(make_path(folder, entry->key, suffix, &scratch));
  bool written = write_and_rename(scratch, path, entry);
  *out_outcome = written ? JPP_CACHE_KEPT : JPP_CACHE_NOT_WRITTEN;
  jpp_free(scratch);
  return NULL;
}

// Stores the program in the folder. A failure is not an error.
static jpp_cache_outcome_t keep_program(jpp_client_t* client,
                                        jpp_executable_t* executable, const char* folder,
                                        const char* key, const char* path) {
  void* bytes = NULL;
  size_t size = 0;
  jpp_cache_outcome_t outcome = JPP_CACHE_NOT_KEPT;
  jpp_status_t* status =
      client->vtable->executable_serialize(client, executable, &bytes, &size);
  if (!status) {
    entry_t entry = {key, bytes, size};
    status = keep_entry(folder, path, &entry, &outcome);
  }
  jpp_status_free(status);
  jpp_free(bytes);
  return outcome;
}

// --- The call -------------------------------------------------------------------------

jpp_status_t* jpp_client_compile_cached(jpp_client_t* client,
                                        const jpp_compile_request_t* request,
                                        const char* folder, const char* key,
                                        jpp_executable_t** out_executable,
                                        jpp_cache_outcome_t* out_outcome) {
  JPP_RETURN_IF_NULL(client, request, folder, out_executable, out_outcome);
  *out_executable = NULL;
  *out_outcome = JPP_CACHE_NOT_KEPT;
  jpp_compile_request_t full;
  JPP_RETURN_IF_ERROR(jpp__compile_request_read(request, &full));
  // None of the nodes may load a program that the others compile together with it.
  if (jpp__compile_spans_nodes(client, &full)) {
    return jpp_client_compile(client, &full, out_executable);
  }
  char* path = NULL;
  char made_key[kJppCacheKeySize];
  if (!key) {
    JPP_RETURN_IF_ERROR(jpp_client_cache_key(client, &full, made_key));
    key = made_key;
  }
  JPP_RETURN_IF_ERROR(make_path(folder, key, "", &path));
  *out_executable = load_program(client, &full, path, key);
  jpp_status_t* status = NULL;
  if (*out_executable) {
    *out_outcome = JPP_CACHE_LOADED;
  } else {
    status = jpp_client_compile(client, &full, out_executable);
    if (!status) *out_outcome = keep_program(client, *out_executable, folder, key, path);
  }
  static const char* const kOutcomes[] = {
      [JPP_CACHE_NOT_KEPT] = "compiled, not kept",
      [JPP_CACHE_LOADED] = "found in the cache",
      [JPP_CACHE_KEPT] = "compiled and kept",
      [JPP_CACHE_NOT_WRITTEN] = "compiled, but its file could not be written",
  };
  if (!status) JPP_LOG(JPP_LOG_INFO, "executable %s: %s", path, kOutcomes[*out_outcome]);
  jpp_free(path);
  return status;
}
