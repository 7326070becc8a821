// Prints all actors' tasks, transfers and deletions as one jaxpr, in an order in which a
// single thread could run them.
#include "base/arena.h"
#include "base/null.h"
#include "base/str.h"
#include "graph/print.h"
#include "program/builder.h"

// Every name is defined once. Microbatch numbers have no name: they print as literals.
static const uint32_t kLiteral = 1u << 31;

typedef struct printer {
  const jpp_plan_t* plan;
  jpp_str_t str;
  uint32_t* at;  // [ranks] the next instruction
  uint32_t num_names;
  uint32_t** names;           // [ranks][registers] the name of each register's contents
  uint32_t** messages;        // [channels][messages] the names of the sent values
  uint32_t *sent, *received;  // [channels] messages
  // [loops]; NULL: tasks have the latency of their kind.
  const jpp_schedule_t* const* schedules;
  // [loops][ranks] the number of entries of the rank's row whose tasks are printed.
  uint32_t** entries;
  jpp_append_sharding_t append_sharding;  // NULL: shardings are not printed
  void* user;
} printer_t;

static void append_name(printer_t* p, uint32_t name) {
  if (name & kLiteral) {
    jpp_str_appendf(&p->str, "%u:i32[]", name & ~kLiteral);
  } else {
    jpp_str_appendf(&p->str, "v%u", name);
  }
}

// Appends an instruction's args: " v3 v4".
static void append_args(printer_t* p, const jpp_program_t* program,
                        const jpp_instr_t* instr) {
  for (uint32_t i = 0; i < instr->num_args; ++i) {
    jpp_str_append(&p->str, " ");
    append_name(p, p->names[program->rank][program->operands[instr->first_operand + i]]);
  }
}

static void append_new(printer_t* p, uint32_t name, uint32_t value) {
  jpp_str_appendf(&p->str, "v%u:", name);
  jpp__type_append(&p->str, &p->plan->staged->values[value].type);
}

static const char* task_type(const jpp_task_t* task) {
  static const char* const kNames[] = {"IDLE", "FWD", "BWD", "BWD_I", "BWD_W", "OUTER"};
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_TASK_KIND_COUNT,
                 "a name a kind");
  return kNames[task->kind];
}

// The entry of a whole backward covers both halves of a split one.
static bool is_entry_of(const jpp_schedule_task_t* entry, const jpp_task_t* task,
                        uint32_t microbatch) {
  bool half = task->kind == JPP_TASK_BWD_I || task->kind == JPP_TASK_BWD_W;
  return (entry->kind == task->kind || (half && entry->kind == JPP_TASK_BWD)) &&
         entry->stage == task->stage && entry->microbatch == microbatch;
}

// The latency in the schedule. Tasks are printed in the order of their row.
static uint32_t latency_of(printer_t* p, const jpp_task_t* task, uint32_t microbatch) {
  if (p->schedules) {
    const jpp_schedule_row_t* row = &p->schedules[task->loop]->rows[task->rank];
    for (uint32_t i = p->entries[task->loop][task->rank]; i < row->count; ++i) {
      if (!is_entry_of(&row->tasks[i], task, microbatch)) continue;
      p->entries[task->loop][task->rank] = i;
      return row->tasks[i].latency;
    }
  }
  return jpp_task_default_latency((jpp_task_kind_t)task->kind);
}

static void append_task(printer_t* p, const jpp_program_t* program,
                        const jpp_instr_t* instr) {
  const jpp_task_t* task = &p->plan->staged->tasks[instr->target];
  const uint32_t* donated_to = p->plan->bindings[instr->target].donated_to;
  uint32_t first_result = instr->first_operand + instr->num_args;
  uint32_t first_name = p->num_names;
  p->num_names += instr->num_results;
  for (uint32_t i = 0; i < instr->num_results; ++i) {
    if (i) jpp_str_append(&p->str, " ");
    append_new(p, first_name + i,
               program->operand_values[instr->first_value + instr->num_args + i]);
  }
  jpp_str_append(&p->str, instr->num_results ? " = task[\n" : "task[\n");
  if (task->stage != JPP_NONE) {
    jpp_str_appendf(&p->str, "      task_info=(%u, TaskType.%s)\n      latency=%u\n",
                    task->stage, task_type(task), latency_of(p, task, instr->microbatch));
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
  jpp_str_appendf(&p->str, "%s)\n      task_name=%s\n    ]",
                  instr->num_args == 1 ? "," : "", task->name);
  append_args(p, program, instr);
  for (uint32_t i = 0; i < instr->num_results; ++i) {
    p->names[program->rank][program->operands[first_result + i]] = first_name + i;
  }
}

static void append_end(printer_t* p, const char* which, uint32_t rank, uint32_t value) {
  jpp_str_appendf(&p->str, "      %s_mpmd_idx=%u\n", which, rank);
  if (!p->append_sharding) return;
  jpp_str_appendf(&p->str, "      %s_shardings=[", which);
  p->append_sharding(p->user, value, &p->str);
  jpp_str_append(&p->str, "]\n");
}

// Printed at the send, because the sender may delete the value before it is received.
static void append_transfer(printer_t* p, const jpp_program_t* program,
                            const jpp_instr_t* instr) {
  const jpp_plan_channel_t* channel = &p->plan->channels[instr->target];
  uint32_t name = p->num_names++;
  uint32_t value = program->operand_values[instr->first_value];
  append_new(p, name, value);
  jpp_str_append(&p->str, " = transfer[\n");
  append_end(p, "src", channel->src, value);
  append_end(p, "tgt", channel->dst, value);
  jpp_str_append(&p->str, "    ]");
  append_args(p, program, instr);
  p->messages[instr->target][p->sent[instr->target]++] = name;
}

static void receive(printer_t* p, const jpp_program_t* program,
                    const jpp_instr_t* instr) {
  uint32_t message = p->received[instr->target]++;
  p->names[program->rank][program->operands[instr->first_operand]] =
      p->messages[instr->target][message];
}

static void append_move(printer_t* p, const jpp_program_t* program,
                        const jpp_instr_t* instr) {
  uint32_t name = p->num_names++;
  append_new(p, name, program->operand_values[instr->first_value + 1]);
  jpp_str_appendf(&p->str, " = move[mpmd_idx=%u memory_kind=%s]", program->rank,
                  jpp_memory_name((jpp_memory_t)instr->target));
  append_args(p, program, instr);
  p->names[program->rank][program->operands[instr->first_operand + 1]] = name;
}

static void append_instr(printer_t* p, const jpp_program_t* program,
                         const jpp_instr_t* instr) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      jpp_str_append(&p->str, "    ");
      append_task(p, program, instr);
      break;
    case JPP_INSTR_SEND:
      jpp_str_append(&p->str, "    ");
      append_transfer(p, program, instr);
      break;
    case JPP_INSTR_DELETE:
      jpp_str_appendf(&p->str, "    _:i32[] = delete[mpmd_idx=%u]", program->rank);
      append_args(p, program, instr);
      break;
    case JPP_INSTR_MOVE:
      jpp_str_append(&p->str, "    ");
      append_move(p, program, instr);
      break;
    case JPP_INSTR_RECV:  // the send prints the transfer
      receive(p, program, instr);
      return;
    case JPP_INSTR_KIND_COUNT:
      return;
  }
  jpp_str_append(&p->str, "\n");
}

