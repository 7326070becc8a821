"""From a call to a proved plan: traced, partitioned, scheduled, not compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
)
from jaxpp.jax_internals.arrays import broadcast_prefix
from jaxpp.jax_internals.jaxprs import discharged, drop_unused
from jaxpp.mesh import MpmdMesh, MpmdSharding, parted_sharding, refuse_memory_kind
from jaxpp.plan.advice import Step, warn_of_layout, warn_of_unparted
from jaxpp.plan.auto import find_schedules, is_auto, trial_length
from jaxpp.plan.carried import carried
from jaxpp.plan.costs import CostSummary, cost_summary
from jaxpp.plan.sharding import Specs, infer_specs
from jaxpp.trace.call import Call, MemoryLimits, Options, Signature, Static, struct_of
from jaxpp.trace.graph import FrontLoop, Graph, build_graph
from jaxpp.trace.loop import refuse_refs_from_outside, warn_of_marks_without_loop
from jaxpp.trace.stacked import Bounds, cut_results, part_step, parts_of_leaves

__all__ = ["Planned", "Traced", "name_of", "trace_function", "trace_step"]


@dataclasses.dataclass
class Planned:
    """A step's plan, and what its arguments and results are: traced, or from a file."""

    mesh: MpmdMesh
    staged: _core.Staged
    specs: Specs
    plan: _core.Plan
    tree: Any
    out_tree: Any
    in_avals: list[Any]
    out_avals: list[Any]
    arg_names: list[str]
    donated: list[bool]
    # Of the step's own arguments and results, whose number this is: where they are cut.
    argument_bounds: list[Bounds | None]
    result_bounds: list[Bounds | None]
    consts: list[Any]  # the plan's last arguments, which the caller does not pass
    statics: list[Static]
    schedule_text: str  # each schedule's name and sizes, which processes compare

    @property
    def text(self) -> str:
        """The programs of all actors."""
        return self.plan.text()

    @property
    def program_text(self) -> str:
        """The whole program, in the manner of a jaxpr."""
        mesh = self.mesh.lowering_mesh()
        return self.plan.program_text(lambda v: str(NamedSharding(mesh, self.specs.of(v))))

    @property
    def in_shardings(self) -> Any:
        """Where the arguments lie: (args, kwargs) with an `MpmdSharding` for each array.

        An argument that nothing uses lies on the first rank.
        """
        return self.tree.unflatten(self._shardings(self.staged.args(), self.argument_bounds))

    @property
    def out_shardings(self) -> Any:
        """Where the results lie: their tree with an `MpmdSharding` for each array."""
        return self.out_tree.unflatten(
            self._shardings(self.staged.outputs(), self.result_bounds)
        )

    @property
    def out_info(self) -> Any:
        """The shapes and dtypes of the results, with their shardings."""
        shardings = self._shardings(self.staged.outputs(), self.result_bounds)
        parts = parts_of_leaves(self.result_bounds)
        structs = []
        for cut, numbers, sharding in zip(self.result_bounds, parts, shardings, strict=True):
            aval = self.out_avals[numbers[0]]
            shape = (cut[-1], *aval.shape[1:]) if cut else aval.shape
            structs.append(jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding))
        return self.out_tree.unflatten(structs)

    def cost_summary(self) -> CostSummary:
        """Tasks, floating point operations and bytes of a step, rank by rank."""
        return cost_summary(self.plan)

    def _shardings(
        self, placed: Sequence[_core.PlacedValue], bounds: Sequence[Bounds | None]
    ) -> list[MpmdSharding]:
        """One a leaf; a leaf may be several values, its parts."""
        found = []
        for cut, numbers in zip(bounds, parts_of_leaves(bounds), strict=True):
            parts = placed[numbers.start : numbers.stop]
            spec = self.specs.of(parts[0].value)
            if cut:
                ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
                found.append(parted_sharding(self.mesh, ranks, spec, cut[-1]))
            else:
                found.append(MpmdSharding(self.mesh, parts[0].ranks or [0], spec))
        return found


@dataclasses.dataclass
class Traced(Planned):
    """A step traced, split, placed and scheduled, before anything is compiled."""

    closed: ClosedJaxpr  # the step, as it was traced
    graph: Graph
    schedules: list[_core.Schedule]
    proof: str  # what the checker found of the plan


