// Turns drafts into programs in one pass over each: adds deletions after last uses,
// assigns real registers and finds the peak in bytes.
//
// Instructions share lists of equal operands. All runs of a task have the same values.
// So that many have the same registers, too, each value has registers of its own, of
// which the one freed last is taken first: the results of a run then take the registers
// that the results of an earlier run had, in the same order.
//
// The omitted repetitions (repeat.c) need no walk. Which register is taken depends only
// on the stacks of free ones, and every repetition pushes and pops as the one before it.
// So if the ends of the first two repetitions differ only in the names of registers, each
// further repetition is the one before it with its registers renamed in the same way.
#include <string.h>

#include "base/hash.h"
#include "program/builder.h"

// A prime, because the lists of successive runs are at equal distances.
enum { kKnownLists = 4093 };

typedef struct operand_list {
  uint32_t first, count;
} operand_list_t;

// A list of operands, and the first one of the list that the next repetition has for it.
typedef struct renamed_list {
  operand_list_t list;
  uint32_t next_first;
} renamed_list_t;

// The registers of a value.
typedef struct register_pool {
  uint32_t newest_free;  // the one freed last; JPP_NONE: none is free
  bool any;              // the value has a register
} register_pool_t;

// One for all ranks, because most of their lists are equally long.
typedef struct finisher {
  jpp_program_builder_t* b;
  jpp_rank_draft_t* draft;
  const jpp_repetition_t* repetition;
  size_t first_repeated;    // the first instruction of the second repetition
  jpp_u32_vec_t free_then;  // list_free() before that
  jpp_u32_vec_t free_now;   // list_free() after the last instruction of that repetition
  jpp_u32_vec_t reg;        // [virtuals] its real register
  register_pool_t* pools;   // [values]
  jpp_u32_vec_t pooled;     // values that have a register
  jpp_u32_vec_t next_free;  // [registers] of the same value, freed before it; or JPP_NONE
  JPP_VEC(jpp_instr_t) instrs;
  jpp_u32_vec_t operands;
  jpp_u32_vec_t operand_values;
  operand_list_t* known_operands;  // [kKnownLists] by hash, the newest list of each
  operand_list_t* known_values;
  renamed_list_t* known_renamed;  // [kKnownLists] by the first operand
  jpp_u32_vec_t dead;             // virtuals that die after the current instruction
  uint64_t live_bytes[JPP_MEMORY_COUNT];
  jpp_program_t* program;
} finisher_t;

static const jpp_virtual_t* virtual_at(const finisher_t* f, uint32_t id) {
  return &f->draft->virtuals.data[id];
}

static uint64_t bytes_of(const finisher_t* f, uint32_t id) {
  return f->b->value_bytes[virtual_at(f, id)->value];
}

static jpp_status_t* take_register(finisher_t* f, uint32_t id) {
  uint32_t value = virtual_at(f, id)->value;
  register_pool_t* pool = &f->pools[value];
  if (pool->newest_free != JPP_NONE) {
    f->reg.data[id] = pool->newest_free;
    pool->newest_free = f->next_free.data[pool->newest_free];
    return NULL;
  }
  if (!pool->any) JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->pooled, value));
  pool->any = true;
  f->reg.data[id] = (uint32_t)f->next_free.count;
  return JPP_VEC_PUSH(&f->next_free, JPP_NONE);
}

// Gives the register of `id` to the pool of `value`.
static void release_register(finisher_t* f, uint32_t id, uint32_t value) {
  register_pool_t* pool = &f->pools[value];
  f->next_free.data[f->reg.data[id]] = pool->newest_free;
  pool->newest_free = f->reg.data[id];
}

static jpp_status_t* add_live(finisher_t* f, jpp_memory_t memory, uint64_t bytes) {
  f->live_bytes[memory] = jpp__bytes_add(f->live_bytes[memory], bytes);
  if (jpp__bytes_fit(f->live_bytes[memory])) return NULL;
  return jpp_status_make(JPP_OUT_OF_MEMORY,
                         "2^63 bytes or more are live at instruction %zu; no device has "
                         "that many: is a shape wrong?",
                         f->instrs.count);
}

