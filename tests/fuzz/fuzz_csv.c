// Schedules as CSV: every schedule that is accepted can be written and read back.
#include "fuzz.h"
#include "jaxpp/graph.h"
#include "jaxpp/schedule_csv.h"

static void check_round_trip(const jpp_schedule_t* schedule, bool communication) {
  char* text = NULL;
  jpp_schedule_t* read = NULL;
  FUZZ_CHECK(fuzz_ok(jpp_schedule_print_csv(schedule, communication, &text)));
  FUZZ_CHECK(fuzz_ok(jpp_schedule_from_csv("written", text, strlen(text), NULL, &read)));
  FUZZ_CHECK(read->stages == schedule->stages && read->ranks == schedule->ranks);
  FUZZ_CHECK(read->microbatches == schedule->microbatches);
  jpp_schedule_destroy(read);
  jpp_text_free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  if (!fuzz_ok(
          jpp_schedule_from_csv("input", (const char*)data, size, &slots, &schedule))) {
    FUZZ_CHECK(!schedule);
    return 0;
  }
  check_round_trip(schedule, false);
  check_round_trip(schedule, true);
  jpp_schedule_destroy(schedule);
  return 0;
}
