"""A jax.lax.scan over microbatches as the loop."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import assert_equal, make_mesh

WS, XS = m.params(2), m.batch(4)


def run(step: Any, *args: Any, ranks: int = 2, **options: Any) -> Any:
    options.setdefault("schedule", jaxpp.Std1F1B(ranks))
    return jaxpp.mpmd_jit_with_loop(step, make_mesh(ranks), **options)(*args)


def assert_as_plain(step: Any, *args: Any, **options: Any) -> None:
    """The marks do nothing under plain jax.jit."""
    assert_equal(run(step, *args, **options), jax.jit(step)(*args))


def gradients(ws: Any, x: Any) -> Any:
    return jax.value_and_grad(m.loss)(ws, x)


def sums(ws: Any, xs: Any) -> Any:
    """Gradient accumulation as most trainers write it."""

    def add(total: Any, x: Any) -> Any:
        loss, grads = gradients(ws, x)
        return jax.tree.map(jnp.add, total, (loss, grads)), loss

    (loss, grads), losses = jax.lax.scan(add, (0.0, jax.tree.map(jnp.zeros_like, ws)), xs)
    return loss, [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], losses


@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_sums(microbatches: int) -> None:
    assert_as_plain(sums, WS, m.batch(microbatches))


def test_an_iteration_under_jit() -> None:
    @jax.jit
    def add(a: Any, b: Any) -> Any:
        return jax.tree.map(jnp.add, a, b)

    def step(ws: Any, xs: Any) -> Any:
        @jax.jit
        def one(carry: Any, x: Any) -> Any:
            ws, total = carry
            return (ws, add(total, gradients(ws, x)[1])), None

        return jax.lax.scan(one, (ws, jax.tree.map(jnp.zeros_like, ws)), xs)[0][1]

    assert_as_plain(step, WS, XS)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_a_scan_in_a_call(around: Any) -> None:
    assert_as_plain(lambda ws, xs: around(sums)(ws, xs), WS, XS)


def test_sums_from_a_value() -> None:
    def step(ws: Any, xs: Any, start: Any) -> Any:
        return jax.lax.scan(lambda c, x: (gradients(ws, x)[0] + c + 1.0, None), start, xs)

    assert_as_plain(step, WS, XS, 3.0)


def test_carries_of_each_kind() -> None:
    def step(ws: Any, xs: Any) -> Any:
        def one(carry: Any, x: Any) -> Any:
            ws, key, count, largest, total, _ = carry
            key, own = jax.random.split(key)
            x = x + count * jax.random.normal(own, x.shape)
            loss, grads = gradients(ws, x)
            largest = jnp.maximum(jnp.abs(grads[0]), largest)
            total = jax.tree.map(lambda g, t: g / 4 + t, grads, total)
            return (ws, key, count + 2, largest, total, loss), x[0]

        zeros = jax.tree.map(jnp.zeros_like, ws)
        key = jax.random.key(0)
        first = (ws, key, 1, zeros[0] + 0.01, zeros, jnp.float32(0))
        carry, rows = jax.lax.scan(one, first, xs, reverse=True)
        return carry[:1], jax.random.key_data(carry[1]), carry[2:], rows

    assert_as_plain(step, WS, XS)


def test_fori_loop() -> None:
    def step(ws: Any, xs: Any) -> Any:
        def one(i: Any, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradients(ws, xs[i])[1])

        return jax.lax.fori_loop(0, 4, one, jax.tree.map(jnp.zeros_like, ws))

    assert_as_plain(step, WS, XS)


def test_two_scans() -> None:
    def step(ws: Any, xs: Any) -> Any:
        _, ws, losses = sums(ws, xs)
        return losses, sums(ws, xs)

    assert_as_plain(step, WS, XS)


def test_counter_of_the_stages_own_code() -> None:
    """A counter that comes out of the same call as the loss."""

    def step(ws: Any, xs: Any) -> Any:
        @jax.jit
        def count_and_lose(n: Any, x: Any) -> Any:
            return n + 1, gradients(ws, x * n)

        def one(carry: Any, x: Any) -> Any:
            n, total = carry
            n, (loss, grads) = count_and_lose(n, x)
            return (n, jax.tree.map(jnp.add, total, grads)), loss

        return jax.lax.scan(one, (jnp.float32(0), jax.tree.map(jnp.zeros_like, ws)), xs)

    assert_as_plain(step, WS, XS)


def test_with_an_effect(capfd: Any) -> None:
    def step(ws: Any, xs: Any) -> Any:
        def one(carry: Any, x: Any) -> Any:
            n, total = carry
            jax.debug.print("microbatch {n}", n=n)
            loss, _ = gradients(ws, x)
            return (n + 1, total + loss), None

        return jax.lax.scan(one, (0, 0.0), xs)

    (count, _), _ = run(step, WS, XS)
    jax.effects_barrier()
    assert int(count) == 4
    found = sorted(capfd.readouterr().out.split("\n"))
    assert [line for line in found if line] == [f"microbatch {n}" for n in range(4)]


@pytest.mark.parametrize("axes", [{}, {"data": 2}, {"data": 2, "model": 2}])
def test_same_plan_as_with_treduce(axes: Any) -> None:
    """A scan costs nothing more: the same tasks and transfers, and each gradient is reduced
    once."""
    optimizer = optax.adam(1e-2)

    def scan(ws: Any, xs: Any) -> Any:
        def add(total: Any, x: Any) -> Any:
            return jax.tree.map(jnp.add, total, gradients(ws, x)), None

        zeros = 0.0, jax.tree.map(jnp.zeros_like, ws)
        return jax.lax.scan(add, zeros, xs)[0]

    def reduce(ws: Any, xs: Any) -> Any:
        run_one = lambda x: gradients(ws, x)  # noqa: E731
        return jaxpp.treduce(run_one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    def training(sums: Any, **options: Any) -> Any:
        def step(ws: Any, state: Any, xs: Any) -> Any:
            loss, grads = sums(ws, xs)
            updates, state = optimizer.update(grads, state, ws)
            return optax.apply_updates(ws, updates), state, loss

        batch = jax.sharding.PartitionSpec(None, "data" if axes else None)
        mesh = make_mesh(2, **axes)
        in_specs = (None, None, batch)
        made = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=in_specs, **options)
        return made.compile(WS, optimizer.init(WS), XS)

    ours, theirs = training(scan, schedule=jaxpp.Std1F1B(2)), training(reduce)
    costs = [step.cost_summary() for step in (ours, theirs)]
    assert costs[0].links == costs[1].links
    assert costs[0].collectives == costs[1].collectives
    assert [(r.tasks, r.peak_bytes) for r in costs[0].ranks] == [
        (r.tasks, r.peak_bytes) for r in costs[1].ranks
    ]
    args = WS, optimizer.init(WS), XS
    for a, b in zip(jax.tree.leaves(ours(*args)), jax.tree.leaves(theirs(*args)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
