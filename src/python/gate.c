// A thread first counts itself and then checks the flag: either the thread that closes
// the gate sees it in the count, or it sees that the gate is closed.
#include "python/gate.h"

#include <time.h>

#include "python/core.h"

bool jpp_py_gate_enter(jpp_py_gate_t* gate) {
  atomic_fetch_add(&gate->inside, 1);
  if (!atomic_load(&gate->closed)) return true;
  jpp_py_gate_leave(gate);
  return false;
}

void jpp_py_gate_leave(jpp_py_gate_t* gate) { atomic_fetch_sub(&gate->inside, 1); }

void jpp_py_gate_close(jpp_py_gate_t* gate) {
  const struct timespec pause = {.tv_nsec = 1000000};
  atomic_store(&gate->closed, true);
  Py_BEGIN_ALLOW_THREADS
    while (atomic_load(&gate->inside)) nanosleep(&pause, NULL);
  Py_END_ALLOW_THREADS
}
