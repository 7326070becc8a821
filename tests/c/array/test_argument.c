// How a program gets each kind of array as its argument: a table of cases, decided and
// then carried out on the fake device; blocks gathered at random; and random uploads.
#include "fake/device.h"
#include "jaxpp/alloc.h"
#include "jaxpp/array_argument.h"
#include "test_util.h"

// --- Decisions ------------------------------------------------------------------------

// The plan wants f32[4, 6] on rank 1 of 3, whose two devices have two rows each.
enum { kRanks = 3, kDevices = 2, kPlace = 7 };

static const int64_t kTop[] = {0, 2, 0, 6}, kBottom[] = {2, 4, 0, 6};
static const int64_t kLeft[] = {0, 4, 0, 3}, kRight[] = {0, 4, 3, 6};
static const int64_t kWhole[] = {0, 4, 0, 6};

typedef enum cut { BY_ROWS, BY_COLUMNS, WHOLE, TOP_ONLY } cut_t;

static const int64_t* bounds_of(cut_t cut, uint32_t device) {
  switch (cut) {
    case BY_ROWS:
      return device ? kBottom : kTop;
    case BY_COLUMNS:
      return device ? kRight : kLeft;
    case WHOLE:
      return kWhole;
    case TOP_ONLY:
      return kTop;
  }
  return NULL;
}

typedef struct given_row {
  const char* what;
  jpp_home_t home;
  uint32_t rank;  // JPP_ANY_RANK: every device reaches it
  cut_t cut;
  uint64_t devices;
  jpp_dtype_t dtype;
  uint64_t bytes;
  bool is_deleted, elsewhere;  // elsewhere: in another process
  // Expected: U(se), B(orrow), C(opy by way of the host), D(eleted), M(issing); by
  // can_move * 2 + donated.
  const char* expected;
} given_row_t;

static const given_row_t kGiven[] = {
    {.what = "as wanted", .rank = 1, .devices = kPlace, .expected = "UUUU"},
    {.what = "on another rank", .rank = 2, .devices = kPlace, .expected = "CCUU"},
    {.what = "on devices of another client", .rank = 1, .devices = 8, .expected = "CCCC"},
    {.what = "in another cut",
     .rank = 1,
     .devices = kPlace,
     .cut = BY_COLUMNS,
     .expected = "CCCC"},
    {.what = "whole on each device",
     .rank = 1,
     .devices = kPlace,
     .cut = WHOLE,
     .expected = "CCCC"},
    {.what = "deleted",
     .rank = 1,
     .devices = kPlace,
     .is_deleted = true,
     .expected = "DDDD"},
    {.what = "on a rank of another process",
     .rank = 2,
     .devices = kPlace,
     .elsewhere = true,
     .expected = "MMUU"},
    {.what = "foreign, on the rank",
     .home = JPP_HOME_FOREIGN,
     .rank = 1,
     .expected = "BCBC"},
    {.what = "foreign, on another rank",
     .home = JPP_HOME_FOREIGN,
     .rank = 0,
     .expected = "CCBC"},
    {.what = "foreign, on a device of no rank",
     .home = JPP_HOME_FOREIGN,
     .rank = JPP_NO_RANK,
     .expected = "CCCC"},
    {.what = "foreign, in reach of all devices",
     .home = JPP_HOME_FOREIGN,
     .rank = JPP_ANY_RANK,
     .expected = "BCBC"},
    {.what = "foreign, in another cut",
     .home = JPP_HOME_FOREIGN,
     .rank = JPP_ANY_RANK,
     .cut = BY_COLUMNS,
     .expected = "CCCC"},
    {.what = "foreign, whole",
     .home = JPP_HOME_FOREIGN,
     .rank = JPP_ANY_RANK,
     .cut = WHOLE,
     .expected = "CCCC"},
    {.what = "foreign, of another type",
     .home = JPP_HOME_FOREIGN,
     .rank = 1,
     .dtype = JPP_DTYPE_F64,
     .expected = "CCCC"},
    {.what = "foreign, small",
     .home = JPP_HOME_FOREIGN,
     .rank = 1,
     .bytes = 8,
     .expected = "CCCC"},
    {.what = "foreign, deleted",
     .home = JPP_HOME_FOREIGN,
     .rank = 1,
     .is_deleted = true,
     .expected = "DDDD"},
    {.what = "foreign, without its second half",
     .home = JPP_HOME_FOREIGN,
     .rank = 1,
     .cut = TOP_ONLY,
     .expected = "MMMM"},
    {.what = "on the host",
     .home = JPP_HOME_HOST,
     .rank = JPP_ANY_RANK,
     .cut = WHOLE,
     .expected = "CCCC"},
};

