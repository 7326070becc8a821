// Reads a schedule from CSV: cells become actions, actions become a schedule and its
// communication, and both are proved before the schedule is returned.
#include <stdio.h>
#include <string.h>

#include "base/null.h"
#include "jaxpp/schedule_csv.h"
#include "schedule/csv/actions.h"
#include "schedule/order.h"

typedef JPP_VEC(jpp_action_t) action_vec_t;
typedef JPP_VEC(jpp_schedule_task_t) task_vec_t;
typedef JPP_VEC(jpp_action_list_t) list_vec_t;

typedef struct reader {
  const char* file;
  uint32_t line;
  uint32_t cell;
  action_vec_t actions;  // of all lines
  task_vec_t tasks;      // of all lines, idle cells included
  list_vec_t lists;      // their `actions` are set once all lines are read
  JPP_VEC(uint32_t) task_counts;
  uint32_t stages, microbatches;  // one more than the largest number
  bool has_pairs;
  size_t line_tasks;  // number of tasks in the previous lines
} reader_t;

// Part of the file's text, from `at` to before `end`.
typedef struct range {
  const char* at;
  const char* end;
} range_t;

static const struct action_word {
  const char* word;
  jpp_action_kind_t kind;
  jpp_task_kind_t task;
  bool has_microbatch;
} kWords[] = {
    {"F", JPP_ACTION_COMPUTE, JPP_TASK_FWD, true},
    {"B", JPP_ACTION_COMPUTE, JPP_TASK_BWD, true},
    {"I", JPP_ACTION_COMPUTE, JPP_TASK_BWD_I, true},
    {"W", JPP_ACTION_COMPUTE, JPP_TASK_BWD_W, true},
    {"SEND_F", JPP_ACTION_SEND_F, JPP_TASK_IDLE, true},
    {"SEND_B", JPP_ACTION_SEND_B, JPP_TASK_IDLE, true},
    {"RECV_F", JPP_ACTION_RECV_F, JPP_TASK_IDLE, true},
    {"RECV_B", JPP_ACTION_RECV_B, JPP_TASK_IDLE, true},
    {"WAIT_SEND_F", JPP_ACTION_WAIT_SEND_F, JPP_TASK_IDLE, true},
    {"WAIT_SEND_B", JPP_ACTION_WAIT_SEND_B, JPP_TASK_IDLE, true},
    {"UNSHARD", JPP_ACTION_UNSHARD, JPP_TASK_IDLE, false},
    {"RESHARD", JPP_ACTION_RESHARD, JPP_TASK_IDLE, false},
    {"REDUCE_GRAD", JPP_ACTION_REDUCE_GRAD, JPP_TASK_IDLE, false},
    {"WAIT_REDUCE_GRAD", JPP_ACTION_WAIT_REDUCE_GRAD, JPP_TASK_IDLE, false},
};
enum { kWordCount = sizeof(kWords) / sizeof(*kWords) };
// More than any schedule that can be built; keeps sizes far below the limits of uint32_t.
enum { kLargestNumber = (1 << 24) - 1 };

const char* jpp__action_name(const jpp_action_t* action,
                             char buffer[JPP_ACTION_NAME_SIZE]) {
  for (uint32_t i = 0; i < kWordCount; ++i) {
    const struct action_word* word = &kWords[i];
    if (word->kind != action->kind) continue;
    if (action->kind == JPP_ACTION_COMPUTE && word->task != action->task) continue;
    if (word->has_microbatch) {
      snprintf(buffer, JPP_ACTION_NAME_SIZE, "%u%s%u", action->stage, word->word,
               action->microbatch);
    } else {
      snprintf(buffer, JPP_ACTION_NAME_SIZE, "%u%s", action->stage, word->word);
    }
  }
  return buffer;
}

static jpp_status_t* bad_cell(const reader_t* reader, range_t cell, const char* why) {
  int length = cell.end - cell.at > 60 ? 60 : (int)(cell.end - cell.at);
  return jpp_status_make(JPP_PARSE_ERROR, "%s:%u: cell %u, '%.*s': %s", reader->file,
                         reader->line, reader->cell, length, cell.at, why);
}

// Reads digits at *at; returns false if there are none or the number is too large.
static bool read_number(const char** at, const char* end, uint32_t* out_number) {
  const char* first = *at;
  uint64_t number = 0;
  for (; *at < end && **at >= '0' && **at <= '9'; ++*at) {
    number = 10 * number + (uint64_t)(**at - '0');
    if (number > kLargestNumber) return false;
  }
  *out_number = (uint32_t)number;
  return *at > first;
}

