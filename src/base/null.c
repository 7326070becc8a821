// The errors for a NULL argument, whose name comes from the macro's arguments, and for a
// list of the wrong length.
#include "base/null.h"

#include <inttypes.h>
#include <string.h>

jpp_status_t* jpp__null_error(const char* function, const char* names, size_t index) {
  for (; index > 0; --index) names = strchr(names, ',') + 2;
  int length = (int)strcspn(names, ",");
  int first = length;  // for a field, its name only
  while (first > 0 && !strchr(".>", names[first - 1])) --first;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "%s: expected a pointer as %.*s, found NULL", function,
                         length - first, names + first);
}

jpp_status_t* jpp__check_count(const char* what, uint64_t expected, uint64_t found) {
  if (found == expected) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "%s: expected a count of %" PRIu64 ", found %" PRIu64, what,
                         expected, found);
}
