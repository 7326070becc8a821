// Error messages of steps: where a step failed, or what each actor waits for in a
// deadlock.
#include "runtime/step/failure.h"

#include <stdio.h>
#include <string.h>

#include "base/str.h"
#include "jaxpp/job.h"
#include "runtime/cluster/peer_state.h"
#include "runtime/step/state.h"

enum { kMicrobatchSize = 32 };

// " of microbatch 3", or nothing outside loops.
static const char* microbatch_text(uint32_t microbatch, char buffer[kMicrobatchSize]) {
  buffer[0] = 0;
  if (microbatch != JPP_NONE) {
    snprintf(buffer, kMicrobatchSize, " of microbatch %u", microbatch);
  }
  return buffer;
}

// The task that filled the register for the instruction; NULL: an argument.
static const char* maker_name(const jpp_plan_t* plan, const jpp_program_t* program,
                              uint32_t at, uint32_t reg) {
  while (at-- > 0) {
    const jpp_instr_t* instr = &program->instrs[at];
    const uint32_t* results = program->operands + instr->first_operand + instr->num_args;
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      if (results[k] != reg) continue;
      if (instr->kind != JPP_INSTR_RUN) return NULL;
      return plan->staged->tasks[instr->target].name;
    }
  }
  return NULL;
}

static void describe_transfer(const jpp_plan_t* plan, const jpp_program_t* program,
                              uint32_t at, const char* microbatch,
                              char text[kJppPlaceSize]) {
  const jpp_instr_t* instr = &program->instrs[at];
  const jpp_plan_channel_t* channel = &plan->channels[instr->target];
  uint32_t value = program->operand_values[instr->first_value];
  if (instr->kind == JPP_INSTR_RECV) {
    snprintf(text, kJppPlaceSize,
             "rank %u, instruction %u, receive of %%%u%s from rank %u", program->rank, at,
             value, microbatch, channel->src);
    return;
  }
  const char* maker =
      maker_name(plan, program, at, program->operands[instr->first_operand]);
  snprintf(text, kJppPlaceSize,
           "rank %u, instruction %u, send of %%%u from %s%s to rank %u", program->rank,
           at, value, maker ? maker : "the arguments", microbatch, channel->dst);
}

void jpp__failure_describe_instr(const jpp_plan_t* plan, uint32_t rank, uint32_t at,
                                 char text[kJppPlaceSize]) {
  const jpp_program_t* program = &plan->programs[rank];
  const jpp_instr_t* instr = &program->instrs[at];
  char buffer[kMicrobatchSize];
  const char* microbatch = microbatch_text(instr->microbatch, buffer);
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      snprintf(text, kJppPlaceSize, "rank %u, instruction %u, %s%s", rank, at,
               plan->staged->tasks[instr->target].name, microbatch);
      return;
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
      describe_transfer(plan, program, at, microbatch, text);
      return;
    case JPP_INSTR_MOVE:
      snprintf(text, kJppPlaceSize, "rank %u, instruction %u, move of %%%u%s to %s", rank,
               at, program->operand_values[instr->first_value], microbatch,
               jpp_memory_name((jpp_memory_t)instr->target));
      return;
    case JPP_INSTR_DELETE:
      snprintf(text, kJppPlaceSize, "rank %u, instruction %u, delete", rank, at);
      return;
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  snprintf(text, kJppPlaceSize, "rank %u, instruction %u", rank, at);
}

void jpp__failure_describe(const jpp_actor_t* actor, uint32_t at,
                           char text[kJppPlaceSize]) {
  jpp__failure_describe_instr(actor->runtime->plan, actor->program->rank, at, text);
}

const char* jpp__failure_behind_rank(const char* text) { return strstr(text, ", ") + 2; }

// --- Memory ---------------------------------------------------------------------------

jpp_status_t* jpp_plan_explain_memory(const jpp_plan_t* plan, uint32_t rank,
                                      jpp_status_t* status) {
  if (jpp_status_code(status) != JPP_OUT_OF_MEMORY) return status;
  char peak[kJppPlaceSize] = "";
  const jpp_program_t* program = &plan->programs[rank];
  if (program->peak_instr < program->num_instrs) {
    jpp__failure_describe_instr(plan, rank, program->peak_instr, peak);
  } else if (program->num_instrs) {
    snprintf(peak, sizeof(peak), "rank %u, at the end, where results are copied", rank);
  }
  const char* message = jpp_status_message(status);
  size_t length = strlen(message);
  if (length && message[length - 1] == '.') --length;
  jpp_status_t* explained = jpp_status_make(
      JPP_OUT_OF_MEMORY,
      "%.*s; the plan's values take up to %llu bytes on each of the rank's devices (%s), "
      "and each task needs memory for its temporaries besides. To need less: smaller "
      "microbatches, jax.checkpoint in the stages, donated arguments, a schedule with "
      "fewer microbatches in flight, or more ranks",
      (int)length, message, (unsigned long long)program->peak_bytes, peak);
  jpp_status_free(status);
  return explained;
}

static jpp_status_t* add_memory_hint(const jpp_actor_t* actor, jpp_status_t* status) {
  return jpp_plan_explain_memory(actor->runtime->plan, actor->program->rank, status);
}

// --- Places ---------------------------------------------------------------------------

