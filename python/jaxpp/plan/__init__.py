"""From the graph to a proved plan: shardings, schedules that are searched, the checks. Nothing
here compiles; `Auto` alone runs something, by a function that it is given."""
