"""Meshes with a pipeline axis."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from types import TracebackType
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import keeps_its_sharding
from jaxpp.jax_internals.context import context_mesh, enter_mesh
from jaxpp.job import watch_job

__all__ = [
    "MpmdMesh",
    "MpmdSharding",
    "axes_by_dimension",
    "memory_of",
    "parted_sharding",
    "rank_axes",
]


def __getattr__(name: str) -> Any:
    """`RemoteMpmdMesh`, which scripts import from here too. Its module imports this one."""
    if name == "RemoteMpmdMesh":
        from jaxpp.remote.mesh import RemoteMpmdMesh

        return RemoteMpmdMesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def memory_of(sharding: Any, what: str) -> str:
    """The memory of a sharding: "device" (also for anything without a memory kind) or
    "pinned_host". Raises JaxppError("unsupported") for any other kind, with `what`."""
    kind = getattr(sharding, "memory_kind", None)
    if kind is None or kind in ("device", "pinned_host"):
        return kind or "device"
    mesh = getattr(sharding, "mesh", None)
    devices = () if isinstance(mesh, AbstractMesh) else sharding.device_set
    if kind == next((d.default_memory().kind for d in devices), "device"):
        return "device"
    raise make_error(
        "unsupported",
        f"{what}: expected memory_kind='device', 'pinned_host' or None, found "
        f"memory_kind={kind!r}",
    )


def axes_by_dimension(spec: PartitionSpec) -> list[tuple[str, ...]]:
    """The mesh axes that shard each dimension for which the spec has an entry."""
    parts = spec.partitions
    return [p if isinstance(p, tuple) else () if p is None else (p,) for p in parts]


def rank_axes(mesh: MpmdMesh) -> tuple[tuple[str, ...], list[int]]:
    """The names of the axes of a rank's mesh, and their sizes on one rank after the other."""
    sizes = [size for own in mesh.unstack for size in own.shape.values()]
    return mesh.unstack[0].axis_names, sizes


def _check_is_mesh(mesh: Any, what: str) -> None:
    if not isinstance(mesh, Mesh):
        raise make_error(
            "mesh",
            f"MpmdMesh: {what}={shorten(mesh)}; expected a jax.sharding.Mesh",
            wrong_type=True,
        )


def _differ(meshes: Iterable[Mesh]) -> bool:
    """Whether meshes have different sizes."""
    return len({mesh.devices.shape for mesh in meshes}) > 1


def _check_alike(meshes: Sequence[Mesh]) -> None:
    """Checks that meshes, without the pipeline axis, differ in nothing but their sizes."""
    first = meshes[0]
    for number, mesh in enumerate(meshes):
        if (mesh.axis_names, mesh.axis_types) != (first.axis_names, first.axis_types):
            raise make_error(
                "mesh",
                f"MpmdMesh: jax_mesh[{number}] has the axes {mesh.axis_names} of types "
                f"{mesh.axis_types}; expected those of jax_mesh[0], {first.axis_names} of "
                f"types {first.axis_types}. An axis along which a rank has one device has "
                "size 1",
            )
    if _differ(meshes) and any(kind is not AxisType.Auto for kind in first.axis_types):
        raise make_error(
            "unsupported",
            f"MpmdMesh: expected axes of type Auto for ranks of unequal meshes, found "
            f"{first.axis_types}",
        )


def _rank_meshes(given: Sequence[Any], name: str) -> list[Mesh]:
    """Meshes of one rank each, with the pipeline axis of size 1."""
    if not given:
        raise make_error("mesh", "MpmdMesh: jax_mesh=[]; expected a mesh for each rank")
    found = []
    for number, mesh in enumerate(given):
        _check_is_mesh(mesh, f"jax_mesh[{number}]")
        if mesh.shape.get(name, 1) != 1:
            raise make_error(
                "mesh",
                f"MpmdMesh: jax_mesh[{number}] has size {mesh.shape[name]} along {name!r}; "
                "expected a mesh of one rank: size 1, or no such axis",
            )
        if name not in mesh.axis_names:
            types = (AxisType.Auto, *mesh.axis_types)
            mesh = Mesh(mesh.devices[None], (name, *mesh.axis_names), axis_types=types)
        found.append(mesh)
    _check_alike(found)
    return found


