// Parses the graph's text form by recursive descent and builds the graph through the
// public builder, so that a parsed graph passes the same checks as a built one.
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/null.h"
#include "base/vec.h"
#include "graph/graph_internal.h"
#include "graph/lexer.h"
#include "jaxpp/file.h"

typedef JPP_VEC(jpp_type_t) type_vec_t;

// The parts of one statement or list; reused for each statement.
typedef struct parser {
  jpp_lexer_t lexer;
  jpp_arena_t arena;  // strings and dims until the builder copies them
  jpp_graph_builder_t* builder;
  jpp_map_t names;  // value name -> value id
  JPP_VEC(jpp_token_t) defined;
  type_vec_t types;
  jpp_u32_vec_t inputs;
  JPP_VEC(jpp_loop_result_t) results;
  jpp_u32_vec_t ranks;
  bool in_loop;
  bool sharded;  // the header says so
} parser_t;

static bool at_punct(const parser_t* p, const char* text) {
  return p->lexer.token.kind == JPP_TOKEN_PUNCT && *p->lexer.token.text == *text;
}

static bool at_word(const parser_t* p, const char* text) {
  return jpp__token_is(&p->lexer.token, JPP_TOKEN_WORD, text);
}

static jpp_status_t* expect_punct(parser_t* p, const char* text, const char* what) {
  if (!at_punct(p, text)) return jpp__lexer_expected(&p->lexer, what);
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* parse_string(parser_t* p, const char* what, const char** out_text) {
  *out_text = NULL;
  if (p->lexer.token.kind != JPP_TOKEN_STRING) {
    return jpp__lexer_expected(&p->lexer, what);
  }
  *out_text = p->lexer.token.text;
  return jpp__lexer_next(&p->lexer);
}

// Reads a whole number of few digits, as most numbers are, without strtod(). False: the
// token is another one, or none.
static bool read_digits(const jpp_token_t* token, double* out_number) {
  uint64_t number = 0;
  if (token->length > 15) return false;
  for (uint32_t i = 0; i < token->length; ++i) {
    if (token->text[i] < '0' || token->text[i] > '9') return false;
    number = number * 10 + (uint64_t)(token->text[i] - '0');
  }
  *out_number = (double)number;
  return true;
}

static jpp_status_t* parse_number(parser_t* p, const char* what, double* out_number) {
  *out_number = 0;
  char buffer[40];
  const jpp_token_t* token = &p->lexer.token;
  if (token->kind != JPP_TOKEN_WORD || token->length >= sizeof(buffer)) {
    return jpp__lexer_expected(&p->lexer, what);
  }
  if (read_digits(token, out_number)) return jpp__lexer_next(&p->lexer);
  memcpy(buffer, token->text, token->length);
  buffer[token->length] = 0;
  char* end = NULL;
  *out_number = strtod(buffer, &end);
  if (*end || !(*out_number >= 0)) return jpp__lexer_expected(&p->lexer, what);
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* parse_u32(parser_t* p, const char* what, uint32_t* out_number) {
  *out_number = 0;
  jpp_token_t token = p->lexer.token;
  double number = 0;
  JPP_RETURN_IF_ERROR(parse_number(p, what, &number));
  if (number > 0x7fffffff || number != (double)(uint32_t)number) {
    return jpp__lexer_error(&p->lexer, &token, "number is not a whole one below 2^31");
  }
  *out_number = (uint32_t)number;
  return NULL;
}

static jpp_status_t* parse_dim(parser_t* p, int64_t* out_dim) {
  jpp_token_t token = p->lexer.token;
  double number = 0;
  JPP_RETURN_IF_ERROR(parse_number(p, "a dimension", &number));
  if (number > (double)JPP_MOST_DIM || number != (double)(int64_t)number) {
    return jpp__lexer_error(&p->lexer, &token,
                            "dimension is not a whole number up to 2^53");
  }
  *out_dim = (int64_t)number;
  return NULL;
}

static jpp_status_t* parse_dims(parser_t* p, jpp_type_t* type) {
  int64_t dims[32];
  while (!at_punct(p, "]")) {
    if (type->ndim) {
      JPP_RETURN_IF_ERROR(expect_punct(p, ",", "',' or ']'"));
    }
    if (type->ndim == 32) {
      return jpp__lexer_error(&p->lexer, &p->lexer.token, "more than 32 dimensions");
    }
    JPP_RETURN_IF_ERROR(parse_dim(p, &dims[type->ndim++]));
  }
  JPP_RETURN_IF_ERROR(
      jpp__arena_copy(&p->arena, dims, type->ndim * sizeof(*dims), (void**)&type->dims));
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* check_size(const parser_t* p, const jpp_token_t* token,
                                const jpp_type_t* type) {
  if (jpp__bytes_fit(jpp_type_bytes(type))) return NULL;
  return jpp__lexer_error(&p->lexer, token, "type has more than 2^63 bytes");
}

static jpp_status_t* parse_shards(parser_t* p, jpp_type_t* type) {
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  jpp_token_t token = p->lexer.token;
  JPP_RETURN_IF_ERROR(parse_u32(p, "a number of shards", &type->shards));
  if (jpp__type_divides(type, type->shards)) return NULL;
  return jpp__lexer_error(&p->lexer, &token,
                          "number of shards does not divide the type's elements");
}

static jpp_status_t* parse_memory(parser_t* p, jpp_memory_t* out_memory) {
  const jpp_token_t* token = &p->lexer.token;
  *out_memory = jpp_memory_parse(token->text, token->length);
  if (*out_memory == JPP_MEMORY_COUNT) {
    return jpp__lexer_expected(&p->lexer, "a memory, @device or @pinned_host");
  }
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* parse_type(parser_t* p, jpp_type_t* out_type) {
  *out_type = (jpp_type_t){0};
  jpp_token_t token = p->lexer.token;
  if (token.kind == JPP_TOKEN_WORD) {
    out_type->dtype = jpp_dtype_parse(token.text, token.length);
  }
  if (out_type->dtype == JPP_DTYPE_INVALID) {
    return jpp__lexer_expected(&p->lexer, "a type such as f32[4,8]");
  }
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  JPP_RETURN_IF_ERROR(expect_punct(p, "[", "'[' of a type"));
  JPP_RETURN_IF_ERROR(parse_dims(p, out_type));
  JPP_RETURN_IF_ERROR(check_size(p, &token, out_type));
  if (at_punct(p, "/")) JPP_RETURN_IF_ERROR(parse_shards(p, out_type));
  token = p->lexer.token;
  return token.kind == JPP_TOKEN_MARKER ? parse_memory(p, &out_type->memory) : NULL;
}

static jpp_status_t* take_new_name(parser_t* p, jpp_token_t* out_name) {
  *out_name = p->lexer.token;
  if (out_name->kind != JPP_TOKEN_VALUE) {
    return jpp__lexer_expected(&p->lexer, "a value name such as %3");
  }
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* define_name(parser_t* p, const jpp_token_t* name, uint32_t value) {
  bool added = false;
  JPP_RETURN_IF_ERROR(jpp__map_add(&p->names, name->text, name->length, value, &added));
  if (added) return NULL;
  return jpp__lexer_error(&p->lexer, name, "value is defined twice");
}

static jpp_status_t* parse_use(parser_t* p, uint32_t* out_value) {
  *out_value = JPP_NONE;
  const jpp_token_t* token = &p->lexer.token;
  if (token->kind != JPP_TOKEN_VALUE) {
    return jpp__lexer_expected(&p->lexer, "a value such as %3");
  }
  const uint32_t* found = jpp__map_find(&p->names, token->text, token->length);
  if (!found) {
    return jpp__lexer_error(&p->lexer, token, "value is used before it is defined");
  }
  *out_value = *found;
  return jpp__lexer_next(&p->lexer);
}

// Parses "%3:f32[8], %4:f32[]" into p->defined and p->types.
static jpp_status_t* parse_definition(parser_t* p) {
  jpp_token_t name;
  jpp_type_t type;
  JPP_RETURN_IF_ERROR(take_new_name(p, &name));
  JPP_RETURN_IF_ERROR(expect_punct(p, ":", "':' and a type"));
  JPP_RETURN_IF_ERROR(parse_type(p, &type));
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->defined, name));
  return JPP_VEC_PUSH(&p->types, type);
}

static void clear_statement(parser_t* p) {
  p->defined.count = p->types.count = p->inputs.count = p->results.count = 0;
  p->ranks.count = 0;
}

static jpp_status_t* define_all(parser_t* p, uint32_t first) {
  for (size_t i = 0; i < p->defined.count; ++i) {
    JPP_RETURN_IF_ERROR(define_name(p, &p->defined.data[i], first + (uint32_t)i));
  }
  return NULL;
}

static jpp_status_t* parse_rank_list(parser_t* p) {
  for (;;) {
    uint32_t rank = 0;
    JPP_RETURN_IF_ERROR(parse_u32(p, "a rank", &rank));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->ranks, rank));
    if (!at_punct(p, ",")) return NULL;
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  }
}

static jpp_status_t* parse_name(parser_t* p, const char* what, jpp_op_desc_t* desc) {
  jpp_token_t token = p->lexer.token;
  if (token.kind != JPP_TOKEN_WORD) return jpp__lexer_expected(&p->lexer, what);
  JPP_RETURN_IF_ERROR(
      jpp__arena_strndup(&p->arena, token.text, token.length, &desc->name));
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* parse_op_name(parser_t* p, jpp_op_desc_t* desc) {
  jpp_token_t token = p->lexer.token;
  if (token.kind == JPP_TOKEN_WORD) return parse_name(p, "an op name", desc);
  static const struct {
    jpp_op_kind_t kind;
    bool has_stage;
  } kMarkers[] = {
      {JPP_OP_MARK, true},   {JPP_OP_MARK_BACKWARD, true}, {JPP_OP_ADD, false},
      {JPP_OP_PLACE, false}, {JPP_OP_TASK, false},
  };
  for (size_t i = 0; i < sizeof(kMarkers) / sizeof(*kMarkers); ++i) {
    const char* name = jpp_op_kind_name(kMarkers[i].kind);
    if (!jpp__token_is(&token, JPP_TOKEN_MARKER, name)) continue;
    desc->kind = kMarkers[i].kind;
    desc->name = name;
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    if (kMarkers[i].has_stage) return parse_u32(p, "a stage number", &desc->attr);
    if (desc->kind != JPP_OP_TASK) return NULL;
    JPP_RETURN_IF_ERROR(parse_rank_list(p));
    return parse_name(p, "a task's name", desc);
  }
  return jpp__lexer_expected(&p->lexer,
                             "an op name, @mark, @mark_backward, @add, @place or @task");
}

static jpp_status_t* parse_op_inputs(parser_t* p) {
  JPP_RETURN_IF_ERROR(expect_punct(p, "(", "'(' and the inputs"));
  while (!at_punct(p, ")")) {
    if (p->inputs.count) JPP_RETURN_IF_ERROR(expect_punct(p, ",", "',' or ')'"));
    uint32_t value = JPP_NONE;
    JPP_RETURN_IF_ERROR(parse_use(p, &value));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->inputs, value));
  }
  return jpp__lexer_next(&p->lexer);
}

