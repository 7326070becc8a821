"""The names that scripts import from `jaxpp.types`."""

from typing import Any, TypeAlias

from jaxpp.mesh import MpmdSharding
from jaxpp.schedules import TaskType

__all__ = ["MpmdIdx", "MpmdSharding", "PyTree", "TaskType"]

MpmdIdx: TypeAlias = int  # the number of a rank
PyTree: TypeAlias = Any
