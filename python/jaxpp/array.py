"""Arrays on pipeline ranks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    JaxArrays,
    JaxPart,
    Part,
    Placement,
    physical_type,
)

__all__ = ["ArrayRef", "MpmdArray", "MpmdShard"]

_PRINTED_BYTES = 1 << 20  # a larger array prints its sharding instead


def _differ_in_size(ranges: Iterable[slice]) -> bool:
    return len({rows.stop - rows.start for rows in ranges}) > 1


@dataclasses.dataclass(frozen=True)
class MpmdShard:
    """The part of an array on one device, with the fields of a `jax.Shard`."""

    device: jax.Device
    index: tuple[slice, ...]
    replica_id: int  # numbers the copies of the same elements
    _read: Callable[[], jax.Array] | None = dataclasses.field(repr=False)

    @property
    def data(self) -> jax.Array | None:
        """The part as a single-device array; None for a device of another process."""
        return self._read() if self._read else None


def _ranks_of(arrays: Sequence[Any], sharding: MpmdSharding) -> dict[int, jax.Array]:
    """Matches each array to one of the sharding's ranks."""
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
                f"MpmdArray: array {number} has the sharding {array.sharding}; expected one "
                f"array per rank, on ranks {list(sharding.mesh_ids)} of the mesh, sharded by "
                f"{sharding.spec} within the rank (MpmdSharding.rank_sharding(rank))",
            )
        found[ranks[0]] = array
    return found


def _common_type(arrays: Sequence[jax.Array], shape: Any, dtype: Any) -> Any:
    """The abstract value of the arrays, which `shape` and `dtype` must match unless None."""
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
        f"MpmdArray: expected arrays of the same shape and dtype{told}, found {text}; a "
        "process without an array passes the shape and dtype of the others",
    )


def _put(host: np.ndarray | jax.Array, where: Any = None) -> jax.Array:
    """`jax.device_put` that keeps 64-bit types without jax_enable_x64."""
    with jax.enable_x64(True) if _is_wide(host) else contextlib.nullcontext():
        return jax.device_put(host, where)


def _is_wide(host: np.ndarray | jax.Array) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(host.dtype) != host.dtype)


def _device_bytes(part: Part | JaxPart) -> int:
    shape = part.sharding.shard_shape(part.aval.shape)
    dtype, stored = physical_type(jax.ShapeDtypeStruct(shape, part.aval.dtype))
    return _core.device_bytes(dtype, math.prod(stored)) * part.sharding.num_devices


