"""The code blocks of docs/guide.md run in order as one script, and so do the examples of
docs/api.md."""

import pathlib
import re
import subprocess
import sys

from locations import ROOT, faster_environment

DOCS = ROOT / "docs"


def output_of(script: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env=faster_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_guide_runs(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / "guide.md").read_text(), re.M | re.S)
    assert len(blocks) >= 7
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    output = output_of(script)
    assert re.search(r"^step 3: loss \d", output, re.M)
    assert "memory limit: rank 3: expected at most 800000 bytes" in output, output
    assert re.search(r"schedule \S+ of 4 stages .* fits", output), output


def test_the_examples_of_the_api_run() -> None:
    output = output_of(DOCS / "api_examples.py")
    assert "4 ranks of 2 devices" in output
    assert "schedule | Std1F1B: num_stages=0; expected a whole number" in output
    assert "expected numbers, found a NaN" in output, output
