"""JAX's settings and static arguments: when they change, a stale compiled step is not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp


def step_of(mesh: jaxpp.MpmdMesh, between: Callable[..., Any], **options: Any) -> Any:
    """A step that returns `between(x, *statics)` for each microbatch, concatenated."""

    def step(xs: jax.Array, *statics: Any, **named: Any) -> Any:
        def one(x: jax.Array) -> Any:
            return jaxpp.mark_stage_end(between(jaxpp.mark_stage_end(x), *statics, **named))

        return jaxpp.treduce(one, xs, jaxpp.GPipe(2), operation=jaxpp.Concat())

    return jaxpp.mpmd_jit_with_loop(step, mesh, **options)


def compiled(step: Any) -> int:
    return len(step._compiled)


XS = np.linspace(0.1, 0.9, 16).reshape(2, 2, 4)


def test_x64(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x: x * jnp.arange(4) / 3)
    assert step(XS).dtype == jnp.float32
    with jax.enable_x64(True):
        wide = step(XS)
    assert wide.dtype == jnp.float64
    np.testing.assert_allclose(np.asarray(wide), XS * np.arange(4) / 3, rtol=1e-15)
    assert step(XS).dtype == jnp.float32
    assert compiled(step) == 2


def test_matmul_precision(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x: x @ x.T)
    step(XS)
    with jax.default_matmul_precision("float32"):
        step(XS)
        step(XS)
    assert compiled(step) == 2


def test_prng_impl(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x: 0 * x + jax.random.uniform(jax.random.key(0), x.shape))

    def first(impl: str) -> np.ndarray:
        before = jax.config.jax_default_prng_impl
        jax.config.update("jax_default_prng_impl", impl)
        try:
            expected = jax.random.uniform(jax.random.key(0), (2, 4))
            found = np.asarray(step(XS))[0]
        finally:
            jax.config.update("jax_default_prng_impl", before)
        np.testing.assert_array_equal(found, expected)
        return found

    assert not np.array_equal(first("threefry2x32"), first("rbg"))


def test_dtype_promotion(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x: x * jnp.arange(4))
    step(XS)
    with jax.numpy_dtype_promotion("strict"), pytest.raises(jax.dtypes.TypePromotionError):
        step(XS)


STRICT = {
    "jax_check_tracer_leaks": True,
    "jax_debug_key_reuse": True,
    "jax_disallow_mesh_context_manager": True,
    "jax_enable_checks": True,
    "jax_legacy_prng_key": "error",
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_transfer_guard": "disallow",
}


@pytest.mark.parametrize("name", STRICT)
def test_strict_settings_accept_a_step_that_keeps_to_them(
    mesh2: jaxpp.MpmdMesh, name: str
) -> None:
    xs, key = jnp.float32(XS), jax.random.key(0)
    step = step_of(mesh2, lambda x, key: x * jax.random.uniform(key, x.shape))
    before = jax.config.values[name]
    jax.config.update(name, STRICT[name])
    try:
        first, second = step(xs, key), step(xs, key)
    finally:
        jax.config.update(name, before)
    expected = np.float32(XS) * jax.random.uniform(key, XS.shape[1:])
    np.testing.assert_array_equal(np.asarray(first), expected)
    np.testing.assert_array_equal(np.asarray(second), expected)


def test_a_mesh_around_the_call_is_no_other_setting(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x: 2 * x)
    step(XS)
    with mesh2:
        step(XS)
    assert compiled(step) == 1


def test_static_arguments_compare_by_type(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x, n: x * jnp.asarray(n), static_argnums=1)
    xs = np.arange(16, dtype=np.int32).reshape(2, 2, 4)
    for value, dtype in ((1, jnp.int32), (1.0, jnp.float32), (True, jnp.int32)):
        assert step(xs, value).dtype == dtype
    assert compiled(step) == 3
    step(xs, 1)
    assert compiled(step) == 3


def test_static_arguments_inside_a_tuple_compare_by_type(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x, pair: x * jnp.asarray(pair[1]), static_argnums=1)
    xs = np.arange(16, dtype=np.int32).reshape(2, 2, 4)
    assert step(xs, ("n", 1)).dtype == jnp.int32
    assert step(xs, ("n", 1.0)).dtype == jnp.float32


def test_static_zeros_of_two_signs(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x, n: jnp.copysign(x, n), static_argnums=1)
    np.testing.assert_array_equal(step(XS, 0.0), np.float32(XS))
    np.testing.assert_array_equal(step(XS, -0.0), -np.float32(XS))
    step(XS, float("nan"))
    step(XS, float("nan"))
    assert compiled(step) == 3


def test_the_order_of_keywords_does_not_matter(mesh2: jaxpp.MpmdMesh) -> None:
    step = step_of(mesh2, lambda x, a, b: x * a + b, static_argnames=("a", "b"))
    one, other = step(XS, a=2, b=3), step(XS, b=3, a=2)
    np.testing.assert_array_equal(one, other)
    assert compiled(step) == 1


def test_options_are_those_given_when_the_step_was_made(mesh2: jaxpp.MpmdMesh) -> None:
    options: dict[str, Any] = {"xla_backend_optimization_level": 1}
    step = step_of(mesh2, lambda x: 2 * x, compiler_options=options)
    options["xla_unheard_of"] = True
    step(XS)
