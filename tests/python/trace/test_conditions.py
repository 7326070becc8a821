"""Stages that are a condition, or have one: the gradients of its weights can wait for a bubble,
and its backward pass takes the weights themselves."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import (
    SUMS,
    Problem,
    assert_trains_equal,
    loop_tasks,
    mesh_of,
    module_of_each,
    peak_bytes,
    pipelined_step,
    products,
)

WIDTH, ROWS, STAGES = 8, 4, 4


def layer(x: jax.Array, p: Any) -> jax.Array:
    return x + jnp.tanh(x @ p["up"] + p["b"]) @ p["down"]


def sine(x: jax.Array, p: Any) -> jax.Array:
    return x - jnp.sin(x @ p["up"])[:, : x.shape[1]] ** 2


def skip(x: jax.Array, p: Any) -> jax.Array:
    return x


def is_long(x: jax.Array) -> jax.Array:
    return jnp.abs(x).sum() > 16.0


def chosen(x: jax.Array, p: Any, first: Any = layer, second: Any = sine) -> jax.Array:
    return jax.lax.cond(is_long(x), first, second, x, p)


def skipped(x: jax.Array, p: Any) -> jax.Array:
    return chosen(x, p, second=skip)


def switched(x: jax.Array, p: Any) -> jax.Array:
    number = jnp.abs(x).sum().astype(jnp.int32) % 3
    return jax.lax.switch(number, [layer, sine, skip], x, p)


def nested(x: jax.Array, p: Any) -> jax.Array:
    return chosen(x, p, first=lambda x, p: chosen(2 * x, p))


def checkpointed(x: jax.Array, p: Any) -> jax.Array:
    return jax.checkpoint(chosen)(x, p)


def checkpoint_in_a_branch(x: jax.Array, p: Any) -> jax.Array:
    return chosen(x, p, first=jax.checkpoint(layer), second=jax.jit(sine))


def in_a_scan(x: jax.Array, p: Any) -> jax.Array:
    return jax.lax.scan(lambda h, _: (chosen(h, p), None), x, None, length=2)[0]


def scan_in_a_branch(x: jax.Array, p: Any) -> jax.Array:
    def twice(x: jax.Array, p: Any) -> jax.Array:
        return jax.lax.scan(lambda h, _: (layer(h, p), None), x, None, length=2)[0]

    return chosen(x, p, first=twice)


def in_half_precision(x: jax.Array, p: Any) -> jax.Array:
    """The gradients are cast after the condition."""
    half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return chosen(x.astype(jnp.bfloat16), half).astype(jnp.float32)


def with_noise(x: jax.Array, p: Any) -> jax.Array:
    """A branch that keeps a key for its backward pass."""

    def noisy(x: jax.Array, p: Any) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(3), x.shape[0])
        return layer(x * jax.random.bernoulli(key, 0.8, x.shape), p)

    return chosen(x, p, first=jax.checkpoint(noisy))


def on_a_platform(x: jax.Array, p: Any) -> jax.Array:
    return jax.lax.platform_dependent(x, p, cpu=layer, default=sine)


# For each stage, the products of its input gradients and of its weight gradients.
WAITING = {
    chosen: (3, 3),
    skipped: (2, 2),
    switched: (3, 3),
    nested: (4, 4),
    checkpointed: (5, 3),
    checkpoint_in_a_branch: (4, 3),
    in_a_scan: (3, 3),
    scan_in_a_branch: (3, 3),
    in_half_precision: (3, 3),
    with_noise: (4, 3),
    on_a_platform: (2, 2),
}


def problem_of(stage: Callable[..., Any], width: int = WIDTH) -> Problem:
    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        for p in params:
            x = mark(stage(x, p))
        return jnp.mean(x**2), ()

    keys = jax.random.split(jax.random.key(0), STAGES)
    params = [models.up_and_down(key, width, 5) for key in keys]
    # Some microbatches take the first branch, others the second one.
    scale = jnp.array([0.2, 1.0, 0.3, 0.9]).reshape(-1, 1, 1)
    batch = scale * jax.random.normal(jax.random.key(1), (4, ROWS, width))
    return Problem(loss, params, batch, optax.sgd(0.01, momentum=0.9))


def train(stage: Any, schedule: Any, **axes: int) -> Any:
    """Trains as a pipeline and in plain JAX; returns the compiled step."""
    problem, tolerance = problem_of(stage), 1e-2 if stage is in_half_precision else 1e-5
    specs = (P(), P(), P(None, "data")) if axes else None
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # "gives input gradients and weight ..."
        mesh = mesh_of(STAGES, axes)
        step = assert_trains_equal(problem, schedule, mesh, in_specs=specs, tolerance=tolerance)
    state = problem.optimizer.init(problem.params)
    return step.compile(problem.params, state, problem.batch)


@pytest.mark.sample(4)
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("stage", WAITING, ids=lambda stage: stage.__name__)
def test_weight_gradients_of_a_condition_can_wait(
    stage: Any, axes: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    compiled = train(stage, jaxpp.ZeroBubble(STAGES), **axes)
    assert (products(tmp_path, "bwd_i_1"), products(tmp_path, "bwd_w_1")) == WAITING[stage]
    module = module_of_each(compiled)
    assert module["bwd_i_1"] == module["bwd_i_2"]
    assert module["bwd_w_1"] == module["bwd_w_2"]
    sums = loop_tasks(compiled.cost_summary().collectives, "data", *SUMS)
    assert "bwd_w_1" not in sums


@pytest.mark.sample(1)
@pytest.mark.parametrize("stage", WAITING, ids=lambda stage: stage.__name__)
def test_a_condition_is_evaluated_once_where_nothing_waits(
    stage: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    train(stage, jaxpp.Std1F1B(STAGES))
    assert products(tmp_path, "bwd_1") == sum(WAITING[stage])


def peaks_of(stage: Any, fsdp: str | None) -> list[int]:
    """With `fsdp`, ranks have two devices, which share the weights."""
    problem = problem_of(stage, width=64)  # more weights than activations
    specs = {"up": P("data"), "b": P("data"), "down": P("data")}
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(STAGES)),
        mesh_of(STAGES, {"data": 2} if fsdp else {}),
        in_specs=([specs] * STAGES, P(), P(None, "data")) if fsdp else None,
        fsdp=fsdp,
    )
    return peak_bytes(step, problem)


@pytest.mark.parametrize("fsdp", [None, "use"])
@pytest.mark.parametrize(
    "stage",
    [skipped, nested, checkpoint_in_a_branch, switched, on_a_platform],
    ids=lambda stage: stage.__name__,
)
def test_a_condition_keeps_no_weights_for_its_backward(stage: Any, fsdp: str | None) -> None:
    one_weight = 64 * 128 * 4
    found, plain = peaks_of(stage, fsdp), peaks_of(layer, fsdp)
    # Each of four microbatches keeps activations, but no copy of a weight.
    assert all(f < p + one_weight for f, p in zip(found, plain, strict=True)), (found, plain)


def test_a_scan_of_conditions_keeps_its_weights_once() -> None:
    """JAX stacks what the branches keep; the weights among it are those that the scan takes."""

    def scanned(each: Any) -> Any:
        def stage(x: jax.Array, p: Any) -> jax.Array:
            two = jax.tree.map(lambda w: jnp.stack([w, w]), p)
            return jax.lax.scan(lambda h, q: (each(h, q), None), x, two)[0]

        return stage

    one_weight = 64 * 128 * 4
    found, plain = peaks_of(scanned(skipped), None), peaks_of(scanned(layer), None)
    assert all(f < p + 2 * one_weight for f, p in zip(found, plain, strict=True)), (
        found,
        plain,
    )
