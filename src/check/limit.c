// Compares each rank's proved peak with its memory limit; the error describes the rank
// that exceeds its limit by most. What is below the limit has room for more steps.
#include "check/checker.h"

uint32_t jpp_check_worst_rank(const jpp_check_report_t* report, const uint64_t* limits,
                              uint32_t* out_count) {
  uint32_t worst = JPP_NONE;
  uint64_t most = 0;
  *out_count = 0;
  for (uint32_t r = 0; r < report->plan->ranks; ++r) {
    uint64_t peak = report->actors[r].peak_bytes;
    if (peak <= limits[r]) continue;
    ++*out_count;
    if (peak - limits[r] <= most) continue;
    most = peak - limits[r];
    worst = r;
  }
  return worst;
}

static void append_rank(const jpp_check_report_t* report, uint32_t rank, uint64_t limit,
                        jpp_str_t* str) {
  const jpp_check_actor_t* actor = &report->actors[rank];
  const jpp_program_t* program = &report->plan->programs[rank];
  jpp_checker_t c = {.plan = report->plan, .staged = report->plan->staged};
  char text[JPP_CHECK_TEXT_SIZE];
  jpp_str_appendf(str,
                  "memory limit: rank %u: expected at most %llu bytes on each device, "
                  "found a peak of %llu, %llu over",
                  rank, (unsigned long long)limit, (unsigned long long)actor->peak_bytes,
                  (unsigned long long)(actor->peak_bytes - limit));
  if (actor->peak_instr < program->num_instrs) {
    const jpp_instr_t* instr = &program->instrs[actor->peak_instr];
    jpp_str_appendf(str, ", at instruction %u (%s)", actor->peak_instr,
                    jpp_check_instr_text(&c, program, instr, text));
  }
  jpp_str_append(str, "\n  ");
  jpp_check_append_kinds(actor->bytes_at_peak, str);
}

bool jpp_check_append_excess(const jpp_check_report_t* report, const uint64_t* limits,
                             jpp_str_t* str) {
  uint32_t count = 0;
  uint32_t worst = jpp_check_worst_rank(report, limits, &count);
  if (worst == JPP_NONE) return false;
  append_rank(report, worst, limits[worst], str);
  if (count > 1) {
    jpp_str_appendf(str, "\n%u other rank%s over as well", count - 1,
                    count == 2 ? " is" : "s are");
  }
  return true;
}

jpp_status_t* jpp_check_memory_limit(const jpp_check_report_t* report,
                                     const uint64_t* limits) {
  jpp_str_t str = {0};
  if (!jpp_check_append_excess(report, limits, &str)) return NULL;
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(JPP_OUT_OF_MEMORY, "%s", text);
  jpp_free(text);
  return status;
}

// --- Steps in flight ------------------------------------------------------------------

static uint64_t bytes_of(const jpp_checker_t* c, uint32_t value) {
  return c->plan->value_bytes[value];
}

void jpp_check_next_step(const jpp_checker_t* c, uint32_t rank) {
  const jpp_program_t* program = &c->plan->programs[rank];
  const jpp_graph_t* graph = c->staged->graph;
  uint64_t batch = 0, taken = 0, results = 0;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    uint32_t value = graph->args[program->inputs[i].arg].value;
    if (program->inputs[i].owned) {
      taken += bytes_of(c, value);
    } else if (c->kinds[value] == JPP_BYTES_BATCH) {
      batch += bytes_of(c, value);
    }
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    results += bytes_of(c, graph->outputs[program->outputs[i].output].value);
  }
  c->actors[rank].next_step_bytes = batch + (results > taken ? results - taken : 0);
}

uint32_t jpp_check_steps_in_flight(const jpp_check_report_t* report,
                                   const uint64_t* limits, uint32_t wanted) {
  uint64_t steps = wanted;
  for (uint32_t r = 0; limits && r < report->plan->ranks; ++r) {
    const jpp_check_actor_t* actor = &report->actors[r];
    uint64_t room = limits[r] > actor->peak_bytes ? limits[r] - actor->peak_bytes : 0;
    if (!actor->next_step_bytes) continue;
    uint64_t more = room / actor->next_step_bytes;
    if (more + 1 < steps) steps = more + 1;
  }
  return steps ? (uint32_t)steps : 1;
}
