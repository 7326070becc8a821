// Runs a graph op by op for each microbatch, and the programs of all ranks instruction by
// instruction, each rank until it waits: both must compute the same numbers.
#include "interpreter.h"

#include <stdlib.h>
#include <string.h>

// --- What ops compute -----------------------------------------------------------------

static uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
  return hash ^ hash >> 29;
}

static uint64_t hash_name(const char* name) {
  uint64_t hash = 1469598103934665603u;
  for (; *name; ++name) hash = (hash ^ (unsigned char)*name) * 1099511628211u;
  return hash;
}

static uint64_t arg_value(uint32_t arg) { return mix(77, arg); }
static uint64_t index_value(uint32_t microbatch) { return mix(99, microbatch); }

static uint64_t reduce_begin(void) { return 0; }

// Concatenation and custom reductions place a value by its microbatch.
static uint64_t reduce(uint8_t kind, uint64_t state, uint64_t value, uint64_t index) {
  if (kind == JPP_REDUCE_ADD) return state + value;
  if (kind == JPP_REDUCE_MAX) return state > value ? state : value;
  return state + mix(mix(kind, value), index);
}

// Computes ops of graphs, and ops that the planner adds. `values` is [num_values].
static void run_op(const jpp_graph_t* graph, const jpp_op_t* op, uint64_t* values) {
  uint64_t* out = values + op->first_output;
  if (op->kind == JPP_OP_REPEAT) {
    jpp_op_t again = graph->ops[op->attr];
    again.inputs = op->inputs;
    again.first_output = op->first_output;
    run_op(graph, &again, values);
    return;
  }
  if (op->flags & JPP_OP_ZEROS) {
    for (uint32_t i = 0; i < op->num_outputs; ++i) out[i] = 0;
    return;
  }
  uint64_t hash = 0;
  if (op->kind == JPP_OP_CALL || op->kind == JPP_OP_TASK) {
    hash = op->code ? op->code : hash_name(op->name);
  }
  if (op->flags & JPP_OP_LINEAR) {
    out[0] = hash | 1;
    for (uint32_t i = 0; i < op->num_inputs; ++i) out[0] *= values[op->inputs[i]];
    return;
  }
  switch (op->kind) {
    case JPP_OP_MARK:
    case JPP_OP_MARK_BACKWARD:
      for (uint32_t i = 0; i < op->num_inputs; ++i) out[i] = values[op->inputs[i]];
      return;
    case JPP_OP_INIT:
      out[0] = reduce_begin();
      return;
    case JPP_OP_ACCUMULATE: {
      uint64_t index = op->num_inputs > 2 ? values[op->inputs[2]] : 0;
      out[0] = reduce(graph->loops[op->loop].results[op->attr].reduce,
                      values[op->inputs[0]], values[op->inputs[1]], index);
      return;
    }
    case JPP_OP_ADD:
    case JPP_OP_SUM: {
      uint64_t sum = 0;
      for (uint32_t i = 0; i < op->num_inputs; ++i) sum += values[op->inputs[i]];
      out[0] = sum;
      return;
    }
    default:
      for (uint32_t i = 0; i < op->num_inputs; ++i) {
        hash = mix(hash, values[op->inputs[i]]);
      }
      for (uint32_t i = 0; i < op->num_outputs; ++i) out[i] = mix(hash, i);
  }
}

// --- The graph ------------------------------------------------------------------------

static void run_loop(const jpp_graph_t* graph, const jpp_loop_t* loop, uint64_t* values) {
  uint64_t* results = values + graph->ops[loop->op].first_output;
  for (uint32_t k = 0; k < loop->num_results; ++k) results[k] = reduce_begin();
  for (uint32_t m = 0; m < loop->microbatches; ++m) {
    values[loop->index] = index_value(m);
    for (uint32_t id = loop->first_op; id < loop->op; ++id) {
      run_op(graph, &graph->ops[id], values);
    }
    for (uint32_t k = 0; k < loop->num_results; ++k) {
      results[k] = reduce(loop->results[k].reduce, results[k],
                          values[loop->results[k].value], index_value(m));
    }
  }
}

