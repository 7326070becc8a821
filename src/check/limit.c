// Compares the proved peaks of ranks with their memory limits, adding up ranks that share
// devices; the error describes the largest excess. Memory below the limit has room for
// more steps.
#include "base/null.h"
#include "check/checker.h"

// --- Shared devices ---------------------------------------------------------------

static bool share(const jpp_memory_limits_t* limits, uint32_t a, uint32_t b) {
  return a == b || (limits->devices && limits->devices[a] == limits->devices[b]);
}

uint32_t jpp__limits_next_sharer(const jpp_memory_limits_t* limits, uint32_t ranks,
                                 uint32_t rank) {
  for (uint32_t r = rank + 1; r < ranks; ++r) {
    if (share(limits, rank, r)) return r;
  }
  return JPP_NONE;
}

uint32_t jpp__limits_next_first(const jpp_memory_limits_t* limits, uint32_t ranks,
                                uint32_t first) {
  for (uint32_t r = first == JPP_NONE ? 0 : first + 1; r < ranks; ++r) {
    uint32_t earlier = 0;
    while (!share(limits, earlier, r)) ++earlier;
    if (earlier == r) return r;
  }
  return JPP_NONE;
}

uint64_t jpp__limits_peak(const jpp_memory_limits_t* limits, const jpp_plan_t* plan,
                          uint32_t first) {
  uint64_t peak = 0;
  for (uint32_t r = first; r != JPP_NONE;
       r = jpp__limits_next_sharer(limits, plan->ranks, r)) {
    peak += plan->programs[r].peak_bytes;
  }
  return peak;
}

// --- The largest excess ---------------------------------------------------------------

static jpp_excess_t add_peaks(const jpp_check_report_t* report,
                              const jpp_memory_limits_t* limits, uint32_t first) {
  jpp_excess_t sum = {.first = first, .largest = first};
  uint32_t ranks = report->plan->ranks;
  for (uint32_t r = first; r != JPP_NONE; r = jpp__limits_next_sharer(limits, ranks, r)) {
    uint64_t peak = report->actors[r].peak_bytes;
    if (peak > report->actors[sum.largest].peak_bytes) sum.largest = r;
    sum.peak += peak;
    ++sum.sharers;
  }
  return sum;
}

bool jpp__check_find_excess(const jpp_check_report_t* report,
                            const jpp_memory_limits_t* limits, jpp_excess_t* out_excess) {
  uint32_t ranks = report->plan->ranks;
  uint32_t count = 0;
  uint64_t most = 0;
  *out_excess = (jpp_excess_t){0};
  for (uint32_t r = jpp__limits_next_first(limits, ranks, JPP_NONE); r != JPP_NONE;
       r = jpp__limits_next_first(limits, ranks, r)) {
    jpp_excess_t sum = add_peaks(report, limits, r);
    if (sum.peak <= limits->bytes[r]) continue;
    ++count;
    if (sum.peak - limits->bytes[r] <= most) continue;
    most = sum.peak - limits->bytes[r];
    *out_excess = sum;
  }
  if (count) out_excess->others = count - 1;
  return count != 0;
}

// --- The text -------------------------------------------------------------------------

static void append_who(const jpp_excess_t* excess, const jpp_memory_limits_t* limits,
                       uint32_t ranks, jpp_str_t* str) {
  if (excess->sharers == 1) {
    jpp_str_appendf(str, "memory limit: rank %u: ", excess->first);
    return;
  }
  jpp_str_append(str, "memory limit: ranks");
  for (uint32_t r = excess->first; r != JPP_NONE;
       r = jpp__limits_next_sharer(limits, ranks, r)) {
    jpp_str_appendf(str, "%s %u", r == excess->first ? "" : ",", r);
  }
  jpp_str_append(str, ", on the same devices: ");
}

static void append_ranks(const jpp_check_report_t* report, const jpp_excess_t* excess,
                         const jpp_memory_limits_t* limits, jpp_str_t* str) {
  const jpp_check_actor_t* actor = &report->actors[excess->largest];
  const jpp_program_t* program = &report->plan->programs[excess->largest];
  jpp_checker_t c = {.plan = report->plan, .staged = report->plan->staged};
  uint64_t limit = limits->bytes[excess->first];
  bool alone = excess->sharers == 1;
  char text[JPP_CHECK_TEXT_SIZE];
  append_who(excess, limits, report->plan->ranks, str);
  jpp_str_appendf(str,
                  "expected at most %llu bytes on each device, found %s of %llu, "
                  "%llu over",
                  (unsigned long long)limit, alone ? "a peak" : "peaks",
                  (unsigned long long)excess->peak,
                  (unsigned long long)(excess->peak - limit));
  if (!alone) {
    jpp_str_appendf(str, "; rank %u has the highest peak, %llu", excess->largest,
                    (unsigned long long)actor->peak_bytes);
  }
  if (actor->peak_instr < program->num_instrs) {
    const jpp_instr_t* instr = &program->instrs[actor->peak_instr];
    jpp_str_appendf(str, ", at instruction %u (%s)", actor->peak_instr,
                    jpp__check_instr_text(&c, program, instr, text));
  } else if (program->num_instrs) {
    jpp_str_append(str, ", at the end, where results are copied");
  }
  jpp_str_append(str, "\n  ");
  jpp__check_append_kinds(actor->bytes_at_peak, str);
}

