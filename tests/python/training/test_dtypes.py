"""Element types that plain JAX runs on the CPU run in a pipeline, sharded or not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import make_mesh

SMALL = ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
EIGHTHS = ["e3m4", "e4m3", "e4m3fn", "e4m3fnuz", "e4m3b11fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"]


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
    for _ in range(2):  # of a JAX array, then of what the step returned
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
        # The batch on rank 0, and what a microbatch makes of it, half a byte an element.
        assert 4 * 64 // data <= peaks[0] < 2 * 4 * 64 // data, peaks
