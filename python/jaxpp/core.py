"""The names that scripts import from `jaxpp.core`."""

from jaxpp.by_yield import mpmd_jit_by_yield, mpmd_jit_rev
from jaxpp.run.reshard import DistributedSharding
from jaxpp.step import mpmd_jit_with_loop

__all__ = ["DistributedSharding", "mpmd_jit_by_yield", "mpmd_jit_rev", "mpmd_jit_with_loop"]
