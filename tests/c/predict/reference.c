#include "reference.h"

#include <math.h>
#include <stdlib.h>

static bool in_process(const reference_t* ref, uint32_t rank, uint32_t process) {
  return ref->machine->rank_process[rank] == process;
}

static letter_t* oldest_letter(reference_t* ref, uint32_t channel) {
  for (uint32_t i = 0; i < ref->num_letters; ++i) {
    letter_t* letter = &ref->letters[i];
    if (!letter->moves && letter->channel == channel && !letter->received) return letter;
  }
  return NULL;
}

static bool may_issue(reference_t* ref, uint32_t rank, const jpp_instr_t* instr) {
  if (instr->kind == JPP_INSTR_RUN || instr->kind == JPP_INSTR_DELETE ||
      instr->kind == JPP_INSTR_MOVE) {
    return true;
  }
  const jpp_plan_channel_t* channel = &ref->plan->channels[instr->target];
  if (instr->kind == JPP_INSTR_RECV) {
    const letter_t* letter = oldest_letter(ref, instr->target);
    return letter && (letter->arrived ||
                      in_process(ref, channel->src, ref->machine->rank_process[rank]));
  }
  uint32_t held = 0;
  for (uint32_t i = 0; i < ref->num_letters; ++i) {
    const letter_t* letter = &ref->letters[i];
    held += !letter->moves && letter->channel == instr->target && !letter->received;
  }
  return held < channel->slots;
}

// The next of the task's times: its runs take them in turn.
static double next_time(const reference_t* ref, const jpp_instr_t* instr, uint32_t step) {
  const jpp_predict_options_t* options = ref->options;
  if (!options->first_times) return options->task_times[instr->target];
  const uint64_t* first = &options->first_times[instr->target];
  uint32_t before = step;
  if (instr->microbatch != JPP_NONE) {
    const jpp_staged_t* staged = ref->plan->staged;
    uint32_t loop = staged->tasks[instr->target].loop;
    before = step * staged->graph->loops[loop].microbatches + instr->microbatch;
  }
  return first[1] == first[0]
             ? 0
             : options->task_times[first[0] + before % (first[1] - first[0])];
}

static void issue(reference_t* ref, uint32_t rank, uint32_t step) {
  const jpp_program_t* program = &ref->plan->programs[rank];
  const jpp_instr_t* instr = &program->instrs[ref->at[rank]];
  const uint32_t* operands = program->operands + instr->first_operand;
  uint32_t* registers = ref->registers[rank];
  if (instr->kind == JPP_INSTR_RUN) {
    item_t* item = &ref->items[ref->num_items++];
    *item = (item_t){.rank = rank,
                     .instr = ref->at[rank],
                     .step = step,
                     .num_args = instr->num_args,
                     .num_results = instr->num_results,
                     .device = ref->machine->rank_device[rank],
                     .left = next_time(ref, instr, step)};
    for (uint32_t k = 0; k < instr->num_args; ++k) item->args[k] = registers[operands[k]];
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      item->results[k] = registers[operands[instr->num_args + k]] = ref->tokens++;
    }
  } else if (instr->kind == JPP_INSTR_SEND) {
    uint32_t value = program->operand_values[instr->first_value];
    ref->letters[ref->num_letters++] =
        (letter_t){.channel = instr->target,
                   .token = registers[operands[0]],
                   .out = ref->tokens++,
                   .bytes = (double)ref->plan->value_bytes[value]};
  } else if (instr->kind == JPP_INSTR_RECV) {
    letter_t* letter = oldest_letter(ref, instr->target);
    letter->received = true;
    registers[operands[0]] = letter->out;
  } else if (instr->kind == JPP_INSTR_MOVE) {
    uint32_t value = program->operand_values[instr->first_value];
    letter_t* letter = &ref->letters[ref->num_letters++];
    *letter = (letter_t){.moves = true,
                         .rank = rank,
                         .to_host = instr->target != JPP_MEMORY_DEVICE,
                         .token = registers[operands[0]],
                         .out = ref->tokens++,
                         .bytes = (double)ref->plan->value_bytes[value]};
    registers[operands[1]] = letter->out;
  }
  ++ref->at[rank];
}

static bool step_is_done(const reference_t* ref, uint32_t process, uint32_t step) {
  for (uint32_t i = 0; i < ref->num_items; ++i) {
    const item_t* item = &ref->items[i];
    if (item->step == step && in_process(ref, item->rank, process) && !item->done) {
      return false;
    }
  }
  return true;
}