static char letter_of(jpp_status_t* status, const jpp_decision_t* decision) {
  static const char kActions[] = {
      [JPP_ACTION_USE] = 'U', [JPP_ACTION_BORROW] = 'B', [JPP_ACTION_UPLOAD] = 'C'};
  if (!status) return kActions[decision->action];
  char letter = jpp_status_code(status) == JPP_DONATED_ERROR ? 'D'
                : jpp_status_code(status) == JPP_MESH_ERROR  ? 'M'
                                                             : '?';
  jpp_status_free(status);
  return letter;
}

static const uint32_t kRank = 1;
static const int64_t kRows[] = {0, 2, 0, 6, 2, 4, 0, 6};

static jpp_wanted_t wanted_by(bool can_move, bool donated) {
  return (jpp_wanted_t){.struct_size = sizeof(jpp_wanted_t),
                        .name = "argument x",
                        .dtype = JPP_DTYPE_F32,
                        .ndim = 2,
                        .devices = kPlace,
                        .num_ranks = 1,
                        .ranks = &kRank,
                        .devices_per_rank = kDevices,
                        .blocks = kRows,
                        .donated = donated,
                        .can_move = can_move,
                        .least_borrowed = 64};
}

static jpp_given_t given_by(const given_row_t* row, jpp_given_block_t blocks[kDevices]) {
  for (uint32_t d = 0; d < kDevices; ++d) {
    blocks[d] = (jpp_given_block_t){.rank = row->rank,
                                    .device = d,
                                    .is_local = !row->elsewhere,
                                    .bounds = bounds_of(row->cut, d)};
  }
  return (jpp_given_t){
      .struct_size = sizeof(jpp_given_t),
      .home = row->home,
      .dtype = row->dtype ? row->dtype : JPP_DTYPE_F32,
      .ndim = 2,
      .devices = row->devices,
      .bytes = row->bytes ? row->bytes : 96,
      .deletion_reason = row->is_deleted ? "was deleted" : NULL,
      .num_blocks = kDevices,
      .blocks = blocks,
  };
}

static char decide(const given_row_t* row, bool can_move, bool donated) {
  jpp_given_block_t given_blocks[kDevices];
  const jpp_wanted_t wanted = wanted_by(can_move, donated);
  const jpp_given_t given = given_by(row, given_blocks);
  jpp_decision_t decision;
  char letter = letter_of(jpp_argument_decide(&wanted, &given, &decision), &decision);
  if (letter == 'B') {
    assert_int_equal(decision.num_ranks, 1);
    assert_int_equal(decision.num_blocks, kDevices);
    assert_int_equal(decision.ranks[0], row->rank == JPP_ANY_RANK ? kRank : row->rank);
    for (uint32_t d = 0; d < kDevices; ++d) assert_int_equal(decision.blocks[d], d);
  }
  if (letter == 'C') {
    bool one = row->cut == WHOLE;  // the second block is the same
    assert_int_equal(decision.num_blocks, one ? 1 : kDevices);
  }
  jpp_decision_free(&decision);
  return letter;
}

static void test_each_given_array(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof(kGiven) / sizeof(*kGiven); ++i) {
    const given_row_t* row = &kGiven[i];
    char found[] = "....";
    for (uint32_t k = 0; k < 4; ++k) found[k] = decide(row, k / 2, k % 2);
    if (strcmp(found, row->expected) != 0) {
      fail_msg("%s: expected %s, found %s", row->what, row->expected, found);
    }
  }
}

