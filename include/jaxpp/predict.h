// Predict: when every task of a plan runs, on a machine that is described by numbers.
//
// In: a plan, the time of each of its tasks, and a machine. Out: the start and end of
// every run, the time of a step and the idle share. No device is needed.
//
// The prediction executes the plan's programs as the runtime does:
//
//  - The issuing thread of a process visits its ranks in turn. A visit issues a rank's
//    instructions until its second run. Each run, send and receive takes the thread
//    `call`. A send waits for a slot of its channel; a receive waits until the message
//    was sent or, from another process, until it has arrived. The helpers of that thread
//    (for clients that run programs inside calls) are not modelled.
//  - If events coincide, runs and calls end and messages arrive before any issuing thread
//    continues. Threads then continue one at a time, lowest process first.
//  - A device executes the runs of its ranks in the order in which they were issued, one
//    at a time. A run starts when the previous one has ended and its received arguments
//    have arrived.
//  - A message leaves when its value exists, its send was issued and its link is free.
//    It occupies the link for bytes / bandwidth, and arrives `latency` later. Messages
//    queue for a link in the order in which their values exist and their sends are
//    issued; those of one run in the order of their sends.
//  - A move is a message of a rank to itself: each rank has a link to host memory and
//    one back. Moves need no slot, and a run waits for them as for messages.
//  - Jobs share the cores of a host equally: a run occupies `threads` cores and an
//    issuing thread one. While they need more cores than there are, all take
//    proportionally longer.
//  - A process begins a step when it has issued the previous one and has fewer than
//    `steps_in_flight` unfinished steps. The arguments of a step are on its ranks.
//
// With one process, unlimited cores, and calls and links that take no time, the times
// equal those of jpp_schedule_simulate().
//
// Times are in milliseconds.
//
// Threads: any thread, several at once, also on the same plan, which is only read.
#ifndef JAXPP_PREDICT_H_
#define JAXPP_PREDICT_H_

#include "jaxpp/program.h"

// Its layout is final.
typedef struct jpp_link_speed {
  double latency;
  double bandwidth;  // bytes per millisecond, on each device; 0: messages take no time
} jpp_link_speed_t;

typedef struct jpp_machine {
  size_t struct_size;  // sizeof(jpp_machine_t)
  uint32_t cores;      // of each host; 0: unlimited
  // Number; the ranks are divided evenly among them, in order; 0: 1.
  uint32_t processes;
  // Cores that a run keeps busy. 0: 1.5 for each device of its rank, at most the cores of
  // its process, because several threads of one op use cores less efficiently than
  // several ops do.
  double threads;
  uint32_t devices_per_rank;  // 0: 1
  double call;                // of the issuing thread for an instruction
  jpp_link_speed_t link;      // between ranks of different processes
  jpp_link_speed_t host;      // of a rank's moves to host memory, and of those back
  // The lists may be NULL. Numbers of hosts, processes and devices are below `ranks`.
  const uint32_t* rank_host;  // [ranks] NULL: all on one host
  // [ranks] instead of `processes`.
  const uint32_t* rank_process;
  // [ranks] Equal numbers share a device. NULL: each rank has its own.
  const uint32_t* rank_device;
  const jpp_link_speed_t* links;  // [ranks * ranks] by sender, instead of `link`
} jpp_machine_t;

// A run of a task, predicted or measured. Its layout is final.
typedef struct jpp_task_run {
  uint32_t rank;
  uint32_t task;        // staged task id
  uint32_t microbatch;  // JPP_NONE outside loops
  uint32_t step;        // from 0
  double start, end;
} jpp_task_run_t;

typedef struct jpp_predict_options {
  size_t struct_size;  // sizeof(jpp_predict_options_t)
  // Times of runs that share no core: [staged->num_tasks], one for each task, or as
  // `first_times` says.
  const double* task_times;
  const jpp_machine_t* machine;  // NULL: a single host and process, all times 0
  uint32_t steps;                // number to predict; 0: 1
  uint32_t steps_in_flight;      // 0: 2
  // [staged->num_tasks + 1], ascending: the times of task t are task_times from
  // first_times[t] on, before first_times[t + 1]. The runs of the task take them in turn,
  // step by step and microbatch by microbatch; a task without times takes none. NULL: one
  // time for each task.
  const uint64_t* first_times;
} jpp_predict_options_t;

typedef struct jpp_prediction {
  const jpp_plan_t* plan;  // borrowed
  uint32_t steps;
  uint64_t num_runs;           // `steps` times the runs of a step
  const jpp_task_run_t* runs;  // [num_runs] by step, then rank, then program order
  const double* busy;          // [ranks] time of the first step's runs
  double makespan;             // end of the first step's last run
  double period;  // time from step to step; the makespan if only one step is predicted
  double bubble;  // share of the first step during which ranks run nothing
} jpp_prediction_t;

// The caller frees the prediction with jpp_prediction_destroy(); the plan must outlive
// it. JPP_INVALID_ARGUMENT for an invalid time, for a host, process or device that is not
// below the number of ranks, and for more processes than ranks; JPP_PROGRAM_ERROR, which
// names the rank, for a plan that cannot run on this machine. Takes O(n log r) time for n
// instructions on r ranks, 56 bytes per run and 16 bytes per message.
JPP_API jpp_status_t* jpp_predict(const jpp_plan_t* plan,
                                  const jpp_predict_options_t* options,
                                  jpp_prediction_t** out_prediction) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_prediction_destroy(jpp_prediction_t* prediction);

// The reverse: task times from measured runs, [num_runs] in any order, of one or more
// steps. The time during which a run shared cores counts in proportion to the run's
// share, as above. `ranks` is the length of the machine's lists. out_times: [num_runs],
// of each task those of its runs, by their start; out_first_times: [num_tasks + 1]. They
// are what jpp_predict_options_t takes: a step whose runs take equally long on average,
// but not each time, is longer than one whose runs all take the mean.
// JPP_INVALID_ARGUMENT for a run that ends before it starts, and for a task or rank that
// is out of range.
JPP_API jpp_status_t* jpp_predict_task_times(const jpp_machine_t* machine, uint32_t ranks,
                                             const jpp_task_run_t* runs,
                                             uint64_t num_runs, uint32_t num_tasks,
                                             double* out_times,
                                             uint64_t* out_first_times) JPP_MUST_USE;

// The median latency between processes in measured runs, [num_runs] of one or more steps
// of the plan, on one clock: from the end of the run that made a message to the start of
// the run that waited for it alone. 0 where no run waited for another process. Errors:
// those of the machine, as above.
JPP_API jpp_status_t* jpp_predict_latency(const jpp_plan_t* plan,
                                          const jpp_machine_t* machine,
                                          const jpp_task_run_t* runs, uint64_t num_runs,
                                          double* out_latency) JPP_MUST_USE;

#endif  // JAXPP_PREDICT_H_