// Returns 0 if the word is not a flag.
static uint8_t flag_at(const parser_t* p) {
  if (at_word(p, "cheap")) return JPP_OP_CHEAP;
  if (at_word(p, "backward")) return JPP_OP_BACKWARD;
  if (at_word(p, "zeros")) return JPP_OP_ZEROS;
  if (at_word(p, "body")) return JPP_OP_BODY;
  if (at_word(p, "linear")) return JPP_OP_LINEAR;
  return at_word(p, "effect") ? JPP_OP_EFFECT : 0;
}

static jpp_status_t* parse_op_attributes(parser_t* p, jpp_op_desc_t* desc) {
  for (;;) {
    double cost = 0;
    if (flag_at(p)) {
      desc->flags |= flag_at(p);
      JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    } else if (at_word(p, "copies")) {
      desc->flags |= JPP_OP_COPY;
      JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
      JPP_RETURN_IF_ERROR(parse_u32(p, "a row", &desc->attr));
    } else if (at_word(p, "code")) {
      JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
      JPP_RETURN_IF_ERROR(parse_u32(p, "a code", &desc->code));
    } else if (at_word(p, "cost")) {
      JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
      jpp_token_t token = p->lexer.token;
      JPP_RETURN_IF_ERROR(parse_number(p, "a cost", &cost));
      if (cost > 1e28) return jpp__lexer_error(&p->lexer, &token, "cost is over 1e28");
      desc->cost = (float)cost;
    } else if (at_word(p, "at")) {
      JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
      JPP_RETURN_IF_ERROR(parse_string(p, "\"file:line\"", &desc->where));
    } else {
      return NULL;
    }
  }
}

