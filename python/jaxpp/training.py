"""The names that scripts import from `jaxpp.training`."""

from jaxpp.operations import Add, Concat, Max
from jaxpp.operations import Operation as Op
from jaxpp.trace.loop import treduce, treduce_i

__all__ = ["Add", "Concat", "Max", "Op", "treduce", "treduce_i"]
