"""What a step costs: counted in its plan and its compiled tasks, or predicted from traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = [
    "CollectiveCost",
    "Collectives",
    "CostSummary",
    "LinkCost",
    "MemoryAnalysis",
    "Prediction",
    "RankCost",
    "cost_summary",
]


# Of each collective: the rank, its task, the kind, the axes, how often and how many bytes.
Collectives = Sequence[tuple[int, str, str, str, int, int]]


@dataclasses.dataclass(frozen=True)
class RankCost:
    """One rank's part of a step."""

    tasks: int  # task runs
    flops: float  # exact for products and convolutions, one per element for other ops
    peak_bytes: int  # on each of the rank's devices
    peak_host_bytes: int  # in pinned host memory, for each of the rank's devices


@dataclasses.dataclass(frozen=True)
class LinkCost:
    """The messages that one rank sends to another in a step."""

    src: int
    dst: int
    messages: int
    bytes: int  # per device


@dataclasses.dataclass(frozen=True)
class CollectiveCost:
    """The collectives of one kind that a task runs over the same axes of its rank's mesh.

    Those of all branches of a condition count. Those in a loop count once per iteration, or
    once if XLA does not know the number of iterations.
    """

    rank: int
    task: str
    kind: str  # "all-reduce", "all-gather", ...
    axes: str  # joined by commas
    times: int  # per step
    bytes: int  # of the results on each device, per step


@dataclasses.dataclass(frozen=True)
class CostSummary:
    """The costs of a step. It prints as tables."""

    ranks: list[RankCost]
    links: list[LinkCost]
    # Empty before the step is compiled.
    collectives: list[CollectiveCost]
    table: str  # all costs, as `jaxpp plan` prints them

    @property
    def tasks(self) -> int:
        """The number of tasks that all ranks run in a step."""
        return sum(rank.tasks for rank in self.ranks)

    @property
    def flops(self) -> float:
        """The floating-point operations of all ranks in a step."""
        return sum(rank.flops for rank in self.ranks)

    @property
    def peak_bytes(self) -> int:
        """The largest peak memory of any device."""
        return max(rank.peak_bytes for rank in self.ranks)

    @property
    def peak_host_bytes(self) -> int:
        """The largest peak in pinned host memory of any device."""
        return max(rank.peak_host_bytes for rank in self.ranks)

    def __str__(self) -> str:
        return self.table


@dataclasses.dataclass(frozen=True)
class MemoryAnalysis:
    """The memory of the device that needs most, under JAX's names, in bytes."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int  # of donated arguments
    temp_size_in_bytes: int  # everything else at the peak
    generated_code_size_in_bytes: int
    peak_memory_in_bytes: int
    # The same in pinned host memory.
    host_argument_size_in_bytes: int
    host_output_size_in_bytes: int
    host_alias_size_in_bytes: int
    host_temp_size_in_bytes: int
    host_peak_memory_in_bytes: int


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted times of a step, in milliseconds. It prints as a table with the peak bytes
    of each rank and the bytes of each link."""

    makespan: float  # of one step
    period: float  # from step to step, if several are in flight
    bubble: float  # the share of the makespan during which ranks run nothing
    busy: list[float]  # by rank
    table: str  # as `jaxpp predict` prints it
    trace_json: str  # in the format of CompiledStep.trace_json()

    def __str__(self) -> str:
        return self.table.rstrip()


def cost_summary(costs: Any) -> CostSummary:
    """The costs that `_core.Plan.costs` or `_core.Runtime.costs` returns."""
    ranks, links, collectives, table = costs
    return CostSummary(
        [RankCost(*rank) for rank in ranks],
        [LinkCost(*link) for link in links],
        [CollectiveCost(*collective) for collective in collectives],
        table.rstrip(),
    )
