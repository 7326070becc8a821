// Explains a deadlock by its shortest cycle, found by breadth-first search over the waits
// of the tasks that never start.
#include "base/str.h"
#include "schedule/order.h"

enum { kLongestListing = 9 };  // longer cycles are cut in the middle

// Limit on the tasks examined; beyond it the shortest cycle found so far is reported.
enum { kMostLooks = 1 << 25 };

// A task that never starts, and a task that it needs and that never starts either.
typedef struct wait {
  uint32_t rank, entry;  // of the task
  // The needed task; its rank runs all entries before it first.
  uint32_t need_rank, need_entry;
  uint32_t parent;  // the wait from which the search came here; JPP_NONE: the start
  uint32_t length;  // of the path from the start
} wait_t;

// Breadth-first search over waits: from a task to a task that it needs, and from there to
// all tasks that the needed task's rank runs before. A rank occurs on a shortest cycle at
// most once: if it occurred twice, one of the two paths between the occurrences would be
// a shorter cycle.
typedef struct search {
  const jpp_schedule_order_t* order;
  wait_t* queue;  // [capacity] each adds at least one reachable task
  uint64_t capacity;
  uint64_t tail;
  uint32_t* reach;  // [ranks] entries below this are reachable
  wait_t* cycle;    // [ranks] the shortest cycle so far
  uint32_t length;  // its length; more than the number of ranks: none so far
  uint64_t looks;
} search_t;

static const jpp_schedule_row_t* row_of(const search_t* search, uint32_t rank) {
  return &search->order->index->schedule->rows[rank];
}

static uint32_t unit_begin(const search_t* search, uint32_t rank, uint32_t entry) {
  const jpp_schedule_task_t* tasks = row_of(search, rank)->tasks;
  bool units = search->order->fused_as_one;
  while (units && entry && tasks[entry - 1].joins_next) --entry;
  return entry;
}

static uint32_t unit_end(const search_t* search, uint32_t rank, uint32_t entry) {
  bool units = search->order->fused_as_one;
  return units ? jpp__row_unit_end(row_of(search, rank), entry) : entry + 1;
}

// The cycle that ends with the wait at the tail of the queue.
static void keep_cycle(search_t* search, const wait_t* last) {
  search->length = last->length;
  const wait_t* wait = last;
  for (uint32_t i = last->length; i-- > 0;) {
    search->cycle[i] = *wait;
    if (i) wait = &search->queue[wait->parent];
  }
}

// Adds a wait, unless everything to which it leads is reachable already; `start` is where
// the search began.
static void add_wait(search_t* search, const wait_t* start, const wait_t* wait) {
  if (wait->length >= search->length) return;
  bool closes = wait->need_rank == start->rank && wait->need_entry >= start->entry;
  if (closes) {
    keep_cycle(search, wait);
  } else if (wait->need_entry >= search->reach[wait->need_rank] &&
             search->tail < search->capacity) {
    search->queue[search->tail++] = *wait;
  }
}

// Adds the waits of a task of the unit.
static void add_waits(search_t* search, const wait_t* start, uint32_t rank,
                      uint32_t entry, uint32_t parent, uint32_t length) {
  const jpp_schedule_order_t* order = search->order;
  const jpp_schedule_task_t* task = &row_of(search, rank)->tasks[entry];
  ++search->looks;
  if (task->kind == JPP_TASK_IDLE) return;
  jpp_task_needs_t needs = jpp__task_needs(order->index, task);
  for (uint32_t k = 0; k < needs.count; ++k) {
    const jpp_schedule_task_t* need = &needs.tasks[k];
    if (jpp__schedule_order_ran(order, need)) continue;
    wait_t wait = {.rank = rank, .entry = entry, .parent = parent, .length = length};
    wait.need_rank = order->index->schedule->stage_rank[need->stage];
    wait.need_entry = jpp__schedule_index_entry_of(order->index, need);
    bool in_unit = wait.need_rank == rank && wait.need_entry < entry &&
                   wait.need_entry >= unit_begin(search, rank, entry);
    if (!in_unit) add_wait(search, start, &wait);
  }
}

