// Ink: the appearance of each kind of work, the same in every picture and trace.
#ifndef JPP_VIEW_INK_H_
#define JPP_VIEW_INK_H_

#include "jaxpp/task.h"

typedef enum jpp_ink_name {
  JPP_INK_FORWARD,
  JPP_INK_BACKWARD,  // a whole backward, or input gradients
  JPP_INK_WEIGHT,
  JPP_INK_OTHER,  // outside the loops
  JPP_INK_COUNT,
} jpp_ink_name_t;

enum { JPP_INK_SHADES = 4 };

typedef struct jpp__ink {
  const char* legend;
  double legend_width;                // of key and text in a picture, pixels
  const char* fills[JPP_INK_SHADES];  // SVG colours from light to dark
  const char* escape;  // escape sequence that selects the colour in a terminal
  char first_mark;  // mark of microbatch 0 in the terminal; the next nine characters mark
                    // the other digits
  const char* category;  // category in Chrome traces
} jpp_ink_t;

const jpp_ink_t* jpp__ink(jpp_ink_name_t name);
jpp_ink_name_t jpp__ink_of(jpp_task_kind_t kind);

#endif  // JPP_VIEW_INK_H_
