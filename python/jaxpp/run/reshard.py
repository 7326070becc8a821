"""Moves arrays between an SPMD mesh and pipeline ranks, for checkpoints and start-up."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.array import MpmdArray
from jaxpp.client.devices import devices_for
from jaxpp.errors import check_prefix, make_error, shorten
from jaxpp.jax_internals.arrays import key_implementation, wrap_keys
from jaxpp.mesh import MpmdMesh, MpmdSharding, memory_of
from jaxpp.placements import Part, Placement, physical_array, physical_type
from jaxpp.run.arguments import Argument, source_of

__all__ = ["mpmd_to_spmd_reshard", "spmd_to_mpmd_reshard"]


@dataclasses.dataclass(frozen=True)
class DistributedSharding:
    """The name by which scripts refer to an `MpmdSharding` whose mesh
    `spmd_to_mpmd_reshard` knows."""

    mesh_ids: Iterable[int]
    sharding: NamedSharding


def _shardings(given: Any, arrays: Any, kind: type, name: str) -> list[Any]:
    """One sharding per leaf of `arrays`."""
    found = check_prefix(f"{name}: shardings", given, arrays, "the arrays")
    for sharding in found:
        if not isinstance(sharding, kind):
            raise make_error(
                "sharding",
                f"{name}: expected {kind.__name__} objects in shardings, found "
                f"{shorten(sharding)}",
                wrong_type=True,
            )
    return found


def _with_own_rows(array: Any, mesh: MpmdMesh, spec: PartitionSpec) -> Any:
    """The array with the elements that this process's ranks need, sharded as they need
    it: JAX copies elements of other processes to every rank."""
    sharding = getattr(array, "sharding", None)
    if (
        not isinstance(array, jax.Array)
        or array.is_fully_addressable
        or not isinstance(sharding, NamedSharding)
        or set(sharding.mesh.devices.flat) != set(mesh.jax_mesh.devices.flat)
    ):
        return array
    copies = NamedSharding(sharding.mesh, spec)
    return array if sharding == copies else jax.jit(lambda x: x, out_shardings=copies)(array)


def _without_types(mesh: Mesh) -> Mesh:
    """The mesh with automatic axes, on which an array can be sliced whatever its
    sharding."""
    return Mesh(mesh.devices, mesh.axis_names)


def _beside_zeros(part: MpmdArray, rank: int, mesh: MpmdMesh) -> jax.Array:
    """On the mesh of all ranks, the array [ranks, ...] that has a part's elements in the row of
    its rank and zeros in the others."""
    whole, spec = _without_types(mesh.jax_mesh), part.sharding.spec_in_rank
    stacked = NamedSharding(whole, PartitionSpec(mesh.mpmd_axis_name, *spec.partitions))
    dtype, of_one = physical_type(part.aval)
    shape = (mesh.mpmd_dim, *of_one)
    own = physical_array(part._partially_addressable_arrays.get(rank))
    shards = {s.device: s.data for s in own.addressable_shards} if own is not None else {}
    block = (1, *stacked.shard_shape(shape)[1:])

    def on(device: jax.Device) -> jax.Array:
        data = shards.get(device)
        empty = np.zeros(block, jnp.dtype(dtype))
        return jax.device_put(empty if data is None else data.reshape(block), device)

    blocks = [on(d) for d in whole.devices.flat if d.process_index == jax.process_index()]
    return jax.make_array_from_single_device_arrays(shape, stacked, blocks)


def _on_one_mesh(array: Any, mesh: MpmdMesh, sharding: NamedSharding) -> jax.Array:
    """An array of ranks in several processes, on the mesh of all these ranks: JAX copies
    it to all of them."""
    if not isinstance(array, MpmdArray):
        return jax.device_put(array, sharding)
    parts = [(part.sharding.mesh_ids[0], part) for _, part in array._parts()]
    axis = array._placement.axis

    def joined(*of_all: jax.Array) -> jax.Array:
        rows = [x[rank] for (rank, _), x in zip(parts, of_all, strict=True)]
        return jnp.concatenate(rows, axis) if len(rows) > 1 else rows[0]

    there = NamedSharding(_without_types(sharding.mesh), sharding.spec)
    of_all = [_beside_zeros(part, rank, mesh) for rank, part in parts]
    moved = jax.jit(joined, out_shardings=there)(*of_all)
    own_shards = [shard.data for shard in moved.addressable_shards]
    found = jax.make_array_from_single_device_arrays(moved.shape, sharding, own_shards)
    if not key_implementation(array.dtype):
        return found
    return jax.jit(lambda data: wrap_keys(data, array.dtype), out_shardings=sharding)(found)


def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh,
    arrays: Any,
    shardings: Any,
    threshold: int | None = None,
    *,
    donate: bool = False,
) -> Any:
    """Moves arrays from one SPMD mesh, or from the host, to pipeline ranks.

    If the mesh spans processes, all of them must call this with the same arrays in the
    same order, and each array temporarily exists on all ranks.

    Args:
      mpmd_mesh: the destination.
      arrays: a pytree of jax or numpy arrays.
      shardings: a pytree prefix of `MpmdSharding`s.
      threshold: accepted for compatibility and ignored: the limit in bytes of a group of
        transfers; here each array is transferred separately.
      donate: delete each JAX array as soon as it has been transferred, so that the arrays do
        not all use memory twice.

    Returns:
      The same tree of `MpmdArray`s.

    Raises:
      JaxppError: a sharding is not an `MpmdSharding`, or they are no prefix of the arrays'
        tree ("sharding"); a sharding is on another mesh ("mesh").
    """
    del threshold
    if not isinstance(mpmd_mesh, MpmdMesh):
        raise make_error(
            "mesh",
            f"spmd_to_mpmd_reshard: mpmd_mesh={shorten(mpmd_mesh)}; expected an MpmdMesh",
            wrong_type=True,
        )
    devices = devices_for(mpmd_mesh, None)

    def put(array: Any, sharding: MpmdSharding) -> MpmdArray:
        aval = jax.typeof(array)
        memory = memory_of(sharding, "reshard")
        part = Part(devices, mpmd_mesh, aval, sharding.mesh_ids, sharding.spec, memory)
        argument = Argument(part, "spmd_to_mpmd_reshard", donated=False)
        gathered = _with_own_rows(array, mpmd_mesh, sharding.spec_in_rank)
        value = argument.take(source_of(gathered, devices, mpmd_mesh), copies=True)
        if donate and isinstance(array, jax.Array):
            value.wait()
            array.delete()
        return MpmdArray._of(Placement([part], aval), [value])

    def named(given: Any) -> Any:
        if not isinstance(given, DistributedSharding):
            return given
        return MpmdSharding(mpmd_mesh, set(given.mesh_ids), given.sharding.spec)

    leaves, tree = jax.tree.flatten(arrays)
    shardings = jax.tree.map(named, shardings)
    found = _shardings(shardings, arrays, MpmdSharding, "spmd_to_mpmd_reshard")
    for sharding in found:
        if sharding.mpmd_mesh != mpmd_mesh:
            raise make_error(
                "mesh",
                f"spmd_to_mpmd_reshard: expected shardings on mpmd_mesh, {shorten(mpmd_mesh)}, "
                f"found one on {shorten(sharding.mpmd_mesh)}",
            )
    placed = list(map(put, leaves, found))
    devices.flush()
    return tree.unflatten(placed)


def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh, arrays: Any, shardings: Any, threshold: int | None = None
) -> Any:
    """Moves arrays from pipeline ranks to one SPMD mesh.

    If the mesh spans processes, as for `spmd_to_mpmd_reshard`; the two meshes must then
    have the same devices.

    Args:
      mpmd_mesh: the source.
      arrays: a pytree of `MpmdArray`s.
      shardings: a pytree prefix of `NamedSharding`s.
      threshold: as in `spmd_to_mpmd_reshard`.

    Returns:
      The same tree of `jax.Array`s.

    Raises:
      JaxppError: a sharding is not a `NamedSharding` ("sharding").
    """
    del threshold
    leaves, tree = jax.tree.flatten(arrays)
    found = _shardings(shardings, arrays, NamedSharding, "mpmd_to_spmd_reshard")
    if mpmd_mesh.jax_mesh.is_multi_process:
        pairs = zip(leaves, found, strict=True)
        return tree.unflatten([_on_one_mesh(leaf, mpmd_mesh, s) for leaf, s in pairs])
    return tree.unflatten(jax.device_put(leaves, found))
