// Waits for a change of any array or outcome, with the lock of all arrays held.
#ifndef JPP_ARRAY_LOCK_H_
#define JPP_ARRAY_LOCK_H_

#include "jaxpp/array.h"

// Releases the lock in the meantime; false: interrupted. The caller must check its
// condition again.
bool jpp__arrays_wait(const jpp_interrupt_t* interrupt);
void jpp__arrays_changed(void);

#endif  // JPP_ARRAY_LOCK_H_
