"""Orbax checkpoints in a job of several processes: each process saves its shards.

Orbax assumes that every array has a shard in every process, and rejects arrays that one process
holds alone, such as the weights of a stage. This handler reports the local shards of each
array, possibly none, and restores arrays that have no local shard.
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
from jaxpp.placements import Placement, bounds_of, physical_array, physical_type

__all__ = ["MpmdArrayHandler", "register"]


@dataclasses.dataclass
class _Piece:
    """A part of an array to be written, with the fields of a `jax.Shard`."""

    index: tuple[slice, ...]
    replica_id: int
    data: Any  # jax.Array, or only the type of data that another process or shard writes


class _Pieces:
    """An array with the interface that orbax needs to save it.

    All processes must cut it in the same way. The pieces have the shape of the checkpoint's
    chunks, so that no two processes write to the same chunk. PRNG keys are saved as their key
    data, which adds trailing axes.
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
    """The stored parts of the array, with the first row of each."""
    if not isinstance(array, MpmdArray) or array._placement.is_whole:
        yield 0, array
        return
    whole = array._placement
    for rows, part, value in zip(whole.rows(), whole.parts, array._values, strict=True):
        yield rows.start, MpmdArray._of(Placement([part], part.aval), [value])


def _cut(
    shard: Any, start: int, shape: tuple[int, ...], whole: tuple[int, ...]
) -> Iterator[_Piece]:
    """Cuts a shard of a part that begins at row `start` into pieces of the given shape."""
    data = physical_array(shard.data)
    if not shape:
        yield _Piece((), 0, data)
        return
    first, *others = bounds_of(shard.index, whole)
    for row in range(0, first[1] - first[0], max(1, shape[0])):
        at = start + first[0] + row
        index = (slice(at, at + shape[0]), *(slice(*bounds) for bounds in others))
        yield _Piece(index, 0, data if len(data) == shape[0] else data[row : row + shape[0]])


class MpmdArrayHandler(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Orbax's array handler, extended to `MpmdArray`s of a job.

    The first rank that holds a copy writes it; the other ranks do not.
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

    # The metadata that orbax writes beside arrays, by name. A save initialises it with an empty
    # dict and adds the types of the keys that it finds, but keys in pieces look like numbers to
    # it.

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
    """The part that this process reads; None if it has no device of the sharding."""
    sharding = getattr(arg, "sharding", None)
    if not isinstance(sharding, jax.sharding.Sharding) or sharding.addressable_devices:
        return arg
    if arg.dtype is not None and key_implementation(arg.dtype):
        # Orbax stores no shape for PRNG keys, so read them: they are small.
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return dataclasses.replace(arg, sharding=here)
    return None


def _without_shards(arg: Any, array: Any) -> jax.Array:
    """This process's view of an array that others restore; the type may have been read."""
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
    """Registers an orbax handler for the arrays of steps that span several processes.

    Call it once in every process, before creating a checkpointer. It changes neither what a
    single process saves nor the format: checkpoints can be read without this package.
    """
    # Orbax keeps the types of PRNG keys there.
    store = getattr(
        ocp.type_handlers.get_type_handler(jax.Array), "_array_metadata_store", None
    )
    handler = MpmdArrayHandler(array_metadata_store=store)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
