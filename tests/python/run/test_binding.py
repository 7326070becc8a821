"""The extension module checks its arguments and releases the Python objects that it holds."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import weakref
from typing import Any

import pytest

from binding_objects import Step, value_of
from jaxpp import _core


def test_wrong_arguments_are_refused_and_do_not_crash() -> None:
    """The calls run in a process of their own, so that a crash only fails the test."""
    script = pathlib.Path(__file__).parent / "binding_calls.py"
    command = [sys.executable, "-X", "faulthandler", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"after {last}: {done.stderr}"
    assert last == ["all refused"]


@pytest.fixture(scope="module")
def step() -> Step:
    return Step()


class Holder:
    """A callable that can refer to an object that refers to it, which makes a cycle."""

    def __init__(self) -> None:
        self.held: Any = None

    def __call__(self, *views: memoryview) -> None:
        return None


def test_a_function_that_holds_its_callback_is_collected() -> None:
    function = Holder()
    function.held = _core.Callback(function, [], [])
    seen = weakref.ref(function)
    del function
    gc.collect()
    assert seen() is None


def test_what_holds_the_executable_that_keeps_it_is_collected(step: Step) -> None:
    kept = Holder()
    kept.held = step.executables(kept)
    seen = weakref.ref(kept)
    del kept
    gc.collect()
    assert seen() is None


def test_a_callback_that_holds_its_own_runtime_is_collected(step: Step) -> None:
    """Such a cycle occurs when the jax.debug.callback of a step calls the step."""
    function = Holder()
    runtime = step.runtime(step.executables((_core.Callback(function, [], []),)))
    runtime.step(step.values(), False)
    function.held = runtime
    seen = weakref.ref(function)
    del function, runtime
    gc.collect()
    assert seen() is None


def test_values_with_each_other_as_origin_are_freed(step: Step) -> None:
    before = sys.getrefcount(step.client)
    a, b, c = (value_of(step.client) for _ in range(3))
    held = sys.getrefcount(step.client)
    a.set_origin(b)
    b.set_origin(c)
    c.set_origin(a)
    a.set_origin(a)
    del a, b, c
    after = sys.getrefcount(step.client)
    assert (held, after) == (before + 3, before)


def test_records_read_by_name_and_print(step: Step) -> None:
    task = step.staged.tasks()[0]
    assert (task.name, task.kind, task.rank) == ("fwd_0", _core.TASK_FWD, 0)
    assert repr(task).startswith("jaxpp._core.StagedTask(name='fwd_0', kind=1, rank=0")
    with pytest.raises(AttributeError):
        task.name = "other"  # type: ignore[misc]


def test_codes_are_those_of_errors() -> None:
    assert len(set(_core.ERROR_CODES)) == len(_core.ERROR_CODES) > 10
    with pytest.raises(_core.JaxppError) as raised:
        _core.Schedule.build("none", 1, 1, 1, False)
    assert raised.value.code in _core.ERROR_CODES
