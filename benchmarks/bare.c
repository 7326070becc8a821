// Unrolls a plan into one list of client calls, in an order in which no call needs a
// later one, and makes the calls on one thread.
#include "benchmarks/bare.h"

#include "base/vec.h"

// An instruction, in an order in which one thread issues for all ranks. Registers are
// numbered over all ranks.
typedef struct bare_call {
  uint8_t kind;  // jpp_instr_kind_t
  uint32_t num_args, num_results;
  uint32_t device;      // RUN: the rank's own device; SEND: the other rank's device
  uint64_t message;     // SEND, RECV
  bool hands_over;      // SEND: the receiver gets the buffer itself
  jpp_memory_t memory;  // MOVE
  jpp_executable_t* executable;
  const uint32_t* donated_to;
  uint32_t* registers;  // args, then results
} bare_call_t;

struct jpp_bare {
  jpp_runtime_options_t options;
  jpp_arena_t arena;
  uint32_t* devices;         // [ranks]
  uint32_t* first_register;  // [ranks + 1]
  JPP_VEC(bare_call_t) calls;
  jpp_buffer_t** regs;
  jpp_buffer_t** messages;
  uint64_t* first_message;  // [channels + 1]
  jpp_buffer_t **args, **results;
  uint32_t most_operands;
};

typedef struct unroller {
  jpp_bare_t* bare;
  uint32_t* at;    // [ranks] next instruction
  uint64_t* sent;  // [channels]
  uint64_t* received;
} unroller_t;

// Whether a rank that sends a value next deletes it. As in the runtime, the receiver then
// gets the buffer, if it can use it.
static bool hands_over(const jpp_bare_t* bare, uint32_t rank, const jpp_instr_t* send) {
  const jpp_program_t* program = &bare->options.plan->programs[rank];
  const jpp_instr_t* end = program->instrs + program->num_instrs;
  uint32_t reg = program->operands[send->first_operand];
  if (!jpp_client_info(bare->options.client)->shares_buffers) return false;
  for (const jpp_instr_t* next = send + 1; next < end; ++next) {
    for (uint32_t i = 0; i < next->num_args; ++i) {
      if (program->operands[next->first_operand + i] != reg) continue;
      return next->kind == JPP_INSTR_DELETE;
    }
  }
  return false;
}

static jpp_status_t* add_call(unroller_t* u, uint32_t rank, const jpp_instr_t* instr) {
  jpp_bare_t* bare = u->bare;
  const jpp_plan_t* plan = bare->options.plan;
  uint32_t count = instr->num_args + instr->num_results;
  bare_call_t call = {.kind = instr->kind,
                      .num_args = instr->num_args,
                      .num_results = instr->num_results,
                      .device = bare->devices[rank]};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&bare->arena, count, &call.registers));
  for (uint32_t i = 0; i < count; ++i) {
    call.registers[i] = bare->first_register[rank] +
                        plan->programs[rank].operands[instr->first_operand + i];
  }
  if (count > bare->most_operands) bare->most_operands = count;
  if (instr->kind == JPP_INSTR_RUN) {
    call.executable = bare->options.executables[instr->target].executable;
    call.donated_to = plan->bindings[instr->target].donated_to;
    if (!call.executable) return NULL;
  } else if (instr->kind == JPP_INSTR_SEND) {
    call.device = bare->devices[plan->channels[instr->target].dst];
    call.message = bare->first_message[instr->target] + u->sent[instr->target]++;
    call.hands_over = hands_over(bare, rank, instr);
  } else if (instr->kind == JPP_INSTR_RECV) {
    call.message = bare->first_message[instr->target] + u->received[instr->target]++;
  } else if (instr->kind == JPP_INSTR_MOVE) {
    call.memory = (jpp_memory_t)instr->target;
  }
  return JPP_VEC_PUSH(&bare->calls, call);
}

