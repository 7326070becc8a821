"""Arguments of a step: describes arrays to the library, which decides how each becomes an
argument (jaxpp/array_argument.h), and provides their contents."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxpp import _core
from jaxpp.array import MpmdArray
from jaxpp.client.lending import capsules_of
from jaxpp.devices import Devices
from jaxpp.errors import DELETED
from jaxpp.mesh import MpmdMesh
from jaxpp.placements import (
    Part,
    Placement,
    bounds_of,
    local_shards,
    physical_array,
    physical_type,
    to_host,
)

__all__ = ["Argument", "Source", "source_of"]


class Source:
    """An array that a program passes: its description, and its contents on request.

    Each subclass implements the actions that the library can decide on for its kind of
    memory.
    """

    __slots__ = ("bounds", "given")

    given: _core.Given
    bounds: np.ndarray  # [blocks, ndim, 2] of `given`: the bounds of each block

    def deletion_reason(self) -> str | None:
        """The reason why the array cannot be used; None if it can."""
        return None

    def value(self, part: int) -> _core.Value:
        """The runtime's array that holds a part, to use."""
        raise NotImplementedError

    def capsules(self, blocks: list[int]) -> list[Any] | None:
        """DLPack capsules of these blocks, to borrow; None if there are none."""
        raise NotImplementedError

    def host(self, block: int, dtype: str) -> np.ndarray:
        """A block in host memory, to upload."""
        raise NotImplementedError


class Argument:
    """An argument of a plan: an array, or the rows of an array that some stages take.

    Args:
      part: where the plan needs it.
      name: for errors.
      donated: whether the step may write to it.
      begins: if it is a range of another array, the axis and the start.
      can_move: whether the step can copy it from other ranks than the wanted ones; None: if the
        devices can.
    """

    def __init__(
        self,
        part: Part,
        name: str,
        donated: bool,
        begins: tuple[int, int] = (0, 0),
        can_move: bool | None = None,
    ) -> None:
        self.part, self.name, self.donated = part, name, donated
        devices, shape = part.devices, part.physical_shape
        blocks = [block_in(index, shape, begins) for index in part.slices]
        self._wanted = _core.Wanted(
            name,
            part.dtype_name,
            len(shape),
            devices.number,
            part.ranks,
            [rank in part.local_ranks for rank in part.ranks],
            devices.per_rank,
            np.array(blocks, np.int64),
            donated,
            devices.can_move if can_move is None else can_move,
            devices.least_borrowed,
            part.memory,
        )

    def take(self, source: Source, copies: bool = False) -> _core.Value:
        """The runtime's array for the step: the given one, one in the same memory, or a copy.
        `copies`: a copy in any case.

        Raises:
          JaxppError: the array was deleted ("donated"); this process lacks elements that its
            ranks need ("mesh"); a device has no memory for it ("out-of-memory").
        """
        value: _core.Value = self.part.devices.take(self._wanted, self.part, source, copies)
        return value


def block_in(
    index: Sequence[slice], shape: tuple[int, ...], begins: tuple[int, int] = (0, 0)
) -> list[tuple[int, int]]:
    """The bounds of a part, in the array of which it is a range along an axis from a
    start."""
    bounds = bounds_of(index, shape)
    axis, at = begins
    if at:
        start, stop = bounds[axis]
        bounds[axis] = (start + at, stop + at)
    return bounds


_Place = tuple[int, int, int, bool]  # (part, rank, device, is local) of a block


def _given(
    home: str,
    dtype: str,
    devices: int,
    shape: tuple[int, ...],
    places: Iterable[_Place],
    blocks: list[list[tuple[int, int]]],
) -> tuple[_core.Given, np.ndarray]:
    bounds = np.array(blocks, np.int64).reshape(len(blocks), len(shape), 2)
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    rows = np.array([*places], np.int64)
    return _core.Given(
        home, dtype, len(shape), devices, size, len(blocks), rows, bounds
    ), bounds


# --- Arrays of the runtime --------------------------------------------------------------


class _RuntimeSource(Source):
    """An array of the runtime, in one part or several along an axis."""

    __slots__ = ("_placement", "_values")

    def __init__(self, placement: Placement, values: Sequence[_core.Value]) -> None:
        self._placement, self._values = placement, values
        known = _given_of.get(placement)
        if known is None:
            known = _given_of[placement] = _given_of_placement(placement)
        self.given, self.bounds = known

    def deletion_reason(self) -> str | None:
        return next((v.deletion_reason for v in self._values if v.deleted), None)

    def value(self, part: int) -> _core.Value:
        return self._values[part]

    def host(self, block: int, dtype: str) -> np.ndarray:
        number, rank, device, _ = _places_of(self._placement)[block]
        part: Part = self._placement.parts[number]
        return part.read_shard(self._values[number], rank, device)


def _places_of(placement: Placement) -> list[_Place]:
    return [
        (number, rank, device, rank in part.local_ranks)
        for number, part in enumerate(placement.parts)
        for rank in part.ranks
        for device in range(part.devices.count(rank))
    ]


# Does not keep the placements alive, and with them the devices, which may be workers on Ray.
_given_of: weakref.WeakKeyDictionary[Placement, tuple[_core.Given, np.ndarray]] = (
    weakref.WeakKeyDictionary()
)


