"""From a step function to the planner's graph: the functions that users call in a step, and the
conversion of JAX's trace. These modules do not depend on plans or devices."""
