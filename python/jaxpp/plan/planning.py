"""From a call to a checked plan: traced, partitioned and scheduled, but not compiled."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.errors import (
    JaxppError,
    annotate,
    check_arrays,
    definition_line,
    describe,
    make_error,
    shorten,
    tree_text,
    warn,
    where_raised,
    without_partials,
)
from jaxpp.jax_internals.arrays import broadcast_prefix
from jaxpp.jax_internals.jaxprs import discharged, drop_unused
from jaxpp.mesh import MpmdMesh, MpmdSharding, Ranks, memory_of
from jaxpp.plan.advice import Step, layout_advice, warn_of_unparted
from jaxpp.plan.auto import best_cut, find_schedules, is_auto, trial_length
from jaxpp.plan.carried import carried
from jaxpp.plan.explaining import notes_of
from jaxpp.plan.planned import Traced
from jaxpp.plan.sharding import Specs, StepShardings
from jaxpp.trace.auto_stages import Cut, cutting
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.call import Call, MemoryLimits, Options, Signature, Static, struct_of
from jaxpp.trace.front import FrontLoop, Graph
from jaxpp.trace.gather import Gather
from jaxpp.trace.graph import build_graph
from jaxpp.trace.loop import refuse_refs_from_outside, warn_of_marks_without_loop
from jaxpp.trace.scans import scans_to_loops
from jaxpp.trace.stacked import cut_results, part_step, parts_of_leaves
from jaxpp.trace.written import Place, cut_parted, place_of

__all__ = [
    "given_memories",
    "name_of",
    "trace_function",
    "trace_step",
]


def _warn_of_pipeline_axis(
    given: Sequence[Any], what: str, names: Sequence[str], mesh: MpmdMesh, line: str
) -> None:
    for sharding, name in zip(given, names, strict=False):
        spec = getattr(sharding, "spec", sharding)
        if isinstance(sharding, MpmdSharding) or not isinstance(spec, PartitionSpec):
            continue
        if mesh.without_pipeline_axis(spec) != spec:
            warn(
                f"step at {line}: {what} of {name}: {spec} names {mesh.mpmd_axis_name!r}, the "
                "pipeline axis of the mesh, which shards nothing: each value is stored on the "
                "ranks of the stages that use it",
                line,
            )


def _broadcast(given: Any, tree: Any, what: str) -> list[Any]:
    """One spec, sharding, set of ranks or None per leaf."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding)

    whose = "arguments" if what == "in_specs" else "results"
    if given is None:
        return [None] * len(jax.tree.leaves(tree))
    try:
        found = broadcast_prefix(given, tree, is_leaf=is_leaf)
    except ValueError:
        raise make_error(
            "sharding",
            f"{what}: expected a pytree prefix of the step's {whose}\n"
            f"  {what}: {tree_text(given)}\n"
            f"  {whose}: {tree_text(tree)}",
        ) from None
    return found


def _memories_of(given: Sequence[Any], what: str, names: Sequence[str]) -> list[str | None]:
    """The memories that shardings name; a spec or None names none."""
    return [
        memory_of(one, f"{what} of {name}") if isinstance(one, jax.sharding.Sharding) else None
        for one, name in zip(given, names, strict=False)
    ]


def given_memories(options: Options, args: Any, names: list[str]) -> list[str | None]:
    """For each leaf of the positional arguments, the memory in which in_shardings place
    it, or None."""
    taken = _broadcast(options.in_specs, args, "in_specs")
    return _memories_of(taken, "in_specs", names)


def _spec_of(given: Any, what: str, mesh: MpmdMesh) -> PartitionSpec | None:
    spec = given if isinstance(given, PartitionSpec) else getattr(given, "spec", None)
    if given is None or isinstance(spec, PartitionSpec):
        return None if spec is None else mesh.without_pipeline_axis(spec)
    raise make_error(
        "sharding",
        f"{what}: expected PartitionSpecs, NamedShardings, MpmdShardings or None, found "
        f"{describe(given)}",
        wrong_type=True,
    )