def _given_of_placement(placement: Placement) -> tuple[_core.Given, np.ndarray]:
    first, blocks, at, axis = placement.parts[0], [], 0, placement.axis
    for part in placement.parts:
        own = [block_in(index, part.physical_shape, (axis, at)) for index in part.slices]
        for rank in part.ranks:
            blocks += own[: part.devices.count(rank)]
        at += 0 if placement.is_whole else part.physical_shape[axis]
    shape = first.physical_shape
    if not placement.is_whole:
        shape = (*shape[:axis], at, *shape[axis + 1 :])
    number = placement.devices.number
    return _given("client", first.dtype_name, number, shape, _places_of(placement), blocks)


# --- Arrays of JAX ----------------------------------------------------------------------


class _JaxSource(Source):
    """JAX arrays that hold the same elements, one on each of their ranks or just one."""

    def __init__(
        self, arrays: list[jax.Array], devices: Devices, mesh: MpmdMesh, ranks: tuple[int, ...]
    ) -> None:
        self._arrays = arrays
        shardings = tuple(array.sharding for array in arrays)
        self.given, self.bounds, self._shards = _given_of_shardings(
            devices, mesh, shardings, ranks, arrays[0].shape, str(arrays[0].dtype)
        )

    def capsules(self, blocks: list[int]) -> list[Any] | None:
        return capsules_of([self._shard(block) for block in blocks])

    def host(self, block: int, dtype: str) -> np.ndarray:
        return to_host(self._shard(block), dtype)

    def _shard(self, block: int) -> jax.Array:
        number, device = self._shards[block]
        array = self._arrays[number]
        if len(array.sharding.device_set) == 1:
            return array
        found: jax.Array = next(s.data for s in local_shards(array) if s.device == device)
        return found


@functools.lru_cache(maxsize=4096)
def _given_of_shardings(
    devices: Devices,
    mesh: MpmdMesh,
    shardings: tuple[Sharding, ...],
    ranks: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: str,
) -> tuple[_core.Given, np.ndarray, list[tuple[int, jax.Device]]]:
    """`ranks`: the rank of each array; () if they may be on devices of any ranks."""
    places, blocks, shards = [], [], []
    for number, sharding in enumerate(shardings):
        of_rank = ranks[number] if ranks else None
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            for rank, place in _places_on(devices, mesh, device, of_rank):
                places.append((0, rank, place, True))
                blocks.append(bounds_of(index or (), shape))
                shards.append((number, device))
    return *_given("foreign", dtype, 0, shape, places, blocks), shards


def _places_on(
    devices: Devices, mesh: MpmdMesh, device: jax.Device, of_rank: int | None
) -> list[tuple[int, int]]:
    """The ranks, and the devices of each, that can read the memory of a JAX device."""
    ranks = range(mesh.mpmd_dim) if of_rank is None else [of_rank]
    wanted = [
        (rank, place, own)
        for rank in ranks
        if devices.has_rank(rank)
        for place, own in enumerate(devices.of_rank(mesh, rank))
    ]
    able = [(rank, n) for rank, n, own in wanted if devices.can_borrow(device, own)]
    if of_rank is None and len(able) == len(wanted) > 0:
        return [(_core.ANY_RANK, 0)]
    if of_rank is not None:
        # Each device of the rank has a shard of its own.
        able = [(rank, n) for rank, n, own in wanted if own == device and (rank, n) in able]
    return able or [(_core.NO_RANK, 0)]


# --- Others -----------------------------------------------------------------------------


class _HostSource(Source):
    """An array or a number in host memory."""

    def __init__(self, leaf: Any, shape: tuple[int, ...]) -> None:
        self._leaf = leaf
        self.given, self.bounds = _given_of_shape(shape)

    def host(self, block: int, dtype: str) -> np.ndarray:
        return to_host(self._leaf, dtype)


class _DeletedSource(Source):
    def __init__(self, leaf: Any, reason: str) -> None:
        self.given, self.bounds = _given_of_shape(leaf.shape)
        self._reason = reason

    def deletion_reason(self) -> str | None:
        return self._reason


class _NoSource(Source):
    """An array of which this process holds nothing."""

    def __init__(self, aval: Any) -> None:
        dtype, shape = physical_type(aval)
        self.given, self.bounds = _given("foreign", dtype, 0, shape, [], [])


@functools.lru_cache(maxsize=4096)
def _given_of_shape(shape: tuple[int, ...]) -> tuple[_core.Given, np.ndarray]:
    whole = bounds_of((), shape)
    return _given("host", "int8", 0, shape, [(0, _core.ANY_RANK, 0, True)], [whole])


def source_of(leaf: Any, devices: Devices, mesh: MpmdMesh) -> Source:
    """Describes anything that a program may pass to a step on these devices."""
    if type(leaf) is MpmdArray:
        return _source_of_array(leaf, devices, mesh)
    if not isinstance(leaf, jax.Array):
        return _HostSource(leaf, np.shape(leaf))
    if leaf.is_deleted():
        return _DeletedSource(leaf, DELETED)
    array = physical_array(leaf)
    if not array.is_fully_addressable:
        local_shards(array)  # raises in every process, including those that need none of them
    return _JaxSource([array], devices, mesh, ())


def _source_of_array(array: MpmdArray, devices: Devices, mesh: MpmdMesh) -> Source:
    placement, values = array._placement, array._values
    if not array._is_built:
        return _RuntimeSource(placement, values)
    if array.is_deleted():
        return _DeletedSource(array, values[0].deletion_reason)
    arrays: dict[int, jax.Array] = values[0].arrays
    if not arrays:
        return _NoSource(placement.aval)
    ranks = tuple(arrays) if placement.mesh == mesh else ()
    return _JaxSource([*map(physical_array, arrays.values())], devices, mesh, ranks)
