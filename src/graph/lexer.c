// Splits the graph's text form into tokens, one at a time. A token points into the text;
// only strings are copied, with their escapes resolved.
#include "graph/lexer.h"

#include <ctype.h>
#include <string.h>

static bool is_word_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
         c == '_' || c == '.' || c == '-' || c == '+';
}

jpp_status_t* jpp__lexer_error(const jpp_lexer_t* lexer, const jpp_token_t* token,
                               const char* message) {
  return jpp_status_make(JPP_PARSE_ERROR, "%s:%u:%u: %s", lexer->file, token->line,
                         token->column, message);
}

jpp_status_t* jpp__lexer_expected(const jpp_lexer_t* lexer, const char* what) {
  const jpp_token_t* token = &lexer->token;
  if (token->kind == JPP_TOKEN_END) {
    return jpp_status_make(JPP_PARSE_ERROR, "%s:%u:%u: expected %s, found the end",
                           lexer->file, token->line, token->column, what);
  }
  static const char* const sigils[] = {"", "", "%", "@", "", ""};
  int length = token->length < 40 ? (int)token->length : 40;
  return jpp_status_make(JPP_PARSE_ERROR, "%s:%u:%u: expected %s, found '%s%.*s'",
                         lexer->file, token->line, token->column, what,
                         sigils[token->kind], length, token->text);
}

static void lexer_skip_blank(jpp_lexer_t* lexer) {
  for (; lexer->at < lexer->end; ++lexer->at) {
    if (*lexer->at == '#') {
      while (lexer->at < lexer->end && *lexer->at != '\n') ++lexer->at;
      if (lexer->at == lexer->end) return;
    }
    if (*lexer->at == '\n') {
      ++lexer->line;
      lexer->line_start = lexer->at + 1;
    } else if (!isspace((unsigned char)*lexer->at)) {
      return;
    }
  }
}

static void lexer_take_word(jpp_lexer_t* lexer, jpp_token_kind_t kind) {
  lexer->token.kind = kind;
  lexer->token.text = lexer->at;
  while (lexer->at < lexer->end && is_word_char(*lexer->at)) ++lexer->at;
  lexer->token.length = (uint32_t)(lexer->at - lexer->token.text);
}

static int hex_digit(char c) {
  const char* digits = "0123456789abcdef";
  const char* found = c ? strchr(digits, tolower((unsigned char)c)) : NULL;
  return found ? (int)(found - digits) : -1;
}

// Resolves the escape after a backslash; returns 0 if it is not valid.
static char lexer_take_escape(jpp_lexer_t* lexer) {
  if (lexer->at == lexer->end) return 0;
  char c = *lexer->at++;
  if (c == 'n') return '\n';
  if (c == 't') return '\t';
  if (c == '"' || c == '\\') return c;
  if (c != 'x' || lexer->end - lexer->at < 2) return 0;
  int high = hex_digit(lexer->at[0]), low = hex_digit(lexer->at[1]);
  lexer->at += 2;
  return high < 0 || low < 0 ? 0 : (char)(high * 16 + low);
}

static jpp_status_t* lexer_take_string(jpp_lexer_t* lexer) {
  const char* close = ++lexer->at;
  while (close < lexer->end && *close != '"' && *close != '\n') {
    close += *close == '\\' ? 2 : 1;
  }
  if (close >= lexer->end || *close != '"') {
    return jpp__lexer_error(lexer, &lexer->token, "string is not closed on its line");
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(
      jpp__arena_alloc(lexer->arena, (size_t)(close - lexer->at) + 1, (void**)&text));
  lexer->token.kind = JPP_TOKEN_STRING;
  lexer->token.text = text;
  while (lexer->at < close) {
    char c = *lexer->at++;
    if (c == '\\' && !(c = lexer_take_escape(lexer))) {
      return jpp__lexer_error(
          lexer, &lexer->token,
          "unknown escape in string; expected \\n \\t \\\" \\\\ \\xNN");
    }
    text[lexer->token.length++] = c;
  }
  ++lexer->at;
  return NULL;
}

static jpp_status_t* unexpected_character(const jpp_lexer_t* lexer, char c) {
  bool printable = c > ' ' && c < 0x7f;
  return jpp_status_make(JPP_PARSE_ERROR,
                         "%s:%u:%u: expected a name, a number, a string or one of "
                         "()[]{},:=/, found '%.*s' (byte 0x%02x)",
                         lexer->file, lexer->token.line, lexer->token.column, printable,
                         &c, (unsigned char)c);
}

jpp_status_t* jpp__lexer_next(jpp_lexer_t* lexer) {
  lexer_skip_blank(lexer);
  lexer->token = (jpp_token_t){.kind = JPP_TOKEN_END,
                               .text = lexer->at,
                               .line = lexer->line,
                               .column = (uint32_t)(lexer->at - lexer->line_start) + 1};
  if (lexer->at == lexer->end) return NULL;
  char c = *lexer->at;
  if (is_word_char(c)) {
    lexer_take_word(lexer, JPP_TOKEN_WORD);
    return NULL;
  }
  if (c == '%' || c == '@') {
    ++lexer->at;
    lexer_take_word(lexer, c == '%' ? JPP_TOKEN_VALUE : JPP_TOKEN_MARKER);
    if (lexer->token.length) return NULL;
    return jpp__lexer_error(lexer, &lexer->token, "a name must follow % or @");
  }
  if (c == '"') return lexer_take_string(lexer);
  if (!c || !strchr("()[]{},:=/", c)) {
    return unexpected_character(lexer, c);
  }
  lexer->token.kind = JPP_TOKEN_PUNCT;
  lexer->token.length = 1;
  ++lexer->at;
  return NULL;
}

jpp_status_t* jpp__lexer_init(jpp_lexer_t* lexer, const char* text, size_t length,
                              const char* file, jpp_arena_t* arena) {
  *lexer = (jpp_lexer_t){.file = file,
                         .at = text,
                         .end = text + length,
                         .line = 1,
                         .line_start = text,
                         .arena = arena};
  return jpp__lexer_next(lexer);
}

bool jpp__token_is(const jpp_token_t* token, jpp_token_kind_t kind, const char* text) {
  return token->kind == kind && *token->text == *text && strlen(text) == token->length &&
         memcmp(token->text, text, token->length) == 0;
}
