"""Predictions of a step's time, from traces of its tasks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

from jaxpp import _core
from jaxpp.devices import Devices

__all__ = ["Prediction", "predict_step"]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted times of a step, in milliseconds. It prints as a table with the peak bytes
    of each rank and the bytes of each link."""

    makespan: float  # of one step
    period: float  # from step to step, where several are in flight
    bubble: float  # the share of the makespan in which ranks run nothing
    busy: list[float]  # by rank
    table: str  # as the command `jaxpp predict` prints it
    trace_json: str  # in the format of CompiledStep.trace_json()

    def __str__(self) -> str:
        return self.table.rstrip()


def predict_step(
    plan: _core.Plan,
    devices: Devices,
    in_flight: int,
    traces: Sequence[str],
    cores: int | None,
    threads: float,
    processes: int,
    call: float,
    latency: float,
    bandwidth: float,
    steps: int,
) -> Prediction:
    """`CompiledStep.predict`, whose arguments these are."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if devices.platform == "cpu" else 0
    first = [row[0] for row in devices.indices]
    shared = [first.index(index) for index in first]
    found = plan.predict(
        list(traces),
        shared,
        devices.rank_size,
        cores,
        threads,
        processes,
        call,
        latency,
        bandwidth,
        steps,
        in_flight,
    )
    return Prediction(*found)
