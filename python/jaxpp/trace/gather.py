"""Weights that are sharded over the devices of the batch, and gathered for a loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding

__all__ = ["Gather", "gather_p"]


@dataclasses.dataclass(frozen=True)
class Gather:
    """When a loop gathers a weight, and how it is sharded before and after."""

    before: NamedSharding
    after: NamedSharding
    once: bool  # in a step, before the loop; False: in each task that uses it


def _constrained(weight: Any, *index: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(weight, sharding)


# A weight with a sharding. It also takes the loop's index if it is to run in each microbatch.
gather_p = Primitive("gather_weight")
gather_p.def_impl(_constrained)
gather_p.def_abstract_eval(lambda weight, *index, sharding: weight)
mlir.register_lowering(gather_p, mlir.lower_fun(_constrained, multiple_results=False))
