"""The blocks of docs/guide.md run, in order, as one script in a process of its own."""

import os
import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guide.md"


def test_the_guide_runs(tmp_path: pathlib.Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert len(blocks) >= 7
    script = tmp_path / "guide.py"
    script.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 3: loss \d", done.stdout, re.M)
    assert "memory limit: rank 3: expected at most 800000 bytes" in done.stdout, done.stdout
    assert re.search(r"schedule \S+ of 4 stages .* fits", done.stdout), done.stdout
