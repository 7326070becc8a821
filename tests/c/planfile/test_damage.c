// Damaged files: cut files, flipped bits, other kinds of file and newer formats are
// errors, and so are wrong contents with the right checksum.
#include <stdlib.h>

#include "plan_util.h"
#include "planfile/format.h"
#include "planfile_util.h"
#include "test_util.h"

static planned_t g_planned;
static unsigned char* g_bytes;
static size_t g_size;

static int make_file(void** state) {
  (void)state;
  ASSERT_OK(plan_file("mlp2", NULL, &g_planned));
  made_contents_t made = contents_of(g_planned.made, 2);
  g_bytes = contents_bytes(&made.contents, &g_size);
  contents_free(&made);
  return 0;
}

static int drop_file(void** state) {
  (void)state;
  free(g_bytes);
  plan_free(&g_planned);
  return 0;
}

// Copies the bytes to an allocation of their size, so that the sanitizer detects reads
// past it.
static unsigned char* copy_of(size_t size) {
  unsigned char* bytes = malloc(size ? size : 1);
  memcpy(bytes, g_bytes, size);
  return bytes;
}

static jpp_status_t* try_read(const unsigned char* bytes, size_t size) {
  jpp_planfile_t* file = (jpp_planfile_t*)&g_planned;  // the call sets it to NULL
  jpp_status_t* status = jpp_planfile_read("it", bytes, size, &file);
  assert_int_equal(status != NULL, file == NULL);
  jpp_planfile_destroy(file);
  return status;
}

static void test_every_cut_is_seen(void** state) {
  (void)state;
  for (size_t size = 0; size < g_size; ++size) {
    unsigned char* bytes = copy_of(size);
    const char* message = size ? "damaged or cut off: expected " : "an empty one";
    ASSERT_FAILS(try_read(bytes, size), JPP_PARSE_ERROR, message);
    free(bytes);
  }
}

static void test_bytes_behind_the_end_are_seen(void** state) {
  (void)state;
  unsigned char* bytes = calloc(1, g_size + 1);
  memcpy(bytes, g_bytes, g_size);
  ASSERT_FAILS(try_read(bytes, g_size + 1), JPP_PARSE_ERROR, "damaged or cut off");
  seal_bytes(bytes, g_size + 1);
  ASSERT_FAILS(try_read(bytes, g_size + 1), JPP_PARSE_ERROR, "no bytes behind the plan");
  free(bytes);
}

static void test_every_flipped_bit_is_seen(void** state) {
  (void)state;
  unsigned char* bytes = copy_of(g_size);
  for (size_t bit = 0; bit < 8 * g_size; ++bit) {
    bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
    jpp_status_t* status = try_read(bytes, g_size);
    if (!status) fail_msg("bit %zu of byte %zu is not seen", bit % 8, bit / 8);
    jpp_status_free(status);
    bytes[bit / 8] ^= (unsigned char)(1 << bit % 8);
  }
  ASSERT_OK(try_read(bytes, g_size));
  free(bytes);
}

static void test_other_kinds_of_files(void** state) {
  (void)state;
  static const char* const kTexts[] = {"graph \"mlp\" ranks 2\n", "{}",
                                       "\x7f"
                                       "ELF",
                                       "jaxpp plan\n"};
  for (size_t i = 0; i < sizeof(kTexts) / sizeof(*kTexts); ++i) {
    ASSERT_FAILS(try_read((const unsigned char*)kTexts[i], strlen(kTexts[i])),
                 JPP_PARSE_ERROR, "expected a file that begins with \"jaxpp plan file\"");
  }
}

static void test_newer_forms(void** state) {
  (void)state;
  unsigned char* bytes = copy_of(g_size);
  jpp__planfile_put(bytes + JPP_PLANFILE_FORMAT_AT, 4, JPP_PLANFILE_FORMAT + 1);
  memcpy(bytes + JPP_PLANFILE_MAKER_AT, "jaxpp 99.0\0\xff", 12);
  ASSERT_FAILS(try_read(bytes, g_size), JPP_UNSUPPORTED,
               "format 2, written by jaxpp 99.0; expected at most format 1, the newest "
               "that jaxpp ");
  free(bytes);
}

// --- With the right checksum ----------------------------------------------------------

// Returns the file with the first `from` of the header replaced by `to`, which has the
// same length.
static void change_header(const char* from, const char* to, jpp_status_code_t code,
                          const char* message) {
  unsigned char* bytes = copy_of(g_size);
  char* at = memmem(bytes, g_size, from, strlen(from));
  assert_int_equal(strlen(from), strlen(to));
  assert_non_null(at);
  memcpy(at, to, strlen(to));
  seal_bytes(bytes, g_size);
  ASSERT_FAILS(try_read(bytes, g_size), code, message);
  free(bytes);
}

