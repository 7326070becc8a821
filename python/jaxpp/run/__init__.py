"""From a plan to steps that run: lowers and compiles tasks, and places arrays on the
devices."""
