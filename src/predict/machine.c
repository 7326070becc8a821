// Checks the description of a machine and fills in missing fields.
#include "predict/machine.h"

#include "base/struct_size.h"

static const double kMostThreads = 65536;

static jpp_status_t* check_list(const char* name, const uint32_t* list, uint32_t ranks) {
  for (uint32_t r = 0; r < ranks; ++r) {
    if (list[r] < ranks) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: rank %u: expected a number below %u as %s, found %u",
                           r, ranks, name, list[r]);
  }
  return NULL;
}

// Divides the ranks evenly into `parts`, in order.
static jpp_status_t* fill_list(uint32_t ranks, uint32_t parts, jpp_arena_t* arena,
                               const uint32_t** list) {
  uint32_t* filled = NULL;
  if (*list) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &filled));
  for (uint32_t r = 0; r < ranks; ++r)
    filled[r] = (uint32_t)((uint64_t)r * parts / ranks);
  *list = filled;
  return NULL;
}

static jpp_status_t* fill_links(jpp_machine_t* machine, uint32_t ranks,
                                jpp_arena_t* arena) {
  jpp_link_speed_t* links = NULL;
  if (machine->links) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, (size_t)ranks * ranks, &links));
  for (size_t i = 0; i < (size_t)ranks * ranks; ++i) {
    const uint32_t* process = machine->rank_process;
    if (process[i / ranks] != process[i % ranks]) links[i] = machine->link;
  }
  machine->links = links;
  return NULL;
}

static jpp_status_t* check_links(const jpp_link_speed_t* links, uint32_t ranks) {
  for (size_t i = 0; i < (size_t)ranks * ranks; ++i) {
    if (jpp__machine_takes(links[i].latency) && jpp__machine_takes(links[i].bandwidth)) {
      continue;
    }
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: link from rank %zu to %zu: expected latency and "
                           "bandwidth from 0 to %g, found %g and %g",
                           i / ranks, i % ranks, JPP_LONGEST_TIME, links[i].latency,
                           links[i].bandwidth);
  }
  return NULL;
}

// `name`: "between processes".
static jpp_status_t* check_speed(const char* name, const jpp_link_speed_t* speed) {
  if (jpp__machine_takes(speed->latency) && jpp__machine_takes(speed->bandwidth)) {
    return NULL;
  }
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "machine: link %s: expected latency and bandwidth from 0 to %g, "
                         "found %g and %g",
                         name, JPP_LONGEST_TIME, speed->latency, speed->bandwidth);
}

// Only one thread can issue the runs of a device.
static jpp_status_t* check_devices(const jpp_machine_t* machine, uint32_t ranks,
                                   jpp_arena_t* arena) {
  uint32_t* first = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &first));
  for (uint32_t r = 0; r < ranks; ++r) first[r] = JPP_NONE;
  for (uint32_t r = 0; r < ranks; ++r) {
    uint32_t* of_device = &first[machine->rank_device[r]];
    if (*of_device == JPP_NONE) *of_device = r;
    if (machine->rank_process[r] == machine->rank_process[*of_device]) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: expected ranks %u and %u, which share device %u, in "
                           "one process, found processes %u and %u",
                           *of_device, r, machine->rank_device[r],
                           machine->rank_process[*of_device], machine->rank_process[r]);
  }
  return NULL;
}

static jpp_status_t* check_hosts(const jpp_machine_t* machine, uint32_t ranks,
                                 jpp_arena_t* arena) {
  uint32_t* first = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &first));
  for (uint32_t r = 0; r < ranks; ++r) first[r] = JPP_NONE;
  for (uint32_t r = 0; r < ranks; ++r) {
    uint32_t* of_process = &first[machine->rank_process[r]];
    if (*of_process == JPP_NONE) *of_process = r;
    if (machine->rank_host[r] == machine->rank_host[*of_process]) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: expected ranks %u and %u of process %u on one host, "
                           "found hosts %u and %u",
                           *of_process, r, machine->rank_process[r],
                           machine->rank_host[*of_process], machine->rank_host[r]);
  }
  return NULL;
}

// Fitted on two cores of an AMD EPYC: of the values 1, 1.25, 1.5, 1.75 and 2, this one
// predicted three steps of matrix products (d=128) best from trials of two microbatches.
// For attention, 1 fitted better.
static const double kThreadsOfDevice = 1.5;

static double default_threads(const jpp_machine_t* machine) {
  uint32_t devices = machine->devices_per_rank ? machine->devices_per_rank : 1;
  uint32_t own = machine->cores / machine->processes;
  double wanted = kThreadsOfDevice * devices;
  return wanted < own ? wanted : own ? own : 1;
}

jpp_status_t* jpp__machine_complete(const jpp_machine_t* machine, uint32_t ranks,
                                    jpp_arena_t* arena, jpp_machine_t* out_machine) {
  *out_machine = (jpp_machine_t){.struct_size = sizeof(*out_machine)};
  if (machine) {
    JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_machine_t, links, machine, out_machine));
  }
  if (!out_machine->processes) out_machine->processes = 1;
  if (out_machine->processes > ranks) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: expected at most %u processes, one a rank, found %u",
                           ranks, out_machine->processes);
  }
  if (out_machine->threads == 0) out_machine->threads = default_threads(out_machine);
  if (!jpp__machine_takes(out_machine->call)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: expected a time from 0 to %g as call, found %g",
                           JPP_LONGEST_TIME, out_machine->call);
  }
  if (!(out_machine->threads > 0 && out_machine->threads <= kMostThreads)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "machine: expected threads of a run from 0 to %g, found %g",
                           kMostThreads, out_machine->threads);
  }
  JPP_RETURN_IF_ERROR(fill_list(ranks, 1, arena, &out_machine->rank_host));
  JPP_RETURN_IF_ERROR(
      fill_list(ranks, out_machine->processes, arena, &out_machine->rank_process));
  JPP_RETURN_IF_ERROR(fill_list(ranks, ranks, arena, &out_machine->rank_device));
  JPP_RETURN_IF_ERROR(check_list("host", out_machine->rank_host, ranks));
  JPP_RETURN_IF_ERROR(check_list("process", out_machine->rank_process, ranks));
  JPP_RETURN_IF_ERROR(check_list("device", out_machine->rank_device, ranks));
  JPP_RETURN_IF_ERROR(check_devices(out_machine, ranks, arena));
  JPP_RETURN_IF_ERROR(check_hosts(out_machine, ranks, arena));
  JPP_RETURN_IF_ERROR(check_speed("to host memory", &out_machine->host));
  // With one process, no link has this speed.
  JPP_RETURN_IF_ERROR(check_speed("between processes", &out_machine->link));
  JPP_RETURN_IF_ERROR(fill_links(out_machine, ranks, arena));
  return check_links(out_machine->links, ranks);
}