def _joined(meshes: Sequence[Mesh], name: str) -> Mesh:
    """The devices of meshes of one rank each, along the pipeline axis; if their sizes differ,
    that is the only axis."""
    first, axis = meshes[0], meshes[0].axis_names.index(name)
    if not _differ(meshes):
        devices = np.concatenate([mesh.devices for mesh in meshes], axis)
        return Mesh(devices, first.axis_names, axis_types=first.axis_types)
    distinct = dict.fromkeys(device for mesh in meshes for device in mesh.devices.flat)
    return Mesh(np.array([*distinct], dtype=object), (name,))


def _meshes_of(given: Any, name: str, copies: int) -> tuple[Mesh, tuple[Mesh, ...]]:
    """The mesh of all devices, each rank repeated; and the mesh of each rank if their sizes
    differ, otherwise ()."""
    if isinstance(given, list | tuple):
        meshes = [mesh for mesh in _rank_meshes(given, name) for _ in range(copies)]
        return _joined(meshes, name), tuple(meshes) if _differ(meshes) else ()
    _check_is_mesh(given, "jax_mesh")
    if name not in given.axis_names:
        raise make_error(
            "mesh",
            f"MpmdMesh: mpmd_axis_name={name!r} is not an axis of the mesh; expected one of "
            f"{given.axis_names}",
        )
    if copies == 1:
        return given, ()
    shared = np.repeat(given.devices, copies, given.axis_names.index(name))
    return Mesh(shared, given.axis_names, axis_types=given.axis_types), ()


