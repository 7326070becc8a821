"""From the graph to a checked plan: shardings, schedule search, checks. Nothing here compiles
or runs tasks, except that `Auto` measures through a function passed to it."""
