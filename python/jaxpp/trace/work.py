"""The work of an equation and the size of a value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jaxpp.jax_internals.jaxprs import jaxprs_in
from jaxpp.placements import physical_type

__all__ = ["bytes_of", "flops", "work"]


def bytes_of(aval: Any) -> int:
    """The bytes of an abstract value; 0 for one without a shape."""
    if not hasattr(aval, "shape"):
        return 0
    return _bytes_of_type(*physical_type(aval))


@functools.lru_cache(maxsize=4096)
def _bytes_of_type(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def flops(eqn: JaxprEqn, params: dict[str, Any] | None = None) -> float:
    """Approximate floating-point operations: exact for products, one per element otherwise.

    `params`: the parameters of a part of the equation, instead of its own.
    """
    return _with_inner(eqn, eqn.params if params is None else params, _own_flops)


def work(eqn: JaxprEqn) -> float:
    """The time of an equation by the roofline model (Williams, Waterman and Patterson 2009),
    in floating-point operations: its own, or those that the device could do while the
    equation reads and writes memory, whichever are more."""
    return _with_inner(eqn, eqn.params, _own_work)


def _with_inner(
    eqn: JaxprEqn, params: dict[str, Any], of_one: Callable[[JaxprEqn], float]
) -> float:
    """`of_one` of an equation, and of the equations of the jaxpr that it runs. Of the branches
    of a condition, the largest counts."""
    inner = [
        sum(_with_inner(e, e.params, of_one) for e in jaxpr.eqns) for jaxpr in jaxprs_in(params)
    ]
    return of_one(eqn) + max(inner, default=0.0) * params.get("length", 1)


def _own_flops(eqn: JaxprEqn) -> float:
    outs = sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    name = eqn.primitive.name
    if name == "dot_general":
        ((contract, _), _) = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * outs * math.prod(shape[d] for d in contract)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * outs * math.prod(kernel) / max(1, max(kernel))
    return float(outs)


# Floating-point operations in the time of one byte from memory. Data sheets of accelerators
# name 150 to 300 (A100: 156, TPU v5e: 240, H100: 295), at the precision of products.
_FLOPS_PER_BYTE = {"cpu": 10.0}
_FLOPS_PER_BYTE_ELSEWHERE = 200.0

# Equations that read their operands from memory; XLA fuses most others with what makes or
# uses their operands.
_READ_ALL = {"dot_general", "conv_general_dilated", "sort", "top_k", "fft", "concatenate"}
_READ_ALL_PREFIXES = ("reduce_", "cum", "arg")
_READ_PART = ("gather", "dynamic_slice", "scatter", "dynamic_update_slice")


def _own_work(eqn: JaxprEqn) -> float:
    per_byte = _FLOPS_PER_BYTE.get(jax.default_backend(), _FLOPS_PER_BYTE_ELSEWHERE)
    return max(_own_flops(eqn), per_byte * _own_bytes(eqn))


def _own_bytes(eqn: JaxprEqn) -> float:
    """The bytes that an equation reads and writes, if it is not fused with others."""
    name = eqn.primitive.name
    if name.startswith(_READ_PART):  # as much as it writes; the rest stays in place
        in_place = name.startswith(("scatter", "dynamic_update_slice"))
        changed = eqn.invars[1 if name == "dynamic_update_slice" else -1] if in_place else None
        return 2.0 * bytes_of((changed or eqn.outvars[0]).aval)
    if name in _READ_ALL or name.startswith(_READ_ALL_PREFIXES):
        return float(sum(bytes_of(v.aval) for v in (*eqn.invars, *eqn.outvars)))
    return 0.0
