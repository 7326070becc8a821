"""Layers that a task repeats are a function of its module, which JAX lowers once."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
from equality import Problem, assert_trains_equal, difference, mesh_of, pipelined_step

WIDTH, STAGES, LAYERS, MICROBATCHES = 8, 2, 3, 3


def block(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(y @ p["up"]) @ p["down"]


def with_dropout(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 0.8, x.shape)
    return block(p, jnp.where(kept, x / 0.8, 0), key)


def with_callback(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    struct = jax.ShapeDtypeStruct(x.shape, x.dtype)
    seen = jax.pure_callback(np.cos, struct, jax.lax.stop_gradient(x), vmap_method="sequential")
    return block(p, x + seen, key)


def with_other_bits(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Layers with a weight "old" draw other random numbers from the same key."""
    with jax.threefry_partitionable("old" not in p):
        return with_dropout(p, x, jax.random.key(1))


def with_choice(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda x: block(p, x, key), lambda x: x * 0.5, x)


def stacked(
    layer: Callable[..., Any], remat: bool, stages: int = STAGES, **options: Any
) -> Problem:
    """Stages of equal layers, one after the other."""
    layer = jax.checkpoint(layer) if remat else layer

    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), i)
        for n, p in enumerate(params):
            x = layer(p, x, jax.random.fold_in(key, n))
            if (n + 1) % LAYERS == 0:
                x = mark(x)
        return jnp.mean(jnp.sin(x * jax.lax.rsqrt(jnp.mean(x * x)))), ()

    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)

    params = [
        {"up": weight(WIDTH, 2 * WIDTH), "down": weight(2 * WIDTH, WIDTH)}
        for _ in range(stages * LAYERS)
    ]
    return Problem(loss, params, weight(MICROBATCHES, 4, WIDTH), **options)


def num_calls(folder: pathlib.Path, task: str) -> int:
    """The calls to the module's only repeated function."""
    text = (folder / f"{task}.mlir").read_text()
    assert "@repeated_0" not in text
    return text.count("call @repeated(")


@pytest.mark.sample(3)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("layer", [block, with_dropout, with_callback, with_choice])
def test_training_equals_plain_jax(
    layer: Any, remat: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    problem = stacked(layer, remat, optimizer=optax.adamw(1e-2, eps=1e-3))
    assert_trains_equal(problem, jaxpp.Std1F1B(STAGES), mesh_of(STAGES, {}, sharing=1))
    if layer is not with_choice:  # a cond is one op
        assert num_calls(tmp_path, "fwd_0") == LAYERS
        # The first layer's backward lacks the gradient of the microbatch.
        assert num_calls(tmp_path, "bwd_0") == LAYERS - 1
        assert num_calls(tmp_path, "bwd_1") == LAYERS
    # An optimizer updates one moment of all weights after the other.
    assert num_calls(tmp_path, "after_loop_1_0") == LAYERS


@pytest.mark.sample(1)
@pytest.mark.parametrize("remat", [False, True])
def test_layers_under_other_settings(
    remat: bool, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    problem = stacked(with_other_bits, remat, optimizer=optax.adamw(1e-2, eps=1e-3))
    problem.params[1]["old"] = problem.params[-1]["old"] = jnp.zeros(())
    assert_trains_equal(problem, jaxpp.Std1F1B(STAGES), mesh_of(STAGES, {}, sharing=1))
    assert num_calls(tmp_path, "fwd_0") == 0
    assert num_calls(tmp_path, "fwd_1") == 2


def test_a_stage_under_other_settings() -> None:
    problem = stacked(with_other_bits, remat=False, stages=4)
    for p in problem.params[2 * LAYERS : 3 * LAYERS]:
        p["old"] = jnp.zeros(())
    assert_trains_equal(problem, jaxpp.Std1F1B(4), mesh_of(4, {}, sharing=1))


def test_compiling_without_jit(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    problem = stacked(block, remat=False)
    state = (problem.params, problem.optimizer.init(problem.params))
    step = pipelined_step(problem, jaxpp.Std1F1B(STAGES))
    made = jaxpp.mpmd_jit_with_loop(step, mesh_of(STAGES, {}, sharing=1))
    with jax.disable_jit():
        compiled = made.lower(*state, problem.batch).compile()
    ours, usual = (call(*state, problem.batch) for call in (compiled, made))
    assert num_calls(tmp_path, "fwd_0") == LAYERS
    assert difference(ours, usual) < 1e-5


def test_ranks_of_several_devices_have_no_calls(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    mesh = mesh_of(STAGES, {"data": 2}, sharing=1)
    assert_trains_equal(stacked(block, remat=True), jaxpp.Std1F1B(STAGES), mesh)
    assert num_calls(tmp_path, "fwd_0") == 0


def test_a_layer_that_differs_is_not_a_call(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(p: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        return block(p, x, key) if p["up"].shape[1] == 2 * WIDTH else block(p, -x, key)

    problem = stacked(other, remat=False)
    wide = {"up": jnp.ones((WIDTH, WIDTH)), "down": jnp.ones((WIDTH, WIDTH))}
    problem.params[LAYERS - 1] = wide
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    assert_trains_equal(problem, jaxpp.Std1F1B(STAGES), mesh_of(STAGES, {}, sharing=1))
    assert num_calls(tmp_path, "fwd_0") == LAYERS - 1
    assert num_calls(tmp_path, "fwd_1") == LAYERS
