// Tokens of the graph's text form, with the line and column of each.
#ifndef JPP_GRAPH_LEXER_H_
#define JPP_GRAPH_LEXER_H_

#include "base/arena.h"

typedef enum jpp_token_kind {
  JPP_TOKEN_END,
  JPP_TOKEN_WORD,    // letters, digits, "_.+-"; an op name, a keyword or a number
  JPP_TOKEN_VALUE,   // %name: the text is the name
  JPP_TOKEN_MARKER,  // @name: the text is the name
  JPP_TOKEN_STRING,  // "...": the text is its contents, escapes resolved
  JPP_TOKEN_PUNCT,   // one of ( ) [ ] { } , : =
} jpp_token_kind_t;

typedef struct jpp_token {
  jpp_token_kind_t kind;
  const char* text;
  uint32_t length;
  uint32_t line, column;  // from 1
} jpp_token_t;

typedef struct jpp_lexer {
  const char* file;
  const char* at;
  const char* end;
  uint32_t line;
  const char* line_start;
  jpp_arena_t* arena;  // owns the text of strings
  jpp_token_t token;   // the next token, not yet taken
} jpp_lexer_t;

// Reads the first token.
jpp_status_t* jpp__lexer_init(jpp_lexer_t* lexer, const char* text, size_t length,
                              const char* file, jpp_arena_t* arena) JPP_MUST_USE;
// Replaces lexer->token with the next token.
jpp_status_t* jpp__lexer_next(jpp_lexer_t* lexer) JPP_MUST_USE;

bool jpp__token_is(const jpp_token_t* token, jpp_token_kind_t kind, const char* text);
// "file:line:column: expected WHAT, found TOKEN"
jpp_status_t* jpp__lexer_expected(const jpp_lexer_t* lexer,
                                  const char* what) JPP_MUST_USE;
// "file:line:column: MESSAGE" at a token.
jpp_status_t* jpp__lexer_error(const jpp_lexer_t* lexer, const jpp_token_t* token,
                               const char* message) JPP_MUST_USE;

#endif  // JPP_GRAPH_LEXER_H_
