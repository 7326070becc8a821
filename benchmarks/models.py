"""The models of the benchmarks: a step as a pipeline, and the same step as plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp


@dataclasses.dataclass(frozen=True)
class Model:
    width: int
    sequence: int
    microbatches: int
    layers: int = 8
    stages: int = 4
    data: int = 1  # devices of a rank, each with a part of every microbatch

    @property
    def name(self) -> str:
        devices = f" of {self.data} devices" if self.data > 1 else ""
        return (
            f"{self.layers} layers, d={self.width}, seq {self.sequence}, {self.stages} "
            f"stages{devices}, {self.microbatches} microbatches"
        )

    def mesh(self) -> jaxpp.MpmdMesh:
        """`data` devices per stage, if there are that many."""
        devices = np.array(jax.devices()[: self.stages * self.data])
        axes = ("stage",)
        if self.data > 1:
            devices, axes = devices.reshape(-1, self.data), ("stage", "data")
        return jaxpp.MpmdMesh(
            jax.sharding.Mesh(devices, axes),
            "stage",
            ranks_per_device=self.stages // len(devices),
        )

    def specs(self) -> tuple[P, P, P]:
        """The specs of the state, the inputs and the targets."""
        batch = P(None, "data") if self.data > 1 else P()
        return P(), batch, batch

    def batch(self) -> tuple[jax.Array, ...]:
        """Inputs and targets, f32[microbatches, 2, sequence, width] each."""
        shape = (self.microbatches, 2, self.sequence, self.width)
        return tuple(jax.random.normal(jax.random.key(k), shape) for k in (1, 2))

    def params(self) -> Any:
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
            in_specs=self.specs(),
            donate_argnums=0,
            **options,
        )

    def plain(self) -> Callable[..., Any]:
        """The same under `jax.jit` on `data` devices, with a `lax.scan` over the
        microbatches."""
        options: dict[str, Any] = {}
        if self.data > 1:
            mesh = jax.sharding.Mesh(np.array(jax.devices()[: self.data]), ("data",))
            shardings = (jax.sharding.NamedSharding(mesh, spec) for spec in self.specs())
            options = {"in_shardings": tuple(shardings)}
        return jax.jit(partial(_plain, self), donate_argnums=0, **options)

    def is_stage_end(self, layer: int) -> bool:
        return (layer + 1) % (self.layers // self.stages) == 0

    def weights(self, state: Any) -> Any:
        """The part of the state with respect to which the loss is differentiated."""
        return state

    def loss(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
            if self.is_stage_end(i):
                x = jaxpp.mark_stage_end(x)
        return jnp.mean((x - y) ** 2)

    def update(self, state: Any, grads: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 1e-3 * g, state, grads)


@dataclasses.dataclass(frozen=True)
class Decoder(Model):
    """A decoder of a language model: every layer is rematerialised, and AdamW updates it."""

    layers: int = 12
    heads: int = 4
    vocabulary: int = 512

    def batch(self) -> tuple[jax.Array, ...]:
        """Tokens and their successors, s32[microbatches, 2, sequence] each."""
        shape = (self.microbatches, 2, self.sequence + 1)
        tokens = jax.random.randint(jax.random.key(1), shape, 0, self.vocabulary)
        return tokens[..., :-1], tokens[..., 1:]

    def params(self) -> Any:
        d = self.width
        shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
        keys = iter(jax.random.split(jax.random.key(0), 2 + self.layers * len(shapes)))

        def weight(*shape: int) -> jax.Array:
            return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

        weights = {
            "embedding": weight(self.vocabulary, d),
            "head": weight(d, self.vocabulary),
            "layers": [
                {"norm1": jnp.ones(d), "norm2": jnp.ones(d)}
                | {name: weight(*shape) for name, shape in shapes.items()}
                for _ in range(self.layers)
            ],
        }
        return weights, _ADAMW.init(weights)

    def weights(self, state: Any) -> Any:
        return state[0]

    def apply_layer(self, p: Any, x: jax.Array) -> jax.Array:
        batch, length, d = x.shape
        heads = (batch, length, self.heads, d // self.heads)
        qkv = jnp.split(_normalize(x, p["norm1"]) @ p["qkv"], 3, -1)
        q, k, v = (y.reshape(heads) for y in qkv)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(_normalize(x, p["norm2"]) @ p["up"]) @ p["down"]

    def loss(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        h = params["embedding"][x]
        for i, p in enumerate(params["layers"]):
            h = jax.checkpoint(self.apply_layer)(p, h)
            if self.is_stage_end(i) and i + 1 < self.layers:
                h = jaxpp.mark_stage_end(h)
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], y)
        return jaxpp.mark_stage_end(losses.mean())

    def update(self, state: Any, grads: Any) -> Any:
        updates, optimizer_state = _ADAMW.update(grads, state[1], state[0])
        return optax.apply_updates(state[0], updates), optimizer_state


_ADAMW = optax.adamw(1e-3)


def _normalize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def train(model: Model, schedule: Any, state: Any, xs: jax.Array, ys: jax.Array) -> Any:
    """(state, loss) after a step with the schedule."""
    loss, grads = jaxpp.treduce(
        lambda xy: jax.value_and_grad(model.loss)(model.weights(state), *xy),
        (xs, ys),
        schedule=schedule,
        operation=jaxpp.Add,
    )
    return model.update(state, grads), loss


def _plain(model: Model, state: Any, xs: jax.Array, ys: jax.Array) -> Any:
    weights = model.weights(state)

    def one(carry: Any, xy: Any) -> Any:
        found = jax.value_and_grad(model.loss)(weights, *xy)
        return jax.tree.map(jnp.add, carry, found), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, weights))
    (loss, grads), _ = jax.lax.scan(one, zeros, (xs, ys))
    return model.update(state, grads), loss
