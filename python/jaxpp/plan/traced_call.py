"""A call of a step, traced: its jaxpr with what the user asks for each argument and result."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxpp.errors import (
    check_arrays,
    definition_line,
    make_error,
    shorten,
    warn,
    where_raised,
    without_partials,
)
from jaxpp.jax_internals.arrays import ShardingTypeError, broadcast_prefix
from jaxpp.jax_internals.context import context_mesh
from jaxpp.jax_internals.jaxprs import discharged, drop_unused
from jaxpp.mesh import MpmdMesh, MpmdSharding, memory_of
from jaxpp.plan.advice import warn_of_unparted
from jaxpp.plan.carried import carried
from jaxpp.plan.given import (
    broadcast,
    check_specs,
    memories_of,
    result_ranks,
    spec_of,
    spec_of_leaf,
    warn_of_pipeline_axis,
)
from jaxpp.plan.sharding import StepShardings
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.call import Call, Options, Signature, Static, struct_of
from jaxpp.trace.custom_calls import check_targets
from jaxpp.trace.front import Graph
from jaxpp.trace.graph import build_graph
from jaxpp.trace.loop import refuse_refs_from_outside, warn_of_marks_without_loop
from jaxpp.trace.scans import scans_to_loops
from jaxpp.trace.stacked import cut_results, part_step, parts_of_leaves
from jaxpp.trace.written import Place, cut_parted, place_of

__all__ = ["TracedCall", "name_of", "trace_call", "trace_function", "trace_written"]


_HOST_NOTE = (
    "A step sees arguments in pinned host memory as arrays in device memory. Where they must "
    "have the type of a value in host memory, write jax.device_put(x, jax.memory.Space.Host)."
)


def _asked_specs(
    signature: Signature, call: Call, options: Options
) -> tuple[list[Any], list[PartitionSpec | None]]:
    """Returns two lists: what in_specs give for each leaf of the positional arguments, and the
    spec of each leaf of all arguments. Without one, the array's own sharding counts."""
    mesh, word = options.mesh, options.in_word
    taken = broadcast(options.in_specs, call.args, word)
    specs = [spec_of(t, word, mesh) for t in taken]
    specs += [None] * (len(call.leaves) - len(taken))  # keyword arguments
    pairs = zip(specs, call.leaves, strict=True)
    specs = [spec_of_leaf(mesh, leaf) if s is None else s for s, leaf in pairs]
    names, _ = signature.describe(call)
    check_specs(specs, list(map(struct_of, call.leaves)), names, mesh.lowering_mesh(), word)
    return taken, specs


def _argument_types(
    signature: Signature, call: Call, options: Options
) -> Iterator[jax.ShapeDtypeStruct]:
    """The types of a step's arguments, which on explicit axes contain their shardings, as
    under `jax.jit`."""
    mesh, structs = options.mesh.lowering_mesh(), map(struct_of, call.leaves)
    if options.written or any(t is not AxisType.Explicit for t in mesh.axis_types):
        yield from structs
        return
    _, specs = _asked_specs(signature, call, options)
    for struct, given in zip(structs, specs, strict=True):
        spec = PartitionSpec() if given is None else given
        yield struct.update(sharding=NamedSharding(mesh, spec))


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
    structs = list(_argument_types(signature, call, options))
    with options.mesh.tracing_context():
        try:
            closed = jax.make_jaxpr(flat_fun)(*structs)
        except TypeError as error:
            if "<host>" in str(error):
                error.add_note(_HOST_NOTE)
            raise
        except ValueError as error:
            if "is not found in mesh" not in str(error):
                raise
            where = where_raised(error.__traceback__)
            raise make_error(
                "sharding",
                f"{where}: {shorten(str(error), 300)[1:-1]} Expected axes of a rank's mesh",
            ) from None
    refuse_refs_from_outside(closed, f"step {name_of(fun)}")
    mesh = options.mesh
    if mesh.workers is None and mesh.jax_mesh.devices.flat[0].platform == "cpu":
        check_targets(closed.jaxpr)  # workers have handlers of their own
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


@dataclasses.dataclass
class TracedCall:
    """A traced step with everything that planning needs."""

    name: str
    mesh: MpmdMesh
    closed: ClosedJaxpr
    tree: Any
    out_tree: Any
    arg_names: list[str]
    donated: list[bool]
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

    def next_args(self) -> list[int]:
        """For each result the argument that it becomes in the next step, or NONE."""
        arguments = ([v.aval for v in self.closed.jaxpr.invars], self.argument_bounds)
        results = (self.closed.out_avals, self.result_bounds)
        return carried(self.tree, self.out_tree, arguments, results, self.donated)

    def graph(self, next_args: list[int], **options: Any) -> Graph:
        ranks, names = self.mesh.mpmd_dim, (self.arg_names, self.out_names)
        ends = (*names, next_args, self.out_ranks, self.in_memories, self.out_memories)
        options["places"] = self.places
        # Some equations are traced again.
        with context_mesh(self.mesh.lowering_mesh()):
            graph = build_graph(self.name, ranks, self.closed, self.donated, *ends, **options)
        if self.mesh.lowering_mesh().size > 1:
            graph.core.set_sharded()
        return graph

    def shardings(self, graph: Graph, batch_axes: Sequence[str] = ()) -> StepShardings:
        return StepShardings(graph, self.mesh, self.in_specs, self.out_specs, batch_axes)


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