static void test_headers_that_say_something_else(void** state) {
  (void)state;
  change_header("{\"name\"", "[\"name\"", JPP_PARSE_ERROR, "it:1: ");
  change_header("\"ranks\":2", "\"ranks\":3", JPP_PARSE_ERROR, "device_ids");
  change_header("\"ranks\":2", "\"ranks\":9", JPP_PARSE_ERROR, "device_ids");
  change_header("\"sizes\":[2,2]", "\"sizes\":[2,3]", JPP_PARSE_ERROR,
                "axes of the mesh of rank 1: expected sizes whose product is 2");
  change_header("\"sizes\":[2,2]", "\"sizes\":[ 2 ]", JPP_PARSE_ERROR,
                "a size of each on each rank");
  change_header("\"devices_per_rank\":2", "\"devices_per_rank\":1", JPP_PARSE_ERROR,
                "device_ids");
  change_header("\"1f1b\",\"microbatches\":4", "\"1\",\"microbatches\":9999",
                JPP_PARSE_ERROR,
                "microbatches: expected no more than the schedule's rows have");
  change_header("\"microbatches\":4", "\"microbatches\":3", JPP_SCHEDULE_ERROR, "");
  change_header("\"stage_rank\":[0,1]", "\"stage_rank\":[0,7]", JPP_PARSE_ERROR,
                "stage_rank: expected numbers of ranks");
  change_header("\"schedules\"", "\"schedulez\"", JPP_PARSE_ERROR,
                "schedules: expected a list");
  change_header("\"platform\"", "\"platforn\"", JPP_PARSE_ERROR,
                "platform: expected a text");
  change_header("\"layouts\":true", "\"layouts\":1   ", JPP_PARSE_ERROR, "");
  change_header("\"task_modules\":[0,", "\"task_modules\":[9,", JPP_PARSE_ERROR,
                "expected one of the");
  change_header("\"task_modules\":[0,", "\"task_modules\":[0 ", JPP_PARSE_ERROR,
                "it:1: ");
  change_header("\"shard_dims\":[null,", "\"shard_dimz\":[null,", JPP_PARSE_ERROR,
                "shard_dims: expected a list");
  change_header("\"shard_dims\":[null,", "\"shard_dims\":[true,", JPP_PARSE_ERROR,
                "shard_dims: expected a number for each dimension of a task's results");
}

// The plan of another planner for the same graph.
static void test_another_plan_is_not_run(void** state) {
  (void)state;
  unsigned char* bytes = copy_of(g_size);
  static const char kKey[] = "\"program\":\"";
  char* hash = memmem(bytes, g_size, kKey, strlen(kKey));
  assert_non_null(hash);
  hash[strlen(kKey)] = hash[strlen(kKey)] == '0' ? '1' : '0';
  seal_bytes(bytes, g_size);
  ASSERT_FAILS(try_read(bytes, g_size), JPP_UNSUPPORTED,
               "plans it differently than jaxpp ");
  ASSERT_FAILS(try_read(bytes, g_size), JPP_UNSUPPORTED, "their program differs");
  free(bytes);
}

// A file with other planning inputs is an error; other modules, names and the like are
// not.
static void test_random_changes_are_read_or_refused(void** state) {
  (void)state;
  unsigned char* bytes = copy_of(g_size);
  uint64_t random = 1;
  for (int i = 0; i < 20000; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    size_t at = JPP_PLANFILE_HEADER_SIZE_AT +
                (size_t)(random >> 33) % (g_size - JPP_PLANFILE_HEADER_SIZE_AT);
    unsigned char before = bytes[at];
    bytes[at] = (unsigned char)(random >> 20);
    seal_bytes(bytes, g_size);
    jpp_status_free(try_read(bytes, g_size));
    bytes[at] = before;
  }
  free(bytes);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_cut_is_seen),
      cmocka_unit_test(test_bytes_behind_the_end_are_seen),
      cmocka_unit_test(test_every_flipped_bit_is_seen),
      cmocka_unit_test(test_other_kinds_of_files),
      cmocka_unit_test(test_newer_forms),
      cmocka_unit_test(test_headers_that_say_something_else),
      cmocka_unit_test(test_another_plan_is_not_run),
      cmocka_unit_test(test_random_changes_are_read_or_refused),
  };
  return cmocka_run_group_tests_name("planfile_damage", tests, make_file, drop_file);
}
