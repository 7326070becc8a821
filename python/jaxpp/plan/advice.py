"""Warnings about a step that runs, but hardly as its author means it: devices of a rank that
compute the same, arrays that each of them has a copy of, constants that are large."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.errors import warn
from jaxpp.jax_internals.lines import user_line
from jaxpp.placements import physical_type
from jaxpp.plan.sharding import Specs
from jaxpp.trace.graph import Graph
from jaxpp.trace.marks import inner_jaxprs

__all__ = ["Step", "warn_of_layout", "warn_of_unparted"]

_LARGE = 1 << 20  # bytes that are worth a warning


@dataclasses.dataclass(frozen=True)
class Step:
    """What is warned of: `title`, "step NAME at LINE"; `line`, where its function is defined;
    `mesh`, that of a rank."""

    title: str
    line: str
    mesh: Mesh


def _axes_of(spec: PartitionSpec) -> Iterator[str]:
    for part in spec:
        yield from part if isinstance(part, tuple) else [part] if isinstance(part, str) else []


def _axes_in(given: Any) -> Iterator[str]:
    """The axes that a parameter of an equation names in its shardings."""
    if isinstance(given, tuple | list):
        for each in given if not isinstance(given, PartitionSpec) else ():
            yield from _axes_in(each)
    spec = given.spec if isinstance(given, NamedSharding) else given
    if isinstance(spec, PartitionSpec):
        yield from _axes_of(spec)


def _axes_used(jaxpr: Jaxpr) -> Iterator[str]:
    """The axes that constraints and explicit shardings name, at any depth."""
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            yield from _axes_in(param)
        for variable in eqn.outvars:  # of axes that are explicit
            yield from _axes_in(getattr(variable.aval, "sharding", None))
        for inner in inner_jaxprs(eqn):
            yield from _axes_used(inner)


def _warn_of_unused_axes(step: Step, jaxpr: Jaxpr, specs: Specs) -> None:
    used = {axis for spec in specs.by_value.values() for axis in _axes_of(spec)}
    unused = [axis for axis, size in step.mesh.shape.items() if size > 1 and axis not in used]
    if unused:
        used.update(_axes_used(jaxpr))
    for axis in unused:
        if axis not in used:
            warn(
                f"{step.title}: no argument, weight or constraint is sharded along the mesh "
                f"axis {axis!r}, so the {step.mesh.shape[axis]} devices along it compute the "
                f"same. Shard the batch over it (in_specs, jax.lax.with_sharding_constraint), "
                "or leave the axis out of the mesh",
                step.line,
            )


def _bytes(aval: Any) -> int:
    dtype, shape = physical_type(aval)
    return _core.device_bytes(dtype, math.prod(shape))


def _size_text(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _warn_of_replicated_leaves(
    step: Step, names: Sequence[str], avals: Sequence[Any], specs: Sequence[PartitionSpec]
) -> None:
    """Of the leaves of one argument some are sharded, and others, large ones, are not."""
    by_argument: dict[str, list[tuple[str, int, bool]]] = {}
    for name, aval, spec in zip(names, avals, specs, strict=True):
        kind = name.partition("[")[0].partition(".")[0]
        sharded = any(step.mesh.shape[axis] > 1 for axis in _axes_of(spec))
        by_argument.setdefault(kind, []).append((name, _bytes(aval), sharded))
    for kind, leaves in by_argument.items():
        whole = [
            (name, size) for name, size, sharded in leaves if not sharded and size > _LARGE
        ]
        if not whole or not any(sharded for *_, sharded in leaves):
            continue
        shown = ", ".join(f"{name} ({_size_text(size)})" for name, size in whole[:4])
        more = f" and {len(whole) - 4} more" if len(whole) > 4 else ""
        warn(
            f"{step.title}: each of the {step.mesh.size} devices of a rank has a copy of "
            f"{shown}{more}, while other leaves of {kind} are sharded over them. Give "
            "in_specs for them, or jax.device_put them with such a sharding",
            step.line,
        )


def _warn_of_large_constants(step: Step, graph: Graph) -> None:
    first = graph.num_args
    large = {
        first + k: const
        for k, const in enumerate(graph.consts)
        if _bytes(graph.avals[first + k]) > _LARGE
    }
    for op in graph.ops.values():
        for value in op.operands:
            const = large.pop(value, None) if isinstance(value, int) else None
            if const is None:
                continue
            line = (user_line(op.eqn) if op.eqn else None) or step.line
            aval = graph.avals[value]
            warn(
                f"{step.title} closes over a constant of {_size_text(_bytes(aval))}, "
                f"{aval.dtype}{list(aval.shape)}, which it uses at {line}: the step keeps it "
                "on the devices for as long as it lives. Pass it as an argument",
                line,
            )


def warn_of_layout(
    step: Step, jaxpr: Jaxpr, graph: Graph, specs: Specs, arg_names: Sequence[str]
) -> None:
    """Warns of what is listed above, each time a step is compiled.

    Args:
      step: what messages say of it.
      jaxpr: of the step.
      graph, specs: what was made of it.
      arg_names: of the arguments' leaves, or of their parts.
    """
    _warn_of_large_constants(step, graph)
    if specs.one_device:
        return
    _warn_of_unused_axes(step, jaxpr, specs)
    avals = [graph.avals[value] for value in range(len(arg_names))]
    of_args = [specs.of(value) for value in range(len(arg_names))]
    _warn_of_replicated_leaves(step, arg_names, avals, of_args)


def warn_of_unparted(leaves: Sequence[tuple[str, Any, str | None]]) -> None:
    """Warns of large leaves that ranks hold whole, while each of several stages takes some of
    their rows: (name, abstract value, line that takes some)."""
    large = [(name, _bytes(aval), line) for name, aval, line in leaves if _bytes(aval) > _LARGE]
    if not large:
        return
    shown = ", ".join(f"{name} ({_size_text(size)})" for name, size, _ in large[:4])
    more = f" and {len(large) - 4} more" if len(large) > 4 else ""
    line = large[0][2]
    warn(
        f"stages take rows of an array at {line or '?'}, and each of their ranks holds all "
        f"of {shown}{more}: which rows a stage takes is not known when the step is traced, or "
        "something needs all of them. Take rows by constants (w[i], w[2:4]), and only so",
        line,
    )
