// Tests of src/base: status, memory, containers, text, option structs and their sizes,
// versions.
#include <stdio.h>

#include "base/arena.h"
#include "base/finite.h"
#include "base/protobuf.h"
#include "base/struct_size.h"
#include "base/utf8.h"
#include "base/vec.h"
#include "jaxpp/dtype.h"
#include "jaxpp/memory.h"
#include "jaxpp/version.h"
#include "test_util.h"

static jpp_status_t* fails(void) {
  JPP_RETURN_IF_ERROR_IN(jpp_status_make(JPP_SCHEDULE_ERROR, "task %d", 3), "rank %d", 1);
  return NULL;
}

static void test_status_carries_code_and_context(void** state) {
  (void)state;
  ASSERT_FAILS(fails(), JPP_SCHEDULE_ERROR, "rank 1: task 3");
  assert_string_equal(jpp_status_message(NULL), "ok");
  assert_null(jpp_status_annotate(NULL, "nothing"));
}

static void test_status_codes_have_distinct_names(void** state) {
  (void)state;
  for (int i = 0; i < JPP_STATUS_CODE_COUNT; ++i) {
    for (int j = 0; j < i; ++j) {
      assert_string_not_equal(jpp_status_code_name((jpp_status_code_t)i),
                              jpp_status_code_name((jpp_status_code_t)j));
    }
  }
}

// Special values of a type, as the bits of one part of an element: a NaN with the sign
// bit set, the largest number, and infinity (for types without one, the largest number).
typedef struct odd_bits {
  jpp_dtype_t dtype;
  uint64_t nan, largest, infinity;
} odd_bits_t;

static void expect_found(const odd_bits_t* odd, size_t parts) {
  unsigned char data[4 * 2 * 8] = {0};
  size_t width = jpp_dtype_bits(odd->dtype) / 8, part = width / parts;
  const uint64_t bits[3] = {odd->largest, odd->nan, odd->infinity};
  for (size_t i = 0; i < 3; ++i) {
    // In the last part of the element.
    memcpy(data + (i + 2) * width - part, &bits[i], part);
  }
  assert_int_equal(jpp__find_nonfinite(odd->dtype, data, 2, 3), 2);
  assert_int_equal(jpp__find_nonfinite(odd->dtype, data, 4, JPP_FIND_NANS), 2);
  bool has_infinity = odd->infinity != odd->largest;
  assert_int_equal(jpp__find_nonfinite(odd->dtype, data, 4, JPP_FIND_INFS),
                   has_infinity ? 3 : 4);
  assert_int_equal(jpp__find_nonfinite(odd->dtype, data, 4, 0), 4);
}

static void test_what_is_no_number_is_found_in_every_type(void** state) {
  (void)state;
  static const odd_bits_t kOdd[] = {
      {JPP_DTYPE_F8E3M4, 0xf1, 0x6f, 0xf0},
      {JPP_DTYPE_F8E4M3, 0xf9, 0x77, 0xf8},
      {JPP_DTYPE_F8E4M3FN, 0xff, 0x7e, 0x7e},
      {JPP_DTYPE_F8E4M3FNUZ, 0x80, 0x7f, 0x7f},
      {JPP_DTYPE_F8E4M3B11FNUZ, 0x80, 0xff, 0xff},
      {JPP_DTYPE_F8E5M2, 0xfd, 0x7b, 0xfc},
      {JPP_DTYPE_F8E5M2FNUZ, 0x80, 0x7f, 0x7f},
      {JPP_DTYPE_F8E8M0FNU, 0xff, 0xfe, 0xfe},
      {JPP_DTYPE_BF16, 0xffc0, 0x7f7f, 0xff80},
      {JPP_DTYPE_F16, 0xfe00, 0x7bff, 0xfc00},
      {JPP_DTYPE_F32, 0xff800001, 0x7f7fffff, 0xff800000},
      {JPP_DTYPE_F64, 0xfff8000000000000, 0x7fefffffffffffff, 0xfff0000000000000},
      {JPP_DTYPE_C64, 0xff800001, 0x7f7fffff, 0xff800000},
      {JPP_DTYPE_C128, 0xfff8000000000000, 0x7fefffffffffffff, 0xfff0000000000000},
  };
  size_t floating = 0;
  for (size_t i = 0; i < sizeof(kOdd) / sizeof(kOdd[0]); ++i) {
    bool complex = kOdd[i].dtype == JPP_DTYPE_C64 || kOdd[i].dtype == JPP_DTYPE_C128;
    expect_found(&kOdd[i], complex ? 2 : 1);
  }
  for (int i = 0; i < JPP_DTYPE_COUNT; ++i) {
    floating += jpp__dtype_is_floating((jpp_dtype_t)i);
  }
  assert_int_equal(floating, sizeof(kOdd) / sizeof(kOdd[0]));
  int32_t whole = -1;
  assert_int_equal(jpp__find_nonfinite(JPP_DTYPE_S32, &whole, 1, 3), 1);
}

