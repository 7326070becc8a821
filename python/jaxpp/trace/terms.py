"""Takes the terms of a loop's sums that are equal in all microbatches out of the loop."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxpp.jax_internals.arrays import unreduced_axes
from jaxpp.jax_internals.jaxprs import changed_jaxpr, drop_unused, has_effects, new_var
from jaxpp.trace.marks import MARKS, calls_marks

__all__ = ["is_sum", "take_out_terms"]

# Functions of a sum that are the sum of their values for its terms.
_SCALING = {jax.lax.mul_p, jax.lax.div_p, jax.lax.neg_p, jax.lax.convert_element_type_p}


def is_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation adds floating-point arrays of one type."""
    if eqn.primitive.name not in ("add_any", "add"):
        return False
    first, *others = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    same = all(a.shape == first.shape and a.dtype == first.dtype for a in others)
    return same and jnp.issubdtype(first.dtype, jnp.inexact)


@dataclasses.dataclass
class _Split:
    """A value that has invariant terms.

    Attributes:
      rest: the value without its terms.
      terms: its terms.
      eqn: the new equation that computes `rest`; None if `rest` exists already.
      parts: the operands that lose their terms as well.
    """

    rest: Any
    terms: list[Var]
    eqn: JaxprEqn | None
    parts: list[Var]


class _Splitter:
    """Splits the values of a loop's body into invariant terms and what is left."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        jaxpr = closed.jaxpr
        operands = [v for eqn in jaxpr.eqns for v in eqn.invars]
        self.used = collections.Counter(v for v in operands if isinstance(v, Var))
        self.returned = {v for v in jaxpr.outvars if isinstance(v, Var)}
        self.varying = set(jaxpr.invars)  # depends on the arguments, a mark or an effect
        self.invariant = set(jaxpr.constvars)  # depends on constants only
        self.outside: list[JaxprEqn] = []  # equations that need not run in the loop
        self.splits: dict[Any, _Split] = {}
        self.changed: dict[Var, JaxprEqn] = {}  # by the value that the equation computes
        for eqn in jaxpr.eqns:
            self._add(eqn)

    def _add(self, eqn: JaxprEqn) -> None:
        operands = {v for v in eqn.invars if isinstance(v, Var)}
        marks = eqn.primitive in MARKS or calls_marks(eqn)
        if has_effects(eqn) or operands & self.varying or marks:
            self.varying.update(eqn.outvars)
            split = self._split_of(eqn)
            if split is not None and split.terms:
                self.splits[eqn.outvars[0]] = split
            return
        self.outside.append(eqn)
        if operands & self.invariant:
            self.invariant.update(eqn.outvars)

    def _split_of(self, eqn: JaxprEqn) -> _Split | None:
        if is_sum(eqn):
            return self._split_of_sum(eqn)
        return self._split_of_scaled(eqn) if eqn.primitive in _SCALING else None

    def _is_part(self, value: Any) -> bool:
        """Whether a value can be split for the equation that uses it."""
        return (
            isinstance(value, Var)
            and value in self.splits
            and self.used[value] == 1
            and value not in self.returned
        )

    def _split_of_sum(self, eqn: JaxprEqn) -> _Split | None:
        (value,) = eqn.outvars
        if any(v.aval != value.aval for v in eqn.invars) or unreduced_axes(value.aval):
            return None
        parts = [v for v in eqn.invars if self._is_part(v)]
        left: list[Any] = []
        terms: list[Var] = []
        for operand in eqn.invars:
            if operand in parts:
                left.append(self.splits[operand].rest)
                terms += self.splits[operand].terms
            elif isinstance(operand, Var) and operand in self.invariant:
                terms.append(operand)
            else:
                left.append(operand)
        if len(left) == 1:
            return _Split(left[0], terms, None, parts)
        return _Split(value, terms, eqn.replace(invars=left), parts)

    def _split_of_scaled(self, eqn: JaxprEqn) -> _Split | None:
        (value,) = eqn.outvars
        varying = [v for v in eqn.invars if isinstance(v, Var) and v in self.varying]
        is_float = jnp.issubdtype(value.aval.dtype, jnp.inexact)
        if not is_float or len(varying) > 1 or not self._is_part(varying[0]):
            return None
        if eqn.primitive is jax.lax.div_p and eqn.invars[0] is not varying[0]:
            return None

        def scaled(operand: Any, result: Var) -> JaxprEqn:
            operands = [operand if v is varying[0] else v for v in eqn.invars]
            return eqn.replace(invars=operands, outvars=[result])

        split = self.splits[varying[0]]
        terms = [new_var(value.aval) for _ in split.terms]
        self.outside += map(scaled, split.terms, terms)
        return _Split(value, terms, scaled(split.rest, value), varying)

    def split(self, result: Any) -> tuple[Any, list[Var]]:
        """Removes the terms of a result of the body. Returns what is left, and the terms."""
        found = self.splits.get(result) if isinstance(result, Var) else None
        if found is None or self.used[result]:
            return result, []
        todo = [found]
        while todo:
            split = todo.pop()
            todo += [self.splits[part] for part in split.parts]
            if split.eqn is not None:
                self.changed[split.eqn.outvars[0]] = split.eqn
        return found.rest, found.terms


def take_out_terms(
    closed: ClosedJaxpr, sums: Sequence[bool]
) -> tuple[ClosedJaxpr, ClosedJaxpr, list[int]]:
    """Takes terms such as the gradient of a penalty on the weights out of a loop's body.

    Args:
      closed: the body. Its argument is the microbatch number; its constants are the values from
        outside the loop.
      sums: whether the loop adds up the values of each result.

    Returns:
      The body without terms that are equal in all microbatches; a function without arguments
      that returns these terms, result by result; and the number of terms of each result.
    """
    splitter = _Splitter(closed)
    left, terms = list(closed.jaxpr.outvars), list[list[Var]]()
    for k, is_summed in enumerate(sums):
        left[k], found = splitter.split(left[k]) if is_summed else (left[k], [])
        terms.append(found)

    def current(eqn: JaxprEqn) -> JaxprEqn:
        return splitter.changed.get(eqn.outvars[0], eqn) if eqn.outvars else eqn

    alone = changed_jaxpr(
        closed,
        invars=[],
        outvars=[v for found in terms for v in found],
        eqns=splitter.outside,
    )
    return (
        changed_jaxpr(closed, outvars=left, eqns=list(map(current, closed.jaxpr.eqns))),
        ClosedJaxpr(drop_unused(alone.jaxpr), closed.consts),
        [len(found) for found in terms],
    )
