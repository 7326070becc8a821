"""Features of the libraries that people train with: each row of docs/compatibility.md.

A row is a step that is written once, with its loop over microbatches as a parameter. It trains
as a pipeline and, with the loop a `lax.scan`, as plain JAX; everything must come out the same.
"""

from __future__ import annotations

import functools
import importlib
import pathlib
import re
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import assert_trains_equal, difference, make_mesh

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "compatibility.md"
WIDTH, MICROBATCHES, STAGES = 8, 2, 2
COMPILE_FASTER = {"xla_backend_optimization_level": 0}
SGD = optax.sgd(0.1, momentum=0.9)  # which does not magnify rounding, as Adam does

ROWS: dict[str, str] = {}  # what the documentation's table names -> the test


def row(feature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def note(test: Callable[..., None]) -> Callable[..., None]:
        ROWS[feature] = test.__name__
        return test

    return note


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
    """The tree with the contents of its keys."""
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
    """Gives the state after two steps of the pipeline."""
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
    """Of numbers, or of tokens."""
    rng, shape = np.random.default_rng(1), (MICROBATCHES, 4, 6)
    if vocabulary:
        return {"x": rng.integers(0, vocabulary, shape, np.int32)}
    x, y = rng.normal(size=(2, *shape, WIDTH)).astype(np.float32)
    return {"x": x, "y": y}


def mse(found: Any, microbatch: Any) -> Any:
    return jnp.mean((found - microbatch["y"]) ** 2) / MICROBATCHES


# --- Flax linen -------------------------------------------------------------------------


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
    """A block a stage."""

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


@row("Flax linen: `TrainState`")
def test_linen_train_state() -> None:
    state = assert_same_training(linen_step, linen_state(Stack()), make_batch())
    assert isinstance(state, TrainState) and int(state.step) == 2


@row("Flax linen: `nn.remat`, `nn.jit`")
def test_linen_remat() -> None:
    state = linen_state(Stack(nn.remat(nn.jit(Block))))
    assert_same_training(linen_step, state, make_batch())


@row("Flax linen: `nn.scan` over the layers of a stage")
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


@row("Flax linen: dropout")
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


@row("Flax linen: batch statistics")
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


@row("Flax linen: logical partitioning")
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


@row("Flax linen: a float16 model under a dynamic loss scale")
def test_linen_dynamic_loss_scale() -> None:
    """The first steps overflow: their gradients are dropped and the scale is halved."""

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


# --- Flax NNX ---------------------------------------------------------------------------


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
    """State is what `nnx.split` gives of model and optimizer."""

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


@row("Flax NNX: `split`, `merge`, `nnx.Optimizer`")
def test_nnx_split_and_merge() -> None:
    model = NnxStack(NnxBlock)
    graph, state = nnx.split((model, nnx.Optimizer(model, SGD, wrt=nnx.Param)))
    assert_same_training(nnx_step(graph), state, make_batch())


@row("Flax NNX: dropout and batch statistics")
def test_nnx_dropout_and_batch_statistics() -> None:
    """What a microbatch changes in the model is a result of the loop."""

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


@row("Flax NNX: `nnx.scan` over the layers of a stage")
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


@row("Flax NNX: LoRA, all else frozen")
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


# --- Equinox ----------------------------------------------------------------------------


class EqxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP  # with a function among its fields, which is no array
    dropout: eqx.nn.Dropout

    def __init__(self, key: Any, dropout: float = 0.0):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=key)
        self.dropout = eqx.nn.Dropout(dropout, inference=dropout == 0)

    def __call__(self, x, key: Any = None):
        h = jax.vmap(jax.vmap(lambda x: self.mlp(self.norm(x))))(x)
        return x + self.dropout(h, key=key)


def eqx_step(static: Any, apply: Callable[..., Any]) -> Step:
    """`apply(model, microbatch's x, key)`; state is (arrays of the model, opt_state, key)."""

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


@row("Equinox: `partition`, `combine`, `filter_value_and_grad`")
def test_equinox_filtered() -> None:
    def apply(blocks: Any, x: Any, key: Any) -> Any:
        for block in blocks:
            x = jaxpp.mark_stage_end(block(x))
        return x

    state, static = eqx_state(eqx_blocks())
    assert_same_training(eqx_step(static, apply), state, make_batch())


@row("Equinox: dropout, `filter_checkpoint`")
@pytest.mark.soak
def test_equinox_dropout_and_checkpoint() -> None:
    def apply(blocks: Any, x: Any, key: Any) -> Any:
        for i, block in enumerate(blocks):
            x = eqx.filter_checkpoint(block)(x, jax.random.fold_in(key, i))
            x = jaxpp.mark_stage_end(x)
        return x

    state, static = eqx_state(eqx_blocks(dropout=0.5))
    assert_same_training(eqx_step(static, apply), state, make_batch())


@row("Equinox: layers made by `filter_vmap`, run by `lax.scan`")
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


@row("Equinox: `eqx.nn.State`")
def test_equinox_state() -> None:
    """The running statistics of BatchNorm, which each microbatch changes."""
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
        states = jax.tree.map(lambda x: x[-1], after)  # as the last microbatch left it
        return (optax.apply_updates(arrays, updates), opt_state, states), losses

    assert_same_training(step, (arrays, SGD.init(arrays), states), make_batch())


# --- Hugging Face's Flax models ---------------------------------------------------------


