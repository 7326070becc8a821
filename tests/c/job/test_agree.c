// The first difference between the steps of two processes.
#include <stdio.h>
#include <string.h>

#include "jaxpp/job.h"
#include "test_util.h"

#define STEP "process 0 and process 3 do not run the same step: "
#define EXPECTED "; expected the same script, versions and arguments in all"

typedef struct row {
  jpp_status_t* (*compare)(uint32_t process, const char* mine, uint32_t other,
                           const char* theirs);
  const char *mine, *theirs;
  const char* error;  // NULL if the texts describe equal steps
} row_t;

static const row_t kRows[] = {
    {jpp_job_compare_facts, "", "", NULL},
    {jpp_job_compare_facts, "a\t1\nb\t2\n", "a\t1\nb\t2\n", NULL},
    {jpp_job_compare_facts, "a\t1\nb\t2", "a\t1\nb\t2\n", NULL},  // no final newline
    {jpp_job_compare_facts, "a\t1\nb\t2\n", "a\t1\nb\t3\n",
     "the b is 2 in process 0 and 3 in process 3"},
    {jpp_job_compare_facts, "a\t1\nb\t2\n", "a\t7\nb\t3\n",
     "the a is 1 in process 0 and 7 in process 3"},
    {jpp_job_compare_facts, "a\t1\nb\t2\n", "a\t1\n",
     "the b is 2 in process 0 and missing in process 3"},
    {jpp_job_compare_facts, "a\t1\n", "a\t1\nb\t2\n",
     "the b is missing in process 0 and 2 in process 3"},
    {jpp_job_compare_facts, "b\t1\n", "c\t1\n",
     "the b is 1 in process 0 and missing in process 3"},
    {jpp_job_compare_facts, "a\t\n", "a\t1\n",
     "the a is  in process 0 and 1 in process 3"},
    {jpp_job_compare_programs, "", "", NULL},
    {jpp_job_compare_programs, "f.py:1\tadd\n", "g.py:7\tadd\n", NULL},
    {jpp_job_compare_programs, "f.py:1\tadd\n", "g.py:7\tmul\n",
     "at f.py:1, process 0 has `add`, and process 3 has `mul`"},
    {jpp_job_compare_programs, "\tadd\n", "g.py:7\tmul\n",
     "at g.py:7, process 0 has `add`, and process 3 has `mul`"},
    {jpp_job_compare_programs, "\tc:f32[] = add = x 1\n", "\tc:f32[] = add = x 2\n",
     "process 0 has `x 1`, and process 3 has `x 2`"},
    {jpp_job_compare_programs, "\tadd\nf.py:2\tmul\n", "\tadd\n",
     "at f.py:2, process 0 has `mul`, and process 3 has `the end of the step`"},
    {jpp_job_compare_programs, "", "add",
     "process 0 has `the end of the step`, and process 3 has `add`"},
};

static void test_first_difference(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof(kRows) / sizeof(*kRows); ++i) {
    const row_t* row = &kRows[i];
    jpp_status_t* status = row->compare(0, row->mine, 3, row->theirs);
    if (!row->error) {
      ASSERT_OK(status);
      continue;
    }
    char expected[512];
    snprintf(expected, sizeof(expected), STEP "%s" EXPECTED, row->error);
    assert_int_equal(jpp_status_code(status), JPP_MESH_ERROR);
    assert_string_equal(jpp_status_message(status), expected);
    jpp_status_free(status);
  }
}

enum { kMostLines = 12, kMostText = kMostLines * 16 };

// Writes lines that contain their own number, except for the line `different`.
static void write_lines(char* text, uint32_t count, uint32_t different) {
  *text = '\0';
  for (uint32_t i = 0; i < count; ++i) {
    text += sprintf(text, "n%u\t%s%u\n", i, i == different ? "x" : "", i);
  }
}

// The first difference is reported for all lengths of both texts and any differing line.
static void test_every_pair_of_lengths(void** state) {
  (void)state;
  for (uint32_t mine = 0; mine < kMostLines; ++mine) {
    for (uint32_t theirs = 0; theirs < kMostLines; ++theirs) {
      for (uint32_t different = 0; different < kMostLines; ++different) {
        char here[kMostText], there[kMostText], name[32];
        write_lines(here, mine, different);
        write_lines(there, theirs, UINT32_MAX);
        uint32_t shorter = mine < theirs ? mine : theirs;
        uint32_t first = different < shorter ? different : shorter;
        jpp_status_t* status = jpp_job_compare_facts(0, here, 3, there);
        assert_int_equal(status != NULL, mine != theirs || different < mine);
        snprintf(name, sizeof(name), ": the n%u is ", first);
        if (status) assert_non_null(strstr(jpp_status_message(status), name));
        jpp_status_free(status);
      }
    }
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_first_difference),
      cmocka_unit_test(test_every_pair_of_lengths),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
