// Ranks of a job: which process of a job owns which devices of each pipeline rank.
//
// A process owns the devices at the same positions in each of its ranks, so a transfer
// between two ranks connects each process with one other: each shard goes to the same
// position of the receiving rank.
#ifndef JAXPP_JOB_RANKS_H_
#define JAXPP_JOB_RANKS_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_job_mesh {
  size_t struct_size;  // sizeof(jpp_job_mesh_t)
  uint32_t num_ranks;
  uint32_t rank_size;      // devices of a rank
  const uint32_t* owners;  // [num_ranks][rank_size] the process of each device
  bool on_cpu;             // a rank on CPUs cannot span processes
  bool shares_devices;     // ranks that share devices cannot span processes
} jpp_job_mesh_t;

// The mesh as one process sees it. Its layout is final.
typedef struct jpp_job_part {
  bool spans;  // some rank's devices belong to several processes
  uint32_t num_ranks;
  // [num_ranks] for each rank the process that owns its positions `places`; for a rank of
  // this process, itself
  uint32_t* rank_process;
  uint32_t num_places;
  uint32_t* places;  // [num_places] this process's positions in each of its ranks
} jpp_job_part_t;

// Describes the devices of `process`; a process that owns no device gets the part of rank
// 0's first process. JPP_UNSUPPORTED if a rank spans processes in a way that is not
// supported: on CPUs, on shared devices, at positions that differ between ranks, or so
// that processes which share ranks could execute their tasks in different orders.
JPP_API jpp_status_t* jpp_job_divide_ranks(const jpp_job_mesh_t* mesh, uint32_t process,
                                           jpp_job_part_t* out_part) JPP_MUST_USE;
// Frees the lists of a part, not the struct. Takes NULL.
JPP_API void jpp_job_part_free(jpp_job_part_t* part);

#endif  // JAXPP_JOB_RANKS_H_