uint64_t* interpret_graph(const jpp_graph_t* graph) {
  uint64_t* values = calloc(graph->num_values + 1, sizeof(*values));
  uint64_t* outputs = calloc(graph->num_outputs + 1, sizeof(*outputs));
  for (uint32_t i = 0; i < graph->num_args; ++i) {
    values[graph->args[i].value] = arg_value(i);
  }
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &graph->ops[id];
    if (op->kind == JPP_OP_LOOP) {
      run_loop(graph, &graph->loops[op->attr], values);
    } else if (op->loop == JPP_NONE) {
      run_op(graph, op, values);
    }
  }
  for (uint32_t i = 0; i < graph->num_outputs; ++i) {
    outputs[i] = values[graph->outputs[i].value];
  }
  free(values);
  return outputs;
}

// --- Programs -------------------------------------------------------------------------

typedef struct array {
  uint64_t value, bits;
} array_t;

typedef struct reg {
  bool full, kept;  // kept: borrowed or constant
  uint32_t memory;  // jpp_memory_t
  array_t array;
} reg_t;

typedef struct machine {
  const jpp_plan_t* plan;
  reg_t** registers;  // [ranks]
  uint32_t* at;       // [ranks]
  array_t** queues;   // [channels] all messages sent so far
  uint32_t *sent, *taken;
  uint64_t* values;  // [staged values] scratch of one task run
  // The numbers in arrays of several values, each at its first element. The value of such
  // an array is its index plus 1, or 0: all zeros.
  uint64_t** packs;
  uint64_t num_packs;
  uint64_t* output_bits;  // [outputs] on the last rank that has it; 0: none yet
  outcome_t outcome;
} machine_t;

static bool broken(machine_t* m) {
  m->outcome = OUTCOME_BROKEN;
  return false;
}

static bool read_reg(machine_t* m, uint32_t rank, uint32_t reg, array_t* out_array) {
  if (!m->registers[rank][reg].full) return broken(m);
  *out_array = m->registers[rank][reg].array;
  return true;
}

// Reads the operand of a run or a send.
static bool read_device_reg(machine_t* m, uint32_t rank, uint32_t reg,
                            array_t* out_array) {
  if (m->registers[rank][reg].memory != JPP_MEMORY_DEVICE) return broken(m);
  return read_reg(m, rank, reg, out_array);
}

static bool write_reg(machine_t* m, uint32_t rank, uint32_t reg, array_t array) {
  if (m->registers[rank][reg].full) return broken(m);
  m->registers[rank][reg] = (reg_t){.full = true, .array = array};
  return true;
}

static bool drop_reg(machine_t* m, uint32_t rank, uint32_t reg) {
  if (!m->registers[rank][reg].full || m->registers[rank][reg].kept) return broken(m);
  m->registers[rank][reg].full = false;
  return true;
}

static uint64_t mix_all(uint64_t hash, const uint32_t* ids, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) hash = mix(hash, ids[i]);
  return mix(hash, count);
}

static uint64_t module_bits(const jpp_plan_t* plan, uint32_t id) {
  const jpp_task_t* task = &plan->staged->tasks[id];
  uint64_t hash = mix_all(1, task->ops, task->num_ops);
  hash = mix_all(hash, task->inputs, task->num_inputs);
  hash = mix_all(hash, task->outputs, task->num_outputs);
  return mix_all(hash, plan->bindings[id].donated_to, task->num_inputs);
}

static uint64_t* add_pack(machine_t* m, uint32_t value) {
  size_t elements = jpp_type_elements(&m->plan->staged->values[value].type);
  m->packs = realloc(m->packs, (m->num_packs + 1) * sizeof(*m->packs));
  m->packs[m->num_packs++] = calloc(elements + 1, sizeof(uint64_t));
  m->values[value] = m->num_packs;
  return m->packs[m->num_packs - 1];
}

static void add_lanes(const machine_t* m, uint32_t value, uint64_t* lanes) {
  size_t elements = jpp_type_elements(&m->plan->staged->values[value].type);
  uint64_t pack = m->values[value];
  for (size_t i = 0; pack && i < elements; ++i) lanes[i] += m->packs[pack - 1][i];
}

// Runs an op that makes or reads an array of several values, and returns false for
// others.
static bool run_packed(machine_t* m, const jpp_op_t* op) {
  const jpp_staged_t* staged = m->plan->staged;
  if (op->kind == JPP_OP_PACK) {
    uint64_t* lanes = add_pack(m, op->first_output);
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      lanes[0] = m->values[op->inputs[i]];
      lanes += jpp_type_elements(&staged->values[op->inputs[i]].type);
    }
    return true;
  }
  if (op->kind == JPP_OP_UNPACK) {
    uint64_t pack = m->values[op->inputs[0]];
    m->values[op->first_output] = pack ? m->packs[pack - 1][op->attr] : reduce_begin();
    return true;
  }
  if (op->kind != JPP_OP_ACCUMULATE || !jpp_staged_is_packed(staged, op->first_output)) {
    return false;
  }
  uint64_t* sums = add_pack(m, op->first_output);
  for (uint32_t i = 0; i < op->num_inputs; ++i) add_lanes(m, op->inputs[i], sums);
  return true;
}