def _refuse_pipeline_axis(given: Any, what: str, mesh: MpmdMesh) -> None:
    over_all = isinstance(given, NamedSharding) and given.mesh == mesh.jax_mesh
    spec = given.spec if over_all else given
    if isinstance(given, MpmdSharding) or not isinstance(spec, PartitionSpec):
        return
    axis = mesh.mpmd_axis_name
    named = [a for part in spec for a in (part if isinstance(part, tuple) else (part,))]
    if axis not in named:
        return
    others = [repr(a) for a in mesh.jax_mesh.axis_names if a != axis]
    raise make_error(
        "sharding",
        f"{what}: {spec} names {axis!r}, the pipeline axis of the mesh, along which nothing is "
        "sharded: each value lives whole on the ranks of the stages that use it; expected "
        + (f"axes of a rank's mesh: {', '.join(others)}" if others else "P()"),
    )


def _broadcast_shardings(
    given: Any, tree: Any, what: str, names: list[str], mesh: MpmdMesh
) -> list[Any]:
    """One spec, sharding or None a leaf; the leaves have these names."""

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
    for spec, name in zip(found, names, strict=False):
        _refuse_pipeline_axis(spec, f"{what} of {name}", mesh)
        refuse_memory_kind(spec, f"{what} of {name}")
    return found


def _spec_of(given: Any, what: str) -> PartitionSpec | None:
    if isinstance(given, MpmdSharding):
        return given.spec_in_rank
    spec = given if isinstance(given, PartitionSpec) else getattr(given, "spec", None)
    if given is None or isinstance(spec, PartitionSpec):
        return spec
    raise make_error(
        "sharding",
        f"{what}: expected PartitionSpecs, NamedShardings, MpmdShardings or None, found "
        f"{describe(given)}",
        wrong_type=True,
    )


def _ranks_of(given: Any, mesh: MpmdMesh) -> tuple[int, ...] | None:
    """The ranks that a result is to be left on."""
    if not isinstance(given, MpmdSharding):
        return None
    wrong = [r for r in given.mesh_ids if r >= mesh.mpmd_dim]
    if wrong:
        raise make_error(
            "sharding",
            f"out_shardings: expected the ranks of a mesh of {mesh.mpmd_dim}, found an "
            f"MpmdSharding of the ranks {list(given.mesh_ids)}",
        )
    return tuple(sorted(given.mesh_ids))


def trace_function(
    fun: Callable[..., Any], signature: Signature, call: Call, mesh: MpmdMesh
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
    with mesh.tracing_context():
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
    return ClosedJaxpr(drop_unused(closed.jaxpr), closed.consts), out_trees[-1]


def name_of(fun: Callable[..., Any]) -> str:
    """What a step is called."""
    return str(getattr(fun, "__name__", "step"))


def _output_names(out_tree: Any) -> list[str]:
    numbered = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(numbered)
    return ["result" + jax.tree_util.keystr(path) for path, _ in leaves]


def _spec_of_leaf(mesh: MpmdMesh, leaf: Any) -> PartitionSpec | None:
    """How an argument lies already, if it lies on a mesh with the axes of a rank's."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, MpmdSharding):
        return sharding.spec_in_rank if sharding.mpmd_mesh == mesh else None
    if not isinstance(sharding, NamedSharding):
        return None
    rank_axes = mesh.lowering_mesh().shape
    if any(
        rank_axes.get(axis, 0) != size
        for axis, size in sharding.mesh.shape.items()
        if axis != mesh.mpmd_axis_name
    ):
        return None
    return mesh.without_pipeline_axis(sharding.spec)


def _ask_schedule(loop: FrontLoop, ranks: int) -> Any:
    """What the loop's schedule builds; anything with `build` is a schedule."""
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
        f"give what BaseSchedule.build() gives, found {shorten(schedule)}",
        wrong_type=True,
    )


