"""Control flow outside the loops: every rank runs its own part of it."""

from __future__ import annotations

import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
import models
from equality import (
    Problem,
    assert_close,
    assert_equal,
    assert_trains_equal,
    make_mesh,
    pipelined_step,
)

SCHEDULE = jaxpp.Std1F1B(2)
ADAM = optax.adamw(1e-2, eps=1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)


def of_updates(update: Callable[..., Any], init: Any = lambda params: ()) -> Any:
    return optax.GradientTransformation(init, update)


def by_scan(grads: Any, state: Any, params: Any) -> Any:
    def body(params: Any, _: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), None

    after, _ = jax.lax.scan(body, params, None, length=3)
    return jax.tree.map(jnp.subtract, after, params), state


def by_while(grads: Any, state: Any, params: Any) -> Any:
    def body(carry: Any) -> Any:
        return carry[0] + 1, jax.tree.map(lambda p, g: p - 0.01 * g, carry[1], grads)

    _, after = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, params))
    return jax.tree.map(jnp.subtract, after, params), state


def by_switch(grads: Any, count: Any, params: Any) -> Any:
    branches = [
        lambda: jax.tree.map(lambda g: -0.1 * g, grads),
        lambda: jax.tree.map(jnp.zeros_like, grads),
        lambda: jax.tree.map(lambda p: -0.1 * p, params),
    ]
    return jax.lax.switch(count % 4, branches), count + 1


