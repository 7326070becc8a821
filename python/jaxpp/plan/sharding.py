"""Shardings, within a rank's mesh, of the values that tasks exchange.

Nothing is compiled: the whole step is lowered once for a rank's mesh, with a single microbatch
in place of the loop. Shardy propagates the user's shardings (specs of arguments and results,
`with_sharding_constraint`), and the result is read from the module.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals.context import context_mesh
from jaxpp.jax_internals.modules import LoweredModule
from jaxpp.mesh import MpmdMesh
from jaxpp.operations import accumulate
from jaxpp.placements import physical_type
from jaxpp.plan.evaluation import run_op
from jaxpp.trace.graph import FrontLoop, Graph

__all__ = ["Specs", "infer_specs"]


@dataclasses.dataclass
class Specs:
    """`by_value`: the spec of every value that tasks exchange; for ranks of one device, only
    the specs from the user. `value_bytes`: the size of every value on one device; None: whole
    values."""

    by_value: dict[int, PartitionSpec]
    value_bytes: list[int] | None

    @property
    def one_device(self) -> bool:
        return self.value_bytes is None

    def of(self, value: int) -> PartitionSpec:
        return self.by_value.get(value, PartitionSpec())


# --- Specs from the user -----------------------------------------------------------------


def check_spec(spec: PartitionSpec, aval: Any, mesh: Mesh, what: str) -> None:
    """Checks that axes exist, are used once and divide the shape. Raises
    JaxppError("sharding")."""
    sizes = dict(mesh.shape)
    parts = [() if p is None else (p if isinstance(p, tuple) else (p,)) for p in spec]
    if len(parts) > len(aval.shape):
        raise make_error(
            "sharding",
            f"{what}: spec {spec} has {len(parts)} entries; expected at most "
            f"{len(aval.shape)}, one per dimension of the array's shape {tuple(aval.shape)}",
        )
    used = [axis for axes in parts for axis in axes]
    for dim, axes in enumerate(parts):
        for axis in axes:
            if axis not in sizes:
                raise make_error(
                    "sharding",
                    f"{what}: spec {spec} names axis {axis!r}; expected one of the mesh's "
                    f"axes {tuple(sizes)}",
                )
            if used.count(axis) > 1:
                raise make_error(
                    "sharding",
                    f"{what}: spec {spec} names axis {axis!r} {used.count(axis)} times; "
                    "expected each axis at most once",
                )
        ways = math.prod(sizes[a] for a in axes)
        if aval.shape[dim] % ways:
            raise make_error(
                "sharding",
                f"{what}: spec {spec} divides dimension {dim} of {tuple(aval.shape)} into "
                f"{ways}; expected a multiple of {ways}, found {aval.shape[dim]}",
            )


def _check_given(
    specs: Sequence[PartitionSpec | None],
    avals: Sequence[Any],
    names: Sequence[str],
    mesh: Mesh,
    what: str,
) -> None:
    for spec, aval, name in zip(specs, avals, names, strict=True):
        if spec is not None:
            check_spec(spec, aval, mesh, f"{what} of {name}")


# --- Propagation ------------------------------------------------------------------------


def _reduce_once(loop: FrontLoop, env: dict[int, Any]) -> None:
    """A loop's results after its first microbatch."""
    for k, operation in enumerate(loop.operations):
        aval = loop.value_avals[k]
        state = operation.state(loop.length, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
        value = accumulate(operation, state, env[loop.results[k]], env[loop.index])
        env[loop.first_output + k] = value


def _one_microbatch(
    graph: Graph, mesh: MpmdMesh, args: Sequence[int], wanted: Sequence[int]
) -> Callable[..., list[Any]]:
    """Evaluates the step with one microbatch, from its arguments to the wanted values."""
    loops = {loop.op: loop for loop in graph.loops}

    def run(*values: Any) -> list[Any]:
        env = dict(zip(args, values, strict=True))
        for op in range(graph.num_ops):
            if op in loops:
                _reduce_once(loops[op], env)
            else:
                run_op(graph.ops[op], env, mesh)
        return [env[v] for v in wanted]

    return run


def _propagate(
    graph: Graph,
    mesh: MpmdMesh,
    in_specs: dict[int, PartitionSpec],
    out_specs: dict[int, PartitionSpec],
    wanted: list[int],
) -> dict[int, PartitionSpec]:
    lowering_mesh = mesh.lowering_mesh()
    indices = [loop.index for loop in graph.loops]
    args = [*range(graph.num_args + len(graph.consts)), *indices]
    run = _one_microbatch(graph, mesh, args, wanted)

    def shardings(values: Sequence[int], specs: dict[int, PartitionSpec]) -> list[Any]:
        return [NamedSharding(lowering_mesh, specs[v]) if v in specs else None for v in values]

    structs = [jax.ShapeDtypeStruct(graph.avals[v].shape, graph.avals[v].dtype) for v in args]
    jitted = jax.jit(
        run,
        keep_unused=True,
        in_shardings=tuple(shardings(args, in_specs)),
        out_shardings=shardings(wanted, out_specs),
    )
    arguments, results = ([graph.avals[v] for v in values] for values in (args, wanted))
    with context_mesh(lowering_mesh):
        module = LoweredModule(jitted.lower(*structs))
    specs = module.propagated_specs(arguments, results, lowering_mesh)
    found: dict[int, PartitionSpec] = {}
    for values, of_values in zip((args, wanted), specs, strict=True):
        found.update(zip(values, of_values, strict=True))
    return found


# --- All values that tasks exchange --------------------------------------------------------


def _crossing_values(staged: _core.Staged) -> set[int]:
    values = {placed.value for placed in (*staged.args(), *staged.outputs())}
    for task in staged.tasks():
        values.update(task.inputs)
        values.update(task.outputs)
    return values


def _shard_bytes(spec: PartitionSpec, aval: Any, mesh: Mesh) -> int:
    dtype, shape = physical_type(aval)
    shard = NamedSharding(mesh, spec).shard_shape(tuple(shape))
    return _core.device_bytes(dtype, math.prod(shard))


def infer_specs(
    graph: Graph,
    staged: _core.Staged,
    mesh: MpmdMesh,
    in_specs: Sequence[PartitionSpec | None],
    out_specs: Sequence[PartitionSpec | None],
    names: Sequence[str],
    out_names: Sequence[str],
) -> Specs:
    """The spec of every value that tasks exchange, and its bytes on one device.

    Args:
      graph, staged, mesh: the step, its partition and its mesh. in_specs, out_specs: specs from
      the user, one entry per leaf; None: inferred. names, out_names: the names of the argument
      and result leaves.

    Raises:
      JaxppError: a given spec names an unknown axis or does not divide ("sharding").
    """
    lowering_mesh = mesh.lowering_mesh()
    args = [placed.value for placed in staged.args()]
    outputs = [placed.value for placed in staged.outputs()]
    _check_given(
        in_specs, [graph.avals[v] for v in args[: len(names)]], names, lowering_mesh, "in_specs"
    )
    _check_given(
        out_specs, [graph.avals[v] for v in outputs], out_names, lowering_mesh, "out_specs"
    )
    given_in = {v: s for v, s in zip(args, in_specs, strict=False) if s is not None}
    given_out = {
        v: s
        for v, s in zip(outputs, out_specs, strict=True)
        if s is not None and v not in given_in
    }
    if lowering_mesh.size == 1:
        return Specs({**given_in, **given_out}, None)
    origins = staged.origins()
    crossing = _crossing_values(staged)
    wanted = sorted({origins[v] for v in crossing})
    by_origin = _propagate(graph, mesh, given_in, given_out, wanted)
    by_origin.update(given_in)
    by_origin.update(given_out)
    by_value = [by_origin.get(origin) for origin in origins]
    value_bytes = [
        _shard_bytes(spec, graph.avals[origin], lowering_mesh) if spec is not None else 0
        for spec, origin in zip(by_value, origins, strict=True)
    ]
    return Specs({v: spec for v, spec in enumerate(by_value) if spec is not None}, value_bytes)
