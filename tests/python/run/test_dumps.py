"""What a step can show: its program as text, its dump, its trace."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
from typing import Any

import jax
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh, mesh_of

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)
FOUR = jaxpp.Std1F1B(4)


def test_text_of_the_whole_program() -> None:
    step = JIT(m.training_step(TWO), make_mesh(2), donate_argnums=0)
    text = str(step.compile(m.params(), m.batch()).closed_jaxpr)
    for part in ("task_name=fwd_0", "task_name=bwd_1", "mpmd_idx=0", "mpmd_idx=1"):
        assert part in text
    assert re.search(r"= transfer\[\s*src_mpmd_idx=0", text)
    assert re.search(r"src_mpmd_idx=1\s+tgt_mpmd_idx=0", re.sub(r"\s+src_sh.*", "", text))
    assert "src_shardings=[NamedSharding(mesh=Mesh('stage': 1" in text
    assert (
        text.count("src_shardings=[")
        == text.count("tgt_shardings=[")
        == text.count("transfer[")
    )
    assert "delete[mpmd_idx=0]" in text
    assert text.count("task_name=fwd_0") == text.count("task_name=bwd_0") == 3
    # All results are defined in the body.
    body, results = text.split("in (")
    made = re.findall(r"(v\d+):", body)
    assert set(re.findall(r"v\d+", results)) <= set(made)


@pytest.mark.parametrize("schedule", [TWO, jaxpp.GPipe(2), jaxpp.ZeroBubble(2)])
def test_the_text_is_a_program(schedule: Any) -> None:
    """Each name is defined once, before its uses, and not used after its deletion."""
    step = JIT(m.training_step(schedule), make_mesh(2), donate_argnums=0)
    text = str(step.compile(m.params(), m.batch(5)).closed_jaxpr)
    lines = re.sub(r"\[\n[^\]]*\]", "[]", text).splitlines()
    made: set[str] = set(re.findall(r"(v\d+):", lines[0]))
    deleted: set[str] = set()
    for line in lines[1:-1]:
        results, _, operands = line.partition(" = ") if " = " in line else ("", "", line)
        used = set(re.findall(r"\bv\d+\b(?!:)", operands))
        assert used <= made - deleted, line
        names = re.findall(r"(v\d+):", results)
        assert not made & set(names), line
        made |= set(names)
        if "delete[" in line:
            deleted |= used
    assert set(re.findall(r"v\d+", lines[-1])) <= made - deleted
    assert (
        deleted and text.count("latency=1") and text.count("latency=") == text.count("_info=")
    )


def test_the_text_has_the_latencies_of_the_schedule() -> None:
    microbatches = 3

    def with_latencies(rows: list[list[Any]]) -> list[list[Any]]:
        def latency(task: Any) -> int:
            backward = task.fwd_or_bwd == jaxpp.TaskType.BWD
            return 10 + 100 * backward + 10 * task.stage_id + task.mubatch_idx

        return [
            [jaxpp.Task(t.stage_id, t.mubatch_idx, t.fwd_or_bwd, latency(t)) for t in row]
            for row in rows
        ]

    step = JIT(m.training_step(m.UserSchedule(with_latencies)), make_mesh(2))
    text = str(step.compile(m.params(), m.batch(microbatches)).closed_jaxpr)
    tasks = re.findall(
        r"task_info=\((\d), TaskType.(\w+)\)\s+latency=(\d+)\s.*\s+call_counter=(\d)", text
    )
    assert len(tasks) == 4 * microbatches
    for stage, kind, latency, microbatch in tasks:
        expected = 10 + 100 * (kind == "BWD") + 10 * int(stage) + int(microbatch)
        assert int(latency) == expected


def test_a_dump_does_not_follow_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link in the folder may lead to another user's file."""
    theirs, folder = tmp_path / "theirs", tmp_path / "dump"
    theirs.write_text("theirs")
    folder.mkdir()
    (folder / "graph.jpp").symlink_to(theirs)
    monkeypatch.setenv("JPP_DUMP", str(folder))
    JIT(m.training_step(TWO), make_mesh(2)).compile(m.params(), m.batch())
    assert theirs.read_text() == "theirs"
    assert "fwd_0" in (folder / "program.txt").read_text()
    assert (folder / "graph.jpp").read_text().startswith("graph ")


