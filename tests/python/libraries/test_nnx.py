"""Flax NNX's modules and optimizers, as listed in docs/compatibility.md."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest
from flax import nnx

import jaxpp.api as jaxpp
from equality import difference
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
    pipelined_loop,
    plain_loop,
)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.0):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.dropout(nnx.gelu(self.up(self.norm(x)))))


class NnxStack(nnx.Module):
    def __init__(self, make_block: Callable[[nnx.Rngs], Any]):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([make_block(rngs) for _ in range(STAGES)])

    def __call__(self, x):
        for block in self.blocks:
            x = jaxpp.mark_stage_end(block(x))
        return x


def nnx_step(graph: Any, wrt: Any = nnx.Param, copy: bool = False) -> Step:
    """A step whose state is `nnx.split` of the model and the optimizer."""

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        graph_of_model, params, rest = nnx.split(model, wrt, ...)

        def loss_fn(params: Any, microbatch: Any) -> Any:
            merged = nnx.merge(graph_of_model, params, rest, copy=copy)
            return mse(merged(microbatch["x"]), microbatch)

        def one(microbatch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, microbatch)
            return grads, loss

        grads, losses = loop(one, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), losses

    return step


def test_nnx_split_and_merge() -> None:
    model = NnxStack(NnxBlock)
    graph, state = nnx.split((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)))
    assert_same_training(nnx_step(graph), state, make_batch())


def test_nnx_value_and_grad() -> None:
    """It needs a model that the loop's function made."""
    model = NnxStack(NnxBlock)
    graph, state = nnx.split((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)))

    def step(loop: Loop, state: Any, batch: Any, copy: bool = True) -> Any:
        model, optimizer = nnx.merge(graph, state)
        parts = nnx.split(model)

        def one(microbatch: Any) -> Any:
            own = nnx.merge(*parts, copy=True) if copy else model
            gradient = nnx.value_and_grad(lambda m: mse(m(microbatch["x"]), microbatch))
            return gradient(own)[::-1]

        grads, losses = loop(one, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), losses

    assert_same_training(step, state, make_batch())
    shared = functools.partial(step, pipelined_loop, copy=False)
    with pytest.raises(jaxpp.JaxppError, match="a Flax NNX model that was made outside of it"):
        jax.eval_shape(shared, state, make_batch())


@pytest.mark.soak
def test_nnx_dropout_and_batch_statistics() -> None:
    """The loop returns the variables of the model that a microbatch changes."""

    class Changing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.block = NnxBlock(rngs, dropout=0.5)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)

        def __call__(self, x):
            return x + self.block(self.norm(x))

    model = NnxStack(Changing)
    model_graph, params, stats, rest = nnx.split(model, nnx.Param, nnx.BatchStat, ...)

    def step(loop: Loop, state: Any, batch: Any, copy: bool = True) -> Any:
        params, stats, opt_state, key = state
        key, *keys = jax.random.split(key, 1 + MICROBATCHES)

        def loss_fn(params: Any, microbatch: Any, key: Any) -> Any:
            merged = nnx.merge(model_graph, params, stats, rest, copy=copy)
            nnx.reseed(merged, default=key)
            loss = mse(merged(microbatch["x"]), microbatch)
            return loss, nnx.state(merged, nnx.BatchStat)

        def one(item: Any) -> Any:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, updated), grads = gradient(params, *item)
            return (grads, updated), loss

        (grads, total), losses = loop(one, (batch, jnp.stack(keys)))
        updates, opt_state = SGD.update(grads, opt_state, params)
        stats = jax.tree.map(lambda x: x / MICROBATCHES, total)
        return (optax.apply_updates(params, updates), stats, opt_state, key), losses

    state = (params, stats, SGD.init(params), jax.random.key(3))
    assert_same_training(step, state, make_batch())
    with pytest.raises(flax.errors.TraceContextError, match="from a different trace level"):
        without_copy = functools.partial(step, plain_loop, copy=False)
        jax.eval_shape(without_copy, state, make_batch())


def test_nnx_scan() -> None:
    class Scanned(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            make = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)
            self.layers = make(rngs.fork(split=3))

        def __call__(self, x):
            return nnx.scan(
                lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )(x, self.layers)

    model = NnxStack(Scanned)
    graph, state = nnx.split((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)))
    assert_same_training(nnx_step(graph, copy=True), state, make_batch())


def test_nnx_lora() -> None:
    class Adapted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.block = NnxBlock(rngs)
            self.block.up = nnx.LoRA(
                WIDTH, 2, 2 * WIDTH, base_module=self.block.up, rngs=rngs,
                b_initializer=nnx.initializers.normal(),
            )  # fmt: skip

        def __call__(self, x):
            return self.block(x)

    model = NnxStack(Adapted)
    before = nnx.state(model, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    graph, state = nnx.split((model, nnx.Optimizer(model, SGD, wrt=nnx.LoRAParam)))
    state = assert_same_training(nnx_step(graph, nnx.LoRAParam), state, make_batch())
    trained, _ = nnx.merge(graph, state)
    after = nnx.state(trained, nnx.All(nnx.Param, nnx.Not(nnx.LoRAParam)))
    assert difference(after, before) == 0.0
