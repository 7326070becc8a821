"""`jax_debug_nans` and `jax_debug_infs`: errors name the task that made a NaN or infinity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import make_mesh


def divided(xs: Any, by: Any) -> Any:
    """Stage 1 divides by `by`, whose microbatch 2 may contain 0."""

    def one(item: Any) -> Any:
        x, y = item
        x = jaxpp.mark_stage_end(x + 1)
        return jaxpp.mark_stage_end(x / y)

    return jaxpp.treduce(one, (xs, by), jaxpp.Std1F1B(2), operation=jaxpp.Concat())


XS = np.array([[1, 2], [3, 4], [-1, 5]], np.float32)  # x + 1 has a 0 in microbatch 2
BY = np.array([[1, 2], [3, 4], [0, 5]], np.float32)
PLACE = r"^step 1: rank 1, instruction \d+, fwd_1 of microbatch 2: expected numbers, found "


def message_of(call: Any) -> str:
    with pytest.raises(FloatingPointError) as caught:
        call()
    assert isinstance(caught.value, jaxpp.JaxppError)
    assert caught.value.code == "nan"
    return str(caught.value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_flags_count_from_call_to_call(dtype: Any) -> None:
    step = jaxpp.mpmd_jit_with_loop(divided, make_mesh(2))
    xs, by = jnp.asarray(XS, dtype), jnp.asarray(BY, dtype)
    infinite = xs.at[2, 0].set(1)
    for _ in range(2):
        with jax.debug_nans(True):
            assert "found a NaN" in message_of(lambda: step(xs, by))
            step(infinite, by)
        with jax.debug_infs(True):
            assert "found an infinity" in message_of(lambda: step(infinite, by))
            step(xs, by)
        assert np.isnan(np.asarray(step(xs, by), np.float32)[2, 0])


def test_the_message_has_task_microbatch_rank_and_line() -> None:
    step = jaxpp.mpmd_jit_with_loop(divided, make_mesh(2))
    with jax.debug_nans(True), pytest.raises(jaxpp.NanError, match=PLACE) as caught:
        step(XS, BY)
    assert "made by div at" in str(caught.value)
    assert "test_numbers.py:" in str(caught.value)


def test_every_device_of_a_rank_is_looked_at() -> None:
    mesh = make_mesh(2, data=2)
    spec = jax.sharding.PartitionSpec(None, "data")
    step = jaxpp.mpmd_jit_with_loop(divided, mesh, in_specs=spec)
    with jax.debug_nans(True):
        message_of(lambda: step(XS[:, ::-1], BY[:, ::-1]))
