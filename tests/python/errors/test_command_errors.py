"""The command's messages for bad input, and imports without a plugin."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

from cases import TWO, train


def plan(command: str, tmp_path: pathlib.Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "graph.jpp").write_text(text)
    return subprocess.run(
        [command, "plan", "graph.jpp"], cwd=tmp_path, capture_output=True, text=True
    )


def test_malformed_text_for_plan(command: str, tmp_path: pathlib.Path) -> None:
    good = _dumped_graph(tmp_path / "dump")
    assert plan(command, tmp_path, good).returncode == 0
    lines = good.splitlines()
    at = next(i for i, line in enumerate(lines) if "f32[" in line)
    lines[at] = lines[at].replace("f32[", "f32<", 1)
    result = plan(command, tmp_path, "\n".join(lines))
    assert result.returncode == 2
    column = lines[at].index("f32<") + 1
    place = re.search(r"graph\.jpp:(\d+):(\d+): ", result.stderr)
    assert place, result.stderr
    assert int(place[1]) == at + 1
    assert column <= int(place[2]) <= column + 4
    assert "expected" in result.stderr and "found" in result.stderr


@pytest.mark.parametrize(
    "text", ["", "grph", "\x00\x01\x02", 'graph "', "graph g {", "{}\n" * 1000]
)
def test_text_that_is_no_graph(command: str, tmp_path: pathlib.Path, text: str) -> None:
    result = plan(command, tmp_path, text)
    assert result.returncode == 2
    assert re.search(r"graph\.jpp:\d+:\d+: ", result.stderr), result.stderr


def test_plan_of_a_missing_file(command: str, tmp_path: pathlib.Path) -> None:
    result = subprocess.run(
        [command, "plan", "no.jpp"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "no.jpp" in result.stderr


def _dumped_graph(folder: pathlib.Path) -> str:
    os.environ["JPP_DUMP"] = str(folder)
    try:
        train(TWO)
    finally:
        del os.environ["JPP_DUMP"]
    return (folder / "graph.jpp").read_text()


def test_import_needs_no_plugin() -> None:
    """A missing plugin is reported by the step that needs it, not by the import."""
    code = "import jaxpp.api, sys; print(sorted(s.name for s in jaxpp.api.TaskType))"
    environment = {**os.environ, "JPP_PLUGIN": "/no/such/plugin.so"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