static const struct action_word* find_word(const char* at, size_t length) {
  for (uint32_t i = 0; i < kWordCount; ++i) {
    if (strlen(kWords[i].word) == length && !memcmp(kWords[i].word, at, length)) {
      return &kWords[i];
    }
  }
  return NULL;
}

static jpp_status_t* read_action(reader_t* reader, range_t cell,
                                 jpp_action_t* out_action) {
  const char* at = cell.at;
  jpp_action_t action = {.cell = reader->cell};
  if (!read_number(&at, cell.end, &action.stage)) {
    return bad_cell(reader, cell, "expected a stage number first, as in 0F3");
  }
  const char* word = at;
  while (at < cell.end && !(*at >= '0' && *at <= '9')) ++at;
  const struct action_word* known = find_word(word, (size_t)(at - word));
  if (!known) {
    return bad_cell(reader, cell,
                    "expected F, B, I, W, SEND_F, RECV_F, WAIT_SEND_F (or _B), UNSHARD, "
                    "RESHARD or REDUCE_GRAD after the stage");
  }
  action.kind = (uint8_t)known->kind;
  action.task = (uint8_t)known->task;
  if (known->has_microbatch && !read_number(&at, cell.end, &action.microbatch)) {
    return bad_cell(reader, cell, "expected a microbatch number, as in 0F3");
  }
  if (at != cell.end) return bad_cell(reader, cell, "unexpected text after the action");
  if (action.stage >= reader->stages) reader->stages = action.stage + 1;
  if (known->has_microbatch && action.microbatch >= reader->microbatches) {
    reader->microbatches = action.microbatch + 1;
  }
  *out_action = action;
  return NULL;
}

static jpp_status_t* add_action(reader_t* reader, jpp_action_t action) {
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&reader->actions, action));
  if (action.kind != JPP_ACTION_COMPUTE) return NULL;
  return JPP_VEC_PUSH(&reader->tasks,
                      (jpp_schedule_task_t){.kind = action.task,
                                            .joins_next = action.joins_next,
                                            .stage = action.stage,
                                            .microbatch = action.microbatch});
}

// "(0F7;7B3)OVERLAP_F_B"
static jpp_status_t* read_pair(reader_t* reader, range_t cell) {
  static const char kTail[] = ")OVERLAP_F_B";
  size_t tail = sizeof(kTail) - 1, length = (size_t)(cell.end - cell.at);
  const char* middle = memchr(cell.at, ';', length);
  if (!middle || length < tail || memcmp(cell.end - tail, kTail, tail) != 0 ||
      cell.end - tail <= middle) {
    return bad_cell(reader, cell, "expected a pair as (0F7;7B3)OVERLAP_F_B");
  }
  jpp_action_t first, second;
  JPP_RETURN_IF_ERROR(read_action(reader, (range_t){cell.at + 1, middle}, &first));
  JPP_RETURN_IF_ERROR(
      read_action(reader, (range_t){middle + 1, cell.end - tail}, &second));
  if (first.task != JPP_TASK_FWD ||
      (second.task != JPP_TASK_BWD && second.task != JPP_TASK_BWD_I)) {
    return bad_cell(reader, cell, "expected a forward and a backward in the pair");
  }
  if (first.stage == second.stage && first.microbatch == second.microbatch) {
    return bad_cell(reader, cell, "the backward of the pair needs its forward");
  }
  first.joins_next = reader->has_pairs = true;
  JPP_RETURN_IF_ERROR(add_action(reader, first));
  return add_action(reader, second);
}

// Consecutive idle cells share an entry.
static jpp_status_t* add_idle(reader_t* reader) {
  size_t count = reader->tasks.count;
  jpp_schedule_task_t* last =
      count > reader->line_tasks ? &reader->tasks.data[count - 1] : NULL;
  if (last && last->kind == JPP_TASK_IDLE) {
    ++last->microbatch;
    return NULL;
  }
  return JPP_VEC_PUSH(&reader->tasks, (jpp_schedule_task_t){.kind = JPP_TASK_IDLE});
}

static jpp_status_t* read_cell(reader_t* reader, range_t cell) {
  while (cell.at < cell.end && *cell.at == ' ') ++cell.at;
  while (cell.at < cell.end && cell.end[-1] == ' ') --cell.end;
  if (cell.at == cell.end) return add_idle(reader);
  if (*cell.at == '(') return read_pair(reader, cell);
  jpp_action_t action;
  JPP_RETURN_IF_ERROR(read_action(reader, cell, &action));
  return add_action(reader, action);
}