def _ranks_of(given: Any, mesh: MpmdMesh) -> tuple[int, ...] | None:
    """The ranks on which a result must stay."""
    if not isinstance(given, MpmdSharding):
        return None
    wrong = [r for r in given.mesh_ids if r >= mesh.mpmd_dim]
    if wrong:
        raise make_error(
            "sharding",
            f"out_shardings: expected ranks below {mesh.mpmd_dim}, found an MpmdSharding of "
            f"ranks {list(given.mesh_ids)}",
        )
    return tuple(sorted(given.mesh_ids))


def _result_ranks(
    given: Sequence[Any], results: Any, names: Sequence[str], options: Options
) -> list[tuple[int, ...] | None]:
    """For each leaf of the results the ranks on which it must stay, or None."""
    found = [_ranks_of(sharding, options.mesh) for sharding in given]
    if options.out_ranks is None:
        return found
    asked = _broadcast(options.out_ranks, results, "out_refs")
    every = range(options.mesh.mpmd_dim)
    for i, (name, ranks) in enumerate(zip(names, asked, strict=True)):
        is_set = isinstance(ranks, Set | Ranks)
        if not is_set or not ranks or not all(r in every for r in ranks):
            raise make_error(
                "sharding",
                f"{options.who}: out_refs of {name}: expected a set of ranks below "
                f"{len(every)}, found {describe(ranks)}",
                wrong_type=not is_set,
            )
        wanted = tuple(sorted(map(int, ranks)))
        if found[i] not in (None, wanted):
            raise make_error(
                "sharding",
                f"{options.who}: out_refs of {name}: expected the ranks of its out_shardings, "
                f"{found[i]}, found {wanted}",
            )
        found[i] = wanted
    return found


