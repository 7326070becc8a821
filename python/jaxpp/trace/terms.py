"""Takes the terms of a loop's sums that are equal in all microbatches out of the loop."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var

from jaxpp.jax_internals.arrays import unreduced_axes
from jaxpp.jax_internals.jaxprs import changed_jaxpr, drop_unused, jaxprs_in, new_var
from jaxpp.trace.marks import MARKS, holds_marks

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


def _has_marks(eqn: JaxprEqn) -> bool:
    return eqn.primitive in MARKS or any(map(holds_marks, jaxprs_in(eqn.params)))


class _Splitter:
    """Splits sums into what is left of them and their invariant terms."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        jaxpr = closed.jaxpr
        operands = [v for eqn in jaxpr.eqns for v in eqn.invars]
        self.varying = set(jaxpr.invars)  # depends on the arguments, a mark or an effect
        self.invariant = set(jaxpr.constvars)  # depends on constants only
        self.outside: list[JaxprEqn] = []  # equations that could run outside the loop
        for eqn in jaxpr.eqns:
            self._classify(eqn)
        self.made_by = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.used = collections.Counter(v for v in operands if isinstance(v, Var))
        self.returned = collections.Counter(v for v in jaxpr.outvars if isinstance(v, Var))
        self.changed: dict[int, JaxprEqn] = {}  # equations without terms, by the old one's id
        self.scaling: list[JaxprEqn] = []  # equations that scale terms

    def _classify(self, eqn: JaxprEqn) -> None:
        operands = {v for v in eqn.invars if isinstance(v, Var)}
        if eqn.effects or operands & self.varying or _has_marks(eqn):
            self.varying.update(eqn.outvars)
            return
        self.outside.append(eqn)
        if operands & self.invariant:
            self.invariant.update(eqn.outvars)

    def split(self, value: Any, used: int = 1) -> tuple[Any, list[Var]]:
        """What is left of a value, and its terms. Equations use the value so many times; if
        they do so for another purpose, the value is left as it is."""
        eqn = self.made_by.get(value) if isinstance(value, Var) else None
        if eqn is None or value not in self.varying:
            return value, []
        if self.used[value] != used or (used and self.returned[value]):
            return value, []
        if is_sum(eqn):
            return self._split_sum(eqn)
        return self._split_scaled(eqn) if eqn.primitive in _SCALING else (value, [])

    def _split_sum(self, eqn: JaxprEqn) -> tuple[Any, list[Var]]:
        (value,) = eqn.outvars
        left: list[Any] = []
        terms: list[Var] = []
        if any(v.aval != value.aval for v in eqn.invars) or unreduced_axes(value.aval):
            return value, []
        for operand in eqn.invars:
            if isinstance(operand, Var) and operand in self.invariant:
                terms.append(operand)
            else:
                rest, more = self.split(operand)
                left.append(rest)
                terms += more
        if len(left) == 1:
            return left[0], terms
        self.changed[id(eqn)] = eqn.replace(invars=left)
        return value, terms

    def _split_scaled(self, eqn: JaxprEqn) -> tuple[Any, list[Var]]:
        (value,) = eqn.outvars
        at = [k for k, v in enumerate(eqn.invars) if isinstance(v, Var) and v in self.varying]
        is_float = jnp.issubdtype(value.aval.dtype, jnp.inexact)
        if not is_float or len(at) > 1 or (eqn.primitive is jax.lax.div_p and at != [0]):
            return value, []

        def scaled(operand: Any, result: Var) -> JaxprEqn:
            operands = [operand if k in at else v for k, v in enumerate(eqn.invars)]
            return eqn.replace(invars=operands, outvars=[result])

        rest, terms = self.split(eqn.invars[at[0]])
        results = [new_var(value.aval) for _ in terms]
        self.scaling += map(scaled, terms, results)
        self.changed[id(eqn)] = scaled(rest, value)
        return value, results


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
        left[k], found = splitter.split(left[k], used=0) if is_summed else (left[k], [])
        terms.append(found)
    shorter = [splitter.changed.get(id(eqn), eqn) for eqn in closed.jaxpr.eqns]
    alone = changed_jaxpr(
        closed,
        invars=[],
        outvars=[v for found in terms for v in found],
        eqns=[*splitter.outside, *splitter.scaling],
    )
    return (
        changed_jaxpr(closed, outvars=left, eqns=shorter),
        ClosedJaxpr(drop_unused(alone.jaxpr), closed.consts),
        [len(found) for found in terms],
    )
