// Resolves an actor's program: each instruction gets the executable, the channel and the
// registers that it uses, so that a step looks nothing up.
#include "device/wait.h"
#include "runtime/step/state.h"

static jpp_memory_t memory_of_input(const jpp_runtime_t* runtime,
                                    const jpp_program_input_t* input) {
  const jpp_graph_t* graph = runtime->plan->staged->graph;
  return graph->values[graph->args[input->arg].value].type.memory;
}

// `memories` [num_registers] gets the memory of each register.
static void place_inputs(const jpp_actor_t* actor, jpp_memory_t* memories) {
  const jpp_program_t* program = actor->program;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    const jpp_program_input_t* input = &program->inputs[i];
    memories[input->reg] = memory_of_input(actor->runtime, input);
  }
}

static void place_results(const jpp_program_t* program, const jpp_instr_t* instr,
                          jpp_memory_t* memories) {
  bool move = instr->kind == JPP_INSTR_MOVE;
  const uint32_t* results = program->operands + instr->first_operand + instr->num_args;
  for (uint32_t k = 0; k < instr->num_results; ++k) {
    memories[results[k]] = move ? (jpp_memory_t)instr->target : JPP_MEMORY_DEVICE;
  }
}

// The bytes of an operand in the memory of each device.
static uint64_t operand_bytes(const jpp_actor_t* actor, const jpp_instr_t* instr,
                              const jpp_memory_t* memories, uint32_t index) {
  const jpp_program_t* program = actor->program;
  uint32_t value = program->operand_values[instr->first_value + index];
  uint32_t reg = program->operands[instr->first_operand + index];
  bool device = memories[reg] == JPP_MEMORY_DEVICE;
  return device ? actor->runtime->plan->value_bytes[value] : 0;
}

// The memory of a donated arg lives on in a result, so it counts once.
static int64_t live_bytes_added(const jpp_actor_t* actor, const jpp_instr_t* instr,
                                const jpp_memory_t* memories) {
  const jpp_task_call_t* call = NULL;
  uint64_t more = 0, less = 0;
  for (uint32_t i = 0; i < instr->num_results; ++i) {
    more += operand_bytes(actor, instr, memories, instr->num_args + i);
  }
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      call = &actor->runtime->calls[instr->target];
      for (uint32_t i = 0; i < call->num_donated; ++i) {
        less += operand_bytes(actor, instr, memories, call->donated[i]);
      }
      break;
    case JPP_INSTR_DELETE:
      for (uint32_t i = 0; i < instr->num_args; ++i) {
        less += operand_bytes(actor, instr, memories, i);
      }
      break;
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
    case JPP_INSTR_MOVE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return (int64_t)(more - less);
}

static jpp_status_t* check_result_count(const jpp_actor_t* actor,
                                        const jpp_instr_t* instr) {
  jpp_runtime_t* runtime = actor->runtime;
  const jpp_task_t* task = &runtime->plan->staged->tasks[instr->target];
  const jpp_task_call_t* call = &runtime->calls[instr->target];
  jpp_executable_t* executable = call->executable;
  uint32_t results = 0;
  if (call->copies) return NULL;
  if (executable) {
    JPP_RETURN_IF_ERROR_IN(
        jpp_client_executable_result_count(runtime->client, executable, &results), "%s",
        task->name);
  }
  if (results == instr->num_results) return NULL;
  return jpp_status_make(
      JPP_INVALID_ARGUMENT, "%s: expected an executable of %u results, found %s of %u",
      task->name, instr->num_results, executable ? "one" : "none", results);
}

// An accumulator's last state is sent under the number of the loop's result.
uint64_t jpp__plan_message_tag(const jpp_plan_t* plan, const jpp_program_t* program,
                               const jpp_instr_t* instr) {
  const jpp_staged_t* staged = plan->staged;
  uint32_t value = program->operand_values[instr->first_value];
  for (uint32_t i = 0;
       staged->scopes[value] == JPP_SCOPE_STATE && i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    if (value == acc->next) value = acc->final;
  }
  return (uint64_t)value << 32 | instr->microbatch;
}

