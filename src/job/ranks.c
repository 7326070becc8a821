// Divides the ranks of a mesh among the processes of a job, and refuses divisions under
// which a step could not run.
#include "base/alloc.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "jaxpp/job_ranks.h"

static const uint32_t* owners_of(const jpp_job_mesh_t* mesh, uint32_t rank) {
  return mesh->owners + (size_t)rank * mesh->rank_size;
}

// Whether device `place` is the first device of its process in the rank.
static bool is_first(const uint32_t* owners, uint32_t place) {
  for (uint32_t i = 0; i < place; ++i) {
    if (owners[i] == owners[place]) return false;
  }
  return true;
}

static bool has_process(const jpp_job_mesh_t* mesh, uint32_t rank, uint32_t process) {
  for (uint32_t i = 0; i < mesh->rank_size; ++i) {
    if (owners_of(mesh, rank)[i] == process) return true;
  }
  return false;
}

static uint32_t count_processes(const jpp_job_mesh_t* mesh, uint32_t rank) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < mesh->rank_size; ++i)
    count += is_first(owners_of(mesh, rank), i);
  return count;
}

// Whether two processes have the same positions, each in its own rank.
static bool has_same_places(const jpp_job_mesh_t* mesh, uint32_t rank, uint32_t process,
                            uint32_t other_rank, uint32_t other) {
  for (uint32_t i = 0; i < mesh->rank_size; ++i) {
    bool here = owners_of(mesh, rank)[i] == process;
    if (here != (owners_of(mesh, other_rank)[i] == other)) return false;
  }
  return true;
}

// --- Errors ---------------------------------------------------------------------------

static void append_number(jpp_str_t* str, bool* first, uint32_t number) {
  jpp_str_appendf(str, *first ? "%u" : ", %u", number);
  *first = false;
}

static void append_places(const jpp_job_mesh_t* mesh, uint32_t rank, uint32_t process,
                          jpp_str_t* str) {
  bool first = true;
  jpp_str_append(str, "[");
  for (uint32_t i = 0; i < mesh->rank_size; ++i) {
    if (owners_of(mesh, rank)[i] == process) append_number(str, &first, i);
  }
  jpp_str_append(str, "]");
}

static void append_owners(const jpp_job_mesh_t* mesh, uint32_t rank, jpp_str_t* str) {
  bool first = true;
  jpp_str_append(str, "[");
  for (uint32_t i = 0; i < mesh->rank_size; ++i) {
    append_number(str, &first, owners_of(mesh, rank)[i]);
  }
  jpp_str_append(str, "]");
}

// Appends the processes in ascending order.
static void append_processes(const jpp_job_mesh_t* mesh, uint32_t rank, jpp_str_t* str) {
  const uint32_t* owners = owners_of(mesh, rank);
  bool first = true;
  int64_t last = -1;
  jpp_str_append(str, "[");
  for (uint32_t k = 0; k < count_processes(mesh, rank); ++k) {
    int64_t next = INT64_MAX;
    for (uint32_t i = 0; i < mesh->rank_size; ++i) {
      if (owners[i] > last && owners[i] < next) next = owners[i];
    }
    append_number(str, &first, (uint32_t)next);
    last = next;
  }
  jpp_str_append(str, "]");
}

static jpp_status_t* refuse(jpp_str_t* str) {
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(str, &text));
  jpp_status_t* status = jpp_status_make(JPP_UNSUPPORTED, "%s", text);
  jpp_free(text);
  return status;
}

static jpp_status_t* refuse_span(const jpp_job_mesh_t* mesh, uint32_t rank) {
  jpp_str_t str = {0};
  if (mesh->on_cpu) {
    jpp_str_appendf(
        &str, "rank %u: expected its devices in one process, found them in processes ",
        rank);
    append_processes(mesh, rank, &str);
    jpp_str_append(&str, "; build the mesh so that each process has whole ranks");
    return refuse(&str);
  }
  jpp_str_appendf(&str, "rank %u: its devices are in processes ", rank);
  append_processes(mesh, rank, &str);
  jpp_str_append(
      &str,
      " and shared with other ranks, whose order of execution each process would choose "
      "independently; expected ranks_per_device=1, or whole ranks in each process");
  return refuse(&str);
}

static jpp_status_t* refuse_places(const jpp_job_mesh_t* mesh, uint32_t rank,
                                   uint32_t first_rank, uint32_t process) {
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "rank %u: expected the devices of process %u at positions ", rank,
                  process);
  append_places(mesh, first_rank, process, &str);
  jpp_str_append(&str, ", as in its other ranks, found them at ");
  append_places(mesh, rank, process, &str);
  jpp_str_append(&str,
                 "; build the mesh so that each process has the same positions in all of "
                 "its ranks");
  return refuse(&str);
}

static jpp_status_t* refuse_split(const jpp_job_mesh_t* mesh, uint32_t rank) {
  jpp_str_t str = {0};
  jpp_str_appendf(&str,
                  "rank %u: expected its devices to be split among processes like rank "
                  "0's, processes ",
                  rank);
  append_owners(mesh, 0, &str);
  jpp_str_append(&str, ", found processes ");
  append_owners(mesh, rank, &str);
  jpp_str_append(&str,
                 "; build the mesh so that each process's positions match one process in "
                 "every other rank");
  return refuse(&str);
}

