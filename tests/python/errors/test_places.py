"""What functions that place arrays say about wrong arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes
from equality import mesh_of

Sharding = jaxpp.MpmdSharding


def other(mesh: Any) -> Any:
    return mesh.mpmd_submesh([1, 0])


def reshard(mesh: Any, arrays: Any, shardings: Any) -> Any:
    return jaxpp.spmd_to_mpmd_reshard(mesh, arrays, shardings)


def shapes() -> Any:
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (mistakes.params(), mistakes.batch())
    )


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a mesh of JAX": (lambda m: Sharding(m.jax_mesh, [0], P()), "expected an MpmdMesh"),
    "no spec": (lambda m: Sharding(m, [0], None), "spec=None; expected a PartitionSpec"),
    "a rank": (
        lambda m: Sharding(m, 0, P()),
        "mesh_ids=0; expected ranks from 0 to 1, in a list",
    ),
    "a rank that is missing": (
        lambda m: Sharding(m, [2], P()),
        r"mesh_ids=\[2\]; expected ranks from 0 to 1",
    ),
    "True": (
        lambda m: Sharding(m, [True], P()),
        r"mesh_ids=\[True\]; expected ranks from 0 to 1",
    ),
    "no ranks": (lambda m: Sharding(m, [], P()), r"mesh_ids=\[\]; expected ranks from 0 to 1"),
    "a rank twice": (lambda m: Sharding(m, [0, 0], P()), r"\[0, 0\]; expected each rank once"),
    "an unknown axis": (
        lambda m: Sharding(m, [0], P("rows")),
        "MpmdSharding: .*rows.* is not found",
    ),
    "an unknown memory": (lambda m: Sharding(m, [0], P(), "disk"), "MpmdSharding: .*disk"),
    "a submesh of a rank": (
        lambda m: m.mpmd_submesh(1),
        "idxs=1; expected ranks from 0 to 1, in a list",
    ),
    "a submesh of text": (
        lambda m: m.mpmd_submesh("ab"),
        "idxs='ab'; expected ranks from 0 to 1",
    ),
    "to a mesh of JAX": (
        lambda m: reshard(m.jax_mesh, np.ones(2), Sharding(m, [0], P())),
        "mpmd_mesh=.*; expected an MpmdMesh",
    ),
    "to another mesh": (
        lambda m: reshard(m, np.ones(2), Sharding(other(m), [0], P())),
        "expected shardings on mpmd_mesh",
    ),
    "another tree": (
        lambda m: reshard(m, [np.ones(2)], [Sharding(m, [0], P())] * 2),
        "shardings: expected a pytree prefix of the arrays",
    ),
    "no arrays to sum": (
        lambda m: jaxpp.cross_mpmd_all_reduce(),
        "expected at least one array",
    ),
    "a number to stack": (
        lambda m: jaxpp.cross_mpmd_stack(1),
        "expected at least one array, found 1",
    ),
    "shapes": (
        lambda m: jaxpp.mpmd_jit_with_loop(
            mistakes.training_step(jaxpp.Std1F1B(2)), mpmd_mesh=m
        )(*shapes()),
        r"argument ws\[0\]: expected an array, found ShapeDtypeStruct",
    ),
}


@pytest.mark.own_devices
@pytest.mark.parametrize("name", MISTAKES)
def test_says_what_is_wrong(name: str) -> None:
    run, text = MISTAKES[name]
    mesh = mesh_of(2, {})
    with pytest.raises(jaxpp.JaxppError, match=text):
        run(mesh)
