// The format of a plan file, for its writer and its reader. Numbers are little-endian.
//
//   0   magic          16 bytes, "jaxpp plan file\n"
//   16  format         u32
//   20  maker          28 bytes, "jaxpp 0.2.0", NUL behind it
//   48  size           u64, of the whole file
//   56  hash           u64, of all bytes but these eight
//   64  header's size  u64
//   72  header         JSON: numbers, names, and the size of each blob
//   ..  blobs          one behind another, in this order: the graph's text, value_bytes,
//                      a schedule for each loop, layouts, compile options, modules,
//                      constants, the front end's
//
// Magic, format and maker have the same offsets in every later format, so that each
// version can name the format of the file.
#ifndef JPP_PLANFILE_FORMAT_H_
#define JPP_PLANFILE_FORMAT_H_

#include <string.h>

#include "jaxpp/planfile.h"

enum {
  JPP_PLANFILE_MAGIC_SIZE = 16,
  JPP_PLANFILE_FORMAT_AT = 16,
  JPP_PLANFILE_MAKER_AT = 20,
  JPP_PLANFILE_MAKER_SIZE = 28,
  JPP_PLANFILE_SIZE_AT = 48,
  JPP_PLANFILE_HASH_AT = 56,
  JPP_PLANFILE_HEADER_SIZE_AT = 64,
  JPP_PLANFILE_HEAD_SIZE = 72,
  // An entry of a schedule: kind | joins_next << 8 | latency << 16, stage, microbatch.
  JPP_PLANFILE_ENTRY_SIZE = 12,
};

static inline uint64_t jpp__planfile_get(const unsigned char* at, uint32_t bytes) {
  uint64_t number = 0;
  for (uint32_t i = bytes; i-- > 0;) number = number << 8 | at[i];
  return number;
}

static inline void jpp__planfile_put(unsigned char* at, uint32_t bytes, uint64_t number) {
  for (uint32_t i = 0; i < bytes; ++i) at[i] = (unsigned char)(number >> 8 * i);
}

// The hash of a file of at least JPP_PLANFILE_HEAD_SIZE bytes; its hash field is skipped.
uint64_t jpp__planfile_hash(const unsigned char* bytes, size_t size);

// The type of the argument or result with this number; as in layouts, results are
// numbered after the arguments.
static inline const jpp_type_t* jpp__planfile_type(const jpp_graph_t* graph,
                                                   uint32_t number) {
  uint32_t value = number < graph->num_args
                       ? graph->args[number].value
                       : graph->outputs[number - graph->num_args].value;
  return &graph->values[value].type;
}

// The number of dims of a task's results together.
static inline uint32_t jpp__planfile_count_dims(const jpp_staged_t* staged,
                                                const jpp_task_t* task) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    count += staged->values[task->outputs[i]].type.ndim;
  }
  return count;
}

// The number of devices of a rank, at most devices_per_rank.
static inline uint32_t jpp__planfile_count_devices(
    const jpp_planfile_contents_t* contents, uint32_t rank) {
  uint32_t count = contents->devices_per_rank;
  const int32_t* ids = contents->device_ids + (size_t)rank * count;
  while (count > 1 && ids[count - 1] == -1) --count;
  return count;
}

// Checks that the parts of the contents agree, before they are saved and after they are
// loaded; JPP_INVALID_ARGUMENT names the ones that do not.
jpp_status_t* jpp__planfile_check(const jpp_planfile_contents_t* contents) JPP_MUST_USE;

#endif  // JPP_PLANFILE_FORMAT_H_
