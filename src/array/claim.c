// Decides which arrays a step may take: a donated array must not be deleted, and must be
// passed only once.
#include "array/claim.h"

#include "array/lock.h"
#include "base/null.h"
#include "base/struct_size.h"

// An argument of a call.
typedef struct claim {
  const jpp_params_t* params;
  jpp_array_t* const* arrays;  // [params->count]
} claim_t;

static jpp_array_t* root_of(const claim_t* claim, uint32_t arg) {
  return claim->arrays[arg] ? jpp__array_root(claim->arrays[arg]) : NULL;
}

// Whether the argument, or the array that its donation would delete, is deleted.
static bool is_deleted(const claim_t* claim, uint32_t arg) {
  return claim->arrays[arg]->deleted || root_of(claim, arg)->deleted;
}

// The array that the argument donates, or NULL.
static jpp_array_t* donated_root_of(const claim_t* claim, uint32_t arg) {
  return claim->params->donated[arg] ? root_of(claim, arg) : NULL;
}

// --- Refusals -------------------------------------------------------------------------

static jpp_status_t* used_twice_error(const claim_t* claim, uint32_t first,
                                      uint32_t second) {
  return jpp_status_make(
      JPP_DONATED_ERROR,
      "arguments %s and %s are the same array, which %s donates; expected a donated "
      "array once",
      claim->params->names[first], claim->params->names[second],
      claim->params->donated[first] ? "the first" : "the second");
}

// Says why the array of `arg`, which is deleted, cannot be used: it was deleted before
// this call, or another argument, one of the first `marked`, donates it too.
static jpp_status_t* unusable_error(const claim_t* claim, uint32_t arg, uint32_t marked) {
  for (uint32_t b = 0; b < marked; ++b) {
    if (b == arg || donated_root_of(claim, b) != root_of(claim, arg)) continue;
    return used_twice_error(claim, b < arg ? b : arg, b < arg ? arg : b);
  }
  const jpp_array_t* given = claim->arrays[arg];
  const jpp_array_t* deleted = given->deleted ? given : root_of(claim, arg);
  return jpp_status_make(
      JPP_DONATED_ERROR, "argument %s: expected an array, found one that %s",
      claim->params->names[arg], jpp__array_deletion_reason_of(deleted));
}

// --- Claims ---------------------------------------------------------------------------

static jpp_status_t* await_readers(const claim_t* claim,
                                   const jpp_interrupt_t* interrupt) {
  for (uint32_t a = 0; a < claim->params->count;) {
    const jpp_array_t* array = donated_root_of(claim, a);
    if (!array || is_deleted(claim, a) ||
        (!array->readers && !claim->arrays[a]->readers)) {
      ++a;
      continue;
    }
    if (!jpp__arrays_wait(interrupt)) {
      return jpp_status_make(JPP_CANCELLED,
                             "the call was interrupted while it waited for its turn");
    }
    a = 0;
  }
  return NULL;
}

// Marks the donated arrays in order, up to the first one that is deleted already; returns
// that argument, or the count.
static uint32_t mark_donated(const claim_t* claim) {
  for (uint32_t a = 0; a < claim->params->count; ++a) {
    jpp_array_t* array = donated_root_of(claim, a);
    if (!array) continue;
    if (is_deleted(claim, a)) return a;
    array->deleted = true;
  }
  return claim->params->count;
}

static void unmark_donated(const claim_t* claim, uint32_t marked) {
  for (uint32_t a = 0; a < marked; ++a) {
    jpp_array_t* array = donated_root_of(claim, a);
    if (array) array->deleted = false;
  }
}

// The first argument that is only read and whose array is deleted, or the count.
static uint32_t find_deleted_reader(const claim_t* claim) {
  uint32_t a = 0;
  for (; a < claim->params->count; ++a) {
    bool reads = claim->arrays[a] && !claim->params->donated[a];
    if (reads && is_deleted(claim, a)) break;
  }
  return a;
}

// Checks readers after all are marked, so that an array that one argument donates and
// another one reads is refused whichever comes first.
jpp_status_t* jpp__claim_donated(const jpp_params_t* params, jpp_array_t* const* arrays,
                                 const jpp_interrupt_t* interrupt) {
  const claim_t claim = {.params = params, .arrays = arrays};
  JPP_RETURN_IF_ERROR(await_readers(&claim, interrupt));
  uint32_t marked = mark_donated(&claim);
  uint32_t refused = marked < params->count ? marked : find_deleted_reader(&claim);
  if (refused == params->count) return NULL;
  jpp_status_t* status = unusable_error(&claim, refused, marked);
  unmark_donated(&claim, marked);
  return status;
}

void jpp__claim_lose(const jpp_params_t* params, jpp_array_t* const* arrays) {
  const claim_t claim = {.params = params, .arrays = arrays};
  for (uint32_t a = 0; a < params->count; ++a) {
    jpp_array_t* array = donated_root_of(&claim, a);
    if (array) array->lost = arrays[a]->lost = true;
  }
}

// --- Steps of other processes ---------------------------------------------------------

jpp_status_t* jpp_array_create_elsewhere(jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(out_array);
  const jpp_array_layout_t layout = {.struct_size = sizeof(layout)};
  const jpp_array_type_t type = {.dtype = JPP_DTYPE_INVALID};
  return jpp__array_promise(&layout, &type, NULL, out_array);
}

static jpp_status_t* read_params(const jpp_params_t* given, jpp_params_t* out_params) {
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_params_t, count, given, out_params));
  if (out_params->count) JPP_RETURN_IF_NULL(out_params->names, out_params->donated);
  return NULL;
}

jpp_status_t* jpp_arrays_claim(const jpp_params_t* params, jpp_array_t* const* arrays,
                               const jpp_interrupt_t* interrupt) {
  JPP_RETURN_IF_NULL(params, arrays);
  jpp_params_t full;
  JPP_RETURN_IF_ERROR(read_params(params, &full));
  jpp__arrays_lock();
  jpp_status_t* status = jpp__claim_donated(&full, arrays, interrupt);
  for (uint32_t a = 0; a < full.count && !status; ++a) {
    if (full.donated[a] && arrays[a]) arrays[a]->deleted = true;
  }
  jpp__arrays_unlock();
  for (uint32_t a = 0; a < full.count && !status; ++a) {
    if (!full.donated[a] || !arrays[a]) continue;
    jpp__array_settle(jpp__array_root(arrays[a]));
    jpp__array_settle(arrays[a]);
  }
  return status;
}

jpp_status_t* jpp_arrays_lose(const jpp_params_t* params, jpp_array_t* const* arrays) {
  JPP_RETURN_IF_NULL(params, arrays);
  jpp_params_t full;
  JPP_RETURN_IF_ERROR(read_params(params, &full));
  jpp__arrays_lock();
  jpp__claim_lose(&full, arrays);
  jpp__arrays_unlock();
  return NULL;
}