static jpp_status_t* add_live_register(finisher_t* f, uint32_t id) {
  return add_live(f, virtual_at(f, id)->memory, bytes_of(f, id));
}

static void note_peak(finisher_t* f) {
  uint64_t host = f->live_bytes[JPP_MEMORY_PINNED_HOST];
  if (host > f->program->peak_host_bytes) f->program->peak_host_bytes = host;
  if (f->live_bytes[JPP_MEMORY_DEVICE] <= f->program->peak_bytes) return;
  f->program->peak_bytes = f->live_bytes[JPP_MEMORY_DEVICE];
  f->program->peak_instr = (uint32_t)f->instrs.count;
}

static bool is_kept(const finisher_t* f, uint32_t id) {
  const jpp_virtual_t* v = virtual_at(f, id);
  return v->borrowed || v->constant || v->output;
}

static jpp_status_t* push_operands(finisher_t* f, const uint32_t* ids, size_t count) {
  if (!count) return NULL;
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&f->operands, count));
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&f->operand_values, count));
  uint32_t* registers = f->operands.data + f->operands.count;
  uint32_t* values = f->operand_values.data + f->operand_values.count;
  for (size_t i = 0; i < count; ++i) {
    registers[i] = f->reg.data[ids[i]];
    values[i] = virtual_at(f, ids[i])->value;
  }
  f->operands.count += count;
  f->operand_values.count += count;
  return NULL;
}

// FNV-1a with a step for each id instead of each byte. Such steps spread the bits of an
// id upwards only, so the upper half is the hash.
static uint32_t hash_list(const uint32_t* ids, uint32_t count) {
  uint64_t hash = JPP_HASH_START;
  for (uint32_t i = 0; i < count; ++i) hash = (hash ^ ids[i]) * JPP_HASH_FACTOR;
  return (uint32_t)(hash >> 32);
}

// If an equal list is known, removes the list that begins at *first from the end of `ids`
// and sets *first to the known one.
static void share_list(jpp_u32_vec_t* ids, operand_list_t* known, uint32_t* first) {
  operand_list_t list = {.first = *first, .count = (uint32_t)ids->count - *first};
  if (!list.count) return;
  operand_list_t* at =
      &known[hash_list(ids->data + list.first, list.count) % kKnownLists];
  bool equal =
      at->count == list.count && !memcmp(ids->data + at->first, ids->data + list.first,
                                         list.count * sizeof(*ids->data));
  if (!equal) {
    *at = list;
    return;
  }
  ids->count = list.first;
  *first = at->first;
}

// Its operands were pushed last.
static jpp_status_t* push_instr(finisher_t* f, jpp_instr_t instr) {
  share_list(&f->operands, f->known_operands, &instr.first_operand);
  share_list(&f->operand_values, f->known_values, &instr.first_value);
  return JPP_VEC_PUSH(&f->instrs, instr);
}

// The operands that die after an instruction are often consecutive ones. Then removes the
// lists of the deletion, which were pushed last, and lets it share the instruction's.
static bool share_part(finisher_t* f, jpp_instr_t* deletion) {
  if (!f->instrs.count) return false;
  const jpp_instr_t* last = &f->instrs.data[f->instrs.count - 1];
  const uint32_t* operands = f->operands.data + last->first_operand;
  const uint32_t* dead = f->operands.data + deletion->first_operand;
  uint32_t i = 0, count = last->num_args + last->num_results;
  while (i + deletion->num_args <= count && operands[i] != *dead) ++i;
  if (i + deletion->num_args > count) return false;
  if (memcmp(operands + i, dead, deletion->num_args * sizeof(*dead)) != 0) return false;
  f->operands.count = deletion->first_operand;
  f->operand_values.count = deletion->first_value;
  deletion->first_operand = last->first_operand + i;
  deletion->first_value = last->first_value + i;
  return true;
}

