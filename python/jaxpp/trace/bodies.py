"""The jaxprs that an equation runs: what it calls, its body or its branches; and which of its
results are operands, or depend on some operands only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jaxpp.jax_internals.jaxprs import (
    has_effects,
    is_undefined,
    is_unspecified,
    scan_sizes,
    with_inlined,
)

__all__ = [
    "PLAIN_CALLS",
    "bodies_of",
    "fixed_results",
    "inlined_call",
    "is_plain_jit",
    "is_recomputation",
    "returned_operands",
]

# Calls without a derivative of their own. In JAX 0.11.2, closed_call and core_call are
# "eval_jaxpr", which is also the forward of a checkpoint.
PLAIN_CALLS = frozenset(("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"))
_INLINED = PLAIN_CALLS | {"custom_jvp_call", "custom_vjp_call"}
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


def _is_barred(eqn: JaxprEqn) -> bool:
    return is_recomputation(eqn) and bool(eqn.params.get("prevent_cse", True))


def _plain_call(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    return inlined_call(eqn) if is_plain_jit(eqn) else None


def _bodies_with_calls(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    bodies = eqn.params.get("branches") or [eqn.params["jaxpr"]]
    return [b if isinstance(b, ClosedJaxpr) else ClosedJaxpr(b, ()) for b in bodies]


def bodies_of(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The body of a shard_map or scan, or the branches of a cond, with calls inlined;
    recomputations stay behind a barrier."""
    return [with_inlined(b, _plain_call, _is_barred) for b in _bodies_with_calls(eqn)]


# --- Results that are operands ----------------------------------------------------------

_UNDEFINED = "undefined"


def _roots(jaxpr: Jaxpr) -> list[Any]:
    """What each result of a jaxpr is: the number of an argument, `_UNDEFINED`, or None for
    anything else."""
    roots: dict[Any, Any] = {v: k for k, v in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        ins = [roots.get(v) if isinstance(v, Var) else None for v in eqn.invars]
        if is_undefined(eqn):
            roots[eqn.outvars[0]] = _UNDEFINED
        elif eqn.primitive.name == "broadcast_in_dim" and ins == [_UNDEFINED]:
            roots[eqn.outvars[0]] = _UNDEFINED
        else:
            roots.update((eqn.outvars[k], ins[n]) for k, n in returned_operands(eqn).items())
    return [roots.get(v) if isinstance(v, Var) else None for v in jaxpr.outvars]


def returned_operands(eqn: JaxprEqn) -> dict[int, int]:
    """The results of a cond or scan that are an operand, with the operand's number. Among those
    of a cond are the weights that its backward pass takes: JAX leaves them undefined after a
    branch that does not use them."""
    if eqn.primitive.name not in ("cond", "scan") or has_effects(eqn):
        return {}
    bodies = [body.jaxpr for body in bodies_of(eqn)]
    before = len(eqn.invars) - len(bodies[0].invars)  # the index of a cond
    found: dict[int, int] = {}
    for k, roots in enumerate(zip(*map(_roots, bodies), strict=True)):
        defined = {root for root in roots if root != _UNDEFINED}
        root = defined.pop() if len(defined) == 1 else None
        if root is not None:
            found[k] = before + root
    if eqn.primitive.name == "cond":
        return found
    num_consts, num_carry = scan_sizes(eqn.params)
    stacked = num_consts + num_carry
    return {k: n for k, n in found.items() if k >= num_carry and n >= stacked}


# --- Results that depend on some operands only ------------------------------------------


def _fixed_in(jaxpr: ClosedJaxpr | Jaxpr, fixed: Sequence[bool]) -> list[bool]:
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    varying = {id(v) for v, f in zip(jaxpr.invars, fixed, strict=True) if not f}
    for eqn in jaxpr.eqns:
        found = fixed_results(eqn, [id(v) not in varying for v in eqn.invars])
        varying.update(id(v) for v, f in zip(eqn.outvars, found, strict=True) if not f)
    return [id(v) not in varying for v in jaxpr.outvars]


def fixed_results(eqn: JaxprEqn, fixed: Sequence[bool]) -> list[bool]:
    """Which results of an equation are computed from its fixed operands alone."""
    if has_effects(eqn):
        return [False] * len(eqn.outvars)
    if all(fixed):
        return [True] * len(eqn.outvars)
    called = inlined_call(eqn)
    if called is not None:
        return _fixed_in(called, fixed)
    name = eqn.primitive.name
    if name not in ("cond", "scan", "shard_map"):
        return [False] * len(eqn.outvars)
    bodies = _bodies_with_calls(eqn)
    if name == "cond":
        of_each = [_fixed_in(body, fixed[1:]) for body in bodies]
        return [fixed[0] and all(found) for found in zip(*of_each, strict=True)]
    num_consts, num_carry = scan_sizes(eqn.params) if name == "scan" else (0, 0)
    known, states = list(fixed), slice(num_consts, num_consts + num_carry)
    while True:
        found = _fixed_in(bodies[0], known)
        carry = [k and f for k, f in zip(known[states], found[:num_carry], strict=True)]
        if carry == known[states]:
            return found
        known[states] = carry
