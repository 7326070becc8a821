// Terminal output in colour; an escape sequence is written only where the colour changes.
#include "view/terminal.h"

static char mark_of(const jpp_cell_t* cell) {
  if (!cell->busy) return '.';
  if (cell->ink == JPP_INK_OTHER || cell->microbatch == JPP_NONE) return '#';
  return (char)(jpp__ink(cell->ink)->first_mark + cell->microbatch % 10);
}

void jpp__terminal_append(const jpp_cell_t* cells, uint32_t columns, bool color,
                          jpp_str_t* str) {
  static const char kOwnColor[] = "\x1b[0m";
  const char* shown = kOwnColor;
  for (uint32_t c = 0; c < columns; ++c) {
    const char* escape = cells[c].busy ? jpp__ink(cells[c].ink)->escape : kOwnColor;
    if (color && escape != shown) jpp_str_append(str, escape);
    shown = escape;
    char mark = mark_of(&cells[c]);
    jpp_str_append_n(str, &mark, 1);
  }
  if (color && shown != kOwnColor) jpp_str_append(str, kOwnColor);
}
