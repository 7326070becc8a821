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
        lines = [f"{'rank':>4} {'tasks':>7} {'FLOPs':>10} {'peak bytes':>12}"]
        lines += [
            f"{k:>4} {rank.tasks:>7} {rank.flops:>10.3g} {rank.peak_bytes:>12}"
            for k, rank in enumerate(self.ranks)
        ]
        if self.links:
            lines += ["", f"{'link':>8} {'messages':>9} {'bytes':>12}"]
        lines += [
            f"{f'{link.src} -> {link.dst}':>8} {link.messages:>9} {link.bytes:>12}"
            for link in self.links
        ]
        return "\n".join(lines)


def cost_summary(plan: _core.Plan) -> CostSummary:
    """The costs of a plan's step."""
    totals = zip(plan.totals(), plan.summary(), strict=True)
    links: dict[tuple[int, int], LinkCost] = {}
    for channel in plan.channels():
        pair = channel.src, channel.dst
        before = links.get(pair, LinkCost(*pair, 0, 0))
        messages, size = before.messages + channel.messages, before.bytes + channel.bytes
        links[pair] = LinkCost(*pair, messages, size)
    return CostSummary(
        [RankCost(total.tasks, total.flops, rank.peak_bytes) for total, rank in totals],
        [links[pair] for pair in sorted(links)],
    )