@dataclasses.dataclass
class _Front:
    """A step traced by JAX, with all that planning it takes."""

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
    argument_bounds: list[Bounds | None]
    result_bounds: list[Bounds | None]
    statics: list[Static]

    def next_args(self, donated: list[bool]) -> list[int]:
        """Which argument of the next step each result is, or NONE."""
        arguments = ([v.aval for v in self.closed.jaxpr.invars], self.argument_bounds)
        results = (self.closed.out_avals, self.result_bounds)
        return carried(self.tree, self.out_tree, arguments, results, donated)

    def graph(self, donated: list[bool], next_args: list[int], **options: Any) -> Graph:
        ranks, names = self.mesh.mpmd_dim, (self.arg_names, self.out_names)
        ends = (*names, next_args, self.out_ranks)
        return build_graph(self.name, ranks, self.closed, donated, *ends, **options)

    def plan(
        self,
        graph: Graph,
        schedules: list[_core.Schedule],
        donated: list[bool],
        memory_limits: MemoryLimits | None,
    ) -> Traced:
        found: list[Specs] = []

        def measure(staged: _core.Staged) -> list[int] | None:
            names = (self.arg_names, self.out_names)
            specs = infer_specs(graph, staged, self.mesh, self.in_specs, self.out_specs, *names)
            found.append(specs)
            return specs.value_bytes

        plan = _core.Plan(graph.core, schedules, memory_limits, measure)
        return Traced(
            mesh=self.mesh,
            staged=plan.staged(),
            specs=found[0],
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
            closed=self.closed,
            graph=graph,
            schedules=schedules,
            proof=plan.proof(),
        )


def _by_parts(values: Sequence[Any], bounds: Sequence[Bounds | None]) -> list[Any]:
    """An entry a part instead of one a leaf."""
    pairs = zip(values, parts_of_leaves(bounds), strict=True)
    return [value for value, parts in pairs for _ in parts]


def _part_names(names: Sequence[str], bounds: Sequence[Bounds | None]) -> list[str]:
    found = []
    for name, cut in zip(names, bounds, strict=True):
        if cut is None:
            found.append(name)
        else:
            found += [f"{name}[{a}:{b}]" for a, b in zip(cut, cut[1:], strict=False)]
    return found


def _cuts_rows(spec: PartitionSpec | None) -> bool:
    return spec is not None and len(spec) > 0 and spec[0] is not None


def _may_part(mesh: MpmdMesh) -> bool:
    explicit = any(t is AxisType.Explicit for t in mesh.jax_mesh.axis_types)
    return mesh.mpmd_dim > 1 and not explicit


def _part_front(front: _Front) -> _Front:
    """With the leaves that hold the weights of several stages by parts."""
    if not _may_part(front.mesh):
        return front
    with front.mesh.tracing_context():
        may_cut = [not _cuts_rows(s) for s in front.in_specs]
        found, unparted = part_step(front.closed, may_cut)
    avals = [v.aval for v in front.closed.jaxpr.invars]
    warn_of_unparted([(front.arg_names[k], avals[k], line) for k, line in unparted.items()])
    if found is None:
        return front
    cut = zip(found.results, front.out_specs, strict=True)
    if any(bounds and _cuts_rows(spec) for bounds, spec in cut):
        return front
    # Parts are left where the stages are that take them.
    ends = zip(front.out_ranks, found.results, strict=True)
    ranks_of_wholes = [None if bounds else ranks for ranks, bounds in ends]
    return dataclasses.replace(
        front,
        closed=found.closed,
        arg_names=_part_names(front.arg_names, found.arguments),
        out_names=_part_names(front.out_names, found.results),
        in_specs=_by_parts(front.in_specs, found.arguments),
        out_specs=_by_parts(front.out_specs, found.results),
        out_ranks=_by_parts(ranks_of_wholes, found.results),
        argument_bounds=found.arguments,
        result_bounds=found.results,
    )


