"""The exceptions of this package, and how messages name values and the user's code."""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import operator
import os
import traceback
import warnings
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from jaxpp import _core
from jaxpp._core import JaxppError, JaxppTypeError, JaxppValueError, NanError
from jaxpp.jax_internals.arrays import broadcast_prefix
from jaxpp.jax_internals.jaxprs import is_ref
from jaxpp.jax_internals.lines import current_line, exclude_from_user_lines, is_user_file

__all__ = [
    "DELETED",
    "JaxppError",
    "JaxppTypeError",
    "JaxppValueError",
    "NanError",
    "annotate",
    "check_arrays",
    "check_number",
    "check_path",
    "check_prefix",
    "check_whole",
    "counted",
    "definition_line",
    "describe",
    "is_count",
    "here",
    "make_error",
    "plain_text",
    "raised_text",
    "shorten",
    "tree_text",
    "warn",
    "where_raised",
    "without_partials",
]

exclude_from_user_lines(os.path.dirname(__file__) + os.sep)


# Why a deleted array cannot be used.
DELETED = _core.Value.elsewhere().deletion_reason


def make_error(code: str, message: str, *, wrong_type: bool = False) -> JaxppError:
    """An error to raise. `code` is one of the names in `jaxpp/status.h`.

    An error about a bad argument is also a `ValueError`, and a `TypeError` if the argument has
    the wrong type.
    """
    # A path may contain bytes that are not valid text.
    text = message.encode(errors="backslashreplace").decode()
    return _core.make_error(code, text, wrong_type)


def annotate(error: JaxppError, context: str) -> JaxppError:
    """The same error with its message prefixed by "context: "."""
    code = getattr(error, "code", "internal")
    return make_error(code, f"{context}: {error}", wrong_type=isinstance(error, TypeError))


def shorten(value: Any, limit: int = 120) -> str:
    """A value's repr, shortened to fit into a message."""
    try:
        text = repr(value)
    except Exception:  # from a user's own __repr__
        text = f"<{type(value).__name__}, whose repr() fails>"
    return text if len(text) <= limit else text[:limit] + "..."


def here() -> str:
    """The line of the user's code that is running, as file:line."""
    return current_line() or "?"


def without_partials(fun: Any) -> Any:
    """The function that a `functools.partial` calls; any other one as it is."""
    while isinstance(fun, functools.partial):
        fun = fun.func
    return fun


def definition_line(fun: Any) -> str:
    """The line, as file:line, on which a function, method, partial or callable object is
    defined."""
    fun = inspect.unwrap(without_partials(fun))
    code = getattr(fun, "__code__", None) or getattr(type(fun).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else here()


def where_raised(trace: TracebackType | None) -> str:
    """The innermost line of the user's code in an exception's traceback."""
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(trace)
        if is_user_file(frame.filename)
    ]
    return lines[-1] if lines else "?"


_warned: dict[Any, Any] = {}


def warn(message: str, line: str | None = None) -> None:
    """Warns once, at the line of the user's code that is running, or at `line`.

    The category is UserWarning, to which `warnings.filterwarnings` applies.
    """
    name, _, number = (line or here()).rpartition(":")
    if not number.isdigit():
        name, number = "jaxpp", "1"
    warnings.warn_explicit(message, UserWarning, name, int(number), registry=_warned)


# --- Values in messages -----------------------------------------------------------------


def plain_text(text: str) -> str:
    """Escapes the characters that UTF-8 or a C string cannot hold."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")


def raised_text(error: BaseException) -> str:
    """An exception formatted like the last line of its traceback."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # from a user's own __str__
        return type(error).__name__


def counted(count: int, noun: str) -> str:
    """ "1 stage", "2 stages"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def describe(value: Any) -> str:
    """The name of a class; the `shorten`ed repr of anything else."""
    return value.__name__ if isinstance(value, type) else shorten(value)


class _Leaf:
    """Prints as a star for an array, otherwise as the value."""

    def __init__(self, leaf: Any) -> None:
        self.text = "*" if hasattr(leaf, "shape") else describe(leaf)

    def __repr__(self) -> str:
        return self.text


def tree_text(tree: Any) -> str:
    """A pytree as text, with a star for each array."""
    return shorten(jax.tree.map(_Leaf, tree), 300)


def is_count(value: Any, least: int) -> bool:
    """Whether it is a whole number from `least` that the planner can represent."""
    try:
        return least <= operator.index(value) <= _core.LARGEST_COUNT
    except TypeError:
        return False


def check_whole(what: str, value: Any, least: int, code: str = "invalid-argument") -> int:
    """Checks for a whole number. Raises JaxppError(code) about `what`."""
    if not is_count(value, least):
        raise make_error(
            code,
            f"{what}={shorten(value)}; expected a whole number from {least} to "
            f"{_core.LARGEST_COUNT}",
            wrong_type=not hasattr(value, "__index__"),
        )
    return operator.index(value)


def check_number(what: str, value: Any) -> float:
    """Checks for a finite number from 0. Raises JaxppError("invalid-argument") about `what`."""
    is_number = isinstance(value, numbers.Real | np.number)
    if is_number and 0 <= value < math.inf:
        return float(value)
    raise make_error(
        "invalid-argument",
        f"{what}={shorten(value)}; expected a finite number of at least 0",
        wrong_type=not is_number,
    )


def check_path(what: str, value: Any, expected: str) -> str:
    """Checks for a path that files can have. Raises JaxppError("invalid-argument") about
    `what`; `expected` is, for example, "the path of a plan file"."""
    try:
        path = os.fsdecode(value)
    except TypeError:
        path = "\0"
    if "\0" not in path:
        return path
    raise make_error(
        "invalid-argument",
        f"{what}={shorten(value)}; expected {expected}",
        wrong_type=not isinstance(value, str | bytes | os.PathLike),
    )


def check_prefix(where: str, given: Any, tree: Any, whose: str) -> list[Any]:
    """Checks that specs, shardings or Nones are a pytree prefix of a tree, and returns the one
    for each of its leaves. Raises JaxppError("sharding") about the last word of `where`."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding)

    try:
        found: list[Any] = broadcast_prefix(given, tree, is_leaf=is_leaf)
    except ValueError:
        name, own = (words.rpartition(" ")[2] for words in (where, whose))
        raise make_error(
            "sharding",
            f"{where}: expected a pytree prefix of {whose}\n"
            f"  {name}: {tree_text(given)}\n"
            f"  {own}: {tree_text(tree)}",
        ) from None
    return found


def check_arrays(tree: Any, what: str, hint: str = "") -> None:
    """Checks that JAX can compute with every leaf. Raises JaxppError("invalid-argument")."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        try:
            found_ref = is_ref(leaf)
        except OverflowError:
            raise make_error(
                "invalid-argument",
                f"{what}{jax.tree_util.keystr(path)}: expected a number that fits int32, found "
                f"{shorten(leaf)}; pass it as a float, or set jax_enable_x64",
            ) from None
        except TypeError:
            raise make_error(
                "invalid-argument",
                f"{what}{jax.tree_util.keystr(path)}: expected an array or a number, found "
                f"{shorten(leaf)} of type {type(leaf).__name__}{hint}",
                wrong_type=True,
            ) from None
        if found_ref:
            raise make_error(
                "invalid-argument",
                f"{what}{jax.tree_util.keystr(path)}: expected an array, found a jax.Ref, "
                f"{jax.typeof(leaf)}; pass its value, ref[...], and return the new one",
                wrong_type=True,
            )
