// Compares the proof of action lists with a naive execution of their cells: an accepted
// list runs with exactly the slots that the proof reports as the minimum, and a refused
// one does not run, over random changes of lists with communication.
#include <stdio.h>
#include <stdlib.h>

#include "jaxpp/schedule_csv.h"
#include "schedule_util.h"

enum { kRanks = 4, kStages = 8, kMicrobatches = 8, kCells = 256, kMostSlots = 1000 };

// Per schedule. Sanitizers make everything several times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { kMutants = 25 };
#else
enum { kMutants = 150 };
#endif

typedef struct cell {
  char text[32];
} cell_t;

typedef struct lists {
  uint32_t ranks;
  uint32_t count[kRanks];
  cell_t cells[kRanks][kCells];
} lists_t;

static uint64_t g_random = 1;

static uint32_t random_below(uint32_t bound) {
  return test_random_below(&g_random, bound);
}

// --- A naive execution ----------------------------------------------------------------

typedef enum result { RAN, WAITS, WRONG } result_t;

// The messages of one channel in the order of their sends, and of their posted RECVs.
typedef struct queue {
  uint32_t sent[kCells], posted[kCells];
  uint32_t num_sent, num_posted;
} queue_t;

typedef struct machine {
  uint32_t slots, stages, microbatches;
  uint32_t rank_of[kStages];
  bool ran[4][kStages][kMicrobatches];  // F, B, I, W
  // [of a forward?]: at the sender, at the receiver
  bool sent[2][kStages][kMicrobatches], posted[2][kStages][kMicrobatches];
  bool waited[2][kStages][kMicrobatches];
  queue_t queues[kRanks][kRanks];
} machine_t;

static const char kKinds[] = "FBIW";

static bool has_backward(const machine_t* m, uint32_t s, uint32_t mb) {
  return m->ran[1][s][mb] || m->ran[2][s][mb];
}

// True if the value that a forward (or backward) of the stage needs from the next stage
// is there.
static bool is_there(const machine_t* m, bool forward, uint32_t s, uint32_t mb) {
  if (forward ? !s : s + 1 == m->stages) return true;
  uint32_t from = forward ? s - 1 : s + 1;
  if (m->rank_of[from] != m->rank_of[s]) {
    return m->posted[forward][s][mb] && m->sent[forward][from][mb];
  }
  return forward ? m->ran[0][from][mb] : has_backward(m, from, mb);
}

static result_t can_compute(const machine_t* m, char kind, uint32_t s, uint32_t mb) {
  bool again = kind == 'F'   ? m->ran[0][s][mb]
               : kind == 'W' ? m->ran[3][s][mb]
                             : has_backward(m, s, mb);
  if (again) return WRONG;
  if (kind == 'F') return is_there(m, true, s, mb) ? RAN : WAITS;
  if (kind == 'W') return m->ran[2][s][mb] ? RAN : WAITS;
  return m->ran[0][s][mb] && is_there(m, false, s, mb) ? RAN : WAITS;
}

static void compute(machine_t* m, char kind, uint32_t s, uint32_t mb) {
  m->ran[strchr(kKinds, kind) - kKinds][s][mb] = true;
}

static bool in_order(const queue_t* queue) {
  for (uint32_t i = 0; i < queue->num_sent && i < queue->num_posted; ++i) {
    if (queue->sent[i] != queue->posted[i]) return false;
  }
  return true;
}

static result_t send(machine_t* m, bool forward, uint32_t s, uint32_t mb) {
  if (forward ? s + 1 == m->stages : !s) return WRONG;
  uint32_t to = forward ? s + 1 : s - 1;
  queue_t* queue = &m->queues[m->rank_of[s]][m->rank_of[to]];
  bool made = forward ? m->ran[0][s][mb] : has_backward(m, s, mb);
  if (m->rank_of[to] == m->rank_of[s] || !made || m->sent[forward][s][mb]) return WRONG;
  if (queue->num_sent >= queue->num_posted + m->slots) return WAITS;
  queue->sent[queue->num_sent++] = (to * kMicrobatches + mb) * 2 + forward;
  m->sent[forward][s][mb] = true;
  return in_order(queue) ? RAN : WRONG;
}

