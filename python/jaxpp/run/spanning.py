"""JAX arrays on devices of several processes, such as a restored checkpoint. Each process reads
its own shards."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxpp.array import MpmdArray
from jaxpp.errors import make_error
from jaxpp.placements import bounds_of, local_shards, physical_array

__all__ = ["is_spanning", "read_rows"]


Bounds = tuple[tuple[int, int], ...]  # along each axis


def is_spanning(leaf: Any) -> bool:
    """Whether other processes hold a part of a JAX array."""
    return (
        isinstance(leaf, jax.Array)
        and not isinstance(leaf, MpmdArray)
        and not leaf.is_fully_addressable
    )


def read_rows(array: jax.Array, rows: slice, name: str) -> np.ndarray:
    """Assembles rows along axis 0, or a scalar, from the shards of this process.

    Raises:
      JaxppError: the shards do not cover the rows ("mesh").
    """
    array = physical_array(array)
    wanted = tuple(bounds_of([rows] if array.ndim else [], array.shape))
    found = np.empty([stop - start for start, stop in wanted], array.dtype)
    missing = found.size
    shards = {
        tuple(bounds_of(shard.index, array.shape)): shard for shard in local_shards(array)
    }
    for there, shard in shards.items():
        both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(there, wanted, strict=True)]
        if all(start < stop for start, stop in both):
            found[_inside(wanted, both)] = np.asarray(shard.data)[_inside(there, both)]
            missing -= math.prod(stop - start for start, stop in both)
    if missing:
        raise make_error(
            "mesh",
            f"{name}: expected process {jax.process_index()} to hold the part that its ranks "
            f"need, {_text(wanted)}, found the sharding {array.sharding}; create or restore "
            "the array with step.compile(...).in_shardings, or with a copy on each rank, "
            "MpmdSharding(mesh, range(mesh.mpmd_dim), spec)",
        )
    return found


def _inside(block: Bounds, part: Iterable[tuple[int, int]]) -> tuple[slice, ...]:
    """The index of a part relative to the block that contains it."""
    pairs = zip(block, part, strict=True)
    return tuple(slice(a - start, b - start) for (start, _), (a, b) in pairs)


def _text(bounds: Bounds) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in bounds) + "]"
