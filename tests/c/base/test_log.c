// The log's levels, and the table of options that names them.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/log.h"
#include "golden.h"
#include "jaxpp/option.h"

static uint32_t g_evaluated;

static uint32_t count_evaluation(void) { return ++g_evaluated; }

// Logs one message of each level under JPP_LOG=value and returns what was written to
// standard error. |2| The caller frees it.
static char* log_under(const char* value) {
  char path[] = "/tmp/jaxpp-test-log-XXXXXX";
  int file = mkstemp(path), kept = dup(STDERR_FILENO);
  assert_true(file >= 0 && kept >= 0);
  fflush(stderr);
  dup2(file, STDERR_FILENO);
  setenv("JPP_LOG", value, 1);
  g_evaluated = 0;
  atomic_store(&jpp_log_most, JPP_LOG_LEVEL_COUNT);
  for (int level = JPP_LOG_ERROR; level < JPP_LOG_LEVEL_COUNT; ++level) {
    JPP_LOG((jpp_log_level_t)level, "message %u of\nlevel %d", count_evaluation(), level);
  }
  fflush(stderr);
  dup2(kept, STDERR_FILENO);
  close(kept);
  close(file);
  char* text = golden_read(path);
  unlink(path);
  unsetenv("JPP_LOG");
  atomic_store(&jpp_log_most, JPP_LOG_LEVEL_COUNT);
  assert_non_null(text);
  return text;
}

typedef struct taken {
  uint32_t count;
  jpp_log_level_t level;
  char source[64], text[64];
} taken_t;

static void take_message(void* user, jpp_log_level_t level, const char* source,
                         const char* text) {
  taken_t* taken = user;
  ++taken->count;
  taken->level = level;
  snprintf(taken->source, sizeof(taken->source), "%s", source);
  snprintf(taken->text, sizeof(taken->text), "%s", text);
}

// A callback gets the messages instead of standard error, until it is replaced.
static void test_a_callback_takes_the_messages(void** state) {
  (void)state;
  taken_t taken = {0};
  jpp_log_set_callback(JPP_LOG_WARNING, take_message, &taken);
  JPP_LOG(JPP_LOG_INFO, "not taken");
  JPP_LOG(JPP_LOG_WARNING, "one\nof %d", 2);
  int line = __LINE__ - 1;
  jpp_log_set_callback(JPP_LOG_OFF, NULL, NULL);
  JPP_LOG(JPP_LOG_ERROR, "nor this one, since JPP_LOG is not set");
  assert_int_equal(taken.count, 1);
  assert_int_equal(taken.level, JPP_LOG_WARNING);
  assert_string_equal(taken.text, "one of 2");
  char expected[64];
  snprintf(expected, sizeof(expected), "test_log.c:%d", line);
  assert_non_null(strstr(taken.source, expected));
}

static uint32_t count_lines(const char* text) {
  uint32_t lines = 0;
  for (; *text; ++text) lines += *text == '\n';
  return lines;
}

// A level that is off neither prints nor evaluates its arguments.
static void test_a_level_writes_itself_and_what_is_worse(void** state) {
  (void)state;
  static const char* const kLevels[] = {"off", "error", "warning", "info", "debug"};
  for (uint32_t most = 0; most < 5; ++most) {
    char* text = log_under(kLevels[most]);
    assert_int_equal(count_lines(text), most);
    assert_int_equal(g_evaluated, most);
    const char* at = text;
    for (uint32_t level = 1; level <= most; ++level) {
      char expected[64];
      snprintf(expected, sizeof(expected), ": message %u of level %u\n", level, level);
      assert_int_equal(strspn(at, "0123456789-: ."),
                       strlen("2026-01-31 12:00:00.123456 "));
      at += strcspn(at, "abcdefghijklmnopqrstuvwxyz");
      assert_int_equal(strncmp(at, kLevels[level], strlen(kLevels[level])), 0);
      assert_non_null(strstr(at, "base/test_log.c:"));
      assert_non_null(strstr(at, expected));
      at += strcspn(at, "\n") + 1;
    }
    free(text);
  }
  char* text = log_under("");
  assert_string_equal(text, "");
  free(text);
}

static void test_a_bad_level_is_one_warning(void** state) {
  (void)state;
  char* text = log_under("loud");
  assert_string_equal(
      text,
      "jaxpp: warning: JPP_LOG=loud: expected error, warning, info, debug "
      "or off; nothing is logged\n");
  assert_int_equal(g_evaluated, 0);
  free(text);
}

static void test_options_are_found_by_name(void** state) {
  (void)state;
  for (int i = 0; i < JPP_OPTION_COUNT; ++i) {
    const jpp_option_info_t* info = jpp_option_info((jpp_option_t)i);
    assert_int_equal(jpp_option_find(info->name), i);
    assert_true(*info->values && *info->default_value && strlen(info->help) > 10);
  }
  assert_int_equal(jpp_option_find("JPP_NOTHING"), JPP_OPTION_COUNT);
  setenv("JPP_DUMP", "", 1);
  assert_null(jpp_option_get(JPP_OPTION_DUMP));
  setenv("JPP_DUMP", "/tmp", 1);
  assert_string_equal(jpp_option_get(JPP_OPTION_DUMP), "/tmp");
  unsetenv("JPP_DUMP");
}

static void assert_alike(const char* name, const char* option) {
  char *text = NULL, expected[128];
  setenv(name, "1", 1);
  ASSERT_OK(jpp_options_misspelt(&text));
  unsetenv(name);
  if (!option) {
    assert_null(text);
    return;
  }
  snprintf(expected, sizeof(expected), "the environment has %s (is %s meant?), which",
           name, option);
  assert_non_null(strstr(text, expected));
  jpp_free(text);
}

static void test_misspelt_options_are_named(void** state) {
  (void)state;
  assert_alike("JPP_LOGG", "JPP_LOG");
  assert_alike("JPP_PUGLIN", "JPP_PLUGIN");
  assert_alike("JPP_PLUGINS", "JPP_PLUGIN");
  assert_alike("JPP_RESTRAT", "JPP_RESTART");
  assert_alike("JPP_DUMP", NULL);
  assert_alike("JPP_SOMETHING_ELSE", NULL);
  assert_alike("JPP_A_NAME_THAT_IS_LONGER_THAN_ANY_OPTION", NULL);
}

static void test_options_of_another_implementation_are_named(void** state) {
  (void)state;
  char* text = NULL;
  setenv("JAXPP_ENABLE_LICM", "1", 1);
  ASSERT_OK(jpp_options_misspelt(&text));
  unsetenv("JAXPP_ENABLE_LICM");
  assert_non_null(strstr(
      text, "the environment has JAXPP_ENABLE_LICM (of another implementation), "));
  jpp_free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_callback_takes_the_messages),
      cmocka_unit_test(test_a_level_writes_itself_and_what_is_worse),
      cmocka_unit_test(test_a_bad_level_is_one_warning),
      cmocka_unit_test(test_options_are_found_by_name),
      cmocka_unit_test(test_misspelt_options_are_named),
      cmocka_unit_test(test_options_of_another_implementation_are_named),
  };
  return cmocka_run_group_tests_name("log", tests, NULL, NULL);
}
