"""Ops that are computed again wherever they are needed, instead of being sent or kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpp.trace.front import Operand
from jaxpp.trace.work import bytes_of

__all__ = ["Patterns", "is_cheap"]

# Ops on at most this many bytes are recomputed by each user instead of being sent.
_SMALL_BYTES = 4096
_RESHAPES = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "iota"}
# Ops that take less time than reading their result from memory.
_QUICK = _RESHAPES | {"convert_element_type", "select_n", "eq", "ne", "lt", "le", "gt", "ge"}
_QUICK |= {"add", "sub", "mul", "neg", "abs", "max", "min", "and", "or", "xor", "not"}
_QUICK |= {"integer_pow", "sign", "square"}


def is_cheap(eqn: JaxprEqn) -> bool:
    """Whether recomputing is cheaper than sending or keeping: reshapes, slices, scalars,
    small masks, positions or keys. Arithmetic on numeric arrays belongs to its stage."""
    if eqn.effects:
        return False
    if all(v.aval.shape == () for v in (*eqn.invars, *eqn.outvars)):
        return True
    name = eqn.primitive.name
    counts = not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    if name == "dynamic_slice" or not (counts or name in _RESHAPES):
        return name == "dynamic_slice"
    in_bytes = sum(bytes_of(v.aval) for v in eqn.invars)
    out_bytes = sum(bytes_of(v.aval) for v in eqn.outvars)
    if name in _RESHAPES and in_bytes <= max(out_bytes, _SMALL_BYTES):
        return True
    return counts and max(in_bytes, out_bytes) <= _SMALL_BYTES


class Patterns:
    """The values of a loop's body that take less time to compute than to read, such as masks
    and positions of any size, or quantised weights as floats. They are made of constants, the
    microbatch's number, and values from outside that take at most half the bytes.

    XLA fuses them into the ops that use them. If they left the loop, like other ops on values
    from outside, there would be one for each layer, in memory until the loop ends.

    For the same reason, they include the transpose of a weight that only products use: XLA's
    products read their operands in any order.
    """

    def __init__(self) -> None:
        self._values: set[int] = set()
        self._for_products: set[Var] = set()  # transposes that only products use

    def find_transposes(self, jaxpr: Jaxpr) -> None:
        """Finds those of a jaxpr that only products use, before its equations are walked."""
        found = {e.outvars[0] for e in jaxpr.eqns if e.primitive is jax.lax.transpose_p}
        for eqn in jaxpr.eqns if found else ():
            if eqn.primitive is not jax.lax.dot_general_p:
                found.difference_update(v for v in eqn.invars if isinstance(v, Var))
        found.difference_update(v for v in jaxpr.outvars if isinstance(v, Var))
        self._for_products |= found

    def begin_loop(self, index: int) -> None:
        """`index`: the value of the microbatch's number."""
        self._values = {index}

    def __contains__(self, value: Operand) -> bool:
        return value in self._values

    def add(self, values: Iterable[int]) -> None:
        self._values.update(values)

    def is_made_by(
        self, eqn: JaxprEqn, operands: Sequence[Operand], is_outside: Callable[[int], bool]
    ) -> bool:
        """Whether an equation of the body makes a pattern."""
        name = eqn.primitive.name
        if name == "transpose" and eqn.outvars[0] in self._for_products:
            (weight,) = operands
            return weight in self._values or (isinstance(weight, int) and is_outside(weight))
        if name not in _QUICK:
            return False
        read = 0  # bytes of operands that are no patterns
        for operand, variable in zip(operands, eqn.invars, strict=True):
            if isinstance(operand, Literal) or operand in self._values:
                continue
            if not is_outside(operand):
                return False
            read += bytes_of(variable.aval)
        return bytes_of(eqn.outvars[0].aval) >= 2 * read
