// Counts along each row how many activations a rank keeps at once, and checks the peak
// against a memory limit.
#include "base/alloc.h"
#include "base/null.h"
#include "schedule/index.h"

static bool is_forward_only(const jpp_schedule_t* schedule) {
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    const jpp_schedule_row_t* row = &schedule->rows[rank];
    for (uint32_t i = 0; i < row->count; ++i) {
      if (row->tasks[i].kind > JPP_TASK_FWD) return false;
    }
  }
  return true;
}

static uint32_t row_peak(const jpp_schedule_row_t* row, bool forward_only) {
  uint32_t live = 0, peak = 0;
  for (uint32_t i = 0; i < row->count; ++i) {
    switch (row->tasks[i].kind) {
      case JPP_TASK_FWD:
        if (++live > peak) peak = live;
        if (forward_only) --live;
        break;
      case JPP_TASK_BWD:
      case JPP_TASK_BWD_W:
        if (live) --live;
        break;
      default:
        break;
    }
  }
  return peak;
}

jpp_status_t* jpp_schedule_peak_microbatches(const jpp_schedule_t* schedule,
                                             uint32_t count, uint32_t* out_peaks) {
  JPP_RETURN_IF_NULL(schedule, out_peaks);
  JPP_RETURN_IF_ERROR(jpp__check_count("the peaks of the ranks", schedule->ranks, count));
  bool forward_only = is_forward_only(schedule);
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    out_peaks[rank] = row_peak(&schedule->rows[rank], forward_only);
  }
  return NULL;
}

// The rank that keeps the most activations, and their number.
static jpp_status_t* find_peak(const jpp_schedule_t* schedule, uint32_t* out_rank,
                               uint32_t* out_peak) {
  uint32_t* peaks = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(schedule->ranks, &peaks));
  jpp_status_t* status = jpp_schedule_peak_microbatches(schedule, schedule->ranks, peaks);
  *out_rank = 0;
  for (uint32_t r = 1; r < schedule->ranks; ++r) {
    if (peaks[r] > peaks[*out_rank]) *out_rank = r;
  }
  *out_peak = peaks[*out_rank];
  jpp_free(peaks);
  return status;
}

// The forward at which the row first keeps `peak` activations.
static uint32_t peak_entry(const jpp_schedule_row_t* row, uint32_t peak) {
  uint32_t kept = 0;
  for (uint32_t i = 0; i < row->count; ++i) {
    uint8_t kind = row->tasks[i].kind;
    if (kind == JPP_TASK_FWD && ++kept == peak) return i;
    if ((kind == JPP_TASK_BWD || kind == JPP_TASK_BWD_W) && kept) --kept;
  }
  return 0;
}

// The built-in schedule of these sizes that keeps the fewest activations.
static jpp_status_t* find_smallest(const jpp_schedule_t* schedule, const char** out_name,
                                   uint32_t* out_peak) {
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = schedule->stages,
                                  .ranks = schedule->ranks,
                                  .microbatches = schedule->microbatches};
  *out_name = NULL;
  *out_peak = UINT32_MAX;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const char* name = jpp_schedule_info_at(i)->name;
    jpp_schedule_t* other = NULL;
    jpp_status_t* status = jpp_schedule_build(name, &params, &other);
    if (jpp_schedule_is_misfit(status)) {
      jpp_status_free(status);
      continue;
    }
    JPP_RETURN_IF_ERROR(status);
    uint32_t rank, peak = 0;
    status = find_peak(other, &rank, &peak);
    jpp_schedule_destroy(other);
    if (status) return status;
    if (peak < *out_peak) *out_name = name;
    if (peak < *out_peak) *out_peak = peak;
  }
  return NULL;
}

jpp_status_t* jpp_schedule_check_memory(const jpp_schedule_t* schedule,
                                        uint64_t activation_bytes, uint64_t limit) {
  JPP_RETURN_IF_NULL(schedule);
  uint32_t rank, peak = 0, smallest;
  const char* name = NULL;
  JPP_RETURN_IF_ERROR(find_peak(schedule, &rank, &peak));
  unsigned long long bytes = jpp__bytes_multiply(peak, activation_bytes);
  if (bytes <= limit) return NULL;
  JPP_RETURN_IF_ERROR(find_smallest(schedule, &name, &smallest));
  unsigned long long least = jpp__bytes_multiply(smallest, activation_bytes);
  const jpp_schedule_row_t* row = &schedule->rows[rank];
  uint32_t entry = peak_entry(row, peak);
  unsigned long long position = jpp__row_position(row, entry);
  char task[JPP_TASK_NAME_SIZE];
  jpp_task_name(&row->tasks[entry], task);
  if (name && least <= limit) {
    return jpp_status_make(
        JPP_OUT_OF_MEMORY,
        "schedule %s: rank %u keeps %u activations (%llu bytes) at %s "
        "(entry %llu), %llu bytes over the limit of %llu; %s fits with "
        "%llu",
        schedule->name, rank, peak, bytes, task, position, bytes - limit,
        (unsigned long long)limit, name, least);
  }
  return jpp_status_make(JPP_OUT_OF_MEMORY,
                         "schedule %s: rank %u keeps %u activations (%llu bytes) at %s "
                         "(entry %llu), %llu bytes over the limit of %llu; no built-in "
                         "schedule of these sizes fits, more ranks or stages keep less",
                         schedule->name, rank, peak, bytes, task, position, bytes - limit,
                         (unsigned long long)limit);
}
