"""Equinox's modules and state, as listed in docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpp.api as jaxpp
from libraries import (
    MICROBATCHES,
    SGD,
    STAGES,
    WIDTH,
    Loop,
    Step,
    assert_same_training,
    make_batch,
    mse,
)


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP  # has a field that is a function, not an array
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any, dropout: float = 0.0):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=key)
        self.dropout = eqx.nn.Dropout(dropout, inference=dropout == 0)

    def __call__(self, x, key: Any = None):
        h = jax.vmap(jax.vmap(lambda x: self.mlp(self.norm(x))))(x)
        return x + self.dropout(h, key=key)


def eqx_step(static: Any, apply: Callable[..., Any]) -> Step:
    """A step with `apply(model, x, key)` whose state is (model arrays, opt_state, key)."""

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        arrays, opt_state, key = state
        key, *keys = jax.random.split(key, 1 + MICROBATCHES)

        @eqx.filter_value_and_grad
        def loss_fn(model: Any, microbatch: Any, key: Any) -> Any:
            return mse(apply(model, microbatch["x"], key), microbatch)

        def one(item: Any) -> Any:
            loss, grads = loss_fn(eqx.combine(arrays, static), *item)
            return grads, loss

        grads, losses = loop(one, (batch, jnp.stack(keys)))
        updates, opt_state = SGD.update(grads, opt_state, arrays)
        return (eqx.apply_updates(arrays, updates), opt_state, key), losses

    return step


def eqx_state(model: Any) -> tuple[Any, Any]:
    arrays, static = eqx.partition(model, eqx.is_array)
    return (arrays, SGD.init(arrays), jax.random.key(5)), static


def eqx_blocks(**options: Any) -> list[EqxBlock]:
    return [EqxBlock(k, **options) for k in jax.random.split(jax.random.key(0), STAGES)]


@pytest.mark.soak
def test_equinox_filtered() -> None:
    def apply(blocks: Any, x: Any, key: Any) -> Any:
        for block in blocks:
            x = jaxpp.mark_stage_end(block(x))
        return x

    state, static = eqx_state(eqx_blocks())
    assert_same_training(eqx_step(static, apply), state, make_batch())


@pytest.mark.soak
def test_equinox_dropout_and_checkpoint() -> None:
    def apply(blocks: Any, x: Any, key: Any) -> Any:
        for i, block in enumerate(blocks):
            x = eqx.filter_checkpoint(block)(x, jax.random.fold_in(key, i))
            x = jaxpp.mark_stage_end(x)
        return x

    state, static = eqx_state(eqx_blocks(dropout=0.5))
    assert_same_training(eqx_step(static, apply), state, make_batch())


def test_equinox_scan() -> None:
    layers = eqx.filter_vmap(EqxBlock)(jax.random.split(jax.random.key(0), 2 * STAGES))

    def apply(layers: Any, x: Any, key: Any) -> Any:
        arrays, static = eqx.partition(layers, eqx.is_array)
        for s in range(STAGES):
            rows = jax.tree.map(lambda w, s=s: w[2 * s : 2 * s + 2], arrays)
            x, _ = jax.lax.scan(lambda x, a: (eqx.combine(a, static)(x), None), x, rows)
            x = jaxpp.mark_stage_end(x)
        return x

    state, static = eqx_state(layers)
    assert_same_training(eqx_step(static, apply), state, make_batch())


@pytest.mark.soak
def test_equinox_state() -> None:
    """Each microbatch updates the running statistics of BatchNorm."""
    norms, states = [], []
    for _ in range(STAGES):
        norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(WIDTH, "batch", mode="ema")
        norms.append(norm)
        states.append(state)
    (arrays, _, _), static = eqx_state((eqx_blocks(), norms))

    def loss_fn(arrays: Any, states: Any, microbatch: Any) -> Any:
        x, after = microbatch["x"], []
        for block, norm, state in zip(*eqx.combine(arrays, static), states, strict=True):
            over_batch = jax.vmap(
                norm, axis_name="batch", in_axes=(0, None), out_axes=(0, None)
            )
            flat, state = over_batch(block(x).reshape(-1, WIDTH), state)
            x = jaxpp.mark_stage_end(flat.reshape(x.shape))
            after.append(state)
        return mse(x, microbatch), after

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        arrays, opt_state, states = state

        def one(microbatch: Any) -> Any:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, after), grads = gradient(arrays, states, microbatch)
            return grads, (loss, after)

        grads, (losses, after) = loop(one, batch)
        updates, opt_state = SGD.update(grads, opt_state, arrays)
        states = jax.tree.map(lambda x: x[-1], after)  # the state after the last microbatch
        return (optax.apply_updates(arrays, updates), opt_state, states), losses

    assert_same_training(step, (arrays, SGD.init(arrays), states), make_batch())
