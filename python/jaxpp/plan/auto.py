"""`Auto`: searches a schedule for a model on given devices under a memory limit."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from jaxpp import _core
from jaxpp.errors import JaxppError, annotate, make_error
from jaxpp.mesh import MpmdMesh
from jaxpp.schedules import BaseSchedule, FusedTask, Task
from jaxpp.trace.auto_stages import Cut
from jaxpp.trace.call import MemoryLimits, Options, memory_limits_of
from jaxpp.trace.front import Graph

__all__ = [
    "Auto",
    "Found",
    "best_cut",
    "find_schedules",
    "is_auto",
    "trial_length",
]

_log = logging.getLogger("jaxpp")


@dataclasses.dataclass
class Found:
    """The schedule that `Auto` found. Times are in milliseconds, from measured costs."""

    schedule: _core.Schedule
    name: str  # the name of a built-in schedule, or "searched"
    makespan: float  # of the loop
    bound: float  # a lower bound on the makespan
    built_in: str | None  # the best built-in schedule that fits
    built_in_makespan: float
    tried: int
    costs: list[
        tuple[float, float, float]
    ]  # per stage: forward, input gradient, weight gradient
    spreads: list[tuple[float, float, float]]  # the standard deviations of their runs
    peak_bytes: list[int]  # bytes per rank and device; known once the step is planned
    assumes: str  # a known inaccuracy of the times; "" if none
    # The makespans that were expected with these numbers of stages, if `auto_stages` left the
    # number open.
    by_stages: dict[int, float] = dataclasses.field(default_factory=dict)
    offloads: bool = False  # fits only if ranks over their limits offload activations

    def __str__(self) -> str:
        sizes = self.schedule.sizes()
        over = self.makespan / self.bound - 1 if self.bound else 0.0
        lines = [
            f"{self.name}: {sizes.stages} stages on {sizes.ranks} ranks with "
            f"{sizes.microbatches} microbatches: {self.makespan:.4g} ms, {over:.1%} over the "
            f"lower bound, {self.tried} tried",
            f"best built-in schedule that fits: {self.built_in or 'none'}"
            + (f", {self.built_in_makespan:.4g} ms" if self.built_in else ""),
        ]
        placed = zip(self.schedule.stage_ranks(), self.costs, self.spreads, strict=True)
        for stage, (rank, costs, spreads) in enumerate(placed):
            forward, backward, weight = (
                f"{cost:.3g} \N{PLUS-MINUS SIGN} {spread:.2g} ms"
                for cost, spread in zip(costs, spreads, strict=True)
            )
            lines.append(
                f"stage {stage} on rank {rank}: forward {forward}, input gradient "
                f"{backward}, weight gradient {weight}"
            )
        for rank, peak in enumerate(self.peak_bytes):
            lines.append(f"rank {rank}: peak memory {peak} bytes")
        if self.by_stages:
            times = (f"{n} stages {ms:.4g} ms" for n, ms in sorted(self.by_stages.items()))
            lines.append(f"expected before the stages were measured: {', '.join(times)}")
        if self.offloads:
            lines.append("ranks over their limits offload; the times are those without moves")
        if self.assumes:
            lines.append(self.assumes)
        return "\n".join(lines)


class Auto(BaseSchedule):
    """A schedule that is searched for, with costs measured on the devices.

    The first call of a step with new shapes runs two microbatches, one after the other, to
    measure the stages; stages with equal modules are measured together. The marks give the
    number of stages and the mesh the number of ranks; if `auto_stages(fun)` places the marks,
    the number of stages, the cut and the schedule are chosen together. Later calls with the
    same shapes reuse the schedule. The trial calls the step's callbacks (`jax.debug.print`)
    too. Each object measures and searches separately: two are never equal. If no schedule fits
    the limit and the step's `offload` is None, activations are offloaded.

    Args:
      memory_limit: the bytes that a step may use on each device in total, as in
        `mpmd_jit_with_loop`: a number, or one per rank. The limit given there applies too.
      seconds: the time limit of the search.

    Attributes:
      found: the result of the last search, which can be printed; None before the first.
    """

    def __init__(
        self, memory_limit: int | Sequence[int] | None = None, *, seconds: float = 2.0
    ) -> None:
        if not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise make_error(
                "schedule", f"Auto: seconds={seconds!r}; expected a number above 0"
            )
        self.memory_limit = memory_limit
        self.seconds = float(seconds)
        self.found: Found | None = None
        self._known: dict[Any, Found] = {}

    def __repr__(self) -> str:
        return f"Auto(memory_limit={self.memory_limit!r})"

    def _unmeasured(self) -> JaxppError:
        return make_error(
            "schedule",
            "Auto: expected a treduce inside mpmd_jit_with_loop, which measures the stages; "
            "use Searched if the costs are known",
        )

    def build(self, n_mubatches: int, mpmd_dim: int) -> _core.Schedule:
        raise self._unmeasured()

    def tasks(self, n_mubatches: int) -> list[list[Task | FusedTask | None]]:
        raise self._unmeasured()

    def limits(self, mesh: MpmdMesh, others: MemoryLimits | None) -> MemoryLimits | None:
        """The smaller of the schedule's own limit and the step's limit, for each rank."""
        own = memory_limits_of(self.memory_limit, mesh, "Auto")
        if own is None or others is None:
            return own or others
        if own[1] != others[1]:  # one is a number and the other a list: divide the number
            own, others = _for_each_rank(own, mesh), _for_each_rank(others, mesh)
        return tuple(map(min, own[0], others[0])), own[1]


def _for_each_rank(limits: MemoryLimits, mesh: MpmdMesh) -> MemoryLimits:
    """Splits limits over ranks that share devices, so that each holds for one rank."""
    shares = 1 if limits[1] is None else mesh.ranks_per_device
    return tuple(n // shares for n in limits[0]), None


def is_auto(schedule: Any) -> bool:
    return isinstance(schedule, Auto)


def trial_length(schedule: Any, length: int) -> int:
    """The number of microbatches of a loop that a trial runs."""
    return min(length, _core.TRIAL_MICROBATCHES) if is_auto(schedule) else length


def shared_cores(mesh: MpmdMesh) -> str:
    """A note if CPU devices share cores, which the measured times do not reflect, or ""."""
    devices = list(mesh.jax_mesh.devices.flat)
    cores = len(os.sched_getaffinity(0))
    if devices[0].platform != "cpu" or len(devices) <= cores:
        return ""
    return (
        f"each task was measured alone, but {len(devices)} devices share {cores} cores, so a "
        "step takes longer than shown"
    )


def _search(
    at: int,
    graph: Graph,
    like: _core.Plan,
    schedules: Any,
    limits: Any,
    measured: Any,
    seconds: float,
    offload: bool | None,
) -> Found:
    costs, spreads = [stage[:3] for stage in measured], [stage[3:] for stage in measured]
    try:
        found = like.search(graph.core, at, schedules, costs, limits, seconds, offload)
    except JaxppError as error:
        raise annotate(error, f"loop at {graph.loops[at].where}") from None
    return Found(
        found.schedule,
        found.name,
        found.makespan,
        found.bound,
        found.built_in,
        found.built_in_makespan,
        found.tried,
        costs,
        spreads,
        [],
        "",
        offloads=found.offloads,
    )


def find_schedules(
    graph: Graph,
    given: list[_core.Schedule | None],
    mesh: MpmdMesh,
    memory_limits: MemoryLimits | None,
    offload: bool | None,
    measure: Callable[[], tuple[_core.Plan, list[Any]]],
) -> tuple[list[_core.Schedule], list[Found]]:
    """Finds schedules for the loops that use `Auto`, one loop after the other.

    `measure` plans and runs a trial of the step and returns the plan and the costs of each
    loop's stages.
    """
    ranks = mesh.mpmd_dim
    schedules = _core.Schedule.placeholders(graph.core, ranks, given)
    measured = None
    founds = []
    for at, loop in enumerate(graph.loops):
        if given[at] is not None:
            continue
        auto, limits = loop.schedule, loop.schedule.limits(mesh, memory_limits)
        key = (graph.core.text(), at, ranks, limits, offload)
        if key not in auto._known:
            measured = measured or measure()
            plan, costs = measured
            parts = (graph, plan, schedules, limits, costs[at])
            auto._known[key] = _search(at, *parts, auto.seconds, offload)
            auto._known[key].assumes = shared_cores(mesh)
            _log.info("loop at %s: %s", loop.where, auto._known[key])
        auto.found = auto._known[key]
        schedules[at] = auto.found.schedule
        founds.append(auto.found)
    return schedules, founds


# --- Stages whose number is open ----------------------------------------------------------

_REPEATS = (1, 2, 3, 4)  # the stages of each rank that are tried, on average
_MARGIN = 1.03  # more stages, which send more, must save more than this


class Draft(Protocol):
    """A traced step, before its loops have schedules."""

    graph: Graph
    given: list[_core.Schedule | None]  # of each loop; None: `Auto`
    options: Options
    cut: Cut

    def trial(self) -> Any:
        """The plan of a step that measures the stages."""


DraftT = TypeVar("DraftT", bound=Draft)


def _makespan(draft: Draft, at: int, seconds: float) -> float:
    """The makespan of the best schedule for stages that take `draft.cut.stage_times()`."""
    mesh, auto = draft.options.mesh, draft.graph.loops[at].schedule
    schedules = _core.Schedule.placeholders(draft.graph.core, mesh.mpmd_dim, draft.given)
    limits = auto.limits(mesh, draft.options.memory_limits)
    costs = draft.cut.stage_times()
    plan = draft.trial().plan
    parts = (draft.graph, plan, schedules, limits, costs, seconds, draft.options.offload)
    return _search(at, *parts).makespan


def best_cut(
    first: DraftT, redraft: Callable[[Cut], DraftT], measure: Callable[[Any], list[Any]]
) -> tuple[DraftT, dict[int, float]]:
    """The draft with the fewest stages whose best schedule ends first, but for a margin, and
    the makespans of all that were tried.

    The stages of the first draft are measured, which gives a time to each of their ops. The
    cuts for other numbers of stages, and the searches, go by these times.
    """
    at, ranks = first.given.index(None), first.options.mesh.mpmd_dim
    measured = measure(first.trial())[at]
    times = first.cut.measured([stage[:3] for stage in measured])
    seconds = first.graph.loops[at].schedule.seconds / len(_REPEATS)
    drafts, makespans = {}, {}
    refusal: JaxppError | None = None
    for stages in (ranks * repeats for repeats in _REPEATS):
        try:
            draft = redraft(Cut(stages, times))
            if draft.cut.functions != 1:
                break  # JAX has kept the trace of a jitted function, with its marks
            makespans[stages] = _makespan(draft, at, seconds)
            drafts[stages] = draft
        except JaxppError as error:
            if error.code not in ("stage-marks", "out-of-memory"):
                raise
            refusal = refusal or error
    if not makespans:
        if refusal is not None:
            raise refusal
        return first, {}
    enough = _MARGIN * min(makespans.values())
    return drafts[min(n for n, time in makespans.items() if time <= enough)], makespans