static jpp_status_t* refuse_order(const jpp_job_mesh_t* mesh, uint32_t process) {
  jpp_str_t str = {0};
  bool first = true;
  jpp_str_appendf(&str,
                  "process %u: expected devices of one rank or of all %u, because ranks "
                  "span processes, found devices of ranks [",
                  process, mesh->num_ranks);
  for (uint32_t r = 0; r < mesh->num_ranks; ++r) {
    if (has_process(mesh, r, process)) append_number(&str, &first, r);
  }
  jpp_str_append(&str, "]; build the mesh so that each process has one rank, or all");
  return refuse(&str);
}

// --- Checks ---------------------------------------------------------------------------

static jpp_status_t* check_span(const jpp_job_mesh_t* mesh, bool* out_spans) {
  for (uint32_t r = 0; r < mesh->num_ranks; ++r) {
    if (count_processes(mesh, r) < 2) continue;
    *out_spans = true;
    if (mesh->on_cpu || mesh->shares_devices) return refuse_span(mesh, r);
  }
  return NULL;
}

// Each process has the same positions in all of its ranks.
static jpp_status_t* check_places(const jpp_job_mesh_t* mesh) {
  for (uint32_t r = 0; r < mesh->num_ranks; ++r) {
    for (uint32_t i = 0; i < mesh->rank_size; ++i) {
      uint32_t process = owners_of(mesh, r)[i];
      if (!is_first(owners_of(mesh, r), i)) continue;
      uint32_t first = 0;
      while (!has_process(mesh, first, process)) ++first;
      if (!has_same_places(mesh, r, process, first, process)) {
        return refuse_places(mesh, r, first, process);
      }
    }
  }
  return NULL;
}

// The process of a rank that has the same positions as another rank's process, or
// JPP_NONE.
static uint32_t find_counterpart(const jpp_job_mesh_t* mesh, uint32_t rank,
                                 uint32_t other_rank, uint32_t other) {
  for (uint32_t i = 0; i < mesh->rank_size; ++i) {
    uint32_t process = owners_of(mesh, rank)[i];
    if (has_same_places(mesh, rank, process, other_rank, other)) return process;
  }
  return UINT32_MAX;
}

static jpp_status_t* check_split(const jpp_job_mesh_t* mesh) {
  for (uint32_t r = 1; r < mesh->num_ranks; ++r) {
    for (uint32_t i = 0; i < mesh->rank_size; ++i) {
      uint32_t process = owners_of(mesh, r)[i];
      if (find_counterpart(mesh, 0, r, process) == UINT32_MAX) {
        return refuse_split(mesh, r);
      }
    }
  }
  return NULL;
}

// Processes that share ranks must execute their tasks in the same order, or collectives
// could wait for each other. The order is fixed within a rank, and among ranks if all
// transfers stay in a process; otherwise it depends on the order in which messages
// arrive.
static jpp_status_t* check_order(const jpp_job_mesh_t* mesh) {
  for (size_t i = 0; i < (size_t)mesh->num_ranks * mesh->rank_size; ++i) {
    uint32_t ranks = 0;
    for (uint32_t r = 0; r < mesh->num_ranks; ++r) {
      ranks += has_process(mesh, r, mesh->owners[i]);
    }
    if (ranks > 1 && ranks < mesh->num_ranks) return refuse_order(mesh, mesh->owners[i]);
  }
  return NULL;
}

static jpp_status_t* check_mesh(const jpp_job_mesh_t* mesh, bool* out_spans) {
  *out_spans = false;
  JPP_RETURN_IF_ERROR(check_span(mesh, out_spans));
  JPP_RETURN_IF_ERROR(check_places(mesh));
  JPP_RETURN_IF_ERROR(check_split(mesh));
  return *out_spans ? check_order(mesh) : NULL;
}

// --- The part of a process ------------------------------------------------------------

static jpp_status_t* fill_part(const jpp_job_mesh_t* mesh, uint32_t process,
                               jpp_job_part_t* part) {
  uint32_t rank = 0;
  while (rank < mesh->num_ranks && !has_process(mesh, rank, process)) ++rank;
  if (rank == mesh->num_ranks) {
    rank = 0;
    process = mesh->owners[0];
  }
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(mesh->num_ranks, &part->rank_process));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(mesh->rank_size, &part->places));
  for (uint32_t r = 0; r < mesh->num_ranks; ++r) {
    part->rank_process[part->num_ranks++] = find_counterpart(mesh, r, rank, process);
  }
  for (uint32_t i = 0; i < mesh->rank_size; ++i) {
    if (owners_of(mesh, rank)[i] == process) part->places[part->num_places++] = i;
  }
  return NULL;
}

jpp_status_t* jpp_job_divide_ranks(const jpp_job_mesh_t* mesh, uint32_t process,
                                   jpp_job_part_t* out_part) {
  JPP_RETURN_IF_NULL(mesh, out_part);
  *out_part = (jpp_job_part_t){0};
  jpp_job_mesh_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_job_mesh_t, shares_devices, mesh, &full));
  const jpp_job_mesh_t* checked = &full;
  JPP_RETURN_IF_NULL(checked->owners);
  if (!full.num_ranks || !full.rank_size) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "expected a mesh with devices");
  }
  bool spans = false;
  JPP_RETURN_IF_ERROR(check_mesh(&full, &spans));
  jpp_status_t* status = fill_part(&full, process, out_part);
  if (status) jpp_job_part_free(out_part);
  out_part->spans = spans;
  return status;
}

void jpp_job_part_free(jpp_job_part_t* part) {
  if (!part) return;
  jpp_free(part->rank_process);
  jpp_free(part->places);
  *part = (jpp_job_part_t){0};
}
