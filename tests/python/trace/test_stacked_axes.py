"""Weights of all layers in one leaf, with the layers along an axis other than the first."""

from __future__ import annotations

import functools
import os
import pathlib
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_equal, assert_trains_equal, make_mesh, pipelined_step
from jaxpp.placements import physical_array
from jaxpp.trace.boxes import Bounds

LAYERS = 8
ADAM = optax.adamw(1e-2, eps=1e-3)


# --- Ways to select layers --------------------------------------------------------------

Take = Callable[[Any, int, int, int], Any]  # layers start .. stop - 1, along the first axis


def by_slice(w: Any, axis: int, start: int, stop: int) -> Any:
    return jnp.moveaxis(jax.lax.slice_in_dim(w, start, stop, axis=axis), axis, 0)


def by_dynamic_slice(w: Any, axis: int, start: int, stop: int) -> Any:
    taken = jax.lax.dynamic_slice_in_dim(w, start, stop - start, axis)
    return jnp.moveaxis(taken, axis, 0)


def moved_first(w: Any, axis: int, start: int, stop: int) -> Any:
    return jnp.moveaxis(w, axis, 0)[start:stop]


def one_by_one(w: Any, axis: int, start: int, stop: int) -> Any:
    return jnp.stack([jnp.take(w, k, axis) for k in range(start, stop)])


TAKES = [by_slice, by_dynamic_slice, moved_first, one_by_one]


def problem_of(
    axes: dict[str, int], ends: list[int], take: Take = by_slice, optimizer: Any = ADAM
) -> Problem:
    """Stages that scan over the layers between `ends`; `axes` gives each leaf's layer axis."""

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for start, stop in zip(ends, ends[1:], strict=False):
            layers = {name: take(w, axes[name], start, stop) for name, w in params.items()}
            x = mark(jax.lax.scan(lambda x, p: (models.layer(p, x), None), x, layers)[0])
        return models.mse(x, mb["y"]), ()

    stacked = jax.tree.map(lambda *ws: jnp.stack(ws), *models.weights(ends[-1]))
    params = {name: jnp.moveaxis(w, 0, axes[name]) for name, w in stacked.items()}
    return Problem(loss, params, models.batch(4), optimizer)


def traced_of(step: Any, problem: Problem) -> Any:
    state = problem.optimizer.init(problem.params)
    return step.trace_and_place(problem.params, state, problem.batch)


ENDS = [0, 2, 4, 6, 8]


@pytest.mark.sample(4)
@pytest.mark.parametrize("take", TAKES, ids=lambda take: take.__name__)
@pytest.mark.parametrize("axis", [1, 2])
def test_trains_as_plain_jax(axis: int, take: Take, any_mesh4: Any) -> None:
    axes = {"w": axis, "b": 1}
    problem = problem_of(axes, ENDS, take, optax.chain(optax.clip_by_global_norm(0.1), ADAM))
    step = assert_trains_equal(
        problem, jaxpp.ZeroBubble(4), any_mesh4, tolerance=3e-5, in_specs=None
    )
    found = [cut for cut in traced_of(step, problem).argument_bounds if cut is not None]
    # The weights and both of Adam's moments.
    assert found == [Bounds(1, tuple(ENDS)), Bounds(axis, tuple(ENDS))] * 3


