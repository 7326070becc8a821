"""Keys that are equal only for equations that compute the same."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["literal_key", "param_key"]


_PLAIN = {bool, float, int, str, type(None)}


def param_key(param: Any) -> Any:
    """A key that is equal only for equivalent parameters; if in doubt, parameters are
    compared by identity."""
    if type(param) in _PLAIN:
        return (type(param), param)
    if isinstance(param, ClosedJaxpr | Jaxpr):
        return ("jaxpr", id(param))
    if isinstance(param, tuple | list):
        return tuple(param_key(p) for p in param)
    if isinstance(param, dict):
        return tuple((k, param_key(v)) for k, v in sorted(param.items()))
    if isinstance(param, np.ndarray | jax.Array):
        return ("array", id(param))
    try:
        hash(param)
    except TypeError:
        return ("object", id(param))
    return (type(param), param)


def literal_key(literal: Literal) -> Any:
    aval = literal.aval
    return (aval.dtype, aval.shape, aval.weak_type, np.asarray(literal.val).tobytes())