static jpp_status_t* delete_dead(finisher_t* f) {
  if (!f->dead.count) return NULL;
  jpp_instr_t instr = {.kind = JPP_INSTR_DELETE,
                       .microbatch = JPP_NONE,
                       .first_operand = (uint32_t)f->operands.count,
                       .first_value = (uint32_t)f->operand_values.count,
                       .num_args = (uint32_t)f->dead.count};
  JPP_RETURN_IF_ERROR(push_operands(f, f->dead.data, f->dead.count));
  bool shared = share_part(f, &instr);
  for (size_t i = 0; i < f->dead.count; ++i) {
    uint32_t id = f->dead.data[i];
    release_register(f, id, virtual_at(f, id)->value);
    f->live_bytes[virtual_at(f, id)->memory] -= bytes_of(f, id);
  }
  f->dead.count = 0;
  return shared ? JPP_VEC_PUSH(&f->instrs, instr) : push_instr(f, instr);
}

// Ends the life of operand `index`. An accumulator's initial value leaves its register to
// the sums, as every other state does, so that the first microbatch is like the others.
static jpp_status_t* retire_operand(finisher_t* f, const jpp_instr_t* instr,
                                    const uint32_t* ids, uint32_t index) {
  uint32_t output = JPP_NONE;
  if (instr->kind == JPP_INSTR_RUN && index < instr->num_args) {
    output = f->b->bindings[instr->target].donated_to[index];
  }
  if (output == JPP_NONE) return JPP_VEC_PUSH(&f->dead, ids[index]);
  uint32_t from = virtual_at(f, ids[index])->value;
  uint32_t to = virtual_at(f, ids[instr->num_args + output])->value;
  bool state = f->b->staged->scopes[to] == JPP_SCOPE_STATE;
  release_register(f, ids[index], state ? to : from);
  return NULL;
}

static uint64_t bytes_taken_over(const finisher_t* f, const jpp_instr_t* instr,
                                 const uint32_t* ids) {
  if (instr->kind != JPP_INSTR_RUN) return 0;
  const uint32_t* donated_to = f->b->bindings[instr->target].donated_to;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < instr->num_args; ++i) {
    if (donated_to[i] == JPP_NONE) continue;
    bytes += bytes_of(f, ids[i]);
  }
  return bytes;
}

// `ids` are the operands of `draft`, the drafted instruction number `at`.
static jpp_status_t* finish_instr(finisher_t* f, uint32_t at,
                                  const jpp_instr_draft_t* draft, const uint32_t* ids) {
  jpp_instr_t instr = {.kind = draft->kind,
                       .target = draft->target,
                       .microbatch = draft->microbatch,
                       .first_operand = (uint32_t)f->operands.count,
                       .first_value = (uint32_t)f->operand_values.count,
                       .num_args = jpp__instr_num_args(f->b, draft),
                       .num_results = jpp__instr_num_results(f->b, draft)};
  uint32_t count = instr.num_args + instr.num_results;
  for (uint32_t i = instr.num_args; i < count; ++i) {
    JPP_RETURN_IF_ERROR(take_register(f, ids[i]));
    JPP_RETURN_IF_ERROR(add_live_register(f, ids[i]));
  }
  JPP_RETURN_IF_ERROR(push_operands(f, ids, count));
  f->live_bytes[JPP_MEMORY_DEVICE] -= bytes_taken_over(f, &instr, ids);
  note_peak(f);
  for (uint32_t i = 0; i < count; ++i) {
    const jpp_virtual_t* v = virtual_at(f, ids[i]);
    bool unused_result = i >= instr.num_args && v->last_use == JPP_NONE;
    bool last = i < instr.num_args && v->last_use == at;
    if ((!unused_result && !last) || is_kept(f, ids[i])) continue;
    JPP_RETURN_IF_ERROR(retire_operand(f, &instr, ids, i));
  }
  JPP_RETURN_IF_ERROR(push_instr(f, instr));
  return delete_dead(f);
}