// Parses "%3:f32[8] = name(%1, %2) attributes".
static jpp_status_t* parse_op(parser_t* p) {
  clear_statement(p);
  jpp_op_desc_t desc = {.struct_size = sizeof(desc), .kind = JPP_OP_CALL};
  while (!at_punct(p, "=")) {
    if (p->defined.count) JPP_RETURN_IF_ERROR(expect_punct(p, ",", "',' or '='"));
    JPP_RETURN_IF_ERROR(parse_definition(p));
  }
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  JPP_RETURN_IF_ERROR(parse_op_name(p, &desc));
  JPP_RETURN_IF_ERROR(parse_op_inputs(p));
  JPP_RETURN_IF_ERROR(parse_op_attributes(p, &desc));
  desc.num_inputs = (uint32_t)p->inputs.count;
  desc.inputs = p->inputs.data;
  desc.num_ranks = (uint32_t)p->ranks.count;
  desc.ranks = p->ranks.data;
  desc.num_outputs = (uint32_t)p->types.count;
  desc.outputs = p->types.data;
  uint32_t first = 0;
  JPP_RETURN_IF_ERROR(jpp_graph_builder_add_op(p->builder, &desc, &first));
  return define_all(p, first);
}

static jpp_status_t* parse_loop_attributes(parser_t* p, jpp_loop_desc_t* desc,
                                           jpp_token_t* index) {
  while (!at_punct(p, "{")) {
    jpp_token_t key = p->lexer.token;
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    if (jpp__token_is(&key, JPP_TOKEN_WORD, "microbatches")) {
      JPP_RETURN_IF_ERROR(parse_u32(p, "a number of microbatches", &desc->microbatches));
    } else if (jpp__token_is(&key, JPP_TOKEN_WORD, "stages")) {
      JPP_RETURN_IF_ERROR(parse_u32(p, "a number of stages", &desc->stages));
    } else if (jpp__token_is(&key, JPP_TOKEN_WORD, "schedule")) {
      JPP_RETURN_IF_ERROR(parse_string(p, "a schedule's name", &desc->schedule));
    } else if (jpp__token_is(&key, JPP_TOKEN_WORD, "at")) {
      JPP_RETURN_IF_ERROR(parse_string(p, "\"file:line\"", &desc->where));
    } else if (jpp__token_is(&key, JPP_TOKEN_WORD, "index")) {
      JPP_RETURN_IF_ERROR(take_new_name(p, index));
    } else {
      return jpp__lexer_error(
          &p->lexer, &key, "expected microbatches, stages, schedule, index, at or '{'");
    }
  }
  return jpp__lexer_next(&p->lexer);
}

