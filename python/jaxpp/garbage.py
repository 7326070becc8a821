"""Python's garbage collector while a step is compiled."""

from __future__ import annotations

import gc
import threading
from types import TracebackType

__all__ = ["rare_collections"]

_ALLOCATIONS = 100_000  # before a collection; 700 by default


class _RareCollections:
    """A context in which the garbage collector runs rarely. Tracing and lowering make many
    objects and hardly any garbage, and each collection visits them again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = 0  # in the context
        self._before: tuple[int, int, int] = (0, 0, 0)

    def __enter__(self) -> None:
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._before = gc.get_threshold()
                first, *rest = self._before
                # 0: the user has switched collections off.
                gc.set_threshold(first and max(first, _ALLOCATIONS), *rest)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._threads -= 1
            if not self._threads:
                gc.set_threshold(*self._before)


rare_collections = _RareCollections()
