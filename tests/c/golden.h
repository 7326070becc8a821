// Golden files: the text that a test prints must match its file in tests/golden/.
// JPP_UPDATE_GOLDEN=1 rewrites the files; read the diff before committing it.
#ifndef TESTS_C_GOLDEN_H_
#define TESTS_C_GOLDEN_H_

#include <stdio.h>
#include <stdlib.h>

#include "test_util.h"

static inline void golden_write(const char* path, const char* text) {
  FILE* file = fopen(path, "w");
  if (!file) fail_msg("cannot write %s", path);
  fputs(text, file);
  fclose(file);
}

// Returns the file's text, which the caller frees; NULL when it cannot be read.
static inline char* golden_read(const char* path) {
  FILE* file = fopen(path, "r");
  if (!file) return NULL;
  fseek(file, 0, SEEK_END);
  long size = ftell(file);
  rewind(file);
  char* text = calloc(1, (size_t)size + 1);
  size_t got = fread(text, 1, (size_t)size, file);
  fclose(file);
  text[got] = 0;
  return text;
}

static inline int golden_line_length(const char* text) {
  return (int)strcspn(text, "\n");
}

// Fails at the first line that differs.
static inline void golden_compare(const char* path, const char* expected,
                                  const char* found) {
  for (int line = 1;; ++line) {
    int a = golden_line_length(expected), b = golden_line_length(found);
    if (a != b || strncmp(expected, found, (size_t)a) || !expected[a] != !found[b]) {
      fail_msg("%s:%d\n  golden: %.*s\n  found:  %.*s\n(JPP_UPDATE_GOLDEN=1 rewrites it)",
               path, line, a, expected, b, found);
    }
    if (!expected[a]) return;
    expected += a + 1;
    found += b + 1;
  }
}

// `name` is relative to tests/golden.
static inline void assert_golden(const char* name, const char* text) {
  char path[1024];
  snprintf(path, sizeof(path), "%s/%s", GOLDEN_DIR, name);
  if (test_variable("JPP_UPDATE_GOLDEN")) golden_write(path, text);
  char* expected = golden_read(path);
  if (!expected) fail_msg("no golden file %s (JPP_UPDATE_GOLDEN=1 makes it)", path);
  golden_compare(path, expected, text);
  free(expected);
}

#endif  // TESTS_C_GOLDEN_H_