// --- Carried out ----------------------------------------------------------------------

// The array of a row holds the numbers 0 to 23; its source is one array in memory.
typedef struct contents {
  const jpp_given_t* given;
  float numbers[4 * 6];
  jpp_array_t* array;  // of part 0
  bool refuses;        // to lend
  int lent, read, released;
} contents_t;

static jpp_status_t* give_part(void* user, uint32_t part, jpp_array_t** out_array) {
  contents_t* contents = user;
  assert_int_equal(part, 0);
  *out_array = contents->array;
  return NULL;
}

static void count_release(void* user) { ++((contents_t*)user)->released; }

static jpp_status_t* lend_blocks(void* user, const uint32_t* blocks, uint32_t num_blocks,
                                 jpp_foreign_memory_t* out_memory,
                                 void (**out_release)(void* owner), void** out_owner) {
  static const int64_t kDims[] = {2, 6};
  contents_t* contents = user;
  if (contents->refuses) return jpp_status_make(JPP_UNSUPPORTED, "not lent");
  for (uint32_t b = 0; b < num_blocks; ++b) {
    const int64_t* bounds = contents->given->blocks[blocks[b]].bounds;
    out_memory[b].memory = contents->numbers + bounds[0] * 6;
    out_memory[b].shape =
        (jpp_buffer_shape_t){.dtype = JPP_DTYPE_F32, .rank = 2, .dims = kDims};
  }
  ++contents->lent;
  *out_release = count_release;
  *out_owner = contents;
  return NULL;
}

static jpp_status_t* read_block(void* user, uint32_t block, jpp_host_block_t* out_block) {
  static const int64_t kStrides[] = {6 * sizeof(float), sizeof(float)};
  contents_t* contents = user;
  const int64_t* bounds = contents->given->blocks[block].bounds;
  out_block->data = contents->numbers + bounds[0] * 6 + bounds[2];
  out_block->byte_strides = kStrides;
  ++contents->read;
  return NULL;
}

static void expect_rows(jpp_array_t* array) {
  uint32_t rank = jpp_array_layout(array)->ranks[0];
  for (uint32_t d = 0; d < kDevices; ++d) {
    float found[2 * 6];
    ASSERT_OK(jpp_array_read(array, rank, d, found, sizeof(found), NULL));
    for (int i = 0; i < 2 * 6; ++i) {
      assert_int_equal((int)found[i], (int)d * 2 * 6 + i);
    }
  }
}

// Returns the letter of the case that occurred, after checking the array's contents.
static char take(jpp_client_t* client, const given_row_t* row, bool can_move,
                 bool donated, bool refuses) {
  static const uint32_t kAllDevices[kRanks * kDevices] = {0, 1, 2, 3, 4, 5};
  jpp_given_block_t given_blocks[kDevices];
  const jpp_wanted_t wanted = wanted_by(can_move, donated);
  const jpp_given_t given = given_by(row, given_blocks);
  contents_t contents = {.given = &given, .refuses = refuses};
  for (int i = 0; i < 4 * 6; ++i) contents.numbers[i] = (float)i;
  ASSERT_OK(jpp_array_create_elsewhere(&contents.array));
  const jpp_source_t source = {.struct_size = sizeof(source),
                               .given = &given,
                               .user = &contents,
                               .part = give_part,
                               .lend = lend_blocks,
                               .read = read_block};
  jpp_array_t* array = NULL;
  jpp_status_t* status =
      jpp_argument_take(&wanted, &source, client, kAllDevices, kRanks * kDevices, &array);
  const jpp_decision_t taken = {.action = array == contents.array ? JPP_ACTION_USE
                                          : contents.lent         ? JPP_ACTION_BORROW
                                                                  : JPP_ACTION_UPLOAD};
  bool failed = status != NULL;
  char letter = letter_of(status, &taken);
  assert_int_equal(contents.read > 0, letter == 'C');
  if (failed) assert_null(array);
  if (letter == 'B' || letter == 'C') expect_rows(array);
  jpp_array_release(array);
  assert_int_equal(contents.released, contents.lent);
  jpp_array_release(contents.array);
  return letter;
}

