// Reads and writes protocol buffers, field by field (protobuf.dev, "Encoding").
#ifndef JPP_BASE_PROTOBUF_H_
#define JPP_BASE_PROTOBUF_H_

#include "base/str.h"
#include "base/vec.h"

// --- Reading --------------------------------------------------------------------------

// A message, a string or packed numbers, in the caller's memory.
typedef struct jpp_protobuf {
  const uint8_t* at;
  const uint8_t* end;
} jpp_protobuf_t;

typedef struct jpp_protobuf_field {
  uint32_t number;
  uint64_t value;         // of a varint
  jpp_protobuf_t inside;  // for a string, a message or packed numbers; else empty
} jpp_protobuf_field_t;

// Reads the number at the front and moves past it. Returns false if the bytes end first.
bool jpp__protobuf_read_varint(jpp_protobuf_t* bytes, uint64_t* out_value);

// Reads the field at the front and moves past it. Returns false at the end of the message
// and if the field cannot be read.
bool jpp__protobuf_read_field(jpp_protobuf_t* message, jpp_protobuf_field_t* out_field);

// Appends the numbers of a repeated field, which may be packed.
jpp_status_t* jpp__protobuf_read_numbers(const jpp_protobuf_field_t* field,
                                         jpp_u64_vec_t* numbers) JPP_MUST_USE;

bool jpp__protobuf_is_text(jpp_protobuf_t bytes, const char* text);

// --- Writing --------------------------------------------------------------------------

void jpp__protobuf_put_number(jpp_str_t* out, uint32_t field, uint64_t value);
void jpp__protobuf_put_text(jpp_str_t* out, uint32_t field, const char* text);

// Appends `message` as a field of the enclosing message, and empties it.
void jpp__protobuf_put_message(jpp_str_t* out, uint32_t field, jpp_str_t* message);

#endif  // JPP_BASE_PROTOBUF_H_