@jax_array
class MpmdArray(jax.Array):  # type: ignore[misc]
    """An array on the devices of one or more pipeline ranks, with the same contents on each.

    The object is a handle; the runtime owns the memory. Steps return such arrays and accept
    them as arguments without moving any data. An `MpmdArray` is a `jax.Array`: it has the same
    operators and methods, and it works with `jnp`, `jax.jit`, `jax.grad`, `jax.vmap`,
    `jax.device_put`, optimizers and checkpoint libraries.

    Outside a step, JAX computes with it on JAX's own devices. The array is uncommitted there,
    like a numpy array, so one `jax.jit` can take arrays of several ranks. Each use reads the
    first rank that holds the array: in place on CPU devices, through a copy on other devices
    (docs/gpu.md). Shards and parts are joined first. JAX's arrays are immutable: while a JAX
    array shares the memory, a step to which this array is donated works on a copy. Reading the
    result of an unfinished step waits for it.

    `MpmdArray(arrays, sharding)` builds one from `jax.Array`s on the ranks of an
    `MpmdSharding`. It refers to these arrays until a step takes it. From then on the runtime
    owns it, in the same memory if both can use that memory, otherwise in a copy; deleting or
    donating the arrays no longer affects it. (On a GPU, JAX refuses to donate an array whose
    memory is shared.)

    Args:
      partially_addressable_arrays: the array of each rank in this process; empty, with `shape`
        and `dtype`, for an array that only other processes hold. It has a type and a sharding
        but cannot be read in this process.
      mpmd_sharding: which ranks hold the array, and how each of them shards it.
      shape, dtype: of the array; required if this process holds no part of it.

    Raises:
      JaxppError: an element is not an array or has the wrong shape ("invalid-argument"), or
        an array has another sharding ("sharding").
    """

    __slots__ = ("_placement", "_values", "__weakref__")
    __array_priority__ = 100  # as in jax.Array, so that numpy's operators defer to these

    _placement: Placement
    _values: Sequence[Any]  # the memory of each part: a _core.Value, or JaxArrays

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
        self._placement = Placement([JaxPart(mpmd_sharding, aval, local)], aval)
        self._values = [JaxArrays(arrays)]

    @classmethod
    def _of(cls, placement: Placement, values: Sequence[Any]) -> MpmdArray:
        array = cls.__new__(cls)
        array._placement, array._values = placement, values
        return array

    # --- Type and sharding ---

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
        """The ranks that hold the array and how each of them shards it. If the array is stored
        in parts along axis 0, each on its stage's rank, the spec has the pipeline axis
        there."""
        return self._placement.sharding

    @property
    def spec(self) -> PartitionSpec:
        return self._placement.spec

    @property
    def mpmd_idxs(self) -> tuple[int, ...]:
        """The ranks that hold the array."""
        return self._placement.ranks

    @property
    def is_mpmd_replicated(self) -> bool:
        return self._placement.is_replicated

    @property
    def is_partially_addressable(self) -> bool:
        """Whether this process has any of these ranks."""
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
        """All devices that hold a part of the array."""
        return self.sharding.device_set

    @property
    def device(self) -> Any:
        """The device if there is exactly one, otherwise the sharding."""
        devices = self.devices()
        return next(iter(devices)) if len(devices) == 1 else self.sharding

    @property
    def _is_keys(self) -> bool:
        return key_implementation(self.dtype) is not None

    # --- Contents ---

    def _read(self, rank: int | None = None) -> np.ndarray:
        if rank is None:
            rank = self._first_local_rank()
        return self._placement.read(self._values, rank)

    def _first_local_rank(self) -> int:
        ranks = self._placement.local_ranks
        if ranks:
            return ranks[0]
        raise make_error(
            "mesh",
            f"an MpmdArray of rank {self._placement.ranks[0]} is read in process "
            f"{jax.process_index()}, which holds no copy of it; expected a process of the "
            f"ranks {list(self._placement.ranks)}, where x.is_partially_addressable is true, "
            "or a result that out_shardings= leaves on all ranks",
        )

    def _typed(self, array: jax.Array) -> jax.Array:
        """Converts an array of stored elements to this array's dtype."""
        if self._is_keys:
            return wrap_keys(array, self.dtype)
        if self.weak_type:
            return jax.lax.convert_element_type_p.bind(
                array, new_dtype=self.dtype, weak_type=True, sharding=None
            )
        return array

    @property
    def _is_built(self) -> bool:
        """Whether it was built from JAX arrays that no step has taken yet."""
        return self._placement.devices is None

    def _rank_array(self, rank: int) -> jax.Array:
        """The copy on a rank, or the rank's rows if the array is stored in parts."""
        placement = self._placement
        if self._is_built:
            return self._values[0].of_rank(rank)
        sharding = placement.rank_sharding(rank)
        if not placement.is_whole:
            return self._typed(_put(placement.read_rows(self._values, rank), sharding))
        part = placement.parts[0]
        shards = [
            _put(part.shard(self._values[0], rank, d), self._at(device))
            for d, device in enumerate(part.devices.of_rank(part.mesh, rank))
        ]
        shape = part.physical_shape
        return self._typed(jax.make_array_from_single_device_arrays(shape, sharding, shards))

    def _at(self, device: jax.Device) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(device, memory_kind=self._placement.memory)

    def _contents(self) -> np.ndarray | jax.Array:
        """The stored elements, without a copy if JAX can use their memory."""
        rank = self._first_local_rank()
        if self._placement.is_whole:
            return self._placement.parts[0].whole(self._values[0], rank)
        return self._placement.read(self._values, rank)

    def _local(self) -> jax.Array:
        """The contents as an uncommitted array of JAX's client."""
        return self._typed(_put(self._contents()))

    def _parts(self) -> list[tuple[int, MpmdArray]]:
        """The stored parts, each with its start along the axis."""
        whole = self._placement
        if whole.is_whole:
            return [(0, self)]
        return [
            (rows.start, MpmdArray._of(Placement([part], part.aval), [value]))
            for rows, part, value in zip(whole.rows(), whole.parts, self._values, strict=True)
        ]

    def _for_jax(self) -> Any:
        if self._is_built:
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
        """The array on its rank; a list with one array per rank if several ranks hold it."""
        arrays = list(self._partially_addressable_arrays.values())
        return arrays[0] if len(arrays) == 1 else arrays

    @property
    def first_mpmd_replica(self) -> jax.Array:
        """The copy on the lowest rank that holds it."""
        rank = self._first_local_rank()
        if not self._placement.is_whole:
            whole = self._placement.read(self._values, rank)
            return self._typed(_put(whole, self._placement.rank_sharding(rank)))
        return self._rank_array(rank)

    def _host(self) -> np.ndarray:
        """The array in host memory, read from the first rank that has it."""
        if self._is_keys:
            raise make_error(
                "unsupported",
                f"an MpmdArray of {self.dtype} has no numpy form; expected numbers. Use "
                "jax.random.key_data(x.first_mpmd_replica)",
            )
        return self._read()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        host = self._host()
        if dtype is not None and host.dtype != dtype:
            if copy is False:
                raise ValueError(f"{dtype} from {host.dtype} needs a copy, found copy=False")
            return host.astype(dtype)
        return host.copy() if copy and not host.flags.writeable else host

    @property
    def _value(self) -> np.ndarray:
        """The contents as a numpy array. JaxPP scripts call this on a worker's array."""
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
            raise TypeError(
                f"an array of {self.dtype} cannot be an index; expected an integer scalar"
            )
        return int(self._scalar("index"))

    def item(self, *index: Any) -> Any:
        """An element, by its index in the flat array or in each axis, as a Python number.
        Without an index: the only element."""
        return self._host().item(*index) if index else self._scalar("item")

    def tolist(self) -> Any:
        """Nested lists of Python numbers, like numpy's `tolist`."""
        return self._host().tolist()

    def tobytes(self) -> bytes:
        """The elements as bytes, like numpy's `tobytes`."""
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

    # --- Shards ---

    @property
    def global_shards(self) -> list[MpmdShard]:
        """The part on each device of its ranks. An array that is stored in parts has one shard
        for each range of rows on a rank."""
        if not self._placement.is_whole:
            return self._shards_of_parts()
        copies: collections.Counter[Any] = collections.Counter()
        mesh, ranks = self._placement.mesh, self._placement.ranks
        rank_of = {device: r for r in reversed(ranks) for device in mesh.devices_of(r)}
        shards = []
        for device, index in self.sharding.devices_indices_map(self.shape).items():
            rank = rank_of[device]
            is_here = rank in self._placement.local_ranks and self._has_device(rank, device)
            part = functools.partial(self._part, rank, index, device)
            key = tuple((one.start, one.stop) for one in index)
            shards.append(MpmdShard(device, index, copies[key], part if is_here else None))
            copies[key] += 1
        return shards

    def _shards_of_parts(self) -> list[MpmdShard]:
        placement, axis = self._placement, self._placement.axis
        copies: collections.Counter[Any] = collections.Counter()
        shards = []
        ranges, parts = list(placement.rows_by_rank()), placement.rows()
        if _differ_in_size(rows for _, (rows, _) in ranges) and not _differ_in_size(parts):
            # A rank has copies of others' parts. Libraries that save arrays expect shards of
            # one shape.
            ranges = [(r, (parts[k], range(k, k + 1))) for r, (_, own) in ranges for k in own]
        for rank, (rows, numbers) in ranges:
            shape = (*self.shape[:axis], rows.stop - rows.start, *self.shape[axis + 1 :])
            where = placement.rank_sharding(rank).devices_indices_map(shape)
            for device, index in where.items():
                is_here = rank in placement.local_ranks and self._has_device(rank, device)
                part = functools.partial(self._part_of_rows, rank, numbers, index, device)
                own = (*index[:axis], rows, *index[axis + 1 :])
                key = tuple((one.start, one.stop) for one in own)
                shards.append(MpmdShard(device, own, copies[key], part if is_here else None))
                copies[key] += 1
        return shards

    def _part_of_rows(
        self, rank: int, numbers: range, index: tuple[slice, ...], device: jax.Device
    ) -> jax.Array:
        parts = [self._placement.parts[k].read(self._values[k], rank) for k in numbers]
        whole = np.concatenate(parts, self._placement.axis)
        return self._typed(_put(whole[index], self._at(device)))

    def _has_device(self, rank: int, device: jax.Device) -> bool:
        """Whether this process has a device that holds a part of the array."""
        placement = self._placement
        known = placement.devices
        return known is None or device in known.of_rank(placement.mesh, rank)

    def _part(self, rank: int, index: tuple[slice, ...], device: jax.Device) -> jax.Array:
        part = self._placement.parts[0]
        shard = part.device_shard(self._values[0], rank, index, device)
        return self._typed(_put(shard, self._at(device)))

    @property
    def addressable_shards(self) -> list[MpmdShard]:
        """The shards on this process's ranks."""
        return [shard for shard in self.global_shards if shard._read]

    def addressable_data(self, index: int) -> jax.Array:
        """The part on one of this process's devices."""
        return self.addressable_shards[index].data

    def on_device_size_in_bytes(self) -> int:
        """The size of all parts in bytes."""
        return sum(map(_device_bytes, self._placement.parts))

    def copy_to_host_async(self) -> None:
        """Does nothing: reading the array copies it to host memory."""

    # --- Memory ---

    def delete(self) -> None:
        """Frees the device memory. Any later use of the array is an error."""
        for value in self._values:
            value.delete()

    def is_deleted(self) -> bool:
        """Whether the array was deleted or donated to a step."""
        return any(value.deleted for value in self._values)

    def block_until_ready(self) -> MpmdArray:
        """Waits until the contents are computed and returns the array."""
        for value in self._values:
            value.wait()
        return self

    def is_ready(self) -> bool:
        """Whether the contents are computed or the step failed, so that a read does not
        wait."""
        return all(value.is_ready() for value in self._values)

    def copy(self) -> MpmdArray:
        """A copy with the same sharding, which donating this array does not affect."""
        pairs = zip(self._placement.parts, self._values, strict=True)
        return MpmdArray._of(self._placement, [part.copy(value) for part, value in pairs])

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> MpmdArray:
        return self.copy()

    def __reduce__(self) -> Any:
        """Pickles the value. It is unpickled as a JAX array and does not need this package."""
        if self._is_keys:
            make = functools.partial(
                jax.random.wrap_key_data, impl=key_implementation(self.dtype)
            )
            return make, (self._read(),)
        return self._local().__reduce__()

    # --- Printing ---

    def __repr__(self) -> str:
        if self.is_deleted():
            return f"MpmdArray(shape={self.shape}, dtype={self.dtype}, deleted)"
        return (
            f"MpmdArray(shape={self.shape}, dtype={self.dtype}, "
            f"mpmd_idxs={self.mpmd_idxs}, sharding={self.sharding})"
        )

    def _shows_elements(self) -> bool:
        """Whether repr() shows the elements, by the rule of JAX's own arrays."""
        if self.is_deleted() or self._is_keys or self.nbytes >= _PRINTED_BYTES:
            return False
        copies = self.is_fully_replicated and self._placement.is_whole
        return self.is_fully_addressable or (copies and self.is_partially_addressable)

    def __str__(self) -> str:
        """The elements as numpy prints them, if they are few and this process holds them."""
        return str(self._host()) if self._shows_elements() else repr(self)

    def __format__(self, spec: str) -> str:
        """Formats a scalar as its number, for example a loss in a log message."""
        if self.shape == () and (spec or self._shows_elements()):
            return format(self.item(), spec)
        if not spec:
            return str(self)
        raise make_error(
            "invalid-argument",
            f"format of an MpmdArray as {spec!r}: expected a scalar, found shape {self.shape}; "
            "format its elements, x[0], or np.asarray(x)",
        )


# The name that scripts for a remote mesh use.
ArrayRef = MpmdArray
