"""Training steps with models of other libraries, as a pipeline and in plain JAX.

A step is written once, with its loop over microbatches as a parameter. It runs as a pipeline
and, with a `lax.scan` as its loop, in plain JAX; all results must agree. The table in
docs/compatibility.md names these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import jaxpp.api as jaxpp
from equality import COMPILE_FASTER, difference, make_mesh

WIDTH, MICROBATCHES, STAGES = 8, 2, 2
SGD = optax.sgd(0.1, momentum=0.9)  # unlike Adam, does not magnify rounding errors


# --- A step, trained twice --------------------------------------------------------------

Loop = Callable[[Callable[..., Any], Any], Any]  # (microbatch -> (summed, listed), batch)
Step = Callable[[Loop, Any, Any], Any]  # (loop, state, batch) -> (state, what to compare)


def pipelined_loop(one: Callable[..., Any], batch: Any) -> Any:
    operation = (jaxpp.Add, jaxpp.Concat())
    return jaxpp.treduce(one, batch, schedule=jaxpp.Std1F1B(STAGES), operation=operation)


def plain_loop(one: Callable[..., Any], batch: Any) -> Any:
    def body(total: Any, microbatch: Any) -> Any:
        summed, listed = one(microbatch)
        return jax.tree.map(jnp.add, total, summed), listed

    first = jax.tree.map(lambda x: x[0], batch)
    shapes, _ = jax.eval_shape(one, first)
    return jax.lax.scan(
        body, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), batch
    )


def numbers(tree: Any) -> Any:
    """The tree, with PRNG keys replaced by their data."""
    is_key = lambda x: jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def assert_same_training(
    step: Step,
    state: Any,
    batch: Any,
    mesh: Any = None,
    tolerance: float = 1e-5,
    **options: Any,
) -> Any:
    """Compares two steps of the pipeline with plain JAX; returns the pipeline's final state."""
    mesh = mesh or make_mesh(STAGES)
    pipelined = jaxpp.mpmd_jit_with_loop(
        lambda state, batch: step(pipelined_loop, state, batch),
        mpmd_mesh=mesh,
        compiler_options=COMPILE_FASTER,
        **options,
    )
    plain = jax.jit(
        lambda state, batch: step(plain_loop, state, batch), compiler_options=COMPILE_FASTER
    )
    ours = theirs = state
    for _ in range(2):
        ours, found = pipelined(ours, batch)
        with jax.set_mesh(mesh.lowering_mesh()):
            theirs, expected = plain(theirs, batch)
        assert difference(found, expected) < tolerance
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert difference(numbers(ours), numbers(theirs)) < tolerance
    assert difference(numbers(ours), numbers(state)) > 1e-3, "the steps have changed nothing"
    return ours


def random_tree(shapes: Any, scale: float = 0.3) -> Any:
    """Weights of these shapes; the models' own initializers take longer to compile."""
    rng = np.random.default_rng(0)
    draw = lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype)  # noqa: E731
    return jax.tree.map(draw, shapes)


def make_batch(*, vocabulary: int = 0) -> dict[str, Any]:
    """A batch of inputs and targets or, with a vocabulary, of tokens."""
    rng, shape = np.random.default_rng(1), (MICROBATCHES, 4, 6)
    if vocabulary:
        return {"x": rng.integers(0, vocabulary, shape, np.int32)}
    x, y = rng.normal(size=(2, *shape, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def mse(found: Any, microbatch: Any) -> Any:
    return jnp.mean((found - microbatch["y"]) ** 2) / MICROBATCHES


# --- A model of Flax linen, with any optimizer ------------------------------------------


class Block(nn.Module):
    dropout: float = 0.0
    batch_norm: bool = False

    @nn.compact
    def __call__(self, x):
        norm = nn.BatchNorm(use_running_average=False) if self.batch_norm else nn.LayerNorm()
        h = nn.gelu(nn.Dense(2 * WIDTH)(norm(x)))
        h = nn.Dropout(self.dropout, deterministic=False)(h)
        return x + nn.Dense(WIDTH)(h)


class Stack(nn.Module):
    """A stack of blocks, each a stage of its own."""

    block: Any = Block

    @nn.compact
    def __call__(self, x):
        for _ in range(STAGES):
            x = jaxpp.mark_stage_end(self.block()(x))
        return x


def linen_shapes(model: nn.Module) -> Any:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.eval_shape(model.init, keys, jnp.ones((4, 6, WIDTH)))


def linen_state(model: nn.Module) -> TrainState:
    params = random_tree(nn.unbox(linen_shapes(model))["params"])
    return TrainState.create(apply_fn=model.apply, params=params, tx=SGD)


def linen_step(loop: Loop, state: TrainState, batch: Any) -> Any:
    def loss_fn(params: Any, microbatch: Any) -> Any:
        return mse(state.apply_fn({"params": params}, microbatch["x"]), microbatch)

    def one(microbatch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state.params, microbatch)
        return grads, loss

    grads, losses = loop(one, batch)
    return state.apply_gradients(grads=grads), losses
