"""Operations in stages other than products and sums."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_trains_equal
from jaxpp.jax_internals.client import host_call_targets


def staged(between, tolerance=1e-5, **options):
    """Two stages of one layer each; the second applies `between(x, i)` to its input."""

    def loss(params, mb, i, mark):
        x = mark(models.layer(params[0], mb["x"]))
        x = mark(models.layer(params[1], between(x, i)))
        return models.mse(x, mb["y"]), ()

    return Problem(loss, models.weights(2), models.batch(4), **options)


def whitened(x, i):
    scatter = x.T @ x + jnp.eye(x.shape[1])
    return jnp.linalg.solve(scatter, x.T).T


def with_custom_vjp():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (ct * jnp.cos(x) * 0.5,))
    return lambda x, i: f(x)


BETWEEN = {
    "while_loop": lambda x, i: jax.lax.fori_loop(0, 3, lambda k, y: y * 0.9 + 0.1, x),
    "scan": lambda x, i: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), x, None, length=2)[0],
    "cond": lambda x, i: jax.lax.cond(i % 2 == 0, jnp.sin, jnp.cos, x),
    "custom_vjp": with_custom_vjp(),
    "sort": lambda x, i: jnp.sort(x, axis=-1),
    "fp8": lambda x, i: (
        x + jax.lax.stop_gradient(x.astype(jnp.float8_e4m3fn).astype(jnp.float32))
    ),
    "complex": lambda x, i: jnp.abs(jnp.fft.fft(x)) / 4,
    "empty": lambda x, i: jnp.concatenate([x, x[:, :0]], axis=1),
    "cholesky": lambda x, i: x @ jnp.linalg.cholesky(x.T @ x / 8 + jnp.eye(x.shape[1])),
    "solve": whitened,
    "qr": lambda x, i: x @ jnp.linalg.qr(x.T @ x + 2 * jnp.eye(x.shape[1]))[0],
    "eigh": lambda x, i: x * jnp.linalg.eigh(x.T @ x + jnp.diag(jnp.arange(16.0)))[0],
    "svd": lambda x, i: x * jnp.linalg.svd(x + jnp.eye(*x.shape), compute_uv=False).sum(),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", BETWEEN)
def test_operation_in_a_stage(name, any_mesh2):
    # LAPACK's threads compute decompositions in varying order.
    tolerance = 1e-4 if name in ("qr", "eigh", "svd", "solve", "cholesky") else 1e-5
    # XLA's CPU compiler cannot shard its FFT over two axes.
    options = {"in_specs": None} if name == "complex" else {}
    problem = staged(BETWEEN[name])
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2, tolerance=tolerance, **options)


OPTIMIZERS = {
    "multi_steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer(name, any_mesh2):
    problem = staged(lambda x, i: x)
    problem.optimizer = OPTIMIZERS[name]()
    if name == "multi_steps":
        problem.optimizer = problem.optimizer.gradient_transformation()
    # Adafactor divides gradients by their size, which magnifies rounding errors in their sums.
    tolerance = 1e-3 if name == "adafactor" else 1e-5
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2, steps=4, tolerance=tolerance)


def test_frozen_first_stage(any_mesh2):
    def loss(params, mb, i, mark):
        frozen = jax.lax.stop_gradient(params[0])
        x = mark(models.layer(frozen, mb["x"]))
        x = mark(models.layer(params[1], x))
        return models.mse(x, mb["y"]), ()

    problem = Problem(loss, models.weights(2), models.batch(4))
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2)


def test_stages_of_different_shapes_and_dtypes(any_mesh2):
    def loss(params, mb, i, mark):
        x = mark(jnp.tanh(mb["x"] @ params["down"]).astype(jnp.bfloat16))
        x = mark(jnp.tanh(x.astype(jnp.float32) @ params["up"]))
        return models.mse(x, mb["y"]), ()

    k1, k2 = jax.random.split(models.key(0))
    params = {"down": jax.random.normal(k1, (16, 4)), "up": jax.random.normal(k2, (4, 16))}
    problem = Problem(loss, params, models.batch(4))
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2, tolerance=1e-3)


def test_gradients_with_respect_to_the_inputs(mesh2):
    params, batch = models.weights(2), models.batch(3)

    def step(params, x):
        def one(mb):
            def f(mb):
                for p in params:
                    mb = jaxpp.mark_stage_end(models.layer(p, mb))
                return (mb**2).sum()

            return jax.grad(f)(mb)

        return jaxpp.treduce(one, x, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Concat())

    ours = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh2)(params, batch["x"])
    np.testing.assert_allclose(
        np.asarray(ours), jax.jit(step)(params, batch["x"]), rtol=1e-5, atol=1e-6
    )


def test_an_unregistered_custom_call_is_refused_by_name(any_mesh2):
    def between(x, i):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.ffi.ffi_call("nobody_knows_me", out)(jax.lax.stop_gradient(x))

    with pytest.raises(jaxpp.JaxppError, match="nobody_knows_me.*test_operations.py") as caught:
        assert_trains_equal(staged(between), jaxpp.Std1F1B(2), any_mesh2)
    assert caught.value.code == "unsupported"


def test_a_custom_call_registered_after_the_first_step(any_mesh1):
    assert jaxpp.mpmd_jit_with_loop(lambda x: x + 1, any_mesh1)(jnp.zeros(())) == 1
    jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()  # registers jaxlib's
    handler = host_call_targets()["lapack_spotrf_ffi"]["execute"]
    jax.ffi.register_ffi_target("a_cholesky_of_ours", handler, platform="cpu")

    def factor(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32)
        return jax.ffi.ffi_call("a_cholesky_of_ours", out)(x, uplo=np.uint8(ord("L")))[0]

    x = jnp.array([[4.0, 2.0], [2.0, 3.0]])
    found = jaxpp.mpmd_jit_with_loop(factor, any_mesh1)(x)
    np.testing.assert_array_equal(found, jax.jit(factor)(x))


def for_a_platform(x):
    """What another platform would run cannot be compiled for this one."""

    def elsewhere(x):
        return jax.ffi.ffi_call("nobody_knows_me", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    return jax.lax.platform_dependent(x, cpu=jnp.tanh, cuda=elsewhere)


def test_branches_of_platforms_in_a_stage(any_mesh2):
    @jax.custom_vjp
    def f(x):
        return for_a_platform(x)

    f.defvjp(lambda x: (for_a_platform(x), x), lambda x, ct: (ct * for_a_platform(x),))
    assert_trains_equal(staged(lambda x, i: f(x)), jaxpp.Std1F1B(2), any_mesh2)


def test_branches_of_platforms_behind_the_loop(any_mesh2):
    def update(grads, state, params):
        return jax.tree.map(lambda g: -0.1 * for_a_platform(g), grads), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    problem = staged(lambda x, i: x, optimizer=optimizer)
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2)
