"""Results are left on the ranks that their shardings name, and computed there if possible."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import make_mesh

STAGES, WIDTH = 4, 8
OPTIMIZER = optax.adam(1e-2)


def listed(key: Any) -> Any:
    """One weight per stage; the last stage reuses the weight of the first."""
    weights = [jax.random.normal(k, (WIDTH, WIDTH)) for k in jax.random.split(key, STAGES - 1)]
    return weights, OPTIMIZER.init(weights)


def stacked(key: Any) -> Any:
    weights = jax.random.normal(key, (2 * STAGES, WIDTH, WIDTH))
    return weights, OPTIMIZER.init(weights)


def loss_of_listed(weights: Any, x: Any) -> Any:
    for w in [*weights, weights[0]]:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
    return jnp.mean(x**2)


def loss_of_stacked(weights: Any, x: Any) -> Any:
    for stage in range(STAGES):
        for w in weights[2 * stage : 2 * stage + 2]:
            x = jnp.tanh(x @ w)
        x = jaxpp.mark_stage_end(x)
    return jnp.mean(x**2)


KINDS = {"listed": (listed, loss_of_listed), "stacked": (stacked, loss_of_stacked)}
BATCH = np.linspace(-1, 1, 4 * 4 * WIDTH, dtype=np.float32).reshape(4, 4, WIDTH)


def train_step(loss: Any, mesh: Any, **options: Any) -> Any:
    def step(state: Any, batch: Any) -> Any:
        weights, opt_state = state

        def one(x: Any) -> Any:
            return jax.value_and_grad(loss)(weights, x)

        total, grads = jaxpp.treduce(
            one, batch, schedule=jaxpp.Std1F1B(STAGES), operation=jaxpp.Add
        )
        updates, opt_state = OPTIMIZER.update(grads, opt_state, weights)
        return (optax.apply_updates(weights, updates), opt_state), total

    return jaxpp.mpmd_jit_with_loop(step, mesh, **options)


def ranks_of(tree: Any) -> list[tuple[int, ...]]:
    return [leaf.mpmd_idxs for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_made_on_the_ranks_that_take_them(kind: str, any_mesh4: Any) -> None:
    """The placement follows from shapes alone, so no rank ever holds all weights."""
    init, loss = KINDS[kind]
    key = jax.random.key(0)
    step = train_step(loss, any_mesh4)
    compiled = step.compile(jax.eval_shape(init, key), BATCH).compiled
    where = compiled.in_shardings[0][0]
    make = jaxpp.mpmd_jit_with_loop(init, any_mesh4, out_shardings=where)
    state = make(key)
    found = [leaf.sharding for leaf in jax.tree.leaves(state)]
    assert found == jax.tree.leaves(where)
    expected = jax.jit(init)(key)
    for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(expected))
    peaks = [rank.peak_bytes for rank in make.compile(key).compiled.cost_summary().ranks]
    assert max(peaks) < 0.5 * whole
    ours, _ = step(state, BATCH)
    theirs, _ = step(expected, BATCH)
    assert ranks_of(ours) == ranks_of(state)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_loss_on_the_ranks_that_are_named(any_mesh4: Any) -> None:
    weights = [np.eye(WIDTH, dtype=np.float32)] * (STAGES - 1)
    state = (weights, OPTIMIZER.init(weights))
    for ranks in ((0,), (1, 3), tuple(range(STAGES)), (3, 0)):
        sharding = jaxpp.MpmdSharding(any_mesh4, ranks, P())
        step = train_step(loss_of_listed, any_mesh4, out_shardings=(None, sharding))
        new, total = step(state, BATCH)
        assert total.mpmd_idxs == tuple(sorted(ranks))
        assert ranks_of(new[0]) == [(0, 3), (1,), (2,)]
        expected = sum(loss_of_listed(weights, x) for x in BATCH)
        np.testing.assert_allclose(total, expected, rtol=1e-6)


def test_one_value_left_twice(any_mesh4: Any) -> None:
    def step(x: Any) -> Any:
        return x * 2, x * 2, x, x + 1

    def on(*ranks: int) -> Any:
        return jaxpp.MpmdSharding(any_mesh4, ranks, P())

    out = (on(1), on(2, 3), on(3), on(0))
    found = jaxpp.mpmd_jit_with_loop(step, any_mesh4, out_shardings=out)(jnp.ones(3))
    assert ranks_of(found) == [(1,), (2, 3), (3,), (0,)]
    for ours, theirs in zip(found, step(np.ones(3, np.float32)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_sharding_that_names_no_ranks_leaves_them_open(any_mesh4: Any) -> None:
    plain = NamedSharding(any_mesh4.lowering_mesh(), P())
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, any_mesh4, out_shardings=plain)
    assert step(jnp.ones(3)).mpmd_idxs == (0, 1, 2, 3)


def test_steps_follow_each_other_wherever_results_are_left(any_mesh2: Any) -> None:
    """The next step moves its arguments to the ranks that need them."""
    swapped = [jaxpp.MpmdSharding(any_mesh2, (rank,), P()) for rank in (1, 0)]

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    def step(weights: Any, batch: Any) -> Any:
        grads = jaxpp.treduce(
            lambda x: jax.grad(loss)(weights, x), batch, jaxpp.Std1F1B(2), operation=jaxpp.Add
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    weights = [np.eye(WIDTH, dtype=np.float32)] * 2
    ours = theirs = weights
    there = jaxpp.mpmd_jit_with_loop(step, any_mesh2, out_shardings=swapped)
    here = jaxpp.mpmd_jit_with_loop(step, any_mesh2)
    for _ in range(3):
        ours, theirs = there(ours, BATCH), here(theirs, BATCH)
        assert ranks_of(ours) == [(1,), (0,)]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_ranks_that_the_mesh_has_not() -> None:
    sharding = jaxpp.MpmdSharding(make_mesh(4), (3,), P())
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, make_mesh(2), out_shardings=sharding)
    with pytest.raises(
        jaxpp.JaxppError, match=r"expected ranks below 2, found .* ranks \[3\]"
    ) as caught:
        step(jnp.ones(3))
    assert caught.value.code == "sharding"