def _bounds_of(given: Any, rows: int) -> Bounds | None:
    """How the rows of a result are dealt out to the ranks of its sharding, if they are."""
    if not isinstance(given, MpmdSharding) or given.spec == given.spec_in_rank:
        return None
    ranks = len(given.mesh_ids)
    share_devices = given.mesh.shape[given.mpmd_mesh.mpmd_axis_name] != ranks
    if share_devices or not rows or rows % ranks:
        return None  # each has all
    return tuple(range(0, rows + 1, rows // ranks))


def _deal_out(front: _Front, given: Sequence[Any]) -> _Front:
    """With the results by parts of which the user wants each rank to have its own rows."""
    if not _may_part(front.mesh):
        return front
    parts = parts_of_leaves(front.result_bounds)
    numbers = zip(given, front.result_bounds, parts, strict=True)
    cuts: list[Bounds | None] = [None] * len(front.out_names)
    bounds = list(front.result_bounds)
    for leaf, (sharding, known, at) in enumerate(numbers):
        shape = front.closed.out_avals[at[0]].shape
        if known is None and shape:
            bounds[leaf] = cuts[at[0]] = _bounds_of(sharding, shape[0])
    if not any(cuts):
        return front
    ranks = [
        own
        for whole, cut in zip(front.out_ranks, cuts, strict=True)
        for own in ([whole] if cut is None or whole is None else [(r,) for r in whole])
    ]
    return dataclasses.replace(
        front,
        closed=cut_results(front.closed, cuts),
        out_names=_part_names(front.out_names, cuts),
        out_specs=_by_parts(front.out_specs, cuts),
        out_ranks=ranks,
        result_bounds=bounds,
    )


def _trace_front(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options
) -> _Front:
    mesh = options.mesh
    names, _ = signature.describe(call)
    taken = _broadcast_shardings(options.in_specs, call.args, "in_specs", names, mesh)
    in_specs = [_spec_of(t, "in_specs") for t in taken]
    in_specs += [None] * (len(call.leaves) - len(in_specs))
    for name, leaf in zip(names, call.leaves, strict=True):
        refuse_memory_kind(getattr(leaf, "sharding", None), f"argument {name}")
    in_specs = [
        _spec_of_leaf(mesh, leaf) if spec is None else spec
        for spec, leaf in zip(in_specs, call.leaves, strict=True)
    ]
    closed, out_tree = trace_function(fun, signature, call, mesh)
    warn_of_marks_without_loop(closed.jaxpr)
    name, out_names = name_of(fun), _output_names(out_tree)
    results = jax.tree.unflatten(out_tree, closed.out_avals)
    given = _broadcast_shardings(options.out_specs, results, "out_specs", out_names, mesh)
    front = _Front(
        name,
        mesh,
        closed,
        call.tree,
        out_tree,
        names,
        out_names,
        in_specs,
        [_spec_of(g, "out_specs") for g in given],
        [_ranks_of(g, mesh) for g in given],
        argument_bounds=[None] * len(names),
        result_bounds=[None] * len(out_names),
        statics=signature.statics(call),
    )
    return _deal_out(_part_front(front), given)


def trace_step(
    fun: Callable[..., Any],
    signature: Signature,
    call: Call,
    options: Options,
    measure: Callable[[Traced], list[Any]],
) -> Traced:
    """Traces and plans a step. Nothing runs or is compiled, unless a loop is under `Auto`.

    `measure` runs a trial of the step, in which nothing is donated, and gives for each loop
    the costs of its stages.
    """
    front = _trace_front(fun, signature, call, options)
    donated = _by_parts(signature.describe(call)[1], front.argument_bounds)
    next_args = front.next_args(donated)
    graph = front.graph(donated, next_args)
    ranks = options.mesh.mpmd_dim

    def run_trial() -> tuple[_core.Plan, list[Any]]:
        borrowed = [False] * len(donated)
        trial_graph = front.graph(borrowed, next_args, loop_length=trial_length)
        schedules = _core.Schedule.placeholders(trial_graph.core, ranks, given)
        trial = front.plan(trial_graph, schedules, borrowed, None)
        return trial.plan, measure(trial)

    given = [
        None if is_auto(loop.schedule) else _build_schedule(loop, ranks) for loop in graph.loops
    ]
    limits = options.memory_limits
    schedules, founds = find_schedules(graph, given, options.mesh, limits, run_trial)
    traced = front.plan(graph, schedules, donated, limits)
    for note in traced.staged.notes():
        warn(note, note.split(": ", 1)[0])
    line = definition_line(fun)
    step = Step(f"step {front.name} at {line}", line, options.mesh.lowering_mesh())
    warn_of_layout(step, front.closed.jaxpr, graph, traced.specs, front.arg_names)
    for found in founds:
        found.peak_bytes = [rank.peak_bytes for rank in traced.plan.summary()]
    return traced
