"""Bad input raises a single exception, early, with a code and a helpful message.

After every test a new step must still work. JPP_UPDATE_DOCS=1 writes docs/errors.md from the
messages; otherwise the page must already show them.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import pathlib
import pickle
import re
import shutil
import string
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from cases import CASES, JIT, TWO, WARNINGS, Case, Warned, mesh, state, step_of, train
from jaxpp.errors import make_error
from locations import ROOT

for topic in ("stages", "loops", "arguments", "files", "plugins"):  # in docs/errors.md's order
    plugins = importlib.import_module(f"cases_{topic}")

# Matches a line in the tests' own files. All other paths would appear unchanged in the docs.
PLACE = re.compile(
    rf"({re.escape(str(pathlib.Path(m.__file__).parents[1]))}/\w+/(\w+\.py)):(\d+)"
)
DOCS = ROOT / "docs" / "errors.md"


@pytest.fixture(scope="module", autouse=True)
def plugin_folder() -> Iterator[None]:
    plugins.PLUGINS.mkdir()
    yield
    shutil.rmtree(plugins.PLUGINS)


@pytest.fixture(autouse=True)
def goes_on_working(after_plain_step: Any) -> Iterator[None]:
    """Traces, compiles and runs a step after each test."""
    yield
    ours = JIT(m.training_step(TWO), mesh())(m.params(), m.batch())
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(after_plain_step), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5)


# The codes of failures that arguments do not cause; all other codes are ValueErrors.
CLASSES = dict.fromkeys(
    ("execution", "out-of-memory", "plugin", "unsupported"), jaxpp.JaxppError
) | {"nan": jaxpp.NanError}

UPDATES = "JPP_UPDATE_DOCS" in os.environ
# The entries of the page by title, and below them those that the tests produce.
SHOWN = dict(
    re.findall(
        r"^\*\*([^\n]*)\*\*\n\n(.*?)(?=\n\n(?:\*\*|## )|\n\Z)", DOCS.read_text(), re.M | re.S
    )
)
ENTRIES: dict[str, str] = {}


def compare_to_docs(title: str, message: str) -> None:
    """Checks that the page's entry has the message and the lines of code that it names."""
    ENTRIES[title] = _entry(message)
    if not UPDATES:
        shown, raised = map(_without_value_numbers, (SHOWN[title], ENTRIES[title]))
        assert shown == raised, "run the tests with JPP_UPDATE_DOCS=1"


@pytest.mark.own_devices  # errors name the ranks that share a device
@pytest.mark.parametrize("wrong", CASES, ids=lambda c: c.title.replace(" ", "-"))
def test_error(wrong: Case) -> None:
    with pytest.raises(jaxpp.JaxppError) as caught:
        jax.block_until_ready(wrong.run())
    message = str(caught.value)
    compare_to_docs(wrong.title, message)
    assert isinstance(caught.value, CLASSES.get(wrong.code, ValueError))
    assert isinstance(caught.value, ValueError) == (wrong.code not in CLASSES)
    assert caught.value.code == wrong.code, message
    for part in wrong.says:
        assert part in message
    assert message.count("\n") < 14
    assert len(message) < 1500


@pytest.mark.parametrize("wrong", WARNINGS, ids=lambda c: c.title.replace(" ", "-"))
def test_warning(wrong: Warned) -> None:
    with pytest.warns(UserWarning) as caught:
        wrong.run()
    (warning,) = caught
    message = str(warning.message)
    compare_to_docs(wrong.title, message)
    assert warning.category is UserWarning
    assert pathlib.Path(warning.filename).name == "mistakes.py"
    assert f"mistakes.py:{warning.lineno}" in message
    for part in wrong.says:
        assert part in message


def _entry(message: str) -> str:
    """The entry of a message: its text with letters for line numbers, then those lines."""
    letters: dict[tuple[str, int], str] = {}
    for path, _, line in PLACE.findall(message):
        letters.setdefault((path, int(line)), string.ascii_uppercase[len(letters)])
    text = PLACE.sub(lambda at: f"{at[2]}:{letters[at[1], int(at[3])]}", _stable(message))
    code = [_code(*place, letter) for place, letter in letters.items()]
    return "\n".join(
        ["```text", text, "```", *(["", "```python", *code, "```"] if code else [])]
    )


