"""`prepare` does ahead of the first batch what the first call would do."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import models
from equality import mesh_of, pipelined_step
from trainings import described, with_state_on_host


def structs_of(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("hosted", [False, True], ids=["device", "hosted"])
def test_the_first_call_is_a_later_call(
    axes: dict[str, int], hosted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    problem = models.mlp([1, 1], 4)
    run = pipelined_step(problem, jaxpp.Std1F1B(2))
    args = (problem.params, problem.optimizer.init(problem.params), problem.batch)
    step = jaxpp.mpmd_jit_with_loop(
        with_state_on_host(run) if hosted else run, mesh_of(2, axes), donate_argnums=(0, 1)
    )
    with caplog.at_level(logging.INFO, "jaxpp"):
        prepared = step.prepare(*structs_of(args))
    assert [r.getMessage().partition(": ")[2].split(" ")[0] for r in caplog.records] == [
        "planning",
        "running",
        "ready",
    ]
    assert prepared.compiled is step.compile(*args).compiled
    other = jaxpp.mpmd_jit_with_loop(
        with_state_on_host(run) if hosted else run, mesh_of(2, axes)
    )
    copies = jax.tree.map(jnp.copy, args)
    assert [*described("", step(*copies))] == [*described("", other(*args))]


def test_zeros_are_no_mistakes() -> None:
    """Checks for NaNs hold for batches, and not for zeros that no user has passed."""

    def step(x: Any, key: Any) -> Any:
        def one(m: Any) -> Any:
            return jaxpp.mark_stage_end(jnp.log(jaxpp.mark_stage_end(m)))

        total = jaxpp.treduce(one, x, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        return total / total + jax.random.uniform(key)

    fun = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}))
    with jax.debug_nans(True):
        prepared = fun.prepare(jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.random.key(0))
        with pytest.raises(jaxpp.JaxppError, match="found a NaN"):
            jax.block_until_ready(prepared(np.zeros((4, 3), np.float32), jax.random.key(0)))


def test_callbacks_are_not_called() -> None:
    seen: list[Any] = []

    def step(x: Any) -> Any:
        def one(m: Any) -> Any:
            jax.debug.callback(seen.append, m.sum())
            return jaxpp.mark_stage_end(jnp.sin(jaxpp.mark_stage_end(m)))

        return jaxpp.treduce(one, x, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    fun = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}))
    x = jnp.ones((4, 3))
    fun.prepare(x)
    jax.effects_barrier()
    assert not seen
    jax.block_until_ready(fun(x))
    jax.effects_barrier()
    assert len(seen) == 4