def _with_split_leaves(traced_call: TracedCall) -> TracedCall:
    """The step with leaves that hold the weights of several stages split into parts."""
    if traced_call.mesh.mpmd_dim == 1:
        return traced_call
    specs = traced_call.in_specs
    try:
        with traced_call.mesh.tracing_context():
            found, unparted = part_step(
                traced_call.closed,
                lambda k, axis: not _shards(specs[k], axis),
                traced_call.next_args(),
            )
    except ShardingTypeError as error:
        warn(
            f"step {traced_call.name}: several stages read rows of the same arrays, and each "
            "of their ranks holds all rows, because JAX has no sharding on explicit axes for "
            f"an operation on some of the rows: {shorten(str(error), 300)[1:-1]}"
        )
        return traced_call
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
        donated=_by_parts(traced_call.donated, found.arguments),
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


def _with_split_results(traced_call: TracedCall, given: Sequence[Any]) -> TracedCall:
    """The step with results split into parts if the user wants each rank to hold only its
    own rows."""
    if traced_call.mesh.mpmd_dim == 1:
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


def trace_call(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options
) -> TracedCall:
    mesh = options.mesh
    names, donated = signature.describe(call)
    taken, in_specs = _asked_specs(signature, call, options)
    warn_of_pipeline_axis(taken, options.in_word, names, mesh, definition_line(fun))
    unknown = len(call.leaves) - len(taken)  # keyword arguments
    asked = [*memories_of(taken, options.in_word, names), *[None] * unknown]
    in_memories = [
        memory or memory_of(getattr(leaf, "sharding", None), f"argument {name}")
        for memory, name, leaf in zip(asked, names, call.leaves, strict=True)
    ]
    closed, out_tree = trace_function(fun, signature, call, options)
    warn_of_marks_without_loop(closed.jaxpr)
    name, out_names = name_of(fun), _output_names(out_tree)
    results = jax.tree.unflatten(out_tree, closed.out_avals)
    word = options.out_word
    given = broadcast(options.out_specs, results, word)
    warn_of_pipeline_axis(given, word, out_names, mesh, definition_line(fun))
    out_specs = [spec_of(g, word, mesh) for g in given]
    check_specs(out_specs, closed.out_avals, out_names, mesh.lowering_mesh(), word)
    traced_call = TracedCall(
        name,
        mesh,
        closed,
        call.tree,
        out_tree,
        names,
        donated,
        out_names,
        in_specs,
        out_specs,
        result_ranks(given, results, out_names, options),
        in_memories,
        memories_of(given, word, out_names),
        argument_bounds=[None] * len(names),
        result_bounds=[None] * len(out_names),
        statics=signature.statics(call),
    )
    return _with_split_results(_with_split_leaves(traced_call), given)


def trace_written(
    fun: Callable[..., Any], signature: Signature, call: Call, options: Options
) -> TracedCall:
    """A program written by hand, with its arguments and results where the user has placed
    them."""
    mesh, (names, donated) = options.mesh, signature.describe(call)
    closed, out_tree = trace_function(fun, signature, call, options)
    # The trace has checked that the shardings are a prefix of the arguments.
    word = f"{options.who}: in_shardings"
    places = [
        place_of(sharding, mesh, word)
        for sharding in broadcast_prefix(options.in_specs, call.args)
    ]
    cut = cut_parted(closed, places)
    names = _part_names(names, cut.argument_bounds)
    out_names = _part_names(_output_names(out_tree), cut.result_bounds)
    in_specs = [place.spec for place in cut.arguments]
    out_specs = [place.spec for place in cut.results]
    check_specs(in_specs, cut.closed.in_avals, names, mesh.lowering_mesh(), word)
    word = f"{options.who}: the sharding"
    check_specs(out_specs, cut.closed.out_avals, out_names, mesh.lowering_mesh(), word)
    return TracedCall(
        name_of(fun),
        mesh,
        cut.closed,
        call.tree,
        out_tree,
        names,
        _by_parts(donated, cut.argument_bounds),
        out_names,
        in_specs=in_specs,
        out_specs=out_specs,
        out_ranks=[place.ranks for place in cut.results],
        in_memories=[place.memory for place in cut.arguments],
        out_memories=[place.memory for place in cut.results],
        argument_bounds=cut.argument_bounds,
        result_bounds=cut.result_bounds,
        statics=[],
        places=cut.arguments,
    )
