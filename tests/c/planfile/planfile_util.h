// Contents of plan files, made of a plan alone: for each kind of part something that
// tells it from the others.
#ifndef TESTS_C_PLANFILE_UTIL_H_
#define TESTS_C_PLANFILE_UTIL_H_

#include "jaxpp/planfile.h"

typedef struct made_contents {
  jpp_planfile_contents_t contents;
  // What it points to.
  int32_t* device_ids;
  uint32_t* task_modules;
  jpp_planfile_bytes_t *modules, *constants;
  jpp_planfile_layout_t* layouts;
  int64_t* numbers;  // of the layouts
  const char** axis_names;
  uint32_t* axis_sizes;
  char* text;  // of modules and constants
} made_contents_t;

// The last argument is a constant if there are two or more. `devices_per_rank` over 1:
// with layouts, in which device d has the d-th part of the first dimension that it
// divides. Free with contents_free().
made_contents_t contents_of(const jpp_planned_t* planned, uint32_t devices_per_rank);
void contents_free(made_contents_t* made);

// The bytes of a file of these contents, to be freed.
unsigned char* contents_bytes(const jpp_planfile_contents_t* contents, size_t* out_size);
// Makes the size and the checksum those of the bytes, whatever they are.
void seal_bytes(unsigned char* bytes, size_t size);

#endif  // TESTS_C_PLANFILE_UTIL_H_
