// The version of the library that a program runs with, which may be newer than the header
// it was compiled with.
#include "jaxpp/version.h"

const char* jpp_version(void) { return JPP_VERSION; }
