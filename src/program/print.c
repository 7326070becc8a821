// Prints a plan as text, for golden tests and `jaxpp plan --after program`.
#include "graph/print.h"

#include "base/null.h"
#include "base/str.h"
#include "program/builder.h"

// Operands `first` to `first + count` of the instruction.
static void append_operands(jpp_str_t* str, const jpp_program_t* program,
                            const jpp_instr_t* instr, uint32_t first, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    jpp_str_appendf(str, "%sr%u=%%%u", i ? " " : "",
                    program->operands[instr->first_operand + first + i],
                    program->operand_values[instr->first_value + first + i]);
  }
}

static void append_run(jpp_str_t* str, const jpp_plan_t* plan,
                       const jpp_program_t* program, const jpp_instr_t* instr) {
  const jpp_task_t* task = &plan->staged->tasks[instr->target];
  const uint32_t* donated_to = plan->bindings[instr->target].donated_to;
  jpp_str_appendf(str, "run %s", task->name);
  if (instr->microbatch != JPP_NONE) jpp_str_appendf(str, "__%u", instr->microbatch);
  jpp_str_append(str, " (");
  for (uint32_t i = 0; i < instr->num_args; ++i) {
    if (i) jpp_str_append(str, " ");
    append_operands(str, program, instr, i, 1);
    if (donated_to[i] != JPP_NONE) jpp_str_append(str, "!");
  }
  jpp_str_append(str, ") -> (");
  append_operands(str, program, instr, instr->num_args, instr->num_results);
  jpp_str_append(str, ")\n");
}

static void append_transfer(jpp_str_t* str, const jpp_plan_t* plan,
                            const jpp_program_t* program, const jpp_instr_t* instr) {
  const jpp_plan_channel_t* channel = &plan->channels[instr->target];
  bool send = instr->kind == JPP_INSTR_SEND;
  jpp_str_appendf(str, send ? "send to %u " : "recv from %u ",
                  send ? channel->dst : channel->src);
  append_operands(str, program, instr, 0, 1);
  if (instr->microbatch != JPP_NONE) {
    jpp_str_appendf(str, " microbatch %u", instr->microbatch);
  }
  jpp_str_append(str, "\n");
}

static void append_move(jpp_str_t* str, const jpp_program_t* program,
                        const jpp_instr_t* instr) {
  jpp_str_append(str, "move ");
  append_operands(str, program, instr, 0, 1);
  jpp_str_append(str, " -> ");
  append_operands(str, program, instr, 1, 1);
  jpp_str_appendf(str, " in %s", jpp_memory_name((jpp_memory_t)instr->target));
  if (instr->microbatch != JPP_NONE) {
    jpp_str_appendf(str, " microbatch %u", instr->microbatch);
  }
  jpp_str_append(str, "\n");
}

static void append_instr(jpp_str_t* str, const jpp_plan_t* plan,
                         const jpp_program_t* program, const jpp_instr_t* instr) {
  jpp_str_append(str, "  ");
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      append_run(str, plan, program, instr);
      break;
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
      append_transfer(str, plan, program, instr);
      break;
    case JPP_INSTR_DELETE:
      jpp_str_append(str, "delete ");
      append_operands(str, program, instr, 0, instr->num_args);
      jpp_str_append(str, "\n");
      break;
    case JPP_INSTR_MOVE:
      append_move(str, program, instr);
      break;
    case JPP_INSTR_KIND_COUNT:
      break;
  }
}

static void append_program(jpp_str_t* str, const jpp_plan_t* plan,
                           const jpp_program_t* program) {
  jpp_str_appendf(str,
                  "actor %u: %u instructions, %u registers, peak %llu bytes at %u "
                  "(%llu in receive slots)",
                  program->rank, program->num_instrs, program->num_registers,
                  (unsigned long long)program->peak_bytes, program->peak_instr,
                  (unsigned long long)program->reserved_bytes);
  if (program->peak_host_bytes) {
    jpp_str_appendf(str, ", peak %llu in pinned_host",
                    (unsigned long long)program->peak_host_bytes);
  }
  jpp_str_append(str, "\n");
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    const jpp_program_input_t* input = &program->inputs[i];
    jpp_str_appendf(str, "  input r%u = arg %u%s\n", input->reg, input->arg,
                    input->owned ? " owned" : "");
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    jpp_str_appendf(str, "  constant r%u = microbatch %u\n", program->constants[i].reg,
                    program->constants[i].microbatch);
  }
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    append_instr(str, plan, program, &program->instrs[i]);
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    const jpp_program_output_t* output = &program->outputs[i];
    jpp_str_appendf(str, "  output %u = %sr%u\n", output->output,
                    output->copy ? "copy of " : "", output->reg);
  }
}

jpp_status_t* jpp_plan_print(const jpp_plan_t* plan, char** out_text) {
  JPP_RETURN_IF_NULL(plan, out_text);
  jpp_str_t str = {0};
  jpp_str_append(&str, "plan ");
  jpp__str_append_quoted(&str, plan->staged->graph->name);
  jpp_str_appendf(&str, " ranks %u\n", plan->ranks);
  for (uint32_t i = 0; i < plan->num_channels; ++i) {
    const jpp_plan_channel_t* channel = &plan->channels[i];
    jpp_str_appendf(&str, "channel %u: %u -> %u, %u slots of %llu bytes, %u messages\n",
                    i, channel->src, channel->dst, channel->slots,
                    (unsigned long long)channel->max_bytes, channel->messages);
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    append_program(&str, plan, &plan->programs[r]);
  }
  return jpp_str_finish(&str, out_text);
}
