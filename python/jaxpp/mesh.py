"""Meshes with a pipeline axis."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals import context_mesh

__all__ = ["MpmdMesh", "MpmdSharding"]


def _enter(mesh: Mesh) -> None:
    """`with mesh:`, which names axes and moves nothing. What JAX has for it instead,
    `jax.set_mesh`, puts every new array on all devices and refuses those of one rank.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()


@dataclasses.dataclass(frozen=True)
class MpmdMesh:
    """A `jax.sharding.Mesh` one axis of which counts pipeline ranks.

    Each index along `mpmd_axis_name` is one rank (actor) with its own group of devices; the
    other axes shard values inside a rank.
    """

    jax_mesh: Mesh
    mpmd_axis_name: str
    # The processes that have the devices, of a mesh that stands for theirs.
    workers: ClassVar[Any] = None

    def __post_init__(self) -> None:
        if not isinstance(self.jax_mesh, Mesh):
            raise make_error(
                "mesh",
                f"MpmdMesh: jax_mesh={shorten(self.jax_mesh)}; expected a jax.sharding.Mesh",
            )
        if self.mpmd_axis_name not in self.jax_mesh.axis_names:
            raise make_error(
                "mesh",
                f"MpmdMesh: mpmd_axis_name={self.mpmd_axis_name!r} is no axis of the mesh; "
                f"expected one of {self.jax_mesh.axis_names}",
            )

    @property
    def _axis(self) -> int:
        return self.jax_mesh.axis_names.index(self.mpmd_axis_name)

    @property
    def mpmd_dim(self) -> int:
        """The number of pipeline ranks."""
        return self.jax_mesh.devices.shape[self._axis]

    @functools.cached_property
    def unstack(self) -> list[Mesh]:
        """One mesh a rank, with the pipeline axis kept at size 1."""
        return [self.mpmd_submesh((rank,)) for rank in range(self.mpmd_dim)]

    def mpmd_submesh(self, idxs: Iterable[int]) -> Mesh:
        """The mesh of some ranks, in the given order."""
        idxs = list(idxs)
        if not idxs or not all(0 <= i < self.mpmd_dim for i in idxs):
            raise make_error(
                "mesh",
                f"mpmd_submesh: idxs={shorten(idxs)}; expected ranks from 0 to "
                f"{self.mpmd_dim - 1}",
            )
        devices = np.take(self.jax_mesh.devices, idxs, axis=self._axis)
        return Mesh(devices, self.jax_mesh.axis_names, axis_types=self.jax_mesh.axis_types)

    def lowering_mesh(self) -> Mesh:
        """The mesh that tasks are lowered for: a rank's, the same for all of them."""
        return self.unstack[0]

    def without_pipeline_axis(self, spec: PartitionSpec) -> PartitionSpec:
        """The part of a spec over the whole mesh that shards inside a rank."""
        parts = []
        for part in spec:
            axes = part if isinstance(part, tuple) else (part,)
            kept = tuple(a for a in axes if a is not None and a != self.mpmd_axis_name)
            parts.append(kept[0] if len(kept) == 1 else kept or None)
        while parts and parts[-1] is None:
            parts.pop()
        return PartitionSpec(*parts)

    @contextlib.contextmanager
    def tracing_context(self) -> Iterator[None]:
        """A step's specs mean the axes of a rank's mesh, whatever mesh is around it."""
        mesh = self.lowering_mesh()
        with context_mesh(mesh, self.jax_mesh):
            _enter(mesh)
            try:
                yield
            finally:
                mesh.__exit__(None, None, None)

    @property
    def my_mpmd_axis_index(self) -> int:
        """The first rank whose devices this process can address."""
        for rank, mesh in enumerate(self.unstack):
            if mesh.local_devices:
                return rank
        raise make_error("mesh", "no rank of the mesh has a device of this process")

    def devices_of(self, rank: int) -> list[jax.Device]:
        """A rank's devices, in the order of its mesh."""
        return list(self.unstack[rank].devices.flat)

    def __enter__(self) -> MpmdMesh:
        _enter(self.jax_mesh)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.jax_mesh.__exit__(kind, error, trace)


@dataclasses.dataclass(frozen=True)
class MpmdSharding:
    """Where an `MpmdArray` lives: a copy on each of some ranks, sharded by `spec` there."""

    mpmd_mesh: MpmdMesh
    mesh_ids: tuple[int, ...]
    spec: PartitionSpec

    @functools.cached_property
    def sharding(self) -> NamedSharding:
        """The same as one sharding over all ranks that hold the array."""
        return NamedSharding(self.mpmd_mesh.mpmd_submesh(self.mesh_ids), self.spec)

    def rank_sharding(self, rank: int) -> NamedSharding:
        """The sharding of the copy on one rank."""
        return NamedSharding(self.mpmd_mesh.unstack[rank], self.spec)
