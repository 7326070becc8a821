// Arrays that JAX's client and this library's client share in memory through DLPack:
// lends a Value's shard as a capsule for JAX or numpy, and makes a Value over the memory
// of JAX's capsules.
//
// A tensor may be released on a thread of a plugin that must not wait for the GIL. Such a
// thread puts the references to Python objects on a list, and a thread with the GIL drops
// them.
#include <stdatomic.h>

#include "python/core.h"

// --- The binary interface of DLPack before 1.0 ----------------------------------------

// https://dmlc.github.io/dlpack/latest/c_api.html: DLDataTypeCode, DLTensor and
// DLManagedTensor, which is what a capsule named "dltensor" points to.
enum {
  kDlInt = 0,
  kDlUint = 1,
  kDlFloat = 2,
  kDlBfloat = 4,
  kDlComplex = 5,
  kDlBool = 6
};

typedef struct dl_tensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements; NULL: dense, last dimension fastest
  uint64_t byte_offset;
} dl_tensor_t;

typedef struct dl_managed_tensor {
  dl_tensor_t tensor;
  void* manager;
  void (*deleter)(struct dl_managed_tensor* self);  // may be called on any thread
} dl_managed_tensor_t;

static const char kCapsule[] = "dltensor";

// --- References that are dropped later ------------------------------------------------

// A reference that a thread without the GIL wants to drop: the first member of a
// jpp_alloc()ed block, which is freed together with it.
typedef struct dropped {
  struct dropped* next;
  PyObject* object;
} dropped_t;

static _Atomic(dropped_t*) g_dropped;
static atomic_bool
    g_closed;  // the interpreter is about to exit: nothing is dropped any more

// Called with the GIL.
static int work_off_dropped(void* unused) {
  (void)unused;
  dropped_t* each = atomic_exchange(&g_dropped, NULL);
  while (each) {
    dropped_t* next = each->next;
    Py_DECREF(each->object);
    jpp_free(each);
    each = next;
  }
  return 0;
}

// Any thread, with the GIL or without. When Python's queue of calls is full, the list
// waits for the next Value.
static void drop_later(dropped_t* dropped) {
  dropped->next = atomic_load(&g_dropped);
  while (!atomic_compare_exchange_weak(&g_dropped, &dropped->next, dropped)) continue;
  if (!atomic_load(&g_closed)) Py_AddPendingCall(work_off_dropped, NULL);
}

void jpp_py_dropped_collect(void) {
  if (atomic_load(&g_dropped)) work_off_dropped(NULL);
}

void jpp_py_dropped_close(void) { atomic_store(&g_closed, true); }

// --- Lending --------------------------------------------------------------------------

typedef struct lent_tensor {
  dropped_t client;  // holds the client that owns the memory
  dl_managed_tensor_t managed;
  jpp_loan_t loan;
  int64_t shape[JPP_BUFFER_MAX_RANK];
} lent_tensor_t;

static void delete_lent(dl_managed_tensor_t* managed) {
  lent_tensor_t* lent = managed->manager;
  jpp_array_reclaim(&lent->loan);
  drop_later(&lent->client);
}

// Called if no consumer took the tensor out of the capsule.
static void delete_capsule(PyObject* capsule) {
  if (!PyCapsule_IsValid(capsule, kCapsule)) return;
  dl_managed_tensor_t* managed = PyCapsule_GetPointer(capsule, kCapsule);
  managed->deleter(managed);
}

// Returns false for types that have no code in DLPack.
static bool set_type(jpp_dtype_t dtype, dl_tensor_t* tensor) {
  static const uint8_t kCodesPlusOne[JPP_DTYPE_COUNT] = {
      [JPP_DTYPE_BOOL] = kDlBool + 1,    [JPP_DTYPE_S8] = kDlInt + 1,
      [JPP_DTYPE_S16] = kDlInt + 1,      [JPP_DTYPE_S32] = kDlInt + 1,
      [JPP_DTYPE_S64] = kDlInt + 1,      [JPP_DTYPE_U8] = kDlUint + 1,
      [JPP_DTYPE_U16] = kDlUint + 1,     [JPP_DTYPE_U32] = kDlUint + 1,
      [JPP_DTYPE_U64] = kDlUint + 1,     [JPP_DTYPE_BF16] = kDlBfloat + 1,
      [JPP_DTYPE_F16] = kDlFloat + 1,    [JPP_DTYPE_F32] = kDlFloat + 1,
      [JPP_DTYPE_F64] = kDlFloat + 1,    [JPP_DTYPE_C64] = kDlComplex + 1,
      [JPP_DTYPE_C128] = kDlComplex + 1,
  };
  if (!kCodesPlusOne[dtype]) return false;
  tensor->type_code = (uint8_t)(kCodesPlusOne[dtype] - 1);
  tensor->type_bits = (uint8_t)jpp_dtype_bits(dtype);
  tensor->type_lanes = 1;
  return true;
}