@functools.cache
def _lines_of(path: str) -> list[tuple[str, str]]:
    """The lines of a file, each with the name of the function around it."""
    source = pathlib.Path(path).read_text()
    lines = source.splitlines()
    functions = [""] * len(lines)

    def visit(node: ast.AST, outer: str) -> None:
        for inner in ast.iter_child_nodes(node):
            name = outer
            if isinstance(inner, (ast.FunctionDef, ast.ClassDef)):
                name = f"{outer}.{inner.name}".lstrip(".")
                for line in range(inner.lineno, inner.end_lineno or 0):
                    functions[line] = name
            visit(inner, name)

    visit(ast.parse(source), "")
    return [(line.strip(), name) for line, name in zip(lines, functions, strict=True)]


def _code(path: str, line: int, letter: str) -> str:
    """The code of a line and its function; a file must not contain the same twice."""
    lines = _lines_of(path)
    code, function = lines[line - 1]
    assert lines.count((code, function)) == 1, f"{path} has this line twice: {code}"
    return f"{code}  # {letter}" + (f", in {function}" if function else "")


def _stable(message: str) -> str:
    """The message without parts that differ between machines and systems."""
    message = message.replace(str(plugins.PLUGINS), "/path/to")
    message = message.replace(plugins.libm(), "/usr/lib/libm.so.6")
    # The dynamic loader's message differs between systems.
    message = re.sub(r"(not a loadable library: ).*", r"\1...", message)
    return message.replace("\0", "\\0")


def _document(entries: dict[str, str]) -> str:
    text = [
        "# Errors",
        "",
        "JaxPP raises `jaxpp.JaxppError` for everything that it refuses. Its `code` is one of "
        "the headings below. The message names the line of your code or the argument, what was "
        "expected and what was found. Nothing has run when it is raised, and the process can "
        "continue. An exception that your own function raises while it is traced is passed on "
        "unchanged, with a note (`__notes__`) if its microbatches are single examples.",
        "",
        "`tests/python/errors/test_errors.py` writes this page (with `JPP_UPDATE_DOCS=1`) from "
        "the steps in `tests/python/support/mistakes.py`. Letters stand for line numbers; the "
        "lines are shown below the message.",
    ]
    for code in sorted({c.code for c in CASES}):
        text += ["", f"## `{code}`"]
        for wrong in CASES:
            if wrong.code == code:
                text += ["", f"**{wrong.title}**", "", entries[wrong.title]]
    text += [
        "",
        "## Warnings",
        "",
        "Each is a `UserWarning`, issued once, at the line that it names.",
    ]
    for wrong in WARNINGS:
        text += ["", f"**{wrong.title}**", "", entries[wrong.title]]
    return "\n".join(text) + "\n"


def _without_value_numbers(text: str) -> str:
    """The text without value numbers, which differ between versions of JAX."""
    return re.sub(r"%\d+", "%n", text)


def test_docs_show_every_error() -> None:
    """The page has no other entries; the tests above have compared each entry."""
    if UPDATES:
        DOCS.write_text(_document(ENTRIES))  # in a single process, which has all messages
    else:
        assert DOCS.read_text() == _document(SHOWN), "run the tests with JPP_UPDATE_DOCS=1"


def test_a_wrong_type_is_a_type_error() -> None:
    for call in (
        lambda: jaxpp.GPipe("two"),
        lambda: jaxpp.treduce(lambda x: x, jnp.ones(2), None),
        lambda: jaxpp.mark_stage_end("text"),
        lambda: jaxpp.MpmdMesh(None, "stage"),
        lambda: step_of()(m.params(), object()),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert isinstance(caught.value, jaxpp.JaxppTypeError)
        assert isinstance(caught.value, ValueError)
    with pytest.raises(ValueError, match="found 0|=0") as refused:
        jaxpp.GPipe(0)
    assert not isinstance(refused.value, TypeError)


def test_an_error_keeps_its_code_and_class_in_a_pickle() -> None:
    for wrong_type in (False, True):
        error = make_error("mesh", "text", wrong_type=wrong_type)
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.code) == (type(error), "text", "mesh")


