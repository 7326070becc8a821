// Cuts into stages: held against all cuts of small programs, and what large ones must
// keep.
#include <math.h>
#include <stdlib.h>

#include "jaxpp/partition_cut.h"
#include "test_util.h"

enum { kMostOps = 4096, kMostUses = 3 * kMostOps };

// Each op makes one value, of the op's number.
typedef struct program {
  uint32_t ops, uses;
  double costs[kMostOps];
  uint32_t makers[kMostOps], used[kMostUses], users[kMostUses];
  uint64_t bytes[kMostOps];
} program_t;

static jpp_cut_program_t view_of(const program_t* p) {
  return (jpp_cut_program_t){.struct_size = sizeof(jpp_cut_program_t),
                             .num_ops = p->ops,
                             .num_values = p->ops,
                             .num_uses = p->uses,
                             .costs = p->costs,
                             .makers = p->makers,
                             .bytes = p->bytes,
                             .used = p->used,
                             .users = p->users};
}

static void add_op(program_t* p, double cost, uint64_t bytes) {
  p->makers[p->ops] = p->ops;
  p->costs[p->ops] = cost;
  p->bytes[p->ops++] = bytes;
}

static void add_use(program_t* p, uint32_t value, uint32_t op) {
  p->used[p->uses] = value;
  p->users[p->uses++] = op;
}

// The cost of the heaviest stage. INFINITY: a stage without ops, a boundary that no value
// passes, or a value that is used before its stage. `out_bytes` pass the boundaries.
static double measure(const program_t* p, uint32_t stages, const uint32_t* stage_of,
                      double* out_bytes) {
  double costs[16] = {0}, heaviest = 0;
  uint32_t counts[16] = {0}, passing[16] = {0};
  *out_bytes = 0;
  for (uint32_t i = 0; i < p->ops; ++i) {
    uint32_t last = stage_of[i];
    costs[stage_of[i]] += p->costs[i];
    ++counts[stage_of[i]];
    for (uint32_t u = 0; u < p->uses; ++u) {
      if (p->used[u] != i) continue;
      if (stage_of[p->users[u]] < stage_of[i]) return INFINITY;
      if (stage_of[p->users[u]] > last) last = stage_of[p->users[u]];
    }
    for (uint32_t s = stage_of[i]; s < last; ++s) ++passing[s];
    *out_bytes += (double)p->bytes[i] * (last - stage_of[i]);
  }
  for (uint32_t s = 0; s < stages; ++s) {
    if (!counts[s] || (s + 1 < stages && !passing[s])) return INFINITY;
    heaviest = fmax(heaviest, costs[s]);
  }
  return heaviest;
}

// The least that the heaviest stage costs, of all cuts.
static double try_all(const program_t* p, uint32_t stages) {
  double least = INFINITY, bytes;
  uint32_t stage_of[16] = {0}, at = 0;
  while (at < p->ops) {
    least = fmin(least, measure(p, stages, stage_of, &bytes));
    for (at = 0; at < p->ops && ++stage_of[at] == stages; ++at) stage_of[at] = 0;
  }
  return least;
}

static void make_random(program_t* p, uint64_t* state) {
  *p = (program_t){0};
  uint32_t ops = 3 + test_random_below(state, 6);
  for (uint32_t i = 0; i < ops; ++i) {
    add_op(p, test_random_below(state, 4) ? 1 + test_random_below(state, 9) : 0,
           test_random_below(state, 100));
    for (uint32_t k = 0; i && k <= test_random_below(state, 2); ++k)
      add_use(p, test_random_below(state, i), i);
  }
}

static void test_random_programs(void** state) {
  (void)state;
  static program_t p;
  uint64_t random = 7;
  for (int i = 0; i < 1000; ++i) {
    make_random(&p, &random);
    uint32_t stages = 2 + test_random_below(&random, 3), found[16];
    jpp_cut_program_t view = view_of(&p);
    double best = try_all(&p, stages), bytes;
    jpp_status_t* status = jpp_cut_stages(&view, stages, found);
    if (isinf(best)) {
      ASSERT_FAILS(status, JPP_INVALID_ARGUMENT, "cannot be cut");
      continue;
    }
    ASSERT_OK(status);
    assert_true(measure(&p, stages, found, &bytes) <= 1.03 * best);
  }
}

