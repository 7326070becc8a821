// The counterexample of a schedule that deadlocks.
#include "base/str.h"
#include "schedule/order.h"

enum { kLongestListing = 9 };  // longer cycles are cut in the middle

// A rank stands still at `task`, which needs `need`.
typedef struct wait {
  jpp_schedule_task_t task;
  jpp_schedule_task_t need;
} wait_t;

typedef struct search {
  const jpp_schedule_order_t* order;
  uint32_t* distance;  // [ranks], from the rank the search began at; UINT32_MAX: not seen
  uint32_t* parent;    // [ranks]
  uint32_t* queue;     // [ranks]
} search_t;

static uint32_t need_rank(const search_t* search, const jpp_schedule_task_t* need) {
  return search->order->index->schedule->stage_rank[need->stage];
}

// The n-th thing that the first task (or FusedTask) of a stopped rank waits for.
static bool nth_wait(const jpp_schedule_order_t* order, uint32_t rank, uint32_t n,
                     wait_t* out_wait) {
  const jpp_schedule_row_t* row = &order->index->schedule->rows[rank];
  uint32_t begin = order->done[rank];
  if (begin == row->count) return false;
  uint32_t end = order->fused_as_one ? jpp_row_unit_end(row, begin) : begin + 1;
  for (uint32_t i = begin; i < end; ++i) {
    jpp_task_needs_t needs = jpp_task_needs(order->index, &row->tasks[i]);
    for (uint32_t k = 0; k < needs.count; ++k) {
      const jpp_schedule_task_t* need = &needs.tasks[k];
      const uint32_t* entry = jpp_schedule_index_entry(order->index, jpp_task_slot(need),
                                                       need->stage, need->microbatch);
      bool own = order->index->schedule->stage_rank[need->stage] == rank;
      bool in_unit = own && *entry > begin && *entry <= i;
      if (in_unit || jpp_schedule_order_ran(order, need) || n-- > 0) continue;
      *out_wait = (wait_t){row->tasks[i], *need};
      return true;
    }
  }
  return false;
}

// Breadth first from `from` back to it. Returns the length of the cycle and the last rank
// on it, or UINT32_MAX.
static uint32_t shortest_cycle_from(search_t* search, uint32_t from, uint32_t* out_last) {
  uint32_t ranks = search->order->index->schedule->ranks;
  for (uint32_t rank = 0; rank < ranks; ++rank) search->distance[rank] = UINT32_MAX;
  uint32_t head = 0, tail = 0;
  search->distance[from] = 0;
  search->queue[tail++] = from;
  while (head < tail) {
    uint32_t rank = search->queue[head++];
    wait_t wait;
    for (uint32_t n = 0; nth_wait(search->order, rank, n, &wait); ++n) {
      uint32_t next = need_rank(search, &wait.need);
      if (next == from) {
        *out_last = rank;
        return search->distance[rank] + 1;
      }
      if (search->distance[next] != UINT32_MAX) continue;
      search->distance[next] = search->distance[rank] + 1;
      search->parent[next] = rank;
      search->queue[tail++] = next;
    }
  }
  return UINT32_MAX;
}

// Leaves the cycle's ranks in `queue`, in the order in which they wait for each other.
static uint32_t shortest_cycle(search_t* search) {
  uint32_t ranks = search->order->index->schedule->ranks;
  uint32_t best = UINT32_MAX, best_from = 0, last = 0;
  for (uint32_t rank = 0; rank < ranks && best > 1; ++rank) {
    uint32_t length = shortest_cycle_from(search, rank, &last);
    if (length < best) {
      best = length;
      best_from = rank;
    }
  }
  shortest_cycle_from(search, best_from, &last);
  for (uint32_t i = best; i-- > 0;) {
    search->queue[i] = last;
    last = search->parent[last];
  }
  return best;
}

// Why `rank` waits for `next`.
static wait_t wait_for(const search_t* search, uint32_t rank, uint32_t next) {
  wait_t wait = {0};
  for (uint32_t n = 0; nth_wait(search->order, rank, n, &wait); ++n) {
    if (need_rank(search, &wait.need) == next) break;
  }
  return wait;
}

static uint32_t entry_of(const search_t* search, const jpp_schedule_task_t* task) {
  return *jpp_schedule_index_entry(search->order->index, jpp_task_slot(task), task->stage,
                                   task->microbatch) -
         1;
}

