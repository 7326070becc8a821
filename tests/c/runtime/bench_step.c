// What a step costs beside the client calls it makes: the same calls in the same order,
// without a runtime. Not a test: `meson test --benchmark`.
//
//   bench_step [stages [microbatches [steps [issue threads]]]]
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/vec.h"
#include "device/driver_under_test.h"
#include "model.h"

enum { kMaxArgs = 64, kMaxMessages = 4096 };

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

// --- The bare loop --------------------------------------------------------------------

// An instruction in the order in which one thread issues for all ranks. Registers are
// numbered over all ranks.
typedef struct call {
  jpp_instr_kind_t kind;
  uint32_t num_args, num_results;
  uint32_t device;   // RUN: its own; SEND: the other rank's
  uint32_t message;  // SEND, RECV
  jpp_executable_t* executable;
  const uint32_t* donated_to;
  uint32_t* registers;  // args, then results
} call_t;

typedef struct bare {
  model_t* model;
  JPP_VEC(call_t) calls;
  uint32_t* first_register;  // [ranks]
  jpp_buffer_t** regs;
  jpp_buffer_t** messages;
  jpp_event_t** events;
  uint64_t num_runs, num_copies;
  bool with_events;  // a ready event a run, as the runtime takes
} bare_t;

static call_t make_call(const bare_t* bare, uint32_t rank, const jpp_instr_t* instr) {
  const model_t* model = bare->model;
  const uint32_t* operands = model->plan->programs[rank].operands + instr->first_operand;
  uint32_t count = instr->num_args + instr->num_results;
  call_t call = {.kind = (jpp_instr_kind_t)instr->kind,
                 .num_args = instr->num_args,
                 .num_results = instr->num_results,
                 .device = model->devices[rank],
                 .registers = calloc(count + 1, sizeof(uint32_t))};
  for (uint32_t i = 0; i < count; ++i) {
    call.registers[i] = bare->first_register[rank] + operands[i];
  }
  if (call.kind == JPP_INSTR_RUN) {
    call.executable = model->executables[instr->target].executable;
    call.donated_to = model->plan->bindings[instr->target].donated_to;
  } else if (call.kind == JPP_INSTR_SEND) {
    call.device = model->devices[model->plan->channels[instr->target].dst];
  }
  return call;
}

// False: the message is not there yet.
static bool add_instr(bare_t* bare, uint32_t (*counts)[2], uint32_t rank,
                      const jpp_instr_t* instr) {
  bool transfer = instr->kind == JPP_INSTR_SEND || instr->kind == JPP_INSTR_RECV;
  bool receive = instr->kind == JPP_INSTR_RECV;
  uint32_t* count = transfer ? counts[instr->target] : NULL;
  if (receive && count[1] == count[0]) return false;
  call_t call = make_call(bare, rank, instr);
  if (transfer) call.message = instr->target * kMaxMessages + count[receive]++;
  bare->num_runs += call.kind == JPP_INSTR_RUN;
  bare->num_copies += call.kind == JPP_INSTR_SEND;
  ASSERT_OK(JPP_VEC_PUSH(&bare->calls, call));
  return true;
}

static bool visit(bare_t* bare, uint32_t (*counts)[2], uint32_t rank, uint32_t* at) {
  const jpp_program_t* program = &bare->model->plan->programs[rank];
  uint32_t first = *at;
  for (bool run = false; *at < program->num_instrs; ++*at) {
    const jpp_instr_t* instr = &program->instrs[*at];
    if (instr->kind == JPP_INSTR_RUN && run) break;
    run |= instr->kind == JPP_INSTR_RUN;
    if (!add_instr(bare, counts, rank, instr)) break;
  }
  return *at > first;
}

static void unroll(bare_t* bare) {
  const jpp_plan_t* plan = bare->model->plan;
  uint32_t(*counts)[2] = calloc(plan->num_channels + 1, sizeof(*counts));
  uint32_t* at = calloc(plan->ranks, sizeof(*at));
  uint32_t registers = 0;
  bare->first_register = calloc(plan->ranks, sizeof(uint32_t));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    bare->first_register[r] = registers;
    registers += plan->programs[r].num_registers;
  }
  for (bool some = true; some;) {
    some = false;
    for (uint32_t r = 0; r < plan->ranks; ++r) some |= visit(bare, counts, r, &at[r]);
  }
  bare->regs = calloc(registers + 1, sizeof(jpp_buffer_t*));
  bare->messages =
      calloc((size_t)plan->num_channels * kMaxMessages + 1, sizeof(jpp_buffer_t*));
  bare->events = calloc(bare->num_runs + 1, sizeof(jpp_event_t*));
  free(counts);
  free(at);
}

