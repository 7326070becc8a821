"""Which equations the walk of a step inlines, and what it must know about the others: the loops
and marks inside them, and, of equations in two parts, the results that marks depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxpp.errors import make_error
from jaxpp.jax_internals.jaxprs import jaxprs_in
from jaxpp.jax_internals.lines import user_line
from jaxpp.trace.bodies import inlined_call, is_plain_jit
from jaxpp.trace.loop import loop_p
from jaxpp.trace.marks import MARKS, mark_backward_p
from jaxpp.trace.nested import refuse_traced, step_p
from jaxpp.trace.splitting import IN_TWO_PARTS

__all__ = [
    "inlined",
    "loop_or_mark_in",
    "num_splits",
    "refuse_hidden_marks",
    "splits_for_marks",
]

_WRITE_OUT = {
    False: "Unroll the stages: use a Python loop over stages, and scan only over the layers "
    "inside each.",
    True: "Call treduce at the top level of the step, once or several times.",
}
_UNDER = {
    "cond": "which runs it conditionally",
    "shard_map": "which runs it once on each device",
}


def loop_or_mark_in(eqn: JaxprEqn) -> JaxprEqn | None:
    """The first loop or mark, at any depth, inside an equation."""
    inner = jaxprs_in(eqn.params)
    return next(filter(None, map(_loop_or_mark_of, inner)), None)


def _loop_or_mark_of(jaxpr: Jaxpr) -> JaxprEqn | None:
    for eqn in jaxpr.eqns:
        is_one = eqn.primitive is loop_p or eqn.primitive in MARKS
        if found := eqn if is_one else loop_or_mark_in(eqn):
            return found
    return None


def inlined(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr that an equation calls, if it is inlined."""
    called = inlined_call(eqn)
    if called is None or "in_shardings" not in eqn.params or is_plain_jit(eqn):
        return called
    return called if loop_or_mark_in(eqn) else None


def splits_for_marks(jaxpr: Jaxpr, used: Sequence[bool], found: list[Any]) -> list[bool]:
    """The arguments of a body on which its used results and its backward marks depend.

    Appends to `found` the used results of each equation of IN_TWO_PARTS, the last one first.
    """
    needed = {v for v, u in zip(jaxpr.outvars, used, strict=True) if u and isinstance(v, Var)}
    for eqn in reversed(jaxpr.eqns):
        outs = [v in needed for v in eqn.outvars]
        called = None if eqn.primitive in MARKS else inlined(eqn)
        if eqn.primitive is mark_backward_p:
            ins = [True] * len(eqn.invars)
        elif called is not None:
            inner = called.jaxpr if isinstance(called, ClosedJaxpr) else called
            ins = splits_for_marks(inner, outs, found)
        else:
            ins = [any(outs)] * len(eqn.invars)
        if eqn.primitive.name in IN_TWO_PARTS:
            found.append(outs)
        needed.update(
            v for v, i in zip(eqn.invars, ins, strict=True) if i and isinstance(v, Var)
        )
    return [v in needed for v in jaxpr.invars]


def num_splits(eqn: JaxprEqn) -> int:
    """The number of entries of `splits_for_marks` that belong to the equation."""
    called = None if eqn.primitive in MARKS else inlined(eqn)
    if called is None:
        return int(eqn.primitive.name in IN_TWO_PARTS)
    jaxpr = called.jaxpr if isinstance(called, ClosedJaxpr) else called
    return sum(map(num_splits, jaxpr.eqns))


def refuse_hidden_marks(eqn: JaxprEqn) -> None:
    """Raises if an equation that becomes one op contains a loop, a mark or another step."""
    if eqn.primitive is step_p:
        refuse_traced(**eqn.params)
    hidden = loop_or_mark_in(eqn)
    if hidden is None:
        return
    is_loop = hidden.primitive is loop_p
    what = hidden.params["title"] if is_loop else f"stage mark at {hidden.params.get('where')}"
    under, line = eqn.primitive.name, user_line(eqn)
    if under in _UNDER:
        runs = _UNDER[under]
        remedy = f"Move {'treduce' if is_loop else 'mark_stage_end'} outside of it."
    else:
        runs = "which runs it a number of times that the pipeline cannot determine"
        remedy = _WRITE_OUT[is_loop]
    raise make_error(
        "unsupported" if is_loop else "stage-marks",
        f"{what} is inside `{under}`{f' at {line}' if line else ''}, {runs}.\n{remedy}",
    )
