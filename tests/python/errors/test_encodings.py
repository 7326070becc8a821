"""Names and paths with any characters are returned as a str that can be printed."""

from __future__ import annotations

import pytest

import jaxpp.api as jaxpp
from jaxpp import _core

# A byte that is not UTF-8, as Python represents it; a lone surrogate; a NUL; a letter.
NAMES = ["caf\udce9", "\ud800", "a\0b", "é"]


@pytest.mark.parametrize("name", NAMES)
def test_graphs_may_be_named_anything(name: str) -> None:
    graph = _core.Graph(name, 2)
    value = graph.add_arg(("float32", [2]), False, name)
    index = graph.begin_loop(2, 1, None, name)
    graph.add_op(0, 0, 0, [value, index], [("float32", [2])], 1.0, "f", name, 0, ())
    assert graph.end_loop([], [], []) == index + 2
    graph.add_output(value, name, _core.NONE)
    graph.finish()
    graph.text().encode()


@pytest.mark.parametrize("name", NAMES)
def test_errors_quote_any_name(name: str) -> None:
    rows = [[(_core.TASK_FWD, False, 0, 0, 1)]]
    with pytest.raises(jaxpp.JaxppError, match="microbatch 1") as refused:
        _core.Schedule.from_rows(name, 1, 1, 1, rows)
    str(refused.value).encode()
    proved = _core.Schedule.from_rows(name, 1, 1, 1, [[(_core.TASK_FWD, False, 0, 0, 0)]])
    proved.text().encode()
    graph = _core.Graph("g", 1)
    with pytest.raises(jaxpp.JaxppError) as raised:
        graph.add_op(0, 0, 0, [7], [], 1.0, name, name, 0, ())
    str(raised.value).encode()


def test_wrong_kinds_of_names_are_type_errors() -> None:
    with pytest.raises(TypeError):
        _core.Graph(3, 1)  # type: ignore[arg-type]