static void test_alloc_fails_once_where_told(void** state) {
  (void)state;
  void* memory = NULL;
  jpp__alloc_fail_after(1);
  ASSERT_OK(jpp_alloc(8, &memory));
  jpp_free(memory);
  ASSERT_FAILS(jpp_alloc(8, &memory), JPP_OUT_OF_MEMORY, "8 bytes");
  assert_null(memory);
  ASSERT_OK(jpp_alloc(8, &memory));
  jpp_free(memory);
}

static void test_arena_memory_is_zeroed_aligned_and_apart(void** state) {
  (void)state;
  jpp_arena_t arena;
  jpp__arena_init(&arena);
  unsigned char* previous = NULL;
  for (size_t size = 1; size < 9000; size = size * 3 + 1) {
    unsigned char* memory = NULL;
    ASSERT_OK(jpp__arena_alloc(&arena, size, (void**)&memory));
    assert_int_equal((uintptr_t)memory % 16, 0);
    for (size_t i = 0; i < size; ++i) assert_int_equal(memory[i], 0);
    memset(memory, 0xff, size);
    assert_ptr_not_equal(memory, previous);
    previous = memory;
  }
  jpp__arena_deinit(&arena);
}

static void test_vec_grows_and_keeps_its_elements(void** state) {
  (void)state;
  jpp_u32_vec_t ids = {0};
  for (uint32_t i = 0; i < 1000; ++i) ASSERT_OK(JPP_VEC_PUSH(&ids, i * 2));
  assert_int_equal(ids.count, 1000);
  for (uint32_t i = 0; i < 1000; ++i) assert_int_equal(ids.data[i], i * 2);
  jpp_vec_deinit(&ids);
}

static void test_str_quotes_and_reports_lost_memory(void** state) {
  (void)state;
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "%d ", 7);
  jpp__str_append_quoted(&str, "a\"b\n\x01");
  char* text = NULL;
  ASSERT_OK(jpp_str_finish(&str, &text));
  assert_string_equal(text, "7 \"a\\\"b\\n\\x01\"");
  jpp_free(text);
  jpp__alloc_fail_after(0);
  jpp_str_append(&str, "lost");
  jpp_str_append(&str, "too");
  ASSERT_FAILS(jpp_str_finish(&str, &text), JPP_OUT_OF_MEMORY, "host memory");
  assert_null(text);
}

static void test_memory_names_round_trip(void** state) {
  (void)state;
  for (int i = 0; i < JPP_MEMORY_COUNT; ++i) {
    const char* name = jpp_memory_name((jpp_memory_t)i);
    assert_int_equal(jpp_memory_parse(name, (uint32_t)strlen(name)), i);
  }
  assert_int_equal(jpp_memory_parse("unpinned_host", 13), JPP_MEMORY_COUNT);
  assert_int_equal(jpp_memory_parse("pinned_host ", 12), JPP_MEMORY_COUNT);
  assert_null(jpp_memory_name(JPP_MEMORY_COUNT));
}

static void test_dtype_names_round_trip(void** state) {
  (void)state;
  for (int i = 1; i < JPP_DTYPE_COUNT; ++i) {
    const char* name = jpp_dtype_name((jpp_dtype_t)i);
    assert_int_equal(jpp_dtype_parse(name, (uint32_t)strlen(name)), i);
    assert_int_not_equal(jpp_dtype_bits((jpp_dtype_t)i), 0);
  }
  assert_int_equal(jpp_dtype_parse("bfloat16", 8), JPP_DTYPE_BF16);
  assert_int_equal(jpp_dtype_parse("f33", 3), JPP_DTYPE_INVALID);
}

