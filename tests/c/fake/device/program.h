// Programs of the fake: parsed from text once, then immutable.
#ifndef TESTS_C_FAKE_DEVICE_PROGRAM_H_
#define TESTS_C_FAKE_DEVICE_PROGRAM_H_

#include "base/arena.h"
#include "jaxpp/device.h"

typedef enum fake_op {
  FAKE_SUM,
  FAKE_MUL,
  FAKE_COPY,
  FAKE_SCALE,
  FAKE_HASH,
  FAKE_ALL_SUM,
  FAKE_ALL_HASH,
} fake_op_t;

typedef struct fake_shape {
  jpp_dtype_t dtype;
  uint32_t rank;
  int64_t dims[JPP_BUFFER_MAX_RANK];
} fake_shape_t;

typedef struct fake_result {
  fake_shape_t shape;
  fake_op_t op;
  uint32_t arg_count;
  const uint32_t* args;
  float factor;  // FAKE_SCALE only
} fake_result_t;

typedef struct fake_program {
  jpp_arena_t arena;  // owns everything below
  uint32_t arg_count;
  uint32_t result_count;
  uint32_t device_count;
  uint32_t own_count;
  uint32_t donate_count;
  bool is_collective;
  uint64_t identity;  // different for each text and set of devices
  const fake_result_t* results;
  const uint32_t* devices;  // ids, by partition
  const uint32_t* own;      // indices of the client's devices, in the same order
  const uint32_t* donate;
} fake_program_t;

// True if the result of one partition depends on the arguments of every partition.
static inline bool fake_op_is_collective(fake_op_t op) {
  return op == FAKE_ALL_SUM || op == FAKE_ALL_HASH;
}

size_t fake_shape_elements(const fake_shape_t* shape);
size_t fake_shape_bytes(const fake_shape_t* shape);

// Fails with JPP_PARSE_ERROR and the line, or the value that is out of range. A program
// whose text names no devices has none; the caller fills in `own`.
jpp_status_t* fake_program_create(const char* text, size_t size,
                                  fake_program_t** out_program);
void fake_program_destroy(fake_program_t* program);

#endif  // TESTS_C_FAKE_DEVICE_PROGRAM_H_