bool jpp__check_append_excess(const jpp_check_report_t* report,
                              const jpp_memory_limits_t* limits, jpp_str_t* str) {
  jpp_excess_t excess;
  if (!jpp__check_find_excess(report, limits, &excess)) return false;
  append_ranks(report, &excess, limits, str);
  if (excess.others) {
    jpp_str_appendf(str, "\n%u other %s%s over as well", excess.others,
                    limits->devices ? "group" : "rank",
                    excess.others == 1 ? " is" : "s are");
  }
  return true;
}

jpp_status_t* jpp_check_memory_limit(const jpp_check_report_t* report,
                                     const jpp_memory_limits_t* limits) {
  JPP_RETURN_IF_NULL(report, limits);
  JPP_RETURN_IF_NULL(limits->bytes);
  jpp_str_t str = {0};
  if (!jpp__check_append_excess(report, limits, &str)) return NULL;
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(JPP_OUT_OF_MEMORY, "%s", text);
  jpp_free(text);
  return status;
}

// --- Pinned host memory ---------------------------------------------------------------

static uint64_t host_peaks(const jpp_check_report_t* report,
                           const jpp_memory_limits_t* limits, uint32_t first) {
  uint64_t sum = 0;
  for (uint32_t r = first; r != JPP_NONE;
       r = jpp__limits_next_sharer(limits, report->plan->ranks, r)) {
    sum += report->actors[r].peak_host_bytes;
  }
  return sum;
}

jpp_status_t* jpp_check_host_limit(const jpp_check_report_t* report,
                                   const jpp_memory_limits_t* limits) {
  JPP_RETURN_IF_NULL(report, limits);
  JPP_RETURN_IF_NULL(limits->bytes);
  uint32_t ranks = report->plan->ranks, worst = JPP_NONE;
  uint64_t most = 0, peak = 0;
  for (uint32_t r = jpp__limits_next_first(limits, ranks, JPP_NONE); r != JPP_NONE;
       r = jpp__limits_next_first(limits, ranks, r)) {
    uint64_t sum = host_peaks(report, limits, r);
    if (sum <= limits->bytes[r] || sum - limits->bytes[r] <= most) continue;
    most = sum - limits->bytes[r];
    worst = r;
    peak = sum;
  }
  if (worst == JPP_NONE) return NULL;
  return jpp_status_make(
      JPP_OUT_OF_MEMORY,
      "memory limit: rank %u%s: expected at most %llu bytes in pinned_host for each "
      "device, found a peak of %llu, %llu over; keep fewer arrays there, or donate them",
      worst,
      jpp__limits_next_sharer(limits, ranks, worst) == JPP_NONE
          ? ""
          : " and others on its devices",
      (unsigned long long)limits->bytes[worst], (unsigned long long)peak,
      (unsigned long long)most);
}

// --- Steps in flight ------------------------------------------------------------------

// The bytes of a value in device memory.
static uint64_t bytes_of(const jpp_checker_t* c, uint32_t value) {
  bool host = c->staged->values[value].type.memory != JPP_MEMORY_DEVICE;
  return host ? 0 : c->plan->value_bytes[value];
}

void jpp__check_next_step(const jpp_checker_t* c, uint32_t rank) {
  const jpp_program_t* program = &c->plan->programs[rank];
  const jpp_graph_t* graph = c->staged->graph;
  uint64_t batch = 0, taken = 0, results = 0;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    uint32_t value = graph->args[program->inputs[i].arg].value;
    if (c->kinds[value] == JPP_BYTES_BATCH) {  // a new array in each step
      batch += bytes_of(c, value);
    } else if (program->inputs[i].owned) {
      taken += bytes_of(c, value);
    }
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    results += bytes_of(c, graph->outputs[program->outputs[i].output].value);
  }
  c->actors[rank].next_step_bytes = batch + (results > taken ? results - taken : 0);
}

// The bytes that one more step needs on all ranks that share devices with `first`.
static uint64_t next_step_bytes(const jpp_check_report_t* report,
                                const jpp_memory_limits_t* limits, uint32_t first) {
  uint64_t sum = 0;
  for (uint32_t r = first; r != JPP_NONE;
       r = jpp__limits_next_sharer(limits, report->plan->ranks, r)) {
    sum += report->actors[r].next_step_bytes;
  }
  return sum;
}

uint32_t jpp_check_steps_in_flight(const jpp_check_report_t* report,
                                   const jpp_memory_limits_t* limits, uint32_t wanted) {
  uint64_t steps = wanted;
  if (!limits) return steps ? wanted : 1;
  uint32_t ranks = report->plan->ranks;
  for (uint32_t r = jpp__limits_next_first(limits, ranks, JPP_NONE); r != JPP_NONE;
       r = jpp__limits_next_first(limits, ranks, r)) {
    uint64_t peak = add_peaks(report, limits, r).peak;
    uint64_t next = next_step_bytes(report, limits, r);
    uint64_t room = limits->bytes[r] > peak ? limits->bytes[r] - peak : 0;
    if (!next) continue;
    if (room / next + 1 < steps) steps = room / next + 1;
  }
  return steps ? (uint32_t)steps : 1;
}
