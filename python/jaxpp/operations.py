"""How a loop's results are reduced over the microbatches.

An operation has a method `state`, which returns the initial state, and `update`, which adds one
microbatch's value. Any object with these two methods can be passed to `treduce`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import as_addend, on_one_mesh, unreduced_axes
from jaxpp.jax_internals.context import context_mesh

__all__ = ["Add", "Concat", "Max", "Operation", "accumulate", "normalize", "state_of"]


class Operation(Protocol):
    """The interface of an operation. User-defined operations need no base class."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        """The state before the first of `n` microbatches, for values of `value`'s type."""
        ...

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        """The state after microbatch `i` (an int32 scalar) returned `value`."""
        ...


def accumulate(operation: Operation, state: Any, value: Any, i: Any) -> jax.Array:
    """`operation.update` that also works if only one of state and value has explicit axes, or
    if each device has one term of a sum as the value: it is reduced first, unless each
    device has one term of the state, too."""
    with context_mesh(None):
        return operation.update(*on_one_mesh(state, as_addend(value, state)), i)


@dataclasses.dataclass(frozen=True, repr=False)
class Add:
    """The sum over microbatches, in order, with the shape of one value.

    Attributes:
      dtype: the sum's dtype, such as `jnp.float32` for gradients in bfloat16: each value
        is converted before it is added. None: the dtype of one value.
    """

    dtype: Any = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype is None or not jnp.issubdtype(dtype, jnp.number):
            raise make_error(
                "invalid-argument",
                f"Add: dtype={shorten(self.dtype)}; expected the dtype of numbers, such as "
                "jnp.float32",
                wrong_type=dtype is None,
            )
        object.__setattr__(self, "dtype", dtype)

    def __repr__(self) -> str:
        return f"Add({'' if self.dtype is None else f'dtype={self.dtype}'})"

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, self.dtype or value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.add(state, value.astype(state.dtype))

    def refuses(self, value: Any) -> str | None:
        """The reason why it cannot reduce such values; None if it can."""
        inexact = jnp.issubdtype(value.dtype, jnp.inexact)
        if self.dtype and inexact and not jnp.issubdtype(self.dtype, jnp.inexact):
            return f"expected a floating dtype for the sum of such values, found {self.dtype}"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return (
                "expected numbers to sum, found PRNG keys; drop them from the result, or "
                "return jax.random.key_data(key)"
            )
        if value.dtype == jnp.bool_ or not jnp.issubdtype(value.dtype, jnp.number):
            return "expected numbers to sum; sum x.astype(int), or use Max or Concat()"
        return None


@dataclasses.dataclass(frozen=True)
class Max:
    """The elementwise maximum, with the shape and dtype of one value."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(value.dtype, jnp.floating):
            info = jnp.finfo(value.dtype)
            has_infinity = np.isneginf(np.asarray(-np.inf, info.dtype).astype(np.float32))
            return jnp.full(value.shape, -np.inf if has_infinity else info.min, value.dtype)
        if value.dtype == jnp.bool_:
            return jnp.zeros(value.shape, value.dtype)
        return jnp.full(value.shape, jnp.iinfo(value.dtype).min, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.maximum(state, value)

    def refuses(self, value: Any) -> str | None:
        """The reason why it cannot reduce such values; None if it can."""
        kinds = (jnp.floating, jnp.integer, jnp.bool_)
        if any(jnp.issubdtype(value.dtype, kind) for kind in kinds):
            return None
        return "expected an ordered dtype: floating, integer or bool"


@dataclasses.dataclass(frozen=True)
class Concat:
    """The values of all `n` microbatches, stacked along a new axis."""

    axis: int = 0

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        axis = self.axis % (len(value.shape) + 1)
        shape = (*value.shape[:axis], n, *value.shape[axis:])
        return jnp.zeros(shape, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        index = i.astype(jnp.uint32)
        axis = self.axis % len(state.shape)
        return jax.lax.dynamic_update_index_in_dim(state, value, index, axis)

    def refuses(self, value: Any) -> str | None:
        """The reason why it cannot reduce such values; None if it can."""
        rank = len(value.shape) + 1
        if not isinstance(self.axis, int) or not -rank <= self.axis < rank:
            return f"expected an axis from {-rank} to {rank - 1}, found {self.axis!r}"
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return "expected numbers, found keys; concatenate jax.random.key_data(x)"
        return None


_KINDS = {Add: _core.REDUCE_ADD, Max: _core.REDUCE_MAX, Concat: _core.REDUCE_CONCAT}


def normalize(operation: Any) -> Operation | None:
    """An operation given as an object or as a class; None if it is neither."""
    if not (hasattr(operation, "state") and hasattr(operation, "update")):
        return None
    if not isinstance(operation, type):
        return operation
    try:
        return operation()
    except TypeError:  # it needs arguments
        return None


def state_of(operation: Operation, length: int, value: Any) -> jax.core.ShapedArray:
    """The abstract state of a reduction of `length` values like `value`."""
    # A fast path for the common operations: there may be thousands.
    if type(operation) in (Add, Max):
        dtype = getattr(operation, "dtype", None) or value.dtype
        # The terms of an unreduced sum are added after the loop, where it has no such type.
        sharding = None if unreduced_axes(value) else value.sharding
        return jax.core.ShapedArray(value.shape, dtype, sharding=sharding)
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype)
    state = jax.eval_shape(lambda: operation.state(length, struct))
    return jax.core.ShapedArray(state.shape, state.dtype)


def kind_of(operation: Operation) -> int:
    """The planner's id of the operation."""
    return _KINDS.get(type(operation), _core.REDUCE_CUSTOM)
