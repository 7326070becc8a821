"""`prepare` does ahead of the first batch what the first call would do."""

from __future__ import annotations

import io
import logging
import re
import sys
from collections.abc import Callable
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> list[str]:
    """The lines that appear on the terminal, one over the other."""
    terminal = Terminal()
    with monkeypatch.context() as context:
        context.setattr(sys, "stderr", terminal)
        run()
    return terminal.getvalue().split("\r\x1b[K")[1:]


def test_a_line_on_the_terminal_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = models.mlp([1, 1], 4)
    args = (problem.params, problem.optimizer.init(problem.params), problem.batch)
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(2)), mesh_of(2, {}))
    lines = shown(monkeypatch, lambda: step.prepare(*structs_of(args)))
    phases = [line.removeprefix("step step: ").split(",")[0] for line in lines]
    assert phases[0] == "planning and compiling" and phases[1].startswith("lowering task 1 of ")
    count = int(phases[1].split()[-1])
    assert phases[2 : 2 + count - 1][-1] == f"lowering task {count} of {count}"
    assert phases[-3:-1] == [f"compiling task {count} of {count}", "running once on zeros"]
    assert re.fullmatch(r"ready after \d+\.\d s\n", phases[-1])
    # Only `prepare` reports, and only on a terminal.
    assert not shown(monkeypatch, lambda: step(*args))


def test_a_failure_leaves_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = jaxpp.mpmd_jit_with_loop(lambda x: x[2:] + x, mesh_of(2, {}))

    def fails() -> None:
        with pytest.raises(TypeError):
            step.prepare(jnp.ones(4))

    assert shown(monkeypatch, fails)[-1] == ""
    fails()
    assert capsys.readouterr().err == ""


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