static result_t post(machine_t* m, bool forward, uint32_t s, uint32_t mb) {
  if (forward ? !s : s + 1 == m->stages) return WRONG;
  uint32_t from = forward ? s - 1 : s + 1;
  queue_t* queue = &m->queues[m->rank_of[from]][m->rank_of[s]];
  bool made = forward ? m->ran[0][s][mb] : has_backward(m, s, mb);
  if (m->rank_of[from] == m->rank_of[s] || made || m->posted[forward][s][mb]) {
    return WRONG;
  }
  queue->posted[queue->num_posted++] = (s * kMicrobatches + mb) * 2 + forward;
  m->posted[forward][s][mb] = true;
  return in_order(queue) ? RAN : WRONG;
}

static result_t wait_send(machine_t* m, bool forward, uint32_t s, uint32_t mb) {
  if (!m->sent[forward][s][mb] || m->waited[forward][s][mb]) return WRONG;
  if (!m->posted[forward][forward ? s + 1 : s - 1][mb]) return WAITS;
  m->waited[forward][s][mb] = true;
  return RAN;
}

static result_t run_cell(machine_t* m, const char* text) {
  uint32_t s = 0, mb = 0, s2 = 0, mb2 = 0;
  char word[32], kind = 0;
  if (sscanf(text, "(%uF%u;%u%c%u)", &s, &mb, &s2, &kind, &mb2) == 5) {
    result_t first = can_compute(m, 'F', s, mb), second = can_compute(m, kind, s2, mb2);
    if (first != RAN) return first;
    if (second != RAN) return second;
    compute(m, 'F', s, mb);
    compute(m, kind, s2, mb2);
    return RAN;
  }
  assert_int_equal(sscanf(text, "%u%31[A-Z_]%u", &s, word, &mb), 3);
  bool forward = word[strlen(word) - 1] == 'F';
  if (!strncmp(word, "SEND", 4)) return send(m, forward, s, mb);
  if (!strncmp(word, "RECV", 4)) return post(m, forward, s, mb);
  if (!strncmp(word, "WAIT", 4)) return wait_send(m, forward, s, mb);
  result_t result = can_compute(m, word[0], s, mb);
  if (result == RAN) compute(m, word[0], s, mb);
  return result;
}

// Finds sizes and placement; returns false when a stage is on two ranks or on none.
static bool place(const lists_t* lists, machine_t* m) {
  for (uint32_t s = 0; s < kStages; ++s) m->rank_of[s] = kRanks;
  for (uint32_t r = 0; r < lists->ranks; ++r) {
    for (uint32_t i = 0; i < lists->count[r]; ++i) {
      uint32_t n[4] = {0}, pairs = 1;
      const char* text = lists->cells[r][i].text;
      char kind;
      if (sscanf(text, "(%uF%u;%u%c%u)", &n[0], &n[1], &n[2], &kind, &n[3]) == 5) {
        pairs = 2;
      } else {
        sscanf(text, "%u%*[A-Z_]%u", &n[0], &n[1]);
      }
      for (uint32_t k = 0; k < pairs; ++k) {
        uint32_t s = n[2 * k], mb = n[2 * k + 1];
        assert_true(s < kStages && mb < kMicrobatches);
        if (m->rank_of[s] != kRanks && m->rank_of[s] != r) return false;
        m->rank_of[s] = r;
        if (s >= m->stages) m->stages = s + 1;
        if (mb >= m->microbatches) m->microbatches = mb + 1;
      }
    }
  }
  for (uint32_t s = 0; s < m->stages; ++s) {
    if (m->rank_of[s] == kRanks) return false;
  }
  return true;
}

static bool is_complete(const machine_t* m) {
  bool any = false;
  for (uint32_t s = 0; s < m->stages; ++s) {
    for (uint32_t mb = 0; mb < m->microbatches; ++mb) {
      any = any || has_backward(m, s, mb) || m->ran[3][s][mb];
    }
  }
  for (uint32_t s = 0; s < m->stages; ++s) {
    for (uint32_t mb = 0; mb < m->microbatches; ++mb) {
      bool whole = m->ran[1][s][mb], parts = m->ran[2][s][mb] && m->ran[3][s][mb];
      if (!m->ran[0][s][mb] || (any && !whole && !parts)) return false;
    }
  }
  for (uint32_t i = 0; i < kRanks * kRanks; ++i) {
    const queue_t* queue = &m->queues[i / kRanks][i % kRanks];
    if (queue->num_sent != queue->num_posted) return false;
  }
  return true;
}

