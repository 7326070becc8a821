"""Arrays that live on pipeline ranks."""

from __future__ import annotations

import collections
import math
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals import wrap_keys
from jaxpp.mesh import MpmdMesh, MpmdSharding

if TYPE_CHECKING:
    from jaxpp.run.devices import Devices

__all__ = [
    "ArrayRef",
    "MpmdArray",
    "PartedPlacement",
    "PartedValue",
    "Placement",
    "carrier_of",
    "physical_type",
    "to_host",
]


def physical_type(aval: Any) -> tuple[str, tuple[int, ...]]:
    """The element type and shape in which an abstract value is stored."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        return str(data.dtype), tuple(data.shape)
    return str(aval.dtype), tuple(aval.shape)


class Placement:
    """How an abstract value lies on the ranks of a mesh: which ranks, sharded how."""

    def __init__(
        self,
        devices: Devices,
        mesh: MpmdMesh,
        aval: Any,
        ranks: Sequence[int],
        spec: PartitionSpec,
    ) -> None:
        self.devices = devices
        self.mesh = mesh
        self.aval = aval
        self.ranks = tuple(ranks)
        self.local_ranks = tuple(r for r in self.ranks if devices.has_rank(r))
        self.spec = spec
        self.dtype_name, self.physical_shape = physical_type(aval)
        self.sharding = MpmdSharding(mesh, self.ranks, spec)
        self.device_indices = [d for r in self.local_ranks for d in devices.indices[r]]
        self.key = (tuple(aval.shape), aval.dtype, bool(getattr(aval, "weak_type", False)))
        self.slices = self._shard_slices()

    def _shard_slices(self) -> list[tuple[slice, ...]]:
        lowering = self.mesh.lowering_mesh()
        if self.devices.per_rank == 1:
            return [()]
        indices = NamedSharding(lowering, self.spec).devices_indices_map(self.physical_shape)
        return [indices[d] for d in lowering.devices.flat]

    def put(self, array: Any) -> _core.Value:
        """Uploads a host or JAX array to the ranks that this process has, maybe none."""
        shards: list[np.ndarray] = []
        if self.local_ranks:
            host = to_host(array, self.dtype_name)
            shards = [host[index] if index else host for index in self.slices]
        shards *= len(self.local_ranks)
        return self.devices.put(self.local_ranks, self.device_indices, shards, self.dtype_name)

    @property
    def is_replicated(self) -> bool:
        return len(self.ranks) > 1

    def read(self, value: _core.Value | PartedValue, rank: int) -> np.ndarray:
        """The whole array, from one rank's shards."""
        assert not isinstance(value, PartedValue)
        dtype = jnp.dtype(self.dtype_name)
        if self.devices.per_rank == 1:
            return self._read_shard(value, rank, 0, self.physical_shape).view(dtype)
        whole = np.empty(self.physical_shape, dtype)
        for d, index in enumerate(self.slices):
            shape = whole[index].shape
            whole[index] = self._read_shard(value, rank, d, shape).view(dtype)
        return whole

    def _read_shard(
        self, value: _core.Value, rank: int, device: int, shape: tuple[int, ...]
    ) -> np.ndarray:
        shard = np.empty(shape, carrier_of(jnp.dtype(self.dtype_name)))
        if math.prod(shape):
            value.read(rank, device, shard.reshape(-1).view(np.uint8))
        return shard

    read_rank = read


class PartedValue:
    """The memory of an array that is stored by parts along axis 0."""

    def __init__(self, values: list[_core.Value]) -> None:
        self.values = values

    @property
    def deleted(self) -> bool:
        return any(value.deleted for value in self.values)

    @property
    def fate(self) -> str:
        return next(value.fate for value in self.values if value.deleted)

    def delete(self) -> None:
        for value in self.values:
            value.delete()

    def wait(self) -> None:
        for value in self.values:
            value.wait()

    def is_ready(self) -> bool:
        return all(value.is_ready() for value in self.values)


