"""Ops that only copy consecutive elements of an array, such as rows of a batch or of stacked
weights, and casts. A task of such ops needs no module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxpp.trace.front import Operand

__all__ = ["first_row"]

# With one operand, and as many elements in the result, these keep the elements' order.
_WHOLE = {"broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reshape", "squeeze"}


def _row_of_slice(
    name: str, params: Mapping[str, Any], operands: Sequence[Operand], avals: Mapping[int, Any]
) -> int | None:
    shape = avals[operands[0]].shape
    if not shape:
        return None
    if name == "slice" and params["strides"] is None:
        start, *rest = params["start_indices"]
        whole = params["limit_indices"][1:] == tuple(shape[1:])
        return start if whole and not any(rest) else None
    if name == "dynamic_slice" and params["slice_sizes"][1:] == tuple(shape[1:]):
        _, index, *rest = operands
        whole = all(isinstance(o, Literal) for o in rest)  # the only valid index is 0
        is_index = isinstance(index, int) and avals[index].dtype in (jnp.int32, jnp.uint32)
        return 0 if whole and is_index else None
    return None


def first_row(
    name: str,
    params: Mapping[str, Any],
    operands: Sequence[Operand],
    avals: Mapping[int, Any],
    out: Any,
) -> int | None:
    """The row of its first operand with which an equation's result begins; the second operand,
    if it is a value, is added to it. None if the equation does more than copy.

    Args:
      name: of the primitive.
      avals: the types of values.
      out: the type of the result.
    """
    if name not in _WHOLE and name not in ("slice", "dynamic_slice"):
        return None
    if not isinstance(operands[0], int):
        return None
    aval = avals[operands[0]]
    if not aval.size or not out.size:
        return None
    if name not in _WHOLE:
        return _row_of_slice(name, params, operands, avals)
    transposed = name == "reshape" and params["dimensions"] is not None
    return 0 if len(operands) == 1 and out.size == aval.size and not transposed else None
