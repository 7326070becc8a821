"""Splits equations, so that each rank and each task gets only the parts it needs.

Outside the loops, the equations in the branches of a `cond` become separate ops with their
condition (`Branch`), and each result becomes a selection between the branches' values. The
planner places these ops individually, as if there were no condition. A `scan` or `while_loop`
becomes one op per result (`Part`).

In a loop's body, the transpose of a scan over layers computes input gradients and weight
gradients together. It is split into two scans: the first computes the results that the previous
stage waits for and saves the intermediate values for the second, which computes the rest. The
transpose of a `shard_map` is split in the same way.

Parts in the same task are rejoined when that task is lowered (`plan/evaluation.py`): nothing is
computed twice, and skipped branches stay skipped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxpp.jax_internals.jaxprs import (
    changed_jaxpr,
    changed_scan,
    drop_unused_outputs,
    evaluate,
    has_effects,
    is_unspecified,
    jaxprs_in,
    new_var,
    passed_by_map,
    scan_sizes,
    stacked_aval,
    with_inlined,
)
from jaxpp.trace.work import flops

__all__ = [
    "IN_TWO_PARTS",
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

# Equations that a body may have in two parts: what marks need, and the rest.
IN_TWO_PARTS = {"scan", "shard_map"}

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
        if any(id(v) in variables for v in eqn.outvars):
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


# --- Input gradients and weight gradients of a scan or shard_map ------------------------


def _is_barred(eqn: JaxprEqn) -> bool:
    return is_recomputation(eqn) and bool(eqn.params.get("prevent_cse", True))


def _inline(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
    called = inlined_call(eqn)
    if called is None:
        return None
    if _is_barred(eqn):
        operands = list(jax.lax.optimization_barrier(tuple(operands)))
    return evaluate(called, operands, _inline)


def _inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same with calls inlined; recomputations stay behind a barrier."""
    if not any(inlined_call(eqn) for eqn in closed.jaxpr.eqns):
        return closed
    return jax.make_jaxpr(lambda *args: evaluate(closed, args, _inline))(*closed.in_avals)


def _with_states(jaxpr: Jaxpr, carry: Sequence[Var], wanted: Sequence[bool]) -> list[bool]:
    """The wanted results of a body, with every state that they depend on."""
    while True:
        _, variables = _needed(jaxpr.eqns, _keep(jaxpr.outvars, wanted))
        states = (id(v) in variables for v in carry)
        more = [w or s for w, s in itertools.zip_longest(wanted, states, fillvalue=False)]
        if more == list(wanted):
            return more
        wanted = more


class _Body:
    """The body of a scan or shard_map, split into the part for the first results and the part
    for the rest. A shard_map has no constants and no states."""

    def __init__(
        self, closed: ClosedJaxpr, num_consts: int, num_carry: int, first: Sequence[bool]
    ) -> None:
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.num_carry = num_carry
        self.consts = self.jaxpr.invars[:num_consts]
        self.carry = self.jaxpr.invars[num_consts : num_consts + num_carry]
        self.first = _with_states(self.jaxpr, self.carry, first)
        outvars = self.jaxpr.outvars
        self.first_eqns, _ = _needed(self.jaxpr.eqns, _keep(outvars, self.first))
        # The first part also returns results that it computes anyway.
        made = {id(v) for k in self.first_eqns for v in self.jaxpr.eqns[k].outvars}
        for k in range(num_carry, len(outvars)):
            self.first[k] = self.first[k] or id(outvars[k]) in made
        self.rest = [not f for f in self.first]
        self.all_rest_eqns, _ = _needed(self.jaxpr.eqns, _keep(outvars, self.rest))
        self.rest_eqns = self.all_rest_eqns - self.first_eqns

    def repeat(self, numbers: set[int]) -> None:
        """Makes both parts compute these equations, instead of saving the results."""
        self.rest_eqns |= self.all_rest_eqns & numbers

    def eqns_on(
        self, given: Iterable[Var], chosen: Callable[[JaxprEqn], bool] = lambda eqn: True
    ) -> set[int]:
        """The chosen equations whose operands are given, or results of others of them."""
        known = {id(v) for v in (*given, *self.jaxpr.constvars)}
        found = set()
        for number, eqn in enumerate(self.jaxpr.eqns):
            operands = (v for v in eqn.invars if isinstance(v, Var))
            if chosen(eqn) and all(id(v) in known for v in operands):
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