static void test_each_given_array_is_taken(void** state) {
  (void)state;
  jpp_client_t* client = NULL;
  const jpp_fake_options_t options = {.struct_size = sizeof(options),
                                      .device_count = kRanks * kDevices};
  ASSERT_OK(jpp_client_create_fake(&options, &client));
  for (size_t i = 0; i < sizeof(kGiven) / sizeof(*kGiven); ++i) {
    const given_row_t* row = &kGiven[i];
    for (uint32_t k = 0; k < 4; ++k) {
      char expected = row->expected[k], found = take(client, row, k / 2, k % 2, false);
      char refused = take(client, row, k / 2, k % 2, true);
      char copied = expected == 'B'
                        ? 'C'
                        : expected;  // a block that the source does not lend is copied
      if (found == expected && refused == copied) continue;
      fail_msg("%s, %u: expected %c and without a loan %c, found %c and %c", row->what, k,
               expected, copied, found, refused);
    }
  }
  jpp_client_destroy(client);
}

static jpp_status_t* fail_to_read(void* user, uint32_t block,
                                  jpp_host_block_t* out_block) {
  (void)user, (void)block, (void)out_block;
  return jpp_status_make(JPP_EXECUTION_ERROR, "the disk is gone");
}

static void test_what_a_source_lacks(void** state) {
  (void)state;
  jpp_client_t* client = NULL;
  const jpp_fake_options_t options = {.struct_size = sizeof(options), .device_count = 4};
  ASSERT_OK(jpp_client_create_fake(&options, &client));
  static const uint32_t kAllDevices[] = {0, 1, 2, 3};
  const given_row_t here = {.rank = 1, .devices = kPlace};
  const given_row_t host = {.home = JPP_HOME_HOST, .rank = JPP_ANY_RANK, .cut = WHOLE};
  jpp_given_block_t blocks[kDevices];
  const jpp_wanted_t wanted = wanted_by(false, false);
  jpp_array_t* array = NULL;
  jpp_given_t given = given_by(&here, blocks);
  jpp_source_t source = {.struct_size = sizeof(source), .given = &given};
  ASSERT_FAILS(jpp_argument_take(&wanted, &source, client, kAllDevices, 4, &array),
               JPP_INVALID_ARGUMENT,
               "argument x: expected a source whose function `part` is set, found NULL");
  given = given_by(&host, blocks);
  ASSERT_FAILS(jpp_argument_take(&wanted, &source, client, kAllDevices, 4, &array),
               JPP_INVALID_ARGUMENT, "function `read` is set, found NULL");
  source.read = fail_to_read;
  ASSERT_FAILS(jpp_argument_take(&wanted, &source, client, kAllDevices, 4, &array),
               JPP_EXECUTION_ERROR, "the disk is gone");
  ASSERT_FAILS(jpp_argument_take(&wanted, &source, client, kAllDevices, 3, &array),
               JPP_INVALID_ARGUMENT,
               "argument x, on rank 1: expected at least 4 devices, found 3");
  jpp_client_destroy(client);
}

// Rows of an array in parts: each part is a separate argument.
static void test_parts(void** state) {
  (void)state;
  const jpp_given_block_t parts[] = {
      {.part = 0, .rank = 0, .is_local = true, .bounds = kTop},
      {.part = 1, .rank = 1, .is_local = true, .bounds = kBottom}};
  const jpp_given_t given = {.struct_size = sizeof(given),
                             .dtype = JPP_DTYPE_F32,
                             .ndim = 2,
                             .devices = kPlace,
                             .bytes = 96,
                             .num_blocks = 2,
                             .blocks = parts};
  const uint32_t rank = 1;
  const int64_t middle[] = {1, 3, 0, 6};
  jpp_wanted_t wanted = {.struct_size = sizeof(wanted),
                         .name = "argument w",
                         .dtype = JPP_DTYPE_F32,
                         .ndim = 2,
                         .devices = kPlace,
                         .num_ranks = 1,
                         .ranks = &rank,
                         .devices_per_rank = 1,
                         .blocks = kBottom,
                         .can_move = true};
  jpp_decision_t decision;
  ASSERT_OK(jpp_argument_decide(&wanted, &given, &decision));
  assert_int_equal(decision.action, JPP_ACTION_USE);
  assert_int_equal(decision.part, 1);
  wanted.blocks = middle;
  ASSERT_OK(jpp_argument_decide(&wanted, &given, &decision));
  assert_int_equal(decision.action, JPP_ACTION_UPLOAD);
  assert_int_equal(decision.num_blocks, 2);
  jpp_decision_free(&decision);
  wanted.blocks = kTop;  // the other block is not needed
  wanted.devices = 8;
  ASSERT_OK(jpp_argument_decide(&wanted, &given, &decision));
  assert_int_equal(decision.num_blocks, 1);
  assert_int_equal(decision.blocks[0], 0);
  jpp_decision_free(&decision);
}

