"""Moves casts of operands out of scans, for layers that compute in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpp.jax_internals.jaxprs import changed_jaxpr, new_var, scan_sizes
from jaxpp.trace.bodies import bodies_of

__all__ = ["without_casts"]

_CAST = jax.lax.convert_element_type_p


def _casts_of(jaxpr: Jaxpr, argument: Var) -> tuple[set[Var], set[Any]]:
    """The variables that equal an argument, behind barriers, and the dtypes to which equations
    cast them; no dtypes if an equation uses them in another way."""
    names, dtypes = {argument}, set[Any]()
    for eqn in jaxpr.eqns:
        for position, operand in enumerate(eqn.invars):
            if not isinstance(operand, Var) or operand not in names:
                continue
            if eqn.primitive is jax.lax.optimization_barrier_p:
                names.add(eqn.outvars[position])
            elif eqn.primitive is _CAST:
                dtypes.add(eqn.params["new_dtype"])
            else:
                return names, set()
    returned = any(isinstance(v, Var) and v in names for v in jaxpr.outvars)
    return names, set() if returned else dtypes


def without_casts(eqn: JaxprEqn, chosen: Sequence[bool]) -> tuple[JaxprEqn, dict[int, Any]]:
    """Returns the scan without the casts of chosen operands, which it takes instead, and the
    types of the casts by the operand's number. An operand qualifies if the iterations use it
    only to cast it to one dtype that is not larger."""
    (closed,) = bodies_of(eqn)
    num_consts, num_carry = scan_sizes(eqn.params)
    changed: dict[Var, Var] = {}
    types: dict[int, Any] = {}
    for k, argument in enumerate(closed.jaxpr.invars):
        if not chosen[k] or num_consts <= k < num_consts + num_carry:
            continue
        names, dtypes = _casts_of(closed.jaxpr, argument)
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        if dtype is not None and dtype.itemsize <= argument.aval.dtype.itemsize:
            changed.update((v, new_var(v.aval.update(dtype=dtype))) for v in names)
            types[k] = eqn.invars[k].aval.update(dtype=dtype)
    if not types:
        return eqn, {}

    def read(atom: Any) -> Any:
        return changed.get(atom, atom) if isinstance(atom, Var) else atom

    eqns = []
    for inner in closed.jaxpr.eqns:
        operand = inner.invars[0] if inner.primitive is _CAST else None
        if isinstance(operand, Var) and operand in changed:
            changed[inner.outvars[0]] = changed[operand]
        else:
            invars, outvars = map(read, inner.invars), map(read, inner.outvars)
            eqns.append(inner.replace(invars=list(invars), outvars=list(outvars)))
    invars, outvars = map(read, closed.jaxpr.invars), map(read, closed.jaxpr.outvars)
    body = changed_jaxpr(closed, invars=list(invars), outvars=list(outvars), eqns=eqns)
    operands = [new_var(types[k]) if k in types else v for k, v in enumerate(eqn.invars)]
    return eqn.replace(invars=operands, params={**eqn.params, "jaxpr": body}), types