// Unrolls until the rank's second run, or until a message that has not been sent yet.
static jpp_status_t* unroll_rank(unroller_t* u, uint32_t rank, bool* out_moved) {
  const jpp_program_t* program = &u->bare->options.plan->programs[rank];
  uint32_t* at = &u->at[rank];
  for (uint32_t runs = 0; *at < program->num_instrs; ++*at) {
    const jpp_instr_t* instr = &program->instrs[*at];
    uint32_t target = instr->target;
    if (instr->kind == JPP_INSTR_RUN && runs++) return NULL;
    if (instr->kind == JPP_INSTR_RECV && u->received[target] == u->sent[target]) {
      return NULL;
    }
    JPP_RETURN_IF_ERROR(add_call(u, rank, instr));
    *out_moved = true;
  }
  return NULL;
}

static jpp_status_t* unroll(jpp_bare_t* bare) {
  const jpp_plan_t* plan = bare->options.plan;
  unroller_t u = {.bare = bare};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&bare->arena, plan->ranks, &u.at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&bare->arena, plan->num_channels, &u.sent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&bare->arena, plan->num_channels, &u.received));
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t r = 0; r < plan->ranks; ++r) {
      JPP_RETURN_IF_ERROR(unroll_rank(&u, r, &moved));
    }
  }
  return NULL;
}

static jpp_status_t* upload_constants(jpp_bare_t* bare, uint32_t rank) {
  const jpp_program_t* program = &bare->options.plan->programs[rank];
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    int32_t number = (int32_t)program->constants[i].microbatch;
    jpp_host_array_t array = {
        .struct_size = sizeof(array), .data = &number, .dtype = JPP_DTYPE_S32};
    uint32_t reg = bare->first_register[rank] + program->constants[i].reg;
    JPP_RETURN_IF_ERROR(jpp_client_buffer_from_host(
        bare->options.client, &array, bare->devices[rank], &bare->regs[reg]));
  }
  return NULL;
}

static jpp_status_t* prepare_bare(jpp_bare_t* bare) {
  const jpp_plan_t* plan = bare->options.plan;
  jpp_arena_t* arena = &bare->arena;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks + 1, &bare->first_register));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(arena, plan->num_channels + 1, &bare->first_message));
  JPP_RETURN_IF_ERROR(jpp__arena_copy(arena, bare->options.devices,
                                      plan->ranks * sizeof(uint32_t),
                                      (void**)&bare->devices));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    bare->first_register[r + 1] =
        bare->first_register[r] + plan->programs[r].num_registers;
  }
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    bare->first_message[c + 1] = bare->first_message[c] + plan->channels[c].messages;
  }
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(arena, bare->first_register[plan->ranks], &bare->regs));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(arena, bare->first_message[plan->num_channels], &bare->messages));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    JPP_RETURN_IF_ERROR(upload_constants(bare, r));
  }
  JPP_RETURN_IF_ERROR(unroll(bare));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, bare->most_operands, &bare->args));
  return JPP_ARENA_ARRAY(arena, bare->most_operands, &bare->results);
}

jpp_status_t* jpp_bare_create(const jpp_runtime_options_t* options,
                              jpp_bare_t** out_bare) {
  *out_bare = NULL;
  if (options->devices_per_rank != 1) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "the bare loop takes one device a rank, not %u",
                           options->devices_per_rank);
  }
  jpp_bare_t* bare = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &bare));
  bare->options = *options;
  jpp_status_t* status = prepare_bare(bare);
  if (status) {
    jpp_bare_destroy(bare);
    return status;
  }
  *out_bare = bare;
  return NULL;
}

static void destroy_constants(jpp_bare_t* bare) {
  for (uint32_t r = 0; bare->regs && r < bare->options.plan->ranks; ++r) {
    const jpp_program_t* program = &bare->options.plan->programs[r];
    for (uint32_t i = 0; i < program->num_constants; ++i) {
      uint32_t reg = bare->first_register[r] + program->constants[i].reg;
      jpp_client_buffer_destroy(bare->options.client, bare->regs[reg]);
    }
  }
}