def test_memory_is_that_of_rows(mesh4: Any) -> None:
    peaks = []
    for axes in ({"w": 0, "b": 0}, {"w": 1, "b": 1}):
        problem = problem_of(axes, ENDS)
        step = jaxpp.mpmd_jit_with_loop(
            pipelined_step(problem, jaxpp.Std1F1B(4)), mesh4, donate_argnums=(0, 1)
        )
        summary = traced_of(step, problem).plan.summary()
        peaks.append(max(rank.peak_bytes for rank in summary))
    layers = LAYERS // 4 * (models.D + 1) * models.D * 4  # a rank's weights, transposed
    assert peaks[1] <= peaks[0] + layers


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(int(os.environ.get("JPP_TEST_TIMES") or 8)))
def test_random_axes(seed: int) -> None:
    drawn = random.Random(int(os.environ.get("JPP_TEST_SEED") or seed))
    stages = drawn.randint(2, 4)
    layers = drawn.randint(stages, 9)
    ends = [0, *sorted(drawn.sample(range(1, layers), stages - 1)), layers]
    axes = {"w": drawn.randrange(3), "b": drawn.randrange(2)}
    problem = problem_of(axes, ends, drawn.choice(TAKES), drawn.choice([ADAM, optax.sgd(0.1)]))
    schedule = drawn.choice([jaxpp.Std1F1B, jaxpp.ZeroBubble])(stages)
    # With specs, a leaf whose layers are sharded would not be cut.
    step = assert_trains_equal(
        problem, schedule, make_mesh(stages), tolerance=3e-5, steps=2, in_specs=None
    )
    assert traced_of(step, problem).argument_bounds[:2] == [
        Bounds(axes[name], tuple(ends)) for name in ("b", "w")
    ]


def test_stages_of_a_rank(mesh2: Any) -> None:
    problem = problem_of({"w": 1, "b": 1}, ENDS)
    schedule = jaxpp.Interleaved1F1B(4, 2)
    assert_trains_equal(problem, schedule, mesh2, donate_argnums=(0, 1), in_specs=None)


def test_layers_that_are_taken_outside_of_the_loop(mesh2: Any) -> None:
    problem = problem_of({"w": 1, "b": 1}, [0, 4, 8])

    def step(params: Any, batch: Any) -> Any:
        halves = [jax.tree.map(lambda w, k=k: w[:, k : k + 4], params) for k in (0, 4)]

        def loss(halves: Any, mb: Any) -> Any:
            x = mb["x"]
            for half in halves:
                for k in range(4):
                    x = models.layer(jax.tree.map(lambda w, k=k: w[:, k], half), x)
                x = jaxpp.mark_stage_end(x)
            return models.mse(x, mb["y"])

        grad = functools.partial(jax.value_and_grad(loss), halves)
        return jaxpp.treduce(grad, batch, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    pipelined = jaxpp.mpmd_jit_with_loop(step, mesh2)
    found = pipelined(problem.params, problem.batch)
    assert_equal(found, jax.jit(step)(problem.params, problem.batch), 1e-4)
    bounds = pipelined.trace_and_place(problem.params, problem.batch).argument_bounds
    assert bounds[:2] == [Bounds(1, (0, 4, 8))] * 2


def test_leaves_of_one_shape_along_different_axes(mesh2: Any) -> None:
    """Gradients are matched to leaves by shape, so only the first of two such leaves is cut."""

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for s in range(2):
            x = mark(jnp.tanh(x @ params["a"][s]))
            x = x + x @ params["b"][:, s]
        return models.mse(x, mb["y"]), ()

    size = models.D
    keys = jax.random.split(jax.random.key(0), 2)
    params = {n: jax.random.normal(k, (size,) * 3) / 9 for n, k in zip("ab", keys, strict=True)}
    problem = Problem(loss, params, models.batch(4), optax.sgd(0.1))
    assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh2)


def test_an_axis_that_the_specs_shard() -> None:
    mesh = make_mesh(2, data=2)
    problem = problem_of({"w": 1, "b": 1}, [0, 4, 8])
    specs = ({"w": P(None, "data"), "b": P("data")}, None, None)
    # Plain JAX is not sharded here. Both sides differ from a run in float64 by up to 5e-6, and
    # in float64 they agree within 1e-13.
    step = assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh, tolerance=3e-5, in_specs=specs)
    assert traced_of(step, problem).argument_bounds[:2] == [Bounds(1, (0, 4, 8)), None]


# --- Arrays, plan files and checkpoints -------------------------------------------------


