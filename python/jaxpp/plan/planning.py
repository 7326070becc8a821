"""From a call to a proved plan: traced, partitioned and scheduled, but not compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxpp import _core
from jaxpp.errors import (
    JaxppError,
    annotate,
    definition_line,
    describe,
    make_error,
    shorten,
    warn,
)
from jaxpp.plan.advice import Step, layout_advice
from jaxpp.plan.auto import best_cut, find_schedules, is_auto, trial_length
from jaxpp.plan.explaining import notes_of
from jaxpp.plan.planned import Traced
from jaxpp.plan.sharding import Specs
from jaxpp.plan.traced_call import TracedCall, trace_call, trace_written
from jaxpp.trace.auto_stages import Cut, cutting
from jaxpp.trace.call import Call, MemoryLimits, Options, Signature
from jaxpp.trace.front import FrontLoop, Graph
from jaxpp.trace.gather import Gather

__all__ = ["trace_step"]


def _ask_schedule(loop: FrontLoop, ranks: int) -> Any:
    """Builds the loop's schedule; any object with `build` is a schedule."""
    build_for = getattr(loop.schedule, "build_for", None)
    if build_for is None:
        return loop.schedule.build(loop.length, ranks)
    return build_for(loop.length, ranks, loop.num_marks)


def _build_schedule(loop: FrontLoop, ranks: int) -> _core.Schedule:
    try:
        schedule = _ask_schedule(loop, ranks)
    except JaxppError as error:
        raise annotate(error, f"loop at {loop.where}") from None
    if isinstance(schedule, _core.Schedule):
        return schedule
    raise make_error(
        "schedule",
        f"loop at {loop.where}: schedule={describe(loop.schedule)}: expected its build() to "
        f"return the same type as BaseSchedule.build(), found {shorten(schedule)}",
        wrong_type=True,
    )


def _plan(
    traced_call: TracedCall,
    graph: Graph,
    schedules: list[_core.Schedule],
    memory_limits: MemoryLimits | None,
    reduce_once: bool,
    offload: bool | None,
    gathers: dict[int, Gather] | None = None,
    batch_axes: Sequence[str] = (),
) -> Traced:
    found: list[Specs] = []
    shardings = traced_call.shardings(graph, batch_axes)

    def measure(staged: _core.Staged) -> list[int] | None:
        found.append(shardings.infer(staged))
        return found[-1].value_bytes

    def keep_partial() -> None:
        for loop in range(len(graph.loops)):
            graph.core.set_partial(loop, shardings.partial_results(loop))

    def make_plan() -> _core.Plan:
        keep_partial()
        return _core.Plan(graph.core, schedules, memory_limits, measure, offload)

    if reduce_once and graph.loops and traced_call.mesh.lowering_mesh().size > 1:
        shardings.find_partial(_core.Plan.partition(graph.core, schedules))
        if traced_call.mesh.unequal:
            keep_partial()
            shardings.reduce_shared(_core.Plan.partition(graph.core, schedules))
    try:
        plan = make_plan()
    except JaxppError as error:
        # A partial sum is as large as the whole value on each device: retry with sums
        # of sharded weights reduced at once.
        if error.code != "out-of-memory" or not shardings.leave_sharded():
            raise
        plan = make_plan()
    return Traced(
        mesh=traced_call.mesh,
        staged=plan.staged(),
        specs=found[-1],
        plan=plan,
        tree=traced_call.tree,
        out_tree=traced_call.out_tree,
        in_avals=[v.aval for v in traced_call.closed.jaxpr.invars],
        out_avals=traced_call.closed.out_avals,
        arg_names=traced_call.arg_names,
        donated=traced_call.donated,
        argument_bounds=traced_call.argument_bounds,
        result_bounds=traced_call.result_bounds,
        consts=graph.consts,
        statics=traced_call.statics,
        schedule_text="; ".join(
            schedule.text().partition("\n")[0].removeprefix("schedule ")
            for schedule in schedules
        ),
        notes=notes_of(
            graph.loops,
            shardings.partial,
            {v: gather for v, gather in (gathers or {}).items() if v in graph.gathered},
            traced_call.arg_names,
        ),
        closed=traced_call.closed,
        graph=graph,
        schedules=schedules,
        proof=plan.proof(),
    )


