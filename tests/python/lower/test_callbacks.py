"""Callbacks into Python from tasks: what they see, how often they run, and how they fail."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import jaxpp.api as jaxpp
from equality import make_mesh

MICROBATCHES = 4


def _weights():
    return [0.5 * jnp.eye(8), 0.25 * jnp.eye(8)]


def _batch():
    return jnp.arange(MICROBATCHES * 2 * 8, dtype=jnp.float32).reshape(MICROBATCHES, 2, 8) / 64


def _run(mesh, between, schedule=None, plain=False):
    """Runs a step whose second stage begins with `between(x)`; returns (loss, gradients)."""

    def loss(ws, x):
        x = jaxpp.mark_stage_end(jnp.tanh(x @ ws[0]))
        return (jaxpp.mark_stage_end(jnp.tanh(between(x) @ ws[1])) ** 2).mean()

    def step(ws, xs):
        def one(x):
            return jax.value_and_grad(loss)(ws, x)

        if plain:
            every = [one(x) for x in xs]
            return jax.tree.map(lambda *parts: sum(parts), *every)
        operations = (jaxpp.Add, jaxpp.Add)
        return jaxpp.treduce(one, xs, schedule or jaxpp.Std1F1B(2), operation=operations)

    run = step if plain else jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh)
    return jax.tree.map(np.asarray, run(_weights(), _batch()))


def _looking(look):
    """A `between` that calls `look(x)` and returns x unchanged."""

    def between(x):
        jax.debug.callback(look, x)
        return x

    return between


def _assert_same(ours, plain):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def _first_stage():
    return [np.tanh(np.asarray(x @ _weights()[0])) for x in _batch()]


def test_debug_callback_sees_each_microbatch_once_and_in_order(mesh2):
    seen = []

    ours = _run(mesh2, _looking(lambda x: seen.append(np.asarray(x))))
    np.testing.assert_allclose(seen, _first_stage(), rtol=1e-6)
    _assert_same(ours, _run(mesh2, lambda x: x, plain=True))


def test_debug_print_prints_before_the_step_returns(mesh2, capfd):
    def between(x):
        jax.debug.print("mean {m:.3f}", m=x.mean())
        return x

    _run(mesh2, between)
    lines = capfd.readouterr().out.splitlines()
    assert lines == [f"mean {x.mean():.3f}" for x in _first_stage()]


def test_a_print_in_a_checkpoint_and_a_jit(mesh2, capfd):
    @jax.checkpoint
    @jax.jit
    def between(x):
        jax.debug.print("max {m:.3f}", m=x.max())
        return x

    _run(mesh2, between)
    ours = capfd.readouterr().out.splitlines()
    _run(mesh2, between, plain=True)
    jax.effects_barrier()
    assert sorted(ours) == sorted(capfd.readouterr().out.splitlines())


def test_a_print_under_control_flow(mesh2, capfd):
    def between(x):
        def body(i, x):
            jax.lax.cond(i == 1, lambda: jax.debug.print("i {}", i), lambda: None)
            return x

        return jax.lax.fori_loop(0, 3, body, x)

    _run(mesh2, between)
    assert capfd.readouterr().out.splitlines() == ["i 1"] * MICROBATCHES


def test_pure_callback_gives_its_result_to_the_stage(any_mesh2):
    @jax.custom_jvp
    def scale(x):
        return jax.pure_callback(lambda x: 3 * np.asarray(x), x, x)

    scale.defjvp(lambda xs, ts: (scale(xs[0]), 3 * ts[0]))
    _assert_same(_run(any_mesh2, scale), _run(any_mesh2, lambda x: 3 * x, plain=True))


def test_callbacks_outside_the_loop_run_once_a_step(mesh2):
    calls = []

    def step(x):
        rate = io_callback(lambda: calls.append("ask") or np.float32(2), jnp.float32(0))
        jax.debug.callback(lambda: calls.append("say"))
        out = jaxpp.treduce(
            lambda x: jaxpp.mark_stage_end(rate * jaxpp.mark_stage_end(x)).sum(),
            x,
            jaxpp.GPipe(2),
            operation=jaxpp.Add,
        )
        jax.debug.callback(lambda out: calls.append(float(out)), out)
        return out

    out = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh2)(_batch())
    assert float(out) == pytest.approx(2 * float(_batch().sum()))
    assert sorted(map(str, calls)) == sorted(["ask", "say", str(float(out))])


def test_a_callback_sees_whole_arrays_on_a_rank_of_several_devices():
    mesh = make_mesh(2, model=2)
    shapes = []

    def between(x):
        spec = jax.sharding.PartitionSpec(None, "model")
        x = jax.lax.with_sharding_constraint(x, spec)
        jax.debug.callback(lambda x: shapes.append(x.shape), x)
        return x

    ours = _run(mesh, between)
    assert shapes == [(2, 8)] * MICROBATCHES
    _assert_same(ours, _run(mesh, lambda x: x, plain=True))


def test_what_a_callback_keeps_stays_as_it_was(mesh2):
    kept = []

    _run(mesh2, _looking(lambda x: kept.append(x)))
    _run(mesh2, lambda x: x + 1)  # reuses the memory
    np.testing.assert_allclose(np.asarray(kept), _first_stage(), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16", "float8_e4m3fn", "complex64"])
def test_element_types(mesh2, dtype):
    seen = []

    def between(x):
        jax.debug.callback(lambda x: seen.append(np.asarray(x)), x.astype(dtype))
        return x

    _run(mesh2, between)
    for found, x in zip(seen, _first_stage(), strict=True):
        assert found.dtype == jnp.dtype(dtype)
        expected = np.asarray(jnp.asarray(x).astype(dtype))
        np.testing.assert_allclose(found.astype(complex), expected.astype(complex), rtol=1e-6)


def test_an_exception_in_a_callback_fails_the_step_once_and_the_next_works(mesh2):
    fail = [True]

    def check(x):
        if fail[0]:
            raise ZeroDivisionError("no such number")

    between = _looking(check)
    with pytest.raises(jaxpp.JaxppError) as caught:
        _run(mesh2, between)
    text = str(caught.value)
    assert "ZeroDivisionError: no such number" in text and "test_callbacks.py:" in text
    assert "rank 1" in text and "fwd_1" in text and "microbatch 0" in text
    fail[0] = False
    _assert_same(_run(mesh2, between), _run(mesh2, lambda x: x, plain=True))


def test_what_a_callback_raises_is_logged_at_once(mesh2, caplog):
    def check(x):
        raise ZeroDivisionError("no such number")

    with pytest.raises(jaxpp.JaxppError):
        _run(mesh2, _looking(check))
    assert "ZeroDivisionError: no such number (at " in caplog.text


def test_what_a_callback_raises_is_any_text(mesh2):
    def check(x):
        raise ValueError("caf\udce9 \ud800")

    with pytest.raises(jaxpp.JaxppError) as caught:
        _run(mesh2, _looking(check))
    assert r"ValueError: caf\udce9 \ud800" in str(caught.value)
    str(caught.value).encode()


@pytest.mark.parametrize("option", ["ordered", "partitioned"])
def test_what_a_pipeline_can_not_promise_is_refused_by_line(mesh2, option):
    def between(x):
        jax.debug.callback(lambda x: None, x, **{option: True})
        return x

    with pytest.raises(jaxpp.JaxppError, match=rf"test_callbacks.py:\d+: .*{option}=False"):
        _run(mesh2, between)


def test_a_plugin_without_callbacks_says_so(mesh2):
    import xla_plugins.xla_cpu_pjrt as old_plugin  # PJRT API 0.81

    def step(x):
        jax.debug.print("x {}", x.sum())
        return jaxpp.treduce(
            lambda x: jaxpp.mark_stage_end(jaxpp.mark_stage_end(x)).sum(),
            x,
            jaxpp.GPipe(2),
            operation=jaxpp.Add,
        )

    path = str(pathlib.Path(old_plugin.__path__[0]) / "xla_cpu_pjrt.so")
    run = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh2, plugin=path)
    with pytest.raises(jaxpp.JaxppError, match="calls back into Python.*cpu"):
        run(_batch())
