"""The placement of an array on pipeline ranks: its parts, their ranks and shardings, the client
that owns the memory, and transfers to and from it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.devices import Devices
from jaxpp.errors import DELETED, make_error
from jaxpp.jax_internals.arrays import key_implementation
from jaxpp.mesh import MpmdMesh, MpmdSharding, memory_of, parted_sharding

__all__ = [
    "JaxArrays",
    "JaxPart",
    "Part",
    "Placement",
    "bounds_of",
    "carrier_of",
    "local_shards",
    "physical_array",
    "physical_type",
    "to_host",
]


def physical_type(aval: Any) -> tuple[str, tuple[int, ...]]:
    """The element type and shape in which a value is stored."""
    return _stored_type(aval.dtype, tuple(aval.shape))


@functools.lru_cache(maxsize=4096)
def _stored_type(dtype: Any, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return str(data.dtype), tuple(data.shape)
    return str(dtype), shape


def _plain_aval(aval: Any) -> Any:
    """The abstract value without its sharding, which is only valid on one step's mesh."""
    weak = bool(getattr(aval, "weak_type", False))
    return jax.core.ShapedArray(tuple(aval.shape), aval.dtype, weak_type=weak)


# JAX's CPU client uses host memory with this alignment without a copy.
_ALIGNMENT = 64


