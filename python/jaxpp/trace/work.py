"""The work of an equation and the size of a value."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpp.placements import physical_type

__all__ = ["bytes_of", "flops", "jaxprs_in"]


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
    params = eqn.params if params is None else params
    outs = sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))
    name = eqn.primitive.name
    if name == "dot_general":
        ((contract, _), _) = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        return 2.0 * outs * math.prod(shape[d] for d in contract)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        return 2.0 * outs * math.prod(kernel) / max(1, max(kernel))
    inner = [_jaxpr_flops(j) for p in params.values() for j in jaxprs_in(p)]
    return float(outs) + max(inner, default=0.0) * params.get("length", 1)


def _jaxpr_flops(jaxpr: Jaxpr) -> float:
    return sum(flops(eqn) for eqn in jaxpr.eqns)


def jaxprs_in(param: Any) -> Iterator[Jaxpr]:
    """The jaxprs in a parameter of an equation."""
    if isinstance(param, ClosedJaxpr):
        yield param.jaxpr
    elif isinstance(param, Jaxpr):
        yield param
    elif isinstance(param, tuple | list):
        for item in param:
            yield from jaxprs_in(item)
