// Parses programs in the text format that fake/device.h describes.
#include "fake/device/program.h"

#include <stdlib.h>
#include <string.h>

#include "base/vec.h"

#define FAKE_MAX_ARGS 4096

typedef struct fake_parser {
  char* at;  // rest of the current line; parsing puts a NUL behind each token
  uint32_t line;
  uint32_t highest_arg_count;
  fake_program_t* program;
  JPP_VEC(fake_result_t) results;
} fake_parser_t;

static const struct {
  const char* name;
  fake_op_t op;
  uint32_t args_min;
  uint32_t args_max;
} kOps[] = {
    {"sum", FAKE_SUM, 1, FAKE_MAX_ARGS},
    {"mul", FAKE_MUL, 1, FAKE_MAX_ARGS},
    {"copy", FAKE_COPY, 1, 1},
    {"scale", FAKE_SCALE, 1, 1},
    {"hash", FAKE_HASH, 0, FAKE_MAX_ARGS},
    {"all_sum", FAKE_ALL_SUM, 1, 1},
    {"all_hash", FAKE_ALL_HASH, 0, FAKE_MAX_ARGS},
};

size_t fake_shape_elements(const fake_shape_t* shape) {
  size_t elements = 1;
  for (uint32_t i = 0; i < shape->rank; ++i) elements *= (size_t)shape->dims[i];
  return elements;
}

size_t fake_shape_bytes(const fake_shape_t* shape) {
  return fake_shape_elements(shape) * (jpp_dtype_bits(shape->dtype) / 8);
}

static jpp_status_t* parse_error(const fake_parser_t* parser, const char* expected,
                                 const char* found) {
  return jpp_status_make(JPP_PARSE_ERROR, "fake program:%u: expected %s, found '%s'",
                         parser->line, expected, found ? found : "end of line");
}

// Returns NULL at the end of the line.
static char* parse_token(fake_parser_t* parser) {
  char* token = parser->at + strspn(parser->at, " \t\r");
  if (*token == 0 || *token == '#') return NULL;
  char* end = token + strcspn(token, " \t\r");
  parser->at = *end ? end + 1 : end;
  *end = 0;
  return token;
}

static jpp_status_t* parse_u32(fake_parser_t* parser, const char* token, uint32_t limit,
                               uint32_t* out_value) {
  char* end = NULL;
  unsigned long value = token ? strtoul(token, &end, 10) : 0;
  if (!token || *end || end == token || value >= limit) {
    return parse_error(parser, "an index", token);
  }
  *out_value = (uint32_t)value;
  return NULL;
}

// Parses numbers up to the end of the line.
static jpp_status_t* parse_list(fake_parser_t* parser, uint32_t limit,
                                const uint32_t** out_list, uint32_t* out_count) {
  jpp_u32_vec_t list = {0};
  jpp_status_t* status = NULL;
  char* token = parse_token(parser);
  for (; token && !status; token = parse_token(parser)) {
    uint32_t value = 0;
    status = parse_u32(parser, token, limit, &value);
    if (!status) status = JPP_VEC_PUSH(&list, value);
  }
  if (!status) status = JPP_VEC_TO_ARENA(&list, &parser->program->arena, out_list);
  *out_count = (uint32_t)list.count;
  jpp_vec_deinit(&list);
  return status;
}

// "f32[4,2]"
static jpp_status_t* parse_shape(fake_parser_t* parser, const char* token,
                                 fake_shape_t* out_shape) {
  fake_shape_t shape = {.dtype = JPP_DTYPE_F32};
  const char* at = token + 4;
  if (strncmp(token, "f32[", 4) != 0) return parse_error(parser, "f32[dims]", token);
  while (*at != ']') {
    char* end = NULL;
    long long dim = strtoll(at, &end, 10);
    bool separated = end != at && (*end == ',' || *end == ']');
    if (!separated || dim < 0 || shape.rank == JPP_BUFFER_MAX_RANK) {
      return parse_error(parser, "f32[dims]", token);
    }
    shape.dims[shape.rank++] = dim;
    at = *end == ',' ? end + 1 : end;
  }
  if (at[1]) return parse_error(parser, "f32[dims]", token);
  *out_shape = shape;
  return NULL;
}