// Blocks of a residual network: three ops on a branch that is wide in between, and a sum.
static void make_residual(program_t* p, uint32_t blocks) {
  *p = (program_t){0};
  add_op(p, 1, 100);
  for (uint32_t b = 0; b < blocks; ++b) {
    uint32_t input = p->ops - 1;
    for (uint32_t k = 0; k < 3; ++k) {
      add_op(p, 10, k < 2 ? 400 : 100);
      add_use(p, k ? p->ops - 2 : input, p->ops - 1);
    }
    add_op(p, 0.1, 100);
    add_use(p, input, p->ops - 1);
    add_use(p, p->ops - 2, p->ops - 1);
  }
}

static void test_cuts_are_between_blocks(void** state) {
  (void)state;
  static program_t p;
  uint32_t found[kMostOps];
  double bytes;
  make_residual(&p, 32);
  jpp_cut_program_t view = view_of(&p);
  ASSERT_OK(jpp_cut_stages(&view, 8, found));
  double heaviest = measure(&p, 8, found, &bytes);
  assert_true(heaviest <= 1.02 * 4 * 30.1 + 1);
  assert_true(bytes == 7 * 100);
}

// A head of as much work as two blocks leaves fewer blocks to the last stage.
static void test_a_heavy_head(void** state) {
  (void)state;
  static program_t p;
  uint32_t found[kMostOps], last = 0;
  double bytes;
  make_residual(&p, 10);
  add_op(&p, 60, 4);
  add_use(&p, p.ops - 2, p.ops - 1);
  jpp_cut_program_t view = view_of(&p);
  ASSERT_OK(jpp_cut_stages(&view, 4, found));
  assert_true(measure(&p, 4, found, &bytes) <= 1.03 * 91.3);
  for (uint32_t i = 0; i < p.ops; ++i) last += found[i] == 3;
  assert_true(last <= 1 + 4);
}

// Branches that stay separate until the end: a branch is not torn up by the other's
// order.
static void test_branches_and_sizes(void** state) {
  (void)state;
  static program_t p;
  static uint32_t found[kMostOps];
  double bytes;
  for (uint32_t length = 2; 2 * length + 1 < kMostOps; length *= 3) {
    p = (program_t){0};
    for (uint32_t i = 0; i < length; ++i) {
      for (uint32_t branch = 0; branch < 2; ++branch) {
        add_op(&p, 1, 8);
        if (i) add_use(&p, p.ops - 3, p.ops - 1);
      }
    }
    add_op(&p, 1, 8);
    add_use(&p, p.ops - 2, p.ops - 1);
    add_use(&p, p.ops - 3, p.ops - 1);
    jpp_cut_program_t view = view_of(&p);
    ASSERT_OK(jpp_cut_stages(&view, 2, found));
    assert_true(measure(&p, 2, found, &bytes) <= 1.03 * (length + 1));
    assert_true(bytes == 8);
  }
}

static void test_refusals(void** state) {
  (void)state;
  static program_t p;
  uint32_t found[kMostOps];
  make_residual(&p, 1);
  jpp_cut_program_t view = view_of(&p);
  ASSERT_FAILS(jpp_cut_stages(&view, 0, found), JPP_INVALID_ARGUMENT, "at least 1 stage");
  ASSERT_FAILS(jpp_cut_stages(&view, 6, found), JPP_INVALID_ARGUMENT,
               "5 ops cannot be cut into 6 stages");
  ASSERT_FAILS(jpp_cut_stages(&view, UINT32_MAX, found), JPP_INVALID_ARGUMENT,
               "5 ops cannot be cut into 4294967295 stages");
  p.costs[2] = NAN;
  ASSERT_FAILS(jpp_cut_stages(&view, 2, found), JPP_INVALID_ARGUMENT,
               "op 2: expected a f");
  p.costs[2] = 1;
  p.makers[1] = 99;
  ASSERT_FAILS(jpp_cut_stages(&view, 2, found), JPP_INVALID_ARGUMENT, "found 99");
  p.makers[1] = 1;
  p.used[0] = 4;
  ASSERT_FAILS(jpp_cut_stages(&view, 2, found), JPP_INVALID_ARGUMENT,
               "use 0, of value 4 by op 1");
  p.used[0] = 0;
  ASSERT_OK(jpp_cut_stages(&view, 1, found));
  for (uint32_t i = 0; i < p.ops; ++i) assert_int_equal(found[i], 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_programs),
      cmocka_unit_test(test_cuts_are_between_blocks),
      cmocka_unit_test(test_a_heavy_head),
      cmocka_unit_test(test_branches_and_sizes),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests_name("cut", tests, NULL, NULL);
}