void jpp_bare_destroy(jpp_bare_t* bare) {
  if (!bare) return;
  destroy_constants(bare);
  jpp_vec_deinit(&bare->calls);
  jpp__arena_deinit(&bare->arena);
  jpp_free(bare);
}

uint64_t jpp_bare_instructions(const jpp_bare_t* bare) {
  uint64_t count = 0;
  for (size_t i = 0; i < bare->calls.count; ++i) {
    count += bare->calls.data[i].kind != JPP_INSTR_RECV;
  }
  return count;
}

// --- A step ---------------------------------------------------------------------------

static jpp_status_t* run_task(jpp_bare_t* bare, const bare_call_t* call) {
  jpp_client_t* client = bare->options.client;
  jpp_buffer_t* const* const args[1] = {bare->args};
  jpp_buffer_t** const results[1] = {bare->results};
  for (uint32_t i = 0; i < call->num_args; ++i) {
    bare->args[i] = bare->regs[call->registers[i]];
  }
  jpp_execute_t execute = {.struct_size = sizeof(execute),
                           .executable = call->executable,
                           .device_count = 1,
                           .arg_count = call->num_args,
                           .result_count = call->num_results,
                           .device = (int32_t)call->device,
                           .args = args,
                           .results = results};
  JPP_RETURN_IF_ERROR(jpp_client_execute(client, &execute));
  for (uint32_t i = 0; i < call->num_args; ++i) {
    if (call->donated_to[i] != JPP_NONE) jpp_client_buffer_destroy(client, bare->args[i]);
  }
  for (uint32_t k = 0; k < call->num_results; ++k) {
    bare->regs[call->registers[call->num_args + k]] = bare->results[k];
  }
  return NULL;
}

static jpp_status_t* send_value(const jpp_bare_t* bare, const bare_call_t* call) {
  jpp_buffer_t** value = &bare->regs[call->registers[0]];
  if (!call->hands_over) {
    return jpp_client_buffer_copy_to_device(bare->options.client, *value, call->device,
                                            &bare->messages[call->message]);
  }
  bare->messages[call->message] = *value;
  *value = NULL;
  return NULL;
}

static jpp_status_t* make_call(jpp_bare_t* bare, const bare_call_t* call) {
  jpp_client_t* client = bare->options.client;
  switch ((jpp_instr_kind_t)call->kind) {
    case JPP_INSTR_RUN:
      return run_task(bare, call);
    case JPP_INSTR_SEND:
      return send_value(bare, call);
    case JPP_INSTR_RECV:
      bare->regs[call->registers[0]] = bare->messages[call->message];
      return NULL;
    case JPP_INSTR_MOVE:
      return jpp_client_buffer_copy_to_memory(client, bare->regs[call->registers[0]],
                                              call->device, call->memory,
                                              &bare->regs[call->registers[1]]);
    case JPP_INSTR_DELETE:
      for (uint32_t k = 0; k < call->num_args; ++k) {
        jpp_client_buffer_destroy(client, bare->regs[call->registers[k]]);
      }
      return NULL;
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return NULL;
}

static jpp_status_t* take_output(jpp_bare_t* bare, uint32_t rank,
                                 const jpp_program_output_t* output,
                                 jpp_buffer_t** out_buffer) {
  jpp_client_t* client = bare->options.client;
  jpp_buffer_t* buffer = bare->regs[bare->first_register[rank] + output->reg];
  *out_buffer = buffer;
  if (output->copy) {
    JPP_RETURN_IF_ERROR(jpp_client_buffer_copy_to_device(
        client, buffer, bare->devices[rank], out_buffer));
  }
  jpp_event_t* event = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(client, *out_buffer, &event));
  jpp_status_t* status = jpp_client_event_await(client, event);
  jpp_client_event_destroy(client, event);
  return status;
}

// Buffers of all ranks: [rank][input or output].
typedef struct bare_io {
  jpp_arena_t arena;
  jpp_buffer_t*** inputs;
  jpp_buffer_t*** outputs;
} bare_io_t;

