// The version of the loaded library. Its patch level may differ from the one in the
// header that a program was compiled with.
#include "jaxpp/version.h"

const char* jpp_version(void) { return JPP_VERSION; }

uint32_t jpp_version_number(void) { return JPP_VERSION_NUMBER; }
