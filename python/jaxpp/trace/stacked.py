"""Splits leaves that hold the weights of all stages, `[layers, ...]`, into parts.

Models written for `lax.scan` keep the weights of all layers in one array. Unsplit, every rank
would hold that array, its gradient and its optimizer state. So the traced step is evaluated
again with such a leaf as several arguments, one for the layers of each stage. Equations that
read rows by constant indices (`rows.py`) read them from the parts, their transposes return
parts of the gradient, and elementwise operations and reductions run on each part. A leaf stays
whole if any other equation needs all of it. The layers may be along any axis; their places
along it are called rows. The user sees one array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from jaxpp import _core
from jaxpp.jax_internals.jaxprs import continued, drop_unused, evaluate
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.part_evaluator import Evaluator, flatten, struct
from jaxpp.trace.pieces import Parted, Piece
from jaxpp.trace.stage_rows import find_parting

__all__ = ["PartedStep", "cut_results", "part_step", "parts_of_leaves"]


def parts_of_leaves(bounds: Sequence[Bounds | None]) -> list[range]:
    """For each leaf the indices of its parts among all parts; a whole leaf is one part."""
    found, at = [], 0
    for cut in bounds:
        stop = at + (len(cut.ranges()) if cut else 1)
        found.append(range(at, stop))
        at = stop
    return found


@dataclasses.dataclass
class PartedStep:
    """A step whose stacked leaves are split into several arguments and results.

    `arguments`, `results`: for each argument and result of the original step, the bounds
    of its parts or None.
    """

    closed: ClosedJaxpr
    arguments: list[Bounds | None]
    results: list[Bounds | None]


def part_step(
    closed: ClosedJaxpr, may_cut: Callable[[int, int], bool], next_args: Sequence[int]
) -> tuple[PartedStep | None, dict[int, str | None]]:
    """The step in which leaves that several stages read in parts are split, or None if
    there are none; and the leaves that stay whole although several stages read rows of
    them, each with a line. `may_cut`: as for `find_parting`. `next_args`: for each result the
    argument that it becomes in the next step, or NONE; it stays whole if the argument does.
    """
    parting, lines = find_parting(closed, may_cut)
    refused: set[int] = set()
    while parting.leaves:
        evaluator = Evaluator(parting)
        found = _evaluate(closed, evaluator, next_args)
        wanted = evaluator.wanted - refused - parting.leaves
        bounds = {k: parting.of(closed.jaxpr.invars[k].aval.shape) for k in wanted}
        more = {k for k, cut in bounds.items() if cut and may_cut(k, cut.axis)}
        if not more:
            refused |= evaluator.refused
            if not parting.leaves & refused:
                return found, {k: v for k, v in lines.items() if k not in parting.leaves}
        parting = dataclasses.replace(parting, leaves=(parting.leaves | more) - refused)
    return None, lines


def cut_results(closed: ClosedJaxpr, bounds: Sequence[Bounds | None]) -> ClosedJaxpr:
    """The step that returns the parts within these bounds as separate results."""

    def cut(*wholes: Any) -> list[Any]:
        results: list[Any] = []
        for whole, at in zip(wholes, bounds, strict=True):
            if at is None:
                results.append(whole)
            else:
                results += [
                    jax.lax.slice_in_dim(whole, a, b, axis=at.axis) for a, b in at.ranges()
                ]
        return results

    structs = map(struct, closed.out_avals)
    return continued(closed, jax.make_jaxpr(cut)(*structs).jaxpr)


def _evaluate(
    closed: ClosedJaxpr, evaluator: Evaluator, next_args: Sequence[int]
) -> PartedStep:
    jaxpr, parting = closed.jaxpr, evaluator.parting
    arguments = [
        parting.of(v.aval.shape) if k in parting.leaves else None
        for k, v in enumerate(jaxpr.invars)
    ]
    structs: list[Any] = []
    for v, bounds in zip(jaxpr.invars, arguments, strict=True):
        if bounds is None:
            structs.append(struct(v.aval))
            continue
        for begin, end in bounds.ranges():
            shape = bounds.resized(v.aval.shape, end - begin)
            structs.append(struct(v.aval, shape))
    results: list[Bounds | None] = []

    def is_whole_next(result: int) -> bool:
        argument = next_args[result]
        return argument != _core.NONE and arguments[argument] is None

    def run(*flat: Any) -> list[Any]:
        rest, args = iter(flat), []
        for k, (v, bounds) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
            if bounds is None:
                args.append(next(rest))
                evaluator.tag(args[-1], [k])
            else:
                boxes = bounds.boxes(v.aval.shape)
                pieces = [Piece(box, next(rest)) for box in boxes]
                args.append(Parted(pieces, v.aval, frozenset([k])))
        outs = [
            o.whole if isinstance(o, Parted) and is_whole_next(k) else evaluator.by_rows(o)
            for k, o in enumerate(evaluate(closed, args, evaluator.equation))
        ]
        results.extend(evaluator.bounds_of(o) if isinstance(o, Parted) else None for o in outs)
        return flatten(outs)[0]

    made = jax.make_jaxpr(run)(*structs)
    return PartedStep(ClosedJaxpr(drop_unused(made.jaxpr), made.consts), arguments, results)