static jpp_status_t* parse_loop_head(parser_t* p) {
  jpp_token_t keyword = p->lexer.token;
  if (p->in_loop) {
    return jpp__lexer_error(&p->lexer, &keyword, "loops do not nest");
  }
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  jpp_loop_desc_t desc = {0};
  jpp_token_t index = {.kind = JPP_TOKEN_END};
  JPP_RETURN_IF_ERROR(parse_loop_attributes(p, &desc, &index));
  if (!desc.microbatches || index.kind == JPP_TOKEN_END) {
    return jpp__lexer_error(&p->lexer, &keyword,
                            "a loop needs microbatches (at least 1) and an index");
  }
  uint32_t value = 0;
  JPP_RETURN_IF_ERROR(jpp_graph_builder_begin_loop(p->builder, &desc, &value));
  p->in_loop = true;
  return define_name(p, &index, value);
}

static jpp_status_t* parse_reduce(parser_t* p, jpp_loop_result_t* result) {
  for (int i = 0; i < JPP_REDUCE_KIND_COUNT; ++i) {
    if (!at_word(p, jpp_reduce_kind_name((jpp_reduce_kind_t)i))) continue;
    result->reduce = (uint8_t)i;
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    result->partial = at_word(p, "partial");
    if (result->partial) JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    return parse_use(p, &result->value);
  }
  return jpp__lexer_expected(&p->lexer, "add, max, concat or custom");
}

