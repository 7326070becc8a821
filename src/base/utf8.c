// Validates UTF-8 by the table of the Unicode Standard, and escapes text for
// XML. A byte that is not part of a character becomes U+FFFD, so that any name or file
// path gives valid output.
#include "base/utf8.h"

#include <string.h>

static const char kReplacement[] = "\xef\xbf\xbd";  // U+FFFD

// The well-formed sequences of The Unicode Standard, table 3-7: the first byte determines
// how many follow and which values the second may have.
static size_t sequence_length(unsigned char first, unsigned char* out_low,
                              unsigned char* out_high) {
  *out_low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
  *out_high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
  if (first < 0x80) return 1;
  if (first < 0xc2) return 0;
  if (first < 0xe0) return 2;
  if (first < 0xf0) return 3;
  return first < 0xf5 ? 4 : 0;
}

size_t jpp__utf8_character(const char* text, size_t length) {
  const unsigned char* bytes = (const unsigned char*)text;
  unsigned char low, high;
  if (!length) return 0;
  size_t size = sequence_length(bytes[0], &low, &high);
  if (size > length) return 0;
  for (size_t i = 1; i < size; ++i) {
    if (bytes[i] < low || bytes[i] > high) return 0;
    low = 0x80;
    high = 0xbf;
  }
  return size;
}

bool jpp__utf8_is_valid(const char* text, size_t length) {
  for (size_t at = 0, size; at < length; at += size) {
    size = jpp__utf8_character(text + at, length - at);
    if (!size) return false;
  }
  return true;
}

// The escaped form of a character; NULL: unchanged.
typedef const char* (*escape_t)(char c);

static void append_escaped(jpp_str_t* str, const char* text, size_t length,
                           escape_t escape) {
  size_t plain = 0;  // start of the part before `at` that has not been appended
  for (size_t at = 0; at < length;) {
    size_t size = jpp__utf8_character(text + at, length - at);
    const char* other = size ? escape(text[at]) : kReplacement;
    if (other) {
      jpp_str_append_n(str, text + plain, at - plain);
      jpp_str_append(str, other);
      plain = at + 1;
    }
    at += size ? size : 1;
  }
  jpp_str_append_n(str, text + plain, length - plain);
}

static const char* escape_nothing(char c) {
  (void)c;
  return NULL;
}

static const char* escape_xml(char c) {
  switch (c) {
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '&':
      return "&amp;";
    case '"':
      return "&quot;";
    default:
      return (unsigned char)c < 0x20 && !strchr("\t\n\r", c) ? kReplacement : NULL;
  }
}

void jpp_str_append_utf8(jpp_str_t* str, const char* text, size_t length) {
  append_escaped(str, text, length, escape_nothing);
}

void jpp__str_append_xml(jpp_str_t* str, const char* text) {
  append_escaped(str, text, strlen(text), escape_xml);
}
