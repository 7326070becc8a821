"""`jax.new_ref` inside a stage gives the same numbers as in plain JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import mesh_of
from mistakes import batch, params

Layer = Callable[[jax.Array, jax.Array], jax.Array]


def plain(w: jax.Array, x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.tanh(x @ w))
    ref[...] += 1.0
    ref[0] *= 2.0
    return ref[...]


def in_jit(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.jit(plain)(w, x)


def in_checkpoint(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.checkpoint(plain)(w, x)


def under_fori_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ w)
    ref = jax.new_ref(jnp.zeros_like(x))

    def write(i: jax.Array, done: jax.Array) -> jax.Array:
        ref[i] = x[i] * 2
        return done

    jax.lax.fori_loop(0, len(x), write, 0)
    return ref[...]


def under_cond(w: jax.Array, x: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.tanh(x @ w))

    def write(factor: float) -> None:
        ref[...] *= factor

    jax.lax.cond(x.sum() > 30, lambda: write(2.0), lambda: write(3.0))
    return ref[...]


def frozen(w: jax.Array, x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[...] = jnp.tanh(x @ w)
    return jax.freeze(ref)


def step_with(layer: Layer) -> Callable[..., Any]:
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        norms = jax.new_ref(jnp.zeros(()))  # one stage writes it, the other reads it
        for w in ws:
            x = layer(w, x)
            norms[...] += (x**2).sum()
            x = jaxpp.mark_stage_end(x)
        return jnp.mean(x**2) + 0.01 * norms[...]

    def step(ws: list[jax.Array], xs: jax.Array) -> Any:
        losses, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x), xs, jaxpp.Std1F1B(2)
        )
        refs = [jax.new_ref(w) for w in ws]
        for ref, grad in zip(refs, grads, strict=True):
            ref[...] -= 0.1 * grad
        return losses, [ref[...] for ref in refs]

    return step


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "layer", [plain, in_jit, in_checkpoint, under_fori_loop, under_cond, frozen]
)
def test_refs_inside_a_stage(layer: Layer) -> None:
    step = step_with(layer)
    ours = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}))(params(), batch())
    expected = jax.jit(step)(params(), batch())
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5)