def _aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def bounds_of(index: Sequence[slice], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The bounds of a part of an array. Axes that the index does not list are whole."""
    whole = [*index, *[slice(None)] * (len(shape) - len(index))]
    return [one.indices(n)[:2] for one, n in zip(whole, shape, strict=True)]


def physical_array(array: Any) -> Any:
    """The stored elements of a JAX array (key data for PRNG keys); other values unchanged."""
    is_keys = isinstance(array, jax.Array) and key_implementation(array.dtype)
    return jax.random.key_data(array) if is_keys else array


def local_shards(array: jax.Array) -> list[Any]:
    """The local shards of a JAX array, each with its device, index and data.

    Raises:
      JaxppError: JAX cannot list them ("mesh").
    """
    try:
        return list(array.addressable_shards)
    except ValueError as error:
        raise make_error(
            "mesh",
            f"expected an array whose shards JAX can list, found one of shape {array.shape} "
            f"on {array.sharding} ({error}). Pass the same numpy array to jax.device_put in "
            "every process to make one",
        ) from None


class Part:
    """A value of the runtime: the ranks that hold it, its sharding within them, and transfers
    of its memory, a `_core.Value`."""

    def __init__(
        self,
        devices: Devices,
        mesh: MpmdMesh,
        aval: Any,
        ranks: Sequence[int],
        spec: PartitionSpec,
        memory: str,
    ) -> None:
        self.devices = devices
        self.mesh = mesh
        self.aval = _plain_aval(aval)
        self.ranks = tuple(ranks)
        self.local_ranks = tuple(r for r in self.ranks if devices.has_rank(r))
        self.spec, self.memory = spec, memory
        self.dtype_name, self.physical_shape = physical_type(aval)
        self.device_indices = [d for r in self.local_ranks for d in devices.indices[r]]
        self.key = (tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))
        self.slices = self._shard_slices()
        bounds = bounds_of(self.slices[0], self.physical_shape)
        self.shard_shape = tuple(stop - start for start, stop in bounds)

    @functools.cached_property
    def sharding(self) -> MpmdSharding:
        # Computed lazily: an unused argument has no rank.
        return MpmdSharding(self.mesh, self.ranks, self.spec, self.memory)

    def rank_sharding(self, rank: int) -> NamedSharding:
        """The sharding of one rank's copy."""
        return self.sharding.rank_sharding(rank)

    def _shard_slices(self) -> list[tuple[slice, ...]]:
        """The slice of each device; of as many devices as the largest rank has."""
        if self.devices.rank_size == 1:
            return [()]
        mesh = self.mesh.unstack[self.ranks[0]] if self.ranks else self.mesh.lowering_mesh()
        indices = NamedSharding(mesh, self.spec).devices_indices_map(self.physical_shape)
        known = list(mesh.devices.flat)
        found = [indices[known[place]] for place in self.devices.places if place < len(known)]
        return found + found[:1] * (len(self.devices.places) - len(found))

    def read(self, value: _core.Value, rank: int) -> np.ndarray:
        """The whole array, assembled from one rank's shards."""
        dtype = jnp.dtype(self.dtype_name)
        if self.devices.rank_size == 1:
            return self.read_shard(value, rank, 0).view(dtype)
        self._check_whole(rank)
        whole = _aligned_empty(self.physical_shape, dtype)
        for d, index in enumerate(self.slices[: self.devices.count(rank)]):
            whole[index] = self.read_shard(value, rank, d).view(dtype)
        return whole

    def _check_whole(self, rank: int) -> None:
        """Checks that a rank's shards in this process cover the array."""
        boxes = {tuple(bounds_of(index, self.physical_shape)) for index in self.slices}
        found = sum(math.prod(stop - start for start, stop in box) for box in boxes)
        if found < math.prod(self.physical_shape):
            raise make_error(
                "mesh",
                f"an MpmdArray of rank {rank} is read in process {jax.process_index()}, which "
                f"holds {found} of its {math.prod(self.physical_shape)} elements; other "
                "processes of the rank hold the rest. Expected an array that every process "
                "of the rank holds whole; use addressable_shards for the local parts",
            )

    def whole(self, value: _core.Value, rank: int) -> np.ndarray | jax.Array:
        """The array for JAX: in place if it is one piece that JAX can use, otherwise a copy."""
        if self.shard_shape == self.physical_shape:
            return self.shard(value, rank, 0)
        return self.read(value, rank)

    def shard(self, value: _core.Value, rank: int, device: int) -> np.ndarray | jax.Array:
        """The shard on one device for JAX, likewise."""
        known_as = self.devices.of_rank(self.mesh, rank)[device]
        # JAX would take the address of a device's shard for an address in device memory.
        can_lend = self.memory == "device" or self.devices.platform == "cpu"
        lent = self.devices.lend(value, rank, device, known_as) if can_lend else None
        if lent is None:
            lent = self.read_shard(value, rank, device)
        if isinstance(lent, np.ndarray):
            return lent.view(jnp.dtype(self.dtype_name)).reshape(self.shard_shape)
        return lent

    def read_shard(self, value: _core.Value, rank: int, device: int) -> np.ndarray:
        """The shard on one device, in a dtype that numpy's buffers support."""
        shard = _aligned_empty(self.shard_shape, carrier_of(jnp.dtype(self.dtype_name)))
        if shard.size:
            value.read(rank, device, shard.reshape(-1).view(np.uint8))
        return shard

    def device_shard(
        self, value: _core.Value, rank: int, index: tuple[slice, ...], device: jax.Device
    ) -> np.ndarray | jax.Array:
        """The shard on a JAX device that holds the part `index` of the array."""
        return self.shard(value, rank, self.devices.of_rank(self.mesh, rank).index(device))

    def copy(self, value: _core.Value) -> _core.Value:
        """A copy with the same placement."""
        ranks, of_rank = self.local_ranks, []
        if ranks:
            count = self.devices.count(ranks[0])
            shards = range(len(self.slices))
            of_rank = [self.read_shard(value, ranks[0], d % count) for d in shards]
        copy: _core.Value = self.devices.put(
            ranks, self.device_indices, of_rank * len(ranks), self.dtype_name, self.memory
        )
        return copy


class JaxArrays:
    """The memory of an array built from JAX arrays, by rank, before any step has taken it. It
    has the interface of a `_core.Value`."""

    def __init__(self, arrays: dict[int, jax.Array]) -> None:
        self.arrays = arrays
        self._deleted = False

    @property
    def deleted(self) -> bool:
        return self._deleted or any(array.is_deleted() for array in self.arrays.values())

    @property
    def deletion_reason(self) -> str:
        return DELETED

    def of_rank(self, rank: int) -> jax.Array:
        if self.deleted:
            raise make_error("donated", f"the array {self.deletion_reason}")
        if rank not in self.arrays:
            raise make_error(
                "mesh", f"expected the array of rank {rank}, found an MpmdArray made without it"
            )
        return self.arrays[rank]

    def delete(self) -> None:
        self._deleted = True
        for array in self.arrays.values():
            array.delete()

    def wait(self) -> None:
        for rank in self.arrays:
            jax.block_until_ready(self.of_rank(rank))

    def is_ready(self) -> bool:
        return all(self.of_rank(rank).is_ready() for rank in self.arrays)


class JaxPart:
    """The same for an array built from JAX arrays, with `JaxArrays` as its memory."""

    devices: Any = None  # the runtime does not know these arrays

    def __init__(self, sharding: MpmdSharding, aval: Any, local_ranks: Sequence[int]) -> None:
        self.mesh, self.spec, self.sharding = sharding.mpmd_mesh, sharding.spec, sharding
        self.memory = memory_of(sharding, "MpmdArray")
        self.aval = _plain_aval(aval)
        self.ranks, self.local_ranks = sharding.mesh_ids, tuple(local_ranks)
        self.dtype_name, self.physical_shape = physical_type(aval)

    def read(self, value: JaxArrays, rank: int) -> np.ndarray:
        """The whole array, read from one rank."""
        return np.asarray(physical_array(value.of_rank(rank)))

    whole = read

    def device_shard(
        self, value: JaxArrays, rank: int, index: tuple[slice, ...], device: jax.Device
    ) -> np.ndarray:
        """The part `index` of the array."""
        part: np.ndarray = self.read(value, rank)[index]
        return part

    def copy(self, value: JaxArrays) -> JaxArrays:
        """A copy with the same placement."""
        return JaxArrays({r: value.of_rank(r).copy() for r in value.arrays})


class Placement:
    """The parts of an array: one part on some ranks, or several along an axis, each on
    its own ranks."""

    def __init__(self, parts: Sequence[Any], aval: Any) -> None:
        first = parts[0]
        self.parts, self.is_whole = parts, len(parts) == 1
        self.devices, self.mesh, self.spec = first.devices, first.mesh, first.spec
        self.memory: str = first.memory
        self.aval = _plain_aval(aval)
        self.ranks, self.local_ranks = first.ranks, first.local_ranks
        self.axis = 0  # the axis along which parts are ranges
        if not self.is_whole:
            sizes = zip(first.aval.shape, self.aval.shape, strict=True)
            self.axis = next(k for k, (own, size) in enumerate(sizes) if own != size)
            self.ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
            self.local_ranks = tuple(r for r in self.ranks if self.devices.has_rank(r))
            if not self.mesh.is_equal(self.ranks):
                self.spec = PartitionSpec()  # of the closest sharding
        self.key: tuple[Any, ...] = (self.aval.shape, self.aval.dtype, self.aval.weak_type)
        if self.memory != "device":
            self.key += (self.memory,)
        self.is_replicated = self.is_whole and len(self.ranks) > 1

    @functools.cached_property
    def sharding(self) -> MpmdSharding:
        if self.is_whole:
            sharding: MpmdSharding = self.parts[0].sharding
            return sharding
        axis, size = self.axis, self.aval.shape[self.axis]
        return parted_sharding(self.mesh, self.ranks, self.spec, axis, size, self.memory)

    def rank_sharding(self, rank: int) -> NamedSharding:
        """The sharding of the copy, or of the rows, on a rank."""
        if self.is_whole:
            return self.sharding.rank_sharding(rank)
        spec = next(part.spec for part in self.parts if rank in part.ranks)
        return NamedSharding(self.mesh.unstack[rank], spec, memory_kind=self.memory)

    def rows(self) -> list[slice]:
        """The range of each part along the axis."""
        sizes = (part.aval.shape[self.axis] for part in self.parts)
        ends = np.cumsum([0, *sizes]).tolist()
        return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def rows_by_rank(self) -> Iterator[tuple[int, tuple[slice, range]]]:
        """Each contiguous range of rows on a rank, with the numbers of the parts in it."""
        rows = self.rows()
        for rank in self.ranks:
            own = [k for k, part in enumerate(self.parts) if rank in part.ranks]
            for k in own:
                if k - 1 in own:
                    continue
                last = next(n for n in range(k, len(rows)) if n + 1 not in own)
                yield rank, (slice(rows[k].start, rows[last].stop), range(k, last + 1))

    def read(self, values: Sequence[Any], rank: int) -> np.ndarray:
        """The whole array, read from a rank or, if it has several parts, from the first
        rank of each."""
        if self.is_whole:
            whole: np.ndarray = self.parts[0].read(values[0], rank)
            return whole
        if not all(part.local_ranks for part in self.parts):
            raise make_error(
                "mesh",
                f"an MpmdArray of ranks {list(self.ranks)} is read in process "
                f"{jax.process_index()}, which holds only the rows of ranks "
                f"{list(self.local_ranks)}; use to_mpmd_local_array for those",
            )
        pairs = zip(self.parts, values, strict=True)
        found = [part.read(v, part.local_ranks[0]) for part, v in pairs]
        return np.concatenate(found, self.axis)

    def read_rows(self, values: Sequence[Any], rank: int) -> np.ndarray:
        """The rows on a rank."""
        pairs = zip(self.parts, values, strict=True)
        found = [part.read(v, rank) for part, v in pairs if rank in part.ranks]
        return np.concatenate(found, self.axis)


def carrier_of(dtype: Any) -> Any:
    """A dtype of the same size that numpy's buffers support."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def to_host(array: Any, dtype_name: str) -> np.ndarray:
    """The stored elements of an array, viewed as a native numpy dtype."""
    host = np.asarray(physical_array(array), jnp.dtype(dtype_name))
    return host.view(carrier_of(host.dtype))
