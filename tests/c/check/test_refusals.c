// The checker's error for each kind of wrong program.
#include "draft.h"
#include "plan_util.h"
#include "test_util.h"

typedef struct fixture {
  planned_t planned;
  draft_t draft;
} fixture_t;

static fixture_t fixture_create(const char* graph, const char* schedule) {
  fixture_t f;
  ASSERT_OK(plan_file(graph, &(plan_options_t){.schedule = schedule}, &f.planned));
  f.draft = draft_create(f.planned.plan);
  return f;
}

static void fixture_free(fixture_t* f) {
  draft_free(&f->draft);
  plan_free(&f->planned);
}

static void assert_refused(const fixture_t* f, const char* message) {
  jpp_check_report_t* report = NULL;
  ASSERT_FAILS(jpp_check_plan(&f->draft.plan, &report), JPP_PROGRAM_ERROR, message);
  assert_null(report);
}

// Finds the n-th instruction of a kind on a rank, from 0.
static jpp_instr_t* nth(fixture_t* f, uint32_t rank, jpp_instr_kind_t kind, uint32_t n) {
  jpp_program_t* p = &f->draft.programs[rank];
  for (uint32_t i = 0; i < p->num_instrs; ++i) {
    if (p->instrs[i].kind == kind && !n--) return (jpp_instr_t*)&p->instrs[i];
  }
  fail_msg("no such instruction");
  return NULL;
}

static void drop(fixture_t* f, uint32_t rank, jpp_instr_t* instr) {
  jpp_program_t* p = &f->draft.programs[rank];
  size_t behind = (size_t)(p->instrs + p->num_instrs - instr - 1);
  memmove(instr, instr + 1, behind * sizeof(*instr));
  --p->num_instrs;
}

// Adds one instruction with its operands at the end of the list.
static void append(fixture_t* f, jpp_instr_t instr, const uint32_t* registers,
                   const uint32_t* values) {
  jpp_program_t* p = &f->draft.programs[0];
  uint32_t count = instr.num_args + instr.num_results;
  instr.first_operand = p->num_operands;
  instr.first_value = p->num_operand_values;
  memcpy((uint32_t*)p->operands + p->num_operands, registers, count * sizeof(*registers));
  memcpy((uint32_t*)p->operand_values + p->num_operand_values, values,
         count * sizeof(*values));
  p->num_operands += count;
  p->num_operand_values += count;
  *(jpp_instr_t*)&p->instrs[p->num_instrs++] = instr;
}

// Every microbatch adds to the initial values and deletes the sums: its instructions are
// those of the first one, which are right, with a later microbatch.
static void test_a_sum_begins_once(void** state) {
  (void)state;
  enum { kMicrobatches = 8, kInit = 2 + kMicrobatches, kFree = kInit + 2 };
  fixture_t f;
  ASSERT_OK(plan_file("one_stage", &(plan_options_t){.microbatches = kMicrobatches},
                      &f.planned));
  f.draft = draft_create(f.planned.plan);
  jpp_program_t* p = &f.draft.programs[0];
  jpp_instr_t forward = p->instrs[1], backward = p->instrs[2];
  jpp_instr_t deletion = {
      .kind = JPP_INSTR_DELETE, .microbatch = JPP_NONE, .num_args = 3};
  memset((uint32_t*)f.draft.bindings[forward.target].donated_to, 0xff, 4 * 4);
  memset((uint32_t*)f.draft.bindings[backward.target].donated_to, 0xff, 4 * 4);
  p->num_instrs = 1;
  p->num_registers = kFree + 3;
  for (uint32_t m = 0; m < kMicrobatches; ++m) {
    forward.microbatch = backward.microbatch = m;
    append(&f, forward, (uint32_t[]){1, 2 + m, 0, kInit, kFree, kFree + 1},
           (uint32_t[]){1, 2, 0, 11, 4, 13});
    append(&f, backward, (uint32_t[]){1, 2 + m, kFree, kInit + 1, kFree + 2},
           (uint32_t[]){1, 2, 4, 14, 16});
    append(&f, deletion, (uint32_t[]){kFree, kFree + 1, kFree + 2},
           (uint32_t[]){4, 13, 16});
  }
  assert_refused(&f,
                 "rank 0, instruction 4: run of fwd_0, microbatch 1: arg 3: expected ");
  fixture_free(&f);
}

