"""The names that scripts import from `jaxpp.pipelining`."""

from jaxpp.trace.marks import mark_stage_end, pipeline_enter_stage

__all__ = ["mark_stage_end", "pipeline_enter_stage"]
