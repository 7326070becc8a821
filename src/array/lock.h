// Waiting for a change of any array or outcome, with the lock of all held.
#ifndef JPP_ARRAY_LOCK_H_
#define JPP_ARRAY_LOCK_H_

#include "jaxpp/array.h"

// Gives the lock up meanwhile; false: interrupted. Look again at what was waited for.
bool jpp__arrays_wait(const jpp_interrupt_t* interrupt);
void jpp__arrays_changed(void);

#endif  // JPP_ARRAY_LOCK_H_
