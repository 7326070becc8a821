"""What a long call is doing: on the logger, and in a line on the terminal."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["reporting", "show"]

_log = logging.getLogger("jaxpp")

# Writes the line again, with this text, while a call reports.
_write: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "write", default=None
)


@contextlib.contextmanager
def reporting(what: str) -> Iterator[Callable[[str], None]]:
    """Yields a function that begins a phase of `what`.

    The logger "jaxpp" reports each phase at INFO. If it is not enabled for that and standard
    error is a terminal, a line there shows the phase and its details.
    """
    begin = time.monotonic()
    is_shown = sys.stderr is not None and sys.stderr.isatty()
    is_shown = is_shown and not _log.isEnabledFor(logging.INFO)

    def write(text: str, end: str = "") -> None:
        if is_shown:
            print(f"\r\x1b[K{text}", end=end, file=sys.stderr, flush=True)

    def detail(text: str) -> None:
        write(f"{what}: {text}, {time.monotonic() - begin:.0f} s")

    def phase(text: str) -> None:
        _log.info("%s: %s", what, text)
        detail(text)

    token = _write.set(detail)
    try:
        yield phase
    except BaseException:
        write("")
        raise
    finally:
        _write.reset(token)
    ready = f"ready after {time.monotonic() - begin:.1f} s"
    _log.info("%s: %s", what, ready)
    write(f"{what}: {ready}", end="\n")


def show(text: str) -> None:
    """Shows how far the phase is, if a call reports."""
    write = _write.get()
    if write:
        write(text)