OPTIMIZERS = {
    "if finite": optax.apply_if_finite(ADAM, 3),
    "clipped, if finite": optax.apply_if_finite(CLIPPED, 3),
    "every second": optax.MultiSteps(ADAM, 2).gradient_transformation(),
    "nested": optax.apply_if_finite(optax.MultiSteps(CLIPPED, 2).gradient_transformation(), 3),
    "scan": of_updates(by_scan),
    "while": of_updates(by_while),
    "switch": of_updates(by_switch, lambda params: jnp.int32(0)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_stays_with_its_rank(name: str, any_mesh2: Any) -> None:
    problem = models.mlp([1, 1], 4)
    problem.optimizer = OPTIMIZERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = assert_trains_equal(problem, SCHEDULE, any_mesh2, steps=4, tolerance=3e-5)
    state = problem.optimizer.init(problem.params)
    params, state, *_ = step(problem.params, state, problem.batch)
    for tree in (params, state):
        placed = {leaf.mpmd_idxs for leaf in jax.tree.leaves(tree) if leaf.ndim == 2}
        assert placed <= {(0,), (1,)}
    assert [leaf.mpmd_idxs for leaf in jax.tree.leaves(params)] == [(0,), (0,), (1,), (1,)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("counting_stage", [0, 1, 2])
def test_small_weights_stay_with_their_rank(counting_stage: int) -> None:
    """A stage counts the number that divides the gradients. All ranks return the norms of
    gradients and weights."""
    mesh = make_mesh(3)
    problem = models.mlp([1, 1, 1], 4)
    weights, batch = problem.params, problem.batch

    def loss(params: Any, mb: Any, mark: Any) -> Any:
        x, count = mb["x"], 0.0
        for stage, p in enumerate(params):
            x = models.layer(p, x)
            if stage == counting_stage:
                count = jnp.sum(x > 0).astype(jnp.float32)
            x = mark(x)
        return jnp.sum((x - mb["y"]) ** 2), count

    def step(reduce: Any, mark: Any) -> Any:
        def train(params: Any, state: Any, batch: Any) -> Any:
            def one(mb: Any) -> Any:
                return jax.value_and_grad(loss, has_aux=True)(params, mb, mark)

            (total, count), grads = reduce(one, batch)
            grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1), grads)
            updates, state = ADAM.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            norms = optax.global_norm(grads), optax.global_norm(params)
            return params, state, (total / count, norms)

        return train

    everywhere = jaxpp.MpmdSharding(mesh, range(3), jax.sharding.PartitionSpec())
    ours = jaxpp.mpmd_jit_with_loop(
        step(
            lambda one, xs: jaxpp.treduce(one, xs, jaxpp.Std1F1B(3), operation=jaxpp.Add),
            jaxpp.mark_stage_end,
        ),
        mesh,
        out_shardings=(None, None, everywhere),
    )
    plain = jax.jit(
        step(
            lambda one, xs: jax.tree.map(lambda x: x.sum(0), jax.lax.map(one, xs)), lambda x: x
        )
    )
    a = b = (weights, ADAM.init(weights))
    for _ in range(2):
        *a, metrics = ours(*a, batch)
        *b, expected = plain(*b, batch)
        assert_equal(metrics, expected)
        assert_close(a, b, 1e-4, "state")
        assert all(x.mpmd_idxs == (0, 1, 2) for x in jax.tree.leaves(metrics))
        for leaf in jax.tree.leaves(a):
            assert len(leaf.mpmd_idxs) == 1 or leaf.ndim == 0


def test_a_gradient_that_is_not_finite_is_skipped(mesh2: Any) -> None:
    problem = models.mlp([1, 1], 4)
    problem.optimizer = OPTIMIZERS["clipped, if finite"]
    bad = dict(problem.batch, x=problem.batch["x"].at[1, 0, 0].set(jnp.nan))
    step = assert_trains_equal(problem, SCHEDULE, mesh2, steps=1)
    params = problem.params
    after, state, *_ = step(params, problem.optimizer.init(params), bad)
    assert int(state.notfinite_count) == 1
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_branch_that_is_not_taken_does_not_run(mesh2: Any) -> None:
    called = []

    def update(grads: Any, count: Any, params: Any) -> Any:
        def shout() -> Any:
            jax.debug.callback(lambda: called.append(1))
            return jax.tree.map(jnp.negative, grads)

        quiet = lambda: jax.tree.map(jnp.zeros_like, grads)  # noqa: E731
        return jax.lax.cond(count == 1, shout, quiet), count + 1

    problem = models.mlp([1, 1], 2)
    problem.optimizer = of_updates(update, lambda params: jnp.int32(0))
    step = assert_trains_equal(problem, SCHEDULE, mesh2, steps=1)
    called.clear()
    state = (problem.params, jnp.int32(0))
    counts = []
    for _ in range(3):
        *state, loss, _ = step(*state, problem.batch)
        float(loss)
        counts.append(len(called))
    assert counts == [0, 1, 1]


def test_a_loop_over_what_a_branch_chose(mesh2: Any) -> None:
    """The loop's parts run together, also if only the second one needs the branch."""

    def update(grads: Any, state: Any, params: Any) -> Any:
        norm = optax.global_norm(grads)
        scale = jax.lax.cond(norm > 1, lambda: 1 / norm, lambda: jnp.float32(1))
        halves = jax.lax.fori_loop(0, 3, lambda k, c: (c[0] * 0.5, c[1] * 0.9), (norm, scale))
        factor = 0.1 * halves[1] / (1 + halves[0])
        return jax.tree.map(lambda g: -factor * g, grads), state

    problem = models.mlp([1, 1], 2)
    problem.optimizer = of_updates(update)
    assert_trains_equal(problem, SCHEDULE, mesh2)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_that_a_branch_makes(impl: str, any_mesh2: Any) -> None:
    """One branch splits the keys from which the noise for both ranks' weights is drawn."""

    def update(grads: Any, key: Any, params: Any) -> Any:
        def noisy() -> Any:
            first = jax.tree.leaves(grads)[0].sum().astype(jnp.int32)
            after, *drawn = jax.random.split(jax.random.fold_in(key, 0 * first), 3)
            noise = [jax.random.normal(one) for one in drawn]
            updates = [
                jax.tree.map(lambda g, n=n: -0.1 * g * n, leaf)
                for leaf, n in zip(grads, noise, strict=True)
            ]
            return updates, after

        still = lambda: (jax.tree.map(jnp.zeros_like, grads), key)  # noqa: E731
        return jax.lax.cond(optax.global_norm(grads) > 1e-6, noisy, still)

    problem = models.mlp([1, 1], 2)
    key = jax.random.key(3, impl=impl)
    problem.optimizer = of_updates(update, lambda params: key)
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, SCHEDULE), mpmd_mesh=any_mesh2)
    _, found, *_ = step(problem.params, key, problem.batch)
    after = jax.random.split(jax.random.fold_in(key, 0), 3)[0]
    np.testing.assert_array_equal(
        jax.random.key_data(found.first_mpmd_replica), jax.random.key_data(after)
    )


def large(update: Callable[..., Any]) -> Problem:
    """Two stages with 160 kB of weights each."""

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for p in params:
            x = mark(models.layer(p, x) + 1e-6 * p["more"].sum())
        return models.mse(x, mb["y"]), ()

    params = [{**p, "more": jnp.ones(40_000)} for p in models.weights(2)]
    return Problem(loss, params, models.batch(2), of_updates(update))