def hugging_face() -> Any:
    """A release that still has Flax models: it is large, so the tests do not ask for it."""
    why = "no transformers with Flax models: pip install 'transformers<5'"
    transformers = pytest.importorskip("transformers", reason=why)
    if not hasattr(transformers, "FlaxGPT2LMHeadModel"):
        pytest.skip(why)
    return transformers


def marked_blocks(kind: type) -> Any:
    """Within this, a stage ends with each block of the model, whose code stays as it is."""

    def mark(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = call(*args, **kwargs)
        if isinstance(context.module, kind) and context.method_name == "__call__":
            return (jaxpp.mark_stage_end(out[0]), *out[1:])
        return out

    return nn.intercept_methods(mark)


def check_hugging_face(model: Any, kind: type) -> None:
    params = random_tree(nn.unbox(model.params_shape_tree))
    state = TrainState.create(apply_fn=model, params=params, tx=SGD)

    def step(loop: Loop, state: Any, batch: Any) -> Any:
        def loss_fn(params: Any, microbatch: Any) -> Any:
            with marked_blocks(kind):
                logits = model(microbatch["x"], params=params).logits
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["x"])
            return losses.mean()

        def one(microbatch: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(state.params, microbatch)
            return grads, loss

        grads, losses = loop(one, batch)
        return state.apply_gradients(grads=grads), losses

    # The gradient of a bias of keys is 0 but for rounding, as softmax does not see it.
    assert_same_training(step, state, make_batch(vocabulary=16), tolerance=1e-3)


@row("Hugging Face: `FlaxGPT2LMHeadModel`")
@pytest.mark.soak
def test_hugging_face_gpt2() -> None:
    transformers = hugging_face()
    config = transformers.GPT2Config(
        n_layer=STAGES, n_embd=8, n_head=2, n_positions=8, vocab_size=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    module = importlib.import_module("transformers.models.gpt2.modeling_flax_gpt2")
    model = transformers.FlaxGPT2LMHeadModel(config, input_shape=(1, 6), _do_init=False)
    check_hugging_face(model, module.FlaxGPT2Block)


@row("Hugging Face: `FlaxBertForMaskedLM`")
@pytest.mark.soak
def test_hugging_face_bert() -> None:
    transformers = hugging_face()
    config = transformers.BertConfig(
        num_hidden_layers=STAGES, hidden_size=8, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, vocab_size=16,
    )  # fmt: skip
    module = importlib.import_module("transformers.models.bert.modeling_flax_bert")
    model = transformers.FlaxBertForMaskedLM(config, input_shape=(1, 6), _do_init=False)
    check_hugging_face(model, module.FlaxBertLayer)


# --- Optax ------------------------------------------------------------------------------


def check_optimizer(optimizer: Any, tolerance: float = 3e-5) -> None:
    problem = models.mlp([1] * STAGES, MICROBATCHES)
    problem.optimizer = optimizer
    assert_trains_equal(
        problem, jaxpp.Std1F1B(STAGES), make_mesh(STAGES), steps=4, tolerance=tolerance
    )


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


@row("optax: `masked`")
def test_optax_masked() -> None:
    decay = optax.masked(optax.add_decayed_weights(0.1), matrices)
    check_optimizer(optax.chain(decay, SGD))


@row("optax: `multi_transform`")
def test_optax_multi_transform() -> None:
    labels = lambda params: jax.tree.map(  # noqa: E731
        lambda x: "matrix" if x.ndim == 2 else "bias", params
    )
    by_label = {"matrix": optax.adamw(1e-2, eps=1e-3), "bias": optax.sgd(0.1)}
    check_optimizer(optax.multi_transform(by_label, labels))


@row("optax: `MultiSteps`")
def test_optax_multi_steps() -> None:
    check_optimizer(optax.MultiSteps(SGD, 2).gradient_transformation())


@row("optax: `adafactor`")
def test_optax_adafactor() -> None:
    check_optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=8))


@row("optax: `lion`")
def test_optax_lion() -> None:
    check_optimizer(optax.lion(1e-2))


@row("optax: `contrib.muon`")
def test_optax_muon() -> None:
    check_optimizer(optax.contrib.muon(1e-2, eps=1e-3), tolerance=1e-4)


@row("optax: `contrib.schedule_free_adamw`")
def test_optax_schedule_free() -> None:
    check_optimizer(optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2, eps=1e-3))


@row("optax: `apply_if_finite`")
def test_optax_apply_if_finite() -> None:
    check_optimizer(optax.apply_if_finite(SGD, 3))


@row("optax: `ema` of the updates")
def test_optax_ema() -> None:
    check_optimizer(optax.chain(optax.ema(0.9), optax.sgd(0.1)))


@row("optax: clipping by the norm of all gradients, a schedule of learning rates")
def test_optax_clipping_and_schedule() -> None:
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)
    check_optimizer(optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(rate)))


@row("optax: an average of the weights by `incremental_update`")
def test_optax_average_of_weights() -> None:
    def step(loop: Loop, state: Any, batch: Any) -> Any:
        average, train_state = state
        train_state, losses = linen_step(loop, train_state, batch)
        return (
            optax.incremental_update(train_state.params, average, 0.1),
            train_state,
        ), losses

    train_state = linen_state(Stack())
    assert_same_training(step, (train_state.params, train_state), make_batch())


# --- The table --------------------------------------------------------------------------


def test_the_documentation_has_these_rows() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|[^|]*\| `(test_\w+)` \|$", DOCS.read_text(), re.M)
    assert rows == list(ROWS.items())
    tests = {name for name in globals() if name.startswith("test_")}
    assert tests - set(ROWS.values()) == {test_the_documentation_has_these_rows.__name__}
