// The dry run with times: computes the start of each task, then merges the rows, which
// are sorted, into one list with a heap of ranks.
#include "base/null.h"
#include "base/struct_size.h"
#include "schedule/order.h"
#include "schedule/schedule.h"

// A heap of ranks: at its top the rank whose next task starts first, or the lowest of
// these.
typedef struct merge {
  const jpp_schedule_t* schedule;
  uint64_t* const* start;  // [ranks][row count]
  uint32_t* next;          // [ranks] the next entry that the rank contributes
  uint32_t* heap;
  uint32_t count;
} merge_t;

static bool goes_first(const merge_t* merge, uint32_t a, uint32_t b) {
  uint64_t start_a = merge->start[a][merge->next[a]];
  uint64_t start_b = merge->start[b][merge->next[b]];
  return start_a < start_b || (start_a == start_b && a < b);
}

static void sift_down(merge_t* merge, uint32_t hole) {
  uint32_t rank = merge->heap[hole];
  for (;;) {
    uint32_t child = 2 * hole + 1;
    if (child >= merge->count) break;
    if (child + 1 < merge->count &&
        goes_first(merge, merge->heap[child + 1], merge->heap[child])) {
      ++child;
    }
    if (!goes_first(merge, merge->heap[child], rank)) break;
    merge->heap[hole] = merge->heap[child];
    hole = child;
  }
  merge->heap[hole] = rank;
}

static bool skip_idle(merge_t* merge, uint32_t rank) {
  const jpp_schedule_row_t* row = &merge->schedule->rows[rank];
  uint32_t* next = &merge->next[rank];
  while (*next < row->count && row->tasks[*next].kind == JPP_TASK_IDLE) ++*next;
  return *next < row->count;
}

static void merge_rows(merge_t* merge, uint64_t* const* end, jpp_schedule_slot_t* slots,
                       jpp_schedule_timeline_t* timeline) {
  for (uint32_t rank = 0; rank < merge->schedule->ranks; ++rank) {
    if (skip_idle(merge, rank)) merge->heap[merge->count++] = rank;
  }
  for (uint32_t i = merge->count / 2; i-- > 0;) sift_down(merge, i);
  while (merge->count) {
    uint32_t rank = merge->heap[0];
    uint32_t entry = merge->next[rank]++;
    slots[timeline->count++] =
        (jpp_schedule_slot_t){rank, entry, merge->start[rank][entry], end[rank][entry]};
    if (end[rank][entry] > timeline->length) timeline->length = end[rank][entry];
    if (!skip_idle(merge, rank)) merge->heap[0] = merge->heap[--merge->count];
    if (merge->count) sift_down(merge, 0);
  }
}

static jpp_status_t* allocate_times(jpp_schedule_order_t* order, jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = order->index->schedule;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &order->start));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &order->end));
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    uint32_t count = schedule->rows[rank].count;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, count, &order->start[rank]));
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, count, &order->end[rank]));
  }
  return NULL;
}

static uint64_t count_tasks(const jpp_schedule_t* schedule) {
  uint64_t count = 0;
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    const jpp_schedule_row_t* row = &schedule->rows[rank];
    for (uint32_t i = 0; i < row->count; ++i)
      count += row->tasks[i].kind != JPP_TASK_IDLE;
  }
  return count;
}

static jpp_status_t* timeline_fill(const jpp_schedule_t* schedule, bool fused_as_one,
                                   jpp_arena_t* scratch,
                                   jpp_timeline_storage_t* storage) {
  jpp_schedule_index_t index;
  JPP_RETURN_IF_ERROR(jpp__schedule_index_create(schedule, scratch, &index));
  jpp_schedule_order_t order = {.index = &index, .fused_as_one = fused_as_one};
  JPP_RETURN_IF_ERROR(allocate_times(&order, scratch));
  JPP_RETURN_IF_ERROR(jpp__schedule_order_run(&order, scratch));
  merge_t merge = {.schedule = schedule, .start = order.start};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &merge.next));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &merge.heap));
  jpp_schedule_slot_t* slots = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&storage->arena, count_tasks(schedule), &slots));
  storage->timeline.slots = slots;
  merge_rows(&merge, order.end, slots, &storage->timeline);
  return NULL;
}

jpp_status_t* jpp_schedule_timeline(const jpp_schedule_t* schedule,
                                    const jpp_schedule_timeline_options_t* options,
                                    jpp_schedule_timeline_t** out_timeline) {
  JPP_RETURN_IF_NULL(schedule, out_timeline);
  jpp_schedule_timeline_options_t full = {.struct_size = sizeof(full)};
  *out_timeline = NULL;
  if (options) {
    JPP_RETURN_IF_ERROR(
        JPP_OPTIONS_COPY(jpp_schedule_timeline_options_t, fused_as_one, options, &full));
  }
  jpp_timeline_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = timeline_fill(schedule, full.fused_as_one, &scratch, storage);
  jpp__arena_deinit(&scratch);
  if (status) {
    jpp_schedule_timeline_destroy(&storage->timeline);
    return status;
  }
  *out_timeline = &storage->timeline;
  return NULL;
}

void jpp_schedule_timeline_destroy(jpp_schedule_timeline_t* timeline) {
  if (!timeline) return;
  jpp_timeline_storage_t* storage = (jpp_timeline_storage_t*)timeline;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}
