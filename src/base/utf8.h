// Texts that leave the library: names and files may hold any bytes, but JSON, SVG and
// Python accept only UTF-8.
#ifndef JPP_BASE_UTF8_H_
#define JPP_BASE_UTF8_H_

#include "base/str.h"

// How many bytes the character at the beginning of a text takes, 1 to 4; 0 when they are
// none (no shortest form, a surrogate, beyond U+10FFFF, cut off).
size_t jpp__utf8_character(const char* text, size_t length);
bool jpp__utf8_is_valid(const char* text, size_t length);

// jpp_str_append_utf8() for XML: an attribute or an element's text. Characters that XML
// has no way to write become U+FFFD as well.
void jpp__str_append_xml(jpp_str_t* str, const char* text);

#endif  // JPP_BASE_UTF8_H_