// Parses "} %6:f32[8] = add %5, %7:f32[32] = concat %4". The first result must be on the
// line of the brace; the next line begins the next statement.
static jpp_status_t* parse_loop_tail(parser_t* p) {
  clear_statement(p);
  if (!p->in_loop) return jpp__lexer_expected(&p->lexer, "a statement");
  uint32_t line = p->lexer.token.line;
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  bool has_results = p->lexer.token.line == line;
  while (has_results && p->lexer.token.kind == JPP_TOKEN_VALUE) {
    jpp_loop_result_t result = {0};
    JPP_RETURN_IF_ERROR(parse_definition(p));
    JPP_RETURN_IF_ERROR(expect_punct(p, "=", "'=' and a reduction"));
    JPP_RETURN_IF_ERROR(parse_reduce(p, &result));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->results, result));
    if (!at_punct(p, ",")) break;
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  }
  uint32_t first = 0;
  JPP_RETURN_IF_ERROR(jpp_graph_builder_end_loop(
      p->builder, p->results.data, p->types.data, (uint32_t)p->results.count, &first));
  p->in_loop = false;
  return define_all(p, first);
}

// Parses the ranks of an argument or output, after "on".
static jpp_status_t* parse_ranks(parser_t* p) {
  p->ranks.count = 0;
  if (!at_word(p, "on")) return NULL;
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  return parse_rank_list(p);
}

static jpp_status_t* parse_arg(parser_t* p) {
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  jpp_token_t name;
  jpp_type_t type;
  const char* label = NULL;
  JPP_RETURN_IF_ERROR(take_new_name(p, &name));
  JPP_RETURN_IF_ERROR(parse_type(p, &type));
  if (p->lexer.token.kind == JPP_TOKEN_STRING) {
    JPP_RETURN_IF_ERROR(parse_string(p, "a label", &label));
  }
  JPP_RETURN_IF_ERROR(parse_ranks(p));
  bool donated = at_word(p, "donated");
  if (donated) JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  uint32_t value = 0;
  JPP_RETURN_IF_ERROR(
      jpp_graph_builder_add_arg(p->builder, &type, donated, label, &value));
  if (p->ranks.count) {
    JPP_RETURN_IF_ERROR(
        jpp_graph_builder_give_arg(p->builder, p->ranks.data, (uint32_t)p->ranks.count));
  }
  return define_name(p, &name, value);
}

static jpp_status_t* parse_out(parser_t* p) {
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  uint32_t value = 0, next = JPP_NONE;
  const char* label = NULL;
  JPP_RETURN_IF_ERROR(parse_use(p, &value));
  if (p->lexer.token.kind == JPP_TOKEN_STRING) {
    JPP_RETURN_IF_ERROR(parse_string(p, "a label", &label));
  }
  JPP_RETURN_IF_ERROR(parse_ranks(p));
  if (at_word(p, "next")) {
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    JPP_RETURN_IF_ERROR(parse_use(p, &next));
  }
  JPP_RETURN_IF_ERROR(jpp_graph_builder_add_output(p->builder, value, label, next));
  if (!p->ranks.count) return NULL;
  return jpp_graph_builder_leave_output(p->builder, p->ranks.data,
                                        (uint32_t)p->ranks.count);
}

