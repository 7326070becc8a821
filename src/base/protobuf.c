// The wire format of protocol buffers.
#include "base/protobuf.h"

#include <string.h>

enum { kVarint = 0, kFixed64 = 1, kLengthDelimited = 2, kFixed32 = 5 };

// --- Reading --------------------------------------------------------------------------

bool jpp__protobuf_read_varint(jpp_protobuf_t* bytes, uint64_t* out_value) {
  *out_value = 0;
  for (unsigned shift = 0; shift < 64 && bytes->at < bytes->end; shift += 7) {
    uint8_t byte = *bytes->at++;
    *out_value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

static bool skip(jpp_protobuf_t* bytes, uint64_t count) {
  if (count > (uint64_t)(bytes->end - bytes->at)) return false;
  bytes->at += count;
  return true;
}

bool jpp__protobuf_read_field(jpp_protobuf_t* message, jpp_protobuf_field_t* out_field) {
  uint64_t tag = 0, size = 0;
  if (!jpp__protobuf_read_varint(message, &tag)) return false;
  *out_field = (jpp_protobuf_field_t){.number = (uint32_t)(tag >> 3)};
  switch (tag & 7) {
    case kVarint:
      return jpp__protobuf_read_varint(message, &out_field->value);
    case kFixed64:
      return skip(message, 8);
    case kLengthDelimited:
      if (!jpp__protobuf_read_varint(message, &size)) return false;
      out_field->inside.at = message->at;
      if (!skip(message, size)) return false;
      out_field->inside.end = message->at;
      return true;
    case kFixed32:
      return skip(message, 4);
    default:
      return false;
  }
}

jpp_status_t* jpp__protobuf_read_numbers(const jpp_protobuf_field_t* field,
                                         jpp_u64_vec_t* numbers) {
  if (!field->inside.at) return JPP_VEC_PUSH(numbers, field->value);
  jpp_protobuf_t inside = field->inside;
  for (uint64_t value = 0; jpp__protobuf_read_varint(&inside, &value);) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(numbers, value));
  }
  return NULL;
}

bool jpp__protobuf_is_text(jpp_protobuf_t bytes, const char* text) {
  size_t size = strlen(text);
  return (size_t)(bytes.end - bytes.at) == size && !memcmp(bytes.at, text, size);
}

// --- Writing --------------------------------------------------------------------------

static void put_varint(jpp_str_t* out, uint64_t value) {
  char bytes[10];
  size_t count = 0;
  do {
    bytes[count++] = (char)((value & 0x7f) | (value > 0x7f ? 0x80 : 0));
    value >>= 7;
  } while (value);
  jpp_str_append_n(out, bytes, count);
}

static void put_bytes(jpp_str_t* out, uint32_t field, const char* bytes, size_t size) {
  put_varint(out, field << 3 | kLengthDelimited);
  put_varint(out, size);
  jpp_str_append_n(out, bytes, size);
}

void jpp__protobuf_put_number(jpp_str_t* out, uint32_t field, uint64_t value) {
  put_varint(out, field << 3 | kVarint);
  put_varint(out, value);
}

void jpp__protobuf_put_text(jpp_str_t* out, uint32_t field, const char* text) {
  put_bytes(out, field, text, strlen(text));
}

void jpp__protobuf_put_message(jpp_str_t* out, uint32_t field, jpp_str_t* message) {
  put_bytes(out, field, message->data ? message->data : "", message->length);
  if (message->error && !out->error) {
    out->error = message->error;
    message->error = NULL;
  }
  jpp_str_deinit(message);
}
