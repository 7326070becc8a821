"""Splits equations, so that each rank and each task gets only the parts it needs.

Outside the loops, the equations in the branches of a `cond` become separate ops with their
condition (`Branch`), and each result becomes a selection between the branches' values. The
planner places these ops individually, as if there were no condition. A `scan` or `while_loop`
becomes one op per result (`Part`).

In a loop's body, the transpose of a scan over layers computes input gradients and weight
gradients together. It is split into two scans: the first computes the results that the previous
stage waits for and saves the intermediate values for the second, which computes the rest. The
transposes of a `shard_map` and of a `cond` are split in the same way.

Parts in the same task are rejoined when that task is lowered (`plan/evaluation.py`): nothing is
computed twice, and skipped branches stay skipped.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxpp.jax_internals.jaxprs import (
    can_be_undefined,
    changed_jaxpr,
    changed_scan,
    drop_unused_outputs,
    has_effects,
    jaxprs_in,
    new_var,
    passed_by_map,
    scan_sizes,
    stacked_aval,
    undefined,
)
from jaxpp.trace.bodies import bodies_of, fixed_results
from jaxpp.trace.gather import is_weight_gather
from jaxpp.trace.work import bytes_of, flops

__all__ = [
    "IN_TWO_PARTS",
    "Branch",
    "Conditional",
    "Part",
    "PartOp",
    "Splitter",
    "Whole",
]

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

    Results beyond those of the whole are values that one part passes to another. An operand
    beyond those of the whole is a result of another part: its number is the number of operands
    plus the result's number.
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


def _reached(
    jaxpr: Jaxpr, given: Iterable[Var], chosen: Callable[[JaxprEqn], bool]
) -> tuple[set[int], set[int]]:
    """The chosen equations, by number, whose operands are given, or results of others of them;
    and the variables, by id, that are given or such results."""
    known = {id(v) for v in (*given, *jaxpr.constvars)}
    numbers = set()
    for number, eqn in enumerate(jaxpr.eqns):
        operands = (v for v in eqn.invars if isinstance(v, Var))
        if chosen(eqn) and all(id(v) in known for v in operands):
            known.update(id(v) for v in eqn.outvars)
            numbers.add(number)
    return numbers, known


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


# --- Input gradients and weight gradients of a scan, shard_map or cond ------------------


class _Body:
    """The body of a scan, shard_map or branch, split into the part for the first results and
    the part for the rest. Only a scan has constants and states."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        first: Sequence[bool],
        num_consts: int = 0,
        num_carry: int = 0,
    ) -> None:
        self.closed, self.jaxpr = closed, closed.jaxpr
        self.num_carry = num_carry
        self.consts = self.jaxpr.invars[:num_consts]
        self.carry = self.jaxpr.invars[num_consts : num_consts + num_carry]
        outvars, first = self.jaxpr.outvars, list(first)
        self.first_eqns, _ = _needed(self.jaxpr.eqns, _keep(outvars, first))
        # The first part also returns results that it computes anyway.
        made = {id(v) for k in self.first_eqns for v in self.jaxpr.eqns[k].outvars}
        for k in range(num_carry, len(outvars)):
            first[k] = first[k] or id(outvars[k]) in made
        self.return_first(first)

    def return_first(self, first: Sequence[bool]) -> None:
        """Makes the first part return these results of those that it computes."""
        self.first, self.rest = list(first), [not f for f in first]
        outvars = _keep(self.jaxpr.outvars, self.rest)
        self.all_rest_eqns, _ = _needed(self.jaxpr.eqns, outvars)
        self.rest_eqns = self.all_rest_eqns - self.first_eqns

    def repeat(self, numbers: set[int]) -> None:
        """Makes both parts compute these equations, instead of saving the results."""
        self.rest_eqns |= self.all_rest_eqns & numbers

    def eqns_on(
        self, given: Iterable[Var], chosen: Callable[[JaxprEqn], bool] = lambda eqn: True
    ) -> set[int]:
        """The chosen equations whose operands are given, or results of others of them."""
        return _reached(self.jaxpr, given, chosen)[0]

    def kept(self) -> list[Var]:
        """The values and states of an iteration of the first part that the rest uses."""
        eqns = self.jaxpr.eqns
        made = {id(v): v for k in self.first_eqns - self.rest_eqns for v in eqns[k].outvars}
        made.update((id(v), v) for k, v in enumerate(self.carry) if self.first[k])
        used = [v for k in sorted(self.rest_eqns) for v in eqns[k].invars]
        used += _keep(self.jaxpr.outvars, self.rest)
        found = {id(v): v for v in used if isinstance(v, Var) and id(v) in made}
        return list(found.values())

    def takes(self, is_first: bool, passed: Iterable[Var]) -> list[bool]:
        """The operands that a part needs. The first part returns what is `passed`."""
        numbers, results = self._of(is_first)
        used = {id(v) for k in numbers for v in self.jaxpr.eqns[k].invars}
        used.update(map(id, _keep(self.jaxpr.outvars, results)))
        used.update(map(id, passed if is_first else ()))
        start = len(self.consts)
        states = range(start, start + self.num_carry)
        return [
            results[k - start] if k in states else id(v) in used
            for k, v in enumerate(self.jaxpr.invars)
        ]

    def part(
        self, is_first: bool, taken: Sequence[bool], passed: Sequence[Var | Any]
    ) -> ClosedJaxpr:
        """The body of a part with these operands. The first part also returns what is `passed`,
        and the other one takes it: variables, or the type of one that this body has not."""
        numbers, results = self._of(is_first)
        eqns = [self.jaxpr.eqns[k] for k in sorted(numbers)]
        invars, outvars = _keep(self.jaxpr.invars, taken), _keep(self.jaxpr.outvars, results)
        for value in passed:
            if isinstance(value, Var):
                (outvars if is_first else invars).append(value)
            elif is_first:
                made, nothing = undefined(value)
                eqns += made
                outvars.append(nothing)
            else:
                invars.append(new_var(value))
        return changed_jaxpr(self.closed, invars=invars, outvars=outvars, eqns=eqns)

    def _of(self, is_first: bool) -> tuple[set[int], list[bool]]:
        """The equations and the results of a part."""
        return (self.first_eqns, self.first) if is_first else (self.rest_eqns, self.rest)