// --- Omitted repetitions --------------------------------------------------------------

// Sets `free` to the stacks of free registers, one value after the other: each with the
// register freed last first, and JPP_NONE at its end.
static jpp_status_t* list_free(const finisher_t* f, jpp_u32_vec_t* free) {
  free->count = 0;
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(free, f->pooled.count + f->next_free.count));
  for (size_t i = 0; i < f->pooled.count; ++i) {
    uint32_t reg = f->pools[f->pooled.data[i]].newest_free;
    for (; reg != JPP_NONE; reg = f->next_free.data[reg]) free->data[free->count++] = reg;
    free->data[free->count++] = JPP_NONE;
  }
  return NULL;
}

// Maps each register at the end of the first repetition to the one in its place at the
// end of the second. Free registers succeed those at the same height of the stack, and
// registers that are not used again keep their names. JPP_INTERNAL_ERROR: the stacks
// differ, so that the omitted repetitions must be drafted, too.
static jpp_status_t* map_registers(const finisher_t* f, uint32_t* next) {
  bool same = f->free_now.count == f->free_then.count;
  for (uint32_t r = 0; r < f->next_free.count; ++r) next[r] = r;
  for (size_t i = 0; i < f->free_now.count && same; ++i) {
    uint32_t from = f->free_then.data[i], to = f->free_now.data[i];
    same = (from == JPP_NONE) == (to == JPP_NONE);
    if (same && from != JPP_NONE) next[from] = to;
  }
  if (!same) {
    return jpp_status_make(
        JPP_INTERNAL_ERROR,
        "two repetitions end with different numbers of free registers");
  }
  for (size_t i = 0; i < f->draft->successors.count; ++i) {
    const jpp_successor_t* pair = &f->draft->successors.data[i];
    next[f->reg.data[pair->from]] = f->reg.data[pair->to];
  }
  return NULL;
}

// Sets power[r] to `next` applied `times` times to register r, by repeated squaring;
// `scratch` has room for 2 * count registers.
static void raise_map(const uint32_t* next, uint32_t count, uint32_t times,
                      uint32_t* scratch, uint32_t* power) {
  uint32_t *square = scratch, *old = scratch + count;
  memcpy(square, next, count * sizeof(*next));
  for (uint32_t r = 0; r < count; ++r) power[r] = r;
  for (; times; times /= 2) {
    for (uint32_t r = 0; times % 2 && r < count; ++r) power[r] = square[power[r]];
    memcpy(old, square, count * sizeof(*next));
    for (uint32_t r = 0; r < count; ++r) square[r] = old[old[r]];
  }
}

// The number of a microbatch is a constant in a register of its own.
static void map_constants(const finisher_t* f, uint32_t* next) {
  const jpp_program_builder_t* b = f->b;
  uint32_t end = b->first_constant[f->repetition->loop + 1];
  for (uint32_t i = b->first_constant[f->repetition->loop];
       i + f->repetition->shift < end; ++i) {
    uint32_t from = b->constants[i], to = b->constants[i + f->repetition->shift];
    if (from == JPP_NONE || to == JPP_NONE) continue;
    next[f->reg.data[from]] = f->reg.data[to];
  }
}

// Whether share_part() found the operands of a deletion among those of the instruction
// before it.
static bool is_part_of(const jpp_instr_t* deletion, const jpp_instr_t* last) {
  uint64_t end = (uint64_t)deletion->first_operand + deletion->num_args;
  uint64_t last_end = (uint64_t)last->first_operand + last->num_args + last->num_results;
  return deletion->kind == JPP_INSTR_DELETE &&
         deletion->first_operand >= last->first_operand && end <= last_end;
}

