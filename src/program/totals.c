// The costs of a step that are known before it runs: tasks, operations, bytes.
#include "jaxpp/program.h"

jpp_rank_totals_t jpp_plan_rank_totals(const jpp_plan_t* plan, uint32_t rank) {
  const jpp_program_t* program = &plan->programs[rank];
  jpp_rank_totals_t totals = {0};
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind != JPP_INSTR_RUN) continue;
    ++totals.tasks;
    totals.flops += plan->staged->tasks[instr->target].cost;
  }
  return totals;
}

uint64_t jpp_plan_channel_bytes(const jpp_plan_t* plan, uint32_t channel) {
  const jpp_program_t* program = &plan->programs[plan->channels[channel].src];
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind != JPP_INSTR_SEND || instr->target != channel) continue;
    bytes += plan->value_bytes[program->operand_values[instr->first_operand]];
  }
  return bytes;
}
