// Page: an HTML page of one file around an SVG picture, without network: the wheel zooms,
// dragging moves, and the <title> of the shape under the pointer describes it.
#ifndef JPP_VIEW_PAGE_H_
#define JPP_VIEW_PAGE_H_

#include "base/str.h"

void jpp_page_begin(jpp_str_t* str);
void jpp_page_end(jpp_str_t* str);

#endif  // JPP_VIEW_PAGE_H_