static void test_small_types_are_packed_on_a_device(void** state) {
  (void)state;
  assert_int_equal(jpp_dtype_device_bytes(JPP_DTYPE_U2, 5), 2);
  assert_int_equal(jpp_dtype_device_bytes(JPP_DTYPE_S4, 5), 3);
  assert_int_equal(jpp_dtype_device_bytes(JPP_DTYPE_F4E2M1FN, 4), 2);
  assert_int_equal(jpp_dtype_device_bytes(JPP_DTYPE_BOOL, 5), 5);
  assert_int_equal(jpp_dtype_device_bytes(JPP_DTYPE_C128, 5), 80);
}

// Limits a number of bytes that was computed in 128 bits to JPP_MOST_BYTES.
static uint64_t capped(unsigned __int128 bytes) {
  return bytes < JPP_MOST_BYTES ? (uint64_t)bytes : JPP_MOST_BYTES;
}

static void test_bytes_stay_at_the_largest_number(void** state) {
  (void)state;
  uint64_t numbers[3 * 64], random = 1;
  for (uint32_t i = 0; i < 64; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    numbers[3 * i] = (1ull << i) - 1;
    numbers[3 * i + 1] = 1ull << i;
    numbers[3 * i + 2] = random >> i;
  }
  for (uint32_t i = 0; i < 3 * 64; ++i) {
    for (uint32_t j = 0; j < 3 * 64; ++j) {
      unsigned __int128 a = numbers[i], b = numbers[j];
      assert_int_equal(jpp__bytes_add(numbers[i], numbers[j]), capped(a + b));
      assert_int_equal(jpp__bytes_multiply(numbers[i], numbers[j]), capped(a * b));
    }
    assert_int_equal(jpp__bytes_fit(numbers[i]), numbers[i] < JPP_MOST_BYTES);
  }
}

// Tries every text of up to three bytes: it is UTF-8 if its code points encode to the
// same bytes.
static bool is_utf8_of(const unsigned char* bytes, size_t length) {
  static const uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  uint32_t code = 0;
  size_t size = 0;
  for (; size < length && (size == 0 || (bytes[size] & 0xc0) == 0x80); ++size) {
    code = size ? code << 6 | (bytes[size] & 0x3f) : bytes[0];
  }
  if (size != length) return false;
  static const uint32_t kHeads[] = {0, 0, 0xc0 << 6, 0xe0 << 12, 0xf0u << 18};
  code -= kHeads[length];
  if (length == 1) return code < 0x80;
  bool surrogate = code >= 0xd800 && code < 0xe000;
  uint32_t limit = length == 2 ? 0x800 : length == 3 ? 0x10000 : 0x110000;
  return code >= kLeast[length] && code < limit && !surrogate;
}

static void test_utf8_is_told_from_other_bytes(void** state) {
  (void)state;
  for (uint32_t bits = 0; bits < 1u << 24; bits += bits % 251 == 0 ? 1 : 7) {
    const unsigned char bytes[] = {bits >> 16 & 0xff, bits >> 8 & 0xff, bits & 0xff,
                                   0x80 | (bits * 31 & 0x3f)};
    for (size_t length = 1; length <= 4; ++length) {
      bool whole = jpp__utf8_character((const char*)bytes, length) == length;
      if (whole != is_utf8_of(bytes, length)) {
        fail_msg("%02x %02x %02x %02x, %zu bytes", bytes[0], bytes[1], bytes[2], bytes[3],
                 length);
      }
    }
  }
}

static void assert_finishes_as(jpp_str_t str, const char* expected) {
  char* out = NULL;
  ASSERT_OK(jpp_str_finish(&str, &out));
  assert_string_equal(out, expected);
  assert_true(jpp__utf8_is_valid(out, strlen(out)));
  jpp_free(out);
}

