"""Ops that make zeros, such as the gradients of weights under `jax.lax.stop_gradient`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from jaxpp.trace.front import Operand

__all__ = ["Zeros"]

# Zero if all operands are.
_OF_ZEROS = {
    "abs",
    "add",
    "add_any",
    "concatenate",
    "copy",
    "copy_p",
    "neg",
    "pad",
    "reduce_sum",
    "sub",
}
_OF_ZEROS |= {"broadcast_in_dim", "convert_element_type", "expand_dims", "reshape", "squeeze"}
_OF_ZEROS |= {"reshard", "rev", "sharding_constraint", "sign", "slice", "square", "transpose"}


def _array(literal: Literal) -> Any:
    return np.asarray(literal.val, literal.aval.dtype)


def _is_number(operand: Operand) -> bool:
    """Whether the operand is a finite literal; its product with zero is zero."""
    return isinstance(operand, Literal) and bool(np.all(np.isfinite(_array(operand))))


class Zeros:
    """The values of a graph that are known to be zero, of either sign."""

    def __init__(self) -> None:
        self._values: set[int] = set()

    def __contains__(self, operand: Operand) -> bool:
        if isinstance(operand, Literal):
            has_numbers = operand.aval.dtype != jax.dtypes.float0
            return has_numbers and bool(np.all(_array(operand) == 0))
        return operand in self._values

    def add(self, value: int) -> None:
        self._values.add(value)

    def is_made_by(self, primitive: Any, operands: Sequence[Operand]) -> bool:
        """Whether an equation with one result makes zeros."""
        name = primitive.name
        if name in _OF_ZEROS:
            return all(o in self for o in operands)
        if name == "mul":
            zero = any(o in self for o in operands)
            return zero and all(o in self or _is_number(o) for o in operands)
        if name == "div":
            over, under = operands
            return over in self and _is_number(under) and under not in self
        return name == "select_n" and all(o in self for o in operands[1:])