static bool run_task(machine_t* m, uint32_t rank, const jpp_instr_t* instr,
                     const uint32_t* operands) {
  const jpp_staged_t* staged = m->plan->staged;
  const jpp_task_t* task = &staged->tasks[instr->target];
  if (task->num_inputs != instr->num_args || task->num_outputs != instr->num_results) {
    return broken(m);
  }
  uint64_t bits = module_bits(m->plan, instr->target);
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    array_t array = {0};
    if (!read_device_reg(m, rank, operands[i], &array)) return false;
    m->values[task->inputs[i]] = array.value;
    bits = mix(bits, array.bits);
  }
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = &staged->ops[task->ops[i]];
    if (!run_packed(m, op)) run_op(staged->graph, op, m->values);
  }
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    bool donated = m->plan->bindings[instr->target].donated_to[i] != JPP_NONE;
    if (donated && !drop_reg(m, rank, operands[i])) return false;
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    array_t array = {.value = m->values[task->outputs[i]], .bits = mix(bits, i)};
    if (!write_reg(m, rank, operands[task->num_inputs + i], array)) return false;
  }
  return true;
}

// Returns true if the actor can continue.
static bool run_instr(machine_t* m, uint32_t rank, const jpp_instr_t* instr) {
  const jpp_program_t* program = &m->plan->programs[rank];
  const uint32_t* operands = program->operands + instr->first_operand;
  uint32_t channel = instr->target;
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      return run_task(m, rank, instr, operands);
    case JPP_INSTR_SEND:
      if (m->sent[channel] - m->taken[channel] == m->plan->channels[channel].slots) {
        return false;
      }
      m->queues[channel] =
          realloc(m->queues[channel], (m->sent[channel] + 1) * sizeof(array_t));
      if (!read_device_reg(m, rank, operands[0], &m->queues[channel][m->sent[channel]])) {
        return false;
      }
      ++m->sent[channel];
      return true;
    case JPP_INSTR_RECV:
      if (m->sent[channel] == m->taken[channel]) return false;
      return write_reg(m, rank, operands[0], m->queues[channel][m->taken[channel]++]);
    case JPP_INSTR_MOVE: {
      array_t moved = {0};
      if (!read_reg(m, rank, operands[0], &moved)) return false;
      if (!write_reg(m, rank, operands[1], moved)) return false;
      m->registers[rank][operands[1]].memory = instr->target;
      return true;
    }
    case JPP_INSTR_DELETE:
      for (uint32_t i = 0; i < instr->num_args; ++i) {
        if (!drop_reg(m, rank, operands[i])) return false;
      }
      return true;
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return broken(m);
}

static void fill_given(machine_t* m, uint32_t rank) {
  const jpp_program_t* program = &m->plan->programs[rank];
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    const jpp_program_input_t* input = &program->inputs[i];
    array_t array = {.value = arg_value(input->arg), .bits = arg_value(input->arg)};
    if (!write_reg(m, rank, input->reg, array)) return;
    m->registers[rank][input->reg].kept = !input->owned;
    const jpp_graph_t* graph = m->plan->staged->graph;
    m->registers[rank][input->reg].memory =
        graph->values[graph->args[input->arg].value].type.memory;
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    const jpp_program_constant_t* constant = &program->constants[i];
    array_t array = {.value = index_value(constant->microbatch)};
    if (!write_reg(m, rank, constant->reg, array)) return;
    m->registers[rank][constant->reg].kept = true;
  }
}

