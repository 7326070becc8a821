"""Keys that are equal only for equations that compute the same."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

__all__ = ["literal_key", "param_key"]


@functools.cache
def _is_compared_by_identity(kind: Any) -> bool:
    return issubclass(kind, ClosedJaxpr | Jaxpr | np.ndarray | jax.Array)


def param_key(param: Any) -> Any:
    """A key that is equal only for equivalent parameters; if in doubt, parameters are
    compared by identity."""
    if isinstance(param, tuple | list):
        return tuple([param_key(p) for p in param])
    if isinstance(param, dict):
        return tuple([(k, param_key(param[k])) for k in sorted(param)])
    kind: Any = type(param)
    if _is_compared_by_identity(kind):
        return (kind, id(param))
    try:
        hash(param)
    except TypeError:
        return ("object", id(param))
    return (kind, param)


def literal_key(literal: Literal) -> Any:
    aval = literal.aval
    return (aval.dtype, aval.shape, aval.weak_type, np.asarray(literal.val).tobytes())
