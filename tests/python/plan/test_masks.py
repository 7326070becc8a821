"""Masks, positions and the floats of quantised weights are made where they are used: between
tasks, they take no memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
from equality import Problem, assert_trains_equal, make_mesh, mesh_of, pipelined_step

LENGTH, WIDTH, HEADS, STAGES, MICROBATCHES = 64, 8, 2, 2, 4


def positions() -> tuple[jax.Array, jax.Array]:
    return jnp.arange(LENGTH)[:, None], jnp.arange(LENGTH)


def no_mask(scores: jax.Array, i: jax.Array) -> jax.Array:
    return scores


def causal(scores: jax.Array, i: jax.Array) -> jax.Array:
    return jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)


def window(scores: jax.Array, i: jax.Array) -> jax.Array:
    query, key = positions()
    near = (abs(query - key) < 8) | (key < 2)
    return scores + jnp.where(jnp.broadcast_to(near, scores.shape), 0.0, -1e9)


def distance(scores: jax.Array, i: jax.Array) -> jax.Array:
    """The bias of ALiBi (arXiv 2108.12409)."""
    query, key = positions()
    slopes = jnp.array([0.5, 0.25])[:, None, None]
    return scores - slopes * abs(query - key).astype(scores.dtype)


def of_the_microbatch(scores: jax.Array, i: jax.Array) -> jax.Array:
    query, key = positions()
    return jnp.where(query - key <= i, scores, -1e9)


def given(scores: jax.Array, i: jax.Array) -> jax.Array:
    """A mask that the step closes over, without its last column."""
    mask = jnp.broadcast_to(GIVEN, scores.shape) & (positions()[1] < LENGTH - 1)
    return scores + jnp.where(mask, 0.0, -1e9)


GIVEN = np.random.default_rng(1).random((LENGTH, LENGTH)) < 0.5
MASKS = [given, causal, window, distance, of_the_microbatch]


def attention(mask: Callable[..., Any], scanned: bool) -> Problem:
    """A layer of attention per stage, or two that are scanned."""

    def layer(p: Any, x: jax.Array, i: jax.Array) -> jax.Array:
        heads = x.reshape(LENGTH, HEADS, WIDTH // HEADS)
        scores = jnp.einsum("qhd,khd->hqk", heads @ p, heads)
        attended = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(mask(scores, i)), heads)
        x = x + attended.reshape(x.shape)
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))

    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        for stage in range(STAGES):
            if scanned:
                x, _ = jax.lax.scan(lambda x, p: (layer(p, x, i), None), x, params[stage])
            else:
                x = jax.checkpoint(layer)(params[stage][0], x, i)
            x = mark(x)
        return jnp.mean(jnp.sin(x)), ()

    rng = np.random.default_rng(0)
    shape = (WIDTH // HEADS, WIDTH // HEADS)
    params = [
        jnp.asarray(rng.normal(size=(1 + scanned, *shape)) / 2, jnp.float32)
        for _ in range(STAGES)
    ]
    batch = jnp.asarray(rng.normal(size=(MICROBATCHES, LENGTH, WIDTH)), jnp.float32)
    return Problem(loss, params, batch, optax.sgd(1.0))


@pytest.mark.sample(4)
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_training_with_masks_equals_plain_jax(mask: Any, scanned: bool) -> None:
    assert_trains_equal(attention(mask, scanned), jaxpp.Std1F1B(STAGES), make_mesh(STAGES))


@pytest.mark.parametrize("mask", [given, causal, window, of_the_microbatch])
def test_a_mask_is_no_value_between_tasks(mask: Any) -> None:
    def peaks_with(mask: Any) -> list[int]:
        problem = attention(mask, scanned=False)
        state = (problem.params, problem.optimizer.init(problem.params))
        step = pipelined_step(problem, jaxpp.Std1F1B(STAGES))
        mesh = mesh_of(STAGES, {}, sharing=1)
        made = jaxpp.mpmd_jit_with_loop(step, mesh, donate_argnums=(0, 1))
        plan = made.trace_and_place(*state, problem.batch).plan
        return [rank.peak_bytes for rank in plan.summary()]

    arguments = 4 * MICROBATCHES + (GIVEN.nbytes if mask is given else 0)
    for found, least in zip(peaks_with(mask), peaks_with(no_mask), strict=True):
        assert found <= least + arguments


# --- Quantised weights ----------------------------------------------------------------

QUANTISED = np.random.default_rng(2).integers(-8, 8, (STAGES, 256, 256), np.int8)


def quantised() -> Problem:
    """A frozen weight of one byte an element per stage, scaled by trained vectors."""

    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        for p, weight in zip(params, map(jnp.asarray, QUANTISED), strict=True):
            floats = weight.astype(jnp.float32) * p["scale"]
            x = mark(jnp.tanh(x @ floats) * p["gain"])
        return jnp.mean(x * x), ()

    rng = np.random.default_rng(3)

    def vector(*shape: int) -> jax.Array:
        return jnp.asarray(rng.uniform(0.01, 0.02, shape), jnp.float32)

    params = [{"scale": vector(256), "gain": vector(256)} for _ in range(STAGES)]
    return Problem(loss, params, vector(MICROBATCHES, 4, 256), optax.sgd(1.0))


@pytest.mark.parametrize("axes", [{}, {"data": 2}])
def test_quantised_weights_are_not_kept_as_floats(axes: dict[str, int]) -> None:
    problem, mesh = quantised(), mesh_of(STAGES, axes, sharing=1)
    made = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(STAGES)), mesh)
    state = (problem.params, problem.optimizer.init(problem.params))
    plan = made.trace_and_place(*state, problem.batch).plan
    for rank in plan.summary():
        assert rank.peak_bytes < QUANTISED[0].nbytes * 2
    assert_trains_equal(problem, jaxpp.Std1F1B(STAGES), mesh)