// Only outputs may be left when all is done, nothing else that the program owns.
static void compare_ends(machine_t* m, uint32_t rank, const uint64_t* expected) {
  const jpp_program_t* program = &m->plan->programs[rank];
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    const jpp_program_output_t* output = &program->outputs[i];
    array_t array = {0};
    if (!read_reg(m, rank, output->reg, &array)) return;
    const jpp_staged_t* staged = m->plan->staged;
    uint32_t value = staged->outputs[output->output].value;
    if (m->registers[rank][output->reg].memory != staged->values[value].type.memory) {
      broken(m);
      return;
    }
    if (array.value != expected[output->output]) m->outcome = OUTCOME_DIFFERENT;
    uint64_t* bits = &m->output_bits[output->output];
    if (*bits && *bits != array.bits) m->outcome = OUTCOME_DRIFTED;
    *bits = array.bits;
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    m->registers[rank][program->outputs[i].reg].kept = true;
  }
  for (uint32_t i = 0; i < program->num_registers; ++i) {
    if (m->registers[rank][i].full && !m->registers[rank][i].kept) broken(m);
  }
}

static bool leaves_output(const jpp_program_t* program, uint32_t output) {
  for (uint32_t k = 0; k < program->num_outputs; ++k) {
    if (program->outputs[k].output == output) return true;
  }
  return false;
}

static bool is_wanted_on(const jpp_graph_output_t* output, uint32_t rank) {
  for (uint32_t k = 0; k < output->num_ranks; ++k) {
    if (output->ranks[k] == rank) return true;
  }
  return false;
}

// Checks that every output is on some rank, or on the ranks that the graph names.
static void find_outputs(machine_t* m) {
  const jpp_graph_t* graph = m->plan->staged->graph;
  for (uint32_t i = 0; i < graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &graph->outputs[i];
    bool found = false, right = true;
    for (uint32_t r = 0; r < m->plan->ranks; ++r) {
      bool here = leaves_output(&m->plan->programs[r], i);
      found |= here;
      right &= here == is_wanted_on(output, r);
    }
    if (output->num_ranks ? !right : !found) m->outcome = OUTCOME_DIFFERENT;
  }
}

static void run_all(machine_t* m) {
  for (bool moved = true; moved && m->outcome == OUTCOME_SAME;) {
    moved = false;
    for (uint32_t r = 0; r < m->plan->ranks; ++r) {
      const jpp_program_t* program = &m->plan->programs[r];
      while (m->at[r] < program->num_instrs &&
             run_instr(m, r, &program->instrs[m->at[r]])) {
        ++m->at[r];
        moved = true;
      }
    }
  }
}

static void judge(machine_t* m, const uint64_t* expected) {
  for (uint32_t r = 0; r < m->plan->ranks && m->outcome == OUTCOME_SAME; ++r) {
    if (m->at[r] < m->plan->programs[r].num_instrs) m->outcome = OUTCOME_STUCK;
  }
  for (uint32_t c = 0; c < m->plan->num_channels && m->outcome == OUTCOME_SAME; ++c) {
    if (m->sent[c] != m->taken[c]) m->outcome = OUTCOME_BROKEN;
  }
  for (uint32_t r = 0; r < m->plan->ranks && m->outcome == OUTCOME_SAME; ++r) {
    compare_ends(m, r, expected);
  }
  if (m->outcome == OUTCOME_SAME) find_outputs(m);
}

outcome_t interpret_plan(const jpp_plan_t* plan, const uint64_t* expected) {
  machine_t m = {.plan = plan, .outcome = OUTCOME_SAME};
  m.registers = calloc(plan->ranks, sizeof(*m.registers));
  m.at = calloc(plan->ranks, sizeof(*m.at));
  m.queues = calloc(plan->num_channels + 1, sizeof(*m.queues));
  m.sent = calloc(plan->num_channels + 1, sizeof(*m.sent));
  m.taken = calloc(plan->num_channels + 1, sizeof(*m.taken));
  m.values = calloc(plan->staged->num_values + 1, sizeof(*m.values));
  m.output_bits = calloc(plan->staged->graph->num_outputs + 1, sizeof(*m.output_bits));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    m.registers[r] = calloc(plan->programs[r].num_registers + 1, sizeof(reg_t));
    fill_given(&m, r);
  }
  run_all(&m);
  judge(&m, expected);
  for (uint32_t r = 0; r < plan->ranks; ++r) free(m.registers[r]);
  for (uint32_t c = 0; c < plan->num_channels; ++c) free(m.queues[c]);
  free(m.registers);
  free(m.at);
  free(m.queues);
  free(m.sent);
  free(m.taken);
  free(m.values);
  for (uint64_t i = 0; i < m.num_packs; ++i) free(m.packs[i]);
  free(m.packs);
  free(m.output_bits);
  return m.outcome;
}
