// Puts all task runs of a step into one order: tasks outside the loops in the order of
// the partition, and tasks of a loop by the times of its schedule.
#include <stdlib.h>

#include "program/builder.h"

static jpp_status_t* push_event(jpp_program_builder_t* b, uint32_t task,
                                uint32_t microbatch, bool is_end) {
  jpp_event_item_t item = {.task = task, .microbatch = microbatch, .is_end = is_end};
  return JPP_VEC_PUSH(&b->events, item);
}

static bool has_kind(const jpp_schedule_t* schedule, jpp_task_kind_t first,
                     jpp_task_kind_t last) {
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      uint8_t kind = schedule->rows[r].tasks[i].kind;
      if (kind >= first && kind <= last) return true;
    }
  }
  return false;
}

static jpp_status_t* check_backward(const jpp_staged_loop_t* staged, const char* where,
                                    const jpp_schedule_t* schedule) {
  if (!staged->has_backward) return NULL;
  if (!has_kind(schedule, JPP_TASK_BWD, JPP_TASK_BWD_W)) {
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "loop at %s has a backward pass, but its schedule '%s' runs "
                           "none: every gradient would keep its initial value",
                           where, schedule->name);
  }
  if (staged->split_backward || !has_kind(schedule, JPP_TASK_BWD_I, JPP_TASK_BWD_W)) {
    return NULL;
  }
  return jpp_status_make(JPP_SCHEDULE_ERROR,
                         "loop at %s was partitioned with whole backwards, but its "
                         "schedule '%s' runs input and weight gradients separately",
                         where, schedule->name);
}

static jpp_status_t* check_placement(const jpp_staged_loop_t* staged, const char* where,
                                     const jpp_schedule_t* schedule) {
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    if (schedule->stage_rank[s] == staged->stage_rank[s]) continue;
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "loop at %s was partitioned with stage %u on rank %u, but its "
                           "schedule '%s' puts it on %u",
                           where, s, staged->stage_rank[s], schedule->name,
                           schedule->stage_rank[s]);
  }
  return NULL;
}

static jpp_status_t* check_schedule(const jpp_program_builder_t* b, uint32_t loop,
                                    const jpp_schedule_t* schedule) {
  const jpp_staged_loop_t* staged = &b->staged->loops[loop];
  const jpp_loop_t* graph = &b->staged->graph->loops[loop];
  const char* where = graph->where ? graph->where : "?";
  if (schedule->microbatches != graph->microbatches) {
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "loop at %s has %u microbatches, but its schedule '%s' has %u",
                           where, graph->microbatches, schedule->name,
                           schedule->microbatches);
  }
  if (schedule->stages != staged->stages || schedule->ranks != b->staged->ranks) {
    return jpp_status_make(JPP_MESH_ERROR,
                           "loop at %s was partitioned for %u stages on %u ranks, but "
                           "its schedule '%s' has %u on %u",
                           where, staged->stages, b->staged->ranks, schedule->name,
                           schedule->stages, schedule->ranks);
  }
  JPP_RETURN_IF_ERROR(check_placement(staged, where, schedule));
  return check_backward(staged, where, schedule);
}

// The first staged task of a schedule's entry; JPP_NONE if it has none.
static uint32_t first_of_entry(const jpp_staged_loop_t* loop,
                               const jpp_schedule_task_t* entry) {
  if (entry->kind == JPP_TASK_FWD) return loop->forward[entry->stage];
  if (!loop->has_backward) return JPP_NONE;
  return entry->kind == JPP_TASK_BWD_W ? loop->weight[entry->stage]
                                       : loop->backward[entry->stage];
}

// The staged task of the entry that follows `task`: its next part, or the weight
// gradients after the input gradients; JPP_NONE after the last one.
static uint32_t next_of_entry(const jpp_staged_t* staged, const jpp_staged_loop_t* loop,
                              const jpp_schedule_task_t* entry, uint32_t task) {
  const jpp_task_t* at = &staged->tasks[task];
  if (at->next_part != JPP_NONE) return at->next_part;
  bool split = entry->kind == JPP_TASK_BWD && at->kind == JPP_TASK_BWD_I;
  return split ? loop->weight[entry->stage] : JPP_NONE;
}

static int compare_ends(const void* a, const void* b) {
  const jpp_schedule_slot_t *x = a, *y = b;
  if (x->end != y->end) return x->end < y->end ? -1 : 1;
  if (x->start != y->start) return x->start < y->start ? -1 : 1;
  if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
  return x->index < y->index ? -1 : x->index > y->index;
}

