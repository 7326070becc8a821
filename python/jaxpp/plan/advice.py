"""Warnings about likely performance mistakes: devices of a rank that repeat the same
computation, large arrays replicated on every device, large constants."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp import _core
from jaxpp.errors import warn
from jaxpp.jax_internals.jaxprs import jaxprs_in
from jaxpp.jax_internals.lines import user_line
from jaxpp.mesh import axes_by_dimension
from jaxpp.placements import physical_type
from jaxpp.plan.sharding import Specs
from jaxpp.trace.front import Graph

__all__ = ["Step", "layout_advice", "warn_of_unparted"]

_Advice = tuple[str, str]  # a sentence, and the line of the user's code that it concerns

_LARGE = 1 << 20  # bytes that justify a warning


@dataclasses.dataclass(frozen=True)
class Step:
    """The step in a warning: `title`, "step NAME at LINE"; `line`, where its function is
    defined; `mesh`, one rank's mesh."""

    title: str
    line: str
    mesh: Mesh


def _axes_of(spec: PartitionSpec) -> Iterator[str]:
    return itertools.chain.from_iterable(axes_by_dimension(spec))


def _axes_in(given: Any) -> Iterator[str]:
    """The axes named by the shardings in an equation's parameter."""
    if isinstance(given, tuple | list):
        for each in given if not isinstance(given, PartitionSpec) else ():
            yield from _axes_in(each)
    spec = given.spec if isinstance(given, NamedSharding) else given
    if isinstance(spec, PartitionSpec):
        yield from _axes_of(spec)


def _axes_used(jaxpr: Jaxpr) -> Iterator[str]:
    """The axes named by constraints and explicit shardings, at any depth."""
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            yield from _axes_in(param)
        for variable in eqn.outvars:  # on explicit axes
            yield from _axes_in(getattr(variable.aval, "sharding", None))
        for inner in jaxprs_in(eqn.params):
            yield from _axes_used(inner)


def _unused_axes(step: Step, jaxpr: Jaxpr, specs: Specs) -> Iterator[_Advice]:
    used = {axis for spec in specs.by_value.values() for axis in _axes_of(spec)}
    unused = [axis for axis, size in step.mesh.shape.items() if size > 1 and axis not in used]
    if unused:
        used.update(_axes_used(jaxpr))
    for axis in unused:
        if axis not in used:
            yield (
                f"{step.title}: no argument, weight or constraint is sharded along the mesh "
                f"axis {axis!r}, so the {step.mesh.shape[axis]} devices along it compute the "
                "same values. Shard the batch over it (in_specs, "
                "jax.lax.with_sharding_constraint), or leave the axis out of the mesh",
                step.line,
            )


def _bytes(aval: Any) -> int:
    dtype, shape = physical_type(aval)
    return _core.device_bytes(dtype, math.prod(shape))


def _size_text(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _replicated_leaves(
    step: Step, names: Sequence[str], avals: Sequence[Any], specs: Sequence[PartitionSpec]
) -> Iterator[_Advice]:
    """Warns of an argument that has both sharded leaves and large unsharded ones."""
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
        yield (
            f"{step.title}: each of the {step.mesh.size} devices of a rank holds a full copy "
            f"of {shown}{more}, while other leaves of {kind} are sharded over these devices. "
            "Give in_specs for them, or jax.device_put them with such a sharding",
            step.line,
        )


def _large_constants(step: Step, graph: Graph) -> Iterator[_Advice]:
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
            yield (
                f"{step.title} closes over a constant of {_size_text(_bytes(aval))}, "
                f"{aval.dtype}{list(aval.shape)}, used at {line}: the constant stays on the "
                "devices for the lifetime of the step. Pass it as an argument",
                line,
            )


def layout_advice(
    step: Step, jaxpr: Jaxpr, graph: Graph, specs: Specs, arg_names: Sequence[str]
) -> Iterator[_Advice]:
    """The warnings listed above.

    Args:
      step: the step, for messages.
      jaxpr: the step's jaxpr.
      graph, specs: its graph and the shardings found for it.
      arg_names: the names of the argument leaves, or of their parts.
    """
    yield from _large_constants(step, graph)
    if specs.one_device:
        return
    yield from _unused_axes(step, jaxpr, specs)
    avals = [graph.avals[value] for value in range(len(arg_names))]
    of_args = [specs.of(value) for value in range(len(arg_names))]
    yield from _replicated_leaves(step, arg_names, avals, of_args)


def warn_of_unparted(leaves: Sequence[tuple[str, Any, str | None]]) -> None:
    """Warns of large leaves that ranks hold whole although several stages each read only some
    rows: (name, abstract value, line that reads rows)."""
    large = [(name, _bytes(aval), line) for name, aval, line in leaves if _bytes(aval) > _LARGE]
    if not large:
        return
    shown = ", ".join(f"{name} ({_size_text(size)})" for name, size, _ in large[:4])
    more = f" and {len(large) - 4} more" if len(large) > 4 else ""
    line = large[0][2]
    warn(
        f"several stages read rows of an array at {line or '?'}, and each of their ranks "
        f"holds all of {shown}{more}, because the row indices are not known when the step is "
        "traced or another operation needs all rows. Use only constant indices (w[i], w[2:4])",
        line,
    )
