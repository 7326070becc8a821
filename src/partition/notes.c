// Notes on costs of a partition that the user may not expect, one per source line: arrays
// that are sent because an op outside the loops uses arrays of several ranks, or because
// one in a loop uses a scalar of another stage; and backward ops that compute input and
// weight gradients together, so that the latter cannot be delayed.
#include "partition/notes.h"

#include <string.h>

#include "base/bytes.h"
#include "base/null.h"
#include "partition/partitioner.h"

enum { kFewBytes = 64 << 10 };  // smaller transfers are not reported
static const float kSmallShare = 0.1f;

static bool same_line(const jpp_partitioner_t* p, uint32_t a, uint32_t b) {
  const char* x = p->ops.data[a].where;
  const char* y = p->ops.data[b].where;
  return x && y && strcmp(x, y) == 0;
}

jpp_status_t* jpp__partition_note_moves(jpp_partitioner_t* p, uint32_t op, uint32_t rank,
                                        uint64_t bytes) {
  if (bytes < kFewBytes) return NULL;
  for (size_t i = 0; i < p->notes.count; ++i) {
    jpp_partition_note_t* note = &p->notes.data[i];
    if (note->kind != JPP_NOTE_MOVES || !same_line(p, note->op, op)) continue;
    note->bytes += bytes;
    return NULL;
  }
  jpp_partition_note_t note = {
      .kind = JPP_NOTE_MOVES, .op = op, .rank = rank, .bytes = bytes};
  return JPP_VEC_PUSH(&p->notes, note);
}

static bool is_backward(const jpp_partitioner_t* p, uint32_t loop, uint32_t op) {
  return jpp__segment_is_backward(p->loops[loop].stages, p->segment[op]);
}

// Whether an operand has crossed a stage boundary to get to the op.
static bool takes_a_mark(const jpp_partitioner_t* p, uint32_t id) {
  const jpp_op_t* op = &p->graph->ops[id];
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t producer = p->graph->values[op->inputs[i]].producer;
    if (producer == JPP_NONE) continue;
    uint8_t kind = p->graph->ops[producer].kind;
    if (kind == JPP_OP_MARK || kind == JPP_OP_MARK_BACKWARD) return true;
  }
  return false;
}

// The rank of the stage that makes a value in the loop; JPP_NONE if none does.
static uint32_t rank_of_maker(const jpp_partitioner_t* p, uint32_t loop, uint32_t value) {
  uint32_t op = jpp__producer_in_stage(p, &p->graph->loops[loop], value);
  if (op == JPP_NONE) return JPP_NONE;
  return p->options->loops[loop]
      .stage_rank[jpp__segment_stage(p->loops[loop].stages, p->segment[op])];
}

// The bytes that an op takes from other ranks in a microbatch although, of what its own
// rank makes, it uses only scalars: gradients that a norm of all gradients clips.
static uint64_t bytes_moved_by_scalars(const jpp_partitioner_t* p, uint32_t loop,
                                       const jpp_op_t* op) {
  uint64_t bytes = 0;
  uint32_t own = rank_of_maker(p, loop, op->first_output);
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    const jpp_value_t* value = &p->values.data[op->inputs[i]];
    uint32_t rank = rank_of_maker(p, loop, op->inputs[i]);
    if (rank == JPP_NONE || !value->type.ndim) continue;
    if (rank == own) return 0;
    bytes = jpp__bytes_add(bytes, value->bytes);
  }
  return bytes;
}

jpp_status_t* jpp__partition_note_stage_moves(jpp_partitioner_t* p, uint32_t loop_id) {
  const jpp_loop_t* loop = &p->graph->loops[loop_id];
  for (uint32_t id = loop->first_op; id < loop->op; ++id) {
    const jpp_op_t* op = &p->ops.data[id];
    bool counts = is_backward(p, loop_id, id) && op->kind == JPP_OP_CALL &&
                  p->graph->ops[id].num_outputs;
    if (!counts || takes_a_mark(p, id)) continue;
    uint64_t bytes = bytes_moved_by_scalars(p, loop_id, op);
    JPP_RETURN_IF_ERROR(
        jpp__partition_note_moves(p, id, rank_of_maker(p, loop_id, op->first_output),
                                  jpp__bytes_multiply(bytes, loop->microbatches)));
  }
  return NULL;
}

jpp_status_t* jpp__partition_note_unsplit(jpp_partitioner_t* p, uint32_t op,
                                          uint32_t stage, float share) {
  if (share < kSmallShare) return NULL;
  for (size_t i = 0; i < p->notes.count; ++i) {
    jpp_partition_note_t* note = &p->notes.data[i];
    if (note->kind != JPP_NOTE_UNSPLIT || !same_line(p, note->op, op)) continue;
    if (share > note->share) {
      note->share = share;
      note->stage = stage;
    }
    return NULL;
  }
  jpp_partition_note_t note = {
      .kind = JPP_NOTE_UNSPLIT, .op = op, .stage = stage, .share = share};
  return JPP_VEC_PUSH(&p->notes, note);
}

// --- Text -----------------------------------------------------------------------------

void jpp__note_append(jpp_str_t* str, const jpp_staged_t* staged,
                      const jpp_partition_note_t* note) {
  const jpp_op_t* op = &staged->ops[note->op];
  jpp_str_appendf(str, "%s: %s ", op->where ? op->where : "?", op->name);
  if (note->kind == JPP_NOTE_MOVES && op->loop != JPP_NONE) {
    jpp_str_appendf(
        str,
        "uses a number that rank %u computes from values of several stages, so %.3g MiB "
        "move there in every step; do this after the loop, or use values of one stage "
        "only",
        note->rank, (double)note->bytes / (1 << 20));
    return;
  }
  if (note->kind == JPP_NOTE_MOVES) {
    jpp_str_appendf(
        str,
        "uses arrays that live on several ranks, so %.3g MiB move to rank %u in every "
        "step; compute it for each array separately, or from their reductions",
        (double)note->bytes / (1 << 20), note->rank);
    return;
  }
  jpp_str_appendf(
      str,
      "gives input gradients and weight gradients together, so %.0f %% of the backward "
      "of stage %u cannot wait for a bubble, as the schedule requires; compute them in "
      "separate operations, or choose a schedule without BWD_W",
      100 * (double)note->share, note->stage);
}

jpp_status_t* jpp_staged_print_note(const jpp_staged_t* staged, uint32_t note,
                                    char** out_text) {
  JPP_RETURN_IF_NULL(staged, out_text);
  jpp_str_t str = {0};
  jpp__note_append(&str, staged, &staged->notes[note]);
  return jpp_str_finish(&str, out_text);
}