typedef struct merger {
  jpp_program_builder_t* b;
  const jpp_schedule_t* schedule;
  const jpp_staged_loop_t* loop;
} merger_t;

static jpp_status_t* push_slot(const merger_t* m, const jpp_schedule_slot_t* slot,
                               bool is_end) {
  const jpp_schedule_task_t* entry = &m->schedule->rows[slot->rank].tasks[slot->index];
  const jpp_staged_t* staged = m->b->staged;
  uint32_t task = first_of_entry(m->loop, entry);
  while (task != JPP_NONE) {
    uint32_t next = next_of_entry(staged, m->loop, entry, task);
    // Each task except the last ends when the next one begins.
    if (!is_end || next == JPP_NONE) {
      JPP_RETURN_IF_ERROR(push_event(m->b, task, entry->microbatch, is_end));
    }
    if (!is_end && next != JPP_NONE) {
      JPP_RETURN_IF_ERROR(push_event(m->b, task, entry->microbatch, true));
    }
    task = next;
  }
  return NULL;
}

// Merges beginnings and ends by time, ends first; no end precedes its beginning, because
// both arrays have the same order.
static jpp_status_t* merge_events(const merger_t* m,
                                  const jpp_schedule_timeline_t* timeline,
                                  const jpp_schedule_slot_t* ends) {
  uint64_t begun = 0, ended = 0;
  while (ended < timeline->count) {
    bool all_begun = begun == timeline->count;
    bool end_first =
        all_begun || (ended < begun && ends[ended].end <= timeline->slots[begun].start &&
                      ends[ended].start < timeline->slots[begun].start);
    const jpp_schedule_slot_t* slot =
        end_first ? &ends[ended++] : &timeline->slots[begun++];
    JPP_RETURN_IF_ERROR(push_slot(m, slot, end_first));
  }
  return NULL;
}

static jpp_status_t* order_loop(jpp_program_builder_t* b, uint32_t loop) {
  const jpp_schedule_t* schedule = b->options->schedules[loop];
  JPP_RETURN_IF_ERROR(check_schedule(b, loop, schedule));
  jpp_schedule_timeline_t* timeline = NULL;
  JPP_RETURN_IF_ERROR(jpp_schedule_timeline(schedule, NULL, &timeline));
  jpp_schedule_slot_t* ends = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(timeline->count, &ends);
  if (!status) {
    for (uint64_t i = 0; i < timeline->count; ++i) ends[i] = timeline->slots[i];
    qsort(ends, timeline->count, sizeof(*ends), compare_ends);
    merger_t merger = {.b = b, .schedule = schedule, .loop = &b->staged->loops[loop]};
    status = merge_events(&merger, timeline, ends);
  }
  jpp_free(ends);
  jpp_schedule_timeline_destroy(timeline);
  return status;
}

// The partition lists the tasks outside the loops in an order in which they can run,
// except that a divided task runs where its first part is.
static jpp_status_t* order_phase(jpp_program_builder_t* b, uint32_t phase,
                                 const bool* is_later_part) {
  const jpp_task_t* tasks = b->staged->tasks;
  for (uint32_t t = 0; t < b->staged->num_tasks; ++t) {
    if (tasks[t].kind != JPP_TASK_OUTER || tasks[t].phase != phase) continue;
    if (is_later_part[t]) continue;
    for (uint32_t part = t; part != JPP_NONE; part = tasks[part].next_part) {
      JPP_RETURN_IF_ERROR(push_event(b, part, JPP_NONE, false));
      JPP_RETURN_IF_ERROR(push_event(b, part, JPP_NONE, true));
    }
  }
  return NULL;
}

static jpp_status_t* order_all(jpp_program_builder_t* b, const bool* is_later_part) {
  uint32_t loops = b->staged->graph->num_loops;
  for (uint32_t loop = 0; loop < loops; ++loop) {
    JPP_RETURN_IF_ERROR(order_phase(b, loop, is_later_part));
    JPP_RETURN_IF_ERROR(order_loop(b, loop));
  }
  return order_phase(b, loops, is_later_part);
}

jpp_status_t* jpp__program_order(jpp_program_builder_t* b) {
  bool* is_later_part = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(b->staged->num_tasks, &is_later_part));
  for (uint32_t t = 0; t < b->staged->num_tasks; ++t) {
    uint32_t next = b->staged->tasks[t].next_part;
    if (next != JPP_NONE) is_later_part[next] = true;
  }
  jpp_status_t* status = order_all(b, is_later_part);
  jpp_free(is_later_part);
  return status;
}
