// Short ways to make and print schedules in tests.
#ifndef TESTS_C_SCHEDULE_UTIL_H_
#define TESTS_C_SCHEDULE_UTIL_H_

#include "jaxpp/schedule.h"
#include "test_util.h"

static inline jpp_schedule_t* build(const char* name, uint32_t stages, uint32_t ranks,
                                    uint32_t microbatches) {
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = stages,
                                  .ranks = ranks,
                                  .microbatches = microbatches};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_build(name, &params, &schedule));
  return schedule;
}

// Prints the schedule; the caller frees the text with jpp_text_free().
static inline char* text_of(const jpp_schedule_t* schedule) {
  char* text = NULL;
  ASSERT_OK(jpp_schedule_print(schedule, &text));
  return text;
}

// Calls `use` with every schedule of a grid: ranks 1..6, 1..3 stages a rank, 1..14
// microbatches, fused and not, wherever the schedule takes such sizes.
static inline void for_each_schedule(void (*use)(const jpp_schedule_t* schedule)) {
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const char* name = jpp_schedule_info_at(i)->name;
    for (uint32_t n = 0; n < 6 * 3 * 14 * 2; ++n) {
      uint32_t ranks = n % 6 + 1, v = n / 6 % 3 + 1;
      jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                      .stages = ranks * v,
                                      .ranks = ranks,
                                      .microbatches = n / 18 % 14 + 1,
                                      .fuse_steady_state = n / 252 == 1};
      jpp_schedule_t* schedule = NULL;
      jpp_status_t* status = jpp_schedule_build(name, &params, &schedule);
      if (!status) use(schedule);
      jpp_status_free(status);
      jpp_schedule_destroy(schedule);
    }
  }
}

#endif  // TESTS_C_SCHEDULE_UTIL_H_
