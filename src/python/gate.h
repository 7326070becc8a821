// The way into Python for threads of a plugin. A thread that asks for the GIL while the
// interpreter shuts down is ended in the middle of the plugin. Therefore the gate first
// refuses new threads and then waits until those inside have left.
#ifndef JPP_PYTHON_GATE_H_
#define JPP_PYTHON_GATE_H_

#include <stdatomic.h>
#include <stdbool.h>

// All zero: open, and no thread is inside.
typedef struct jpp_py_gate {
  atomic_bool closed;
  atomic_int inside;
} jpp_py_gate_t;

// Without the GIL, which may be taken inside. False: closed for good.
bool jpp_py_gate_enter(jpp_py_gate_t* gate);
void jpp_py_gate_leave(jpp_py_gate_t* gate);
// With the GIL, which is released meanwhile: returns when no thread is inside.
void jpp_py_gate_close(jpp_py_gate_t* gate);

#endif  // JPP_PYTHON_GATE_H_
