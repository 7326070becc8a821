"""Splits equations, so that each rank and each task gets only the parts it needs.

Outside the loops, the equations in the branches of a `cond` become separate ops with their
condition (`Branch`), and each result becomes a selection between the branches' values. The
planner places these ops individually, as if there were no condition. A `scan` or `while_loop`
becomes one op per result (`Part`).

In a loop's body, the transpose of a scan over layers computes input gradients and weight
gradients together. It is split into two scans: the first computes the results that the previous
stage waits for and saves the intermediate values for the second, which computes the rest.

Parts in the same task are rejoined when that task is lowered (`plan/evaluation.py`): nothing is
computed twice, and skipped branches stay skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.jax_internals.jaxprs import (
    changed_jaxpr,
    changed_scan,
    drop_unused_outputs,
    evaluate,
    is_unspecified,
    scan_sizes,
    stacked_aval,
)

__all__ = [
    "Branch",
    "Conditional",
    "Part",
    "PartOp",
    "Splitter",
    "Whole",
    "inlined_call",
    "is_plain_jit",
    "is_recomputation",
]

_INLINED = {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
_REMAT = {"remat", "remat2", "checkpoint"}


def inlined_call(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    """The jaxpr that an equation calls, if the equation does nothing else."""
    if eqn.primitive.name in _REMAT:
        return eqn.params["jaxpr"]
    if eqn.primitive.name not in _INLINED:
        return None
    return next((eqn.params[k] for k in ("jaxpr", "call_jaxpr") if k in eqn.params), None)


def is_plain_jit(eqn: JaxprEqn) -> bool:
    """Whether a jit specifies neither shardings nor compiler options."""
    shardings = (*eqn.params.get("in_shardings", ()), *eqn.params.get("out_shardings", ()))
    plain = all(map(is_unspecified, shardings))
    return plain and not eqn.params.get("compiler_options_kvs")


def is_recomputation(eqn: JaxprEqn) -> bool:
    """Whether an equation is a rematerialised backward."""
    return eqn.primitive.name in _REMAT and bool(eqn.params.get("differentiated"))


# --- Conditions -------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Conditional:
    """A cond or switch whose branches became separate ops."""

    index: Any  # the operand that selects a branch
    num_branches: int


@dataclasses.dataclass(frozen=True)
class Branch:
    """The position of an op: in a branch, or in the selection between branches if `number` is
    None."""

    conditional: Conditional
    number: int | None


# --- Parts ------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Whole:
    """An equation that was split into several ops."""

    eqn: JaxprEqn

    def part_with(self, results: Iterable[int]) -> PartOp:
        """The part that computes these results and no others."""
        wanted = set(results)
        used = [k in wanted for k in range(len(self.eqn.outvars))]
        if self.eqn.primitive.name == "while":
            taken, given, params = _reduce_while(self.eqn, used)
        else:
            taken, reduced = drop_unused_outputs(self.eqn, used)
            assert reduced is not None
            position = {id(v): k for k, v in enumerate(self.eqn.outvars)}
            given, params = [position[id(v)] for v in reduced.outvars], reduced.params
        operands = tuple(k for k, t in enumerate(taken) if t)
        part = Part(self, operands, tuple(given))
        avals = [self.eqn.outvars[k].aval for k in given]
        return PartOp(part, tuple(sorted(wanted)), params, avals)


@dataclasses.dataclass(frozen=True)
class Part:
    """The operands and the results of the whole equation that one of its parts takes and
    computes.

    Numbers beyond the operands and results of the whole are values that one part passes
    to another.
    """

    whole: Whole
    operands: tuple[int, ...]
    results: tuple[int, ...]


@dataclasses.dataclass
class PartOp:
    """A part as an equation: the whole's primitive with other parameters.

    `own`: the results of the whole that this part provides; it may compute others.
    """

    part: Part
    own: tuple[int, ...]
    params: dict[str, Any]
    avals: list[Any]


def _keep(values: Sequence[Any], mask: Sequence[bool]) -> list[Any]:
    return [v for v, kept in zip(values, mask, strict=True) if kept]


def _needed(eqns: Sequence[JaxprEqn], results: Iterable[Any]) -> tuple[set[int], set[int]]:
    """The equations, by number, and the variables, by id, that some results depend on."""
    variables = {id(v) for v in results if isinstance(v, Var)}
    numbers = set()
    for number in reversed(range(len(eqns))):
        eqn = eqns[number]
        if eqn.effects or any(id(v) in variables for v in eqn.outvars):
            numbers.add(number)
            variables.update(id(v) for v in eqn.invars if isinstance(v, Var))
    return numbers, variables


def _reduce_while(
    eqn: JaxprEqn, used: Sequence[bool]
) -> tuple[list[bool], list[int], dict[str, Any]]:
    """A while loop over only the part of its state that the used results need."""
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    _, of_condition = _needed(condition.jaxpr.eqns, condition.jaxpr.outvars)
    state_of_condition = condition.jaxpr.invars[num_cond:]
    state = [u or id(v) in of_condition for u, v in zip(used, state_of_condition, strict=True)]
    while True:
        _, of_body = _needed(body.jaxpr.eqns, _keep(body.jaxpr.outvars, state))
        inputs = [id(v) in of_body for v in body.jaxpr.invars]
        more = [s or i for s, i in zip(state, inputs[num_body:], strict=True)]
        if more == state:
            break
        state = more
    consts = inputs[:num_body]
    reduced = {
        **params,
        "cond_jaxpr": changed_jaxpr(
            condition, invars=_keep(condition.jaxpr.invars, [True] * num_cond + state)
        ),
        "body_jaxpr": changed_jaxpr(
            body,
            invars=_keep(body.jaxpr.invars, consts + state),
            outvars=_keep(body.jaxpr.outvars, state),
            eqns=_live(body.jaxpr.eqns, _keep(body.jaxpr.outvars, state)),
        ),
        "body_nconsts": sum(consts),
    }
    given = [k for k, s in enumerate(state) if s]
    return [True] * num_cond + consts + state, given, reduced


def _live(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    numbers, _ = _needed(eqns, results)
    return [eqns[k] for k in sorted(numbers)]


# --- A scan's input gradients and its weight gradients ----------------------------------


def _inline(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    called = inlined_call(eqn)
    if called is None:
        return None
    if is_recomputation(eqn) and eqn.params.get("prevent_cse", True):
        operands = list(jax.lax.optimization_barrier(tuple(operands)))
    return evaluate(called, operands, _inline)


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same with calls inlined; recomputations stay behind a barrier."""
    if not any(inlined_call(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: evaluate(closed, args, _inline))(*closed.in_avals)


class _ScanBody:
    """A scan's body, split into the part for the first results and the part for the rest."""

    def __init__(self, eqn: JaxprEqn, first: Sequence[bool]) -> None:
        self.closed = _inlined(eqn.params["jaxpr"])
        self.jaxpr = self.closed.jaxpr
        num_consts, num_carry = scan_sizes(eqn.params)
        self.num_carry = num_carry
        self.consts = self.jaxpr.invars[:num_consts]
        self.carry = self.jaxpr.invars[num_consts : num_consts + num_carry]
        self.first = self._close(list(first))
        outvars = self.jaxpr.outvars
        self.first_eqns, _ = _needed(self.jaxpr.eqns, _keep(outvars, self.first))
        # The first part also returns results that it computes anyway.
        made = {id(v) for k in self.first_eqns for v in self.jaxpr.eqns[k].outvars}
        for k in range(num_carry, len(outvars)):
            self.first[k] = self.first[k] or id(outvars[k]) in made
        rest = [not f for f in self.first]
        all_eqns, _ = _needed(self.jaxpr.eqns, _keep(outvars, rest))
        self.invariant = self._invariant_eqns()
        self.rest_eqns = (all_eqns - self.first_eqns) | (all_eqns & self.invariant)
        self.rest = rest

    def _close(self, wanted: list[bool]) -> list[bool]:
        """Adds every state that the wanted results depend on."""
        while True:
            _, variables = _needed(self.jaxpr.eqns, _keep(self.jaxpr.outvars, wanted))
            more = [
                w or (k < self.num_carry and id(self.carry[k]) in variables)
                for k, w in enumerate(wanted)
            ]
            if more == wanted:
                return wanted
            wanted = more

    def _invariant_eqns(self) -> set[int]:
        """Equations on constants only, which both parts compute instead of saving the
        results."""
        known = {id(v) for v in (*self.consts, *self.jaxpr.constvars)}
        found = set()
        for number, eqn in enumerate(self.jaxpr.eqns):
            if all(isinstance(v, Literal) or id(v) in known for v in eqn.invars):
                known.update(id(v) for v in eqn.outvars)
                found.add(number)
        return found

    def kept(self) -> list[Var]:
        """The values and states of an iteration of the first part that the rest uses."""
        eqns = self.jaxpr.eqns
        made = {id(v): v for k in self.first_eqns - self.rest_eqns for v in eqns[k].outvars}
        made.update((id(v), v) for k, v in enumerate(self.carry) if self.first[k])
        used = [v for k in sorted(self.rest_eqns) for v in eqns[k].invars]
        used += _keep(self.jaxpr.outvars, self.rest)
        found = {id(v): v for v in used if isinstance(v, Var) and id(v) in made}
        return list(found.values())

    def part(
        self, numbers: set[int], results: Sequence[bool], extra: Sequence[Var], kept: Any
    ) -> tuple[list[bool], ClosedJaxpr]:
        """The operands that some equations and results use, and a body with these
        equations, which also returns `extra` and takes `kept` as its last inputs."""
        eqns = [self.jaxpr.eqns[k] for k in sorted(numbers)]
        outvars = [*_keep(self.jaxpr.outvars, results), *extra]
        used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in outvars}
        start = len(self.consts)
        taken = []
        for k, v in enumerate(self.jaxpr.invars):
            state = k - start
            if 0 <= state < self.num_carry:
                taken.append(results[state])
            else:
                taken.append(id(v) in used)
        invars = [*_keep(self.jaxpr.invars, taken), *kept]
        return taken, changed_jaxpr(self.closed, invars=invars, outvars=outvars, eqns=eqns)


