"""How a loop's results are reduced over the microbatches.

An operation has a `state`, which begins the reduction, and an `update`, which takes one
microbatch's value in. Anything with these two methods may be passed to `treduce`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

__all__ = ["Add", "Concat", "Max", "Operation", "normalize"]


class Operation(Protocol):
    """What `treduce` asks of an operation; a user's own one needs no base class."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        """The state before the first of `n` microbatches, for values like `value`."""
        ...

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        """The state after microbatch `i` (an int32 scalar) gave `value`."""
        ...


@dataclasses.dataclass(frozen=True)
class Add:
    """The sum over microbatches, in their order: same shape and dtype as one value."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return jax.lax.add(state, value)


@dataclasses.dataclass(frozen=True)
class Max:
    """The largest value, element by element: same shape and dtype as one value."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(value.dtype, jnp.floating):
            return jnp.full(value.shape, -jnp.inf, value.dtype)
        if value.dtype == jnp.bool_:
            return jnp.zeros(value.shape, value.dtype)
        return jnp.full(value.shape, jnp.iinfo(value.dtype).min, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.maximum(state, value)


@dataclasses.dataclass(frozen=True)
class Concat:
    """All values side by side along a new axis of size `n`, as `xs` was cut along it."""

    axis: int = 0

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        axis = self.axis % (len(value.shape) + 1)
        shape = (*value.shape[:axis], n, *value.shape[axis:])
        return jnp.zeros(shape, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        index = i.astype(jnp.uint32)
        axis = self.axis % len(state.shape)
        return jax.lax.dynamic_update_index_in_dim(state, value, index, axis)


# jpp_reduce_kind_t
_KINDS = {Add: 0, Max: 1, Concat: 2}
_CUSTOM = 3


def normalize(operation: Any) -> Operation | None:
    """An operation given as an object or as a class; None if it is neither."""
    if isinstance(operation, type):
        operation = operation()
    if hasattr(operation, "state") and hasattr(operation, "update"):
        return operation
    return None


def kind_of(operation: Operation) -> int:
    """The operation's number in the planner."""
    return _KINDS.get(type(operation), _CUSTOM)