// Cuts off the text before the next separator, or all remaining text; returns false if
// there was no separator.
static bool cut_field(range_t* rest, char separator, range_t* out_field) {
  const char* end = memchr(rest->at, separator, (size_t)(rest->end - rest->at));
  *out_field = (range_t){rest->at, end ? end : rest->end};
  rest->at = end ? end + 1 : rest->end;
  return end != NULL;
}

static jpp_status_t* read_line(reader_t* reader, range_t line) {
  size_t actions = reader->actions.count, tasks = reader->tasks.count;
  reader->line_tasks = tasks;
  if (line.at == line.end) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:%u: an empty line; expected the actions of a rank",
                           reader->file, reader->line);
  }
  bool more = true;  // a trailing comma is followed by an empty cell
  for (reader->cell = 1; more; ++reader->cell) {
    range_t cell;
    more = cut_field(&line, ',', &cell);
    JPP_RETURN_IF_ERROR(read_cell(reader, cell));
  }
  jpp_action_list_t list = {.count = (uint32_t)(reader->actions.count - actions),
                            .line = reader->line};
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&reader->lists, list));
  return JPP_VEC_PUSH(&reader->task_counts, (uint32_t)(reader->tasks.count - tasks));
}

static jpp_status_t* read_lines(reader_t* reader, range_t text) {
  for (reader->line = 1; text.at < text.end; ++reader->line) {
    range_t line;
    cut_field(&text, '\n', &line);
    if (line.end > line.at && line.end[-1] == '\r') --line.end;
    JPP_RETURN_IF_ERROR(read_line(reader, line));
  }
  if (reader->microbatches) return NULL;
  return jpp_status_make(JPP_PARSE_ERROR, "%s:1: no computation in the file",
                         reader->file);
}

// --- From actions to a schedule --------------------------------------------------------

// A stage's backwards must all be whole or all be split, while lists may mix I and W with
// whole B: if some are split, splits each B into its I and W. Updates task_counts.
static jpp_status_t* split_mixed(reader_t* reader, jpp_arena_t* scratch,
                                 task_vec_t* out_tasks) {
  const jpp_schedule_task_t* task = reader->tasks.data;
  bool* in_parts = NULL;  // [stages]
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, reader->stages, &in_parts));
  for (size_t i = 0; i < reader->tasks.count; ++i) {
    bool part = task[i].kind == JPP_TASK_BWD_I || task[i].kind == JPP_TASK_BWD_W;
    if (part) in_parts[task[i].stage] = true;
  }
  bool in_pair = false;  // the previous task is fused with this one
  for (size_t r = 0; r < reader->lists.count; ++r) {
    size_t before = out_tasks->count;
    for (uint32_t i = 0; i < reader->task_counts.data[r]; ++i, ++task) {
      jpp_schedule_task_t last = *task;
      if (task->kind == JPP_TASK_BWD && in_parts[task->stage]) {
        jpp_schedule_task_t input = *task;
        input.kind = JPP_TASK_BWD_I;
        input.joins_next = in_pair;  // both parts stay in the pair
        JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(out_tasks, input));
        last.kind = JPP_TASK_BWD_W;
      }
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(out_tasks, last));
      in_pair = task->joins_next;
    }
    reader->task_counts.data[r] = (uint32_t)(out_tasks->count - before);
  }
  return NULL;
}

// A stage belongs to the first rank that names it; an action of the stage on another rank
// is an error.
static jpp_status_t* place_stages(const reader_t* reader, uint32_t* stage_rank) {
  for (uint32_t s = 0; s < reader->stages; ++s) stage_rank[s] = JPP_NONE;
  const jpp_action_t* action = reader->actions.data;
  for (uint32_t r = 0; r < reader->lists.count; ++r) {
    for (uint32_t i = 0; i < reader->lists.data[r].count; ++i, ++action) {
      uint32_t* rank = &stage_rank[action->stage];
      if (*rank == JPP_NONE) *rank = r;
      if (*rank == r) continue;
      char name[JPP_ACTION_NAME_SIZE];
      return jpp_status_make(JPP_SCHEDULE_ERROR,
                             "%s:%u: cell %u, %s: stage %u is on rank %u (line %u); all "
                             "actions of a stage belong to one rank",
                             reader->file, reader->lists.data[r].line, action->cell,
                             jpp__action_name(action, name), action->stage, *rank,
                             reader->lists.data[*rank].line);
    }
  }
  for (uint32_t s = 0; s < reader->stages; ++s) {
    if (stage_rank[s] != JPP_NONE) continue;
    return jpp_status_make(
        JPP_SCHEDULE_ERROR,
        "%s:%u: stage %u of %u is in no line; is a rank's line missing?", reader->file,
        reader->line - 1, s, reader->stages);
  }
  return NULL;
}

