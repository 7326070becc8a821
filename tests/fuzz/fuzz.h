// Helpers shared by the fuzz targets. Each target is one file with
// LLVMFuzzerTestOneInput(); tools/fuzz.py builds and runs them. Input may be refused, as
// long as the refusal is a status with a message.
#ifndef TESTS_FUZZ_FUZZ_H_
#define TESTS_FUZZ_FUZZ_H_

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "jaxpp/status.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#define FUZZ_CHECK(condition)                                                   \
  do {                                                                          \
    if (!(condition)) {                                                         \
      fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
      abort();                                                                  \
    }                                                                           \
  } while (0)

// Returns true for success. A failure must have a code and a message. Frees the status.
static inline bool fuzz_ok(jpp_status_t* status) {
  if (!status) return true;
  FUZZ_CHECK(jpp_status_code(status) != JPP_OK && strlen(jpp_status_message(status)) > 3);
  // An internal error reports a bug in this library.
  FUZZ_CHECK(jpp_status_code(status) != JPP_INTERNAL_ERROR);
  jpp_status_free(status);
  return false;
}

// A file with the given bytes, for readers that take a path. fuzz_file_close() removes it
// again.
typedef struct fuzz_file {
  int descriptor;
  char path[32];
} fuzz_file_t;

static inline fuzz_file_t fuzz_file_open(const uint8_t* data, size_t size) {
  fuzz_file_t file = {.descriptor = memfd_create("input", 0)};
  FUZZ_CHECK(file.descriptor >= 0);
  FUZZ_CHECK(write(file.descriptor, data, size) == (ssize_t)size);
  snprintf(file.path, sizeof(file.path), "/proc/self/fd/%d", file.descriptor);
  return file;
}

static inline void fuzz_file_close(fuzz_file_t* file) { close(file->descriptor); }

#endif  // TESTS_FUZZ_FUZZ_H_
