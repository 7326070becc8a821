"""Ranks send each other activations and scalars, but no weights, and nothing twice. They keep
no second copy of a weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import SUMS, assert_close, assert_equal, loop_tasks, mesh_of

WIDTH, MICROBATCHES, ROWS = 48, 4, 8
STAGES = 3
ACTIVATION = 4 * ROWS * WIDTH  # bytes; a weight has six times as many


@jax.custom_vjp
def product(x: Any, w: Any) -> Any:
    """A product whose backward is written by hand, as for a kernel."""
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, d: (d @ r[1].T, r[0].T @ d))


@jax.custom_vjp
def rounded(x: Any, w: Any) -> Any:
    """A product that rounds its operands, as with eight bits, in the backward once more."""
    return x @ w


def rounded_backward(residuals: Any, d: Any) -> Any:
    x, w = (jnp.round(r * 64) / 64 for r in residuals)
    return d @ w.T, x.T @ d


rounded.defvjp(lambda x, w: (x @ w, (x, w)), rounded_backward)


def plain_loss(params: Any, x: Any, layer: Any) -> Any:
    for w in params:
        x = jaxpp.mark_stage_end(layer(w, x))
    return jnp.mean((x - 0.1) ** 2)


def penalty(w: Any, x: Any) -> Any:
    """How much the length of a layer's gradient differs from 1."""
    gradient = jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x)
    return jnp.mean((jnp.sqrt(jnp.sum(gradient**2, -1) + 1e-3) - 1) ** 2)


def penalised_loss(params: Any, x: Any, layer: Any) -> Any:
    total = 0.0
    for w in params:
        total += penalty(w, x)
        x = jaxpp.mark_stage_end(layer(w, x))
    return jnp.mean((x - 0.1) ** 2) + total


LAYERS: dict[str, Callable[[Any, Any], Any]] = {
    "autodiff": lambda w, x: jnp.tanh(x @ w),
    "by hand": lambda w, x: jnp.tanh(product(x, w)),
    "rounded by hand": lambda w, x: jnp.tanh(rounded(x, w)),
    "transposed": lambda w, x: jnp.tanh(x @ w.T),
    "transposed in checkpoint": jax.checkpoint(lambda w, x: jnp.tanh(x @ w.T)),
}
LOSSES = {"plain": plain_loss, "with penalties": penalised_loss}


def distance(params: Any, start: Any) -> Any:
    return jnp.sqrt(sum(jnp.sum((s - w) ** 2) for w, s in zip(params, start, strict=True)))


def check(loss: Any, layer: Any, with_distance: bool = False) -> list[int]:
    """Trains as plain JAX does. Each rank holds only its own weights, and neighbours send an
    activation per microbatch, and scalars. Returns the peak bytes of each rank."""

    def step(params: Any, start: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(params, x, layer),
            xs,
            jaxpp.Std1F1B(STAGES),
            operation=jaxpp.Add,
        )
        rate = 0.1 / (1 + distance(params, start)) if with_distance else 0.1
        return [w - rate * g for w, g in zip(params, grads, strict=True)], start, total

    keys = jax.random.split(jax.random.key(0), STAGES + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 7 for k in keys[1:]]
    start = [1.1 * w for w in params]
    xs = jax.random.normal(keys[0], (MICROBATCHES, ROWS, WIDTH))
    ours = jaxpp.mpmd_jit_with_loop(step, mesh_of(STAGES, {}))
    results = ours(params, start, xs)
    assert_equal(results, jax.jit(step)(params, start, xs), 1e-4)
    for stage in range(STAGES):
        assert results[0][stage].mpmd_idxs == (stage,)
        if with_distance:
            assert results[1][stage].mpmd_idxs == (stage,)
    compiled = ours.compile(params, start, xs)
    for link in compiled.cost_summary().links:
        arrays = MICROBATCHES if abs(link.src - link.dst) == 1 else 0
        assert link.bytes < arrays * ACTIVATION + 500, compiled.explain()
    return [rank.peak_bytes for rank in compiled.cost_summary().ranks]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("loss", LOSSES)
def test_weights_and_inputs(loss: str, layer: str) -> None:
    check(LOSSES[loss], LAYERS[layer])


@pytest.mark.parametrize("layer", ["by hand", "transposed", "transposed in checkpoint"])
def test_transposed_weights_are_not_kept(layer: str) -> None:
    peaks = zip(
        check(plain_loss, LAYERS[layer]), check(plain_loss, LAYERS["autodiff"]), strict=True
    )
    assert all(found <= least + 100 for found, least in peaks)


def test_the_distance_from_weights_that_no_stage_uses() -> None:
    check(plain_loss, LAYERS["autodiff"], with_distance=True)


