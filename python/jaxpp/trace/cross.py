"""Operations after the loop that combine values of several ranks or place values on ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxpp.errors import make_error, shorten

__all__ = ["cross_mpmd_all_reduce", "cross_mpmd_stack", "place_p", "place_with"]

# (x, *beside) -> x, on the ranks of `beside`, or on all ranks if `beside` is empty.
place_p = Primitive("place")
place_p.def_impl(lambda x, *beside: x)
place_p.def_abstract_eval(lambda x, *beside: x)
mlir.register_lowering(place_p, lambda ctx, x, *beside: [x])
batching.primitive_batchers[place_p] = lambda xs, dims: (place_p.bind(*xs), dims[0])


def _place_jvp(primals: Any, tangents: Any) -> Any:
    return place_p.bind(*primals), tangents[0]


ad.primitive_jvps[place_p] = _place_jvp


def place_with(val: Any, with_val: Any) -> Any:
    """Places `val` on the ranks that hold `with_val`.

    Args:
      val: a pytree of arrays, outside the loop over microbatches.
      with_val: a pytree of arrays; each leaf of `val` is placed on the ranks of all these
        leaves.

    Returns:
      `val`.
    """
    beside = [jnp.asarray(leaf) for leaf in jax.tree.leaves(with_val)]
    return jax.tree.map(lambda x: place_p.bind(jnp.asarray(x), *beside), val)


def cross_mpmd_all_reduce(*arrays: Any) -> jax.Array:
    """Sums arrays of the same shape and dtype from different ranks; all ranks get the sum.

    Each rank first sums its own arrays and sends only that sum.
    """
    total = functools.reduce(jax.lax.add, _arrays(arrays, "cross_mpmd_all_reduce"))
    return place_p.bind(total)


def cross_mpmd_stack(arrays: Any, axis: int = 0) -> jax.Array:
    """Stacks arrays of the same shape and dtype from different ranks; all ranks get the
    result."""
    return place_p.bind(jnp.stack(_arrays(arrays, "cross_mpmd_stack"), axis))


def _arrays(given: Any, name: str) -> list[jax.Array]:
    found = [jnp.asarray(a) for a in given] if isinstance(given, Iterable) else []
    if not found:
        raise make_error(
            "invalid-argument", f"{name}: expected at least one array, found {shorten(given)}"
        )
    return found
