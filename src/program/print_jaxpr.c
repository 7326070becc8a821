// Prints all actors' tasks, transfers and deletions as one jaxpr, in an order in which a
// single thread could run them.
#include "base/str.h"
#include "base/vec.h"
#include "graph/print.h"
#include "program/builder.h"

typedef struct printer {
  const jpp_plan_t* plan;
  jpp_str_t str;
  uint32_t* at;    // [ranks] the next instruction
  uint32_t* sent;  // [channels] messages sent and not yet received
} printer_t;

static void append_registers(printer_t* p, const jpp_program_t* program, uint32_t first,
                             uint32_t count, bool typed) {
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t value = program->operand_values[first + i];
    jpp_str_appendf(&p->str, "%sv%u", i ? " " : "", value);
    if (!typed) continue;
    jpp_str_append(&p->str, ":");
    jpp_type_append(&p->str, &p->plan->staged->values[value].type);
  }
}

static const char* task_type(const jpp_task_t* task) {
  static const char* const kNames[] = {"IDLE", "FWD", "BWD", "BWD_I", "BWD_W", "OUTER"};
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_TASK_KIND_COUNT,
                 "a name a kind");
  return kNames[task->kind];
}

static void append_task(printer_t* p, const jpp_program_t* program,
                        const jpp_instr_t* instr) {
  const jpp_task_t* task = &p->plan->staged->tasks[instr->target];
  const uint32_t* donated_to = p->plan->bindings[instr->target].donated_to;
  append_registers(p, program, instr->first_operand + instr->num_args, instr->num_results,
                   true);
  jpp_str_append(&p->str, instr->num_results ? " = task[\n" : "task[\n");
  if (task->stage != JPP_NONE) {
    jpp_str_appendf(&p->str, "      task_info=(%u, TaskType.%s)\n", task->stage,
                    task_type(task));
  }
  jpp_str_appendf(&p->str, "      mpmd_idx=%u\n", program->rank);
  if (instr->microbatch != JPP_NONE) {
    jpp_str_appendf(&p->str, "      call_counter=%u\n", instr->microbatch);
  }
  jpp_str_append(&p->str, "      donate_invars=(");
  for (uint32_t i = 0; i < instr->num_args; ++i) {
    bool donated = donated_to[i] != JPP_NONE;
    jpp_str_appendf(&p->str, "%s%s", i ? ", " : "", donated ? "True" : "False");
  }
  jpp_str_appendf(&p->str, "%s)\n      task_name=%s\n    ] ",
                  instr->num_args == 1 ? "," : "", task->name);
  append_registers(p, program, instr->first_operand, instr->num_args, false);
}

static void append_transfer(printer_t* p, const jpp_program_t* program,
                            const jpp_instr_t* instr) {
  const jpp_plan_channel_t* channel = &p->plan->channels[instr->target];
  append_registers(p, program, instr->first_operand, 1, true);
  jpp_str_appendf(&p->str,
                  " = transfer[\n      src_mpmd_idx=%u\n      tgt_mpmd_idx=%u\n    ] ",
                  channel->src, channel->dst);
  append_registers(p, program, instr->first_operand, 1, false);
}

static void append_instr(printer_t* p, const jpp_program_t* program,
                         const jpp_instr_t* instr) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      jpp_str_append(&p->str, "    ");
      append_task(p, program, instr);
      break;
    case JPP_INSTR_RECV:
      jpp_str_append(&p->str, "    ");
      append_transfer(p, program, instr);
      break;
    case JPP_INSTR_DELETE:
      jpp_str_appendf(&p->str, "    _:i32[] = delete[mpmd_idx=%u] ", program->rank);
      append_registers(p, program, instr->first_operand, instr->num_args, false);
      break;
    case JPP_INSTR_SEND:  // the receive shows the transfer
    case JPP_INSTR_KIND_COUNT:
      return;
  }
  jpp_str_append(&p->str, "\n");
}

// Prints up to and including the rank's next task; stops at a receive whose send has not
// been printed. False if nothing could be printed.
static bool advance(printer_t* p, uint32_t rank) {
  const jpp_program_t* program = &p->plan->programs[rank];
  uint32_t first = p->at[rank];
  while (p->at[rank] < program->num_instrs) {
    const jpp_instr_t* instr = &program->instrs[p->at[rank]];
    if (instr->kind == JPP_INSTR_RECV && p->sent[instr->target] == 0) break;
    if (instr->kind == JPP_INSTR_RECV) --p->sent[instr->target];
    if (instr->kind == JPP_INSTR_SEND) ++p->sent[instr->target];
    append_instr(p, program, instr);
    ++p->at[rank];
    if (instr->kind == JPP_INSTR_RUN) break;
  }
  return p->at[rank] > first;
}

static void append_args(printer_t* p) {
  const jpp_staged_t* staged = p->plan->staged;
  jpp_str_append(&p->str, "{ lambda ;");
  for (uint32_t i = 0; i < staged->graph->num_args; ++i) {
    jpp_str_appendf(&p->str, " v%u:", staged->args[i].value);
    jpp_type_append(&p->str, &staged->values[staged->args[i].value].type);
  }
  jpp_str_append(&p->str, ". let\n");
}

// A loop's result is what its last accumulation left; that is the name it was made under.
static uint32_t made_as(const jpp_staged_t* staged, uint32_t value) {
  for (uint32_t a = 0; a < staged->num_accumulators; ++a) {
    if (staged->accumulators[a].final == value) return staged->accumulators[a].next;
  }
  return value;
}

static void append_outputs(printer_t* p) {
  const jpp_staged_t* staged = p->plan->staged;
  jpp_str_append(&p->str, "  in (");
  for (uint32_t i = 0; i < staged->graph->num_outputs; ++i) {
    uint32_t value = made_as(staged, staged->outputs[i].value);
    jpp_str_appendf(&p->str, "%sv%u", i ? ", " : "", value);
  }
  jpp_str_append(&p->str, ") }\n");
}

static jpp_status_t* print_all(printer_t* p) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(p->plan->ranks, &p->at));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(p->plan->num_channels, &p->sent));
  append_args(p);
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t r = 0; r < p->plan->ranks; ++r) moved = advance(p, r) || moved;
  }
  append_outputs(p);
  return NULL;
}

jpp_status_t* jpp_plan_print_jaxpr(const jpp_plan_t* plan, char** out_text) {
  *out_text = NULL;
  printer_t printer = {.plan = plan};
  jpp_status_t* status = print_all(&printer);
  jpp_free(printer.at);
  jpp_free(printer.sent);
  return jpp_str_finish_unless(status, &printer.str, out_text);
}