static jpp_status_t* make_schedule(reader_t* reader, jpp_arena_t* scratch,
                                   task_vec_t* tasks, jpp_schedule_t** out_schedule) {
  if ((uint64_t)reader->stages > reader->actions.count) {
    return jpp_status_make(
        JPP_SCHEDULE_ERROR,
        "%s:1: the largest stage is %u, but there are only %llu actions; "
        "every stage needs its tasks",
        reader->file, reader->stages - 1, (unsigned long long)reader->actions.count);
  }
  uint32_t* stage_rank = NULL;
  jpp_schedule_row_t* rows = NULL;
  uint32_t ranks = (uint32_t)reader->lists.count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, reader->stages, &stage_rank));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &rows));
  JPP_RETURN_IF_ERROR(place_stages(reader, stage_rank));
  JPP_RETURN_IF_ERROR(split_mixed(reader, scratch, tasks));
  size_t at = 0;
  for (uint32_t r = 0; r < ranks; at += rows[r++].count) {
    uint32_t count = reader->task_counts.data[r];
    rows[r] = (jpp_schedule_row_t){count ? &tasks->data[at] : NULL, count};
  }
  const char* slash = strrchr(reader->file, '/');
  jpp_schedule_rows_t from = {.name = slash ? slash + 1 : reader->file,
                              .stages = reader->stages,
                              .ranks = ranks,
                              .microbatches = reader->microbatches,
                              .rows = rows,
                              .stage_rank = stage_rank};
  return jpp_schedule_from_rows(&from, out_schedule);
}

static jpp_status_t* prove_schedule(reader_t* reader, jpp_arena_t* scratch,
                                    const jpp_schedule_t* schedule, uint32_t* out_slots) {
  jpp_schedule_fault_t fault;
  jpp_status_t* status = jpp__schedule_verify_units(schedule, false, &fault);
  if (!status && reader->has_pairs) {
    status = jpp__schedule_verify_units(schedule, true, &fault);
  }
  if (status) {
    uint32_t line = reader->lists.data[fault.rank].line;
    return jpp_status_annotate(status, "%s:%u", reader->file, line);
  }
  size_t at = 0;
  for (size_t r = 0; r < reader->lists.count; ++r) {
    jpp_action_list_t* list = &reader->lists.data[r];
    list->actions = list->count ? &reader->actions.data[at] : NULL;
    at += list->count;
  }
  jpp_actions_t actions = {schedule, reader->file, reader->lists.data};
  return jpp__actions_verify(&actions, scratch, out_slots);
}

static jpp_status_t* read_csv(reader_t* reader, range_t text, task_vec_t* tasks,
                              uint32_t* out_slots, jpp_schedule_t** out_schedule) {
  JPP_RETURN_IF_ERROR(read_lines(reader, text));
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = make_schedule(reader, &scratch, tasks, &schedule);
  if (!status) status = prove_schedule(reader, &scratch, schedule, out_slots);
  jpp__arena_deinit(&scratch);
  if (status) {
    jpp_schedule_destroy(schedule);
    return status;
  }
  *out_schedule = schedule;
  return NULL;
}

jpp_status_t* jpp_schedule_from_csv(const char* file, const char* text, size_t length,
                                    uint32_t* out_slots, jpp_schedule_t** out_schedule) {
  JPP_RETURN_IF_NULL(file, text, out_schedule);
  *out_schedule = NULL;
  uint32_t slots = 0;
  reader_t reader = {.file = file};
  task_vec_t tasks = {0};
  range_t all = {text, text + length};
  if (length >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) all.at += 3;  // U+FEFF
  jpp_status_t* status = read_csv(&reader, all, &tasks, &slots, out_schedule);
  jpp_vec_deinit(&tasks);
  jpp_vec_deinit(&reader.actions);
  jpp_vec_deinit(&reader.tasks);
  jpp_vec_deinit(&reader.lists);
  jpp_vec_deinit(&reader.task_counts);
  if (out_slots) *out_slots = slots;
  return status;
}