jpp_status_t* jpp__failure_locate(const jpp_actor_t* actor, uint32_t instr,
                                  jpp_status_t* status) {
  char place[kJppPlaceSize];
  jpp__failure_describe(actor, instr, place);
  status = add_memory_hint(actor, jpp_job_explain(status));
  return jpp_status_annotate(status, "%s", place);
}

jpp_status_t* jpp__failure_locate_output(const jpp_actor_t* actor, uint32_t output,
                                         jpp_status_t* status) {
  const jpp_program_output_t* out = &actor->program->outputs[output];
  const char* name = actor->runtime->plan->staged->graph->outputs[out->output].name;
  status = add_memory_hint(actor, status);
  return jpp_status_annotate(status, "rank %u, %soutput %u%s%s%s", actor->program->rank,
                             out->copy ? "copy of " : "", out->output, name ? " '" : "",
                             name ? name : "", name ? "'" : "");
}

// The instruction of the sender that sends a message with this tag.
static const char* describe_sender(const jpp_actor_t* receiver, const jpp_link_t* link,
                                   uint64_t tag, char text[kJppPlaceSize]) {
  const jpp_actor_t* sender = &receiver->runtime->actors[link->plan->src];
  for (uint32_t i = 0; i < sender->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &sender->instrs[i];
    if (instr->kind != JPP_INSTR_SEND || instr->link != link || instr->tag != tag) {
      continue;
    }
    jpp__failure_describe(sender, instr->source, text);
    return text;
  }
  return "a message that no instruction sends";
}

jpp_status_t* jpp__failure_mismatch(const jpp_actor_t* actor,
                                    const jpp_actor_instr_t* instr, uint64_t found_tag) {
  char expected[kJppPlaceSize], found[kJppPlaceSize];
  jpp__failure_describe(actor, instr->source, expected);
  return jpp_status_make(JPP_INTERNAL_ERROR, "expected the message for '%s', found '%s'",
                         expected, describe_sender(actor, instr->link, found_tag, found));
}

static void append_blocked(jpp_str_t* str, const jpp_actor_t* actor) {
  char place[kJppPlaceSize];
  const jpp_actor_instr_t* instr = &actor->instrs[actor->at];
  jpp__failure_describe(actor, instr->source, place);
  jpp_str_appendf(str, "%s%s", str->length ? "; " : "", place);
  if (!instr->link) return;
  if (instr->link->remote) {
    const jpp_runtime_t* runtime = actor->runtime;
    bool sends = instr->kind == JPP_INSTR_SEND;
    uint32_t other = sends ? instr->link->plan->dst : instr->link->plan->src;
    jpp_str_appendf(str, " (in process %u)", runtime->rank_process[other]);
    return;
  }
  uint64_t waiting = instr->link->sent - instr->link->received;
  jpp_str_appendf(str, " (%llu of %u slots full)", (unsigned long long)waiting,
                  instr->link->plan->slots);
}

// Describes what each unfinished actor waits for and, with other processes, which rank
// waits for which; free with jpp_free().
static jpp_status_t* describe_blocked(jpp_runtime_t* runtime, char** out_text) {
  jpp_str_t str = {0};
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_actor_t* actor = &runtime->actors[r];
    if (actor->at < actor->num_instrs) append_blocked(&str, actor);
  }
  jpp_status_t* status = runtime->network ? jpp__peer_state_explain(runtime, &str) : NULL;
  if (!status) return jpp_str_finish(&str, out_text);
  jpp_str_deinit(&str);
  return status;
}

jpp_status_t* jpp__failure_stuck(jpp_runtime_t* runtime) {
  char* text = NULL;
  JPP_RETURN_IF_ERROR(describe_blocked(runtime, &text));
  jpp_status_t* status = jpp_status_make(
      JPP_INTERNAL_ERROR, "the programs wait for each other for ever: %s", text);
  jpp_free(text);
  return status;
}

jpp_status_t* jpp__failure_stalled(jpp_runtime_t* runtime) {
  char* text = NULL;
  JPP_RETURN_IF_ERROR(describe_blocked(runtime, &text));
  jpp_status_t* status = jpp_status_make(
      JPP_PEER_ERROR,
      "other processes have sent nothing for %g s (JPP_STALL_TIMEOUT): %s; expected "
      "all processes to call the same steps, with arguments of the same shapes and "
      "dtypes: one has stopped, hangs, or is busy elsewhere",
      (double)runtime->stall_timeout_ms / 1000, text);
  jpp_free(text);
  return status;
}

jpp_status_t* jpp__failure_late(const jpp_actor_t* actor) {
  jpp_runtime_t* runtime = actor->runtime;
  const jpp_deadline_t* deadline = &runtime->deadline;
  const jpp_deadline_wait_t* wait = actor->instrs[actor->at].wait;
  char* text = NULL;
  JPP_RETURN_IF_ERROR(describe_blocked(runtime, &text));
  jpp_status_t* status = jpp_status_make(
      JPP_PEER_ERROR,
      "rank %u has waited %.3g s for a send or receive that usually takes up to %.2g s "
      "(the longest of JPP_STEP_TIMEOUT, %g s; a step, %.2g s; %d times what is usual): "
      "%s",
      actor->program->rank,
      (double)jpp__deadline_limit(deadline, wait, runtime->step_timeout_ms) / 1e9,
      (double)jpp__deadline_usual(deadline, wait) / 1e9,
      (double)runtime->step_timeout_ms / 1000, (double)deadline->step / 1e9,
      kJppDeadlineTimes, text);
  jpp_free(text);
  return status;
}
