"""Helpers for the lists of invalid calls, which test_errors.py makes.

The lists are in cases_stages.py, cases_loops.py, cases_arguments.py, cases_files.py and
cases_plugins.py, the steps that they call in mistakes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jaxpp.api as jaxpp
import mistakes as m
from equality import mesh_of

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)


@dataclasses.dataclass(frozen=True)
class Case:
    """A call that must raise JaxppError with this code and all of `says` in its message."""

    title: str
    code: str
    run: Callable[[], Any]
    says: tuple[str, ...]


CASES: list[Case] = []


def case(title: str, code: str, run: Callable[[], Any], *says: str) -> None:
    CASES.append(Case(title, code, run, says))


@dataclasses.dataclass(frozen=True)
class Warned:
    """A call that works but must issue one UserWarning at a line of mistakes.py, with all of
    `says` in its message."""

    title: str
    run: Callable[[], Any]
    says: tuple[str, ...]


WARNINGS: list[Warned] = []


def warned(title: str, run: Callable[[], Any], *says: str) -> None:
    WARNINGS.append(Warned(title, run, says))


def mesh(ranks: int = 2, **axes: int) -> jaxpp.MpmdMesh:
    """A mesh without the axes of TEST_AXES, because messages mention axes."""
    return mesh_of(ranks, axes)


def train(schedule: Any, layers: int = 2, loss: Any = m.loss, **options: Any) -> Any:
    mpmd_mesh = options.pop("mpmd_mesh", None) or mesh()
    batch = m.batch(options.pop("microbatches", 3))
    step = JIT(m.training_step(schedule, loss), mpmd_mesh, **options)
    return step(m.params(layers), batch)


def loop(xs: Any, fun: Any = None, **options: Any) -> Any:
    return JIT(lambda: m.forward(xs, fun, **options), mesh())()


def step_of(**options: Any) -> Any:
    return JIT(m.training_step(TWO), mesh(), **options)


def state() -> Any:
    return step_of()(m.params(), m.batch())[0]
