// Terminal: drawings as rows of characters; each column is an equal share of the time.
#ifndef JPP_VIEW_TERMINAL_H_
#define JPP_VIEW_TERMINAL_H_

#include "base/str.h"
#include "view/ink.h"

// The contents of a column.
typedef struct jpp_cell {
  bool busy;            // false: nothing runs
  uint8_t ink;          // jpp_ink_name_t
  uint32_t microbatch;  // JPP_NONE: outside the loops
} jpp_cell_t;

#define JPP_TERMINAL_LEGEND "0-9 forward, a-j backward (of inputs), A-J of weights, "

// Forwards show the last digit of the microbatch, backwards a letter for it, other tasks
// '#', idle time '.'. Resets the terminal's colour at the end.
void jpp__terminal_append(const jpp_cell_t* cells, uint32_t columns, bool color,
                          jpp_str_t* str);

#endif  // JPP_VIEW_TERMINAL_H_
