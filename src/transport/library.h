// Finds a library that is loaded at run time: the file that an option names, else the one
// in a Python package beside this library, else the system's. Once loaded, it stays
// loaded.
#ifndef JPP_TRANSPORT_LIBRARY_H_
#define JPP_TRANSPORT_LIBRARY_H_

#include "jaxpp/option.h"

typedef struct jpp_library {
  const char* name;     // for messages: "UCX"
  jpp_option_t option;  // the option that names a file
  const char* package;  // its file below a folder of Python packages; NULL: in no package
  const char* file;     // its name for the system's loader
  const char* install;  // for messages: what to install
} jpp_library_t;

// A handle for dlsym(). JPP_UNSUPPORTED says what to install. One thread at a time may
// call this.
jpp_status_t* jpp__library_open(const jpp_library_t* library,
                                void** out_handle) JPP_MUST_USE;

#endif  // JPP_TRANSPORT_LIBRARY_H_
