"""The code blocks of each page of the guide run in order as one script, and so do the
examples of docs/api.md."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

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


def output_of_page(name: str, folder: pathlib.Path) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(), re.M | re.S)
    assert blocks
    script = folder / "page.py"
    script.write_text("\n".join(blocks))
    return output_of(script)


def test_the_guide_runs(tmp_path: pathlib.Path) -> None:
    output = output_of_page("guide.md", tmp_path)
    assert re.search(r"^step 3: loss \d", output, re.M)
    assert "memory limit: rank 3: expected at most 800000 bytes" in output, output
    assert re.search(r"schedule \S+ of 4 stages .* fits", output), output


@pytest.mark.soak
def test_an_nnx_model_from_start_to_end(tmp_path: pathlib.Path) -> None:
    output = output_of_page("nnx.md", tmp_path)
    first, *_, last = map(float, re.findall(r"^step \d: loss (\S+)", output, re.M))
    assert last < first and re.search(r"^evaluated: \d", output, re.M), output


def test_batches_of_several_lengths(tmp_path: pathlib.Path) -> None:
    output = output_of_page("batches.md", tmp_path)
    assert len(set(re.findall(r"length (\d+), loss \d", output))) > 1, output
    assert output.endswith("tokens on ranks (0,) labels on ranks (0, 1)\n"), output


@pytest.mark.soak
def test_mixed_precision(tmp_path: pathlib.Path) -> None:
    output = output_of_page("precision.md", tmp_path)
    mixed, rounded = map(float, re.findall(r"([\d.]+)%", output))
    assert 0 < mixed < rounded < 2
    sent = [json.loads(found) for found in re.findall(r"float\d+ (\[.*\])", output)]
    assert sent[1] == [n / 2 for n in sent[0]]
    steps = re.findall(r"loss (\S+), scale (\d+)", output)
    losses, scales = ([float(x) for x in column] for column in zip(*steps, strict=True))
    assert losses[0] == losses[1] and losses[-1] < losses[0]  # the first steps overflow
    assert scales[0] == 2**23 and scales[-2] == scales[-1] < scales[0]


def test_generation(tmp_path: pathlib.Path) -> None:
    """The page compares the texts with those of plain JAX."""
    output_of_page("generation.md", tmp_path)


def test_the_examples_of_the_api_run() -> None:
    output = output_of(DOCS / "api_examples.py")
    assert "4 ranks of 2 devices" in output
    assert "schedule | Std1F1B: num_stages=0; expected a whole number" in output
    assert "expected numbers, found a NaN" in output, output