static void bare_execute(bare_t* bare, const call_t* call, uint64_t run) {
  jpp_client_t* client = bare->model->client;
  jpp_buffer_t *args[kMaxArgs], *results[kMaxArgs];
  jpp_buffer_t* const* arg_rows[1] = {args};
  jpp_buffer_t** result_rows[1] = {results};
  for (uint32_t i = 0; i < call->num_args; ++i) args[i] = bare->regs[call->registers[i]];
  jpp_execute_t execute = {.executable = call->executable,
                           .device_count = 1,
                           .arg_count = call->num_args,
                           .result_count = call->num_results,
                           .device = (int32_t)call->device,
                           .args = arg_rows,
                           .results = result_rows};
  ASSERT_OK(jpp_client_execute(client, &execute));
  for (uint32_t i = 0; i < call->num_args; ++i) {
    if (call->donated_to[i] != JPP_NONE) jpp_client_buffer_destroy(client, args[i]);
  }
  for (uint32_t k = 0; k < call->num_results; ++k) {
    bare->regs[call->registers[call->num_args + k]] = results[k];
  }
  if (!bare->with_events) return;
  ASSERT_OK(jpp_client_buffer_ready_event(client, results[0], &bare->events[run]));
}

static void bare_issue(bare_t* bare) {
  jpp_client_t* client = bare->model->client;
  uint64_t run = 0;
  for (size_t i = 0; i < bare->calls.count; ++i) {
    const call_t* call = &bare->calls.data[i];
    if (call->kind == JPP_INSTR_RUN) {
      if (call->executable) bare_execute(bare, call, run++);
    } else if (call->kind == JPP_INSTR_SEND) {
      ASSERT_OK(jpp_client_buffer_copy_to_device(client, bare->regs[call->registers[0]],
                                                 call->device,
                                                 &bare->messages[call->message]));
    } else if (call->kind == JPP_INSTR_RECV) {
      bare->regs[call->registers[0]] = bare->messages[call->message];
    } else {
      for (uint32_t k = 0; k < call->num_args; ++k) {
        jpp_client_buffer_destroy(client, bare->regs[call->registers[k]]);
      }
    }
  }
}

static void await_one(jpp_client_t* client, jpp_event_t* event) {
  if (event) ASSERT_OK(jpp_client_event_await(client, event));
  jpp_client_event_destroy(client, event);
}

// Registers into outputs, each awaited when no run was.
static void bare_finish(bare_t* bare) {
  model_t* model = bare->model;
  for (uint64_t i = 0; bare->with_events && i < bare->num_runs; ++i) {
    await_one(model->client, bare->events[i]);
    bare->events[i] = NULL;
  }
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_outputs; ++i) {
      jpp_buffer_t* buffer =
          bare->regs[bare->first_register[r] + program->outputs[i].reg];
      model->outputs[r][i] = buffer;
      if (bare->with_events) continue;
      jpp_event_t* event = NULL;
      ASSERT_OK(jpp_client_buffer_ready_event(model->client, buffer, &event));
      await_one(model->client, event);
    }
  }
}

static double bare_step(bare_t* bare, jpp_buffer_t*** constants) {
  const model_t* model = bare->model;
  double begin = now_us();
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    jpp_buffer_t** regs = bare->regs + bare->first_register[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      regs[program->inputs[i].reg] = model->inputs[r][i];
    }
    for (uint32_t i = 0; i < program->num_constants; ++i) {
      regs[program->constants[i].reg] = constants[r][i];
    }
  }
  bare_issue(bare);
  bare_finish(bare);
  return now_us() - begin;
}