def _split_scan(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """Splits a scan into the first results and the rest; None if both need the same
    computation."""
    if eqn.effects or not any(first) or all(first):
        return None
    body = _ScanBody(eqn, first)
    if not any(body.rest):
        return None
    params, num_carry = eqn.params, body.num_carry
    kept = body.kept()
    num_results, num_operands = len(eqn.outvars), len(eqn.invars)
    whole = Whole(eqn)

    def part(
        numbers: set[int], results: Sequence[bool], extra: Sequence[Var], taken_kept: Any
    ) -> PartOp:
        taken, closed = body.part(numbers, results, extra, taken_kept)
        operands = [k for k, t in enumerate(taken) if t]
        operands += range(num_operands, num_operands + len(taken_kept))
        given = [k for k, r in enumerate(results) if r]
        given += range(num_results, num_results + len(extra))
        avals = [eqn.outvars[k].aval for k, r in enumerate(results) if r]
        avals += [stacked_aval(v.aval, params["length"]) for v in extra]
        num_consts, num_states = sum(taken[: len(body.consts)]), sum(results[:num_carry])
        new_params = changed_scan(params, closed, num_consts, num_states)
        own = tuple(k for k in given if k < num_results)
        return PartOp(Part(whole, tuple(operands), tuple(given)), own, new_params, avals)

    return (
        part(body.first_eqns, body.first, kept, ()),
        part(body.rest_eqns, body.rest, (), kept),
    )


class Splitter:
    """Splits equations; equal ones of several stages share the same parts."""

    def __init__(self) -> None:
        self._scans: dict[Any, Any] = {}

    def by_result(self, eqn: JaxprEqn) -> list[PartOp]:
        """A part for each result of a scan or while loop outside the loops."""
        whole = Whole(eqn)
        return [whole.part_with([k]) for k in range(len(eqn.outvars))]

    def scan(self, eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
        """A scan in two parts, the `first` results and the rest, if possible."""
        body = eqn.params["jaxpr"]
        rest = tuple((k, v) for k, v in eqn.params.items() if k != "jaxpr")
        key = (id(body.jaxpr), rest, tuple(first))
        if key not in self._scans:
            self._scans[key] = eqn, _split_scan(eqn, first)
        found = self._scans[key][1]
        if found is None:
            return None
        whole = Whole(eqn)
        return tuple(
            dataclasses.replace(p, part=dataclasses.replace(p.part, whole=whole)) for p in found
        )
