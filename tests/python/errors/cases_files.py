"""Plan files: what cannot be saved, and what cannot be loaded."""

from __future__ import annotations

import collections
import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, case, mesh
from jaxpp.run import saving

# --- Saving -----------------------------------------------------------------------------


def compiled(loss: Any = m.loss) -> Any:
    return JIT(m.training_step(TWO, loss), mesh()).compile(m.params(), m.batch())


def save_state_of_local_class() -> None:
    State = collections.namedtuple("State", ["ws"])

    def step(state: Any, xs: jax.Array) -> Any:
        return m.training_step(TWO)(state.ws, xs)

    JIT(step, mesh()).compile(State(m.params()), m.batch()).save("/nowhere/plan")


case(
    "Saving a step that prints",
    "unsupported",
    lambda: compiled(m.loss_that_prints).save("/nowhere/plan"),
    "calls back into Python",
    "remove the callback",
)
case(
    "Saving a step whose state class cannot be imported",
    "unsupported",
    save_state_of_local_class,
    "the structure of the arguments cannot be written to a plan file",
    "define the class at the top of a module",
)
case(
    "A plan saved to no path",
    "invalid-argument",
    lambda: compiled().save(3),
    "save: path=3; expected the path of a plan file",
)
case(
    "A plan saved to a missing folder",
    "invalid-argument",
    lambda: compiled().save("/nowhere/plan"),
    "plan file /nowhere/plan: cannot be written: No such file or directory",
)

# --- Loading ----------------------------------------------------------------------------


def loaded(change: Callable[[bytearray], Any] = lambda _: None, mpmd_mesh: Any = None) -> Any:
    """Saves a step, changes the file's bytes and loads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "plan"
        compiled().save(path)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)
        try:
            return jaxpp.load(path, mpmd_mesh)
        except jaxpp.JaxppError as error:
            raise with_text(error, str(path), "step.plan") from None


def with_text(error: jaxpp.JaxppError, old: str, new: str) -> jaxpp.JaxppError:
    changed = type(error)(str(error).replace(old, new))
    changed.code = error.code
    return changed


def calling(call: Callable[[Any], Any]) -> Callable[[], Any]:
    def run() -> None:
        step = loaded()
        try:
            call(step)
        except jaxpp.JaxppError as error:
            raise with_text(error, step.path, "step.plan") from None

    return run


def loaded_without(key: str) -> Any:
    def section(*args: Any) -> bytes:
        front = json.loads(python_section(*args))
        del front[key]
        return json.dumps(front).encode()

    python_section = saving._python_section
    with mock.patch.object(saving, "_python_section", section):
        return loaded()


def newer(data: bytearray) -> None:
    data[16] = 2
    data[20:48] = b"jaxpp 99.0".ljust(28, b"\0")


case(
    "A missing plan file",
    "invalid-argument",
    lambda: jaxpp.load("/nowhere/plan"),
    "plan file /nowhere/plan: cannot be read: No such file or directory",
)
case(
    "The contents of a plan file",
    "invalid-argument",
    lambda: jaxpp.load(b"jaxpp plan file\0\0"),
    r"load: path=b'jaxpp plan file\x00\x00'; expected the path of a plan file",
)
case(
    "A file that is not a plan",
    "parse",
    lambda: loaded(lambda data: data.__setitem__(slice(0, 5), b"graph")),
    'expected a file that begins with "jaxpp plan file"',
)
case(
    "A plan file that was cut off",
    "parse",
    lambda: loaded(lambda data: data.__delitem__(slice(40, None))),
    "damaged or cut off: expected at least 72 bytes, found 40",
)
case(
    "A plan file of a newer format",
    "unsupported",
    lambda: loaded(newer),
    "format 2, written by jaxpp 99.0; expected at most format 1",
)
case(
    "A plan file that another version wrote",
    "unsupported",
    lambda: loaded_without("notes"),
    "plan file step.plan: expected an entry 'notes', found none",
)
case(
    "A loaded step called with other shapes",
    "invalid-argument",
    calling(lambda step: step(m.params(), m.batch(4))),
    "argument xs of the step in step.plan: expected float32[3, 2, 4]",
    "found float32[4, 2, 4]",
)
case(
    "A loaded step called with other arguments",
    "invalid-argument",
    calling(lambda step: step(m.params(3), m.batch())),
    "expected the arguments that it was saved with",
)
case(
    "A loaded step called with a value that is not an array",
    "invalid-argument",
    calling(lambda step: step(m.params(), "text")),
    "argument xs of the step in step.plan: expected an array or a number, found 'text'",
)
case(
    "A loaded step in a function that JAX traces",
    "unsupported",
    calling(lambda step: jax.jit(lambda xs: step(m.params(), xs))(m.batch())),
    "a loaded step cannot be traced",
)
case(
    "A plan loaded on another mesh",
    "mesh",
    lambda: loaded(mpmd_mesh=mesh(4)),
    "expected a mesh of {'stage': 2} with the ranks along 'stage'",
    "found a mesh of {'stage': 4}",
)
case(
    "A plan loaded on an object that is not a mesh",
    "mesh",
    lambda: loaded(mpmd_mesh=np.zeros(2)),
    "load: mpmd_mesh=array([0., 0.]); expected an MpmdMesh",
)