static void test_blocks_that_no_array_has(void** state) {
  (void)state;
  const uint32_t rank = 0;
  const int64_t backwards[] = {2, 1}, negative[] = {-1, 1}, right[] = {0, 1};
  const jpp_given_block_t block = {.is_local = true, .bounds = negative};
  const jpp_given_t given = {.struct_size = sizeof(given),
                             .home = JPP_HOME_HOST,
                             .ndim = 1,
                             .num_blocks = 1,
                             .blocks = &block};
  jpp_wanted_t wanted = {.struct_size = sizeof(wanted),
                         .name = "argument x",
                         .ndim = 1,
                         .num_ranks = 1,
                         .ranks = &rank,
                         .devices_per_rank = 1,
                         .blocks = backwards};
  jpp_decision_t decision;
  const char* text = "argument x: expected a block that begins at 0 or later";
  ASSERT_FAILS(jpp_argument_decide(&wanted, &given, &decision), JPP_INVALID_ARGUMENT,
               text);
  wanted.blocks = right;
  ASSERT_FAILS(jpp_argument_decide(&wanted, &given, &decision), JPP_INVALID_ARGUMENT,
               text);
}

// --- Blocks ---------------------------------------------------------------------------

enum { kMostDims = 3, kMostBlocks = 8, kMostElements = 8 * 8 * 8, kRounds = 5000 };

// An array of numbers 0, 1, ..., in blocks with separate memory and strides.
typedef struct blocks {
  uint32_t ndim, count;
  int64_t dims[kMostDims];
  int64_t bounds[kMostBlocks][kMostDims * 2];
  int64_t strides[kMostBlocks][kMostDims];
  int32_t memory[kMostBlocks][kMostElements];
  jpp_host_block_t host[kMostBlocks];
} blocks_t;

static int32_t number_at(const blocks_t* blocks, const int64_t* index) {
  int64_t number = 0;
  for (uint32_t i = 0; i < blocks->ndim; ++i) {
    number = number * blocks->dims[i] + index[i];
  }
  return (int32_t)number;
}

// Steps to the next index of a block in element order; false after the last one.
static bool step_index(const int64_t* bounds, uint32_t ndim, int64_t* index) {
  for (uint32_t i = ndim; i-- > 0;) {
    if (++index[i] < bounds[2 * i + 1]) return true;
    index[i] = bounds[2 * i];
  }
  return false;
}

static void first_index(const int64_t* bounds, uint32_t ndim, int64_t* index) {
  for (uint32_t i = 0; i < ndim; ++i) index[i] = bounds[2 * i];
}

// The memory is transposed half of the time.
static void fill_block(blocks_t* blocks, uint32_t b, bool transposed) {
  const int64_t* bounds = blocks->bounds[b];
  int64_t stride = sizeof(int32_t);
  for (uint32_t k = 0; k < blocks->ndim; ++k) {
    uint32_t i = transposed ? k : blocks->ndim - 1 - k;
    blocks->strides[b][i] = stride;
    stride *= bounds[2 * i + 1] - bounds[2 * i];
  }
  int64_t index[kMostDims];
  first_index(bounds, blocks->ndim, index);
  do {
    int64_t at = 0;
    for (uint32_t i = 0; i < blocks->ndim; ++i) {
      at += (index[i] - bounds[2 * i]) * blocks->strides[b][i];
    }
    blocks->memory[b][at / (int64_t)sizeof(int32_t)] = number_at(blocks, index);
  } while (step_index(bounds, blocks->ndim, index));
  blocks->host[b] = (jpp_host_block_t){
      .data = blocks->memory[b], .bounds = bounds, .byte_strides = blocks->strides[b]};
}

