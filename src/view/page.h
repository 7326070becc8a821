// Page: the start of an SVG picture, and an HTML page of one file around it, without
// network. The wheel zooms, dragging moves, and the page shows the <title> of the shape
// under the pointer.
#ifndef JPP_VIEW_PAGE_H_
#define JPP_VIEW_PAGE_H_

#include "base/str.h"

// The start of a picture of this size in pixels, with a white background.
void jpp__svg_begin(double width, double height, jpp_str_t* str);

void jpp__page_begin(jpp_str_t* str);
void jpp__page_end(jpp_str_t* str);

#endif  // JPP_VIEW_PAGE_H_