def _plan_gathered(
    traced_call: TracedCall,
    graph: Graph,
    schedules: list[_core.Schedule],
    next_args: list[int],
    options: Options,
    offload: bool | None,
) -> Traced:
    """Plans a step whose sharded weights are gathered as the options say."""
    limits, once = options.memory_limits, options.reduce_once
    gathers: dict[int, Gather] = {}
    batch_axes: list[str] = []
    if options.fsdp is not None and graph.loops and options.mesh.lowering_mesh().size > 1:
        shardings = traced_call.shardings(graph)
        shardings.find_partial(_core.Plan.partition(graph.core, schedules))
        gathers = shardings.gathers(options.fsdp, traced_call.arg_names)
        batch_axes = sorted(shardings.batch_axes()) if gathers else []
        graph = traced_call.graph(next_args, gathers=gathers)
    kept = (limits, once, offload)
    try:
        return _plan(traced_call, graph, schedules, *kept, gathers, batch_axes)
    except JaxppError as error:
        if error.code != "out-of-memory" or not any(g.once for g in gathers.values()):
            raise
    gathers = {v: dataclasses.replace(g, once=False) for v, g in gathers.items()}
    graph = traced_call.graph(next_args, gathers=gathers)
    return _plan(traced_call, graph, schedules, *kept, gathers, batch_axes)


@dataclasses.dataclass
class _Draft:
    """A traced step, before its loops have schedules."""

    call: TracedCall
    options: Options
    next_args: list[int]
    graph: Graph
    given: list[_core.Schedule | None]  # of each loop; None: `Auto`
    cut: Cut

    def trial(self) -> Traced:
        """The plan of a step that measures the stages: few microbatches, nothing donated."""
        call = dataclasses.replace(self.call, donated=[False] * len(self.call.donated))
        graph = call.graph(self.next_args, loop_length=trial_length)
        ranks, once = self.options.mesh.mpmd_dim, self.options.reduce_once
        schedules = _core.Schedule.placeholders(graph.core, ranks, self.given)
        return _plan(call, graph, schedules, None, once, offload=False)


def _offloaded_if_needed(plan: Callable[[bool | None], Traced], offload: bool | None) -> Traced:
    """What `plan` returns without or with offloading. `offload` is the step's option; None:
    only if memory does not suffice without, and on ranks over their limits."""
    try:
        return plan(bool(offload))
    except JaxppError as error:
        if error.code != "out-of-memory" or offload is not None:
            raise
        try:
            return plan(None)
        except JaxppError:
            raise error from None


def _draft(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options, cut: Cut
) -> _Draft:
    trace = trace_written if options.written else trace_call
    with cutting(cut):
        traced_call = trace(fun, signature, call, options)
    next_args = traced_call.next_args()
    graph = traced_call.graph(next_args)
    given = [
        None if is_auto(loop.schedule) else _build_schedule(loop, options.mesh.mpmd_dim)
        for loop in graph.loops
    ]
    return _Draft(traced_call, options, next_args, graph, given, cut)


def trace_step(
    fun: Callable[..., Any],
    signature: Signature,
    call: Call,
    options: Options,
    measure: Callable[[Traced], list[Any]],
) -> Traced:
    """Traces and plans a step. Nothing is compiled or run, unless a loop uses `Auto`.

    `measure` runs a trial of the step without donation and returns the costs of each loop's
    stages, with their spreads.
    """
    redraft = functools.partial(_draft, fun, signature, call, options)
    draft = redraft(Cut(options.mesh.mpmd_dim))
    by_stages: dict[int, float] = {}
    if draft.cut.functions == 1 and draft.given.count(None) == 1:
        draft, by_stages = best_cut(draft, redraft, measure)

    def run_trial() -> tuple[_core.Plan, list[Any]]:
        trial = draft.trial()
        return trial.plan, measure(trial)

    traced_call, graph = draft.call, draft.graph
    limits = options.memory_limits
    schedules, founds = find_schedules(
        graph, draft.given, options.mesh, limits, options.offload, run_trial
    )

    def plan_within_limits(offload: bool | None) -> Traced:
        parts = (traced_call, graph, schedules, draft.next_args, options)
        found = _plan_gathered(*parts, offload)
        found.plan.check_host_limit(options.host_limits)
        return found

    traced = _offloaded_if_needed(plan_within_limits, options.offload)
    line = definition_line(fun)
    step = Step(f"step {traced_call.name} at {line}", line, options.mesh.lowering_mesh())
    found_advice = [
        *((note, note.split(": ", 1)[0]) for note in traced.staged.notes()),
        *layout_advice(
            step, traced_call.closed.jaxpr, graph, traced.specs, traced_call.arg_names
        ),
    ]
    for text, line in found_advice:
        warn(text, line)
    if found_advice:
        traced.notes.append("\n".join(f"look at: {text}" for text, _ in found_advice))
    for found in founds:
        found.peak_bytes = [rank.peak_bytes for rank in traced.plan.summary()]
        found.by_stages = by_stages
    return traced
