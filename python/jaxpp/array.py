"""Arrays that live on pipeline ranks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp import _core
from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import jax_array, key_implementation, wrap_keys
from jaxpp.mesh import MpmdSharding
from jaxpp.placements import (
    HandMadePlacement,
    HandMadeValue,
    PartedPlacement,
    Placement,
    physical_type,
)

__all__ = ["ArrayRef", "MpmdArray", "MpmdShard"]

_PRINTED_BYTES = 1 << 20  # an array of so many prints as where it lies


@dataclasses.dataclass(frozen=True)
class MpmdShard:
    """The part of an array on one device, with the fields of a `jax.Shard`."""

    device: jax.Device
    index: tuple[slice, ...]
    replica_id: int  # copies of the same elements count from 0
    _read: Callable[[], jax.Array] | None

    @property
    def data(self) -> jax.Array | None:
        """As an array on that device; None for a device of another process."""
        return self._read() if self._read else None


def _ranks_of(arrays: Sequence[Any], sharding: MpmdSharding) -> dict[int, jax.Array]:
    """Which of the sharding's ranks each array lies on, as the sharding says."""
    found: dict[int, jax.Array] = {}
    for number, array in enumerate(arrays):
        if not isinstance(array, jax.Array) or isinstance(array, MpmdArray | jax.core.Tracer):
            raise make_error(
                "invalid-argument",
                f"MpmdArray: array {number}: expected a jax.Array on one rank's devices, found "
                f"{shorten(array)} of type {type(array).__name__}",
            )
        ranks = [
            rank
            for rank in sharding.mesh_ids
            if array.sharding.is_equivalent_to(sharding.rank_sharding(rank), array.ndim)
            and rank not in found
        ]
        if not ranks:
            raise make_error(
                "sharding",
                f"MpmdArray: array {number} lies as {array.sharding} says; expected one array "
                f"a rank, on the ranks {list(sharding.mesh_ids)} of the mesh and sharded by "
                f"{sharding.spec} there (MpmdSharding.rank_sharding(rank))",
            )
        found[ranks[0]] = array
    return found


def _common_type(arrays: Sequence[jax.Array], shape: Any, dtype: Any) -> Any:
    """The abstract value of all, and of the shape and dtype that are not None."""
    if not arrays and shape is not None and dtype is not None:
        return jax.ShapeDtypeStruct(shape, dtype)
    types = {(array.shape, array.dtype) for array in arrays}
    if len(types) == 1:
        (found,) = types
        wanted = found[0] if shape is None else tuple(shape), dtype or found[1]
        if found == wanted:
            return arrays[0].aval
    text = ", ".join(sorted(f"{d}{list(s)}" for s, d in types)) or "no array"
    told = "" if shape is None and dtype is None else f" of shape={shape}, dtype={dtype}"
    raise make_error(
        "invalid-argument",
        f"MpmdArray: expected arrays of one shape and dtype{told}, found {text}; where a "
        "process has no array, shape and dtype say what the others have",
    )


def _put(host: np.ndarray | jax.Array, where: Any = None) -> jax.Array:
    """`jax.device_put`, but what was made under jax_enable_x64 stays as wide as it is."""
    with jax.enable_x64(True) if _is_wide(host) else contextlib.nullcontext():
        return jax.device_put(host, where)


def _is_wide(host: np.ndarray | jax.Array) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(host.dtype) != host.dtype)


def _device_bytes(placement: Placement | HandMadePlacement) -> int:
    shape = placement.sharding.shard_shape(placement.aval.shape)
    dtype, stored = physical_type(jax.ShapeDtypeStruct(shape, placement.aval.dtype))
    return _core.device_bytes(dtype, math.prod(stored)) * placement.sharding.num_devices


