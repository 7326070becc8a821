"""Text that is not UTF-8 is escaped in names; in files it is refused with its line number."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, mesh

# A byte that is not UTF-8, as Python decodes it in file names; a NUL; line ends; quotes.
NAMES = ["\udcff", "a\0b", 'a\n"b\\', "größe 大", "<lambda>", ""]


def named(name: str) -> Callable[..., Any]:
    step = m.training_step(TWO)
    step.__name__ = step.__qualname__ = name
    return step


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_any_name(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    _, total = JIT(named(name), mesh())(m.params(), m.batch())
    np.testing.assert_allclose(
        float(total), m.plain_training_step(m.params(), m.batch())[1], rtol=1e-5
    )
    text = (tmp_path / "graph.jpp").read_text(encoding="utf-8")
    assert text.startswith("graph ") or text.startswith("//")


@pytest.mark.parametrize("name", NAMES)
def test_arguments_results_and_marks_of_any_name(name: str) -> None:
    def step(given: dict[str, Any]) -> Any:
        def one(x: jax.Array) -> Any:
            x = jaxpp.mark_stage_end(jaxpp.mark_stage_end(x, name=name), name=name)
            return {name: x}

        return jaxpp.treduce(one, given[name], TWO, operation=jaxpp.Add)

    out = JIT(step, mesh())({name: m.batch()})
    np.testing.assert_array_equal(out[name], m.batch().sum(0))


@pytest.mark.parametrize("name", NAMES)
def test_code_of_a_file_of_any_name(name: str) -> None:
    """Messages name the lines of the user's code by the name of its file."""
    scope: dict[str, Any] = {"mark": jaxpp.mark_stage_end}
    source = "def one(x):\n    return mark(x)\n"
    exec(compile(source, name.replace("\0", "") + ".py", "exec"), scope)

    def step(xs: jax.Array) -> Any:
        return jaxpp.treduce(scope["one"], xs, jaxpp.GPipe(xs.shape[0]), operation=jaxpp.Add)

    np.testing.assert_array_equal(JIT(step, mesh())(m.batch(2)), m.batch(2).sum(0))
    with pytest.raises(jaxpp.JaxppError, match="expected 4 stage marks"):
        JIT(step, mesh(4))(m.batch(4))


CSV = "0F0,0F1,0B0,0B1\n,1F0,1F1,1B0,1B1\n"


def schedule_in(path: pathlib.Path, content: bytes) -> jaxpp.CsvSchedule:
    path.write_bytes(content)
    return jaxpp.CsvSchedule(path)


def test_a_csv_file_with_a_signature(tmp_path: pathlib.Path) -> None:
    plain = schedule_in(tmp_path / "a.csv", CSV.encode())
    signed = schedule_in(tmp_path / "b.csv", CSV.encode("utf-8-sig"))
    assert signed.tasks(2) == plain.tasks(2)


def test_a_csv_file_of_any_name(tmp_path: pathlib.Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.csv")
    assert schedule_in(path, CSV.encode()).num_stages == 2
    with pytest.raises(jaxpp.JaxppError, match=r"\\udcff.csv:1"):
        schedule_in(path, b"0X0\n")


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_a_csv_file_in_another_encoding(tmp_path: pathlib.Path, encoding: str) -> None:
    with pytest.raises(jaxpp.JaxppError, match="expected a CSV file in UTF-8, found") as caught:
        schedule_in(tmp_path / "a.csv", ("0F0\n" + "\xe9").encode(encoding))
    assert caught.value.code == "schedule"
    assert "a.csv:" in str(caught.value)


def test_a_plugin_given_as_a_path_object() -> None:
    import lammps_jax_pjrt_cpu

    path = pathlib.Path(lammps_jax_pjrt_cpu.PLUGIN_PATH)
    for given in (path, os.fsencode(path)):
        _, total = JIT(named("step"), mesh(), plugin=given)(m.params(), m.batch())
        assert np.isfinite(float(total))


def test_a_callbacks_error_of_any_text() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise ValueError

    for error, says in ((ValueError("\udcff\0"), r"\\udcff"), (Unprintable(), "Unprintable")):

        def fail(x: Any, error: Exception = error) -> None:
            raise error

        def loss(ws: Any, x: Any, fail: Any = fail) -> Any:
            jax.debug.callback(fail, x)
            return m.loss(ws, x)

        with pytest.raises(jaxpp.JaxppError, match=says):
            ws, total = JIT(m.training_step(TWO, loss), mesh())(m.params(), m.batch())
            float(total), [np.asarray(w) for w in ws]
