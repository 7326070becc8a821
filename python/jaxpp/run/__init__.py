"""From a plan to steps that run: tasks lowered and compiled, arrays on the devices."""