@jax_array
class MpmdArray(jax.Array):  # type: ignore[misc]
    """An array on the devices of one or more pipeline ranks, the same on each.

    A handle: the memory belongs to the runtime. Steps return these and take them back, and
    nothing moves. It is a `jax.Array`: it has the operators and methods of one, and whatever
    takes arrays takes it: `jnp`, `jax.jit`, `jax.grad`, `jax.vmap`, `jax.device_put`,
    optimizers, libraries that save checkpoints.

    What JAX computes with it outside a step, JAX computes on its own devices: there the array
    is an uncommitted one, as a numpy array is, so that arrays of several ranks go into one
    `jax.jit`. JAX looks at the first rank that has the array: on CPU devices at the memory
    itself, on others at a copy (docs/gpu.md), each time. What lies in several
    shards there, or by parts, is put together first. JAX's arrays never change: while one is
    left that looks at the memory, a step to which this array is donated writes elsewhere, to a
    copy. Whoever looks at an array that a step has yet to make waits for it.

    `MpmdArray(arrays, sharding)` is one made by hand, of `jax.Array`s that lie on the ranks of
    an `MpmdSharding`. It refers to them until a step takes it. From then on it belongs to the
    runtime, in the same memory where both can use that, and else in a copy; what becomes of the
    arrays does not change it. (On a GPU JAX refuses to donate an array whose memory is used.)

    Args:
      partially_addressable_arrays: the array of each rank that this process has; none, with
        `shape` and `dtype`, for an array that other processes hold. It has a type and a
        sharding, and cannot be read here.
      mpmd_sharding: which ranks have it, and how it is sharded there.
      shape, dtype: of the array; needed where this process has nothing of it.

    Raises:
      JaxppError: an array is none, or of another shape ("invalid-argument"); it lies elsewhere
        ("sharding").
    """

    __slots__ = ("_placement", "_memory", "__weakref__")
    __array_priority__ = 100  # as jax.Array's: an operator of numpy's leaves it to ours

    _placement: Placement | PartedPlacement | HandMadePlacement
    _memory: Any  # _core.Value, PartedValue or HandMadeValue, as the placement

    def __init__(
        self,
        partially_addressable_arrays: Sequence[jax.Array],
        mpmd_sharding: MpmdSharding,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
    ) -> None:
        if not isinstance(mpmd_sharding, MpmdSharding):
            raise make_error(
                "sharding",
                f"MpmdArray: mpmd_sharding={shorten(mpmd_sharding)}; expected an MpmdSharding",
            )
        found = _ranks_of(partially_addressable_arrays, mpmd_sharding)
        meshes = mpmd_sharding.mpmd_mesh.unstack
        stands_in = not found and shape is not None and dtype is not None
        here = [] if stands_in else mpmd_sharding.mesh_ids
        local = [r for r in here if meshes[r].local_devices]
        if set(local) != set(found):
            raise make_error(
                "sharding",
                f"MpmdArray: expected an array on each of the ranks {local}, found them on "
                f"{sorted(found)}",
            )
        arrays = {rank: found[rank] for rank in local}
        aval = _common_type(list(arrays.values()), shape, dtype)
        self._placement = HandMadePlacement(mpmd_sharding, aval, local)
        self._memory = HandMadeValue(arrays)

    @classmethod
    def _of(cls, placement: Any, value: Any) -> MpmdArray:
        array = cls.__new__(cls)
        array._placement, array._memory = placement, value
        return array

    # --- What it is ---

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._placement.aval.shape)

    @property
    def dtype(self) -> Any:
        return self._placement.aval.dtype

    @property
    def aval(self) -> Any:
        return self._placement.aval

    @property
    def weak_type(self) -> bool:
        return self._placement.aval.weak_type

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sharding(self) -> MpmdSharding:
        """Where it lies. Of an array that is stored by parts along axis 0, each on the rank of
        its stage, the sharding names the pipeline axis along that one."""
        return self._placement.sharding

    @property
    def spec(self) -> PartitionSpec:
        return self._placement.spec

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The ranks that hold it."""
        return self._placement.ranks

    @property
    def is_mpmd_replicated(self) -> bool:
        return self._placement.is_replicated

    @property
    def is_partially_addressable(self) -> bool:
        """Whether this process has one of these ranks."""
        return bool(self._placement.local_ranks)

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has all of these ranks."""
        devices = self._placement.devices
        if devices is not None and devices.per_rank < devices.rank_size:
            return False
        return len(self._placement.local_ranks) == len(self._placement.ranks)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has the whole array."""
        return self.sharding.is_fully_replicated

    def devices(self) -> set[jax.Device]:
        """All that hold a part of it."""
        return self.sharding.device_set

    @property
    def device(self) -> Any:
        """The device, if it is one, else the sharding."""
        devices = self.devices()
        return next(iter(devices)) if len(devices) == 1 else self.sharding

    @property
    def _is_keys(self) -> bool:
        return key_implementation(self.dtype) is not None

    # --- Looking at it ---

    def _read(self, rank: int | None = None) -> np.ndarray:
        if rank is None:
            rank = self._first_local_rank()
        return self._placement.read(self._memory, rank)

    def _first_local_rank(self) -> int:
        ranks = self._placement.local_ranks
        if ranks:
            return ranks[0]
        raise make_error(
            "mesh",
            f"an MpmdArray of rank {self._placement.ranks[0]} is looked at in process "
            f"{jax.process_index()}, which has no copy of it; expected a process of the ranks "
            f"{list(self._placement.ranks)}, or a result that all ranks have",
        )

    def _typed(self, array: jax.Array) -> jax.Array:
        """The array, of its elements as they are stored, as one of this array's type."""
        if self._is_keys:
            return wrap_keys(array, self.dtype)
        if self.weak_type:
            return jax.lax.convert_element_type_p.bind(
                array, new_dtype=self.dtype, weak_type=True, sharding=None
            )
        return array

    def _rank_array(self, rank: int) -> jax.Array:
        """What a rank has; of an array that is stored by parts, its rows."""
        placement = self._placement
        if isinstance(self._memory, HandMadeValue):
            return self._memory.of_rank(rank)
        sharding = placement.rank_sharding(rank)
        if not isinstance(placement, Placement):
            return self._typed(_put(placement.read_rank(self._memory, rank), sharding))
        shards = [
            _put(placement.shard(self._memory, rank, d), device)
            for d, device in enumerate(placement.devices.of_rank(placement.mesh, rank))
        ]
        shape = placement.physical_shape
        return self._typed(jax.make_array_from_single_device_arrays(shape, sharding, shards))

    def _contents(self) -> np.ndarray | jax.Array:
        """The elements as they are stored, where they are if JAX can use them there."""
        rank = self._first_local_rank()
        if isinstance(self._placement, Placement):
            return self._placement.whole(self._memory, rank)
        return self._placement.read(self._memory, rank)

    def _local(self) -> jax.Array:
        """As an array of JAX's own, uncommitted."""
        return self._typed(_put(self._contents()))

    def _for_jax(self) -> Any:
        if isinstance(self._memory, HandMadeValue):
            return self.first_mpmd_replica
        contents = self._contents()
        if self._is_keys or _is_wide(contents):
            return self._typed(_put(contents))
        return contents

    @property
    def _partially_addressable_arrays(self) -> collections.OrderedDict[int, jax.Array]:
        ranks = self._placement.local_ranks
        return collections.OrderedDict((r, self._rank_array(r)) for r in ranks)

    @property
    def to_mpmd_local_array(self) -> Any:
        """The array of the rank that holds it, or a list, one a rank."""
        arrays = list(self._partially_addressable_arrays.values())
        return arrays[0] if len(arrays) == 1 else arrays

    @property
    def first_mpmd_replica(self) -> jax.Array:
        """The copy on the lowest rank that holds it."""
        rank = self._first_local_rank()
        if isinstance(self._placement, PartedPlacement):
            whole = self._placement.read(self._memory, rank)
            return self._typed(_put(whole, self._placement.rank_sharding(rank)))
        return self._rank_array(rank)

    def _host(self) -> np.ndarray:
        """The array in host memory, read once from its first rank."""
        if self._is_keys:
            raise make_error(
                "unsupported",
                f"an MpmdArray of {self.dtype} has no numpy form; expected numbers. Use "
                "jax.random.key_data(x.first_mpmd_replica)",
            )
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = self._host()
        if dtype is not None:
            return host.astype(dtype)
        return host.copy() if copy and not host.flags.writeable else host

    @property
    def _value(self) -> np.ndarray:
        """The contents, fetched: what scripts for JaxPP ask of an array on a worker."""
        return np.asarray(self)

    def __dlpack__(self, **options: Any) -> Any:
        return self._local().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._local().__dlpack_device__()

    def _scalar(self, kind: str) -> Any:
        if self.size != 1:
            raise make_error(
                "invalid-argument",
                f"{kind}() of an MpmdArray: expected one element, found shape {self.shape}",
            )
        return self._host().reshape(()).item()

    def __float__(self) -> float:
        return float(self._scalar("float"))

    def __int__(self) -> int:
        return int(self._scalar("int"))

    def __complex__(self) -> complex:
        return complex(self._scalar("complex"))

    def __bool__(self) -> bool:
        return bool(self._scalar("bool"))

    def __index__(self) -> int:
        if not jnp.issubdtype(self.dtype, jnp.integer):
            raise TypeError(f"an array of {self.dtype} is no index")
        return int(self._scalar("index"))

    def item(self) -> Any:
        """The only element, as a Python number."""
        return self._scalar("item")

    def tolist(self) -> Any:
        """Nested lists of Python numbers, as numpy's `tolist`."""
        return self._host().tolist()

    def tobytes(self) -> bytes:
        """The elements one after another, as numpy's `tobytes`."""
        return self._host().tobytes()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar array")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a scalar array")
        return iter(self._local())

    __hash__ = None  # type: ignore[assignment]

    # --- Its shards ---

    @property
    def global_shards(self) -> list[MpmdShard]:
        """The part on each device of its ranks; of an array that is stored by parts, one for
        each range of rows that a rank has."""
        if isinstance(self._placement, PartedPlacement):
            return self._shards_of_parts(self._placement)
        read = functools.cache(lambda rank: self._placement.read(self._memory, rank))
        copies: collections.Counter[Any] = collections.Counter()
        mesh, ranks = self._placement.mesh, self._placement.ranks
        rank_of = {device: r for r in reversed(ranks) for device in mesh.devices_of(r)}
        shards = []
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            rank = rank_of[device]
            is_here = rank in self._placement.local_ranks and self._has_device(rank, device)
            part = functools.partial(self._part, read, rank, index, device)
            key = tuple((one.start, one.stop) for one in index)
            shards.append(MpmdShard(device, index, copies[key], part if is_here else None))
            copies[key] += 1
        return shards

    def _shards_of_parts(self, placement: PartedPlacement) -> list[MpmdShard]:
        copies: collections.Counter[Any] = collections.Counter()
        shards = []
        for rank, (rows, numbers) in placement.rows_by_rank():
            shape = (rows.stop - rows.start, *self.shape[1:])
            where = placement.rank_sharding(rank).devices_indices_map(shape)
            for device, index in where.items():
                is_here = rank in placement.local_ranks and self._has_device(rank, device)
                part = functools.partial(self._part_of_rows, rank, numbers, index, device)
                own = (rows, *index[1:])
                key = tuple((one.start, one.stop) for one in own)
                shards.append(MpmdShard(device, own, copies[key], part if is_here else None))
                copies[key] += 1
        return shards

    def _part_of_rows(
        self, rank: int, numbers: range, index: tuple[slice, ...], device: jax.Device
    ) -> jax.Array:
        placement, memory = self._placement, self._memory
        assert isinstance(placement, PartedPlacement)
        parts = [placement.parts[k].read(memory.values[k], rank) for k in numbers]
        return self._typed(_put(np.concatenate(parts)[index], device))

    def _has_device(self, rank: int, device: jax.Device) -> bool:
        """Whether this process has a device of a rank that it has a part of."""
        placement = self._placement
        known = placement.devices
        return known is None or device in known.of_rank(placement.mesh, rank)

    def _part(
        self,
        read: Callable[[int], np.ndarray],
        rank: int,
        index: tuple[slice, ...],
        device: jax.Device,
    ) -> jax.Array:
        placement = self._placement
        if not isinstance(placement, Placement):
            return self._typed(_put(read(rank)[index], device))
        number = placement.devices.of_rank(placement.mesh, rank).index(device)
        return self._typed(_put(placement.shard(self._memory, rank, number), device))

    @property
    def addressable_shards(self) -> list[MpmdShard]:
        """Those of this process' ranks."""
        return [shard for shard in self.global_shards if shard._read]

    def addressable_data(self, index: int) -> jax.Array:
        """The part on one of this process' devices."""
        return self.addressable_shards[index].data

    def on_device_size_in_bytes(self) -> int:
        """The bytes of all its parts."""
        placements = getattr(self._placement, "parts", [self._placement])
        return sum(map(_device_bytes, placements))

    def copy_to_host_async(self) -> None:
        """Nothing: what is not in host memory is copied when somebody looks."""

    # --- Its memory ---

    def delete(self) -> None:
        """Frees the device memory now. Using the array afterwards is an error."""
        self._memory.delete()

    def is_deleted(self) -> bool:
        """Deleted, or donated to a step."""
        return self._memory.deleted

    def block_until_ready(self) -> MpmdArray:
        """Waits until its contents are there; returns itself."""
        self._memory.wait()
        return self

    def is_ready(self) -> bool:
        """Whether its contents are there, or its step failed: looking at it would not wait."""
        return self._memory.is_ready()

    def copy(self) -> MpmdArray:
        """One of its own that lies the same: donating this one leaves it alone."""
        return MpmdArray._of(self._placement, self._placement.copy(self._memory))

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> MpmdArray:
        return self.copy()

    def __reduce__(self) -> Any:
        """By value: it is unpickled as an array of JAX's own, without this package."""
        if self._is_keys:
            make = functools.partial(
                jax.random.wrap_key_data, impl=key_implementation(self.dtype)
            )
            return make, (self._read(),)
        return self._local().__reduce__()

    # --- Printing ---

    def __repr__(self) -> str:
        if self._memory.deleted:
            return f"MpmdArray(shape={self.shape}, dtype={self.dtype}, deleted)"
        return (
            f"MpmdArray(shape={self.shape}, dtype={self.dtype}, "
            f"mpmd_idxs={self.mpmd_idxs}, sharding={self.sharding})"
        )

    def _shows_elements(self) -> bool:
        """Whether it prints as what it has, by JAX's rule for its own arrays."""
        if self._memory.deleted or self._is_keys or self.nbytes >= _PRINTED_BYTES:
            return False
        copies = self.is_fully_replicated and not isinstance(self._placement, PartedPlacement)
        return self.is_fully_addressable or (copies and self.is_partially_addressable)

    def __str__(self) -> str:
        """The elements, as numpy prints them, if they are few and this process has them."""
        return str(self._host()) if self._shows_elements() else repr(self)

    def __format__(self, spec: str) -> str:
        """A scalar formats as its number, so that a loss reads well in a message."""
        if self.shape == () and (spec or self._shows_elements()):
            return format(self.item(), spec)
        if not spec:
            return str(self)
        raise make_error(
            "invalid-argument",
            f"format of an MpmdArray as {spec!r}: expected a scalar, found shape {self.shape}; "
            "format its elements, x[0], or np.asarray(x)",
        )


# What scripts of a remote mesh call the same.
ArrayRef = MpmdArray
