// A stepper calls a model's runtime with arguments that it keeps between steps.
#ifndef TESTS_C_RUNTIME_STEPPER_H_
#define TESTS_C_RUNTIME_STEPPER_H_

#include "model.h"

enum { kMostArrays = 32 };

typedef struct stepper {
  model_t* model;
  jpp_array_t* args[kMostArrays];
  jpp_array_t* results[kMostArrays];
} stepper_t;

uint32_t stepper_num_args(const stepper_t* stepper);
uint32_t stepper_num_results(const stepper_t* stepper);
// An argument filled with `value`, only on the first rank.
jpp_array_t* stepper_upload(const model_t* model, uint32_t arg, float value);
stepper_t stepper_make(const char* text, model_options_t options);
jpp_status_t* stepper_call(stepper_t* stepper, const jpp_interrupt_t* interrupt);
// Releases arrays and sets them to NULL.
void release_all(jpp_array_t** arrays, uint32_t count);
// Replaces the chain's weights with the new ones and frees the other results.
void stepper_feed_back(stepper_t* stepper);
void stepper_end(stepper_t* stepper);

#endif  // TESTS_C_RUNTIME_STEPPER_H_