// Adds the tasks that become reachable through a wait.
static void follow_wait(search_t* search, const wait_t* start, uint32_t at) {
  wait_t wait = search->queue[at];
  uint32_t begin = search->reach[wait.need_rank];
  uint32_t end = unit_end(search, wait.need_rank, wait.need_entry);
  if (end <= begin) return;
  search->reach[wait.need_rank] = end;
  for (uint32_t i = begin; i < end; ++i) {
    add_waits(search, start, wait.need_rank, i, at, wait.length + 1);
  }
}

static void search_from(search_t* search, uint32_t rank, uint32_t begin, uint32_t end) {
  uint32_t ranks = search->order->index->schedule->ranks;
  wait_t start = {.rank = rank, .entry = begin};
  search->tail = 0;
  for (uint32_t r = 0; r < ranks; ++r) search->reach[r] = search->order->done[r];
  search->looks += ranks;
  for (uint32_t i = begin; i < end; ++i) {
    add_waits(search, &start, rank, i, JPP_NONE, 1);
  }
  for (uint32_t head = 0; head < search->tail; ++head) {
    if (search->queue[head].length + 1 >= search->length) return;
    follow_wait(search, &start, head);
  }
}

static bool has_cycle(const search_t* search) {
  return search->length <= search->order->index->schedule->ranks;
}

static bool is_search_over(const search_t* search) {
  if (!has_cycle(search)) return false;
  return search->length == 1 || search->looks > kMostLooks;
}

// Searches from the tasks at which ranks are blocked, which finds some cycle, and then
// from every task that never starts.
static void search_shortest(search_t* search) {
  const jpp_schedule_t* schedule = search->order->index->schedule;
  const uint32_t* done = search->order->done;
  for (uint32_t r = 0; r < schedule->ranks && !is_search_over(search); ++r) {
    if (done[r] == schedule->rows[r].count) continue;
    search_from(search, r, done[r], unit_end(search, r, done[r]));
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    uint32_t next = 0;
    for (uint32_t i = done[r]; i < schedule->rows[r].count && !is_search_over(search);
         i = next) {
      next = unit_end(search, r, i);
      search_from(search, r, i, next);
    }
  }
}

// --- As text --------------------------------------------------------------------------

static const jpp_schedule_task_t* task_of(const search_t* search, const wait_t* wait) {
  return &row_of(search, wait->rank)->tasks[wait->entry];
}

static const jpp_schedule_task_t* need_of(const search_t* search, const wait_t* wait) {
  return &row_of(search, wait->need_rank)->tasks[wait->need_entry];
}

static unsigned long long position_of(const search_t* search, const wait_t* wait) {
  return jpp__row_position(row_of(search, wait->rank), wait->entry);
}

static unsigned long long need_position_of(const search_t* search, const wait_t* wait) {
  return jpp__row_position(row_of(search, wait->need_rank), wait->need_entry);
}

static void print_own_wait(const search_t* search, jpp_str_t* str) {
  const wait_t* wait = &search->cycle[0];
  char task[JPP_TASK_NAME_SIZE], need[JPP_TASK_NAME_SIZE];
  jpp_task_name(task_of(search, wait), task);
  jpp_task_name(need_of(search, wait), need);
  jpp_str_appendf(str,
                  "schedule deadlocks: rank %u lists %s (entry %llu) before %s (entry "
                  "%llu), which it needs; put %s first",
                  wait->rank, task, position_of(search, wait), need,
                  need_position_of(search, wait), need);
}

