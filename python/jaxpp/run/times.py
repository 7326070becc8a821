"""Run times of tasks on their devices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxpp import _core

__all__ = ["collect_task_times_ms", "collecting", "note_step"]

_collectors: list[dict[str, list[float]]] = []


@contextlib.contextmanager
def collect_task_times_ms(enabled: bool = True) -> Iterator[dict[str, list[float]]]:
    """Collects the run times of all tasks in the `with` block.

    Yields:
      A dict from task name ("fwd_0", "bwd_3", "after_loop_0_1") to a list with the milliseconds
      of each run, from the moment its inputs and device were available until its results were.
      It stays empty if not `enabled`.
    """
    times: dict[str, list[float]] = {}
    if enabled:
        _collectors.append(times)
    try:
        yield times
    finally:
        # Not list.remove(): another collector may be equal.
        _collectors[:] = [each for each in _collectors if each is not times]


def collecting() -> bool:
    return bool(_collectors)


def note_step(runs: list[_core.TaskRun]) -> None:
    """Adds a traced step's runs."""
    for run in runs:
        for times in _collectors:
            times.setdefault(run.task, []).append((run.end - run.start) / 1e6)
