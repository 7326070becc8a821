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

try:  # of orbax.checkpoint.v1, which has no public function for it
    from orbax.checkpoint.experimental.v1._src.serialization import registration
except ImportError:  # an orbax without it
    registration = None

from jaxpp.array import MpmdArray
from jaxpp.errors import make_error
from jaxpp.jax_internals.arrays import key_implementation
from jaxpp.mesh import MpmdSharding
from jaxpp.placements import bounds_of, physical_array, physical_type

__all__ = ["MpmdArrayHandler", "register"]


@dataclasses.dataclass
class _Piece:
    """A part of an array to be written, with the fields of a `jax.Shard`."""

    index: tuple[slice, ...]
    replica_id: int
    data: Any  # a jax.Array, or only the type if another process or shard writes the data


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
        axis = array._placement.axis if isinstance(array, MpmdArray) else 0
        if len(parts) > 1:
            starts = [start for start, _ in parts]
            sizes = [part.sharding.shard_shape(part.shape)[axis] for _, part in parts]
            shard = (*shard[:axis], math.gcd(*starts, *sizes), *shard[axis + 1 :])
        self.addressable_shards = [
            piece
            for start, part in parts
            for one in part.addressable_shards
            if one.replica_id == 0 and (jax.process_index() == 0 or _is_of_job(array))
            for piece in _cut(one, axis, start, shard, part.shape + of_one)
        ] or [_Piece((slice(None),) * self.ndim, 1, jax.ShapeDtypeStruct(shard, self.dtype))]


def _parts_of(array: jax.Array) -> Iterator[tuple[int, jax.Array]]:
    """The stored parts of the array, each with its start along the axis."""
    yield from array._parts() if isinstance(array, MpmdArray) else [(0, array)]


def _cut(
    shard: Any, axis: int, start: int, shape: tuple[int, ...], whole: tuple[int, ...]
) -> Iterator[_Piece]:
    """Cuts a shard of a part that begins at `start` along an axis into pieces of this
    shape."""
    data = physical_array(shard.data)
    if not shape:
        yield _Piece((), 0, data)
        return
    bounds, size = bounds_of(shard.index, whole), shape[axis]
    begin, end = bounds[axis]
    inside, index = [slice(None)] * len(shape), [slice(*ends) for ends in bounds]
    for at in range(0, end - begin, max(1, size)):
        inside[axis] = slice(at, at + size)
        index[axis] = slice(start + begin + at, start + begin + at + size)
        one = data if data.shape[axis] == size else data[tuple(inside)]
        yield _Piece(tuple(index), 0, one)


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
    # dict and adds the types of the keys that it finds, but it takes keys in pieces for
    # numbers.

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
    if not isinstance(array, jax.Array) or jax.process_count() == 1:
        return array
    return _Pieces(array) if _is_of_job(array) or array.is_fully_addressable else array


def _is_of_job(array: jax.Array) -> bool:
    """False: each process has an array of its own. Process 0 saves its one, as orbax does with
    numpy arrays."""
    return isinstance(array.sharding, MpmdSharding)


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
    """This process's view of an array that others restore; the type may have been read
    already."""
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
    single process saves nor the format: checkpoints can be read without this package. Steps
    can then be saved and restored with both of orbax's interfaces, `orbax.checkpoint` and
    `orbax.checkpoint.v1`.
    """
    # Orbax keeps the types of PRNG keys there.
    store = getattr(
        ocp.type_handlers.get_type_handler(jax.Array), "_array_metadata_store", None
    )
    handler = MpmdArrayHandler(array_metadata_store=store)
    ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    if registration:
        registration.get_array_handler = _handler_of_context


def _handler_of_context(context: Any) -> MpmdArrayHandler:
    """The handler that `orbax.checkpoint.v1` uses for arrays under its context."""
    saving = context.array_options.saving
    return MpmdArrayHandler(
        primary_host=context.multiprocessing_options.primary_host,
        enable_write_sharding_file=saving.enable_write_sharding_file,
        array_metadata_store=saving.array_metadata_store,
        callback=context.memory_options.serialization_status_callback,
    )