// Sets *out_first to the list with the registers of the next repetition.
static jpp_status_t* rename_list(finisher_t* f, operand_list_t list, const uint32_t* next,
                                 uint32_t* out_first) {
  renamed_list_t* known = &f->known_renamed[list.first % kKnownLists];
  if (known->list.first == list.first && known->list.count == list.count) {
    *out_first = known->next_first;
    return NULL;
  }
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&f->operands, list.count));
  *out_first = (uint32_t)f->operands.count;
  const uint32_t* old = f->operands.data + list.first;
  uint32_t* renamed = f->operands.data + f->operands.count;
  for (uint32_t i = 0; i < list.count; ++i) renamed[i] = next[old[i]];
  f->operands.count += list.count;
  share_list(&f->operands, f->known_operands, out_first);
  *known = (renamed_list_t){.list = list, .next_first = *out_first};
  return NULL;
}

// Adds the instruction `length` places back once more, in the next repetition.
static jpp_status_t* repeat_instr(finisher_t* f, size_t length, const uint32_t* next) {
  const jpp_instr_t* from = &f->instrs.data[f->instrs.count - length];
  jpp_instr_t instr = *from;
  if (instr.microbatch != JPP_NONE) instr.microbatch += f->repetition->shift;
  if (is_part_of(from, &from[-1])) {
    const jpp_instr_t* last = &f->instrs.data[f->instrs.count - 1];
    instr.first_operand += last->first_operand - from[-1].first_operand;
    return JPP_VEC_PUSH(&f->instrs, instr);
  }
  operand_list_t list = {from->first_operand, instr.num_args + instr.num_results};
  JPP_RETURN_IF_ERROR(rename_list(f, list, next, &instr.first_operand));
  return JPP_VEC_PUSH(&f->instrs, instr);
}

// Renames the registers that are free and those that later instructions read.
static void rename_registers(finisher_t* f, const uint32_t* name) {
  const uint32_t* free = f->free_now.data;
  for (size_t i = 0; i < f->pooled.count; ++i) {
    uint32_t* link = &f->pools[f->pooled.data[i]].newest_free;
    for (; *free != JPP_NONE; ++free) {
      *link = name[*free];
      link = &f->next_free.data[*link];
    }
    *link = *free++;
  }
  for (size_t i = 0; i < f->draft->successors.count; ++i) {
    uint32_t* reg = &f->reg.data[f->draft->successors.data[i].to];
    *reg = name[*reg];
  }
}

// Adds the omitted repetitions behind the second one. The rest of the draft then
// continues with the registers that the last of them leaves.
static jpp_status_t* add_repetitions(finisher_t* f) {
  uint32_t count = (uint32_t)f->next_free.count;
  size_t length = f->instrs.count - f->first_repeated;
  uint32_t* maps = NULL;
  JPP_RETURN_IF_ERROR(list_free(f, &f->free_now));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY((size_t)count * 4, &maps));
  uint32_t *next = maps, *last = maps + count, *scratch = maps + (size_t)count * 2;
  jpp_status_t* status = map_registers(f, next);
  if (!status) {
    raise_map(next, count, f->repetition->omitted, scratch, last);
    map_constants(f, next);
  }
  for (size_t i = length * f->repetition->omitted; i > 0 && !status; --i) {
    status = repeat_instr(f, length, next);
  }
  if (!status) rename_registers(f, last);
  jpp_free(maps);
  return status;
}

// Called before each drafted instruction.
static jpp_status_t* check_repetition(finisher_t* f, uint32_t at) {
  if (!f->repetition->omitted) return NULL;
  if (at == jpp__repetition_end(f->repetition, 1)) return add_repetitions(f);
  if (at != jpp__repetition_end(f->repetition, 0)) return NULL;
  f->first_repeated = f->instrs.count;
  return list_free(f, &f->free_then);
}

// --- Ends -----------------------------------------------------------------------------

// Places the registers that are filled before the first instruction. Unused ones die
// immediately.
static jpp_status_t* place_given(finisher_t* f) {
  for (size_t i = 0; i < f->draft->inputs.count; ++i) {
    uint32_t id = f->draft->inputs.data[i].reg;
    JPP_RETURN_IF_ERROR(take_register(f, id));
    JPP_RETURN_IF_ERROR(add_live_register(f, id));
    if (virtual_at(f, id)->last_use == JPP_NONE && !is_kept(f, id)) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->dead, id));
    }
  }
  for (size_t i = 0; i < f->draft->constants.count; ++i) {
    JPP_RETURN_IF_ERROR(take_register(f, f->draft->constants.data[i].reg));
    JPP_RETURN_IF_ERROR(add_live_register(f, f->draft->constants.data[i].reg));
  }
  note_peak(f);
  return delete_dead(f);
}