// Cuts blocks in two until there are enough.
static void make_blocks(uint64_t* seed, blocks_t* blocks) {
  blocks->ndim = test_random_below(seed, kMostDims + 1);
  for (uint32_t i = 0; i < blocks->ndim; ++i) {
    blocks->dims[i] = 1 + test_random_below(seed, 8);
    blocks->bounds[0][2 * i] = 0;
    blocks->bounds[0][2 * i + 1] = blocks->dims[i];
  }
  blocks->count = 1;
  uint32_t cuts = blocks->ndim ? test_random_below(seed, kMostBlocks) : 0;
  for (uint32_t k = 0; k < cuts; ++k) {
    uint32_t b = test_random_below(seed, blocks->count),
             axis = test_random_below(seed, blocks->ndim);
    int64_t* bounds = blocks->bounds[b];
    int64_t length = bounds[2 * axis + 1] - bounds[2 * axis];
    if (length < 2) continue;
    int64_t middle = bounds[2 * axis] + 1 + test_random_below(seed, (uint32_t)length - 1);
    int64_t* added = blocks->bounds[blocks->count++];
    memcpy(added, bounds, sizeof(blocks->bounds[0]));
    bounds[2 * axis + 1] = added[2 * axis] = middle;
  }
  for (uint32_t b = 0; b < blocks->count; ++b)
    fill_block(blocks, b, test_random_below(seed, 2));
}

static size_t draw_block(uint64_t* seed, const blocks_t* blocks, int64_t* bounds) {
  size_t size = 1;
  for (uint32_t i = 0; i < blocks->ndim; ++i) {
    bounds[2 * i] = test_random_below(seed, (uint32_t)blocks->dims[i]);
    bounds[2 * i + 1] =
        bounds[2 * i] + 1 +
        test_random_below(seed, (uint32_t)(blocks->dims[i] - bounds[2 * i]));
    size *= (size_t)(bounds[2 * i + 1] - bounds[2 * i]);
  }
  return size;
}

static void expect_numbers(const blocks_t* blocks, const int64_t* bounds,
                           const int32_t* found) {
  int64_t index[kMostDims];
  first_index(bounds, blocks->ndim, index);
  do {
    assert_int_equal(*found++, number_at(blocks, index));
  } while (step_index(bounds, blocks->ndim, index));
}

static jpp_wanted_t wanted_of(const blocks_t* blocks, const uint32_t* ranks,
                              uint32_t num_ranks, uint32_t devices,
                              const int64_t* bounds) {
  return (jpp_wanted_t){.struct_size = sizeof(jpp_wanted_t),
                        .name = "argument x",
                        .dtype = JPP_DTYPE_S32,
                        .ndim = blocks->ndim,
                        .num_ranks = num_ranks,
                        .ranks = ranks,
                        .devices_per_rank = devices,
                        .blocks = bounds};
}

static void test_random_blocks(void** state) {
  (void)state;
  uint64_t seed = 24;
  for (int round = 0; round < kRounds; ++round) {
    blocks_t blocks;
    int64_t bounds[kMostDims * 2];
    int32_t found[kMostElements];
    make_blocks(&seed, &blocks);
    size_t size = draw_block(&seed, &blocks, bounds) * sizeof(*found);
    const jpp_wanted_t wanted = wanted_of(&blocks, NULL, 0, 1, bounds);
    ASSERT_OK(jpp_argument_gather(&wanted, 0, blocks.host, blocks.count, found, size));
    expect_numbers(&blocks, bounds, found);
  }
}

