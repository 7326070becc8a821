"""The model of `make demo`, with remat and nested jit, under every schedule.

The tests run the demo's own code with smaller sizes.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import COMPILE_FASTER, make_mesh
from jaxpp import _core
from locations import ROOT

RANKS, STEPS = 2, 3
SIZES = {"MICROBATCHES": 4, "BATCH": 8, "SEQUENCE": 8, "WIDTH": 16, "RANKS": RANKS}

SCHEDULES = [
    getattr(jaxpp, info.class_name)(
        *((RANKS,) if info.stages_a_rank == 1 else (2 * RANKS, RANKS))
    )
    for info in _core.Schedule.built_ins()
]


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "examples")
        module = importlib.import_module("demo")
        for name, size in (*SIZES.items(), ("LAYERS", None)):
            patch.setattr(module, name, size)
        yield module


@pytest.fixture(scope="module")
def plain_losses(demo: ModuleType) -> dict[int, list[float]]:
    """The losses of plain JAX, by the number of layers."""
    losses: dict[int, list[float]] = {}
    for layers in (RANKS, 2 * RANKS):
        demo.LAYERS = layers
        state, batch, losses[layers] = demo.init_state(1), demo.make_batch(), []
        for _ in range(STEPS):
            state, loss = demo.plain_step(state, batch)
            losses[layers].append(float(loss))
        assert losses[layers][-1] < losses[layers][0]
    return losses


@pytest.mark.sample(3)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_losses_are_those_of_plain_jax(
    schedule: Any, demo: ModuleType, plain_losses: dict[int, list[float]]
) -> None:
    demo.LAYERS = schedule.num_stages
    step = jaxpp.mpmd_jit_with_loop(
        lambda state, batch: demo.pipelined_step(state, batch, schedule),
        mpmd_mesh=make_mesh(RANKS),
        donate_argnums=0,
        compiler_options=COMPILE_FASTER,
    )
    state, batch, losses = demo.init_state(schedule.num_stages), demo.make_batch(), []
    for _ in range(STEPS):
        state, loss = step(state, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, plain_losses[demo.LAYERS], rtol=1e-5)
