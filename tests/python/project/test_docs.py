"""Names in the documentation exist, links resolve, and its picture is the command's output."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

from locations import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import check_docs  # noqa: E402


def test_the_documentation_names_what_exists() -> None:
    assert list(check_docs.offences(ROOT)) == []


@pytest.fixture(scope="module")
def project() -> check_docs.Project:
    return check_docs.Project(ROOT)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("`src/plan/moved.c`", "no file or folder src/plan/moved.c"),
        ("`moved.py`", "no file or folder moved.py"),
        ("`src/gone/`", "no file or folder src/gone/"),
        ("`trace/lowering.py`", "no file or folder trace/lowering.py"),
        ("the file `program.c`", "program.c may be src/program/program.c or"),
        ("    python tools/moved.py", "no file or folder tools/moved.py"),
        ("`test_docs.py::test_gone`", "no test test_gone in test_docs.py"),
        ("`make gone`", "no target make gone"),
        ("    make demo gone", "no target make gone"),
        ("`jaxpp gone FILE`", "no command jaxpp gone"),
        ("    jaxpp schedule gone", "no command jaxpp schedule"),
        ("`jaxpp plan FILE --gone`", "no flag --gone of jaxpp plan"),
        ("`JPP_GONE`", "no symbol JPP_GONE"),
        ("`JPP_OK=1`", "no variable JPP_OK"),  # a symbol, not an environment variable
        ("`jpp_gone()`", "no symbol jpp_gone"),
        ("`jpp_gone_...`", "no symbol jpp_gone_"),
        ("`kGone`", "no symbol kGone"),
        ("`jaxpp.gone`", "no name jaxpp.gone"),
        ("`jaxpp.orbax.gone()`", "no name jaxpp.orbax.gone"),
        ("`gone` (`run/compiled.py`)", "no gone in run/compiled.py"),
        ("`CompiledStep.gone` in `run/compiled.py`", "no CompiledStep.gone in run/compiled.py"),
        ("[a page](gone.md)", "the link to gone.md: no such file"),
        ("[a heading](guide.md#gone)", "the link to guide.md#gone: no such heading"),
        ("![a picture](gone.svg)", "the link to gone.svg: no such file"),
    ],
)
def test_what_does_not_exist_is_named(
    project: check_docs.Project, text: str, complaint: str
) -> None:
    found = list(check_docs.wrong_in(project, "docs/page.md", f"# Page\n\n{text}\n"))
    assert len(found) == 1 and found[0].startswith(f"docs/page.md:3: {complaint}"), found


@pytest.mark.parametrize(
    "text",
    [
        "`src/plan/plan.c`, `lower/lowering.py`, `src/plan`, `tests/golden/graphs/mlp2.jpp`",
        "`src/program` has `program.c`, and `jaxpp.Auto(seconds=2)` searches",
        "`make demo`, `make test-jax VERSION=0.10.2`, but they make the mesh again",
        "`jaxpp schedule search --seconds 5`, `jaxpp launch -- python train.py --gone`",
        "`JPP_LOG=info`, `JPP_OK`, `jpp_plan_graph()`, `jpp_channel_...`, `kDrivers`",
        "`jaxpp.orbax.register()`, `compile_all` (`lower/compiling.py`)",
        "[the page itself](#page), [another](guide.md#3-without-marks-of-your-own)",
    ],
)
def test_what_exists_is_accepted(project: check_docs.Project, text: str) -> None:
    assert list(check_docs.wrong_in(project, "docs/page.md", f"# Page\n\n{text}\n")) == []


def test_the_readmes_command_draws_its_picture(tmp_path: pathlib.Path, command: str) -> None:
    readme = (ROOT / "README.md").read_text()
    picture = re.search(r"!\[[^]]*\]\((\S+\.svg)\)", readme)
    drawn_by = re.search(r"`jaxpp (plot [^`]*?-o )(\S+)`", readme)
    assert picture and drawn_by
    subprocess.run(
        [command, *shlex.split(drawn_by[1]), str(tmp_path / drawn_by[2])], check=True
    )
    assert (tmp_path / drawn_by[2]).read_text() == (ROOT / picture[1]).read_text()


def test_the_page_on_memory_shows_what_the_command_prints(command: str) -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    shown = re.findall(r"^    jaxpp (plan .*)\n\n((?:    .*\n)+)", page, re.M)
    assert len(shown) == 2
    for flags, output in shown:
        done = subprocess.run(
            [command, *shlex.split(flags)], cwd=ROOT, capture_output=True, text=True
        )
        printed = " ".join((done.stdout + done.stderr).split())
        assert " ".join(output.split()) in printed, done.stdout + done.stderr