// Prints up to and including the rank's next task; stops at a receive whose send has not
// been printed. Returns false if nothing could be printed.
static bool advance(printer_t* p, uint32_t rank) {
  const jpp_program_t* program = &p->plan->programs[rank];
  uint32_t first = p->at[rank];
  while (p->at[rank] < program->num_instrs) {
    const jpp_instr_t* instr = &program->instrs[p->at[rank]];
    bool receives = instr->kind == JPP_INSTR_RECV;
    if (receives && p->sent[instr->target] == p->received[instr->target]) break;
    append_instr(p, program, instr);
    ++p->at[rank];
    if (instr->kind == JPP_INSTR_RUN) break;
  }
  return p->at[rank] > first;
}

// NULL: another rank has the output.
static const jpp_program_output_t* find_output(const jpp_program_t* program,
                                               uint32_t output) {
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    if (program->outputs[i].output == output) return &program->outputs[i];
  }
  return NULL;
}

static void append_step_output(printer_t* p, uint32_t output) {
  for (uint32_t r = 0; r < p->plan->ranks; ++r) {
    const jpp_program_output_t* found = find_output(&p->plan->programs[r], output);
    if (!found) continue;
    append_name(p, p->names[r][found->reg]);
    return;
  }
}

static void append_step_outputs(printer_t* p) {
  jpp_str_append(&p->str, "  in (");
  for (uint32_t i = 0; i < p->plan->staged->graph->num_outputs; ++i) {
    if (i) jpp_str_append(&p->str, ", ");
    append_step_output(p, i);
  }
  jpp_str_append(&p->str, ") }\n");
}

static jpp_status_t* make_tables(printer_t* p, jpp_arena_t* arena) {
  const jpp_plan_t* plan = p->plan;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &p->at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &p->names));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &p->messages));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &p->sent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &p->received));
  uint32_t loops = plan->staged->graph->num_loops;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, loops, &p->entries));
  for (uint32_t l = 0; l < loops; ++l) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &p->entries[l]));
  }
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    uint32_t messages = plan->channels[c].messages;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, messages, &p->messages[c]));
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, program->num_registers, &p->names[r]));
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      p->names[r][program->inputs[i].reg] = program->inputs[i].arg;
    }
    for (uint32_t i = 0; i < program->num_constants; ++i) {
      const jpp_program_constant_t* constant = &program->constants[i];
      p->names[r][constant->reg] = kLiteral | constant->microbatch;
    }
  }
  return NULL;
}

static jpp_status_t* print_all(printer_t* p, jpp_arena_t* arena) {
  JPP_RETURN_IF_ERROR(make_tables(p, arena));
  const jpp_staged_t* staged = p->plan->staged;
  p->num_names = staged->graph->num_args;
  jpp_str_append(&p->str, "{ lambda ;");
  for (uint32_t i = 0; i < p->num_names; ++i) {
    jpp_str_append(&p->str, " ");
    append_new(p, i, staged->args[i].value);
  }
  jpp_str_append(&p->str, ". let\n");
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t r = 0; r < p->plan->ranks; ++r) moved = advance(p, r) || moved;
  }
  append_step_outputs(p);
  return NULL;
}

jpp_status_t* jpp_plan_print_jaxpr(const jpp_plan_t* plan,
                                   const jpp_schedule_t* const* schedules,
                                   jpp_append_sharding_t append_sharding, void* user,
                                   char** out_text) {
  JPP_RETURN_IF_NULL(plan, out_text);
  *out_text = NULL;
  printer_t printer = {.plan = plan,
                       .schedules = schedules,
                       .append_sharding = append_sharding,
                       .user = user};
  jpp_arena_t arena;
  jpp__arena_init(&arena);
  jpp_status_t* status = print_all(&printer, &arena);
  jpp__arena_deinit(&arena);
  return jpp__str_finish_unless(status, &printer.str, out_text);
}
