// Flight recorder: the last position of every rank of a job, for jobs that hang or have
// died.
//
// With JPP_FLIGHT=FOLDER, every runtime keeps a file there, mapped to memory, and records
// each instruction in it as it is issued. Nothing has to be written when a process dies:
// its records are in the file even after SIGKILL. A record costs one clock reading and
// two stores.
//
// In: the folder, with the files of all processes; they may be copied there from several
// hosts. Out: a text that aligns them. It shows, for each rank, the last instruction that
// the rank issued and when, and the instruction that it has reached; if that is a
// transfer, also whether the other rank has done its part. At the end it shows which rank
// waits for which, down to a rank that waits for no other.
//
// Threads: any thread.
#ifndef JAXPP_FLIGHT_H_
#define JAXPP_FLIGHT_H_

#include "jaxpp/status.h"

// Free *out_text with jpp_text_free(). JPP_INVALID_ARGUMENT for a folder that cannot be
// read or has no flight recorder files; JPP_PARSE_ERROR, which names the file, for one
// that is damaged or of another version.
JPP_API jpp_status_t* jpp_flight_report(const char* folder, char** out_text) JPP_MUST_USE;

#endif  // JAXPP_FLIGHT_H_