@functools.cache
def trained() -> tuple[Any, Problem, Any]:
    problem = problem_of({"w": 1, "b": 1}, ENDS)
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(4)), make_mesh(4))
    return step, problem, step(problem.params, ADAM.init(problem.params), problem.batch)


def test_one_array() -> None:
    _, problem, (params, *_) = trained()
    w = params["w"]
    assert w.shape == (models.D, LAYERS, models.D) and w.mpmd_idxs == (0, 1, 2, 3)
    assert w.sharding.spec == P(None, "stage") and not w.is_mpmd_replicated
    host = np.asarray(w)
    assert host.shape == w.shape and not np.array_equal(host, problem.params["w"])
    columns = list(w._partially_addressable_arrays.values())
    assert [a.shape for a in columns] == [(models.D, 2, models.D)] * 4
    np.testing.assert_array_equal(np.concatenate(columns, 1), host)
    for shard in w.addressable_shards:
        np.testing.assert_array_equal(shard.data, host[shard.index])
    np.testing.assert_array_equal(w[:, 3], host[:, 3])
    np.testing.assert_array_equal(w.copy(), host)


def test_steps_that_cut_it_otherwise_take_it() -> None:
    _, problem, (params, *_) = trained()
    other = problem_of({"w": 1, "b": 1}, [0, 3, 8])
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(other, jaxpp.Std1F1B(2)), make_mesh(2))
    host = jax.tree.map(np.asarray, params)
    state = ADAM.init(problem.params)
    ours, theirs = (step(p, state, problem.batch)[0] for p in (params, host))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_weights_are_made_on_the_ranks_that_take_them() -> None:
    step, problem, _ = trained()
    state = ADAM.init(problem.params)
    where = step.compile(problem.params, state, problem.batch).compiled.in_shardings[0][0]

    def init(seed: Any) -> Any:
        return jax.tree.map(lambda w: seed * jnp.ones(w.shape), problem.params)

    make = jaxpp.mpmd_jit_with_loop(init, make_mesh(4), out_shardings=where)
    made = make(jnp.float32(0.5))
    assert jax.tree.map(lambda w: w.sharding, made) == where
    assert [part.ranks for part in made["w"]._placement.parts] == [(0,), (1,), (2,), (3,)]
    np.testing.assert_array_equal(made["w"], np.full_like(problem.params["w"], 0.5))
    step(made, state, problem.batch)


def test_a_plan_in_a_file(tmp_path: pathlib.Path) -> None:
    step, problem, (params, *_) = trained()
    state = ADAM.init(problem.params)
    path = tmp_path / "step.jpp"
    step.compile(problem.params, state, problem.batch).save(path)
    loaded = jaxpp.load(path, make_mesh(4))
    again, *_ = loaded(problem.params, state, problem.batch)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_a_checkpoint(tmp_path: pathlib.Path) -> None:
    _, _, (params, *_) = trained()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", params)
        structs = jax.tree.map(ocp.utils.to_shape_dtype_struct, params)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state", structs)
    jax.tree.map(np.testing.assert_array_equal, found, params)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_all_stages(impl: str) -> None:
    """The arrays that hold key data have an additional axis."""

    def step(keys: Any, batch: Any) -> Any:
        def one(mb: Any) -> Any:
            x = mb["x"]
            for s in range(4):
                x = jnp.tanh(x) + jax.random.normal(keys[0, s], x.shape)
                x = jaxpp.mark_stage_end(x)
            return x.sum()

        return keys, jaxpp.treduce(one, batch, jaxpp.Std1F1B(4), operation=jaxpp.Add)

    keys = jax.random.split(jax.random.key(0, impl=impl), (600, 4))
    pipelined = jaxpp.mpmd_jit_with_loop(step, make_mesh(4))
    found, total = pipelined(keys, models.batch(2))
    assert len(found._placement.parts) == 4
    np.testing.assert_array_equal(physical_array(found), physical_array(keys))
    assert float(pipelined(found, models.batch(2))[1]) == float(total)