static void test_a_dropped_send_leaves_its_receive_alone(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp2", NULL);
  drop(&f, 0, nth(&f, 0, JPP_INSTR_SEND, 3));
  assert_refused(&f, "recv of %6 (f32[2,8], microbatch 3) from rank 0 has no send");
  fixture_free(&f);
}

static void test_messages_in_another_order_are_named(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp2", "gpipe");
  jpp_instr_t* first = nth(&f, 1, JPP_INSTR_RECV, 0);
  jpp_instr_t* second = nth(&f, 1, JPP_INSTR_RECV, 1);
  first->microbatch = 1;
  second->microbatch = 0;
  assert_refused(&f,
                 "run of fwd_1, microbatch 0: arg 0: expected %6 (f32[2,8], "
                 "microbatch 0) in register");
  fixture_free(&f);
}

static void test_a_dropped_delete_is_a_leak(void** state) {
  (void)state;
  fixture_t f = fixture_create("forward", NULL);
  drop(&f, 0, nth(&f, 0, JPP_INSTR_DELETE, 3));
  assert_refused(&f,
                 "rank 0: register 6 still holds %6 (f32[2,8], microbatch 3) at the end; "
                 "it is not an output");
  fixture_free(&f);
}

static void test_a_use_behind_the_delete_is_refused(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp2", NULL);
  jpp_instr_t* send = nth(&f, 0, JPP_INSTR_SEND, 0);
  jpp_instr_t kept = send[0];
  send[0] = send[1];
  send[1] = kept;
  assert_refused(&f,
                 "send of %6 (f32[2,8], microbatch 0) to rank 1: operand 0: register");
  fixture_free(&f);
}

static void test_what_is_in_another_memory_is_not_run(void** state) {
  (void)state;
  fixture_t f = fixture_create("host", NULL);
  jpp_program_t* p = &f.draft.programs[0];
  jpp_instr_t* move = nth(&f, 0, JPP_INSTR_MOVE, 0);
  // The run reads the weights in the memory that they live in between steps.
  uint32_t home = p->operands[move->first_operand];
  drop(&f, 0, move);
  drop(&f, 0, move);  // deletes the weights
  jpp_instr_t* run = nth(&f, 0, JPP_INSTR_RUN, 1);
  ((uint32_t*)p->operands)[run->first_operand + 2] = home;
  assert_refused(&f,
                 "run of fwd_0, microbatch 0: arg 2: expected %0 (f32[8,8]) in device, "
                 "found it in pinned_host");
  fixture_free(&f);
}

static void test_outputs_are_left_in_their_memory(void** state) {
  (void)state;
  fixture_t f = fixture_create("host", NULL);
  jpp_program_t* p = &f.draft.programs[1];
  jpp_instr_t* move = nth(&f, 1, JPP_INSTR_MOVE, 1);
  jpp_program_output_t* outputs = (jpp_program_output_t*)p->outputs;
  outputs[1].reg = outputs[2].reg = p->operands[move->first_operand];
  drop(&f, 1, move + 1);
  drop(&f, 1, move);
  assert_refused(&f,
                 "output 3: expected %27 (f32[8,8]) in pinned_host, found it in device");
  fixture_free(&f);
}