@dataclasses.dataclass(frozen=True, init=False)
class MpmdMesh:
    """A `jax.sharding.Mesh` with one axis for the pipeline ranks.

    Each index along `mpmd_axis_name` is one rank (actor) with its own group of devices; the
    other axes shard values within a rank. Ranks may share a group of devices: the mesh then
    repeats the group along the pipeline axis, as `ranks_per_device` does. Such ranks take turns
    on their devices and pass values to each other without a copy, so a whole pipeline can run
    on one accelerator. Their memory use adds up on the shared devices.

    Ranks may have unequal meshes, such as one device for a vision tower and four for the
    rest: pass a list with the mesh of each rank. Specs name the same axes on all ranks, and a
    value that ranks of unequal meshes share is whole on each of their devices.

    Args:
      jax_mesh: the devices: a mesh with the pipeline axis, or the mesh of each rank. Those
        have the same axes, whose sizes may differ, and need not have the pipeline axis.
      mpmd_axis_name: the pipeline axis.
      ranks_per_device: how many consecutive ranks share each group of devices. The attribute
        `jax_mesh` repeats each group that many times. If ranks have unequal meshes, it has all
        devices along the pipeline axis.

    Raises:
      JaxppError: an argument is invalid, or ranks share only some of their devices
        ("mesh").
    """

    jax_mesh: Mesh
    mpmd_axis_name: str
    # The mesh of each rank, if their sizes differ; otherwise ().
    unequal: tuple[Mesh, ...] = dataclasses.field(default=(), repr=False)
    # The meshes of active `with` blocks, innermost last.
    mesh_stack: ClassVar[list[MpmdMesh]] = []
    # The worker processes that own the devices, if the mesh is remote.
    workers: ClassVar[Any] = None

    def __init__(
        self,
        jax_mesh: Mesh | Sequence[Mesh],
        mpmd_axis_name: str,
        *,
        ranks_per_device: int = 1,
    ) -> None:
        watch_job(stacklevel=2)
        if not isinstance(ranks_per_device, int) or ranks_per_device < 1:
            raise make_error(
                "mesh",
                f"MpmdMesh: ranks_per_device={shorten(ranks_per_device)}; expected a whole "
                "number above 0",
            )
        whole, unequal = _meshes_of(jax_mesh, mpmd_axis_name, ranks_per_device)
        object.__setattr__(self, "jax_mesh", whole)
        object.__setattr__(self, "mpmd_axis_name", mpmd_axis_name)
        object.__setattr__(self, "unequal", unequal)
        self._check_groups()

    def _check_groups(self) -> None:
        """Checks that ranks share all of their devices, in the same order, or none."""
        owner: dict[jax.Device, int] = {}
        for rank in self._first_with_group.values():
            for device in self.devices_of(rank):
                other = owner.setdefault(device, rank)
                if other != rank:
                    raise make_error(
                        "mesh",
                        f"MpmdMesh: ranks {other} and {rank} share device {device}, but not "
                        "all of their devices in the same order; expected the same group or "
                        "disjoint groups",
                    )
            if len(set(self.devices_of(rank))) < len(self.devices_of(rank)):
                raise make_error(
                    "mesh",
                    f"MpmdMesh: rank {rank} names a device more than once; expected repeated "
                    "devices only along the pipeline axis (ranks_per_device=)",
                )

    @property
    def mpmd_axis(self) -> int:
        """The position of the pipeline axis among the axes of a rank's mesh."""
        mesh = self.unequal[0] if self.unequal else self.jax_mesh
        return mesh.axis_names.index(self.mpmd_axis_name)

    @property
    def mpmd_dim(self) -> int:
        """The number of pipeline ranks."""
        if self.unequal:
            return len(self.unequal)
        return self.jax_mesh.devices.shape[self.mpmd_axis]

    @functools.cached_property
    def _first_with_group(self) -> dict[tuple[jax.Device, ...], int]:
        """The first rank of each group of devices."""
        groups = {tuple(self.devices_of(rank)): rank for rank in reversed(range(self.mpmd_dim))}
        return dict(reversed(groups.items()))

    @property
    def ranks_per_device(self) -> int:
        """The number of ranks that share each group of devices."""
        return self.mpmd_dim // len(self._first_with_group)

    @property
    def group_numbers(self) -> tuple[int, ...]:
        """The group of devices of each rank, identified by the group's first rank."""
        firsts = self._first_with_group
        return tuple(firsts[tuple(self.devices_of(rank))] for rank in range(self.mpmd_dim))

    def mesh_of_groups(self, ranks: Iterable[int]) -> Mesh:
        """The devices of some ranks, each group once, along the pipeline axis; ranks of
        unequal meshes have no other axis."""
        groups = [tuple(self.devices_of(rank)) for rank in ranks]
        return self._mesh_of(dict.fromkeys(self._first_with_group[g] for g in groups))

    def is_equal(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks have meshes of the same sizes."""
        return not self.unequal or not _differ(self.unequal[r] for r in ranks)

    @functools.cached_property
    def unstack(self) -> list[Mesh]:
        """One mesh per rank, with a pipeline axis of size 1."""
        if self.unequal:
            return list(self.unequal)
        return [self._mesh_of((rank,)) for rank in range(self.mpmd_dim)]

    def _mesh_of(self, ranks: Iterable[int]) -> Mesh:
        if self.unequal:
            return _joined([self.unequal[rank] for rank in ranks], self.mpmd_axis_name)
        devices = np.take(self.jax_mesh.devices, list(ranks), axis=self.mpmd_axis)
        return Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types)

    def mpmd_submesh(self, idxs: Iterable[int]) -> MpmdMesh:
        """The mesh of the given ranks, renumbered 0, 1, ... in the given order."""
        ranks = self.ranks_in(idxs, "mpmd_submesh: idxs")
        if self.unequal:
            return MpmdMesh([self.unequal[rank] for rank in ranks], self.mpmd_axis_name)
        return MpmdMesh(self._mesh_of(ranks), self.mpmd_axis_name)

    def ranks_in(self, given: Any, name: str) -> tuple[int, ...]:
        """Ranks that the user gave as argument `name`, in order; a set in ascending order."""
        ranks = tuple(given) if isinstance(given, Iterable) else ()
        if ranks and all(self._is_rank(i) for i in ranks):
            return tuple(sorted(ranks) if isinstance(given, Set) else ranks)
        listed = "" if isinstance(given, Iterable) else ", in a list"
        raise make_error(
            "mesh",
            f"{name}={shorten(given)}; expected ranks from 0 to {self.mpmd_dim - 1}{listed}",
        )

    def _is_rank(self, given: Any) -> bool:
        whole = isinstance(given, int | np.integer) and not isinstance(given, bool)
        return whole and 0 <= given < self.mpmd_dim

    @functools.cached_property
    def device_coords(self) -> Mapping[jax.Device, tuple[int, ...]]:
        """The index of each device along each axis of the mesh, with its rank along the
        pipeline axis; the first one if ranks share the device."""
        places: dict[jax.Device, tuple[int, ...]] = {}
        axis = self.mpmd_axis
        for rank, mesh in enumerate(self.unstack):
            for at, device in np.ndenumerate(mesh.devices):
                places.setdefault(device, (*at[:axis], rank, *at[axis + 1 :]))
        return places

    @functools.cached_property
    def device_mpmd_idx(self) -> Mapping[jax.Device, int]:
        """The rank of each device; the first one if ranks share the device."""
        return {device: at[self.mpmd_axis] for device, at in self.device_coords.items()}

    @functools.cached_property
    def mpmd_idx_for_mesh(self) -> Mapping[Mesh, int]:
        """The rank of each mesh in `unstack`; the first one if ranks share the mesh."""
        return {mesh: self.unstack.index(mesh) for mesh in self.unstack}

    @property
    def as_mpmd_mesh(self) -> MpmdMesh:
        """This mesh."""
        return self

    def lowering_mesh(self) -> Mesh:
        """The mesh that tasks are lowered for: one rank's, in the same form for all ranks.

        For unequal meshes, every axis has the largest size that it has on any rank. If no rank
        has all these sizes, the mesh repeats devices. Each lowered module then gets the sizes
        of its own rank.
        """
        return self._lowering_mesh

    @functools.cached_property
    def _lowering_mesh(self) -> Mesh:
        first = self.unstack[0]
        if not self.unequal:
            return first
        sizes = np.max([mesh.devices.shape for mesh in self.unequal], axis=0)
        found = (own for own in self.unequal if own.devices.shape == tuple(sizes))
        return next(found, None) or Mesh(np.resize(first.devices, sizes), first.axis_names)

    def without_pipeline_axis(self, spec: PartitionSpec) -> PartitionSpec:
        """The part of a whole-mesh spec that shards within a rank."""
        by_dimension = axes_by_dimension(spec)
        if not any(self.mpmd_axis_name in axes for axes in by_dimension):
            return spec
        parts: list[Any] = []
        for axes in by_dimension:
            kept = tuple(a for a in axes if a != self.mpmd_axis_name)
            parts.append(kept[0] if len(kept) == 1 else kept or None)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)

    @contextlib.contextmanager
    def tracing_context(self) -> Iterator[None]:
        """A context in which specs refer to the axes of a rank's mesh, whatever the
        context mesh."""
        mesh = self.lowering_mesh()
        with context_mesh(mesh, self.jax_mesh), self.eager_context():
            yield

    @contextlib.contextmanager
    def eager_context(self) -> Iterator[None]:
        """The same for a step's function that runs op by op; named axes refer to one rank's
        devices."""
        mesh = self.lowering_mesh()
        enter_mesh(mesh)
        try:
            yield
        finally:
            mesh.__exit__(None, None, None)

    @property
    def my_mpmd_axis_index(self) -> int:
        """The first rank with devices that this process can address."""
        for rank, mesh in enumerate(self.unstack):
            if mesh.local_devices:
                return rank
        raise make_error("mesh", "no rank of the mesh has a device of this process")

    @property
    def my_mpmd_group_mesh(self) -> Mesh:
        """The mesh of rank `my_mpmd_axis_index`."""
        return self.unstack[self.my_mpmd_axis_index]

    def devices_of(self, rank: int) -> list[jax.Device]:
        """A rank's devices, in the order of its mesh."""
        return list(self.unstack[rank].devices.flat)

    def __enter__(self) -> MpmdMesh:
        enter_mesh(self.jax_mesh)
        MpmdMesh.mesh_stack.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        MpmdMesh.mesh_stack.pop()
        self.jax_mesh.__exit__(kind, error, trace)


class Ranks(tuple[int, ...]):
    """Ranks that hold an array. Unlike a tuple, it is a leaf of a pytree."""

    __slots__ = ()


@keeps_its_sharding
class MpmdSharding(NamedSharding):  # type: ignore[misc]
    """The sharding of an `MpmdArray`: a copy on each of several ranks, sharded by `spec`.

    It is a `jax.sharding.NamedSharding` over the devices of these ranks. The pipeline axis of
    its `mesh` indexes them (ranks that share devices count once) and shards nothing.
    `jax.device_put(x, sharding)` returns a `jax.Array` with this sharding.
    `jax.ShapeDtypeStruct` and libraries that restore checkpoints accept it too, and steps
    accept the resulting arrays.

    Args:
      mpmd_mesh: the mesh of all ranks.
      mesh_ids: the ranks that hold the array.
      spec: how each copy is sharded within its rank; the pipeline axis is dropped from it.
      memory_kind: the memory of the devices that holds the array: None or "device", or
        "pinned_host".
    """

    def __init__(
        self,
        mpmd_mesh: MpmdMesh,
        mesh_ids: Iterable[int],
        spec: PartitionSpec,
        memory_kind: str | None = None,
    ) -> None:
        if not isinstance(mpmd_mesh, MpmdMesh):
            raise make_error(
                "mesh",
                f"MpmdSharding: mpmd_mesh={shorten(mpmd_mesh)}; expected an MpmdMesh",
                wrong_type=True,
            )
        ids = mpmd_mesh.ranks_in(mesh_ids, "MpmdSharding: mesh_ids")
        if len(set(ids)) < len(ids):
            raise make_error(
                "mesh", f"MpmdSharding: mesh_ids={shorten(mesh_ids)}; expected each rank once"
            )
        if not isinstance(spec, PartitionSpec):
            raise make_error(
                "sharding",
                f"MpmdSharding: spec={shorten(spec)}; expected a PartitionSpec",
                wrong_type=True,
            )
        own = mpmd_mesh.without_pipeline_axis(spec)
        self._set(mpmd_mesh, ids, own, memory_kind)
        memory_of(self, "MpmdSharding")

    def with_memory_kind(self, kind: str | None) -> MpmdSharding:
        """This sharding in another memory of the same devices."""
        sharding = MpmdSharding._of(self.mpmd_mesh, self.mesh_ids, self.spec, kind)
        memory_of(sharding, "MpmdSharding")
        return sharding

    def _set(
        self,
        mpmd_mesh: MpmdMesh,
        ids: tuple[int, ...],
        spec: PartitionSpec,
        memory_kind: str | None,
    ) -> None:
        if spec != PartitionSpec() and not mpmd_mesh.is_equal(ids):
            raise make_error(
                "sharding",
                f"MpmdSharding: ranks {list(ids)} have unequal meshes; expected "
                f"PartitionSpec(), found {spec}: each device has the whole array",
            )
        try:
            super().__init__(mpmd_mesh.mesh_of_groups(ids), spec, memory_kind=memory_kind)
        except ValueError as error:
            text = shorten(str(error), 300)[1:-1]
            raise make_error("sharding", f"MpmdSharding: {text}") from None
        self.mpmd_mesh = mpmd_mesh
        self.mesh_ids = Ranks(ids)

    @classmethod
    def _of(cls, *state: Any) -> MpmdSharding:
        """A sharding whose spec may name the pipeline axis, for an array split over ranks."""
        sharding = cls.__new__(cls)
        sharding._set(*state)
        return sharding

    def __reduce__(self) -> Any:
        return MpmdSharding._of, (self.mpmd_mesh, self.mesh_ids, self.spec, self.memory_kind)

    @property
    def spec_in_rank(self) -> PartitionSpec:
        """The spec within one rank, without the pipeline axis."""
        return self.mpmd_mesh.without_pipeline_axis(self.spec)

    @property
    def sharding(self) -> NamedSharding:
        """This sharding as a plain `NamedSharding`."""
        return NamedSharding(self.mesh, self.spec, memory_kind=self.memory_kind)

    def rank_sharding(self, rank: int) -> NamedSharding:
        """The sharding of one rank's copy."""
        mesh = self.mpmd_mesh.unstack[rank]
        return NamedSharding(mesh, self.spec, memory_kind=self.memory_kind)


def parted_sharding(
    mesh: MpmdMesh,
    ranks: tuple[int, ...],
    spec: PartitionSpec,
    axis: int,
    size: int,
    memory_kind: str | None = None,
) -> MpmdSharding:
    """The closest JAX sharding of an array that is split over ranks along an axis of this
    size: the axis divided over the ranks in order (a rank with several stages actually
    holds the parts of its stages), or a copy on each rank if it does not divide evenly. If
    the ranks have unequal meshes, no JAX sharding is close: a whole copy on each device.
    """
    if not mesh.is_equal(ranks):
        return MpmdSharding(mesh, ranks, PartitionSpec(), memory_kind)
    if size % mesh.mesh_of_groups(ranks).shape[mesh.mpmd_axis_name]:
        return MpmdSharding(mesh, ranks, spec, memory_kind)
    parts = [*spec, *[None] * (axis + 1 - len(spec))]
    parts[axis] = mesh.mpmd_axis_name
    return MpmdSharding._of(mesh, ranks, PartitionSpec(*parts), memory_kind)
