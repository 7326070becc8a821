// Reads text files whole.
#include "jaxpp/file.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/null.h"
#include "base/str.h"

// Larger than any schedule, graph or trace, and smaller than memory.
enum { kMostBytes = 1 << 30 };

// Stops at kMostBytes or when memory runs out, because a device such as /dev/zero never
// ends.
static jpp_status_t* read_stream(FILE* stream, jpp_str_t* text) {
  char chunk[1 << 16];
  size_t got = 0;
  errno = 0;
  while (!text->error && (got = fread(chunk, 1, sizeof(chunk), stream)) > 0) {
    jpp_str_append_n(text, chunk, got);
    if (text->length <= kMostBytes) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "more than %d bytes; expected a schedule, graph or trace",
                           kMostBytes);
  }
  if (!ferror(stream)) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "%s", strerror(errno));
}

static jpp_status_t* read_named(const char* file, jpp_str_t* text) {
  if (!strcmp(file, "-")) return read_stream(stdin, text);
  FILE* stream = fopen(file, "r");
  if (!stream) return jpp_status_make(JPP_INVALID_ARGUMENT, "%s", strerror(errno));
  jpp_status_t* status = read_stream(stream, text);
  fclose(stream);
  return status;
}

// Some editors begin a file with a byte order mark, U+FEFF.
static void skip_byte_order_mark(char* text, size_t* length) {
  if (*length < 3 || memcmp(text, "\xef\xbb\xbf", 3) != 0) return;
  *length -= 3;
  memmove(text, text + 3, *length + 1);
}

jpp_status_t* jpp_file_read(const char* file, char** out_text, size_t* out_length) {
  JPP_RETURN_IF_NULL(file, out_text, out_length);
  *out_text = NULL;
  *out_length = 0;
  jpp_str_t text = {0};
  jpp_status_t* status = read_named(file, &text);
  size_t length = text.length;
  if (!status) status = jpp_str_finish(&text, out_text);
  jpp_str_deinit(&text);
  if (status) return jpp_status_annotate(status, "%s", file);
  skip_byte_order_mark(*out_text, &length);
  *out_length = length;
  return NULL;
}
