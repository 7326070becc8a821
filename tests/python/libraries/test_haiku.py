"""Haiku's transformed functions, as listed in docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
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
    assert_same_training,
    make_batch,
    mse,
    random_tree,
)


class Block(hk.Module):
    def __init__(self, dropout: float, batch_norm: bool):
        super().__init__()
        self.dropout, self.batch_norm = dropout, batch_norm

    def __call__(self, x: Any) -> Any:
        norm = (
            hk.BatchNorm(True, True, 0.9) if self.batch_norm else hk.LayerNorm(-1, True, True)
        )
        h = norm(x, is_training=True) if self.batch_norm else norm(x)
        h = jax.nn.gelu(hk.Linear(2 * WIDTH)(h))
        if self.dropout:
            h = hk.dropout(hk.next_rng_key(), self.dropout, h)
        return x + hk.Linear(WIDTH)(h)


def stack(
    mark: Callable[[Any], Any] = jaxpp.mark_stage_end,
    dropout: float = 0.0,
    batch_norm: bool = False,
) -> Callable[[Any], Any]:
    """A stack of blocks, each a stage of its own."""

    def apply(x: Any) -> Any:
        for _ in range(STAGES):
            x = mark(Block(dropout, batch_norm)(x))
        return x

    return apply


def first_of(init: Callable[..., Any]) -> Any:
    """Parameters with the shapes that `init` returns, filled with random numbers."""
    return random_tree(jax.eval_shape(init, jax.random.key(0), jnp.ones((4, 6, WIDTH))))


@pytest.mark.soak
def test_haiku_dropout() -> None:
    model = hk.transform(stack(dropout=0.3))

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        params, opt_state, key = state
        key, own = jax.random.split(key)

        def loss_fn(params: Any, microbatch: Any, key: Any) -> Any:
            return mse(model.apply(params, key, microbatch["x"]), microbatch)

        def one(item: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, *item)
            return grads, loss

        grads, losses = loop(one, (batch, jax.random.split(own, MICROBATCHES)))
        updates, opt_state = SGD.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), losses

    params = first_of(model.init)
    state = (params, SGD.init(params), jax.random.key(2))
    assert_same_training(step, state, make_batch())


def test_haiku_batch_statistics() -> None:
    model = hk.transform_with_state(stack(batch_norm=True))

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        params, averages, opt_state = state

        def loss_fn(params: Any, microbatch: Any) -> Any:
            found, new = model.apply(params, averages, None, microbatch["x"])
            return mse(found, microbatch), new

        def one(microbatch: Any) -> Any:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, new), grads = gradient(params, microbatch)
            return grads, (loss, new)

        grads, (losses, news) = loop(one, batch)
        averages = jax.tree.map(lambda x: x[-1], news)
        updates, opt_state = SGD.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), averages, opt_state), losses

    params, averages = first_of(model.init)
    assert_same_training(step, (params, averages, SGD.init(params)), make_batch())
