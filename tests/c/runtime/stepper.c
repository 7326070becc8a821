#include "stepper.h"

uint32_t stepper_num_args(const stepper_t* stepper) {
  return stepper->model->graph->num_args;
}

uint32_t stepper_num_results(const stepper_t* stepper) {
  return stepper->model->graph->num_outputs;
}

jpp_array_t* stepper_upload(const model_t* model, uint32_t arg, float value) {
  return model_array(model, arg, 0, value, 0);
}

stepper_t stepper_make(const char* text, model_options_t options) {
  stepper_t stepper = {.model = model_create(text, options)};
  assert_true(stepper_num_args(&stepper) <= kMostArrays &&
              stepper_num_results(&stepper) <= kMostArrays);
  for (uint32_t a = 0; a < stepper_num_args(&stepper); ++a) {
    stepper.args[a] = stepper_upload(stepper.model, a, (float)a);
  }
  return stepper;
}

jpp_status_t* stepper_call(stepper_t* stepper, const jpp_interrupt_t* interrupt) {
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = stepper->args,
                     .num_args = stepper_num_args(stepper),
                     .results = stepper->results,
                     .num_results = stepper_num_results(stepper),
                     .interrupt = interrupt};
  return jpp_runtime_call(stepper->model->runtime, &call);
}

void release_all(jpp_array_t** arrays, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    jpp_array_release(arrays[i]);
    arrays[i] = NULL;
  }
}

void stepper_feed_back(stepper_t* stepper) {
  uint32_t weights = stepper_num_args(stepper) - 1;
  for (uint32_t w = 0; w < weights; ++w) {
    jpp_array_release(stepper->args[w]);
    stepper->args[w] = stepper->results[w];
    stepper->results[w] = NULL;
  }
  release_all(stepper->results, stepper_num_results(stepper));
}

void stepper_end(stepper_t* stepper) {
  release_all(stepper->args, stepper_num_args(stepper));
  release_all(stepper->results, stepper_num_results(stepper));
  model_destroy(stepper->model);
}