def trace_function(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options
) -> Any:
    """The step's jaxpr on flat arguments, and the tree of its results."""
    out_trees = []

    def flat_fun(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(call.tree, leaves)
        merged, named = signature.merge(call.static, args, kwargs)
        result = fun(*merged, **named)
        check_arrays(result, "the step's result")
        outs, out_tree = jax.tree.flatten(result)
        out_trees.append(out_tree)
        return outs

    signature.name_after(flat_fun, fun, call)
    structs = [struct_of(leaf) for leaf in call.leaves]
    with options.mesh.tracing_context():
        try:
            closed = jax.make_jaxpr(flat_fun)(*structs)
        except ValueError as error:
            if "is not found in mesh" not in str(error):
                raise
            where = where_raised(error.__traceback__)
            raise make_error(
                "sharding",
                f"{where}: {shorten(str(error), 300)[1:-1]} Expected axes of a rank's mesh",
            ) from None
    refuse_refs_from_outside(closed, f"step {name_of(fun)}")
    closed = discharged(closed)
    if options.schedule is not None:
        with options.mesh.tracing_context():
            closed = scans_to_loops(closed, options.schedule, options.who)
    return ClosedJaxpr(drop_unused(closed.jaxpr), closed.consts), out_trees[-1]


def name_of(fun: Callable[..., Any]) -> str:
    """The name of a step in messages."""
    return str(getattr(without_partials(fun), "__name__", "step"))


def _output_names(out_tree: Any) -> list[str]:
    numbered = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(numbered)
    return ["result" + jax.tree_util.keystr(path) for path, _ in leaves]


def _spec_of_leaf(mesh: MpmdMesh, leaf: Any) -> PartitionSpec | None:
    """The existing sharding of an argument, if its mesh has a rank's axes."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, MpmdSharding):
        return sharding.spec_in_rank if sharding.mpmd_mesh == mesh else None
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = {(a, n) for a, n in sharding.mesh.shape.items() if a != mesh.mpmd_axis_name}
    if not any(sizes <= set(own.shape.items()) for own in mesh.unequal or mesh.unstack[:1]):
        return None
    return mesh.without_pipeline_axis(sharding.spec)


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


@dataclasses.dataclass
class _TracedCall:
    """A traced step with everything that planning needs."""

    name: str
    mesh: MpmdMesh
    closed: ClosedJaxpr
    tree: Any
    out_tree: Any
    arg_names: list[str]
    out_names: list[str]
    in_specs: list[Any]
    out_specs: list[Any]
    out_ranks: list[tuple[int, ...] | None]
    in_memories: list[str]
    out_memories: list[str | None]  # None: not given
    argument_bounds: list[Bounds | None]
    result_bounds: list[Bounds | None]
    statics: list[Static]
    places: list[Place] | None = None  # of the arguments of a program written by hand

    def next_args(self, donated: list[bool]) -> list[int]:
        """For each result the argument that it becomes in the next step, or NONE."""
        arguments = ([v.aval for v in self.closed.jaxpr.invars], self.argument_bounds)
        results = (self.closed.out_avals, self.result_bounds)
        return carried(self.tree, self.out_tree, arguments, results, donated)

    def graph(self, donated: list[bool], next_args: list[int], **options: Any) -> Graph:
        ranks, names = self.mesh.mpmd_dim, (self.arg_names, self.out_names)
        ends = (*names, next_args, self.out_ranks, self.in_memories, self.out_memories)
        options["places"] = self.places
        graph = build_graph(self.name, ranks, self.closed, donated, *ends, **options)
        if self.mesh.lowering_mesh().size > 1:
            graph.core.set_sharded()
        return graph

    def shardings(self, graph: Graph, batch_axes: Sequence[str] = ()) -> StepShardings:
        ends = (self.in_specs, self.out_specs, self.arg_names, self.out_names)
        return StepShardings(graph, self.mesh, *ends, batch_axes)

    def plan(
        self,
        graph: Graph,
        schedules: list[_core.Schedule],
        donated: list[bool],
        memory_limits: MemoryLimits | None,
        reduce_once: bool,
        offload: bool | None,
        gathers: dict[int, Gather] | None = None,
        batch_axes: Sequence[str] = (),
    ) -> Traced:
        found: list[Specs] = []
        shardings = self.shardings(graph, batch_axes)

        def measure(staged: _core.Staged) -> list[int] | None:
            found.append(shardings.infer(staged))
            return found[-1].value_bytes

        def keep_partial() -> None:
            for loop in range(len(graph.loops)):
                graph.core.set_partial(loop, shardings.partial_results(loop))

        def make_plan() -> _core.Plan:
            keep_partial()
            return _core.Plan(graph.core, schedules, memory_limits, measure, offload)

        if reduce_once and graph.loops and self.mesh.lowering_mesh().size > 1:
            shardings.find_partial(_core.Plan.partition(graph.core, schedules))
            if self.mesh.unequal:
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
            mesh=self.mesh,
            staged=plan.staged(),
            specs=found[-1],
            plan=plan,
            tree=self.tree,
            out_tree=self.out_tree,
            in_avals=[v.aval for v in self.closed.jaxpr.invars],
            out_avals=self.closed.out_avals,
            arg_names=self.arg_names,
            donated=donated,
            argument_bounds=self.argument_bounds,
            result_bounds=self.result_bounds,
            consts=graph.consts,
            statics=self.statics,
            schedule_text="; ".join(
                schedule.text().partition("\n")[0].removeprefix("schedule ")
                for schedule in schedules
            ),
            notes=notes_of(graph.loops, shardings.partial, gathers or {}, self.arg_names),
            closed=self.closed,
            graph=graph,
            schedules=schedules,
            proof=plan.proof(),
        )


def _by_parts(values: Sequence[Any], bounds: Sequence[Bounds | None]) -> list[Any]:
    """Expands one entry per leaf to one entry per part."""
    pairs = zip(values, parts_of_leaves(bounds), strict=True)
    return [value for value, parts in pairs for _ in parts]


def _part_names(names: Sequence[str], bounds: Sequence[Bounds | None]) -> list[str]:
    found = []
    for name, cut in zip(names, bounds, strict=True):
        if cut is None:
            found.append(name)
        else:
            found += [f"{name}[{':, ' * cut.axis}{a}:{b}]" for a, b in cut.ranges()]
    return found


def _shards(spec: PartitionSpec | None, axis: int) -> bool:
    return spec is not None and any(p is not None for p in spec.partitions[axis : axis + 1])


def _may_part(mesh: MpmdMesh) -> bool:
    explicit = any(t is AxisType.Explicit for t in mesh.lowering_mesh().axis_types)
    return mesh.mpmd_dim > 1 and not explicit


def _with_split_leaves(traced_call: _TracedCall, donated: list[bool]) -> _TracedCall:
    """The step with leaves that hold the weights of several stages split into parts."""
    if not _may_part(traced_call.mesh):
        return traced_call
    with traced_call.mesh.tracing_context():
        specs = traced_call.in_specs
        found, unparted = part_step(
            traced_call.closed,
            lambda k, axis: not _shards(specs[k], axis),
            traced_call.next_args(donated),
        )
    avals = [v.aval for v in traced_call.closed.jaxpr.invars]
    warn_of_unparted(
        [(traced_call.arg_names[k], avals[k], line) for k, line in unparted.items()]
    )
    if found is None:
        return traced_call
    cut = zip(found.results, traced_call.out_specs, strict=True)
    if any(bounds and _shards(spec, bounds.axis) for bounds, spec in cut):
        return traced_call
    # Parts stay on the ranks of the stages that read them.
    ends = zip(traced_call.out_ranks, found.results, strict=True)
    ranks_of_wholes = [None if bounds else ranks for ranks, bounds in ends]
    return dataclasses.replace(
        traced_call,
        closed=found.closed,
        arg_names=_part_names(traced_call.arg_names, found.arguments),
        out_names=_part_names(traced_call.out_names, found.results),
        in_specs=_by_parts(traced_call.in_specs, found.arguments),
        out_specs=_by_parts(traced_call.out_specs, found.results),
        out_ranks=_by_parts(ranks_of_wholes, found.results),
        in_memories=_by_parts(traced_call.in_memories, found.arguments),
        out_memories=_by_parts(traced_call.out_memories, found.results),
        argument_bounds=found.arguments,
        result_bounds=found.results,
    )


def _bounds_of(given: Any, shape: tuple[int, ...]) -> Bounds | None:
    """How the sharding of a result divides one of its axes among ranks, if it does: into a
    part for each rank, also of ranks that share devices."""
    if not isinstance(given, MpmdSharding) or given.spec == given.spec_in_rank:
        return None
    ranks = len(given.mesh_ids)
    pairs = itertools.zip_longest(given.spec, given.spec_in_rank)
    axis = next(k for k, (own, in_rank) in enumerate(pairs) if own != in_rank)
    size = shape[axis]
    if not size or size % ranks:
        return None  # each rank holds all of it
    return Bounds(axis, tuple(range(0, size + 1, size // ranks)))


def _with_split_results(traced_call: _TracedCall, given: Sequence[Any]) -> _TracedCall:
    """The step with results split into parts if the user wants each rank to hold only its
    own rows."""
    if not _may_part(traced_call.mesh):
        return traced_call
    parts = parts_of_leaves(traced_call.result_bounds)
    numbers = zip(given, traced_call.result_bounds, parts, strict=True)
    cuts: list[Bounds | None] = [None] * len(traced_call.out_names)
    bounds = list(traced_call.result_bounds)
    for leaf, (sharding, known, at) in enumerate(numbers):
        shape = traced_call.closed.out_avals[at[0]].shape
        if known is None and shape:
            bounds[leaf] = cuts[at[0]] = _bounds_of(sharding, shape)
    if not any(cuts):
        return traced_call
    ranks = [
        own
        for whole, cut in zip(traced_call.out_ranks, cuts, strict=True)
        for own in ([whole] if cut is None or whole is None else [(r,) for r in whole])
    ]
    return dataclasses.replace(
        traced_call,
        closed=cut_results(traced_call.closed, cuts),
        out_names=_part_names(traced_call.out_names, cuts),
        out_specs=_by_parts(traced_call.out_specs, cuts),
        out_ranks=ranks,
        out_memories=_by_parts(traced_call.out_memories, cuts),
        result_bounds=bounds,
    )


def _trace_call(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options
) -> _TracedCall:
    mesh = options.mesh
    names, donated = signature.describe(call)
    taken = _broadcast(options.in_specs, call.args, "in_specs")
    _warn_of_pipeline_axis(taken, "in_specs", names, mesh, definition_line(fun))
    in_specs = [_spec_of(t, "in_specs", mesh) for t in taken]
    unknown = len(call.leaves) - len(taken)  # keyword arguments
    in_specs += [None] * unknown
    asked = [*_memories_of(taken, "in_specs", names), *[None] * unknown]
    in_memories = [
        memory or memory_of(getattr(leaf, "sharding", None), f"argument {name}")
        for memory, name, leaf in zip(asked, names, call.leaves, strict=True)
    ]
    in_specs = [
        _spec_of_leaf(mesh, leaf) if spec is None else spec
        for spec, leaf in zip(in_specs, call.leaves, strict=True)
    ]
    closed, out_tree = trace_function(fun, signature, call, options)
    warn_of_marks_without_loop(closed.jaxpr)
    name, out_names = name_of(fun), _output_names(out_tree)
    results = jax.tree.unflatten(out_tree, closed.out_avals)
    given = _broadcast(options.out_specs, results, "out_specs")
    _warn_of_pipeline_axis(given, "out_specs", out_names, mesh, definition_line(fun))
    traced_call = _TracedCall(
        name,
        mesh,
        closed,
        call.tree,
        out_tree,
        names,
        out_names,
        in_specs,
        [_spec_of(g, "out_specs", mesh) for g in given],
        _result_ranks(given, results, out_names, options),
        in_memories,
        _memories_of(given, "out_specs", out_names),
        argument_bounds=[None] * len(names),
        result_bounds=[None] * len(out_names),
        statics=signature.statics(call),
    )
    return _with_split_results(_with_split_leaves(traced_call, donated), given)


def _trace_written(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options
) -> _TracedCall:
    """A program written by hand, with its arguments and results where the user has placed
    them."""
    mesh, (names, _) = options.mesh, signature.describe(call)
    closed, out_tree = trace_function(fun, signature, call, options)
    # The trace has checked that the shardings are a prefix of the arguments.
    places = [
        place_of(sharding, mesh, f"{options.who}: in_shardings")
        for sharding in broadcast_prefix(options.in_specs, call.args)
    ]
    cut = cut_parted(closed, places)
    return _TracedCall(
        name_of(fun),
        mesh,
        cut.closed,
        call.tree,
        out_tree,
        _part_names(names, cut.argument_bounds),
        _part_names(_output_names(out_tree), cut.result_bounds),
        in_specs=[place.spec for place in cut.arguments],
        out_specs=[place.spec for place in cut.results],
        out_ranks=[place.ranks for place in cut.results],
        in_memories=[place.memory for place in cut.arguments],
        out_memories=[place.memory for place in cut.results],
        argument_bounds=cut.argument_bounds,
        result_bounds=cut.result_bounds,
        statics=[],
        places=cut.arguments,
    )


def _plan_gathered(
    traced_call: _TracedCall,
    graph: Graph,
    schedules: list[_core.Schedule],
    donated: list[bool],
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
        graph = traced_call.graph(donated, next_args, gathers=gathers)
    kept = (donated, limits, once, offload)
    try:
        return traced_call.plan(graph, schedules, *kept, gathers, batch_axes)
    except JaxppError as error:
        if error.code != "out-of-memory" or not any(g.once for g in gathers.values()):
            raise
    gathers = {v: dataclasses.replace(g, once=False) for v, g in gathers.items()}
    graph = traced_call.graph(donated, next_args, gathers=gathers)
    return traced_call.plan(graph, schedules, *kept, gathers, batch_axes)


@dataclasses.dataclass
class _Draft:
    """A traced step, before its loops have schedules."""

    call: _TracedCall
    options: Options
    donated: list[bool]
    next_args: list[int]
    graph: Graph
    given: list[_core.Schedule | None]  # of each loop; None: `Auto`
    cut: Cut

    def trial(self) -> Traced:
        """The plan of a step that measures the stages: few microbatches, nothing donated."""
        borrowed = [False] * len(self.donated)
        graph = self.call.graph(borrowed, self.next_args, loop_length=trial_length)
        ranks, once = self.options.mesh.mpmd_dim, self.options.reduce_once
        schedules = _core.Schedule.placeholders(graph.core, ranks, self.given)
        return self.call.plan(graph, schedules, borrowed, None, once, offload=False)


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
    trace = _trace_written if options.written else _trace_call
    with cutting(cut):
        traced_call = trace(fun, signature, call, options)
    donated = _by_parts(signature.describe(call)[1], traced_call.argument_bounds)
    next_args = traced_call.next_args(donated)
    graph = traced_call.graph(donated, next_args)
    given = [
        None if is_auto(loop.schedule) else _build_schedule(loop, options.mesh.mpmd_dim)
        for loop in graph.loops
    ]
    return _Draft(traced_call, options, donated, next_args, graph, given, cut)


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
        parts = (traced_call, graph, schedules, draft.donated, draft.next_args, options)
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
