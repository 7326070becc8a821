// Texts that leave the library: names and files may hold any bytes, but JSON, SVG and
// Python accept only UTF-8.
#ifndef JPP_BASE_UTF8_H_
#define JPP_BASE_UTF8_H_

#include "base/str.h"

// The length in bytes of the character at the beginning of a text, 1 to 4; 0 for an
// invalid sequence (overlong, a surrogate, beyond U+10FFFF, truncated).
size_t jpp__utf8_character(const char* text, size_t length);
bool jpp__utf8_is_valid(const char* text, size_t length);

// jpp_str_append_utf8() for XML: an attribute or an element's text. Characters that XML
// cannot represent become U+FFFD as well.
void jpp__str_append_xml(jpp_str_t* str, const char* text);

#endif  // JPP_BASE_UTF8_H_
