// Descriptions of values, registers and instructions for the checker's error messages.
#include <stdarg.h>
#include <stdio.h>

#include "check/checker.h"

const char* jpp__check_value_text(const jpp_checker_t* c, uint32_t value,
                                  uint32_t microbatch, char buffer[JPP_CHECK_TEXT_SIZE]) {
  if (value >= c->staged->num_values) {
    snprintf(buffer, JPP_CHECK_TEXT_SIZE, "%%%u (no such value)", value);
    return buffer;
  }
  const jpp_type_t* type = &c->staged->values[value].type;
  size_t size = JPP_CHECK_TEXT_SIZE - 32;  // leaves room for the microbatch
  size_t at =
      (size_t)snprintf(buffer, size, "%%%u (%s[", value, jpp_dtype_name(type->dtype));
  for (uint32_t i = 0; i < type->ndim && at + 24 < size; ++i) {
    at += (size_t)snprintf(buffer + at, size - at, "%s%lld", i ? "," : "",
                           (long long)type->dims[i]);
  }
  at += (size_t)snprintf(buffer + at, JPP_CHECK_TEXT_SIZE - at, "]");
  if (microbatch != JPP_NONE) {
    at += (size_t)snprintf(buffer + at, JPP_CHECK_TEXT_SIZE - at, ", microbatch %u",
                           microbatch);
  }
  snprintf(buffer + at, JPP_CHECK_TEXT_SIZE - at, ")");
  return buffer;
}

const char* jpp__check_content_text(const jpp_checker_t* c, const jpp_content_t* content,
                                    char buffer[JPP_CHECK_TEXT_SIZE]) {
  if (content->owner == JPP_OWNER_CONSTANT) {
    snprintf(buffer, JPP_CHECK_TEXT_SIZE, "the microbatch number %u",
             content->microbatch);
    return buffer;
  }
  if (content->value == JPP_NONE) return "nothing";
  const jpp_accumulator_t* acc = jpp__check_accumulator(c, content->value);
  jpp__check_value_text(c, content->value, content->microbatch, buffer);
  if (!acc || content->value == acc->final) return buffer;
  size_t at = 0;
  while (buffer[at]) ++at;
  snprintf(buffer + at, JPP_CHECK_TEXT_SIZE - at, " with %u microbatches summed",
           content->summed);
  return buffer;
}

static void transfer_text(const jpp_checker_t* c, const jpp_program_t* program,
                          const jpp_instr_t* instr, char buffer[JPP_CHECK_TEXT_SIZE]) {
  char value[JPP_CHECK_TEXT_SIZE] = "?";
  bool send = instr->kind == JPP_INSTR_SEND;
  if (instr->first_value < program->num_operand_values) {
    jpp__check_value_text(c, program->operand_values[instr->first_value],
                          instr->microbatch, value);
  }
  uint32_t peer = JPP_NONE;
  if (instr->target < c->plan->num_channels) {
    const jpp_plan_channel_t* channel = &c->plan->channels[instr->target];
    peer = send ? channel->dst : channel->src;
  }
  snprintf(buffer, JPP_CHECK_TEXT_SIZE, "%s of %.180s %s rank %d", send ? "send" : "recv",
           value, send ? "to" : "from", (int)peer);
}

static void move_text(const jpp_checker_t* c, const jpp_program_t* program,
                      const jpp_instr_t* instr, char buffer[JPP_CHECK_TEXT_SIZE]) {
  char value[JPP_CHECK_TEXT_SIZE] = "?";
  const char* memory = jpp_memory_name((jpp_memory_t)instr->target);
  if (instr->first_value < program->num_operand_values) {
    jpp__check_value_text(c, program->operand_values[instr->first_value],
                          instr->microbatch, value);
  }
  snprintf(buffer, JPP_CHECK_TEXT_SIZE, "move of %.180s to %s", value,
           memory ? memory : "an unknown memory");
}

static void run_text(const jpp_checker_t* c, const jpp_instr_t* instr,
                     char buffer[JPP_CHECK_TEXT_SIZE]) {
  bool known = instr->target < c->staged->num_tasks;
  const char* task = known ? c->staged->tasks[instr->target].name : "an unknown task";
  if (instr->microbatch == JPP_NONE) {
    snprintf(buffer, JPP_CHECK_TEXT_SIZE, "run of %s", task);
  } else {
    snprintf(buffer, JPP_CHECK_TEXT_SIZE, "run of %s, microbatch %u", task,
             instr->microbatch);
  }
}

const char* jpp__check_instr_text(const jpp_checker_t* c, const jpp_program_t* program,
                                  const jpp_instr_t* instr,
                                  char buffer[JPP_CHECK_TEXT_SIZE]) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      run_text(c, instr, buffer);
      return buffer;
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
      transfer_text(c, program, instr, buffer);
      return buffer;
    case JPP_INSTR_DELETE:
      return "delete";
    case JPP_INSTR_MOVE:
      move_text(c, program, instr, buffer);
      return buffer;
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return "unknown instruction";
}

jpp_status_t* jpp__walk_fail(const jpp_walk_t* w, const char* format, ...) {
  char message[4 * JPP_CHECK_TEXT_SIZE], instr[JPP_CHECK_TEXT_SIZE];
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof(message), format, args);
  va_end(args);
  if (!w->instr) {
    return jpp_status_make(JPP_PROGRAM_ERROR, "rank %u: %s", w->program->rank, message);
  }
  return jpp_status_make(
      JPP_PROGRAM_ERROR, "rank %u, instruction %u: %s: %s", w->program->rank, w->at,
      jpp__check_instr_text(w->c, w->program, w->instr, instr), message);
}
