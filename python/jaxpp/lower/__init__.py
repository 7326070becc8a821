"""StableHLO for the tasks of a plan, and their executables."""
