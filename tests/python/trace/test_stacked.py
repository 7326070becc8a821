"""Weights of all layers in one leaf `[layers, ...]`: each rank holds the rows of its stages."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_trains_equal, make_mesh, pipelined_step
from jaxpp.placements import physical_array
from jaxpp.trace.boxes import Bounds

LAYERS = 8
ADAM = optax.adamw(1e-2, eps=1e-3)


def stacked(count: int = LAYERS) -> Any:
    return jax.tree.map(lambda *ws: jnp.stack(ws), *models.weights(count))


def one_by_one(p: Any, x: Any, start: int, stop: int) -> Any:
    for k in range(start, stop):
        x = models.layer(jax.tree.map(lambda a, k=k: a[k], p), x)
    return x


def by_scan(p: Any, x: Any, start: int, stop: int) -> Any:
    rows = jax.tree.map(lambda a: a[start:stop], p)
    return jax.lax.scan(lambda x, q: (models.layer(q, x), None), x, rows)[0]


def in_bf16(p: Any, x: Any, start: int, stop: int) -> Any:
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), p)
    return one_by_one(low, x.astype(jnp.bfloat16), start, stop).astype(jnp.float32)


def rematerialised(p: Any, x: Any, start: int, stop: int) -> Any:
    return jax.checkpoint(lambda p, x: by_scan(p, x, start, stop))(p, x)


def problem_of(stage: Callable[..., Any], stages: int = 4, optimizer: Any = ADAM) -> Problem:
    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x, rows = mb["x"], LAYERS // stages
        for s in range(stages):
            x = mark(stage(params, x, s * rows, (s + 1) * rows))
        return models.mse(x, mb["y"]), ()

    return Problem(loss, stacked(), models.batch(4), optimizer)


def traced_of(step: Any, problem: Problem) -> Any:
    state = problem.optimizer.init(problem.params)
    return step.trace_and_place(problem.params, state, problem.batch)


def cut_arguments(step: Any, problem: Problem) -> int:
    return sum(b is not None for b in traced_of(step, problem).argument_bounds)


OPTIMIZERS = {
    "adam": ADAM,
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), ADAM),
    "if finite": optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), ADAM), 3),
    "every second": optax.MultiSteps(ADAM, 2).gradient_transformation(),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "stage", [one_by_one, by_scan, rematerialised], ids=lambda s: s.__name__
)
def test_trains_as_plain_jax(name: str, stage: Any, any_mesh2: Any) -> None:
    problem = problem_of(stage, 2, OPTIMIZERS[name])
    step = assert_trains_equal(
        problem,
        jaxpp.ZeroBubble(2),
        any_mesh2,
        tolerance=3e-5,
        in_specs=None,
    )
    moments = 3 if name == "every second" else 2
    assert cut_arguments(step, problem) == 2 * (1 + moments)


@pytest.mark.parametrize("schedule", [jaxpp.Interleaved1F1B(4, 2), jaxpp.ZeroBubbleV(4, 2)])
def test_several_stages_a_rank(schedule: Any, mesh2: Any) -> None:
    problem = problem_of(one_by_one)
    step = assert_trains_equal(problem, schedule, mesh2, donate_argnums=(0, 1), in_specs=None)
    assert traced_of(step, problem).argument_bounds[0] == Bounds(0, (0, 2, 4, 6, 8))


def test_weights_that_are_cast_first(mesh4: Any) -> None:
    # Not Adam: its first step depends on the signs of gradients, which rounding may make 0.
    problem = problem_of(in_bf16, optimizer=optax.sgd(1e-1))
    step = assert_trains_equal(problem, jaxpp.Std1F1B(4), mesh4, tolerance=1e-2, in_specs=None)
    assert cut_arguments(step, problem) == 2


def muon(weights: Any) -> optax.GradientTransformation:
    # Of each matrix, not of the array of all layers.
    axes = {"w": optax.contrib.MuonDimensionNumbers(-2, -1), "b": None}
    by_layer = [axes] * LAYERS if isinstance(weights, list) else axes
    return optax.contrib.muon(1e-2, muon_weight_dimension_numbers=by_layer)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: ADAM,
        lambda _: optax.adafactor(1e-2),
        lambda _: optax.lamb(1e-2),
        lambda _: optax.contrib.prodigy(),
        muon,
    ],
    ids=["adamw", "adafactor", "lamb", "prodigy", "muon"],
)
def test_memory_is_that_of_weights_by_layer(make: Any, mesh4: Any) -> None:
    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for k in range(LAYERS):
            p = params[k] if isinstance(params, list) else {n: w[k] for n, w in params.items()}
            x = models.layer(p, x)
            if k % 2:
                x = mark(x)
        return models.mse(x, mb["y"]), ()

    lists = models.weights(LAYERS, 64)
    peaks = []
    for params in (lists, jax.tree.map(lambda *ws: jnp.stack(ws), *lists)):
        problem = Problem(loss, params, models.batch(4, d=64), make(params))
        step = assert_trains_equal(problem, jaxpp.Std1F1B(4), mesh4, steps=1)
        summary = traced_of(step, problem).plan.summary()
        peaks.append(max(rank.peak_bytes for rank in summary))
    assert peaks[1] < 1.1 * peaks[0]


def test_frozen_rows_stay_on_their_ranks(mesh4: Any) -> None:
    problem = problem_of(one_by_one)
    trained = problem.loss
    problem.params = {"frozen": problem.params, "scale": jnp.ones(8)}

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        mb = {**mb, "x": mb["x"] * params["scale"].sum() / 8}
        return trained(jax.lax.stop_gradient(params["frozen"]), mb, i, mark)

    problem.loss = loss
    step = assert_trains_equal(problem, jaxpp.Std1F1B(4), mesh4, in_specs=None)
    assert cut_arguments(step, problem) == 2 * 3
    state = problem.optimizer.init(problem.params)
    summary = step.compile(problem.params, state, problem.batch).cost_summary()
    assert max(link.bytes for link in summary.links) == problem.batch["x"].nbytes


# --- What the user sees -----------------------------------------------------------------


def trained(mesh: Any, **options: Any) -> tuple[Any, Problem, Any]:
    problem = problem_of(one_by_one)
    step = assert_trains_equal(problem, jaxpp.Std1F1B(4), mesh, steps=1, **options)
    state = problem.optimizer.init(problem.params)
    return step, problem, step(problem.params, state, problem.batch)


def test_one_array(mesh4: Any) -> None:
    _, problem, (params, *_) = trained(mesh4)
    w = params["w"]
    assert w.shape == (LAYERS, models.D, models.D) and w.mpmd_idxs == (0, 1, 2, 3)
    assert not w.is_mpmd_replicated
    host = np.asarray(w)
    assert host.shape == w.shape and not np.array_equal(host, problem.params["w"])
    rows = w._partially_addressable_arrays
    assert [a.shape[0] for a in rows.values()] == [2, 2, 2, 2]
    np.testing.assert_array_equal(np.concatenate(list(rows.values())), host)
    np.testing.assert_array_equal(w.first_mpmd_replica, host)
    np.testing.assert_array_equal(w[3], host[3])
    w.block_until_ready()
    w.delete()
    assert w.is_deleted()
    with pytest.raises(jaxpp.JaxppError, match="deleted"):
        np.asarray(w)


def test_steps_that_cut_it_otherwise_take_it(mesh4: Any, mesh2: Any) -> None:
    _, problem, (params, state, *_) = trained(mesh4)
    other = problem_of(one_by_one, 2)
    evaluate = jaxpp.mpmd_jit_with_loop(
        lambda params, batch: jaxpp.treduce(
            lambda mb: other.loss(params, mb, 0, jaxpp.mark_stage_end)[0],
            batch,
            schedule=jaxpp.Std1F1B(2),
            operation=jaxpp.Add,
        ),
        mpmd_mesh=mesh2,
    )
    expected = sum(
        other.loss(
            jax.tree.map(np.asarray, params),
            jax.tree.map(lambda a, k=k: a[k], other.batch),
            0,
            lambda x: x,
        )[0]
        for k in range(4)
    )
    assert float(evaluate(params, problem.batch)) == pytest.approx(float(expected), rel=1e-5)


def test_donated_arrays_are_gone_and_others_stay(mesh4: Any) -> None:
    step, problem, (params, state, *_) = trained(mesh4, donate_argnums=(0, 1))
    again, *_ = step(params, state, problem.batch)
    assert params["w"].is_deleted() and not again["w"].is_deleted()
    with pytest.raises(jaxpp.JaxppError, match="deleted or donated"):
        step(params, state, problem.batch)


def noisy_step(mesh: Any) -> Any:
    """(keys, batch) -> (keys, sum); each stage draws from its row of `keys`."""
    stages = mesh.mpmd_dim

    def step(keys: Any, batch: Any) -> Any:
        def one(mb: Any) -> Any:
            x = mb["x"]
            for s in range(stages):
                x = jnp.tanh(x) + jax.random.normal(keys[s][0], x.shape)
                x = jaxpp.mark_stage_end(x)
            return x.sum()

        schedule = jaxpp.Std1F1B(stages)
        total = jaxpp.treduce(one, batch, schedule=schedule, operation=jaxpp.Add)
        return keys, total

    return jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_of_all_stages(impl: str, mesh2: Any, mesh4: Any) -> None:
    keys = jax.random.split(jax.random.key(0, impl=impl), (4, 600))
    step, batch = noisy_step(mesh4), models.batch(2)
    found, total = step(keys, batch)

    assert not found._placement.is_whole
    assert found.shape == (4, 600) and found.dtype == keys.dtype
    pickled = pickle.loads(pickle.dumps(found))
    for copy in (found, found.first_mpmd_replica, found.copy(), pickled):
        assert copy.dtype == keys.dtype
        np.testing.assert_array_equal(physical_array(copy), physical_array(keys))
    np.testing.assert_array_equal(physical_array(found[2]), physical_array(keys[2]))
    parts = found._partially_addressable_arrays.values()
    assert all(part.dtype == keys.dtype for part in parts)
    assert float(step(found, batch)[1]) == float(total)
    of_two = noisy_step(mesh2)
    assert float(of_two(found, batch)[1]) == float(of_two(keys, batch)[1])


@pytest.mark.parametrize(
    ("spec", "cut"),
    [(P(), Bounds(0, (0, 4, 8))), (P(None, "data"), Bounds(0, (0, 4, 8))), (P("data"), None)],
    ids=str,
)
def test_a_leaf_whose_sharding_is_constrained(spec: Any, cut: Bounds | None) -> None:
    mesh = make_mesh(2, data=2)
    sharding = NamedSharding(mesh.lowering_mesh(), spec)

    def stage(p: Any, x: Any, start: int, stop: int) -> Any:
        placed = {**p, "w": jax.lax.with_sharding_constraint(p["w"], sharding)}
        return by_scan(placed, x, start, stop)

    problem = problem_of(stage, 2)
    step = assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh, in_specs=None)
    bounds = traced_of(step, problem).argument_bounds[:2]  # of "b" and "w"
    assert bounds == [Bounds(0, (0, 4, 8)), cut]


def test_a_checkpoint_of_rows_that_two_ranks_hold(tmp_path: pathlib.Path) -> None:
    mesh = make_mesh(3)

    def step(w: Any, xs: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w[0]))
            x = jaxpp.mark_stage_end(jnp.tanh(jnp.tanh(x @ w[1]) @ w[2]))
            return jaxpp.mark_stage_end(jnp.tanh(x @ w[2]).sum())

        def one(x: Any) -> Any:
            return jax.grad(loss)(w, x)

        return w - 0.1 * jaxpp.treduce(one, xs, jaxpp.Std1F1B(3), operation=jaxpp.Add)

    w = jaxpp.mpmd_jit_with_loop(step, mesh)(jnp.ones((3, 4, 4)), jnp.ones((4, 2, 4)))
    assert [part.ranks for part in w._placement.parts] == [(0,), (1,), (1, 2)]
    shards = 4 * mesh.lowering_mesh().size
    assert [shard.data.shape for shard in w.addressable_shards] == [(1, 4, 4)] * shards
    for shard in w.addressable_shards:
        np.testing.assert_array_equal(shard.data, np.asarray(w)[shard.index])
    with ocp.StandardCheckpointer() as checkpointer:  # refuses shards of different shapes
        checkpointer.save(tmp_path / "state", {"w": w})
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "state")
    np.testing.assert_array_equal(found["w"], np.asarray(w))


# --- Leaves that are not cut ------------------------------------------------------------


def test_a_leaf_that_a_stage_needs_whole(mesh2: Any) -> None:
    def stage(p: Any, x: Any, start: int, stop: int) -> Any:
        return one_by_one(p, x, start, stop) + 1e-3 * jnp.sort(p["b"].ravel())[0]

    problem = problem_of(stage, 2)
    step = assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh2)
    bounds = traced_of(step, problem).argument_bounds[:2]  # of "b" and "w"
    assert bounds == [None, Bounds(0, (0, 4, 8))]


def test_rows_that_the_data_chooses(mesh2: Any) -> None:
    def stage(p: Any, x: Any, start: int, stop: int) -> Any:
        at = start + (x[0, 0] > 0).astype(jnp.int32)
        return models.layer(jax.tree.map(lambda a: a[at], p), x)

    problem = problem_of(stage, 2)
    step = assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh2)
    assert cut_arguments(step, problem) == 0


def test_rows_that_the_specs_cut() -> None:
    mesh = make_mesh(2, data=2)
    problem = problem_of(one_by_one, 2)
    specs = (jax.tree.map(lambda _: P("data"), problem.params), None, None)
    step = assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh, in_specs=specs)
    assert traced_of(step, problem).argument_bounds[:2] == [None, None]


def test_a_result_stays_whole_if_the_next_step_takes_it_whole() -> None:
    """The specs cut one leaf along its layers, and ranks hold rows of the other."""
    mesh = make_mesh(2, data=2)
    problem = problem_of(one_by_one, stages=2, optimizer=optax.sgd(0.1))
    specs = {"w": P(None, "data"), "b": P("data")}
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(2)), mesh, in_specs=(specs, None, None)
    )
    traced = traced_of(step, problem)
    (taken, *_), _ = traced.in_shardings
    returned = traced.out_shardings[0]
    assert returned == taken
    assert [cut is None for cut in traced.argument_bounds[:2]] == [True, False]
    assert traced.result_bounds[:2] == traced.argument_bounds[:2]
