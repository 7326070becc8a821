"""Steps in profiles recorded by JAX's profiler."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh

SCHEDULE = jaxpp.Std1F1B(4)
MICROBATCHES = 3


def planes_of(folder: pathlib.Path) -> list[Any]:
    """The profile's planes that belong to pipelines."""
    (file,) = folder.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    return [plane for plane in planes if "jaxpp" in plane.name]


@pytest.fixture
def step() -> Any:
    """A step that has been compiled and run once."""
    function = jaxpp.mpmd_jit_with_loop(m.training_step(SCHEDULE), make_mesh(4))
    jax.block_until_ready(function(m.params(4), m.batch(MICROBATCHES)))
    return function


def test_a_profile_has_tasks_waits_and_sends_of_each_rank(
    step: Any, tmp_path: pathlib.Path
) -> None:
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            jax.block_until_ready(step(m.params(4), m.batch(MICROBATCHES)))
    (plane,) = planes_of(tmp_path)
    lines = {line.name: list(line.events) for line in plane.lines}
    for rank in range(4):
        tasks = lines[f"rank {rank}"]
        for kind in ("fwd", "bwd"):
            found = [e for e in tasks if e.name == f"{kind}_{rank}"]
            numbers = [dict(e.stats)["microbatch"] for e in found]
            assert sorted(numbers) == sorted([*range(MICROBATCHES)] * 2)
            assert {dict(e.stats)["step"] for e in found} == {2, 3}
        assert all(e.name.startswith("wait for ") for e in lines.get(f"rank {rank}: waits", []))
        sends = [e.name for e in lines[f"rank {rank}: sends"]]
        assert {*sends} == {f"send to rank {r}" for r in (rank - 1, rank + 1) if 0 <= r < 4}


def test_a_profile_without_steps_has_no_plane(step: Any, tmp_path: pathlib.Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        pass
    assert planes_of(tmp_path) == []


def test_profiles_come_one_after_another(step: Any, tmp_path: pathlib.Path) -> None:
    arguments = m.params(4), m.batch(MICROBATCHES)
    for name in ("first", "second"):
        jax.block_until_ready(step(*arguments))
        with jax.profiler.trace(str(tmp_path / name)):
            jax.block_until_ready(step(*arguments))
        (plane,) = planes_of(tmp_path / name)
        (steps,) = {
            frozenset(dict(e.stats)["step"] for e in line.events) for line in plane.lines
        }
        assert len(steps) == 1


def test_own_traces_are_as_they_were(step: Any, tmp_path: pathlib.Path) -> None:
    compiled = step.compile(m.params(4), m.batch(MICROBATCHES))
    compiled.set_tracing()
    with jax.profiler.trace(str(tmp_path)):
        jax.block_until_ready(compiled(m.params(4), m.batch(MICROBATCHES)))
    assert "fwd_3" in compiled.trace_json()
    assert len(planes_of(tmp_path)) == 1