static void print_wait(const search_t* search, const wait_t* wait, jpp_str_t* str) {
  char task[JPP_TASK_NAME_SIZE], need[JPP_TASK_NAME_SIZE];
  bool first =
      wait->entry < unit_end(search, wait->rank, search->order->done[wait->rank]);
  jpp_str_appendf(str,
                  "\n  rank %u %s %s (entry %llu): it needs %s of rank %u (entry %llu)",
                  wait->rank, first ? "stops at" : "cannot pass",
                  jpp_task_name(task_of(search, wait), task), position_of(search, wait),
                  jpp_task_name(need_of(search, wait), need), wait->need_rank,
                  need_position_of(search, wait));
}

// The position of a task in the chain of its microbatch: all forwards, then all
// backwards.
static uint64_t chain_depth(const search_t* search, const jpp_schedule_task_t* task) {
  uint64_t stages = search->order->index->schedule->stages;
  return task->kind == JPP_TASK_FWD ? task->stage : 2 * stages - task->stage;
}

// Whether `late` needs `early`, directly or through others. Nothing needs a BWD_W.
static bool depends_on(const search_t* search, const jpp_schedule_task_t* late,
                       const jpp_schedule_task_t* early) {
  return late->microbatch == early->microbatch && early->kind != JPP_TASK_BWD_W &&
         chain_depth(search, early) <= chain_depth(search, late);
}

// Suggests a task that can be moved before the one at which its rank stops. Every cycle
// has such a task, because needs alone do not form a cycle.
static void print_hint(const search_t* search, jpp_str_t* str) {
  if (search->order->fused_as_one) {
    jpp_str_append(str, "\nto break this cycle, split a FusedTask on it");
    return;
  }
  for (uint32_t i = 0; i < search->length; ++i) {
    const wait_t* asked = &search->cycle[i];
    const wait_t* stopped = &search->cycle[(i + 1) % search->length];
    if (depends_on(search, need_of(search, asked), task_of(search, stopped))) continue;
    char need[JPP_TASK_NAME_SIZE], task[JPP_TASK_NAME_SIZE];
    jpp_str_appendf(str,
                    "\nto break this cycle, let for example rank %u run %s before %s",
                    stopped->rank, jpp_task_name(need_of(search, asked), need),
                    jpp_task_name(task_of(search, stopped), task));
    return;
  }
}

static void print_cycle(const search_t* search, jpp_str_t* str) {
  uint32_t length = search->length;
  jpp_str_appendf(
      str, "schedule deadlocks: %u ranks wait for each other%s", length,
      search->order->fused_as_one ? " (each FusedTask taken as one task)" : "");
  for (uint32_t i = 0; i < length; ++i) {
    if (length > kLongestListing && i == kLongestListing - 1) {
      jpp_str_appendf(str, "\n  ... and so on over %u more ranks ...",
                      length - kLongestListing);
      i = length - 1;
    }
    print_wait(search, &search->cycle[i], str);
  }
  print_hint(search, str);
}

jpp_status_t* jpp__schedule_deadlock(jpp_schedule_order_t* order, jpp_arena_t* scratch) {
  search_t search = {.order = order};
  const jpp_schedule_t* schedule = order->index->schedule;
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    search.capacity += 2 * (uint64_t)(schedule->rows[r].count - order->done[r]);
  }
  if (search.capacity > kMostLooks) search.capacity = kMostLooks;
  search.length = schedule->ranks + 1;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, search.capacity, &search.queue));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &search.reach));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &search.cycle));
  search_shortest(&search);
  if (!has_cycle(&search)) {
    return jpp_status_make(JPP_INTERNAL_ERROR, "schedule %s stops without a cycle",
                           order->index->schedule->name);
  }
  order->fault = (jpp_schedule_fault_t){search.cycle[0].rank, search.length};
  jpp_str_t str = {0};
  if (search.length == 1) {
    print_own_wait(&search, &str);
  } else {
    print_cycle(&search, &str);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(JPP_SCHEDULE_ERROR, "%s", text);
  jpp_free(text);
  return status;
}
