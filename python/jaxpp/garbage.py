"""Python's garbage collector while a step is compiled."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

__all__ = ["rare_collections"]

_ALLOCATIONS = 1_000_000  # before a collection; 700 by default

_lock = threading.Lock()
# The thresholds that each thread in the context found; those of the user come first.
_found: list[tuple[int, int, int]] = []


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """A context in which the garbage collector runs rarely. Tracing and lowering make many
    objects and hardly any garbage, and each collection visits them again."""
    with _lock:
        _found.append(gc.get_threshold())
        first, *rest = _found[0]
        # 0: the user has switched collections off.
        gc.set_threshold(first and max(first, _ALLOCATIONS), *rest)
    try:
        yield
    finally:
        with _lock:
            before = _found.pop()
            if not _found:
                gc.set_threshold(*before)
