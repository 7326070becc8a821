"""Shardings, within a rank's mesh, of the values that tasks exchange.

Nothing is compiled: the whole step is lowered once for a rank's mesh, with a single microbatch
in place of the loop. Shardy propagates the user's shardings (specs of arguments and results,
`with_sharding_constraint`), and the result is read from the module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import explicit_sharding, unreduced_axes
from jaxpp.jax_internals.context import context_mesh
from jaxpp.jax_internals.lines import user_line
from jaxpp.jax_internals.modules import LoweredModule
from jaxpp.jax_internals.sums import Blocked
from jaxpp.mesh import MpmdMesh, axes_by_dimension
from jaxpp.operations import Add, accumulate
from jaxpp.placements import physical_type
from jaxpp.plan.evaluation import run_op
from jaxpp.trace.front import FrontLoop, Graph
from jaxpp.trace.gather import Gather

__all__ = ["Specs", "StepShardings"]


@dataclasses.dataclass
class Specs:
    """`by_value`: the spec of every value that tasks exchange; for ranks of one device, only
    the specs from the user. `value_bytes`: the size of every value on one device; None: whole
    values. `partial`: for values of which each device has one term of a sum, the mesh
    axes over which the terms must be added, unless their type says so: then the axes are
    unreduced in the spec."""

    by_value: dict[int, PartitionSpec]
    value_bytes: list[int] | None
    partial: dict[int, frozenset[str]] = dataclasses.field(default_factory=dict)

    @property
    def one_device(self) -> bool:
        return self.value_bytes is None

    def of(self, value: int) -> PartitionSpec:
        return self.by_value.get(value, PartitionSpec())

    def shard_shape(self, value: int, aval: Any, mesh: Mesh) -> tuple[int, ...]:
        return _shard_shape(self.of(value), aval, mesh)

    def is_laid_out(self, value: int, spec: PartitionSpec, aval: Any, mesh: Mesh) -> bool:
        """Whether each device has the same of a value with its own spec as with this one."""
        own, shape = self.of(value), physical_type(aval)[1]
        same_cuts = _cuts(own, shape, mesh) == _cuts(spec, shape, mesh)
        return same_cuts and own.unreduced == spec.unreduced

    def keeps_rows(self, taken: int, made: int, avals: Sequence[Any], mesh: Mesh) -> bool:
        """Whether each device's shard of `made`, which is `taken`, rows of it, or one row,
        consists of such rows of the device's shard of `taken`."""
        if self.of(taken).unreduced != self.of(made).unreduced:
            return False
        before, after = (
            _cuts(self.of(v), physical_type(avals[v])[1], mesh) for v in (taken, made)
        )
        if before == after:
            return True
        (_, rows_cut), *row = before or [(1, ())]
        return not rows_cut and (after == row or (after[1:] == row and not after[0][1]))


def _cuts(
    spec: PartitionSpec, shape: Sequence[int], mesh: Mesh
) -> list[tuple[int, tuple[str, ...]]]:
    """For each dimension, its size and the axes of the mesh that cut it."""
    axes = axes_by_dimension(spec)
    axes += [()] * (len(shape) - len(axes))
    cutting = [tuple(a for a in own if mesh.shape[a] > 1) for own in axes]
    return list(zip(shape, cutting, strict=True))


# --- Propagation ------------------------------------------------------------------------