static bool costs_a_call(const reference_t* ref, const jpp_instr_t* instr) {
  if (instr->kind == JPP_INSTR_RUN) {
    return ref->plan->staged->tasks[instr->target].num_ops > 0 && ref->machine->call > 0;
  }
  return instr->kind != JPP_INSTR_DELETE && ref->machine->call > 0;
}

// Visits the ranks of a process until a call begins or nothing more can be issued.
static bool issue_process(reference_t* ref, uint32_t process) {
  bool any = false;
  uint32_t in_flight = ref->options->steps_in_flight ? ref->options->steps_in_flight : 2;
  while (ref->call_left[process] < 0) {
    uint32_t step = ref->step[process], rank = ref->turn[process];
    if (step == ref->options->steps) return any;
    if (step >= in_flight && !step_is_done(ref, process, step - in_flight)) return any;
    bool all = true;
    for (uint32_t r = 0; r < ref->plan->ranks; ++r) {
      if (in_process(ref, r, process))
        all &= ref->at[r] == ref->plan->programs[r].num_instrs;
    }
    // A step ends at the end of a round.
    if (rank == ref->plan->ranks || !in_process(ref, rank, process)) {
      if (rank == ref->plan->ranks && all) {
        ++ref->step[process];
        any = true;
        for (uint32_t r = 0; r < ref->plan->ranks; ++r) {
          if (!in_process(ref, r, process)) continue;
          ref->at[r] = 0;
          // Everything that it reads is there: token 0.
          for (uint32_t i = 0; i < ref->plan->programs[r].num_registers; ++i) {
            ref->registers[r][i] = 0;
          }
        }
      }
      ref->turn[process] = rank == ref->plan->ranks ? 0 : rank + 1;
      ref->ran[process] = false;
      if (rank == ref->plan->ranks && !all && !ref->advanced[process]) return any;
      if (rank == ref->plan->ranks) ref->advanced[process] = false;
      continue;
    }
    const jpp_program_t* program = &ref->plan->programs[rank];
    const jpp_instr_t* instr = &program->instrs[ref->at[rank]];
    if (ref->at[rank] == program->num_instrs ||
        (instr->kind == JPP_INSTR_RUN && ref->ran[process]) ||
        !may_issue(ref, rank, instr)) {
      ++ref->turn[process];
      ref->ran[process] = false;
      continue;
    }
    any = ref->advanced[process] = true;
    ref->ran[process] |= instr->kind == JPP_INSTR_RUN;
    if (costs_a_call(ref, instr)) {
      ref->call_left[process] = ref->machine->call;
    } else {
      issue(ref, rank, step);
    }
  }
  return any;
}

// Issues what issuing threads can issue now; returns false if that is nothing.
static bool issue_all(reference_t* ref) {
  bool any = false;
  for (uint32_t p = 0; p < ref->plan->ranks; ++p) {
    if (ref->call_left[p] == 0) {
      ref->call_left[p] = -1;
      issue(ref, ref->turn[p], ref->step[p]);
      any = true;
    }
  }
  for (uint32_t p = 0; !any && p < ref->plan->ranks; ++p) any = issue_process(ref, p);
  return any;
}

// Starts runs, up to one that ends at once, and delivers messages. Returns true if any
// did.
static bool settle(reference_t* ref) {
  bool any = false;
  for (uint32_t i = 0; i < ref->num_items; ++i) {
    item_t* item = &ref->items[i];
    bool can = !item->running && !item->done;
    for (uint32_t k = 0; k < item->num_args; ++k) can = can && ref->ready[item->args[k]];
    for (uint32_t j = 0; can && j < i; ++j) {
      can = ref->items[j].done || ref->items[j].device != item->device;
    }
    if (can) {
      item->running = any = true;
      item->start = ref->now;
    }
    if (!item->running || item->left > 0) continue;
    item->running = false;
    item->done = true;
    item->end = ref->now;
    for (uint32_t k = 0; k < item->num_results; ++k) ref->ready[item->results[k]] = true;
    return true;  // the messages of this run are sent before those of the next one
  }
  for (uint32_t i = 0; i < ref->num_letters; ++i) {
    letter_t* letter = &ref->letters[i];
    if (letter->departed && !letter->arrived && letter->arrival <= ref->now) {
      letter->arrived = any = true;
      ref->ready[letter->out] = true;
    }
  }
  return any;
}

