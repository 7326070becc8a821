"""Marks and loops as users write them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import assert_equal, assert_same_as_jax, make_mesh

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)
FOUR = jaxpp.Std1F1B(4)


# --- Marks ------------------------------------------------------------------------------


def layers_loss(layer: Any) -> Any:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = layer(w, x)
        return jnp.mean(x**2)

    return loss


def marked_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jaxpp.mark_stage_end(jnp.tanh(x @ w))


LAYERS = {
    "jit, the same function for each stage": jax.jit(marked_layer),
    "jit in jit": jax.jit(jax.jit(marked_layer)),
    "remat": jax.checkpoint(marked_layer),
    "remat of jit": jax.checkpoint(jax.jit(marked_layer)),
    "jit of remat": jax.jit(jax.checkpoint(marked_layer)),
    "vmap over the batch": lambda w, x: jax.vmap(partial(marked_layer, w))(x),
    "a pytree": lambda w, x: jaxpp.mark_stage_end({"x": jnp.tanh(x @ w), "n": 1})["x"],
    "by its old name": lambda w, x: jaxpp.pipeline_enter_stage(jnp.tanh(x @ w), name="s"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_marks_inside(name: str) -> None:
    step = m.training_step(FOUR, layers_loss(LAYERS[name]))
    args = (m.params(4), m.batch(4))
    ours = JIT(step, make_mesh(4))(*args)
    assert_equal(ours, m.plain_training_step(*args))


def test_scripts_that_do_not_mark_the_last_stage() -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws[:-1]:
            x = marked_layer(w, x)
        return jnp.mean(jnp.tanh(x @ ws[-1]) ** 2)

    args = (m.params(4), m.batch(4))
    ours = JIT(m.training_step(FOUR, loss), make_mesh(4))(*args)
    assert_equal(ours, m.plain_training_step(*args))


def test_marks_are_identities_elsewhere() -> None:
    x = jnp.arange(3.0)
    assert_equal(jaxpp.mark_stage_end({"x": x, "n": 2}), {"x": x, "n": np.int32(2)})
    assert jaxpp.mark_stage_end(()) == ()
    np.testing.assert_array_equal(jax.jit(jaxpp.mark_stage_end)(x), x)
    grads = jax.grad(lambda x: jnp.sum(jaxpp.mark_stage_end(x) ** 2))(x)
    np.testing.assert_array_equal(grads, 2 * x)
    np.testing.assert_array_equal(jax.vmap(jaxpp.mark_stage_end)(x), x)
    _, tangent = jax.jvp(jaxpp.mark_stage_end, (x,), (x,))
    np.testing.assert_array_equal(tangent, x)


# --- Loops ------------------------------------------------------------------------------


def test_forward_only_loop() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            for w in ws:
                x = marked_layer(w, x)
            return x, x.max(), m.unmarked_loss(ws[:1], x)

        operation = (jaxpp.Concat(), jaxpp.Max, jaxpp.Add)
        return jaxpp.treduce(one, xs, FOUR, operation=operation)

    assert_same_as_jax(step, m.params(4), m.batch(5), ranks=4)


def test_two_loops_in_a_step() -> None:
    def step(ws: Any, xs: jax.Array, ys: jax.Array) -> Any:
        ws, total = m.training_step(FOUR)(ws, xs)
        again, second = m.training_step(jaxpp.GPipe(4))(ws, xs)
        held_out = jaxpp.treduce(
            lambda y: m.loss(again, y), ys, jaxpp.Std1F1B(4), operation=jaxpp.Add
        )
        return again, total, second, held_out

    assert_same_as_jax(step, m.params(4), m.batch(4), m.batch(3), ranks=4)


def test_work_around_the_loop() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        xs = xs.reshape(4, -1, xs.shape[-1]) / jnp.linalg.norm(xs)
        ws, total = m.training_step(TWO)(ws, xs)
        norm = jnp.sqrt(sum(jnp.sum(w**2) for w in ws))
        return [w / norm for w in ws], jnp.log(total), {"norm": norm}

    assert_same_as_jax(step, m.params(), m.batch(2, 4))


def test_treduce_in_plain_jax() -> None:
    step = m.training_step(TWO)
    args = (m.params(), m.batch())
    plain = m.plain_training_step(*args)
    assert_equal(step(*args), plain)
    assert_equal(jax.jit(step)(*args), plain)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float4_e2m1fn"])
def test_the_maximum_begins_below_all_values(dtype: str) -> None:
    lowest = jnp.full(3, jnp.finfo(dtype).min, dtype)
    state = jaxpp.Max().state(2, jax.ShapeDtypeStruct((3,), dtype))
    assert_equal(jaxpp.Max().update(state, lowest, jnp.int32(0)), lowest)


@pytest.mark.parametrize("axis", [1, -2, 2])
def test_other_microbatch_axes(axis: int) -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(m.loss)(ws, x)

        return jaxpp.treduce(one, xs, TWO, axis=axis, operation=jaxpp.Add)

    xs = jnp.moveaxis(m.batch(5), 0, axis)
    total, grads = JIT(step, make_mesh(2))(m.params(), xs)
    new, plain_total = m.plain_training_step(m.params(), m.batch(5))
    plain_grads = [(w - n) / 0.1 for w, n in zip(m.params(), new, strict=True)]
    assert_equal(total, plain_total)
    assert_equal(grads, plain_grads, 1e-4)


def test_treduce_i_with_the_index() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(i: jax.Array) -> Any:
            assert i.dtype == jnp.int32
            loss, grads = jax.value_and_grad(m.loss)(ws, xs[i] * (i + 1))
            return loss, grads, i, i * 2

        operation = (jaxpp.Add, jaxpp.Add, jaxpp.Concat(), jaxpp.Max())
        return jaxpp.treduce_i(one, 3, TWO, operation)

    _, _, index, largest = assert_same_as_jax(step, m.params(), m.batch())
    assert index.tolist() == [0, 1, 2]
    assert int(largest) == 4


class ExponentialAverage:
    """A user-defined operation: 0.9 of the state plus 0.1 of the new value."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, jnp.float32)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.where(i == 0, value, 0.9 * state + 0.1 * value).astype(jnp.float32)


class KeepLast:
    """An operation that is passed as a class, not an instance, and ignores the index."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return value


def test_operations_of_a_users_own() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(m.loss)(ws, x)
            return loss, grads, loss, x.sum()

        operation = (jaxpp.Add, jaxpp.Add, ExponentialAverage(), KeepLast)
        return jaxpp.treduce(one, xs, TWO, operation=operation)

    _, _, _, last = assert_same_as_jax(step, m.params(), m.batch(4))
    assert float(last) == float(m.batch(4)[-1].sum())


def test_a_mark_passes_what_a_scan_stacked_and_nobody_uses() -> None:
    def loss(weights: Any, x: Any, mark: Any = jaxpp.mark_stage_end) -> Any:
        x, _ = mark(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, weights))
        return x.sum()

    args = jnp.ones((3, 4, 4)) * 0.1, jnp.ones((2, 4))
    expected = jax.grad(loss)(*args, mark=lambda x: x)
    np.testing.assert_allclose(jax.grad(loss)(*args), expected, rtol=1e-6)