static bool runs(const lists_t* lists, uint32_t slots) {
  static machine_t m;
  m = (machine_t){.slots = slots};
  uint32_t next[kRanks] = {0};
  if (!place(lists, &m)) return false;
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t r = 0; r < lists->ranks; ++r) {
      if (next[r] == lists->count[r]) continue;
      result_t result = run_cell(&m, lists->cells[r][next[r]].text);
      if (result == WRONG) return false;
      if (result == RAN) ++next[r];
      moved = moved || result == RAN;
    }
  }
  for (uint32_t r = 0; r < lists->ranks; ++r) {
    if (next[r] < lists->count[r]) return false;
  }
  return is_complete(&m);
}

// --- Lists and texts ------------------------------------------------------------------

static void read_lists(const char* text, lists_t* lists) {
  *lists = (lists_t){0};
  for (; *text; text += strspn(text, "\r\n")) {
    size_t end = strcspn(text, "\r\n");
    for (const char* stop = text + end; text < stop;) {
      size_t length = strcspn(text, ",\r\n");
      if (length) {
        cell_t* cell = &lists->cells[lists->ranks][lists->count[lists->ranks]++];
        assert_true(length < sizeof(cell->text));
        memcpy(cell->text, text, length);
        cell->text[length] = 0;
      }
      text += length + (text[length] == ',');
    }
    ++lists->ranks;
  }
}

static void write_lists(const lists_t* lists, char* text) {
  for (uint32_t r = 0; r < lists->ranks; ++r) {
    for (uint32_t i = 0; i < lists->count[r]; ++i) {
      text += sprintf(text, "%s%s", i ? "," : "", lists->cells[r][i].text);
    }
    text += sprintf(text, "\n");
  }
}

static bool has_communication(const lists_t* lists) {
  for (uint32_t r = 0; r < lists->ranks; ++r) {
    for (uint32_t i = 0; i < lists->count[r]; ++i) {
      const char* text = lists->cells[r][i].text;
      if (strstr(text, "SEND") || strstr(text, "RECV")) return true;
    }
  }
  return false;
}

// --- Changes --------------------------------------------------------------------------

static void insert_cell(lists_t* lists, uint32_t r, uint32_t at, cell_t cell) {
  if (lists->count[r] == kCells) return;
  cell_t* cells = lists->cells[r];
  memmove(&cells[at + 1], &cells[at], (lists->count[r]++ - at) * sizeof(*cells));
  cells[at] = cell;
}

static cell_t remove_cell(lists_t* lists, uint32_t r, uint32_t at) {
  cell_t* cells = lists->cells[r];
  cell_t cell = cells[at];
  memmove(&cells[at], &cells[at + 1], (--lists->count[r] - at) * sizeof(*cells));
  return cell;
}

// Pairs the cell with a later one near it, if they are a forward and a backward.
static void join_cells(lists_t* lists, uint32_t r, uint32_t at) {
  uint32_t s, mb, s2, mb2;
  char kind, kind2, tail, text[64];
  for (uint32_t i = at + 1; i < lists->count[r] && i < at + 5; ++i) {
    const cell_t *first = &lists->cells[r][at], *second = &lists->cells[r][i];
    if (sscanf(first->text, "%u%c%u%c", &s, &kind, &mb, &tail) != 3) return;
    if (sscanf(second->text, "%u%c%u%c", &s2, &kind2, &mb2, &tail) != 3) continue;
    bool swapped = kind2 == 'F';
    if (swapped == (kind == 'F') || kind == 'W' || kind2 == 'W') continue;
    if (s == s2 && mb == mb2) continue;
    snprintf(text, sizeof(text), "(%s;%s)OVERLAP_F_B",
             swapped ? second->text : first->text, swapped ? first->text : second->text);
    if (strlen(text) >= sizeof(first->text)) return;
    remove_cell(lists, r, i);
    memcpy(lists->cells[r][at].text, text, strlen(text) + 1);
    return;
  }
}

static void change_number(cell_t* cell) {
  size_t length = strlen(cell->text);
  char* last = &cell->text[length - 1];
  if (*last >= '0' && *last < '7') *last += random_below(2) && *last > '0' ? -1 : 1;
}

