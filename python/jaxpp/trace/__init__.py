"""From a step function to the planner's graph: what a user writes in a step, and how the trace
that JAX makes of it is read. Nothing here knows of plans or devices."""