static jpp_status_t* parse_op(fake_parser_t* parser, fake_result_t* result) {
  const char* token = parse_token(parser);
  size_t row = 0;
  size_t row_count = sizeof(kOps) / sizeof(kOps[0]);
  while (row < row_count && (!token || strcmp(token, kOps[row].name) != 0)) ++row;
  if (row == row_count) {
    return parse_error(parser, "sum, mul, copy, scale, hash, all_sum or all_hash", token);
  }
  result->op = kOps[row].op;
  parser->program->is_collective |= fake_op_is_collective(result->op);
  if (result->op == FAKE_SCALE) {
    uint32_t arg = 0;
    JPP_RETURN_IF_ERROR(parse_u32(parser, parse_token(parser), FAKE_MAX_ARGS, &arg));
    const char* factor = parse_token(parser);
    char* end = NULL;
    result->factor = factor ? strtof(factor, &end) : 0;
    if (!factor || *end) return parse_error(parser, "a factor", factor);
    result->arg_count = 1;
    return jpp__arena_copy(&parser->program->arena, &arg, sizeof(arg),
                           (void**)&result->args);
  }
  JPP_RETURN_IF_ERROR(
      parse_list(parser, FAKE_MAX_ARGS, &result->args, &result->arg_count));
  if (result->arg_count < kOps[row].args_min || result->arg_count > kOps[row].args_max) {
    return parse_error(parser, "another number of arguments", kOps[row].name);
  }
  return NULL;
}

static jpp_status_t* parse_result(fake_parser_t* parser, const char* first) {
  fake_result_t result = {0};
  JPP_RETURN_IF_ERROR(parse_shape(parser, first, &result.shape));
  const char* equals = parse_token(parser);
  if (!equals || strcmp(equals, "=") != 0) return parse_error(parser, "'='", equals);
  JPP_RETURN_IF_ERROR(parse_op(parser, &result));
  for (uint32_t i = 0; i < result.arg_count; ++i) {
    if (result.args[i] < parser->highest_arg_count) continue;
    parser->highest_arg_count = result.args[i] + 1;
  }
  return JPP_VEC_PUSH(&parser->results, result);
}

static jpp_status_t* parse_line(fake_parser_t* parser) {
  fake_program_t* program = parser->program;
  const char* first = parse_token(parser);
  if (!first) return NULL;
  if (strcmp(first, "args") == 0) {
    return parse_u32(parser, parse_token(parser), FAKE_MAX_ARGS, &program->arg_count);
  }
  if (strcmp(first, "devices") == 0) {
    return parse_list(parser, UINT32_MAX, &program->devices, &program->device_count);
  }
  if (strcmp(first, "donate") == 0) {
    return parse_list(parser, FAKE_MAX_ARGS, &program->donate, &program->donate_count);
  }
  return parse_result(parser, first);
}

static jpp_status_t* parse_finish(fake_parser_t* parser) {
  fake_program_t* program = parser->program;
  for (uint32_t i = 0; i < program->donate_count; ++i) {
    if (program->donate[i] < parser->highest_arg_count) continue;
    parser->highest_arg_count = program->donate[i] + 1;
  }
  if (program->arg_count < parser->highest_arg_count) {
    if (program->arg_count) return parse_error(parser, "fewer arguments used", "args");
    program->arg_count = parser->highest_arg_count;
  }
  program->result_count = (uint32_t)parser->results.count;
  return JPP_VEC_TO_ARENA(&parser->results, &program->arena, &program->results);
}

static jpp_status_t* parse_text(fake_parser_t* parser, char* text) {
  while (text) {
    char* end = strchr(text, '\n');
    if (end) *end = 0;
    parser->at = text;
    ++parser->line;
    JPP_RETURN_IF_ERROR(parse_line(parser));
    text = end ? end + 1 : NULL;
  }
  return parse_finish(parser);
}

jpp_status_t* fake_program_create(const char* text, size_t size,
                                  fake_program_t** out_program) {
  *out_program = NULL;
  fake_program_t* program = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*program), (void**)&program));
  jpp__arena_init(&program->arena);
  fake_parser_t parser = {.program = program};
  const char* copy = NULL;
  jpp_status_t* status = jpp__arena_strndup(&program->arena, text, size, &copy);
  if (!status) status = parse_text(&parser, (char*)copy);
  jpp_vec_deinit(&parser.results);
  if (status) {
    fake_program_destroy(program);
    return status;
  }
  *out_program = program;
  return NULL;
}

void fake_program_destroy(fake_program_t* program) {
  if (!program) return;
  jpp__arena_deinit(&program->arena);
  jpp_free(program);
}