def _passed(bodies: Sequence[_Body]) -> tuple[list[Any], list[dict[int, Var]]]:
    """The types of the values that the first part passes to the other one, and by number the
    variables of each body. Of several bodies only one runs, so they can share numbers."""
    avals: list[Any] = []
    of_each: list[dict[int, Var]] = []
    for body in bodies:
        free, own = list(range(len(avals))), dict[int, Var]()
        for v in body.kept():
            number = next((k for k in free if avals[k] == v.aval), len(avals))
            if number == len(avals):
                avals.append(v.aval)
            else:
                free.remove(number)
            own[number] = v
        of_each.append(own)
    return avals, of_each


def _split_in_two(
    eqn: JaxprEqn,
    bodies: Sequence[_Body],
    changed: Any,
    passed_aval: Callable[[Any], Any],
    returned: Mapping[int, int],
) -> tuple[PartOp, PartOp]:
    """The equation in the two parts of its bodies: one, or the branches of a cond.

    Args:
      changed: the parameters of a part, from its bodies, which operands of the bodies and which
        results it has, and the types of the values that it also returns and takes.
      passed_aval: the type, outside the bodies, of a value that the first part passes on.
      returned: the results of the first part that are variables of its body, by the
        variable's id. Such a variable is not passed on again.
    """
    avals, variables = _passed(bodies)
    num_results, num_operands = len(eqn.outvars), len(eqn.invars)
    before = num_operands - len(bodies[0].jaxpr.invars)  # the index of a cond
    whole = Whole(eqn)
    numbers = {k: returned[id(v)] for k, v in variables[0].items() if id(v) in returned}
    new = [k for k in range(len(avals)) if k not in numbers]
    numbers.update((k, num_results + n) for n, k in enumerate(new))

    def part(is_first: bool, results: Sequence[bool]) -> PartOp:
        passed = new if is_first else range(len(avals))
        each = list(zip(bodies, variables, strict=True))
        needs = [body.takes(is_first, own.values()) for body, own in each]
        taken = list(map(any, zip(*needs, strict=True)))
        closed = [
            body.part(is_first, taken, [own.get(k, avals[k]) for k in passed])
            for body, own in each
        ]
        out, given = ([avals[k] for k in passed if r] for r in (is_first, not is_first))
        operands = [*range(before), *(before + k for k, t in enumerate(taken) if t)]
        operands += [num_operands + numbers[k] for k in passed if not is_first]
        own = [k for k, r in enumerate(results) if r]
        own_avals = [eqn.outvars[k].aval for k in own]
        made = (*own, *(numbers[k] for k in passed if is_first))
        params = changed(closed, taken, results, out, given)
        taken_and_made = Part(whole, tuple(operands), made)
        return PartOp(
            taken_and_made, tuple(own), params, own_avals + list(map(passed_aval, out))
        )

    return part(True, bodies[0].first), part(False, bodies[0].rest)