static void wait_for_send(lists_t* lists, uint32_t r, uint32_t at) {
  cell_t cell = lists->cells[r][at], wait;
  uint32_t s, mb;
  char way;
  if (sscanf(cell.text, "%uSEND_%c%u", &s, &way, &mb) != 3) return;
  snprintf(wait.text, sizeof(wait.text), "%uWAIT_SEND_%c%u", s, way, mb);
  insert_cell(lists, r, at + 1 + random_below(lists->count[r] - at), wait);
}

static void mutate(lists_t* lists) {
  uint32_t r = random_below(lists->ranks), count = lists->count[r];
  if (!count) return;
  uint32_t i = random_below(count), near = i + random_below(4);
  uint32_t j = random_below(2) ? random_below(count) : near < count ? near : i;
  cell_t cell = lists->cells[r][i];
  switch (random_below(12)) {
    case 0:
      remove_cell(lists, r, i);
      break;
    case 1:
      insert_cell(lists, r, j, cell);
      break;
    case 2:
      change_number(&lists->cells[r][i]);
      break;
    case 3:
      remove_cell(lists, r, i);
      r = random_below(lists->ranks);
      insert_cell(lists, r, random_below(lists->count[r] + 1), cell);
      break;
    case 4:
    case 5:
      wait_for_send(lists, r, i);
      break;
    case 6:
    case 7:
      join_cells(lists, r, i);
      break;
    case 8:
      lists->cells[r][i] = lists->cells[r][j];
      lists->cells[r][j] = cell;
      break;
    default:
      remove_cell(lists, r, i);
      insert_cell(lists, r, j < count - 1 ? j : count - 1, cell);
  }
}

// --- The proof against the execution --------------------------------------------------

static uint64_t g_accepted, g_refused;
static char g_text[kRanks * kCells * sizeof(cell_t)];

static void check_slots(const lists_t* lists, uint32_t slots) {
  if (!runs(lists, slots)) fail_msg("does not run with %u slots:\n%s", slots, g_text);
  if (slots > 1 && runs(lists, slots - 1)) {
    fail_msg("runs with %u slots, fewer than the least:\n%s", slots - 1, g_text);
  }
}

// The text of an accepted list runs as well.
static void check_written(const jpp_schedule_t* schedule) {
  char* text = NULL;
  lists_t lists;
  uint32_t slots = 0;
  jpp_schedule_t* again = NULL;
  ASSERT_OK(jpp_schedule_print_csv(schedule, true, &text));
  ASSERT_OK(jpp_schedule_slots(schedule, &slots));
  read_lists(text, &lists);
  if (slots) check_slots(&lists, slots);
  jpp_text_free(text);
  ASSERT_OK(jpp_schedule_print_csv(schedule, false, &text));
  ASSERT_OK(jpp_schedule_from_csv("again", text, strlen(text), NULL, &again));
  jpp_schedule_destroy(again);
  jpp_text_free(text);
}

static void check_lists(const lists_t* lists) {
  for (uint32_t r = 0; r < lists->ranks; ++r) {
    if (!lists->count[r]) return;  // an empty line is no row
  }
  write_lists(lists, g_text);
  if (!has_communication(lists)) return;
  jpp_schedule_t* schedule = NULL;
  uint32_t slots = 0;
  jpp_status_t* status =
      jpp_schedule_from_csv("x", g_text, strlen(g_text), &slots, &schedule);
  bool expected = runs(lists, kMostSlots);
  if (expected == (status != NULL)) {
    fail_msg("expected %s, found: %s\n%s", expected ? "accepted" : "refused",
             jpp_status_message(status), g_text);
  }
  ++*(status ? &g_refused : &g_accepted);
  jpp_status_free(status);
  if (!schedule) return;
  check_slots(lists, slots);
  check_written(schedule);
  jpp_schedule_destroy(schedule);
}

static void check_mutants(const jpp_schedule_t* schedule) {
  if (schedule->ranks > kRanks || schedule->stages > kStages) return;
  if (schedule->microbatches > 4 || schedule->ranks < 2) return;
  char* text = NULL;
  lists_t base;
  ASSERT_OK(jpp_schedule_print_csv(schedule, true, &text));
  read_lists(text, &base);
  jpp_text_free(text);
  check_lists(&base);
  for (uint32_t n = 0; n < kMutants; ++n) {
    lists_t mutant = base;
    for (uint32_t i = random_below(3) + 1; i-- > 0;) mutate(&mutant);
    check_lists(&mutant);
  }
}

