// Page: the start of an SVG picture, and an HTML page around it, in one file and without
// network access. The wheel zooms, dragging moves, and the page shows the <title> of the
// shape under the pointer.
#ifndef JPP_VIEW_PAGE_H_
#define JPP_VIEW_PAGE_H_

#include "base/str.h"

// Begins a picture of this size in pixels, with a white background.
void jpp__svg_begin(double width, double height, jpp_str_t* str);

void jpp__page_begin(jpp_str_t* str);
void jpp__page_end(jpp_str_t* str);

#endif  // JPP_VIEW_PAGE_H_