// Describes the tensor of a loan; with `flat`, as bytes in one dimension. Returns false
// if there is none: the type has no code, the device packs its elements, or it has no
// elements.
static bool describe_loan(lent_tensor_t* lent, bool flat) {
  const jpp_buffer_shape_t* shape = &lent->loan.shape;
  dl_tensor_t* tensor = &lent->managed.tensor;
  uint64_t elements = 1;
  if (shape->dtype == JPP_DTYPE_INVALID || shape->rank > JPP_BUFFER_MAX_RANK)
    return false;
  for (uint32_t i = 0; i < shape->rank; ++i) {
    lent->shape[i] = shape->dims[i];
    elements *= (uint64_t)shape->dims[i];
  }
  uint64_t bytes = elements * (jpp_dtype_bits(shape->dtype) / 8);
  if (!bytes || bytes != jpp_dtype_device_bytes(shape->dtype, elements)) return false;
  tensor->data = lent->loan.memory;
  tensor->shape = lent->shape;
  tensor->ndim = flat ? 1 : (int32_t)shape->rank;
  if (flat) lent->shape[0] = (int64_t)bytes;
  return set_type(flat ? JPP_DTYPE_U8 : shape->dtype, tensor);
}

// Returns None if the memory cannot be shared. Owns `lent`, from which the loan is made.
static PyObject* wrap_loan(lent_tensor_t* lent, bool flat) {
  PyObject* capsule = NULL;
  bool fits = describe_loan(lent, flat);
  if (fits) capsule = PyCapsule_New(&lent->managed, kCapsule, delete_capsule);
  if (!capsule) delete_lent(&lent->managed);
  return fits ? capsule : Py_NewRef(Py_None);
}

PyObject* jpp_py_value_lend(PyObject* object, PyObject* args) {
  const jpp_py_value_t* value = (jpp_py_value_t*)object;
  uint32_t rank = 0, device = 0, device_type = 0, device_id = 0;
  int flat = 0;
  if (!PyArg_ParseTuple(args, "O&O&O&O&p", jpp_py_u32_converter, &rank,
                        jpp_py_u32_converter, &device, jpp_py_u32_converter, &device_type,
                        jpp_py_u32_converter, &device_id, &flat)) {
    return NULL;
  }
  jpp_py_dropped_collect();
  if (!jpp_py_value_check_shard(value->array, rank, device)) return NULL;
  lent_tensor_t* lent = NULL;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(1, &lent))) return NULL;
  jpp_py_wait_t wait;
  jpp_py_wait_begin(&wait);
  jpp_status_t* status =
      jpp_array_lend(value->array, rank, device, &wait.interrupt, &lent->loan);
  jpp_status_code_t code = jpp_status_code(status);
  bool refused = code == JPP_UNSUPPORTED || code == JPP_INVALID_ARGUMENT;
  if (refused) jpp_status_free(status);
  bool ok = jpp_py_wait_end(&wait, refused ? NULL : status);
  if (!ok || refused) {
    jpp_free(lent);
    return ok ? Py_NewRef(Py_None) : NULL;
  }
  lent->client.object = Py_NewRef(value->client);
  lent->managed.manager = lent;
  lent->managed.deleter = delete_lent;
  lent->managed.tensor.device_type = (int32_t)device_type;
  lent->managed.tensor.device_id = (int32_t)device_id;
  return wrap_loan(lent, flat);
}

// --- Borrowing ------------------------------------------------------------------------

// The capsules are not consumed: dropping them frees their tensors.
static void release_capsules(void* user) { drop_later(user); }

static bool is_dense(const dl_tensor_t* tensor) {
  int64_t expected = 1;
  for (int32_t i = tensor->ndim; tensor->strides && i-- > 0;) {
    if (tensor->shape[i] != 1 && tensor->strides[i] != expected) return false;
    expected *= tensor->shape[i];
  }
  return true;
}

static bool has_elements(const dl_tensor_t* tensor) {
  for (int32_t i = 0; i < tensor->ndim; ++i) {
    if (tensor->shape[i] == 0) return false;
  }
  return tensor->data != NULL;
}

// Returns false with an exception for an object that is not a tensor; `out_fits`: whether
// its memory can be shared.
static bool read_capsule(PyObject* capsule, jpp_dtype_t dtype,
                         jpp_foreign_memory_t* memory, bool* out_fits) {
  const dl_managed_tensor_t* managed =
      capsule ? PyCapsule_GetPointer(capsule, kCapsule) : NULL;
  if (!managed) return false;
  const dl_tensor_t* tensor = &managed->tensor;
  memory->memory = (char*)tensor->data + tensor->byte_offset;
  memory->shape = (jpp_buffer_shape_t){
      .dtype = dtype, .rank = (uint32_t)tensor->ndim, .dims = tensor->shape};
  *out_fits = has_elements(tensor) && is_dense(tensor) && tensor->type_lanes == 1 &&
              tensor->type_bits == jpp_dtype_bits(dtype);
  return true;
}

jpp_status_t* jpp_py_capsules_lend(PyObject* capsules, jpp_dtype_t dtype, uint32_t count,
                                   jpp_foreign_memory_t* out_memory,
                                   void (**out_release)(void* owner), void** out_owner) {
  bool fit = true;
  for (uint32_t i = 0; i < count; ++i) {
    bool fits = false;
    PyObject* capsule = PyTuple_GetItem(capsules, (Py_ssize_t)i);
    if (!read_capsule(capsule, dtype, &out_memory[i], &fits)) return NULL;
    fit = fit && fits;
  }
  if (!fit) return jpp_status_make(JPP_UNSUPPORTED, "expected dense memory to borrow");
  dropped_t* owner = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &owner));
  owner->object = Py_NewRef(capsules);
  *out_owner = owner;
  *out_release = release_capsules;
  return NULL;
}