def _split_scan(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """Splits a scan into the first results and the rest; None if both need the same
    computation."""
    params = eqn.params
    num_consts, num_carry = scan_sizes(params)
    (closed,) = bodies_of(eqn)
    carry = closed.jaxpr.invars[num_consts : num_consts + num_carry]
    body = _Body(*_divided_with_states(closed, carry, first), num_consts, num_carry)
    if not any(body.rest):
        return None
    body.repeat(body.eqns_on(body.consts) | body.eqns_on(body.jaxpr.invars, is_weight_gather))

    def changed(
        closed: Sequence[ClosedJaxpr], taken: Sequence[bool], results: Sequence[bool], *_: Any
    ) -> dict[str, Any]:
        sizes = sum(taken[:num_consts]), sum(results[:num_carry])
        return changed_scan(params, closed[0], *sizes)

    stacked = [k >= num_carry and first for k, first in enumerate(body.first)]
    returned = {id(v): k for k, v in enumerate(body.jaxpr.outvars) if stacked[k]}
    passed_aval = lambda aval: stacked_aval(aval, params["length"])  # noqa: E731
    return _split_in_two(eqn, [body], changed, passed_aval, returned)


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
    (closed,) = bodies_of(eqn)
    body = _Body(_divided(closed, first), first)
    body.repeat(body.eqns_on(body.jaxpr.invars, _is_repeated))
    rest = (body.jaxpr.eqns[k] for k in body.rest_eqns)
    if not any(map(_is_product, rest)) or any(v.aval.shape == () for v in body.kept()):
        return None

    def changed(
        closed: Sequence[ClosedJaxpr],
        taken: Sequence[bool],
        results: Sequence[bool],
        returned: Sequence[Any],
        given: Sequence[Any],
    ) -> dict[str, Any]:
        ins, outs = _keep(params["in_specs"], taken), _keep(params["out_specs"], results)
        ins += [passed_by_map(params, aval)[0] for aval in given]
        outs += [passed_by_map(params, aval)[0] for aval in returned]
        specs = {"in_specs": tuple(ins), "out_specs": tuple(outs)}
        return {**params, "jaxpr": closed[0].jaxpr, **specs}

    passed_aval = lambda aval: passed_by_map(params, aval)[1]  # noqa: E731
    return _split_in_two(eqn, [body], changed, passed_aval, {})


def _split_cond(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """Splits a cond into the first results and the rest; None if the rest has no products.
    Values that a branch does not pass on are undefined there."""
    bodies = [_Body(_divided(closed, first), first) for closed in bodies_of(eqn)]
    common = [all(of_each) for of_each in zip(*(body.first for body in bodies), strict=True)]
    for body in bodies:
        body.return_first(common)
    if not any(_is_product(body.jaxpr.eqns[k]) for body in bodies for k in body.rest_eqns):
        return None
    if not all(can_be_undefined(v.aval) for body in bodies for v in body.kept()):
        return None

    def changed(closed: Sequence[ClosedJaxpr], *_: Any) -> dict[str, Any]:
        return {**eqn.params, "branches": tuple(closed)}

    return _split_in_two(eqn, bodies, changed, lambda aval: aval, {})


_SPLIT = {"scan": _split_scan, "shard_map": _split_map, "cond": _split_cond}

# Equations that a body may have in two parts: what marks need, and the rest.
IN_TWO_PARTS = frozenset(_SPLIT)


def _split(eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
    """An equation in two parts, the `first` results and the rest; None if that is not
    possible."""
    if has_effects(eqn) or not any(first) or all(first):
        return None
    of_kind = _SPLIT.get(eqn.primitive.name)
    return of_kind(eqn, first) if of_kind else None


def _divided(closed: ClosedJaxpr, results: Sequence[bool]) -> ClosedJaxpr:
    """The jaxpr with equations in two parts where these results need only the first one."""
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


def _divided_with_states(
    closed: ClosedJaxpr, carry: Sequence[Var], first: Sequence[bool]
) -> tuple[ClosedJaxpr, list[bool]]:
    """The divided body of a scan, and the first results with every state they depend on."""
    while True:
        divided = _divided(closed, first)
        _, variables = _needed(divided.jaxpr.eqns, _keep(divided.jaxpr.outvars, first))
        states = (id(v) in variables for v in carry)
        more = [f or s for f, s in itertools.zip_longest(first, states, fillvalue=False)]
        if more == list(first):
            return divided, more
        first = more


def _as_eqns(eqn: JaxprEqn, parts: Sequence[PartOp]) -> list[JaxprEqn]:
    results = zip(parts[0].part.results, parts[0].avals, strict=True)
    passed = [new_var(aval) for k, aval in results if k >= len(eqn.outvars)]
    outvars = [*eqn.outvars, *passed]
    operands = [*eqn.invars, *outvars]
    return [
        eqn.replace(
            invars=[operands[k] for k in op.part.operands],
            outvars=[outvars[k] for k in op.part.results],
            params=op.params,
        )
        for op in parts
    ]


# --- Results of a forward pass that depend on few operands --------------------------------


# Results are hoisted only if they have more than this fraction of the other results' bytes. The
# broadcast scale of a norm does not justify a scan of its own.
_WORTH_HOISTING = 1 / 256


def _bytes(eqn: JaxprEqn, results: Iterable[int]) -> int:
    return sum(bytes_of(eqn.outvars[k].aval) for k in results)


def _reshaped_operands(eqn: JaxprEqn) -> list[int]:
    """The results of a shard_map that are operands in another shape."""
    jaxpr = bodies_of(eqn)[0].jaxpr
    _, reshaped = _reached(jaxpr, jaxpr.invars, _reshapes)
    return [k for k, v in enumerate(jaxpr.outvars) if id(v) in reshaped]


class Splitter:
    """Splits equations; equal ones of several stages share the same parts."""

    def __init__(self) -> None:
        self._in_two: dict[Any, Any] = {}

    def by_result(self, eqn: JaxprEqn) -> list[PartOp]:
        """A part for each result of a scan or while loop outside the loops."""
        whole = Whole(eqn)
        return [whole.part_with([k]) for k in range(len(eqn.outvars))]

    def by_origin(
        self, eqn: JaxprEqn, outside: Sequence[bool], cheap: Sequence[bool]
    ) -> tuple[list[PartOp], list[PartOp]]:
        """Splits a scan, shard_map or cond of a forward pass by the operands that its results
        need. Returns the parts that each task computes itself, and the other parts. The
        backward pass takes their results, such as cast or transposed weights.

        Args:
          outside: whether each operand comes from outside the loop. One part computes all
            results that need only such operands, and is hoisted, unless they are small.
          cheap: whether each operand comes from outside or is computed by each task. Each task
            also computes the other results that need only such operands, and operands that a
            shard_map returns in another shape. These include all its weights: JAX declares them
            different on each device, and then does not recognise them as operands.
        """
        is_map = eqn.primitive.name == "shard_map" and not has_effects(eqn)
        reshaped = _reshaped_operands(eqn) if is_map else []
        fixed = fixed_results(eqn, outside)
        made = fixed if cheap == outside else fixed_results(eqn, cheap)
        left = [k for k in range(len(eqn.outvars)) if k not in reshaped]
        once = [k for k in left if fixed[k]]
        again = [k for k in left if made[k] and not fixed[k]]
        others = [k for k in left if not made[k]]
        if not is_map and _bytes(eqn, once) < _WORTH_HOISTING * _bytes(eqn, others):
            once, others = [], sorted(once + others)
        if once and others and not again and eqn.primitive.name == "scan":
            if parts := self.in_two(eqn, [k in once for k in left]):
                return [], list(parts)
        whole = Whole(eqn)
        own = [*([k] for k in reshaped), again]
        return (
            [whole.part_with(results) for results in own if results],
            [whole.part_with(results) for results in (once, others) if results],
        )

    def in_two(self, eqn: JaxprEqn, first: Sequence[bool]) -> tuple[PartOp, PartOp] | None:
        """A scan, shard_map or cond in two parts, the `first` results and the rest, if
        possible."""
        others = {k: v for k, v in eqn.params.items() if k not in ("jaxpr", "branches")}
        key = (*map(id, jaxprs_in(eqn.params)), *others.items(), *first)
        if key not in self._in_two:
            self._in_two[key] = eqn, _split(eqn, first)
        found = self._in_two[key][1]
        if found is None:
            return None
        whole = Whole(eqn)
        return tuple(
            dataclasses.replace(p, part=dataclasses.replace(p.part, whole=whole)) for p in found
        )