static void test_a_move_is_to_another_memory(void** state) {
  (void)state;
  fixture_t f = fixture_create("host", NULL);
  jpp_instr_t* move = nth(&f, 0, JPP_INSTR_MOVE, 0);
  move->target = JPP_MEMORY_PINNED_HOST;
  assert_refused(&f, "move of %0 (f32[8,8]) to pinned_host: memory 1 is not a target");
  move->target = JPP_MEMORY_COUNT;
  assert_refused(&f,
                 "move of %0 (f32[8,8]) to an unknown memory: memory 2 is not a target");
  move->target = JPP_MEMORY_DEVICE;
  move->num_results = 0;
  assert_refused(&f, "expected one arg and one result, found 1 and 0");
  fixture_free(&f);
}

static void test_the_peak_of_each_memory_is_proved(void** state) {
  (void)state;
  fixture_t f = fixture_create("host", NULL);
  f.draft.programs[1].peak_host_bytes -= 4;
  assert_refused(&f, "rank 1: peak of 768 bytes in pinned_host; the plan says 764");
  fixture_free(&f);
}

static void test_a_delete_of_nothing_is_refused(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp2", NULL);
  jpp_program_t* p = &f.draft.programs[0];
  jpp_instr_t* instr = nth(&f, 0, JPP_INSTR_DELETE, 0);
  ((uint32_t*)p->operands)[instr->first_operand] = p->num_registers++;
  ((uint32_t*)p->operand_values)[instr->first_value] = JPP_NONE;
  assert_refused(&f, "an operand is value %4294967295; there are");
  fixture_free(&f);
}

static void test_lists_end_within_the_program(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp2", NULL);
  jpp_instr_t* instr = nth(&f, 0, JPP_INSTR_RUN, 1);
  uint32_t first = instr->first_value;
  instr->first_value = f.draft.programs[0].num_operand_values;
  assert_refused(&f, "values of operands end at");
  instr->first_value = first;
  instr->first_operand = f.draft.programs[0].num_operands;
  assert_refused(&f, "operands end at");
  fixture_free(&f);
}

static void test_a_run_out_of_turn_sums_out_of_order(void** state) {
  (void)state;
  fixture_t f = fixture_create("one_stage", NULL);
  jpp_instr_t* first = nth(&f, 0, JPP_INSTR_RUN, 1);
  first->microbatch = 2;
  assert_refused(&f,
                 "run of fwd_0, microbatch 2: arg 1: expected %2 (s32[], microbatch "
                 "2) in register 2, found the microbatch number 0");
  fixture_free(&f);
}

static void test_a_task_that_never_runs_is_missed(void** state) {
  (void)state;
  fixture_t f = fixture_create("empty_stage", NULL);
  drop(&f, 1, nth(&f, 1, JPP_INSTR_RUN, 0));
  assert_refused(&f, "rank 1: task fwd_1 runs 2 times, its binding says 3, expected 3");
  fixture_free(&f);
}

static void test_a_borrowed_argument_is_not_donated(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp2", NULL);
  ((jpp_program_input_t*)f.draft.programs[0].inputs)[0].owned = false;
  assert_refused(&f, "donates %0 (f32[8,8]), which the program does not own");
  fixture_free(&f);
}

static void test_a_wrong_peak_is_named(void** state) {
  (void)state;
  fixture_t f = fixture_create("forward", NULL);
  f.draft.programs[0].peak_bytes += 1;
  assert_refused(&f,
                 "rank 0: peak of 592 bytes at instruction 0; the plan says 593 at 0");
  fixture_free(&f);
}

// Rank 0 sends all activations before it receives the first gradient; rank 1 sends a
// gradient after each. With too few slots both channels fill up and both ranks wait.
static void mix_orders(fixture_t* f, fixture_t* other, uint32_t slots) {
  *f = fixture_create("mlp2", "1f1b");
  *other = fixture_create("mlp2", "gpipe");
  jpp_program_t kept = f->draft.programs[0];
  f->draft.programs[0] = other->draft.programs[0];
  other->draft.programs[0] = kept;
  for (uint32_t c = 0; c < 2; ++c) {
    jpp_plan_channel_t* channel = &f->draft.channels[c];
    jpp_program_t* p = &f->draft.programs[channel->dst];
    uint64_t change = (uint64_t)(2 - slots) * channel->max_bytes;
    channel->slots = slots;
    p->reserved_bytes -= change;
    p->peak_bytes -= change;
  }
}