static jpp_actor_instr_t resolve_instr(const jpp_actor_t* actor, uint32_t source,
                                       const jpp_memory_t* memories) {
  const jpp_instr_t* instr = &actor->program->instrs[source];
  jpp_actor_instr_t made = {.kind = instr->kind,
                            .num_args = instr->num_args,
                            .num_results = instr->num_results,
                            .source = source,
                            .operands = actor->program->operands + instr->first_operand,
                            .live_bytes = live_bytes_added(actor, instr, memories)};
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      made.call = &actor->runtime->calls[instr->target];
      made.run = actor->num_runs;
      break;
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
      made.link = &actor->runtime->links[instr->target];
      made.tag = jpp__plan_message_tag(actor->runtime->plan, actor->program, instr);
      break;
    case JPP_INSTR_MOVE:
      made.memory = (jpp_memory_t)instr->target;
      break;
    case JPP_INSTR_DELETE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return made;
}

// --- Sends without a copy -------------------------------------------------------------

// Marks the registers that the step needs at the end of the program, or must not give
// away.
static void mark_needed_at_end(const jpp_program_t* program, bool* needed) {
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    if (!program->inputs[i].owned) needed[program->inputs[i].reg] = true;
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    needed[program->constants[i].reg] = true;
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    needed[program->outputs[i].reg] = true;
  }
}

// Between ranks on the same devices, a value that its sender no longer needs moves
// without a copy: the receiver gets the buffers. This walks the program backwards;
// `needed` says for each register whether a later instruction reads it.
static jpp_status_t* find_moves(jpp_actor_t* actor, jpp_actor_instr_t* instrs) {
  const jpp_program_t* program = actor->program;
  bool* needed = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(program->num_registers, &needed));
  mark_needed_at_end(program, needed);
  for (uint32_t i = actor->num_instrs; i-- > 0;) {
    jpp_actor_instr_t* instr = &instrs[i];
    bool reads = instr->kind != JPP_INSTR_DELETE;
    if (instr->kind == JPP_INSTR_SEND) {
      instr->moves = instr->link->same_buffers && !needed[instr->operands[0]];
    }
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      needed[instr->operands[instr->num_args + k]] = false;
    }
    for (uint32_t k = 0; k < instr->num_args; ++k) needed[instr->operands[k]] = reads;
  }
  jpp_free(needed);
  return NULL;
}

// --- Instructions ---------------------------------------------------------------------

// Every executable is asked once for its number of results, at the task's first run.
static jpp_status_t* resolve_instrs(jpp_actor_t* actor, bool* checked,
                                    jpp_memory_t* memories) {
  const jpp_program_t* program = actor->program;
  jpp_actor_instr_t* instrs = NULL;
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&actor->runtime->arena, program->num_instrs, &instrs));
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    bool run = instr->kind == JPP_INSTR_RUN;
    place_results(program, instr, memories);
    if (run && !checked[instr->target]) {
      JPP_RETURN_IF_ERROR_IN(check_result_count(actor, instr), "rank %u", program->rank);
      checked[instr->target] = true;
    }
    const jpp_task_call_t* call = run ? &actor->runtime->calls[instr->target] : NULL;
    if (run && !call->executable && !call->copies) continue;
    instrs[actor->num_instrs++] = resolve_instr(actor, i, memories);
    if (run) ++actor->num_runs;
  }
  actor->instrs = instrs;
  return find_moves(actor, instrs);
}

// --- Rows for jpp_execute_t -----------------------------------------------------------

static jpp_status_t* allocate_rows(jpp_actor_t* actor) {
  jpp_arena_t* arena = &actor->runtime->arena;
  uint32_t devices = actor->runtime->devices_per_rank;
  uint32_t max_args = 0, max_results = 0;
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    if (instr->num_args > max_args) max_args = instr->num_args;
    if (instr->num_results > max_results) max_results = instr->num_results;
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &actor->args));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &actor->results));
  for (uint32_t d = 0; d < devices; ++d) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, max_args, &actor->args[d]));
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, max_results, &actor->results[d]));
  }
  return NULL;
}

static jpp_status_t* allocate_actor(jpp_actor_t* actor) {
  jpp_arena_t* arena = &actor->runtime->arena;
  const jpp_program_t* program = actor->program;
  size_t devices = actor->runtime->devices_per_rank;
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(arena, program->num_registers * devices, &actor->regs));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(arena, program->num_constants * devices, &actor->constants));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, devices, &actor->message));
  return allocate_rows(actor);
}