static jpp_status_t* copy_ends(finisher_t* f) {
  jpp_program_t* program = f->program;
  for (size_t i = 0; i < f->draft->inputs.count; ++i) {
    f->draft->inputs.data[i].reg = f->reg.data[f->draft->inputs.data[i].reg];
  }
  for (size_t i = 0; i < f->draft->constants.count; ++i) {
    f->draft->constants.data[i].reg = f->reg.data[f->draft->constants.data[i].reg];
  }
  for (size_t i = 0; i < f->draft->outputs.count; ++i) {
    f->draft->outputs.data[i].reg = f->reg.data[f->draft->outputs.data[i].reg];
  }
  program->num_inputs = (uint32_t)f->draft->inputs.count;
  program->num_constants = (uint32_t)f->draft->constants.count;
  program->num_outputs = (uint32_t)f->draft->outputs.count;
  jpp_arena_t* arena = f->b->arena;
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&f->draft->inputs, arena, &program->inputs));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&f->draft->constants, arena, &program->constants));
  return JPP_VEC_TO_ARENA(&f->draft->outputs, arena, &program->outputs);
}

static uint64_t reserved_bytes(const jpp_program_builder_t* b, uint32_t rank) {
  uint64_t bytes = 0;
  for (size_t i = 0; i < b->channels.count; ++i) {
    const jpp_plan_channel_t* channel = &b->channels.data[i].channel;
    if (channel->dst != rank) continue;
    bytes =
        jpp__bytes_add(bytes, jpp__bytes_multiply(channel->slots, channel->max_bytes));
  }
  return bytes;
}

// After the last instruction, outputs that are copies get memory of their own.
static jpp_status_t* add_copies(finisher_t* f) {
  for (size_t i = 0; i < f->draft->outputs.count; ++i) {
    const jpp_program_output_t* output = &f->draft->outputs.data[i];
    if (output->copy) JPP_RETURN_IF_ERROR(add_live_register(f, output->reg));
  }
  note_peak(f);
  return NULL;
}

static jpp_status_t* finish_program(finisher_t* f) {
  jpp_program_t* program = f->program;
  program->reserved_bytes = reserved_bytes(f->b, program->rank);
  JPP_RETURN_IF_ERROR(add_live(f, JPP_MEMORY_DEVICE, program->reserved_bytes));
  JPP_RETURN_IF_ERROR(place_given(f));
  const jpp_instr_drafts_t* drafts = &f->b->instrs[program->rank];
  const uint32_t* ids = f->draft->operands.data;
  for (uint32_t at = 0; at < jpp__drafted_count(f->b, program->rank); ++at) {
    const jpp_instr_draft_t* draft =
        &drafts->data[jpp__drafted_index(f->b, program->rank, at)];
    JPP_RETURN_IF_ERROR(check_repetition(f, at));
    JPP_RETURN_IF_ERROR(finish_instr(f, at, draft, ids));
    ids += jpp__instr_num_args(f->b, draft) + jpp__instr_num_results(f->b, draft);
  }
  JPP_RETURN_IF_ERROR(add_copies(f));
  program->num_instrs = (uint32_t)f->instrs.count;
  program->num_operands = (uint32_t)f->operands.count;
  program->num_operand_values = (uint32_t)f->operand_values.count;
  program->num_registers = (uint32_t)f->next_free.count;
  jpp_arena_t* arena = f->b->arena;
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&f->instrs, arena, &program->instrs));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&f->operands, arena, &program->operands));
  JPP_RETURN_IF_ERROR(
      JPP_VEC_TO_ARENA(&f->operand_values, arena, &program->operand_values));
  return copy_ends(f);
}