static void test_full_channels_that_wait_for_each_other_are_named(void** state) {
  (void)state;
  fixture_t f, other;
  mix_orders(&f, &other, 1);
  jpp_check_report_t* report = NULL;
  jpp_status_t* status = jpp_check_plan(&f.draft.plan, &report);
  assert_string_equal(jpp_status_message(status),
                      "2 actors wait for each other for ever:\n"
                      "  rank 0, instruction 11: send of %6 (f32[2,8], microbatch 3) to "
                      "rank 1 is blocked, "
                      "1 of 1 slots full, and waits for rank 1, instruction 11\n"
                      "  rank 1, instruction 11: send of %14 (f32[2,8], microbatch 1) to "
                      "rank 0 is blocked, "
                      "1 of 1 slots full, and waits for rank 0, instruction 11\n"
                      "Give the channels more slots, or receive earlier.");
  jpp_status_free(status);
  fixture_free(&f);
  fixture_free(&other);
}

static void test_the_slots_that_are_needed_are_found(void** state) {
  (void)state;
  fixture_t f, other;
  mix_orders(&f, &other, 2);
  jpp_check_report_t* report = NULL;
  ASSERT_OK(jpp_check_plan(&f.draft.plan, &report));
  assert_int_equal(report->channels[0].slots_needed, 2);
  assert_int_equal(report->channels[1].slots_needed, 2);
  jpp_check_report_destroy(report);
  fixture_free(&f);
  fixture_free(&other);
}

static void test_copies_that_different_tasks_make_are_refused(void** state) {
  (void)state;
  fixture_t f = fixture_create("mlp4", NULL);
  const jpp_staged_t* staged = f.draft.plan.staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    if (strcmp(staged->tasks[t].name, "after_loop_0_2") != 0) continue;
    ((uint32_t*)f.draft.bindings[t].donated_to)[0] = JPP_NONE;
  }
  assert_refused(
      &f,
      "%37 (s32[]) is made by after_loop_0_0 on rank 0 and by after_loop_0_2 on "
      "rank 2, which are not the same task");
  fixture_free(&f);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_sum_begins_once),
      cmocka_unit_test(test_a_dropped_send_leaves_its_receive_alone),
      cmocka_unit_test(test_messages_in_another_order_are_named),
      cmocka_unit_test(test_a_dropped_delete_is_a_leak),
      cmocka_unit_test(test_a_use_behind_the_delete_is_refused),
      cmocka_unit_test(test_what_is_in_another_memory_is_not_run),
      cmocka_unit_test(test_outputs_are_left_in_their_memory),
      cmocka_unit_test(test_a_move_is_to_another_memory),
      cmocka_unit_test(test_the_peak_of_each_memory_is_proved),
      cmocka_unit_test(test_a_delete_of_nothing_is_refused),
      cmocka_unit_test(test_lists_end_within_the_program),
      cmocka_unit_test(test_a_run_out_of_turn_sums_out_of_order),
      cmocka_unit_test(test_a_task_that_never_runs_is_missed),
      cmocka_unit_test(test_a_borrowed_argument_is_not_donated),
      cmocka_unit_test(test_a_wrong_peak_is_named),
      cmocka_unit_test(test_full_channels_that_wait_for_each_other_are_named),
      cmocka_unit_test(test_the_slots_that_are_needed_are_found),
      cmocka_unit_test(test_copies_that_different_tasks_make_are_refused),
  };
  return cmocka_run_group_tests_name("check_refusals", tests, NULL, NULL);
}
