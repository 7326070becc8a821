"""The costs of a step, computed from its plan without compiling or running it."""

from __future__ import annotations

import dataclasses

from jaxpp import _core

__all__ = ["CostSummary", "LinkCost", "RankCost", "cost_summary"]


@dataclasses.dataclass(frozen=True)
class RankCost:
    """One rank's part of a step."""

    tasks: int  # runs
    flops: float  # exact for products and convolutions, one per element for other ops
    peak_bytes: int  # on each of the rank's devices


@dataclasses.dataclass(frozen=True)
class LinkCost:
    """The messages that one rank sends to another in a step."""

    src: int
    dst: int
    messages: int
    bytes: int  # per device


@dataclasses.dataclass(frozen=True)
class CostSummary:
    """The costs of a step. It prints as a table."""

    ranks: list[RankCost]
    links: list[LinkCost]
    table: str  # of both, as the command `jaxpp plan` prints it

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

    def __str__(self) -> str:
        return self.table


def cost_summary(plan: _core.Plan) -> CostSummary:
    """The costs of a plan's step."""
    ranks, links, table = plan.costs()
    return CostSummary(
        [RankCost(*rank) for rank in ranks], [LinkCost(*link) for link in links], table.rstrip()
    )