static void test_a_missing_block(void** state) {
  (void)state;
  const int64_t strides[] = {24, 4};
  const int32_t memory[12] = {0};
  const jpp_host_block_t top = {.data = memory, .bounds = kTop, .byte_strides = strides};
  blocks_t blocks = {.ndim = 2};
  const jpp_wanted_t wanted = wanted_of(&blocks, NULL, 0, 1, kWhole);
  int32_t found[24];
  ASSERT_FAILS(jpp_argument_gather(&wanted, 0, &top, 1, found, sizeof(found)),
               JPP_MESH_ERROR,
               "argument x: expected this process to hold the part that its ranks need, "
               "[0:4, 0:6], found 12 of its 24 elements");
}

static jpp_status_t* read_random(void* user, uint32_t block,
                                 jpp_host_block_t* out_block) {
  *out_block = ((blocks_t*)user)->host[block];
  return NULL;
}

// Each device of each rank gets its block, assembled or in place.
static void test_uploads(void** state) {
  (void)state;
  jpp_client_t* client = NULL;
  const jpp_fake_options_t options = {.struct_size = sizeof(options), .device_count = 4};
  ASSERT_OK(jpp_client_create_fake(&options, &client));
  uint64_t seed = 25;
  const uint32_t ranks[] = {0, 2, 5}, devices[6 * 2] = {0, 1, [10] = 2, [11] = 3};
  const bool is_local[] = {true, false, true};
  for (int round = 0; round < 50; ++round) {
    blocks_t blocks;
    int64_t bounds[2][kMostDims * 2], flat[2 * kMostDims * 2];
    int32_t found[kMostElements];
    make_blocks(&seed, &blocks);
    size_t size = draw_block(&seed, &blocks, bounds[0]);
    // The shards have one shape: the second is the first, moved if there is room.
    memcpy(bounds[1], bounds[0], sizeof(bounds[0]));
    for (uint32_t i = 0; i < blocks.ndim; ++i) {
      int64_t room = blocks.dims[i] - bounds[0][2 * i + 1];
      bounds[1][2 * i] += room;
      bounds[1][2 * i + 1] += room;
    }
    for (uint32_t d = 0; d < 2; ++d) {
      memcpy(flat + (size_t)d * blocks.ndim * 2, bounds[d],
             blocks.ndim * 2 * sizeof(int64_t));
    }
    jpp_wanted_t wanted = wanted_of(&blocks, ranks, 3, 2, flat);
    wanted.is_local = is_local;
    jpp_given_block_t given_blocks[kMostBlocks];
    for (uint32_t b = 0; b < blocks.count; ++b) {
      given_blocks[b] = (jpp_given_block_t){
          .rank = JPP_ANY_RANK, .is_local = true, .bounds = blocks.bounds[b]};
    }
    const jpp_given_t given = {.struct_size = sizeof(given),
                               .home = JPP_HOME_HOST,
                               .dtype = JPP_DTYPE_S32,
                               .ndim = blocks.ndim,
                               .num_blocks = blocks.count,
                               .blocks = given_blocks};
    const jpp_source_t source = {.struct_size = sizeof(source),
                                 .given = &given,
                                 .user = &blocks,
                                 .read = read_random};
    jpp_array_t* array = NULL;
    ASSERT_OK(jpp_argument_take(&wanted, &source, client, devices, 6 * 2, &array));
    assert_int_equal(jpp_array_layout(array)->num_ranks, 2);
    for (uint32_t k = 0; k < 4; ++k) {
      ASSERT_OK(jpp_array_read(array, k / 2 ? 5 : 0, k % 2, found, size * sizeof(*found),
                               NULL));
      expect_numbers(&blocks, bounds[k % 2], found);
    }
    jpp_array_release(array);
  }
  jpp_client_destroy(client);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_given_array),
      cmocka_unit_test(test_each_given_array_is_taken),
      cmocka_unit_test(test_what_a_source_lacks),
      cmocka_unit_test(test_parts),
      cmocka_unit_test(test_blocks_that_no_array_has),
      cmocka_unit_test(test_random_blocks),
      cmocka_unit_test(test_a_missing_block),
      cmocka_unit_test(test_uploads),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