def _reduce_once(loop: FrontLoop, env: dict[int, Any]) -> None:
    """A loop's results after its first microbatch."""
    for k, operation in enumerate(loop.operations):
        aval = loop.value_avals[k]
        state = operation.state(loop.length, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        value = accumulate(operation, state, env[loop.results[k]], env[loop.index])
        env[loop.first_output + k] = value


def _needed_ops(graph: Graph, wanted: Sequence[int]) -> list[int]:
    """The ops that loops and wanted values need, in order."""
    loops = {loop.op: loop for loop in graph.loops}
    needed, found = set(wanted), []
    for op in reversed(range(graph.num_ops)):
        if op in loops:
            needed.update(v for v in loops[op].results if isinstance(v, int))
        else:
            front = graph.ops[op]
            outputs = range(front.first_output, front.first_output + front.num_outputs)
            if needed.isdisjoint(outputs):
                continue
            indices = (branch.conditional.index for branch in front.branches)
            needed.update(v for v in (*front.operands, *indices) if isinstance(v, int))
        found.append(op)
    return found[::-1]


def _one_microbatch(
    graph: Graph, mesh: MpmdMesh, args: Sequence[int], wanted: Sequence[int]
) -> Callable[..., list[Any]]:
    """Evaluates the step with one microbatch, from its arguments to the wanted values."""
    loops = {loop.op: loop for loop in graph.loops}
    ops = _needed_ops(graph, wanted)

    def run(*values: Any) -> list[Any]:
        env = dict(zip(args, values, strict=True))
        for op in ops:
            if op in loops:
                _reduce_once(loops[op], env)
            else:
                run_op(graph.ops[op], env, mesh)
        return [env[v] for v in wanted]

    return run


# --- All values that tasks exchange --------------------------------------------------------


def _crossing_values(staged: _core.Staged) -> set[int]:
    values = {placed.value for placed in (*staged.args(), *staged.outputs())}
    for task in staged.tasks():
        values.update(task.inputs)
        values.update(task.outputs)
    return values


def _ranks_of_values(staged: _core.Staged) -> dict[int, set[int]]:
    """The ranks that hold each value, or another one in the same memory, at some time."""
    ranks: dict[int, set[int]] = {}
    for placed in (*staged.args(), *staged.outputs()):
        ranks.setdefault(placed.value, set()).update(placed.ranks)
    for task in staged.tasks():
        for v in (*task.inputs, *task.outputs):
            ranks.setdefault(v, set()).add(task.rank)
    for *_, values in staged.accumulators():
        own = set().union(*(ranks.get(v, ()) for v in values))
        ranks.update((v, own) for v in values)
    return ranks


def _fitting(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """The spec without entries that do not divide the shape on this mesh."""
    axes = axes_by_dimension(spec)
    parts = [
        part if size % math.prod(mesh.shape[a] for a in own) == 0 else None
        for part, own, size in zip(spec.partitions, axes, shape, strict=False)
    ]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def _without(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """The spec without these axes."""
    parts = axes_by_dimension(spec)
    return PartitionSpec(*(tuple(a for a in part if a not in axes) or None for part in parts))


def _check_auto_axes(mesh: Mesh, spec: PartitionSpec, name: str) -> None:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    for axis in itertools.chain.from_iterable(axes_by_dimension(spec)):
        if types[axis] is AxisType.Explicit:
            raise make_error(
                "invalid-argument",
                f"fsdp: {name} has the spec {shorten(spec)}; expected axes of type Auto, found "
                f'"{axis}" of type Explicit. On explicit axes the step itself gathers weights, '
                "with jax.sharding.reshard; leave out fsdp=.",
            )


def _sums(loop: FrontLoop) -> list[int | None]:
    """The values that a loop adds up, in the order of its results; None for other
    results."""
    pairs = zip(loop.results, loop.operations, strict=True)
    return [v if type(o) is Add and isinstance(v, int) else None for v, o in pairs]


def _shard_shape(spec: PartitionSpec, aval: Any, mesh: Mesh) -> tuple[int, ...]:
    return NamedSharding(mesh, spec).shard_shape(physical_type(aval)[1])


def _shard_bytes(spec: PartitionSpec, aval: Any, mesh: Mesh) -> int:
    dtype, _ = physical_type(aval)
    return _core.device_bytes(dtype, math.prod(_shard_shape(spec, aval, mesh)))


# The axes of a sum, None for zeros, or the reason why a value is no such sum.
Partial = frozenset[str] | Blocked | None


class StepShardings:
    """The shardings of a traced step's values, inferred for a partition.

    Args:
      graph, mesh: the step and its mesh.
      in_specs, out_specs: specs from the user, one entry per leaf; None: inferred.
      batch_axes: in the loops, only the batch stays sharded over these axes.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: MpmdMesh,
        in_specs: Sequence[PartitionSpec | None],
        out_specs: Sequence[PartitionSpec | None],
        batch_axes: Sequence[str] = (),
    ) -> None:
        self._graph = graph
        self._mesh = mesh
        self._in_specs = in_specs
        self._out_specs = out_specs
        self._batch_axes = batch_axes
        self._found = dict(graph.specs)  # by value of the graph
        # Of each loop's results; empty if nothing is partial.
        self.partial: list[list[Partial]] = []

    def _given(
        self, staged: _core.Staged
    ) -> tuple[dict[int, PartitionSpec], dict[int, PartitionSpec]]:
        args = [placed.value for placed in staged.args()]
        outputs = [placed.value for placed in staged.outputs()]
        given_in = {v: s for v, s in zip(args, self._in_specs, strict=False) if s is not None}
        given_out = {
            v: s
            for v, s in zip(outputs, self._out_specs, strict=True)
            if s is not None and v not in given_in
        }
        return given_in, given_out

    def infer(self, staged: _core.Staged) -> Specs:
        """The spec of every value that tasks exchange, and its bytes on one device."""
        given_in, given_out = self._given(staged)
        mesh = self._mesh.lowering_mesh()
        if mesh.size == 1:
            return Specs({**self._found, **given_in, **given_out}, None)
        origins = staged.origins()
        wanted = sorted({origins[v] for v in _crossing_values(staged)})
        if not self._found.keys() >= set(wanted):
            self._propagate(given_in, given_out, wanted)
            self._found.update(given_in)
            self._found.update(given_out)
        by_value = {
            v: self._found[origin] for v, origin in enumerate(origins) if origin in self._found
        }
        ranks = _ranks_of_values(staged) if self._mesh.unequal else {}
        for v, own in ranks.items():
            by_value[v] = self._on_ranks(by_value[v], self._graph.avals[origins[v]], own)
        by_value.update(self._unreduced(staged))
        partial: dict[int, frozenset[str]] = {}
        for loop, result, is_partial, values in staged.accumulators():
            if not is_partial:
                continue
            axes = self.partial[loop][result]
            assert isinstance(axes, frozenset)
            summed = self._graph.loops[loop].results[result]
            assert isinstance(summed, int)
            typed = self._unreduced_type(summed)
            for v in values:
                if typed is not None:
                    by_value[v] = typed
                else:
                    partial[v] = axes
                    by_value[v] = _without(by_value[v], axes)
        value_bytes = [0] * len(origins)
        packed = staged.packed()
        for v, spec in by_value.items():
            if v in ranks:
                mesh = self._mesh_of(ranks[v])
            one = _shard_bytes(spec, self._graph.avals[origins[v]], mesh)
            value_bytes[v] = one * packed.get(v, 1)  # scalars, on several devices
        return Specs(by_value, value_bytes, partial)

    def _unreduced_type(self, value: int) -> PartitionSpec | None:
        """The spec in the type of one of the graph's values, if it has unreduced axes."""
        mesh = self._mesh.lowering_mesh()
        sharding = explicit_sharding(self._graph.avals[value], mesh)
        return sharding.spec if sharding is not None and sharding.spec.unreduced else None

    def _unreduced(self, staged: _core.Staged) -> dict[int, PartitionSpec]:
        """The specs of values whose types say that each device has one term of a sum. Results
        of the step are whole, also for the tasks that use them."""
        origins = staged.origins()
        results = {placed.value for placed in staged.outputs()}
        found = {}
        for v in _crossing_values(staged) - results - staged.packed().keys():
            if origins[v] in self._graph.specs:  # the user placed it
                continue
            if (spec := self._unreduced_type(origins[v])) is not None:
                found[v] = spec
        return found

    def _on_ranks(
        self, spec: PartitionSpec, aval: Any, ranks: Collection[int]
    ) -> PartitionSpec:
        """The spec of a value on these ranks: on ranks of unequal meshes, each device has the
        whole value."""
        if not self._mesh.is_equal(ranks):
            return PartitionSpec()
        return _fitting(spec, physical_type(aval)[1], self._mesh_of(ranks))

    def _mesh_of(self, ranks: Collection[int]) -> Mesh:
        """The mesh of one of these ranks; of the first rank for a value that is on none."""
        return self._mesh.unstack[min(ranks, default=0)]

    def _propagate(
        self,
        in_specs: dict[int, PartitionSpec],
        out_specs: dict[int, PartitionSpec],
        wanted: list[int],
    ) -> None:
        graph, mesh = self._graph, self._mesh.lowering_mesh()
        indices = [loop.index for loop in graph.loops]
        args = [*range(graph.num_args + len(graph.consts)), *indices]
        reduced = [v for loop in graph.loops for v in loop.results if isinstance(v, int)]
        outputs = list(dict.fromkeys((*wanted, *reduced)))
        run = _one_microbatch(graph, self._mesh, args, outputs)

        def shardings(values: Sequence[int], specs: dict[int, PartitionSpec]) -> list[Any]:
            return [NamedSharding(mesh, specs[v]) if v in specs else None for v in values]

        def struct(value: int) -> jax.ShapeDtypeStruct:
            aval = graph.avals[value]
            typed = explicit_sharding(aval, mesh)
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=typed)

        jitted = jax.jit(
            run,
            keep_unused=True,
            in_shardings=tuple(shardings(args, in_specs)),
            out_shardings=shardings(outputs, out_specs),
        )
        self._check_unreduced(outputs)
        with context_mesh(mesh):
            module = LoweredModule(jitted.lower(*map(struct, args)))
        position = {v: k for k, v in enumerate(outputs)}
        if self._batch_axes:
            sums = {v for loop in graph.loops for v in _sums(loop) if v is not None}
            module.replicate(sorted(position[v] for v in sums), self._batch_axes)
        propagated = module.propagate(mesh)
        avals = ([graph.avals[v] for v in values] for values in (args, outputs))
        for values, specs in zip((args, outputs), propagated.specs(*avals), strict=True):
            self._found.update(zip(values, specs, strict=True))
        self._propagated = propagated, position

    def _check_unreduced(self, values: Sequence[int]) -> None:
        """Refuses values of unreduced types on meshes that also have automatic axes. JAX
        0.10.2 and 0.11.2 cannot return them from functions."""
        mesh, avals = self._mesh.lowering_mesh(), self._graph.avals
        typed = (v for v in values if unreduced_axes(avals[v]))
        wrong = next((v for v in typed if explicit_sharding(avals[v], mesh) is None), None)
        if wrong is None:
            return
        lines = (
            user_line(op.eqn)
            for op in self._graph.ops.values()
            if op.eqn and op.first_output <= wrong < op.first_output + op.num_outputs
        )
        axes = {name: t.name for name, t in zip(mesh.axis_names, mesh.axis_types, strict=True)}
        raise make_error(
            "unsupported",
            f"{next(lines, None) or 'step'}: a value of type {avals[wrong].str_short()} "
            "leaves a stage or the loop; JAX supports this only on meshes whose axes are all "
            f"explicit, found {axes}. Make all axes explicit, or use jax.reshard to reduce the "
            "value there",
        )

    def _axes_of_batches(self) -> frozenset[str] | None:
        """The axes that shard the loops' batches; None if they are whole."""
        batches = (v for loop in self._graph.loops for v in loop.batches)
        axes = (axes_by_dimension(self._found.get(v, PartitionSpec())) for v in batches)
        return frozenset(a for by_dim in axes for names in by_dim for a in names) or None

    # --- Partial sums ---

    def find_partial(self, staged: _core.Staged) -> None:
        """Finds the results of loops that are sums over a rank's devices."""
        self.infer(staged)
        propagated, position = self._propagated
        sums = [v for loop in self._graph.loops for v in _sums(loop) if v is not None]
        results = [position[v] for v in sums]
        axes = propagated.partials.axes(results, batch_axes=self._axes_of_batches())
        found: dict[int | None, Partial] = {v: axes[position[v]] for v in sums}
        # The types of values with explicit axes say it.
        typed = {v: self._unreduced_type(v) for v in sums}
        found.update((v, frozenset(t.unreduced)) for v, t in typed.items() if t is not None)
        found[None] = Blocked("the loop does not add it up", None)
        self.partial = [[found[v] for v in _sums(loop)] for loop in self._graph.loops]

    def partial_results(self, loop: int) -> list[int]:
        """The numbers of a loop's results that are partial."""
        results = self.partial[loop] if self.partial else []
        return [k for k, axes in enumerate(results) if isinstance(axes, frozenset)]

    def reduce_shared(self, staged: _core.Staged) -> None:
        """Reduces in every microbatch the sums that ranks of unequal meshes share. `staged` is
        the partition in which they are still partial."""
        ranks = _ranks_of_values(staged)
        for loop, result, is_partial, values in staged.accumulators():
            if is_partial and not self._mesh.is_equal(ranks[values[0]]):
                why = "ranks of unequal meshes share it"
                self.partial[loop][result] = Blocked(why, None)

    # --- Gathered weights ---

    def batch_axes(self) -> frozenset[str]:
        """The axes that shard the loops' batches. If the batches are whole, the axes over which
        the loops' results are partial sums."""
        return self._axes_of_batches() or frozenset(
            axis
            for number, results in enumerate(self.partial)
            for k in self.partial_results(number)
            for axis in cast(frozenset[str], results[k])
        )

    def gathers(
        self, rule: Callable[[str, Any], str | None], names: Sequence[str]
    ) -> dict[int, Gather]:
        """How the loops gather weights that are sharded over the devices of the batch, by
        value.

        `rule` decides when, from an argument's name and type.

        Raises:
          JaxppError: explicit axes shard a weight that the rule gathers.
        """
        axes = self.batch_axes()
        found: dict[int, Gather] = {}
        for value, name in enumerate(names):
            aval, spec = self._graph.avals[value], self._found[value]
            if _without(spec, axes) == spec or not jnp.issubdtype(aval.dtype, jnp.floating):
                continue
            struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            when = rule(name, struct)
            if when is not None:
                mesh = self._mesh.lowering_mesh()
                _check_auto_axes(mesh, spec, name)
                before, after = (NamedSharding(mesh, s) for s in (spec, _without(spec, axes)))
                found[value] = Gather(before, after, when == "step")
        return found

    def leave_sharded(self) -> bool:
        """Reduces sums that are sharded over the axes of the batch immediately; returns
        False if there are none."""
        left = False
        for number, results in enumerate(self.partial):
            first = self._graph.loops[number].first_output
            for k in self.partial_results(number):
                spec, axes = self._found.get(first + k, PartitionSpec()), results[k]
                assert isinstance(axes, frozenset)
                if _without(spec, axes) != spec:
                    results[k] = Blocked("the whole weight would exceed the memory limit", None)
                    left = True
        return left