jpp_status_t* jpp__actor_allocate_step(const jpp_actor_t* actor, jpp_actor_step_t* step) {
  jpp_arena_t* arena = &actor->runtime->arena;
  const jpp_program_t* program = actor->program;
  size_t devices = actor->runtime->devices_per_rank;
  size_t inputs = program->num_inputs * devices, outputs = program->num_outputs * devices;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, inputs, &step->inputs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, program->num_inputs, &step->is_copy));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, outputs, &step->outputs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, actor->num_runs * devices, &step->events));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, actor->num_runs, &step->order));
  return JPP_ARENA_ARRAY(arena, outputs, &step->output_events);
}

// --- What the end of a step must know -------------------------------------------------

// The event of a run covers all its results. A value that was received or moved, or that
// is copied at the end, needs an event of its own.
static jpp_status_t* find_outputs(jpp_actor_t* actor) {
  const jpp_program_t* program = actor->program;
  bool* needs_event = NULL;
  bool* by_run = NULL;
  jpp_memory_t* memories = NULL;
  jpp_arena_t* arena = &actor->runtime->arena;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, program->num_outputs, &needs_event));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, program->num_outputs, &memories));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(program->num_registers, &by_run));
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      by_run[instr->operands[instr->num_args + k]] = instr->kind == JPP_INSTR_RUN;
    }
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    const jpp_staged_t* staged = actor->runtime->plan->staged;
    uint32_t value = staged->outputs[program->outputs[i].output].value;
    needs_event[i] = program->outputs[i].copy || !by_run[program->outputs[i].reg];
    memories[i] = staged->values[value].type.memory;
  }
  actor->output_needs_event = needs_event;
  actor->output_memories = memories;
  jpp_free(by_run);
  return NULL;
}

bool jpp__runtime_has_rank(const jpp_runtime_t* runtime, uint32_t rank) {
  return !runtime->rank_process || runtime->rank_process[rank] == runtime->process;
}

// The program of a rank that another process runs.
static const jpp_program_t kNoProgram;

jpp_status_t* jpp__actor_resolve(jpp_runtime_t* runtime, uint32_t rank) {
  jpp_actor_t* actor = &runtime->actors[rank];
  actor->runtime = runtime;
  actor->program =
      jpp__runtime_has_rank(runtime, rank) ? &runtime->plan->programs[rank] : &kNoProgram;
  bool* checked = NULL;
  jpp_memory_t* memories = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(runtime->plan->staged->num_tasks, &checked));
  jpp_status_t* status = JPP_ALLOC_ARRAY(actor->program->num_registers, &memories);
  if (!status) place_inputs(actor, memories);
  if (!status) status = resolve_instrs(actor, checked, memories);
  jpp_free(memories);
  jpp_free(checked);
  if (!status) status = allocate_actor(actor);
  if (!status) status = find_outputs(actor);
  if (!status) {
    const jpp_program_t* program = actor->program;
    const jpp_plan_t* plan = actor->runtime->plan;
    actor->given_bytes = program->reserved_bytes;
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      uint32_t arg = program->inputs[i].arg;
      if (memory_of_input(runtime, &program->inputs[i]) != JPP_MEMORY_DEVICE) continue;
      actor->given_bytes += plan->value_bytes[plan->staged->graph->args[arg].value];
    }
    if (program->num_constants) {  // all loop indices have the same type
      uint32_t index = plan->staged->graph->loops[0].index;
      actor->given_bytes += program->num_constants * plan->value_bytes[index];
    }
  }
  return status;
}

jpp_status_t* jpp__actor_known_failure(const jpp_actor_t* actor, jpp_actor_step_t* step) {
  jpp_client_t* client = actor->runtime->client;
  size_t count = (size_t)step->runs * actor->runtime->devices_per_rank;
  for (; step->settled < count; ++step->settled) {
    jpp_event_t* event = step->events[step->settled];
    if (!jpp__wait_is_event_ready(client, event)) break;
    jpp_status_t* status = event ? jpp_client_event_await(client, event) : NULL;
    if (status) return status;
  }
  return NULL;
}
