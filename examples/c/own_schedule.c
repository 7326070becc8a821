// A custom schedule: a callback makes the task lists, and the library proves that they
// can run and draws them.
//
//   own_schedule [STAGES MICROBATCHES]
//
// The schedule is 1F1B: stage s runs STAGES - s forwards ahead, then alternates backwards
// and forwards, then runs the remaining backwards.
#include <inttypes.h>
#include <jaxpp/jaxpp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMaxStages = 16 };

typedef struct own {
  uint32_t stages, microbatches;
  // Number of tasks that each rank has listed.
  uint32_t forwards[kMaxStages], backwards[kMaxStages];
} own_t;

// Called on this thread for one rank after the other, until it returns false: writes the
// rank's next task.
static bool next_task(void* context, uint32_t rank, jpp_schedule_task_t* out_task) {
  own_t* own = (own_t*)context;
  uint32_t* forwards = &own->forwards[rank];
  uint32_t* backwards = &own->backwards[rank];
  if (*backwards == own->microbatches) return false;
  bool forward =
      *forwards < own->microbatches && *forwards - *backwards < own->stages - rank;
  memset(out_task, 0, sizeof(*out_task));  // latency 0: the default of its kind
  out_task->kind = forward ? JPP_TASK_FWD : JPP_TASK_BWD;
  out_task->stage = rank;
  out_task->microbatch = forward ? (*forwards)++ : (*backwards)++;
  return true;
}

static int fail(jpp_status_t* status) {
  fprintf(stderr, "own_schedule: %s: %s\n", jpp_status_code_name(jpp_status_code(status)),
          jpp_status_message(status));
  jpp_status_free(status);
  return 1;
}

// Every failure is returned as a status; NULL is success.
static jpp_status_t* prove_and_draw(const jpp_schedule_t* schedule) {
  char* picture = NULL;
  JPP_RETURN_IF_ERROR_IN(jpp_schedule_verify(schedule), "proving it");
  JPP_RETURN_IF_ERROR(jpp_schedule_draw(schedule, &picture));
  printf("%s", picture);
  jpp_text_free(picture);
  uint32_t peaks[kMaxStages];
  JPP_RETURN_IF_ERROR(jpp_schedule_peak_microbatches(schedule, schedule->ranks, peaks));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    printf("rank %" PRIu32 " keeps %" PRIu32 " microbatches\n", r, peaks[r]);
  }
  return NULL;
}

int main(int argc, char** argv) {
  own_t own;
  memset(&own, 0, sizeof(own));
  own.stages = argc > 2 ? (uint32_t)strtoul(argv[1], NULL, 10) : 4;
  own.microbatches = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 8;
  if (own.stages > kMaxStages) own.stages = kMaxStages;
  jpp_schedule_rows_t sizes = {.name = "own",
                               .stages = own.stages,
                               .ranks = own.stages,
                               .microbatches = own.microbatches};
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = jpp_schedule_from_callback(&sizes, next_task, &own, &schedule);
  if (!status) status = prove_and_draw(schedule);
  jpp_schedule_destroy(schedule);
  return status ? fail(status) : 0;
}
