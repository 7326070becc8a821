"""Flax linen's modules and training state, as listed in docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from equality import make_mesh
from libraries import (
    MICROBATCHES,
    STAGES,
    WIDTH,
    Block,
    Loop,
    Stack,
    assert_same_training,
    linen_shapes,
    linen_state,
    linen_step,
    make_batch,
    mse,
)


def test_linen_train_state() -> None:
    state = assert_same_training(linen_step, linen_state(Stack()), make_batch())
    assert isinstance(state, TrainState) and int(state.step) == 2


def test_linen_remat() -> None:
    state = linen_state(Stack(nn.remat(nn.jit(Block))))
    assert_same_training(linen_step, state, make_batch())


def test_linen_scan() -> None:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return Block()(x), None

    def layers() -> Callable[[Any], Any]:
        scanned = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )()
        return lambda x: scanned(x, None)[0]

    state = linen_state(Stack(layers))
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state.params)} == {3}
    assert_same_training(linen_step, state, make_batch())


def test_linen_dropout() -> None:
    model = Stack(lambda: Block(dropout=0.5))
    train_state = linen_state(model)

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        key, train_state = state
        keys = jax.random.split(jax.random.fold_in(key, train_state.step), MICROBATCHES)

        def loss_fn(params: Any, microbatch: Any, key: Any) -> Any:
            found = model.apply({"params": params}, microbatch["x"], rngs={"dropout": key})
            return mse(found, microbatch)

        def one(item: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(train_state.params, *item)
            return grads, loss

        grads, losses = loop(one, (batch, keys))
        return (key, train_state.apply_gradients(grads=grads)), losses

    assert_same_training(step, (jax.random.key(2), train_state), make_batch())


@pytest.mark.soak
def test_linen_batch_statistics() -> None:
    model = Stack(lambda: Block(batch_norm=True))
    stats = jax.tree.map(lambda x: jnp.ones(x.shape), linen_shapes(model)["batch_stats"])
    state = (stats, linen_state(model))

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        stats, train_state = state

        def loss_fn(params: Any, microbatch: Any) -> Any:
            found, updated = model.apply(
                {"params": params, "batch_stats": stats},
                microbatch["x"],
                mutable=["batch_stats"],
            )
            return mse(found, microbatch), updated["batch_stats"]

        def one(microbatch: Any) -> Any:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, updated), grads = gradient(train_state.params, microbatch)
            return (grads, updated), loss

        (grads, total), losses = loop(one, batch)
        stats = jax.tree.map(lambda x: x / MICROBATCHES, total)
        return (stats, train_state.apply_gradients(grads=grads)), losses

    assert_same_training(step, state, make_batch())


def test_linen_logical_partitioning() -> None:
    rules = (("embed", "data"), ("mlp", "model"), ("batch", "data"))

    class Partitioned(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            up = nn.with_logical_partitioning(init, ("embed", "mlp"))
            down = nn.with_logical_partitioning(init, ("mlp", "embed"))
            x = nn.with_logical_constraint(x, ("batch", None, None))
            h = nn.gelu(nn.Dense(2 * WIDTH, kernel_init=up)(x))
            return x + nn.Dense(WIDTH, kernel_init=down)(h)

    model = Stack(Partitioned)
    mesh = make_mesh(STAGES, data=2, model=2)
    names = nn.get_partition_spec(linen_shapes(model))["params"]
    specs = nn.logical_to_mesh(names, rules)
    state = linen_state(model)

    def step(loop: Loop, state: TrainState, batch: Any) -> Any:
        with nn.logical_axis_rules(rules):
            return linen_step(loop, state, batch)

    in_specs = (state.replace(step=None, params=specs, opt_state=None), P(None, "data"))
    state = assert_same_training(step, state, make_batch(), mesh, in_specs=in_specs)
    kernel = state.params["Partitioned_0"]["Dense_0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (WIDTH // 2, WIDTH)


def test_linen_dynamic_loss_scale() -> None:
    """The first steps overflow, so their gradients are dropped and the scale is halved."""

    class Half(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(WIDTH, dtype=jnp.float16)(nn.gelu(x))

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        scale, train_state = state

        def loss_fn(params: Any, microbatch: Any) -> Any:
            found = train_state.apply_fn(
                {"params": params}, microbatch["x"].astype(jnp.float16)
            )
            loss = jnp.mean((found - microbatch["y"].astype(jnp.float16)) ** 2)
            return loss * scale.astype(jnp.float16), loss

        def one(microbatch: Any) -> Any:
            gradient = jax.value_and_grad(loss_fn, has_aux=True)
            (_, loss), grads = gradient(train_state.params, microbatch)
            return grads, loss

        grads, losses = loop(one, batch)
        grads = jax.tree.map(lambda g: g / scale, grads)
        finite = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        stepped = train_state.apply_gradients(grads=grads)
        chosen = jax.tree.map(lambda a, b: jnp.where(finite, a, b), stepped, train_state)
        return (jnp.where(finite, scale, scale / 2), chosen), losses

    state = (jnp.float32(2.0**16), linen_state(Stack(Half)))
    scale, train_state = assert_same_training(step, state, make_batch(), tolerance=5e-3)
    assert float(scale) < 2.0**16 and int(train_state.step) >= 1
