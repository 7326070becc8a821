"""Terms that are equal in all microbatches are added to a loop's sums once, after the loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
from jaxpp.trace.terms import take_out_terms

WEIGHT = jnp.arange(1.0, 4.0)
LENGTH = 4

# The number of terms that leave the loop, and a result computed from `g`, which differs between
# microbatches, and from the weight `w`.
CASES: dict[str, tuple[int, Callable[[Any, Any], Any]]] = {
    "a term": (1, lambda g, w: g + 2 * w),
    "several": (2, lambda g, w: (w + g) + jnp.sin(w)),
    "in both operands": (2, lambda g, w: (g + w) + (2 * g + w * w)),
    "scaled": (1, lambda g, w: -(g + w) / 4),
    "scaled by a weight": (2, lambda g, w: (g + 3 * w) * w.sum() + w),
    "cast": (1, lambda g, w: (g + w).astype(jnp.bfloat16).astype(jnp.float32)),
    "cast to whole numbers": (0, lambda g, w: (g + 2.5 * w).astype(jnp.int32)),
    "rounded": (0, lambda g, w: jnp.round(g + 2.5 * w)),
    "divided by the sum": (0, lambda g, w: 1 / (g + w)),
    "squared": (0, lambda g, w: (lambda s: s * s)(g + w)),
    "used twice": (0, lambda g, w: (lambda s: s + jnp.sin(s))(g + w)),
    "a constant": (0, lambda g, w: g + jnp.ones(3)),
    "nothing else": (0, lambda g, w: w + w),
    "no term": (0, lambda g, w: g + g * w),
    "marked": (0, lambda g, w: g + jaxpp.mark_stage_end(w)),
}


def check(make: Callable[[Any, Any], Any], dtype: Any = jnp.float32) -> int:
    """Compares the loop's result with the sum of the values; returns the number of terms."""
    weight = WEIGHT.astype(dtype)

    def body(i: Any) -> Any:
        return make(jnp.cos(i.astype(dtype) * weight), weight)

    _, terms, counts = take_out_terms(jax.make_jaxpr(body)(jnp.int32(0)), [True])
    assert counts == [len(terms.out_avals)]
    with jax.disable_jit():
        expected = sum(np.asarray(body(jnp.int32(i)), np.float64) for i in range(LENGTH))
    found = jaxpp.treduce_i(body, LENGTH, jaxpp.Std1F1B(1), operation=jaxpp.Add)
    np.testing.assert_allclose(found, expected, rtol=1e-2 if "bfloat16" in str(dtype) else 1e-5)
    return counts[0]


@pytest.mark.parametrize("name", CASES)
def test_terms_leave_the_loop(name: str) -> None:
    count, make = CASES[name]
    tolerant = jnp.bfloat16 if name == "cast" else jnp.float32
    assert check(make, tolerant) == count


def test_random_expressions() -> None:
    def expression(source: random.Random, g: Any, w: Any, depth: int) -> Any:
        if not depth:
            return source.choice([g, w, jnp.sin(g), w * w, 2.0])
        a, b = (expression(source, g, w, depth - 1) for _ in range(2))
        steps = [
            lambda: a + b,
            lambda: a - b,
            lambda: a * w,
            lambda: a / 3,
            lambda: jnp.tanh(a + b),
            lambda: b + a,
        ]
        return source.choice(steps)()

    counts = []
    for seed in range(60):

        def make(g: Any, w: Any, seed: int = seed) -> Any:
            return g + expression(random.Random(seed), g, w, 3)

        counts.append(check(make))
    assert sum(count > 0 for count in counts) > 20


def test_a_sum_of_many_values() -> None:
    """An example is the gradient of a weight that 1,200 layers share."""

    def body(i: Any) -> Any:
        total = jnp.cos(i * WEIGHT) + WEIGHT
        for k in range(1200):
            total = total + jnp.sin(i * k * WEIGHT)
        return total

    closed = jax.make_jaxpr(body)(jnp.int32(0))
    shorter, _, counts = take_out_terms(closed, [True])
    assert counts == [1] and len(shorter.jaxpr.eqns) == len(closed.jaxpr.eqns)


def test_effects_stay_in_the_loop() -> None:
    seen = []

    def body(i: Any) -> Any:
        jax.debug.callback(lambda i, w: seen.append(int(i)), i, 2 * WEIGHT)
        jax.debug.callback(lambda w: seen.append(-1), WEIGHT)
        return jnp.cos(i * WEIGHT) + WEIGHT

    total = jaxpp.treduce_i(body, LENGTH, jaxpp.Std1F1B(1), operation=jaxpp.Add)
    jax.block_until_ready(total)
    jax.effects_barrier()
    assert sorted(seen) == [-1] * LENGTH + list(range(LENGTH))


def test_a_sum_that_is_returned_twice() -> None:
    def body(i: Any) -> Any:
        total = jnp.cos(i * WEIGHT) + WEIGHT
        return total, {"again": total, "largest": total}

    operations = (jaxpp.Add, {"again": jaxpp.Add, "largest": jaxpp.Max})
    total, others = jaxpp.treduce_i(body, LENGTH, jaxpp.Std1F1B(1), operation=operations)
    values = np.array([body(jnp.int32(i))[0] for i in range(LENGTH)])
    np.testing.assert_allclose(total, values.sum(0), rtol=1e-5)
    np.testing.assert_allclose(others["again"], values.sum(0), rtol=1e-5)
    np.testing.assert_allclose(others["largest"], values.max(0), rtol=1e-5)


def test_a_term_in_the_dtype_of_the_sum() -> None:
    """In bfloat16, 1000 + 1 is 1000."""
    weight = jnp.full(2, 1000, jnp.bfloat16)

    def body(i: Any) -> Any:
        return i.astype(jnp.bfloat16) * jnp.ones(2, jnp.bfloat16) + weight

    operation = jaxpp.Add(jnp.float32)
    total = jaxpp.treduce_i(body, LENGTH, jaxpp.Std1F1B(1), operation=operation)
    assert total.dtype == jnp.float32
    np.testing.assert_array_equal(total, 4006)
