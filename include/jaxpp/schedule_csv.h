// Schedules as CSV, in the form that torch.distributed.pipelining reads and writes.
//
// One line per rank; lines end in LF or CRLF, and commas separate cells; an empty cell is
// an idle entry. A cell is STAGE KIND MICROBATCH: F forward, B backward, I input
// gradient, W weight gradient; or a pair of them that run together,
// "(0F7;7B3)OVERLAP_F_B". Files with communication also have SEND_F, RECV_F, WAIT_SEND_F
// and the same with _B, and, without a microbatch, UNSHARD, RESHARD, REDUCE_GRAD and
// WAIT_REDUCE_GRAD of a stage. Stages, ranks, microbatches and placement follow from the
// rows.
//
// Threads: any thread, several at once, also on the same schedule.
#ifndef JAXPP_SCHEDULE_CSV_H_
#define JAXPP_SCHEDULE_CSV_H_

#include <stddef.h>

#include "jaxpp/schedule.h"

// Reads a schedule and proves it:
//   - jpp_schedule_verify();
//   - a pair starts when both of its halves may start, and no rank waits for ever;
// and if it has communication:
//   - each SEND follows its computation and each RECV precedes it, once; ranks send
//     messages if and only if they are needed, and every RECV has its SEND;
//   - a channel (sender, receiver) delivers in order: its RECVs are in the order of its
//     SENDs;
//   - no rank waits for ever if a SEND waits for one of the channel's `slots`, a RECV is
//     only posted, a computation waits for its message (a pair for the messages of both
//     halves), and a WAIT_SEND waits until the receiver's RECV has taken the message.
// If some backwards of a stage are whole and others are split, the whole ones become
// BWD_I followed by BWD_W. `file` is named in errors; *out_slots (may be NULL) gets the
// least sufficient number of slots, 0 without communication.
//
// JPP_PARSE_ERROR "FILE:LINE: ..." for text in another form, JPP_SCHEDULE_ERROR
// "FILE:LINE: ..." for a schedule that fails its proof.
JPP_API jpp_status_t* jpp_schedule_from_csv(const char* file, const char* text,
                                            size_t length,
                                            JPP_OPTIONAL uint32_t* out_slots,
                                            jpp_schedule_t** out_schedule) JPP_MUST_USE;

// Writes the schedule, with CRLF line ends; FusedTasks of a forward and a backward become
// pairs. With `communication`, each SEND follows its computation, and RECVs precede the
// computation that needs the last of them. The schedule is proved first:
// JPP_SCHEDULE_ERROR if the schedule is wrong, or a pair could not start because one half
// needs a result of the other. Free with jpp_text_free().
JPP_API jpp_status_t* jpp_schedule_print_csv(const jpp_schedule_t* schedule,
                                             bool communication,
                                             char** out_text) JPP_MUST_USE;

// The least number of slots per channel with which the communication that
// jpp_schedule_print_csv() places cannot deadlock. Fails as jpp_schedule_verify() does.
JPP_API jpp_status_t* jpp_schedule_slots(const jpp_schedule_t* schedule,
                                         uint32_t* out_slots) JPP_MUST_USE;

#endif  // JAXPP_SCHEDULE_CSV_H_