static void test_texts_that_leave_are_utf8(void** state) {
  (void)state;
  const char* text = "a\"\\\n\x01<&>\xc3\xa9\xff\xc3";
  jpp_str_t plain = {0}, xml = {0};
  jpp_str_append_utf8(&plain, text, strlen(text));
  assert_finishes_as(plain, "a\"\\\n\x01<&>\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd");
  jpp__str_append_xml(&xml, text);
  assert_finishes_as(
      xml, "a&quot;\\\n\xef\xbf\xbd&lt;&amp;&gt;\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd");
}

// Three versions of an option struct; each adds a field.
typedef struct options_v1 {
  size_t struct_size;
  uint32_t width;
} options_v1_t;

typedef struct options_v2 {
  size_t struct_size;
  uint32_t width;
  uint64_t height;
} options_v2_t;

typedef struct options_v3 {
  size_t struct_size;
  uint32_t width;
  uint64_t height, depth;
} options_v3_t;

static jpp_status_t* read_as_v2(const void* given, options_v2_t* out) {
  return JPP_OPTIONS_COPY(options_v2_t, width, given, out);
}

static void test_options_of_other_versions_are_read(void** state) {
  (void)state;
  options_v1_t older = {.struct_size = sizeof(older), .width = 3};
  options_v3_t newer = {.struct_size = sizeof(newer), .width = 4, .height = 5};
  options_v2_t found = {.height = 9};
  ASSERT_OK(read_as_v2(&older, &found));
  assert_int_equal(found.struct_size, sizeof(found));
  assert_int_equal(found.width, 3);
  assert_int_equal(found.height, 0);
  ASSERT_OK(read_as_v2(&newer, &found));
  assert_int_equal(found.struct_size, sizeof(found));
  assert_int_equal(found.width, 4);
  assert_int_equal(found.height, 5);
  newer.depth = 6;
  ASSERT_FAILS(read_as_v2(&newer, &found), JPP_INVALID_ARGUMENT,
               "options_v2_t: expected zeros after the 24 bytes that this version of the "
               "library knows, found 6 at byte 24 of 32");
  older.struct_size = sizeof(size_t) + 3;
  ASSERT_FAILS(read_as_v2(&older, &found), JPP_INVALID_ARGUMENT,
               "options_v2_t: expected a struct_size of at least 12 and at most 4096 "
               "bytes, found 11; set it to sizeof(options_v2_t)");
  ASSERT_FAILS(read_as_v2(NULL, &found), JPP_INVALID_ARGUMENT, "found NULL");
}

static void test_elements_of_a_list_are_as_far_apart_as_their_size_says(void** state) {
  (void)state;
  options_v1_t older[] = {{.struct_size = sizeof(*older), .width = 3},
                          {.struct_size = sizeof(*older), .width = 4}};
  options_v3_t newer[] = {{.struct_size = sizeof(*newer), .width = 5},
                          {.struct_size = sizeof(*newer), .width = 6, .height = 7}};
  options_v2_t found;
  const void* list = older;
  ASSERT_OK(JPP_OPTIONS_COPY_AT(options_v2_t, width, list, 1, &found));
  assert_int_equal(found.width, 4);
  assert_int_equal(found.height, 0);
  list = newer;
  ASSERT_OK(JPP_OPTIONS_COPY_AT(options_v2_t, width, list, 1, &found));
  assert_int_equal(found.width, 6);
  assert_int_equal(found.height, 7);
  newer[1].struct_size = 0;
  ASSERT_FAILS(JPP_OPTIONS_COPY_AT(options_v2_t, width, list, 1, &found),
               JPP_INVALID_ARGUMENT,
               "options_v2_t: expected a struct_size of 32 in element 1 of a list, as in "
               "the first one, found 0; set it to sizeof(options_v2_t)");
  newer[0].struct_size = 0;
  ASSERT_FAILS(JPP_OPTIONS_COPY_AT(options_v2_t, width, list, 1, &found),
               JPP_INVALID_ARGUMENT, "expected a struct_size of at least 12");
}

