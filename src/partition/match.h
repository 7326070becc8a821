// Finds the ops of one task, the pattern, among the ops of another. An op matches if it
// computes the same from matching operands, and if the ops that lead to it (or use it)
// match, too.
#ifndef JPP_PARTITION_MATCH_H_
#define JPP_PARTITION_MATCH_H_

#include "partition/partitioner.h"

typedef struct jpp_matcher {
  const jpp_partitioner_t* p;
  uint32_t* op_at;     // [ops] position in the entered task; JPP_NONE: not in it
  uint64_t* hashes;    // [values] of the entered task
  uint32_t* match;     // [values] of the pattern: the matching value of the task
  uint32_t* match_of;  // [values] of the task: the matching value of the pattern
} jpp_matcher_t;

// The arrays belong to the partitioner's scratch arena.
jpp_status_t* jpp__matcher_init(jpp_matcher_t* m, jpp_partitioner_t* p) JPP_MUST_USE;

// Between these two, jpp__match_is_made_here() answers for the task. One task at a time.
void jpp__match_enter(const jpp_matcher_t* m, const jpp_task_t* task);
void jpp__match_leave(const jpp_matcher_t* m, const jpp_task_t* task);
bool jpp__match_is_made_here(const jpp_matcher_t* m, uint32_t value);

// Whether the matcher knows what each op of a task computes; if not, nothing matches it.
bool jpp__match_knows(const jpp_matcher_t* m, const jpp_task_t* task);

// *out_hash is equal for tasks that compute the same.
jpp_status_t* jpp__match_hash(const jpp_matcher_t* m, const jpp_task_t* task,
                              uint64_t* out_hash) JPP_MUST_USE;

// ops[i]: the position in the task of the op that matches op i of the pattern, in rising
// order; only if *out_found. No task may be entered.
jpp_status_t* jpp__match_find(const jpp_matcher_t* m, const jpp_task_t* pattern,
                              const jpp_task_t* task, uint32_t* ops,
                              bool* out_found) JPP_MUST_USE;

#endif  // JPP_PARTITION_MATCH_H_