def test_a_step_runs_without_its_flight_recorder(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """If the flight recorder's folder is not writable, the step warns and runs without it."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("JPP_FLIGHT", str(tmp_path / "file"))
    jax.block_until_ready(JIT(m.training_step(TWO), make_mesh(2))(m.params(), m.batch()))
    told = capfd.readouterr().err
    assert told.startswith("jaxpp: warning: JPP_FLIGHT: ") and told.count("warning") == 1
    assert told.endswith("Not a directory; nothing is recorded\n")


def test_dump_reads_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    step = JIT(m.training_step(TWO), make_mesh(2))
    compiled = step.compile(m.params(), m.batch())
    names = {path.name for path in tmp_path.iterdir()}
    assert {"graph.jpp", "partition.txt", "program.txt", "schedule.txt", "check.txt"} <= names
    modules = [path for path in tmp_path.iterdir() if path.suffix == ".mlir"]
    assert modules and all("stablehlo" in path.read_text() for path in modules)
    assert (tmp_path / "program.txt").read_text() == compiled._traced.text
    for part, file in (("partition", "partition.txt"), ("program", "program.txt")):
        printed = subprocess.run(
            [command, "plan", tmp_path / "graph.jpp", "--after", part],
            capture_output=True,
            text=True,
        )
        assert printed.returncode == 0, printed.stderr
        assert printed.stdout == (tmp_path / file).read_text()


def test_trace_of_a_step() -> None:
    step = JIT(m.training_step(FOUR), make_mesh(4), donate_argnums=0)
    compiled = step.compile(m.params(4), m.batch(4))
    with pytest.raises(jaxpp.JaxppError, match="no step has been traced; call set_tracing"):
        compiled.trace_json()
    compiled.set_tracing()
    compiled(m.params(4), m.batch(4))
    events = json.loads(compiled.trace_json())
    events = events["traceEvents"] if isinstance(events, dict) else events
    named = [e["name"] for e in events if e.get("ph") == "X"]
    for stage in range(4):
        assert sum(f"fwd_{stage}" in name for name in named) >= 4
    picture = compiled.draw_trace(columns=60)
    assert all(re.search(rf"^rank +{rank} ", picture, re.M) for rank in range(4)), picture
    assert max(map(len, picture.splitlines())) <= 100
    planned = [rank.peak_bytes for rank in compiled._traced.plan.summary()]
    assert compiled._runtime.trace_peaks() == planned


def test_prediction_of_a_traced_step(tmp_path: pathlib.Path, command: str) -> None:
    mesh = mesh_of(4, {}, sharing=1)  # ranks of several processes cannot share a device
    step = JIT(m.training_step(FOUR), mesh, donate_argnums=0)
    compiled = step.compile(m.params(4), m.batch(4))
    with pytest.raises(jaxpp.JaxppError, match="no step has been traced; call set_tracing"):
        compiled.predict()
    compiled.set_tracing()
    compiled(m.params(4), m.batch(4))
    (tmp_path / "trace.json").write_text(compiled.trace_json())
    compiled.save(tmp_path / "step.plan")
    files = [tmp_path / "step.plan", tmp_path / "trace.json"]
    printed = subprocess.run([command, "predict", *files], capture_output=True, text=True)
    found = compiled.predict()
    assert printed.stdout == str(found) + "\n", printed.stderr
    (tmp_path / "predicted.json").write_text(found.trace_json)
    compare = [command, "drift", tmp_path / "predicted.json", files[1]]
    drift = subprocess.run(compare, capture_output=True, text=True)
    count = sum(rank.tasks for rank in compiled.cost_summary().ranks)
    assert f"{count} of {count} predicted tasks were measured" in drift.stdout, drift.stderr
    assert found.makespan == found.period and len(found.busy) == 4
    assert all(part in found.table for part in ("bubble", "peak bytes", "0 -> 1"))
    assert compiled.predict([found.trace_json]).makespan == pytest.approx(found.makespan, 1e-3)
    # With calls of 1 s each: every rank makes at least eight calls.
    assert compiled.predict(call=1e3, steps=2).makespan > 8e3
    assert compiled.predict(processes=4, latency=1e3).makespan > 6e3
    other = JIT(m.training_step(jaxpp.ZeroBubble(4)), mesh).compile(m.params(4), m.batch(4))
    with pytest.raises(jaxpp.JaxppError, match="found none of bwd_i_"):
        other.predict([compiled.trace_json()])
    with pytest.raises(jaxpp.JaxppError, match="trace 0 and trace 1 both have runs of rank 0"):
        compiled.predict([compiled.trace_json()] * 2)
    _check_several_steps(compiled, command, tmp_path)
    _check_refusals(compiled)


def _check_several_steps(compiled: Any, command: str, folder: pathlib.Path) -> None:
    """Predicts from traces of two steps, in both orders. Each predicted step takes the times
    of one traced step."""
    files = []
    for name in ("a.json", "b.json"):
        compiled(m.params(4), m.batch(4))
        (folder / name).write_text(compiled.trace_json())
        files.append(folder / name)
    traces = [x.read_text() for x in files]
    first, second = (compiled.predict([x]).busy for x in traces)
    assert compiled.predict(traces[::-1]).busy == pytest.approx(first, 1e-3)
    assert first != pytest.approx(second, 1e-3)
    both = compiled.predict(traces[::-1], steps=2)
    printed = subprocess.run(
        [command, "predict", folder / "step.plan", *files, "--steps", "2"],
        capture_output=True,
        text=True,
    )
    assert printed.stdout == str(both) + "\n", printed.stderr


def _check_refusals(compiled: Any) -> None:
    """Wrong arguments are errors that name the argument and what was expected."""
    whole, number = "; expected a whole number from", "; expected a finite number of at least 0"
    for name, value, says in (
        *(("cores", x, whole) for x in ("a", -1, 1.5, 2**32)),
        *(("processes", x, whole) for x in (0, None, "2")),
        *(("steps", x, whole) for x in (0, None, "a")),
        *(
            (name, x, number)
            for name in ("threads", "call", "latency", "bandwidth", "host_bandwidth")
            for x in (-1, float("nan"), float("inf"), "a", None, 1j)
        ),
        *(("traces", x, "; expected a list of one or") for x in (3, [], "[]", [3], [None])),
    ):
        with pytest.raises(jaxpp.JaxppError, match=f"{name}=.*{says}"):
            compiled.predict(**{name: value})
    for steps in 0, None, "a":
        with pytest.raises(jaxpp.JaxppError, match=f"steps=.*{whole} 1 to"):
            compiled.trace_json(steps)
    assert compiled.predict(cores=np.int32(0), call=np.float32(1e3)).makespan > 8e3


@pytest.mark.parametrize("ranks,axes", [(4, {}), (2, {"data": 2})])
def test_peaks_are_those_of_the_plan(ranks: int, axes: dict[str, int]) -> None:
    for schedule in (jaxpp.Std1F1B(ranks), jaxpp.GPipe(ranks)):
        step = JIT(m.training_step(schedule), make_mesh(ranks, **axes))
        compiled = step.compile(m.params(ranks), m.batch(6))
        compiled.set_tracing()
        compiled(m.params(ranks), m.batch(6))
        planned = [rank.peak_bytes for rank in compiled._traced.plan.summary()]
        assert compiled._runtime.trace_peaks() == planned
