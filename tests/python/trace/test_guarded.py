"""Optimizer updates under a condition that all ranks know: each rank holds only its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
from equality import make_mesh

ROWS, WIDTH = 2, 40
ADAM = optax.adam(1e-3)
Update = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any]]


def apply(optimizer: Any, grads: Any, params: Any, state: Any) -> tuple[Any, Any]:
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def if_loss_is_finite(grads: Any, params: Any, state: Any, loss: jax.Array) -> tuple[Any, Any]:
    return jax.lax.cond(
        jnp.isfinite(loss), lambda: apply(ADAM, grads, params, state), lambda: (params, state)
    )


def where_loss_is_finite(
    grads: Any, params: Any, state: Any, loss: jax.Array
) -> tuple[Any, Any]:
    new = apply(ADAM, grads, params, state)
    return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), new, (params, state))


def of_optax(optimizer: Any) -> tuple[Any, Update]:
    return optimizer, lambda grads, params, state, _: apply(optimizer, grads, params, state)


GUARDS: dict[str, tuple[Any, Update]] = {
    "apply_if_finite": of_optax(optax.apply_if_finite(ADAM, 3)),
    "clipped": of_optax(
        optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), ADAM), 3)
    ),
    "every second": of_optax(optax.MultiSteps(ADAM, 2)),
    "cond on the loss": (ADAM, if_loss_is_finite),
    "where on the loss": (ADAM, where_loss_is_finite),
}


def guarded_step(update: Update, stages: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The pipelined step, and the same function for plain JAX."""

    def loss_fn(params: Any, x: jax.Array, mark: Any) -> jax.Array:
        for s in range(stages):
            rows = jax.tree.map(lambda a, s=s: a[s * ROWS : (s + 1) * ROWS], params)
            x = jax.lax.scan(
                lambda x, p: (jnp.tanh(x @ p["w"] + p["b"]) * p["s"], None), x, rows
            )[0]
            x = mark(x)
        return jnp.mean(x**2)

    def pipelined(params: Any, state: Any, xs: jax.Array) -> Any:
        loss, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss_fn)(params, x, jaxpp.mark_stage_end),
            xs,
            schedule=jaxpp.Std1F1B(stages),
            operation=jaxpp.Add,
        )
        return *update(grads, params, state, loss), loss

    def plain(params: Any, state: Any, xs: jax.Array) -> Any:
        terms = [jax.value_and_grad(loss_fn)(params, x, lambda x: x) for x in xs]
        loss, grads = jax.tree.map(lambda *a: sum(a), *terms)
        return *update(grads, params, state, loss), loss

    return pipelined, plain


def problem(optimizer: Any, stages: int) -> tuple[Any, Any, jax.Array]:
    """Leaves above and below the planner's threshold for small values, one with scalar rows."""
    w, x = jax.random.split(jax.random.key(stages))
    params = {
        "w": jax.random.normal(w, (ROWS * stages, WIDTH, WIDTH)) / 6,
        "b": jnp.zeros((ROWS * stages, WIDTH)),
        "s": jnp.ones((ROWS * stages,)),
    }
    return params, optimizer.init(params), jax.random.normal(x, (4, 8, WIDTH))


def ranks_of_rows(values: Any, bounds_of_leaves: Any) -> list[tuple[int, ...]]:
    parts, found = iter(values), []
    for bounds in bounds_of_leaves:
        ranks = [tuple(next(parts).ranks) for _ in range(len(bounds.ranges()) if bounds else 1)]
        found += ranks if bounds else []
    return found


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", GUARDS)
def test_each_rank_keeps_only_its_rows(name: str, ranks: int) -> None:
    optimizer, update = GUARDS[name]
    step = jaxpp.mpmd_jit_with_loop(guarded_step(update, ranks)[0], make_mesh(ranks))
    placed = step.trace_and_place(*problem(optimizer, ranks))
    staged = placed.staged
    cut = ranks_of_rows(staged.args(), placed.argument_bounds)
    cut += ranks_of_rows(staged.outputs(), placed.result_bounds)
    assert cut and cut == [(rank,) for rank in range(ranks)] * (len(cut) // ranks)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GUARDS)
def test_trains_as_plain_jax(name: str) -> None:
    optimizer, update = GUARDS[name]
    pipelined, plain = guarded_step(update, 3)
    step = jaxpp.mpmd_jit_with_loop(pipelined, make_mesh(3))
    found = expected = problem(optimizer, 3)
    for _ in range(3):
        found = (*step(*found)[:2], found[2])
        expected = (*jax.jit(plain)(*expected)[:2], expected[2])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