// Empties the finisher for the next rank.
static jpp_status_t* begin_rank(finisher_t* f, uint32_t rank, jpp_program_t* program) {
  *program = (jpp_program_t){.rank = rank};
  f->repetition = &f->b->repetitions[rank];
  f->program = program;
  for (size_t i = 0; i < f->pooled.count; ++i) {
    f->pools[f->pooled.data[i]] = (register_pool_t){.newest_free = JPP_NONE};
  }
  f->pooled.count = f->next_free.count = f->instrs.count = f->operands.count =
      f->operand_values.count = 0;
  f->dead.count = f->reg.count = 0;
  memset(f->live_bytes, 0, sizeof(f->live_bytes));
  memset(f->known_operands, 0, kKnownLists * sizeof(*f->known_operands));
  memset(f->known_values, 0, kKnownLists * sizeof(*f->known_values));
  memset(f->known_renamed, 0, kKnownLists * sizeof(*f->known_renamed));
  return JPP_VEC_RESERVE(&f->reg, f->draft->virtuals.count);
}

static jpp_status_t* finish_rank(finisher_t* f, uint32_t rank, jpp_program_t* program) {
  jpp_repetition_t* repetition = &f->b->repetitions[rank];
  JPP_RETURN_IF_ERROR(jpp__program_draft(f->b, rank));
  JPP_RETURN_IF_ERROR(begin_rank(f, rank, program));
  jpp_status_t* status = finish_program(f);
  if (jpp_status_code(status) == JPP_INTERNAL_ERROR && repetition->omitted) {
    jpp_status_free(status);
    repetition->omitted = 0;
    return finish_rank(f, rank, program);
  }
  JPP_RETURN_IF_ERROR(status);
  jpp_vec_deinit(&f->b->instrs[rank]);
  return NULL;
}

static jpp_status_t* finish_ranks(finisher_t* f, jpp_program_t* programs) {
  jpp_arena_t* scratch = &f->b->scratch;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, kKnownLists, &f->known_operands));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, kKnownLists, &f->known_values));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, kKnownLists, &f->known_renamed));
  uint32_t values = f->b->staged->num_values;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &f->pools));
  for (uint32_t v = 0; v < values; ++v) f->pools[v].newest_free = JPP_NONE;
  for (uint32_t r = 0; r < f->b->staged->ranks; ++r) {
    JPP_RETURN_IF_ERROR_IN(finish_rank(f, r, &programs[r]), "rank %u", r);
  }
  return NULL;
}

static void finisher_deinit(finisher_t* f) {
  jpp_vec_deinit(&f->reg);
  jpp_vec_deinit(&f->pooled);
  jpp_vec_deinit(&f->next_free);
  jpp_vec_deinit(&f->free_then);
  jpp_vec_deinit(&f->free_now);
  jpp_vec_deinit(&f->instrs);
  jpp_vec_deinit(&f->operands);
  jpp_vec_deinit(&f->operand_values);
  jpp_vec_deinit(&f->dead);
}

jpp_status_t* jpp__program_finish(jpp_program_builder_t* b, jpp_plan_t* plan) {
  jpp_program_t* programs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(b->arena, b->staged->ranks, &programs));
  finisher_t finisher = {.b = b, .draft = &b->draft};
  jpp_status_t* status = finish_ranks(&finisher, programs);
  finisher_deinit(&finisher);
  JPP_RETURN_IF_ERROR(status);
  plan->staged = b->staged;
  plan->ranks = b->staged->ranks;
  plan->programs = programs;
  plan->bindings = b->bindings;
  plan->value_bytes = b->value_bytes;
  plan->num_channels = (uint32_t)b->channels.count;
  jpp_plan_channel_t* channels = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(b->arena, b->channels.count, &channels));
  for (size_t i = 0; i < b->channels.count; ++i) {
    channels[i] = b->channels.data[i].channel;
  }
  plan->channels = channels;
  return NULL;
}
