"""Builds `MpmdArray`s of given contents with every kind of placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import mesh_of
from jaxpp.api import MpmdArray


def _ranks(ids: tuple[int, ...], axes: dict[str, int], spec: P) -> Callable[[Any], MpmdArray]:
    def place(x: Any) -> MpmdArray:
        mesh = mesh_of(2, axes)
        return jaxpp.spmd_to_mpmd_reshard(mesh, x, jaxpp.MpmdSharding(mesh, ids, spec))

    return place


def by_hand(x: Any) -> MpmdArray:
    mesh = mesh_of(2, {"data": 2})
    sharding = jaxpp.MpmdSharding(mesh, (0, 1), P())
    return MpmdArray([jax.device_put(x, sharding.rank_sharding(r)) for r in (0, 1)], sharding)


# Functions from contents to an MpmdArray, by placement.
WHOLE: dict[str, Callable[[Any], MpmdArray]] = {
    "one rank": _ranks((1,), {}, P()),
    "replicated": _ranks((0, 1), {}, P()),
    "sharded": _ranks((1,), {"data": 2}, P("data")),
    "replicated and sharded": _ranks((0, 1), {"data": 2}, P("data")),
    "by hand": by_hand,
}


def by_parts(x: Any, along: int = 0, **axes: int) -> MpmdArray:
    """An array in four parts along an axis, like the stacked weights of stages, with the first
    and third part on rank 0. If ranks have several devices, the other axis is sharded.

    The step that makes the array leaves its contents unchanged.
    """
    size = x.shape[along] // 4

    def loss(stacked: Any, scale: Any) -> Any:
        y = scale
        for stage in range(4):
            part = jax.lax.slice_in_dim(stacked, stage * size, (stage + 1) * size, axis=along)
            y = jaxpp.mark_stage_end(jnp.tanh(y + jnp.sum(part)) ** 2)
        return y

    def step(stacked: Any, scales: Any) -> Any:
        grads = jaxpp.treduce(
            lambda scale: jax.grad(loss)(stacked, scale),
            scales,
            jaxpp.Interleaved1F1B(4, 2),
            operation=jaxpp.Add,
        )
        return stacked - 0 * grads

    spec = P(*[None] * (1 - along), *axes) if axes else P()
    placed = jaxpp.mpmd_jit_with_loop(
        step, mesh_of(2, axes), in_specs=(spec, P()), out_specs=spec
    )
    array = placed(x, jnp.ones(4))
    assert len(array._placement.parts) == 4
    return array
