"""The jaxprs that an equation runs: what it calls, its body or its branches; and which of its
results are operands."""

from __future__ import annotations

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
    "bodies_of",
    "inlined_call",
    "is_plain_jit",
    "is_recomputation",
    "returned_operands",
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


def _is_barred(eqn: JaxprEqn) -> bool:
    return is_recomputation(eqn) and bool(eqn.params.get("prevent_cse", True))


def _plain_call(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
    return inlined_call(eqn) if is_plain_jit(eqn) else None


def bodies_of(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The body of a shard_map or scan, or the branches of a cond, with calls inlined;
    recomputations stay behind a barrier."""
    bodies = eqn.params.get("branches") or [eqn.params["jaxpr"]]
    bodies = [b if isinstance(b, ClosedJaxpr) else ClosedJaxpr(b, ()) for b in bodies]
    return [with_inlined(body, _plain_call, _is_barred) for body in bodies]


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