static void test_mutants_are_judged_as_they_run(void** state) {
  (void)state;
  for_each_schedule(check_mutants);
  // Neither answer is rare.
  assert_true(g_accepted > 40 * kMutants && g_refused > 40 * kMutants);
}

static void assert_refused(const char* text, const char* why) {
  jpp_schedule_t* schedule = NULL;
  uint32_t slots = 77;
  jpp_status_t* status =
      jpp_schedule_from_csv("x", text, strlen(text), &slots, &schedule);
  assert_null(schedule);
  assert_int_equal(slots, 0);
  ASSERT_FAILS(status, JPP_SCHEDULE_ERROR, why);
}

static void test_waiting_for_a_message_is_waiting(void** state) {
  (void)state;
  assert_refused(
      "0F0,0RECV_B0,0B0,0SEND_F0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
      "x:1: cell 3, 0B0: 2 ranks wait for each other, however many slots a channel has\n"
      "  rank 0 (line 1) stops at cell 3, 0B0: it needs 1SEND_B0 of rank 1 (line 2, cell "
      "4)\n"
      "  rank 1 (line 2) stops at cell 2, 1F0: it needs 0SEND_F0 of rank 0 (line 1, cell "
      "4)");
  assert_refused("0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0\n",
                 "x:1: cell 3, 0RECV_B0: no rank sends it; expected 1SEND_B0 on rank 1 "
                 "(line 2)");
  // Each waits until its message has left before it takes the other's.
  assert_refused(
      "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
      "x:1: cell 5, 0WAIT_SEND_F1: 2 ranks wait for each other, however many slots a "
      "channel has\n"
      "  rank 0 (line 1) stops at cell 5, 0WAIT_SEND_F1: it needs 1RECV_F1 of rank 1 "
      "(line 2, cell 6)\n"
      "  rank 1 (line 2) stops at cell 5, 1WAIT_SEND_B0: it needs 0RECV_B0 of rank 0 "
      "(line 1, cell 6)");
}

// Both halves of a pair start together: neither may wait for the other's result.
static void test_a_pair_starts_when_both_halves_may(void** state) {
  (void)state;
  const char* text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n";
  assert_refused(text,
                 "x:1: schedule deadlocks: 2 ranks wait for each other (each "
                 "FusedTask taken as one task)");
  const char* fine = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n";
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_from_csv("x", fine, strlen(fine), NULL, &schedule));
  jpp_schedule_destroy(schedule);
}

// CSV cannot express a FusedTask whose tasks must run one after another.
static void test_what_is_written_is_proved(void** state) {
  (void)state;
  const jpp_schedule_task_t first[] = {
      {.kind = JPP_TASK_FWD},
      {.kind = JPP_TASK_FWD, .joins_next = true, .microbatch = 1},
      {.kind = JPP_TASK_BWD},
      {.kind = JPP_TASK_BWD, .microbatch = 1}};
  const jpp_schedule_task_t second[] = {
      {.kind = JPP_TASK_FWD, .stage = 1},
      {.kind = JPP_TASK_FWD, .stage = 1, .microbatch = 1},
      {.kind = JPP_TASK_BWD, .stage = 1},
      {.kind = JPP_TASK_BWD, .stage = 1, .microbatch = 1}};
  const jpp_schedule_row_t rows[] = {{first, 4}, {second, 4}};
  jpp_schedule_rows_t from = {.stages = 2, .ranks = 2, .microbatches = 2, .rows = rows};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_from_rows(&from, &schedule));
  ASSERT_OK(jpp_schedule_verify(schedule));
  for (int communication = 0; communication < 2; ++communication) {
    char* text = NULL;
    ASSERT_FAILS(jpp_schedule_print_csv(schedule, communication, &text),
                 JPP_SCHEDULE_ERROR,
                 "user:1: cell 4, 0B0: 2 ranks wait for each other, however many slots");
    assert_null(text);
  }
  jpp_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_waiting_for_a_message_is_waiting),
      cmocka_unit_test(test_a_pair_starts_when_both_halves_may),
      cmocka_unit_test(test_what_is_written_is_proved),
      cmocka_unit_test(test_mutants_are_judged_as_they_run),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
