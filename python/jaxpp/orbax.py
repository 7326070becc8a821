"""Checkpoints by orbax in a job of several processes: each saves the shards that it has.

Orbax takes an array to have a shard in every process, and refuses one that a single process
has whole, as the weights of a stage are. The handler here tells it of each array what there is
in this process, be it nothing, and makes arrays without a shard where one is restored.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxpp.array import MpmdArray
from jaxpp.errors import make_error
from jaxpp.mesh import MpmdSharding
from jaxpp.placements import PartedPlacement

__all__ = ["MpmdArrayHandler", "register"]


@dataclasses.dataclass
class _Piece:
    """A part of an array as it is written, with the fields of a `jax.Shard`."""

    index: tuple[slice, ...]
    replica_id: int
    data: Any  # jax.Array, or the type alone of what another process or shard writes


class _Pieces:
    """What orbax asks of an array that it saves.

    All processes must cut it the same: pieces have one shape, which is that of the chunks in
    the checkpoint, so that no two processes write into one chunk.
    """

    def __init__(self, array: jax.Array) -> None:
        self.shape, self.dtype, self.sharding = array.shape, array.dtype, array.sharding
        self.ndim, self.size, self.nbytes = array.ndim, array.size, array.nbytes
        self.itemsize = array.itemsize
        parts = list(_parts_of(array))
        shard = parts[0][1].sharding.shard_shape(parts[0][1].shape)
        if len(parts) > 1:
            bounds = [start for start, _ in parts]
            rows = [part.sharding.shard_shape(part.shape)[0] for _, part in parts]
            shard = (math.gcd(*bounds, *rows), *shard[1:])
        self.addressable_shards = [
            piece
            for start, part in parts
            for one in part.addressable_shards
            if one.replica_id == 0
            for piece in _cut(one, start, shard, part.shape)
        ] or [_Piece((slice(None),) * self.ndim, 1, jax.ShapeDtypeStruct(shard, self.dtype))]


def _parts_of(array: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """The arrays that it is stored as, with the first row of each."""
    whole = array._placement if isinstance(array, MpmdArray) else None
    if not isinstance(whole, PartedPlacement):
        yield 0, array
        return
    for rows, part, memory in zip(whole.rows(), whole.parts, array._memory.values, strict=True):
        yield rows.start, MpmdArray._of(part, memory)


def _cut(
    shard: Any, start: int, shape: tuple[int, ...], whole: tuple[int, ...]
) -> Iterator[_Piece]:
    """A shard of a part that begins at row `start`, in pieces of a shape."""
    data = shard.data
    if not shape:
        yield _Piece((), 0, data)
        return
    first, *others = (slice(*i.indices(n)[:2]) for i, n in zip(shard.index, whole, strict=True))
    for row in range(0, first.stop - first.start, shape[0]):
        at = start + first.start + row
        index = (slice(at, at + shape[0]), *others)
        yield _Piece(index, 0, data if len(data) == shape[0] else data[row : row + shape[0]])


class MpmdArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Orbax's handler of arrays, which `MpmdArray`s of a job also go through.

    A copy that several ranks have is written once, by the first of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"use_replica_parallel": False, **options})

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> Any:
        return await super().serialize([_to_save(value) for value in values], infos, args)

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        if args is None:
            return await super().deserialize(infos, args)
        elsewhere = [_is_elsewhere(getattr(arg, "sharding", None)) for arg in args]
        pairs = list(zip(infos, args, elsewhere, strict=True))
        here = [(info, arg) for info, arg, away in pairs if not away]
        read = iter(await super().deserialize(*zip(*here, strict=True)) if here else ())
        return [_without_shards(arg) if away else next(read) for _, arg, away in pairs]


def _to_save(array: Any) -> Any:
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, MpmdSharding) or jax.process_count() == 1:
        return array
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        raise make_error(
            "unsupported",
            f"orbax: expected numbers in a job of several processes, found {array.dtype} on "
            f"the ranks {list(sharding.mesh_ids)}; have the step return "
            "jax.random.key_data(key), and save that",
        )
    return _Pieces(array)


def _is_elsewhere(sharding: Any) -> bool:
    """Whether this process has no device of it."""
    return isinstance(sharding, jax.sharding.Sharding) and not sharding.addressable_devices


def _without_shards(arg: Any) -> jax.Array:
    """What this process has of an array that other processes restore."""
    if arg.global_shape is None or arg.dtype is None:
        raise make_error(
            "invalid-argument",
            f"orbax: expected the shape and dtype of an array that other processes restore "
            f"({arg.sharding}), found shape {arg.global_shape} and dtype {arg.dtype}; restore "
            "to a tree of jax.ShapeDtypeStruct",
        )
    return jax.make_array_from_single_device_arrays(
        arg.global_shape, arg.sharding, [], dtype=arg.dtype
    )


def register() -> None:
    """Has orbax save and restore the arrays of steps that span several processes.

    Every process calls it, once, before it makes a checkpointer. What one process saves is not
    changed by it, nor the format: a checkpoint is read without this package as well.
    """
    # Where orbax keeps the types of PRNG keys, beside the arrays.
    store = getattr(
        ocp.type_handlers.get_type_handler(jax.Array), "_array_metadata_store", None
    )
    handler = MpmdArrayHandler(array_metadata_store=store)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