def _split_in_two(
    eqn: JaxprEqn, body: _Body, changed: Any, passed_aval: Callable[[Any], Any]
) -> tuple[PartOp, PartOp]:
    """The equation in the two parts of its body.

    Args:
      changed: the parameters of a part, from its body, which operands and results of the whole
        it has, and which values of the body it also returns and takes.
      passed_aval: the type, outside the body, of a value that the first part passes on.
    """
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
        own = tuple(given)
        given += range(num_results, num_results + len(extra))
        avals = [eqn.outvars[k].aval for k in own] + [passed_aval(v.aval) for v in extra]
        params = changed(closed, taken, results, extra, taken_kept)
        return PartOp(Part(whole, tuple(operands), tuple(given)), own, params, avals)

    return (
        part(body.first_eqns, body.first, kept, ()),
        part(body.rest_eqns, body.rest, (), kept),
    )


def _split_scan(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """Splits a scan into the first results and the rest; None if both need the same
    computation."""
    params = eqn.params
    num_consts, num_carry = scan_sizes(params)
    closed = _inlined(params["jaxpr"])
    carry = closed.jaxpr.invars[num_consts : num_consts + num_carry]
    divided = _divided(closed, _with_states(closed.jaxpr, carry, first))
    body = _Body(divided, num_consts, num_carry, first)
    if not any(body.rest):
        return None
    body.repeat(body.eqns_on(body.consts))

    def changed(
        closed: ClosedJaxpr, taken: Sequence[bool], results: Sequence[bool], *_: Any
    ) -> dict[str, Any]:
        return changed_scan(params, closed, sum(taken[:num_consts]), sum(results[:num_carry]))

    return _split_in_two(eqn, body, changed, lambda aval: stacked_aval(aval, params["length"]))


def _inlined_in_map(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    return inlined_call(eqn) if is_plain_jit(eqn) else None


# Equations that do not change the elements of a value.
_RESHAPES = {"squeeze", "reshape", "broadcast_in_dim", "pvary"}


def _reshapes(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _RESHAPES


def _is_repeated(eqn: JaxprEqn) -> bool:
    """Whether both parts of a shard_map compute an equation: devices cannot pass scalars on."""
    return _reshapes(eqn) or all(v.aval.shape == () for v in eqn.outvars)


def _is_product(eqn: JaxprEqn) -> bool:
    return flops(eqn) > sum(math.prod(v.aval.shape) for v in eqn.outvars)


def _split_map(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """Splits a shard_map into the first results and the rest; None if the rest has no products,
    or needs scalars of the first part."""
    params = eqn.params
    closed = with_inlined(params["jaxpr"], _inlined_in_map, _is_barred)
    body = _Body(_divided(closed, first), 0, 0, first)
    body.repeat(body.eqns_on(body.jaxpr.invars, _is_repeated))
    rest = (body.jaxpr.eqns[k] for k in body.rest_eqns)
    if not any(map(_is_product, rest)) or any(v.aval.shape == () for v in body.kept()):
        return None

    def changed(
        closed: ClosedJaxpr,
        taken: Sequence[bool],
        results: Sequence[bool],
        extra: Sequence[Var],
        taken_kept: Sequence[Var],
    ) -> dict[str, Any]:
        ins, outs = _keep(params["in_specs"], taken), _keep(params["out_specs"], results)
        ins += [passed_by_map(params, v.aval)[0] for v in taken_kept]
        outs += [passed_by_map(params, v.aval)[0] for v in extra]
        specs = {"in_specs": tuple(ins), "out_specs": tuple(outs)}
        return {**params, "jaxpr": closed.jaxpr, **specs}

    return _split_in_two(eqn, body, changed, lambda aval: passed_by_map(params, aval)[1])


def _split(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """A scan or shard_map in two parts, the `first` results and the rest; None if that is not
    possible, and for other equations."""
    if has_effects(eqn) or not any(first) or all(first):
        return None
    if eqn.primitive.name == "scan":
        return _split_scan(eqn, first)
    return _split_map(eqn, first) if eqn.primitive.name == "shard_map" else None


def _divided(closed: ClosedJaxpr, results: Sequence[bool]) -> ClosedJaxpr:
    """The jaxpr with scans and shard_maps in two parts where these results need one of them."""
    needed = {id(v) for v in _keep(closed.jaxpr.outvars, results)}
    eqns: list[JaxprEqn] = []
    for eqn in reversed(closed.jaxpr.eqns):
        first = [id(v) in needed for v in eqn.outvars]
        parts = _split(eqn, first)
        made = _as_eqns(eqn, parts) if parts else [eqn]
        eqns += reversed(made)
        if any(first):
            needed.update(id(v) for v in made[0].invars)
    return changed_jaxpr(closed, eqns=eqns[::-1])


def _as_eqns(eqn: JaxprEqn, parts: Sequence[PartOp]) -> list[JaxprEqn]:
    results = zip(parts[0].part.results, parts[0].avals, strict=True)
    passed = [new_var(aval) for k, aval in results if k >= len(eqn.outvars)]
    operands, outvars = [*eqn.invars, *passed], [*eqn.outvars, *passed]
    return [
        eqn.replace(
            invars=[operands[k] for k in op.part.operands],
            outvars=[outvars[k] for k in op.part.results],
            params=op.params,
        )
        for op in parts
    ]


# --- What a shard_map passes on of its operands ----------------------------------------------


def _passed_on(eqn: JaxprEqn, outside: Sequence[bool]) -> tuple[list[int], list[int]]:
    """The results of a shard_map that are operands in another shape, and the others that are
    computed from operands outside the loop."""
    jaxpr = with_inlined(eqn.params["jaxpr"], _inlined_in_map, _is_barred).jaxpr
    operands = dict(zip(map(id, jaxpr.invars), outside, strict=True))
    reshaped: list[int] = []
    invariant: list[int] = []
    for k, v in enumerate(jaxpr.outvars):
        numbers, variables = _needed(jaxpr.eqns, [v])
        if all(_reshapes(jaxpr.eqns[n]) for n in numbers):
            reshaped.append(k)
        elif all(operands.get(number, True) for number in variables):
            invariant.append(k)
    return reshaped, invariant


class Splitter:
    """Splits equations; equal ones of several stages share the same parts."""

    def __init__(self) -> None:
        self._in_two: dict[Any, Any] = {}

    def by_result(self, eqn: JaxprEqn) -> list[PartOp]:
        """A part for each result of a scan or while loop outside the loops."""
        whole = Whole(eqn)
        return [whole.part_with([k]) for k in range(len(eqn.outvars))]

    def by_origin(
        self, eqn: JaxprEqn, outside: Sequence[bool]
    ) -> tuple[list[PartOp], list[PartOp]] | None:
        """A shard_map in parts: one for each result that is an operand in another shape; and
        one for each that is computed from operands outside the loop, with one for all others.
        None if there are only others.

        The backward pass takes such results. Among them are all weights, which JAX first
        declares different on each device, and then no longer recognises as operands.
        """
        if has_effects(eqn):
            return None
        reshaped, invariant = _passed_on(eqn, outside)
        if not reshaped and not invariant:
            return None
        whole = Whole(eqn)
        single = {*reshaped, *invariant}
        others = [k for k in range(len(eqn.outvars)) if k not in single]
        parts = [whole.part_with([k]) for k in invariant]
        parts += [whole.part_with(others)] if others else []
        return [whole.part_with([k]) for k in reshaped], parts

    def in_two(self, eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
        """A scan or shard_map in two parts, the `first` results and the rest, if possible."""
        rest = tuple((k, v) for k, v in eqn.params.items() if k != "jaxpr")
        (jaxpr,) = jaxprs_in({"jaxpr": eqn.params["jaxpr"]})
        key = (id(jaxpr), rest, tuple(first))
        if key not in self._in_two:
            self._in_two[key] = eqn, _split(eqn, first)
        found = self._in_two[key][1]
        if found is None:
            return None
        whole = Whole(eqn)
        return tuple(
            dataclasses.replace(p, part=dataclasses.replace(p.part, whole=whole)) for p in found
        )
