"""The models of the benchmarks: a step as a pipeline, and the same step as plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp.api as jaxpp


@dataclasses.dataclass(frozen=True)
class Model:
    width: int
    sequence: int
    microbatches: int
    layers: int = 8
    stages: int = 4

    @property
    def name(self) -> str:
        return (
            f"{self.layers} layers, d={self.width}, seq {self.sequence}, {self.stages} stages, "
            f"{self.microbatches} microbatches"
        )

    def mesh(self) -> jaxpp.MpmdMesh:
        """A device a stage, as far as there are so many."""
        devices = np.array(jax.devices()[: self.stages])
        return jaxpp.MpmdMesh(
            jax.sharding.Mesh(devices, ("stage",)),
            "stage",
            ranks_per_device=self.stages // len(devices),
        )

    def batch(self) -> tuple[jax.Array, ...]:
        """Inputs and targets, f32[microbatches, 2, sequence, width] each."""
        shape = (self.microbatches, 2, self.sequence, self.width)
        return tuple(jax.random.normal(jax.random.key(k), shape) for k in (1, 2))

    def params(self) -> list[dict[str, Any]]:
        d = self.width
        keys = jax.random.split(jax.random.key(0), self.layers * 2)
        return [
            {
                "up": jax.random.normal(keys[2 * i], (d, 4 * d)) / d**0.5,
                "down": jax.random.normal(keys[2 * i + 1], (4 * d, d)) / (4 * d) ** 0.5,
            }
            for i in range(self.layers)
        ]

    def pipeline(self, mesh: jaxpp.MpmdMesh | None = None, **options: Any) -> Any:
        """(params, inputs, targets) -> (params, loss) on the mesh; donates the params."""
        return jaxpp.mpmd_jit_with_loop(
            partial(train, self, jaxpp.Std1F1B(self.stages)),
            mpmd_mesh=mesh or self.mesh(),
            donate_argnums=0,
            **options,
        )

    def plain(self) -> Callable[..., Any]:
        """The same under `jax.jit`, a `lax.scan` over the microbatches."""
        return jax.jit(partial(_plain, self), donate_argnums=0)


def _loss(model: Model, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for i, p in enumerate(params):
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        if (i + 1) % (model.layers // model.stages) == 0:
            x = jaxpp.mark_stage_end(x)
    return jnp.mean((x - y) ** 2)


def _update(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)


def train(model: Model, schedule: Any, params: Any, xs: jax.Array, ys: jax.Array) -> Any:
    """(params, loss) after a step under the schedule."""
    loss, grads = jaxpp.treduce(
        lambda xy: jax.value_and_grad(partial(_loss, model))(params, *xy),
        (xs, ys),
        schedule=schedule,
        operation=jaxpp.Add,
    )
    return _update(params, grads), loss


def _plain(model: Model, params: Any, xs: jax.Array, ys: jax.Array) -> Any:
    def one(carry: Any, xy: Any) -> Any:
        found = jax.value_and_grad(partial(_loss, model))(params, *xy)
        return jax.tree.map(jnp.add, carry, found), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(one, zeros, (xs, ys))
    return _update(params, grads), loss
