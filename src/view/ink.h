// Ink: the appearance of each kind of work, the same in every picture and trace.
#ifndef JPP_VIEW_INK_H_
#define JPP_VIEW_INK_H_

#include "jaxpp/task.h"

typedef enum jpp_ink_name {
  JPP_INK_FORWARD,
  JPP_INK_BACKWARD,  // whole, or of inputs
  JPP_INK_WEIGHT,
  JPP_INK_OTHER,  // outside the loops
  JPP_INK_COUNT,
} jpp_ink_name_t;

enum { JPP_INK_SHADES = 4 };

typedef struct jpp__ink {
  const char* legend;
  double legend_width;                // of key and text in a picture, pixels
  const char* fills[JPP_INK_SHADES];  // SVG colours from light to dark
  const char* escape;                 // that turns a terminal to it
  char first_mark;  // of microbatch 0 in the terminal; the next nine digits follow it
  const char* category;  // in Chrome traces
} jpp_ink_t;

const jpp_ink_t* jpp__ink(jpp_ink_name_t name);
jpp_ink_name_t jpp__ink_of(jpp_task_kind_t kind);

#endif  // JPP_VIEW_INK_H_
