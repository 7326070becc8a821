"""The PJRT client that runs tasks, its devices, and the processes that share a mesh."""
