"""The figures in docs/at_scale.md are the output of the command shown there."""

import os
import pathlib
import subprocess
import sys

from locations import ROOT

SCRIPT = ROOT / "benchmarks" / "at_scale.py"
PAGE = ROOT / "docs" / "at_scale.md"


def test_the_tables_are_as_the_simulator_says(tmp_path: pathlib.Path, command: str) -> None:
    copy = tmp_path / "at_scale.md"
    copy.write_text(PAGE.read_text())
    path = f"{pathlib.Path(command).parent}:{os.environ['PATH']}"
    script = [sys.executable, str(SCRIPT), "--write", str(copy)]
    subprocess.run(script, check=True, env={**os.environ, "PATH": path})
    assert copy.read_text() == PAGE.read_text()


def test_a_page_without_tables_is_not_touched(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing of the kind\n")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--write", str(page)], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "expected the line" in done.stderr
    assert page.read_text() == "nothing of the kind\n"
