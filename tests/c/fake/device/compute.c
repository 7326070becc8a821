// The arithmetic of the fake device, element by element in a fixed order: a test can tell
// the order of additions from the rounding.
#include "base/hash.h"
#include "fake/device/fake.h"

// Hashes the bits of every element, argument by argument.
static uint64_t hash_args(uint64_t hash, const fake_result_t* result,
                          fake_value_t* const* args) {
  for (uint32_t a = 0; a < result->arg_count; ++a) {
    const fake_value_t* value = args[result->args[a]];
    hash = jpp__hash_bytes(hash, value->data, value->bytes);
  }
  return hash;
}

static float hash_number(uint64_t hash) { return (float)(hash >> 40) / (float)(1 << 24); }

static float arg_element(const fake_result_t* result, fake_value_t* const* args,
                         uint32_t a, size_t i) {
  return ((const float*)args[result->args[a]]->data)[i];
}

// From left to right: a test may see the order in the rounding.
static float combine_elements(const fake_result_t* result, fake_value_t* const* args,
                              size_t i) {
  float value = arg_element(result, args, 0, i);
  if (result->op == FAKE_SCALE) return value * result->factor;
  for (uint32_t a = 1; a < result->arg_count; ++a) {
    float next = arg_element(result, args, a, i);
    value = result->op == FAKE_MUL ? value * next : value + next;
  }
  return value;
}

void fake_result_compute(const fake_result_t* result, fake_value_t* const* args,
                         fake_value_t* output) {
  float* data = output->data;
  size_t count = fake_shape_elements(&output->shape);
  bool hash = result->op == FAKE_HASH;
  float hashed = hash ? hash_number(hash_args(JPP_HASH_START, result, args)) : 0;
  for (size_t i = 0; i < count; ++i) {
    data[i] = hash ? hashed : combine_elements(result, args, i);
  }
}

void fake_collective_compute(const fake_result_t* result, uint32_t count,
                             fake_value_t* const* const* args, fake_value_t* output) {
  float* data = output->data;
  size_t elements = fake_shape_elements(&output->shape);
  uint64_t hash = JPP_HASH_START;
  for (uint32_t p = 0; p < count; ++p) {
    if (result->op == FAKE_ALL_HASH) {
      hash = hash_args(hash, result, args[p]);
      continue;
    }
    for (size_t i = 0; i < elements; ++i) {
      float number = arg_element(result, args[p], 0, i);
      data[i] = p ? data[i] + number : number;
    }
  }
  if (result->op != FAKE_ALL_HASH) return;
  for (size_t i = 0; i < elements; ++i) data[i] = hash_number(hash);
}