static jpp_status_t* parse_statement(parser_t* p) {
  if (at_word(p, "arg")) return parse_arg(p);
  if (at_word(p, "out")) return parse_out(p);
  if (at_word(p, "loop")) return parse_loop_head(p);
  if (at_punct(p, "}")) return parse_loop_tail(p);
  if (at_punct(p, "=") || p->lexer.token.kind == JPP_TOKEN_VALUE) return parse_op(p);
  return jpp__lexer_expected(&p->lexer, "arg, out, loop, '}' or %value");
}

static jpp_status_t* parse_header(parser_t* p) {
  if (!at_word(p, "graph")) {
    return jpp__lexer_expected(&p->lexer, "'graph \"name\"' at the beginning");
  }
  const char* name = NULL;
  uint32_t ranks = 0;
  JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  JPP_RETURN_IF_ERROR(parse_string(p, "the graph's name in quotes", &name));
  if (at_word(p, "ranks")) {
    JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
    JPP_RETURN_IF_ERROR(parse_u32(p, "a number of ranks", &ranks));
  }
  p->sharded = at_word(p, "sharded");
  if (p->sharded) JPP_RETURN_IF_ERROR(jpp__lexer_next(&p->lexer));
  return jpp_graph_builder_create(name, ranks, &p->builder);
}

static jpp_status_t* parse_graph(parser_t* p, jpp_graph_t** out_graph) {
  JPP_RETURN_IF_ERROR(parse_header(p));
  while (p->lexer.token.kind != JPP_TOKEN_END) {
    // Errors from the builder are reported at the statement.
    jpp_token_t start = p->lexer.token;
    jpp_status_t* status = parse_statement(p);
    if (!status) continue;
    if (jpp_status_code(status) == JPP_PARSE_ERROR) return status;
    return jpp_status_annotate(status, "%s:%u:%u", p->lexer.file, start.line,
                               start.column);
  }
  if (p->in_loop) return jpp__lexer_expected(&p->lexer, "'}' that closes the loop");
  JPP_RETURN_IF_ERROR_IN(jpp_graph_builder_finish(p->builder, out_graph), "%s",
                         p->lexer.file);
  return p->sharded ? jpp_graph_set_sharded(*out_graph) : NULL;
}

jpp_status_t* jpp_graph_parse(const char* text, size_t length, const char* file,
                              jpp_graph_t** out_graph) {
  JPP_RETURN_IF_NULL(text, file, out_graph);
  *out_graph = NULL;
  parser_t parser = {0};
  jpp__arena_init(&parser.arena);
  jpp_status_t* status =
      jpp__lexer_init(&parser.lexer, text, length, file, &parser.arena);
  if (!status) status = parse_graph(&parser, out_graph);
  jpp_graph_builder_destroy(parser.builder);
  jpp__map_deinit(&parser.names);
  jpp_vec_deinit(&parser.defined);
  jpp_vec_deinit(&parser.types);
  jpp_vec_deinit(&parser.inputs);
  jpp_vec_deinit(&parser.results);
  jpp_vec_deinit(&parser.ranks);
  jpp__arena_deinit(&parser.arena);
  return status;
}

jpp_status_t* jpp_graph_read(const char* file, jpp_graph_t** out_graph) {
  JPP_RETURN_IF_NULL(file, out_graph);
  char* text = NULL;
  size_t length = 0;
  *out_graph = NULL;
  JPP_RETURN_IF_ERROR(jpp_file_read(file, &text, &length));
  jpp_status_t* status = jpp_graph_parse(text, length, file, out_graph);
  jpp_free(text);
  return status;
}