static jpp_status_t* run_calls(jpp_bare_t* bare, const bare_io_t* io) {
  const jpp_plan_t* plan = bare->options.plan;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      bare->regs[bare->first_register[r] + program->inputs[i].reg] = io->inputs[r][i];
    }
  }
  for (size_t i = 0; i < bare->calls.count; ++i) {
    JPP_RETURN_IF_ERROR(make_call(bare, &bare->calls.data[i]));
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_outputs; ++i) {
      JPP_RETURN_IF_ERROR(take_output(bare, r, &program->outputs[i], &io->outputs[r][i]));
    }
  }
  return NULL;
}

// --- A step on arrays -----------------------------------------------------------------

static jpp_status_t* allocate_io(const jpp_plan_t* plan, bare_io_t* io) {
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&io->arena, plan->ranks, &io->inputs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&io->arena, plan->ranks, &io->outputs));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&io->arena, program->num_inputs, &io->inputs[r]));
    JPP_RETURN_IF_ERROR(
        JPP_ARENA_ARRAY(&io->arena, program->num_outputs, &io->outputs[r]));
  }
  return NULL;
}

// Registers that the step does not own stay in their arrays; the arrays of the others are
// deleted.
static jpp_status_t* fill_input(const jpp_plan_t* plan, uint32_t rank, uint32_t input,
                                jpp_array_t* array, bare_io_t* io) {
  jpp_buffer_t** buffer = &io->inputs[rank][input];
  if (plan->programs[rank].inputs[input].owned) {
    return jpp_array_take(array, rank, 1, buffer);
  }
  *buffer = jpp_array_shards(array, rank)[0];
  return NULL;
}

static jpp_status_t* fill_inputs(const jpp_plan_t* plan, const jpp_call_t* call,
                                 bare_io_t* io) {
  for (uint32_t a = 0; a < plan->staged->graph->num_args; ++a) {
    JPP_RETURN_IF_ERROR(jpp_array_await(call->args[a], NULL));
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      JPP_RETURN_IF_ERROR(fill_input(plan, r, i, call->args[program->inputs[i].arg], io));
    }
  }
  return NULL;
}

static jpp_status_t* make_result(const jpp_bare_t* bare, uint32_t output,
                                 const bare_io_t* io, jpp_array_t** out_array) {
  const jpp_plan_t* plan = bare->options.plan;
  uint32_t* ranks = NULL;
  jpp_buffer_t** buffers = NULL;
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = bare->options.client,
                               .devices_per_rank = 1};
  jpp_status_t* status = JPP_ALLOC_ARRAY(plan->ranks, &ranks);
  if (!status) status = JPP_ALLOC_ARRAY(plan->ranks, &buffers);
  for (uint32_t r = 0; r < plan->ranks && !status; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_outputs; ++i) {
      if (program->outputs[i].output != output) continue;
      ranks[layout.num_ranks] = r;
      buffers[layout.num_ranks++] = io->outputs[r][i];
    }
  }
  layout.ranks = ranks;
  if (!status) status = jpp_array_create(&layout, buffers, out_array);
  jpp_free(ranks);
  jpp_free(buffers);
  return status;
}

static jpp_status_t* call_bare(jpp_bare_t* bare, const jpp_call_t* call, bare_io_t* io) {
  const jpp_plan_t* plan = bare->options.plan;
  JPP_RETURN_IF_ERROR(allocate_io(plan, io));
  JPP_RETURN_IF_ERROR(fill_inputs(plan, call, io));
  JPP_RETURN_IF_ERROR(run_calls(bare, io));
  for (uint32_t o = 0; o < plan->staged->graph->num_outputs; ++o) {
    JPP_RETURN_IF_ERROR(make_result(bare, o, io, &call->results[o]));
  }
  return NULL;
}

jpp_status_t* jpp_bare_call(jpp_bare_t* bare, const jpp_call_t* call) {
  bare_io_t io = {0};
  jpp__arena_init(&io.arena);
  jpp_status_t* status = call_bare(bare, call, &io);
  jpp__arena_deinit(&io.arena);
  return status;
}