class PartedPlacement:
    """How an array lies that is stored by parts along axis 0, each on its own ranks."""

    is_replicated = False

    def __init__(self, parts: list[Placement], aval: Any) -> None:
        self.parts = parts
        self.devices, self.mesh, self.spec = parts[0].devices, parts[0].mesh, parts[0].spec
        self.aval = aval
        self.ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
        self.local_ranks = tuple(r for r in self.ranks if self.devices.has_rank(r))
        self.sharding = MpmdSharding(self.mesh, self.ranks, self.spec)
        self.dtype_name = parts[0].dtype_name
        self.key = (tuple(aval.shape), aval.dtype, False)

    def rows(self) -> list[slice]:
        ends = np.cumsum([0, *(part.aval.shape[0] for part in self.parts)])
        return [slice(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def is_cut_like(self, other: Any) -> bool:
        """Whether an array placed as `other` says has the same parts."""
        return isinstance(other, PartedPlacement) and (
            [part.aval.shape for part in self.parts]
            == [part.aval.shape for part in other.parts]
        )

    def lies_like(self, other: Any) -> bool:
        """Whether an array placed as `other` says need not move to lie so."""
        return (
            self.is_cut_like(other)
            and other.devices is self.devices
            and all(
                a.devices.per_rank == 1 or a.spec == b.spec
                for a, b in zip(self.parts, other.parts, strict=True)
            )
        )

    def read(self, value: _core.Value | PartedValue, rank: int) -> np.ndarray:
        """The whole array, each part from its first rank."""
        assert isinstance(value, PartedValue)
        if not all(part.local_ranks for part in self.parts):
            raise make_error(
                "mesh",
                f"an MpmdArray of the ranks {list(self.ranks)} is looked at in process "
                f"{jax.process_index()}, which has the rows of the ranks "
                f"{list(self.local_ranks)} only; to_mpmd_local_array has those",
            )
        pairs = zip(self.parts, value.values, strict=True)
        return np.concatenate([part.read(v, part.local_ranks[0]) for part, v in pairs])

    def read_rank(self, value: _core.Value | PartedValue, rank: int) -> np.ndarray:
        """The rows that lie on a rank."""
        assert isinstance(value, PartedValue)
        pairs = zip(self.parts, value.values, strict=True)
        return np.concatenate([p.read(v, rank) for p, v in pairs if rank in p.ranks])


def carrier_of(dtype: Any) -> Any:
    """A dtype of the same size that numpy's buffers can carry."""
    return dtype if dtype.isbuiltin == 1 else np.dtype(f"u{dtype.itemsize}")


def to_host(array: Any, dtype_name: str) -> np.ndarray:
    """The elements of an array as they are stored, in a dtype of numpy's own."""
    if isinstance(array, jax.Array) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    host = np.asarray(array, jnp.dtype(dtype_name))
    return host.view(carrier_of(host.dtype))


def _operand(other: Any) -> Any:
    return other._host() if isinstance(other, MpmdArray) else other


class MpmdArray:
    """An array on the devices of one or more pipeline ranks, the same on each.

    A handle: the memory belongs to the runtime. It becomes a `jax.Array` or a numpy array
    when somebody looks (`np.asarray(x)`, `float(x)`, `x[0]`, `x.to_mpmd_local_array`).
    Steps return these and take them back. Outside steps arithmetic and comparisons are
    numpy's, element by element, in host memory; functions under `jax.jit` (most of `jnp`)
    take `jnp.asarray(x)` or `x.first_mpmd_replica`.
    """

    __slots__ = ("_placement", "_value", "__weakref__")

    def __init__(
        self, placement: Placement | PartedPlacement, value: _core.Value | PartedValue
    ) -> None:
        self._placement = placement
        self._value = value

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
        return bool(getattr(self._placement.aval, "weak_type", False))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def sharding(self) -> MpmdSharding:
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
    def _is_keys(self) -> bool:
        return jnp.issubdtype(self.dtype, jax.dtypes.prng_key)

    # --- Looking at it ---

    def _read(self, rank: int | None = None) -> np.ndarray:
        if rank is None:
            rank = self._first_local_rank()
        return self._placement.read(self._value, rank)

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

    def _rank_array(self, rank: int, host: np.ndarray | None = None) -> jax.Array:
        host = self._read(rank) if host is None else host
        array = jax.device_put(host, self._placement.sharding.rank_sharding(rank))
        if self._is_keys:
            return wrap_keys(array, self.dtype)
        if self.weak_type:
            return jax.lax.convert_element_type_p.bind(
                array, new_dtype=self.dtype, weak_type=True, sharding=None
            )
        return array

    @property
    def _partially_addressable_arrays(self) -> collections.OrderedDict[int, jax.Array]:
        ranks = self._placement.local_ranks
        read = self._placement.read_rank  # of one that is stored by parts: the rank's rows
        return collections.OrderedDict(
            (r, self._rank_array(r, read(self._value, r))) for r in ranks
        )

    @property
    def to_mpmd_local_array(self) -> Any:
        """The array of the rank that holds it, or a list, one a rank."""
        arrays = list(self._partially_addressable_arrays.values())
        return arrays[0] if len(arrays) == 1 else arrays

    @property
    def first_mpmd_replica(self) -> jax.Array:
        """The copy on the lowest rank that holds it."""
        return self._rank_array(self._first_local_rank())

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
        return host if dtype is None else host.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        """For `jnp.asarray(x)` and operators; the result is on JAX's default device."""
        host = jnp.asarray(self._read())
        return wrap_keys(host, self.dtype) if self._is_keys else host

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

    def __getitem__(self, index: Any) -> Any:
        return self.first_mpmd_replica[index] if self._is_keys else self._host()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a scalar array")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError("iteration over a scalar array")
        return iter(self.first_mpmd_replica if self._is_keys else self._host())

    # --- Computing with it, outside a step: in host memory, as numpy does ---

    def __add__(self, other: Any) -> Any:
        return operator.add(self._host(), _operand(other))

    def __radd__(self, other: Any) -> Any:
        return operator.add(other, self._host())

    def __sub__(self, other: Any) -> Any:
        return operator.sub(self._host(), _operand(other))

    def __rsub__(self, other: Any) -> Any:
        return operator.sub(other, self._host())

    def __mul__(self, other: Any) -> Any:
        return operator.mul(self._host(), _operand(other))

    def __rmul__(self, other: Any) -> Any:
        return operator.mul(other, self._host())

    def __truediv__(self, other: Any) -> Any:
        return operator.truediv(self._host(), _operand(other))

    def __rtruediv__(self, other: Any) -> Any:
        return operator.truediv(other, self._host())

    def __floordiv__(self, other: Any) -> Any:
        return operator.floordiv(self._host(), _operand(other))

    def __rfloordiv__(self, other: Any) -> Any:
        return operator.floordiv(other, self._host())

    def __mod__(self, other: Any) -> Any:
        return operator.mod(self._host(), _operand(other))

    def __rmod__(self, other: Any) -> Any:
        return operator.mod(other, self._host())

    def __pow__(self, other: Any) -> Any:
        return operator.pow(self._host(), _operand(other))

    def __rpow__(self, other: Any) -> Any:
        return operator.pow(other, self._host())

    def __matmul__(self, other: Any) -> Any:
        return operator.matmul(self._host(), _operand(other))

    def __rmatmul__(self, other: Any) -> Any:
        return operator.matmul(other, self._host())

    def __neg__(self) -> Any:
        return operator.neg(self._host())

    def __abs__(self) -> Any:
        return operator.abs(self._host())

    def __eq__(self, other: Any) -> Any:
        """Element by element, as numpy and JAX compare; so it has no hash."""
        return operator.eq(self._host(), _operand(other))

    def __ne__(self, other: Any) -> Any:
        return operator.ne(self._host(), _operand(other))

    def __lt__(self, other: Any) -> Any:
        return operator.lt(self._host(), _operand(other))

    def __le__(self, other: Any) -> Any:
        return operator.le(self._host(), _operand(other))

    def __gt__(self, other: Any) -> Any:
        return operator.gt(self._host(), _operand(other))

    def __ge__(self, other: Any) -> Any:
        return operator.ge(self._host(), _operand(other))

    __hash__ = None  # type: ignore[assignment]

    # --- Its memory ---

    def delete(self) -> None:
        """Frees the device memory now. Using the array afterwards is an error."""
        self._value.delete()

    def is_deleted(self) -> bool:
        """Deleted, or donated to a step."""
        return self._value.deleted

    def block_until_ready(self) -> MpmdArray:
        """Waits until its contents are there; returns itself."""
        self._value.wait()
        return self

    def is_ready(self) -> bool:
        """Whether its contents are there, or its step failed: looking at it would not wait."""
        return self._value.is_ready()

    def __reduce__(self) -> Any:
        raise make_error(
            "unsupported",
            "an MpmdArray can not be pickled: its memory belongs to the devices of this "
            "process; pickle np.asarray(x)",
        )

    # --- Printing ---

    def __repr__(self) -> str:
        if self._value.deleted:
            return f"MpmdArray(shape={self.shape}, dtype={self.dtype}, deleted)"
        return (
            f"MpmdArray(shape={self.shape}, dtype={self.dtype}, "
            f"mpmd_idxs={self.mpmd_idxs}, sharding={self.sharding.sharding})"
        )

    def __format__(self, spec: str) -> str:
        """A scalar formats as its number, so that a loss reads well in a message."""
        if self.shape == () and not (self._value.deleted and not spec):
            return format(self.item(), spec)
        if not spec:
            return repr(self)
        raise make_error(
            "invalid-argument",
            f"format of an MpmdArray as {spec!r}: expected a scalar, found shape {self.shape}; "
            "format its elements, x[0], or np.asarray(x)",
        )


# What scripts of a remote mesh call the same.
ArrayRef = MpmdArray