def test_titles_are_unique() -> None:
    rows = [*CASES, *WARNINGS]
    assert len({c.title for c in rows}) == len(rows)


def test_out_of_memory_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_(*_: Any) -> Any:
        raise make_error("out-of-memory", "compile: too large.")

    with monkeypatch.context() as patched:
        patched.setattr("jaxpp.lower.compiling.Compiler._compile", compile_)
        with pytest.raises(jaxpp.JaxppError) as caught:
            train(TWO)
    assert caught.value.code == "out-of-memory"
    assert str(caught.value).startswith("rank 0, task fwd_0: compile: too large; the plan's")


def test_what_the_user_raises_comes_through() -> None:
    def step(xs: jax.Array) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        JIT(step, mesh())(m.batch())


def test_a_wrong_call_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'xs'"):
        step_of()(m.params())


def test_nothing_is_taken_when_a_donation_is_refused() -> None:
    step = step_of(donate_argnums=0)
    good, _ = step(m.params(), m.batch())
    bad, _ = step(m.params(), m.batch())
    bad[1].delete()
    with pytest.raises(jaxpp.JaxppError):
        step([good[0], bad[1]], m.batch())
    assert not good[0].is_deleted()
    step(good, m.batch())
    assert good[0].is_deleted()


def test_a_donated_array_of_other_ranks_is_donated_all_the_same() -> None:
    step = step_of(donate_argnums=0)
    (a, b), _ = step(m.params(), m.batch())
    step([b, a], m.batch())  # each array is on the other's rank
    assert a.is_deleted() and b.is_deleted()


def test_arrays_of_another_mesh_are_moved() -> None:
    ws = state()
    others = jax.devices()[2:4]
    other = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(others), ("stage",)), "stage")
    for mpmd_mesh in (other, mesh(2, data=2)):
        step = JIT(m.training_step(TWO), mpmd_mesh, donate_argnums=0)
        ws, total = step(ws, m.batch())
    assert ws[0].sharding.mpmd_mesh == mesh(2, data=2)
    expected = m.params()
    for _ in range(3):
        expected, plain_total = m.plain_training_step(expected, m.batch())
    np.testing.assert_allclose(float(total), plain_total, rtol=1e-5)


def test_other_shapes_retrace_and_work() -> None:
    step = step_of()
    for microbatches, size in [(3, 2), (5, 2), (3, 4), (3, 2)]:
        xs = m.batch(microbatches, size)
        _, total = step(m.params(), xs)
        plain = m.plain_training_step(m.params(), xs)[1]
        np.testing.assert_allclose(float(total), plain, rtol=1e-5)
    assert len(step._compiled) == 3


def test_step_without_a_loop_works() -> None:
    """Operations outside loops run as tasks on the ranks that hold their inputs."""

    def step(ws: Any, xs: jax.Array) -> Any:
        return jax.tree.map(lambda w: 2 * w, ws), jax.value_and_grad(m.loss)(ws, xs[0])

    doubled, (value, grads) = JIT(step, mesh())(m.params(), m.batch())
    plain = jax.value_and_grad(m.unmarked_loss)(m.params(), m.batch()[0])
    np.testing.assert_allclose(doubled[1], 2 * m.params()[1])
    np.testing.assert_allclose(float(value), plain[0], rtol=1e-6)
    np.testing.assert_allclose(grads[0], plain[1][0], rtol=1e-5)


def test_results_that_no_stage_makes() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(m.loss)(ws, x), jnp.float32(3), x.sum(), ws[0].sum()

        return jaxpp.treduce(one, xs, TWO, operation=jaxpp.Add), xs, jnp.ones(2)

    (_, three, sums, weights), xs, ones = JIT(step, mesh())(m.params(), m.batch())
    assert float(three) == 9.0
    assert float(sums) == float(m.batch().sum())
    np.testing.assert_allclose(float(weights), 3 * float(m.params()[0].sum()), rtol=1e-6)
    np.testing.assert_array_equal(xs, m.batch())
    np.testing.assert_array_equal(ones, np.ones(2))