CHECKS: dict[str, Callable[[list[Any]], Any]] = {
    "finite": lambda grads: jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in grads])),
    "largest": lambda grads: jnp.max(jnp.stack([jnp.max(jnp.abs(g)) for g in grads])) < 9,
    "norms and signs": lambda grads: (
        (jnp.linalg.norm(jnp.array([jnp.linalg.norm(g) for g in grads])) < 9)
        & jnp.any(jnp.array([jnp.any(g > 0) for g in grads]))
    ),
}


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_a_number_for_each_weight_is_sent_in_one_message(name: str, axes: Any) -> None:
    def loss(params: Any, x: Any) -> Any:
        for stage in range(STAGES):
            for w in params[5 * stage : 5 * stage + 5]:
                x = jnp.tanh(x @ w)
            x = jaxpp.mark_stage_end(x)
        return jnp.mean((x - 0.1) ** 2)

    def step(params: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(params, x),
            xs,
            jaxpp.Std1F1B(STAGES),
            operation=jaxpp.Add,
        )
        rate = jnp.where(CHECKS[name](grads), 0.1, 0.0)
        return [w - rate * g for w, g in zip(params, grads, strict=True)], total

    keys = jax.random.split(jax.random.key(0), 5 * STAGES + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 7 for k in keys[1:]]
    xs = jax.random.normal(keys[0], (MICROBATCHES, ROWS, WIDTH))
    ours = jaxpp.mpmd_jit_with_loop(step, mesh_of(STAGES, axes))
    assert_equal(ours(params, xs), jax.jit(step)(params, xs), 1e-4)
    dtypes = 2 if name == "norms and signs" else 1
    for link in ours.compile(params, xs).cost_summary().links:
        arrays = MICROBATCHES if abs(link.src - link.dst) == 1 else 0
        assert link.messages == arrays + dtypes


def cast(params: Any) -> Any:
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)


def of_cast(loss: Any) -> Any:
    return lambda params, x, scale: loss(cast(params), x)


def scaled(loss: Any) -> Any:
    def gradient(params: Any, x: Any, scale: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: scale * loss(cast(p), x))(params)
        return value / scale, jax.tree.map(lambda g: g / scale, grads)

    return gradient


# Gradients of one microbatch: functions of the parameters, its input and a number.
TIED: dict[str, Callable[[Any], Any]] = {
    "of the weights": lambda loss: jax.value_and_grad(lambda p, x, scale: loss(p, x)),
    "of a cast": lambda loss: jax.value_and_grad(of_cast(loss)),
    "cast": lambda loss: (
        lambda p, x, scale: jax.tree.map(
            lambda g: g.astype(jnp.float32), jax.value_and_grad(loss)(cast(p), x)
        )
    ),
    "of a scaled loss": scaled,
    "mean": lambda loss: (
        lambda p, x, scale: jax.tree.map(
            lambda g: -scale * -g.T / MICROBATCHES, jax.value_and_grad(loss)(p, x)
        )
    ),
}


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("name", TIED)
def test_gradients_of_tied_weights_are_sent_once_a_step(name: str, axes: Any) -> None:
    def loss(params: Any, x: Any) -> Any:
        x = x.astype(params["tied"].dtype) @ params["tied"]
        for w in params["layers"]:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return jnp.mean((x @ params["tied"].T - 0.1).astype(jnp.float32) ** 2)

    def step(params: Any, xs: Any, scale: Any) -> Any:
        return jaxpp.treduce(
            lambda x: TIED[name](loss)(params, x, scale),
            xs,
            jaxpp.Std1F1B(STAGES),
            operation=jaxpp.Add,
        )

    keys = jax.random.split(jax.random.key(0), STAGES + 2)
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) / 7 for k in keys[1:]]
    params = {"tied": weights[0], "layers": weights[1:]}
    xs = jax.random.normal(keys[0], (MICROBATCHES, ROWS, WIDTH))
    specs = (P(), P(None, "data") if axes else P(), P())
    ours = jaxpp.mpmd_jit_with_loop(step, mesh_of(STAGES, axes), in_specs=specs)
    tolerance = 1e-5 if name in ("of the weights", "mean") else 2e-2
    found, expected = ours(params, xs, 8.0), jax.jit(step)(params, xs, 8.0)
    assert_close(found, expected, tolerance, "loss and gradients")
    cost = ours.compile(params, xs, 8.0).cost_summary()
    for link in cost.links:
        arrays = MICROBATCHES if abs(link.src - link.dst) == 1 else 0
        ends = {link.src, link.dst} == {0, STAGES - 1}
        assert link.bytes < arrays * ACTIVATION + ends * weights[0].nbytes + 500
    assert loop_tasks(cost.collectives, "data", *SUMS) == []