static void test_protocol_buffers_round_trip(void** state) {
  (void)state;
  static const uint64_t kValues[] = {0, 1, 127, 128, 300, 1ULL << 35, UINT64_MAX};
  enum { kCount = sizeof(kValues) / sizeof(*kValues) };
  jpp_str_t inner = {0}, empty = {0}, whole = {0};
  for (uint32_t i = 0; i < kCount; ++i) {
    jpp__protobuf_put_number(&inner, 1000 + i, kValues[i]);
  }
  jpp__protobuf_put_text(&whole, 1, "text");
  jpp__protobuf_put_message(&whole, 2, &inner);
  jpp__protobuf_put_message(&whole, 3, &empty);
  assert_null(inner.data);
  const uint8_t* bytes = (const uint8_t*)whole.data;
  jpp_protobuf_t at = {bytes, bytes + whole.length};
  jpp_protobuf_field_t text, message, nothing, field;
  assert_true(jpp__protobuf_read_field(&at, &text));
  assert_true(text.number == 1 && jpp__protobuf_is_text(text.inside, "text"));
  assert_false(jpp__protobuf_is_text(text.inside, "texts"));
  assert_true(jpp__protobuf_read_field(&at, &message) && message.number == 2);
  for (uint32_t i = 0; i < kCount; ++i) {
    assert_true(jpp__protobuf_read_field(&message.inside, &field));
    assert_true(field.number == 1000 + i && field.value == kValues[i]);
  }
  assert_false(jpp__protobuf_read_field(&message.inside, &field));
  assert_true(jpp__protobuf_read_field(&at, &nothing) && nothing.number == 3);
  assert_true(nothing.inside.at == nothing.inside.end);
  assert_false(jpp__protobuf_read_field(&at, &field));
  assert_ptr_equal(at.at, at.end);
  for (size_t size = 1; size < whole.length; ++size) {  // cut off
    jpp_protobuf_t part = {bytes, bytes + size};
    while (jpp__protobuf_read_field(&part, &field)) assert_true(part.at <= part.end);
  }
  jpp_str_deinit(&whole);
}

static void test_versions_are_ordered_numbers(void** state) {
  (void)state;
  char text[32];
  snprintf(text, sizeof(text), "%d.%d.%d", JPP_VERSION_MAJOR, JPP_VERSION_MINOR,
           JPP_VERSION_PATCH);
  assert_string_equal(jpp_version(), text);
  assert_int_equal(jpp_version_number(), JPP_VERSION_NUMBER);
  assert_true(JPP_MAKE_VERSION(0, 1, 999) < JPP_MAKE_VERSION(0, 2, 0));
  assert_true(JPP_MAKE_VERSION(0, 999, 999) < JPP_MAKE_VERSION(1, 0, 0));
  assert_true(JPP_CHECK_VERSION(JPP_VERSION_MAJOR, JPP_VERSION_MINOR, JPP_VERSION_PATCH));
  assert_false(
      JPP_CHECK_VERSION(JPP_VERSION_MAJOR, JPP_VERSION_MINOR, JPP_VERSION_PATCH + 1));
  assert_false(JPP_CHECK_VERSION(JPP_VERSION_MAJOR + 1, 0, 0));
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_status_carries_code_and_context),
      cmocka_unit_test(test_status_codes_have_distinct_names),
      cmocka_unit_test(test_what_is_no_number_is_found_in_every_type),
      cmocka_unit_test(test_alloc_fails_once_where_told),
      cmocka_unit_test(test_arena_memory_is_zeroed_aligned_and_apart),
      cmocka_unit_test(test_vec_grows_and_keeps_its_elements),
      cmocka_unit_test(test_str_quotes_and_reports_lost_memory),
      cmocka_unit_test(test_memory_names_round_trip),
      cmocka_unit_test(test_dtype_names_round_trip),
      cmocka_unit_test(test_small_types_are_packed_on_a_device),
      cmocka_unit_test(test_utf8_is_told_from_other_bytes),
      cmocka_unit_test(test_texts_that_leave_are_utf8),
      cmocka_unit_test(test_bytes_stay_at_the_largest_number),
      cmocka_unit_test(test_options_of_other_versions_are_read),
      cmocka_unit_test(test_elements_of_a_list_are_as_far_apart_as_their_size_says),
      cmocka_unit_test(test_protocol_buffers_round_trip),
      cmocka_unit_test(test_versions_are_ordered_numbers),
  };
  return cmocka_run_group_tests_name("base", tests, NULL, NULL);
}
