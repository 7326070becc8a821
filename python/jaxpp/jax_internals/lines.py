"""Lines of the user's code, and the function names in JAX's messages."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from jax._src import api_util, source_info_util
from jax.extend.core import JaxprEqn

__all__ = [
    "at_line_of",
    "current_line",
    "exclude_from_user_lines",
    "is_user_file",
    "line_of",
    "name_after",
    "user_frames",
    "user_line",
]

# --- Lines of the user's code -----------------------------------------------------------


# JAX 0.10.2, 0.11.2: source_info_util.register_exclusion, which takes the beginning of paths.
def exclude_from_user_lines(folder: str) -> None:
    """Marks the files in this folder as library code."""
    source_info_util.register_exclusion(folder)


# JAX 0.10.2, 0.11.2: source_info_util.current_name_stack and user_context.
def at_line_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[None]:
    """Equations traced in this context get the source line and name stack of `eqn`."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    return source_info_util.user_context(eqn.source_info.traceback, name_stack=stack)


# JAX 0.10.2, 0.11.2: source_info_util.is_user_filename.
def is_user_file(name: str) -> bool:
    own = source_info_util.is_user_filename(name)
    return own and not name.startswith("<frozen ")  # frames of an import


# JAX 0.10.2, 0.11.2: the traceback in an equation's source_info, source_info_util.user_frames.
def user_frames(eqn: JaxprEqn) -> list[Any]:
    """The user's frames of an equation, innermost first; equal for equations of the same
    call."""
    return list(source_info_util.user_frames(eqn.source_info.traceback))


# JAX 0.10.2, 0.11.2: file_name and start_line of such a frame.
def line_of(frame: Any) -> str:
    """The file:line of a frame."""
    return f"{frame.file_name}:{frame.start_line}" if frame != "?" else frame


@functools.lru_cache(maxsize=4096)  # equations of one line have equal tracebacks
def _innermost_user_line(traceback: Any) -> str | None:
    frames = source_info_util.user_frames(traceback)
    frame = next((f for f in frames if is_user_file(f.file_name)), None)
    return line_of(frame) if frame else None


def user_line(eqn: JaxprEqn) -> str | None:
    """The user's line that wrote an equation, as file:line."""
    return _innermost_user_line(eqn.source_info.traceback)


# JAX 0.10.2, 0.11.2: source_info_util.current, user_frame.
def current_line() -> str | None:
    """The user's line that is running, as file:line."""
    if line := _innermost_user_line(source_info_util.current().traceback):
        return line
    # JAX's traceback starts where tracing started.
    frame: FrameType | None = sys._getframe()
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else None


# --- Function names in JAX's messages --------------------------------------------


# JAX 0.10.2, 0.11.2: api_util.debug_info and save_wrapped_fun_debug_info.
def name_after(
    run: Callable[..., Any],
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
) -> None:
    """Makes JAX's messages name `fun` and its arguments while it traces `run`."""
    names = {"static_argnums": static_argnums, "static_argnames": static_argnames}
    info = api_util.debug_info("jit", fun, args, kwargs, **names)
    api_util.save_wrapped_fun_debug_info(run, info)
