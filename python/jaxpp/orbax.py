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
import jax.numpy as jnp
import orbax.checkpoint as ocp

from jaxpp.array import MpmdArray
from jaxpp.errors import make_error
from jaxpp.jax_internals.arrays import key_implementation
from jaxpp.mesh import MpmdSharding
from jaxpp.placements import PartedPlacement, bounds_of, physical_type, stored

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
    the checkpoint, so that no two processes write into one chunk. Of PRNG keys these are the
    numbers that they are stored as, which have axes of their own behind the array's.
    """

    def __init__(self, array: jax.Array) -> None:
        dtype, self.shape = physical_type(array)
        self.dtype, self.sharding = jnp.dtype(dtype), array.sharding
        self.ndim, self.size = len(self.shape), math.prod(self.shape)
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.size * self.itemsize
        of_one = self.shape[array.ndim :]
        parts = list(_parts_of(array))
        shard = parts[0][1].sharding.shard_shape(parts[0][1].shape) + of_one
        if len(parts) > 1:
            bounds = [start for start, _ in parts]
            rows = [part.sharding.shard_shape(part.shape)[0] for _, part in parts]
            shard = (math.gcd(*bounds, *rows), *shard[1:])
        self.addressable_shards = [
            piece
            for start, part in parts
            for one in part.addressable_shards
            if one.replica_id == 0
            for piece in _cut(one, start, shard, part.shape + of_one)
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
    data = stored(shard.data)
    if not shape:
        yield _Piece((), 0, data)
        return
    first, *others = bounds_of(shard.index, whole)
    for row in range(0, first[1] - first[0], max(1, shape[0])):
        at = start + first[0] + row
        index = (slice(at, at + shape[0]), *(slice(*bounds) for bounds in others))
        yield _Piece(index, 0, data if len(data) == shape[0] else data[row : row + shape[0]])


class MpmdArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Orbax's handler of arrays, which `MpmdArray`s of a job also go through.

    A copy that several ranks have is written once, by the first of them.
    """

    def __init__(self, **options: Any) -> None:
        self._key_types: dict[str, Any] = {}
        super().__init__(**{"use_replica_parallel": False, **options})

    async def serialize(self, values: Sequence[Any], infos: Any, args: Any = None) -> Any:
        pieces = [_to_save(value) for value in values]
        self._key_types = {
            info.name: {"random_key_impl": impl}
            for value, piece, info in zip(values, pieces, infos, strict=True)
            if piece is not value and (impl := key_implementation(value.dtype))
        }
        return await super().serialize(pieces, infos, args)

    # What orbax writes beside arrays, by name: a save begins it with an empty dict, to which
    # it adds the types of keys that it finds. Those in pieces are numbers to it.

    @property
    def _ext_metadata(self) -> dict[str, Any]:
        return self._written_beside

    @_ext_metadata.setter
    def _ext_metadata(self, found: dict[str, Any]) -> None:
        self._written_beside = {**self._key_types, **found}

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        if args is None:
            return await super().deserialize(infos, args)
        reads = [_to_read(arg) for arg in args]
        wanted = [(info, read) for info, read in zip(infos, reads, strict=True) if read]
        found = iter(await super().deserialize(*zip(*wanted, strict=True)) if wanted else ())
        arrays = [next(found) if read else None for read in reads]
        return [
            array if read is arg else _without_shards(arg, array)
            for arg, read, array in zip(args, reads, arrays, strict=True)
        ]


def _to_save(array: Any) -> Any:
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, MpmdSharding) or jax.process_count() == 1:
        return array
    return _Pieces(array)


def _to_read(arg: Any) -> Any:
    """What this process reads for an argument; None where only others have devices of it."""
    sharding = getattr(arg, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or sharding.addressable_devices:
        return arg
    if arg.dtype is not None and key_implementation(arg.dtype):
        # Orbax gives PRNG keys no shape. They are small enough to be read for that.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return dataclasses.replace(arg, sharding=here)
    return None


def _without_shards(arg: Any, array: Any) -> jax.Array:
    """What this process has of an array that others restore; it may have read its type."""
    shape = arg.global_shape if array is None else array.shape
    dtype = arg.dtype if array is None else array.dtype
    if shape is None or dtype is None:
        raise make_error(
            "invalid-argument",
            f"orbax: expected the shape and dtype of an array that other processes restore "
            f"({arg.sharding}), found shape {shape} and dtype {dtype}; restore to a tree of "
            "jax.ShapeDtypeStruct",
        )
    return jax.make_array_from_single_device_arrays(shape, arg.sharding, [], dtype=dtype)


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
