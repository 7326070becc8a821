"""Every element type that plain JAX supports on the CPU works in a pipeline, sharded or not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import make_mesh

SMALL = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
EIGHTHS = ["e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]


@pytest.mark.sample(6)
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("name", [*SMALL, *(f"float8_{e}" for e in EIGHTHS)])
def test_dtype(name: str, data: int) -> None:
    dtype = jnp.dtype(name)

    def step(xs: jax.Array) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            x = jaxpp.mark_stage_end((x.astype(jnp.float32) + 1).astype(dtype))
            return jaxpp.mark_stage_end(x[::-1])

        return jaxpp.treduce(one, xs, jaxpp.GPipe(2), operation=jaxpp.Concat())

    ours = jaxpp.mpmd_jit_with_loop(step, make_mesh(2, data=data), in_specs=P(None, "data"))
    plain = jax.jit(step)
    expected = given = (jnp.arange(48).reshape(4, 6, 2) % 4).astype(dtype)
    for _ in range(2):  # takes a JAX array, then the result of the first step
        given, expected = ours(given), plain(expected)
        assert given.dtype == dtype
        found = np.asarray(given).astype(np.float32)
        np.testing.assert_array_equal(found, np.asarray(expected).astype(np.float32))


def test_devices_pack_small_types() -> None:
    def step(xs: jax.Array) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            x = jaxpp.mark_stage_end((x + 1).astype(jnp.int4))
            return jaxpp.mark_stage_end(x[::-1])

        return jaxpp.treduce(one, xs, jaxpp.GPipe(2), operation=jaxpp.Concat())

    for data in (1, 2):
        mesh = make_mesh(2, data=data)
        traced = jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=P(None, "data")).trace_and_place(
            jnp.zeros((4, 8, 16), jnp.int4)
        )
        peaks = [rank.peak_bytes for rank in traced.plan.summary()]
        # Rank 0 holds the batch and a microbatch's result, with half a byte per element.
        assert 4 * 64 // data <= peaks[0] < 2 * 4 * 64 // data, peaks


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("data", [1, 2])
def test_gradients_in_bfloat16_are_summed_in_float32(data: int, tied: bool) -> None:
    """The sums are as accurate as the rounding of the terms allows, at no additional cost."""
    keys = jax.random.split(jax.random.key(0), 2)
    weights = [(jax.random.normal(k, (8, 8)) / 3).astype(jnp.bfloat16) for k in keys]
    xs = np.random.default_rng(0).normal(size=(32, 4, 8)).astype(np.float32)

    def loss(weights: Any, x: Any, mark: Any = lambda x: x) -> Any:
        first, second = weights
        h = mark(jnp.tanh(x.astype(jnp.bfloat16) @ first))
        h = mark(jnp.tanh(h @ (first if tied else second)))
        return jnp.sum(h.astype(jnp.float32) ** 2)

    def compiled(operation: Any) -> Any:
        def step(weights: Any, xs: Any) -> Any:
            def one(x: Any) -> Any:
                return jax.grad(loss)(weights, x, jaxpp.mark_stage_end)

            return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=operation)

        specs = (None, P(None, "data"))
        step = jaxpp.mpmd_jit_with_loop(step, make_mesh(2, data=data), in_specs=specs)
        return step.compile(weights, xs)

    each = [jax.grad(loss)(weights, x) for x in xs]
    exact = [sum(np.asarray(g, np.float64) for g in grads) for grads in zip(*each, strict=True)]
    own, wide = compiled(jaxpp.Add), compiled(jaxpp.Add(dtype=jnp.float32))
    found = wide(weights, xs)
    for k in range(1 if tied else 2):
        assert found[k].dtype == jnp.float32
        error = np.abs(np.asarray(found[k]) - exact[k]).max() / np.abs(exact[k]).max()
        assert error < (2e-3 if tied or data > 1 else 1e-6)
    costs, expected = wide.cost_summary(), own.cost_summary()
    assert [link.messages for link in costs.links] == [link.messages for link in expected.links]
    assert [(c.task, c.times) for c in costs.collectives] == [
        (c.task, c.times) for c in expected.collectives
    ]


def test_sums_that_cannot_hold_the_values() -> None:
    with pytest.raises(jaxpp.JaxppError, match="expected the dtype of numbers"):
        jaxpp.Add(dtype="text")
    assert jaxpp.Add(dtype="float32") == jaxpp.Add(jnp.float32)

    def step(xs: jax.Array) -> jax.Array:
        add = jaxpp.Add(jnp.int32)
        return jaxpp.treduce(jaxpp.mark_stage_end, xs, jaxpp.GPipe(1), operation=add)

    with pytest.raises(jaxpp.JaxppError, match="expected a floating dtype for the sum"):
        jaxpp.mpmd_jit_with_loop(step, make_mesh(1)).trace_and_place(jnp.ones((2, 3)))