static jpp_buffer_t*** upload_constants(const model_t* model) {
  jpp_buffer_t*** constants = calloc(model->plan->ranks, sizeof(*constants));
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    constants[r] = calloc(program->num_constants + 1, sizeof(jpp_buffer_t*));
    for (uint32_t i = 0; i < program->num_constants; ++i) {
      int32_t number = (int32_t)program->constants[i].microbatch;
      jpp_host_array_t array = {.data = &number, .dtype = JPP_DTYPE_S32};
      ASSERT_OK(jpp_client_buffer_from_host(model->client, &array, model->devices[r],
                                            &constants[r][i]));
    }
  }
  return constants;
}

static void destroy_constants(const model_t* model, jpp_buffer_t*** constants) {
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    for (uint32_t i = 0; i < model->plan->programs[r].num_constants; ++i) {
      jpp_client_buffer_destroy(model->client, constants[r][i]);
    }
    free(constants[r]);
  }
  free(constants);
}

static void bare_deinit(bare_t* bare) {
  for (size_t i = 0; i < bare->calls.count; ++i) free(bare->calls.data[i].registers);
  jpp_vec_deinit(&bare->calls);
  free(bare->first_register);
  free(bare->regs);
  free(bare->messages);
  free(bare->events);
}

// --- Comparison -----------------------------------------------------------------------

static int compare_times(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return x < y ? -1 : x > y;
}

typedef enum way { WAY_BARE, WAY_BARE_EVENTS, WAY_RUNTIME, WAY_TRACED, WAY_COUNT } way_t;

static double time_step(bare_t* bare, jpp_buffer_t*** constants, way_t way) {
  model_t* model = bare->model;
  double time = 0;
  model_give(model);
  if (way == WAY_BARE || way == WAY_BARE_EVENTS) {
    bare->with_events = way == WAY_BARE_EVENTS;
    time = bare_step(bare, constants);
  } else {
    jpp_runtime_set_tracing(model->runtime, way == WAY_TRACED);
    double begin = now_us();
    ASSERT_OK(model_step(model));
    time = now_us() - begin;
  }
  model_take_back(model);
  return time;
}

// The ways take turns, so that a loaded machine slows them alike.
static void compare(model_t* model, const char* name, uint32_t steps) {
  static const char* const kNames[] = {"bare", "bare, event a run", "runtime",
                                       "runtime, traced"};
  bare_t bare = {.model = model};
  unroll(&bare);
  jpp_buffer_t*** constants = upload_constants(model);
  double* times = calloc((size_t)steps * WAY_COUNT, sizeof(*times));
  for (uint32_t i = 0; i < steps; ++i) {
    for (int way = 0; way < WAY_COUNT; ++way) {
      times[(size_t)way * steps + i] = time_step(&bare, constants, (way_t)way);
    }
  }
  printf("%s: %zu instructions, %llu runs, %llu copies\n", name, bare.calls.count,
         (unsigned long long)bare.num_runs, (unsigned long long)bare.num_copies);
  for (int way = 0; way < WAY_COUNT; ++way) {
    qsort(times + (size_t)way * steps, steps, sizeof(*times), compare_times);
    double median = times[(size_t)way * steps + steps / 2];
    printf("  %-18s %9.1f us a step, best %9.1f, %6.2f us an instruction\n", kNames[way],
           median, times[(size_t)way * steps], median / (double)bare.calls.count);
  }
  destroy_constants(model, constants);
  bare_deinit(&bare);
  free(times);
}

static uint32_t number(int argc, char** argv, int at, uint32_t otherwise) {
  return argc > at ? (uint32_t)strtoul(argv[at], NULL, 10) : otherwise;
}

int main(int argc, char** argv) {
  uint32_t stages = number(argc, argv, 1, 4), microbatches = number(argc, argv, 2, 32);
  uint32_t steps = number(argc, argv, 3, 200);
  model_options_t options = {.portable = true, .issue_threads = number(argc, argv, 4, 1)};
  char* text = model_chain(stages, stages, microbatches);
  model_t* model = model_create(text, options);
  // Dead handles of the fake are kept, so its steps get slower: few of them.
  compare(model, "fake", steps < 20 ? steps : 20);
  model_destroy(model);
  options.plugin_path = test_plugin_path();
  if (options.plugin_path) {
    model = model_create(text, options);
    compare(model, "plugin", steps);
    model_destroy(model);
  }
  free(text);
  return 0;
}