static void print_own_wait(const search_t* search, jpp_str_t* str) {
  uint32_t rank = search->queue[0];
  wait_t wait = wait_for(search, rank, rank);
  char task[JPP_TASK_NAME_SIZE], need[JPP_TASK_NAME_SIZE];
  jpp_task_name(&wait.task, task);
  jpp_task_name(&wait.need, need);
  jpp_str_appendf(str,
                  "schedule deadlocks: rank %u lists %s (entry %u) before %s (entry %u), "
                  "which it needs; put %s first",
                  rank, task, entry_of(search, &wait.task), need,
                  entry_of(search, &wait.need), need);
}

static void print_wait(const search_t* search, uint32_t rank, uint32_t next,
                       jpp_str_t* str) {
  wait_t wait = wait_for(search, rank, next);
  char task[JPP_TASK_NAME_SIZE], need[JPP_TASK_NAME_SIZE];
  jpp_str_appendf(str,
                  "\n  rank %u stops at %s (entry %u): it needs %s of rank %u (entry %u)",
                  rank, jpp_task_name(&wait.task, task), entry_of(search, &wait.task),
                  jpp_task_name(&wait.need, need), next, entry_of(search, &wait.need));
}

// How late a task comes in the chain of its microbatch: all forwards, then all backwards.
static uint64_t chain_depth(const search_t* search, const jpp_schedule_task_t* task) {
  uint64_t stages = search->order->index->schedule->stages;
  return task->kind == JPP_TASK_FWD ? task->stage : 2 * stages - task->stage;
}

// Whether `late` needs `early`, directly or through others. Nothing needs a BWD_W.
static bool depends(const search_t* search, const jpp_schedule_task_t* late,
                    const jpp_schedule_task_t* early) {
  return late->microbatch == early->microbatch && early->kind != JPP_TASK_BWD_W &&
         chain_depth(search, early) <= chain_depth(search, late);
}

// A task that can be moved ahead of the one its rank stops at. There is one on every
// cycle: needs alone do not form a cycle.
static void print_hint(const search_t* search, uint32_t length, jpp_str_t* str) {
  if (search->order->fused_as_one) {
    jpp_str_append(str, "\nto break this cycle, take a FusedTask on it apart");
    return;
  }
  for (uint32_t i = 0; i < length; ++i) {
    uint32_t rank = search->queue[(i + 1) % length];
    wait_t asked = wait_for(search, search->queue[i], rank);
    wait_t stopped = wait_for(search, rank, search->queue[(i + 2) % length]);
    if (depends(search, &asked.need, &stopped.task)) continue;
    char need[JPP_TASK_NAME_SIZE], task[JPP_TASK_NAME_SIZE];
    jpp_str_appendf(
        str, "\nto break this cycle, let for example rank %u run %s before %s", rank,
        jpp_task_name(&asked.need, need), jpp_task_name(&stopped.task, task));
    return;
  }
}

static void print_cycle(const search_t* search, uint32_t length, jpp_str_t* str) {
  jpp_str_appendf(
      str, "schedule deadlocks: %u ranks wait for each other%s", length,
      search->order->fused_as_one ? " (each FusedTask taken as one task)" : "");
  for (uint32_t i = 0; i < length; ++i) {
    if (length > kLongestListing && i == kLongestListing - 1) {
      jpp_str_appendf(str, "\n  ... and so on over %u more ranks ...",
                      length - kLongestListing);
      i = length - 1;
    }
    print_wait(search, search->queue[i], search->queue[(i + 1) % length], str);
  }
  print_hint(search, length, str);
}

jpp_status_t* jpp_schedule_deadlock(const jpp_schedule_order_t* order,
                                    jpp_arena_t* scratch) {
  uint32_t ranks = order->index->schedule->ranks;
  search_t search = {.order = order};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &search.distance));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &search.parent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &search.queue));
  uint32_t length = shortest_cycle(&search);
  if (length == UINT32_MAX) {
    return jpp_status_make(JPP_INTERNAL_ERROR, "schedule %s stops without a cycle",
                           order->index->schedule->name);
  }
  jpp_str_t str = {0};
  if (length == 1) {
    print_own_wait(&search, &str);
  } else {
    print_cycle(&search, length, &str);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(JPP_SCHEDULE_ERROR, "%s", text);
  jpp_free(text);
  return status;
}