// Sends the messages whose values exist; messages of one run leave in the order of their
// sends.
static bool depart_letters(reference_t* ref, double* link_free) {
  bool any = false;
  for (uint32_t i = 0; i < ref->num_letters; ++i) {
    letter_t* letter = &ref->letters[i];
    if (letter->departed || !ref->ready[letter->token]) continue;
    const jpp_plan_channel_t* channel = &ref->plan->channels[letter->channel];
    size_t link = (size_t)channel->src * ref->plan->ranks + channel->dst;
    jpp_link_speed_t speed = {0};
    if (letter->moves) {
      link = (size_t)(kMaxRanks + letter->to_host) * kMaxRanks + letter->rank;
      speed = ref->machine->host;
    } else if (ref->machine->links) {
      speed = ref->machine->links[link];
    } else if (!in_process(ref, channel->src, ref->machine->rank_process[channel->dst])) {
      speed = ref->machine->link;
    }
    double begin = fmax(ref->now, link_free[link]);
    link_free[link] = begin + (speed.bandwidth > 0 ? letter->bytes / speed.bandwidth : 0);
    letter->arrival = link_free[link] + speed.latency;
    letter->departed = any = true;
  }
  return any;
}

static double speed_of(const reference_t* ref, uint32_t host) {
  const jpp_machine_t* machine = ref->machine;
  double wanted = 0;
  for (uint32_t i = 0; i < ref->num_items; ++i) {
    const item_t* item = &ref->items[i];
    if (item->running && machine->rank_host[item->rank] == host) {
      wanted += machine->threads;
    }
  }
  for (uint32_t p = 0; p < ref->plan->ranks; ++p) {
    wanted += ref->call_left[p] >= 0 && machine->rank_host[ref->turn[p]] == host;
  }
  return machine->cores && wanted > machine->cores ? machine->cores / wanted : 1;
}

// Moves the clock to the next event; returns false if there is none.
static bool pass_time(reference_t* ref) {
  double next = INFINITY, speeds[kMaxRanks];
  for (uint32_t h = 0; h < ref->plan->ranks; ++h) speeds[h] = speed_of(ref, h);
  for (uint32_t i = 0; i < ref->num_items; ++i) {
    const item_t* item = &ref->items[i];
    if (!item->running) continue;
    next = fmin(next, item->left / speeds[ref->machine->rank_host[item->rank]]);
  }
  for (uint32_t p = 0; p < ref->plan->ranks; ++p) {
    if (ref->call_left[p] < 0) continue;
    double speed = speeds[ref->machine->rank_host[ref->turn[p]]];
    next = fmin(next, ref->call_left[p] / speed);
  }
  for (uint32_t i = 0; i < ref->num_letters; ++i) {
    const letter_t* letter = &ref->letters[i];
    if (!letter->departed || letter->arrived) continue;
    next = fmin(next, letter->arrival - ref->now);
  }
  if (isinf(next)) return false;
  for (uint32_t i = 0; i < ref->num_items; ++i) {
    item_t* item = &ref->items[i];
    if (!item->running) continue;
    item->left -= next * speeds[ref->machine->rank_host[item->rank]];
    if (item->left < 1e-11) item->left = 0;
  }
  for (uint32_t p = 0; p < ref->plan->ranks; ++p) {
    if (ref->call_left[p] < 0) continue;
    ref->call_left[p] -= next * speeds[ref->machine->rank_host[ref->turn[p]]];
    if (ref->call_left[p] < 1e-11) ref->call_left[p] = 0;
  }
  ref->now += next;
  for (uint32_t i = 0; i < ref->num_letters; ++i) {
    letter_t* letter = &ref->letters[i];
    if (letter->departed && fabs(letter->arrival - ref->now) < 1e-11) {
      letter->arrival = ref->now;
    }
  }
  return true;
}

reference_t* run_reference(const jpp_plan_t* plan, const jpp_predict_options_t* options) {
  reference_t* ref = calloc(1, sizeof(*ref));
  double link_free[(kMaxRanks + 2) * kMaxRanks] = {0};
  *ref = (reference_t){.plan = plan,
                       .options = options,
                       .machine = options->machine,
                       .items = calloc(kMaxItems, sizeof(item_t)),
                       .letters = calloc(kMaxItems, sizeof(letter_t)),
                       .tokens = 1};
  ref->ready[0] = true;  // arguments
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    ref->registers[r] =
        calloc(plan->programs[r].num_registers + 1, sizeof(*ref->registers[r]));
    ref->call_left[r] = -1;
  }
  do {
    while (depart_letters(ref, link_free) || settle(ref) || issue_all(ref)) continue;
  } while (pass_time(ref));
  return ref;
}

void free_reference(reference_t* ref) {
  for (uint32_t r = 0; r < ref->plan->ranks; ++r) free(ref->registers[r]);
  free(ref->items);
  free(ref->letters);
  free(ref);
}
