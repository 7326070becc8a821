// Writes the log to standard error, or passes it to the program's callback. Each message
// is formatted in a buffer and written with one call, so that lines of several threads do
// not mix.
#include "base/log.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "jaxpp/option.h"

_Atomic int jpp_log_most = JPP_LOG_LEVEL_COUNT;

enum { kLongestLine = 1024 };  // length of a message; longer ones are cut

static const char* const kLevelNames[] = {"off", "error", "warning", "info", "debug"};
_Static_assert(sizeof(kLevelNames) / sizeof(*kLevelNames) == JPP_LOG_LEVEL_COUNT,
               "a level has no name");

// Held for reading while the callback runs, for writing while it is replaced.
static pthread_rwlock_t g_lock = PTHREAD_RWLOCK_INITIALIZER;
static jpp_log_callback_t g_callback;  // NULL: standard error
static void* g_user;

// JPP_LOG_LEVEL_COUNT for a text that is not a level.
static int parse_level(const char* text) {
  int level = 0;
  while (level < JPP_LOG_LEVEL_COUNT && strcmp(text, kLevelNames[level]) != 0) ++level;
  return level;
}

void jpp__log_read_level(void) {
  const char* text = jpp_option_get(JPP_OPTION_LOG);
  int level = text ? parse_level(text) : JPP_LOG_OFF;
  bool known = level != JPP_LOG_LEVEL_COUNT;
  int unread = JPP_LOG_LEVEL_COUNT;
  // If several threads read it at once, only one warns.
  bool first =
      atomic_compare_exchange_strong(&jpp_log_most, &unread, known ? level : JPP_LOG_OFF);
  if (first && !known) {
    fprintf(stderr,
            "jaxpp: warning: JPP_LOG=%s: expected error, warning, info, debug or off; "
            "nothing is logged\n",
            text);
  }
}

// "plan/plan.c" from any path that the compiler received.
static const char* short_path(const char* file) {
  const char* found = strstr(file, "src/");
  return found ? found + strlen("src/") : file;
}

// Writes "2026-01-31 12:00:00.123456 info plan/plan.c:81: TEXT" with one call.
static void write_line(jpp_log_level_t level, const char* source, const char* text) {
  char line[2 * kLongestLine], stamp[32];
  struct timespec now;
  struct tm parts;
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &parts);
  strftime(stamp, sizeof(stamp), "%Y-%m-%d %H:%M:%S", &parts);
  int length = snprintf(line, sizeof(line), "%s.%06ld %s %s: %s\n", stamp,
                        now.tv_nsec / 1000, kLevelNames[level], source, text);
  if (length > 0) fwrite(line, 1, (size_t)length, stderr);
}

void jpp__log_write(jpp_log_level_t level, const char* file, int line, const char* format,
                    ...) {
  char source[kLongestLine / 2], text[kLongestLine];
  va_list args;
  va_start(args, format);
  if (vsnprintf(text, sizeof(text), format, args) < 0) *text = 0;
  va_end(args);
  for (char* at = text; *at; ++at) {
    if (*at == '\n') *at = ' ';
  }
  snprintf(source, sizeof(source), "%s:%d", short_path(file), line);
  pthread_rwlock_rdlock(&g_lock);
  if (g_callback) {
    g_callback(g_user, level, source, text);
  } else {
    write_line(level, source, text);
  }
  pthread_rwlock_unlock(&g_lock);
}

void jpp_log_set_callback(jpp_log_level_t most, jpp_log_callback_t callback, void* user) {
  pthread_rwlock_wrlock(&g_lock);
  g_callback = callback;
  g_user = user;
  // JPP_LOG_LEVEL_COUNT: the next message reads JPP_LOG.
  atomic_store(&jpp_log_most, callback ? (int)most : JPP_LOG_LEVEL_COUNT);
  pthread_rwlock_unlock(&g_lock);
}
