"""Moves arrays between an SPMD mesh and pipeline ranks, for checkpoints and start-up."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp.array import MpmdArray
from jaxpp.client.devices import devices_for
from jaxpp.errors import make_error
from jaxpp.jax_internals.arrays import broadcast_prefix
from jaxpp.mesh import MpmdMesh, MpmdSharding, memory_of
from jaxpp.placements import Part, Placement
from jaxpp.run.arguments import Argument, source_of

__all__ = ["mpmd_to_spmd_reshard", "spmd_to_mpmd_reshard"]


def _is_sharding(x: Any) -> bool:
    return isinstance(x, MpmdSharding | NamedSharding | PartitionSpec)


def _shardings(given: Any, arrays: Any, kind: type, name: str) -> list[Any]:
    """One sharding per leaf of `arrays`."""
    found = broadcast_prefix(given, arrays, is_leaf=_is_sharding)
    for sharding in found:
        if not isinstance(sharding, kind):
            raise make_error(
                "sharding",
                f"{name}: expected {kind.__name__} objects in shardings, found {sharding!r}",
                wrong_type=True,
            )
    return found


def spmd_to_mpmd_reshard(
    mpmd_mesh: MpmdMesh,
    arrays: Any,
    shardings: Any,
    threshold: int | None = None,
    *,
    donate: bool = False,
) -> Any:
    """Moves arrays from one SPMD mesh, or from the host, to pipeline ranks.

    Args:
      mpmd_mesh: the destination. arrays: a pytree of jax or numpy arrays. shardings: a pytree
      prefix of `MpmdSharding`s. threshold: accepted for compatibility and ignored: the limit in
      bytes of a group of
        transfers; here each array is transferred separately.
      donate: delete each jax array as soon as it has moved, so that the arrays do not all use
        memory twice.

    Returns:
      The same tree of `MpmdArray`s.

    Raises:
      JaxppError: a sharding is not an `MpmdSharding` ("sharding").
    """
    del threshold
    devices = devices_for(mpmd_mesh, None)

    def put(array: Any, sharding: MpmdSharding) -> MpmdArray:
        aval = jax.typeof(array)
        memory = memory_of(sharding, "reshard")
        part = Part(devices, mpmd_mesh, aval, sharding.mesh_ids, sharding.spec, memory)
        argument = Argument(part, "spmd_to_mpmd_reshard", donated=False)
        value = argument.take(source_of(array, devices, mpmd_mesh), copies=True)
        if donate and isinstance(array, jax.Array):
            value.wait()
            array.delete()
        return MpmdArray._of(Placement([part], aval), [value])

    leaves, tree = jax.tree.flatten(arrays)
    found = _shardings(shardings, arrays, MpmdSharding, "spmd_to_mpmd_reshard")
    placed = list(map(put, leaves, found))
    devices.flush()
    return tree.unflatten(placed)


def mpmd_to_spmd_reshard(
    mpmd_mesh: MpmdMesh, arrays: Any, shardings: Any, threshold: int | None = None
) -> Any:
    """Moves arrays from pipeline ranks to one SPMD mesh.

    Args:
      mpmd_mesh: the source. arrays: a pytree of `MpmdArray`s. shardings: a pytree prefix of
      `NamedSharding`s. threshold: as in `spmd_to_mpmd_reshard`.

    Returns:
      The same tree of `jax.Array`s.

    Raises:
      JaxppError: a sharding is not a `NamedSharding` ("sharding").
    """
    del mpmd_mesh, threshold
    leaves, tree = jax.tree.flatten(arrays)
    found = _shardings(shardings, arrays, NamedSharding, "mpmd_to_spmd_reshard")
    return tree.unflatten(jax.device_put(leaves, found))
