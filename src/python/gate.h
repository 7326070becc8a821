// Lets threads of a plugin enter Python. A thread that asks for the GIL while the
// interpreter shuts down is ended in the middle of the plugin's code. Therefore the gate
// first refuses new threads and then waits until those inside have left.
#ifndef JPP_PYTHON_GATE_H_
#define JPP_PYTHON_GATE_H_

#include <stdatomic.h>
#include <stdbool.h>

// All zero: open, with no thread inside.
typedef struct jpp_py_gate {
  atomic_bool closed;
  atomic_int inside;
} jpp_py_gate_t;

// Call it without the GIL, which may then be taken. False: the gate is closed for good.
bool jpp_py_gate_enter(jpp_py_gate_t* gate);
void jpp_py_gate_leave(jpp_py_gate_t* gate);
// Call it with the GIL, which is released meanwhile; returns when no thread is inside.
void jpp_py_gate_close(jpp_py_gate_t* gate);

#endif  // JPP_PYTHON_GATE_H_
