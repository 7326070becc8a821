"""The one exception class of this package, and the lines of the user's code it names."""

from __future__ import annotations

import os
import traceback
from types import TracebackType
from typing import Any

import jax

from jaxpp._core import JaxppError, NanError
from jaxpp.jax_internals import (
    current_line,
    exclude_from_user_lines,
    is_user_file,
)

__all__ = [
    "JaxppError",
    "NanError",
    "annotate",
    "check_arrays",
    "describe",
    "here",
    "make_error",
    "shorten",
    "tree_text",
    "where_raised",
]

exclude_from_user_lines(os.path.dirname(__file__) + os.sep)


def make_error(code: str, message: str) -> JaxppError:
    """An error to raise. `code` is one of the names in `jaxpp/status.h`."""
    error = JaxppError(message)
    error.code = code
    return error


def annotate(error: JaxppError, context: str) -> JaxppError:
    """The same error with "context: " in front of its message."""
    return make_error(getattr(error, "code", "internal"), f"{context}: {error}")


def shorten(value: Any, limit: int = 120) -> str:
    """A value as text that fits into a message."""
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."


def here() -> str:
    """The line of the user's code that is running, as file:line."""
    return current_line() or "?"


def where_raised(trace: TracebackType | None) -> str:
    """The last line of the user's code on the way to where an exception was raised."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(trace)
        if is_user_file(frame.filename)
    ]
    return lines[-1] if lines else "?"


# --- Values in messages -----------------------------------------------------------------


def describe(value: Any) -> str:
    """A class by its name, anything else as `shorten` has it."""
    return value.__name__ if isinstance(value, type) else shorten(value)


class _Leaf:
    """Prints as a star if it is an array, else as itself."""

    def __init__(self, leaf: Any) -> None:
        self.text = "*" if hasattr(leaf, "shape") else describe(leaf)

    def __repr__(self) -> str:
        return self.text


def tree_text(tree: Any) -> str:
    """A pytree with a star for each array."""
    return shorten(jax.tree.map(_Leaf, tree), 300)


def check_arrays(tree: Any, what: str) -> None:
    """Every leaf is something JAX computes with. Raises JaxppError("invalid-argument")."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            jax.typeof(leaf)
        except TypeError:
            raise make_error(
                "invalid-argument",
                f"{what}{jax.tree_util.keystr(path)}: expected an array or a number, found "
                f"{shorten(leaf)} of type {type(leaf).__name__}",
            ) from None
