// A slow prediction that is simple enough to trust: it searches lists of everything, and
// tracks the remaining work of every job.
#ifndef TESTS_C_PREDICT_REFERENCE_H_
#define TESTS_C_PREDICT_REFERENCE_H_

#include "jaxpp/predict.h"

enum { kMaxTokens = 1 << 16, kMaxRanks = 8, kMaxItems = 1 << 14 };

typedef struct item {
  uint32_t rank, instr, step;  // index of a run
  uint32_t args[256], results[256];
  uint32_t num_args, num_results, device;
  bool running, done;
  double left, start, end;
} item_t;

typedef struct letter {
  uint32_t channel, token, out;  // the value, and the received value
  double bytes, arrival;
  bool departed, arrived, received;
  bool moves, to_host;  // a move of `rank`, not a message
  uint32_t rank;
} letter_t;

typedef struct reference {
  const jpp_plan_t* plan;
  const jpp_predict_options_t* options;
  const jpp_machine_t* machine;
  bool ready[kMaxTokens];
  uint32_t tokens;
  item_t* items;  // in the order of issue
  uint32_t num_items;
  letter_t* letters;  // in the order of issue
  uint32_t num_letters;
  uint32_t* registers[kMaxRanks];  // tokens
  uint32_t at[kMaxRanks];
  uint32_t step[kMaxRanks], turn[kMaxRanks];  // index of a process
  bool ran[kMaxRanks], advanced[kMaxRanks];
  double call_left[kMaxRanks];  // index of a process; < 0: in no call
  double now;
} reference_t;

// Predicts the plan on the machine of the options, which has every list except `links`.
// Free it with free_reference().
reference_t* run_reference(const jpp_plan_t* plan, const jpp_predict_options_t* options);
void free_reference(reference_t* ref);

#endif  // TESTS_C_PREDICT_REFERENCE_H_
