// Writes the log: each message is made in a buffer and written by one call, so that lines
// of several threads do not mix.
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "jaxpp/option.h"

_Atomic int jpp_log_most = JPP_LOG_LEVEL_COUNT;

enum { kLongestLine = 1024 };  // longer ones are cut

static const char* const kLevelNames[] = {"off", "error", "warning", "info", "debug"};
_Static_assert(sizeof(kLevelNames) / sizeof(*kLevelNames) == JPP_LOG_LEVEL_COUNT,
               "a level has no name");

// JPP_LOG_LEVEL_COUNT for what is no level.
static int parse_level(const char* text) {
  int level = 0;
  while (level < JPP_LOG_LEVEL_COUNT && strcmp(text, kLevelNames[level]) != 0) ++level;
  return level;
}

void jpp_log_read_level(void) {
  const char* text = jpp_option_get(JPP_OPTION_LOG);
  int level = text ? parse_level(text) : JPP_LOG_OFF;
  bool known = level != JPP_LOG_LEVEL_COUNT;
  int unread = JPP_LOG_LEVEL_COUNT;
  // Of several threads that read it at once, only one warns.
  bool first =
      atomic_compare_exchange_strong(&jpp_log_most, &unread, known ? level : JPP_LOG_OFF);
  if (first && !known) {
    fprintf(stderr,
            "jaxpp: warning: JPP_LOG=%s: expected error, warning, info, debug or off; "
            "nothing is logged\n",
            text);
  }
}

// "plan/plan.c" of whatever path the compiler was given.
static const char* short_path(const char* file) {
  const char* found = strstr(file, "src/");
  return found ? found + strlen("src/") : file;
}

// "2026-01-31 12:00:00.123456 info plan/plan.c:81: "; how long it is.
static size_t append_head(char* line, jpp_log_level_t level, const char* file,
                          int number) {
  struct timespec now;
  struct tm parts;
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &parts);
  size_t length = strftime(line, kLongestLine, "%Y-%m-%d %H:%M:%S", &parts);
  int more = snprintf(line + length, kLongestLine - length,
                      ".%06ld %s %s:%d: ", now.tv_nsec / 1000, kLevelNames[level],
                      short_path(file), number);
  return length + (size_t)(more < 0 ? 0 : more);
}

void jpp_log_write(jpp_log_level_t level, const char* file, int line, const char* format,
                   ...) {
  char text[kLongestLine + 1];
  size_t length = append_head(text, level, file, line);
  if (length > kLongestLine / 2) length = kLongestLine / 2;  // the path of a file
  va_list args;
  va_start(args, format);
  int more = vsnprintf(text + length, kLongestLine - length, format, args);
  va_end(args);
  length += (size_t)(more < 0 ? 0 : more);
  if (length >= kLongestLine) length = kLongestLine - 1;
  for (size_t i = 0; i < length; ++i) {
    if (text[i] == '\n') text[i] = ' ';
  }
  text[length++] = '\n';
  fwrite(text, 1, length, stderr);
}
