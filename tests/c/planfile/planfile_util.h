// Makes the contents of a plan file from a plan alone, varied enough that a test notices
// when parts are mixed up.
#ifndef TESTS_C_PLANFILE_UTIL_H_
#define TESTS_C_PLANFILE_UTIL_H_

#include "jaxpp/planfile.h"

typedef struct made_contents {
  jpp_planfile_contents_t contents;
  // What it points to.
  int32_t* device_ids;
  uint32_t* task_modules;
  const uint64_t** shard_dims;  // a row for each task that only copies
  jpp_planfile_bytes_t *modules, *constants;
  jpp_planfile_layout_t* layouts;
  int64_t* numbers;  // of the layouts
  const char** axis_names;
  uint32_t* axis_sizes;
  char* text;  // of modules and constants
} made_contents_t;

// If there are two or more arguments, the last one is a constant. With `devices_per_rank`
// over 1 there are layouts: device d has the d-th part of the first dimension that the
// number of devices divides. Free with contents_free().
made_contents_t contents_of(const jpp_planned_t* planned, uint32_t devices_per_rank);
void contents_free(made_contents_t* made);

// Returns the bytes of a file with these contents; the caller frees them.
unsigned char* contents_bytes(const jpp_planfile_contents_t* contents, size_t* out_size);
// Corrects the size and the checksum in the file to match the bytes.
void seal_bytes(unsigned char* bytes, size_t size);

#endif  // TESTS_C_PLANFILE_UTIL_H_