def test_what_has_to_move_is_named(mesh2: Any) -> None:
    def sorted_together(grads: Any, state: Any, params: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            everything = jnp.concatenate([x.ravel() for x in jax.tree.leaves(carry)])
            order = jnp.sort(everything)[0]
            return jax.tree.map(lambda x: x - 1e-3 * order, carry), None

        both = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        after, _ = jax.lax.scan(body, both, None, length=2)
        return jax.tree.map(jnp.subtract, after, params), state

    with pytest.warns(UserWarning, match=r"test_outside.py:\d+: scan uses arrays that live"):
        assert_trains_equal(large(sorted_together), SCHEDULE, mesh2, steps=1)


# --- Scans in a stage -------------------------------------------------------------------


def scanned(body_wrap: Any, stage_wrap: Any, with_aux: bool = False) -> Problem:
    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        def body(x: Any, p: Any) -> Any:
            y = models.layer(p, x)
            return y, jnp.abs(y).max()

        def stage(p: Any, x: Any) -> Any:
            return jax.lax.scan(body_wrap(body), x, p)

        x, largest = mb["x"], []
        for p in params:
            x, each = stage_wrap(stage)(p, x)
            largest.append(each)
            x = mark(x)
        return models.mse(x, mb["y"]), largest if with_aux else ()

    stages = [
        jax.tree.map(lambda *ws: jnp.stack(ws), *models.weights(3, seed=s)) for s in (0, 1)
    ]
    return Problem(loss, stages, models.batch(4), aux_operation=jaxpp.Max if with_aux else ())


WRAPS = {
    "plain": (lambda f: f, lambda f: f),
    "checkpoint inside": (jax.checkpoint, lambda f: f),
    "checkpoint around": (lambda f: f, jax.checkpoint),
    "both": (jax.checkpoint, jax.checkpoint),
    "jit": (jax.jit, jax.jit),
}


def scans_by_task(step: Any, problem: Problem) -> dict[str, int]:
    compiled = step.compile(
        problem.params, problem.optimizer.init(problem.params), problem.batch
    )
    ops = compiled._traced.graph.ops
    tasks = compiled._traced.staged.tasks()
    return {
        task.name: sum(op in ops and ops[op].primitive.name == "scan" for op in task.ops)
        for task in tasks
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("wraps", WRAPS.values(), ids=WRAPS)
def test_weight_gradients_of_a_scan_can_wait(wraps: Any, any_mesh2: Any) -> None:
    problem = scanned(*wraps)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        step = assert_trains_equal(problem, jaxpp.ZeroBubble(2), any_mesh2)
    scans = scans_by_task(step, problem)
    assert scans["bwd_w_1"] == 1
    assert scans["bwd_i_1"] >= 1


def test_a_scan_is_one_scan_where_nothing_waits(
    mesh2: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    assert_trains_equal(scanned(*WRAPS["plain"]), jaxpp.Std1F1B(2), mesh2)
    text = (tmp_path / "bwd_1.mlir").read_text()
    assert text.count("stablehlo.while") == 1


def test_scan_with_results_of_every_layer(any_mesh2: Any) -> None:
    problem = scanned(*WRAPS["plain"], with_aux=True)
    reduce_aux = lambda aux: [np.max(a, 0) for a in aux]  # noqa: E731
    assert_trains_equal(problem, jaxpp.ZeroBubble(2), any_mesh2, reduce_aux=reduce_aux)


def test_gradients_that_can_not_wait_are_named(mesh2: Any) -> None:
    """A while loop computes the gradients of its input and its weights in one op, so the
    gradients of the weights cannot be delayed."""

    def backward(operands: Any, g: Any) -> Any:
        def turn(state: Any) -> Any:
            return state[0] + 1, jax.vjp(models.layer, *operands)[1](g)

        none = jax.tree.map(jnp.zeros_like, operands)
        return jax.lax.while_loop(lambda state: state[0] < 1, turn, (0, none))[1]

    apply = jax.custom_vjp(models.layer)
    apply.defvjp(lambda p, x: (models.layer(p, x), (p, x)), backward)

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for p in params:
            x = mark(apply(p, x))
        return models.mse(x, mb["y"]), ()

    problem = Problem(loss, models.weights(2), models.batch(4))
    with pytest.warns(UserWarning, match=r"test_outside.py:\d+: while gives input gradients"):
        assert_trains_equal(problem, jaxpp.ZeroBubble(2), mesh2)
