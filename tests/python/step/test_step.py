"""Ways to write and call a step, and the arguments and results it may have."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from equality import assert_equal, assert_same_as_jax, make_mesh

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)
FOUR = jaxpp.Std1F1B(4)


# --- Ways to make and call a step -------------------------------------------------------


def test_decorators(after_plain_step: Any) -> None:
    mesh = make_mesh(2)

    @partial(JIT, mpmd_mesh=mesh)
    def by_partial(ws: Any, xs: jax.Array) -> Any:
        """Its docstring."""
        return m.training_step(TWO)(ws, xs)

    @JIT(mpmd_mesh=mesh, donate_argnums=())
    def with_parentheses(ws: Any, xs: jax.Array) -> Any:
        return m.training_step(TWO)(ws, xs)

    for step in (by_partial, with_parentheses):
        assert_equal(step(m.params(), m.batch()), after_plain_step)
    assert by_partial.__doc__ == "Its docstring."
    assert by_partial.__name__ == "by_partial"


def test_partial_and_callable_objects(after_plain_step: Any) -> None:
    def step(ws: Any, xs: jax.Array, schedule: Any) -> Any:
        return m.training_step(schedule)(ws, xs)

    class Step:
        def __call__(self, ws: Any, xs: jax.Array) -> Any:
            return step(ws, xs, TWO)

        def method(self, ws: Any, xs: jax.Array) -> Any:
            return step(ws, xs, TWO)

    for fun in (partial(step, schedule=TWO), Step(), Step().method):
        assert_equal(JIT(fun, make_mesh(2))(m.params(), m.batch()), after_plain_step)


def test_keyword_arguments(after_plain_step: Any) -> None:
    step = JIT(m.training_step(TWO), make_mesh(2))
    assert_equal(step(m.params(), xs=m.batch()), after_plain_step)
    assert_equal(step(xs=m.batch(), ws=m.params()), after_plain_step)


def test_static_arguments() -> None:
    calls = []

    def step(ws: Any, scale: float, xs: jax.Array, mode: str = "sum") -> Any:
        calls.append((scale, mode))
        total = jaxpp.treduce(lambda x: m.loss(ws, x), xs, TWO, operation=jaxpp.Add)
        return total * scale if mode == "sum" else total * scale / len(xs)

    plain = float(m.plain_training_step(m.params(), m.batch())[1])
    by_number = JIT(step, make_mesh(2), static_argnums=(1, 3))
    by_name = JIT(step, make_mesh(2), static_argnames=("scale", "mode"))
    from_the_end = JIT(step, make_mesh(2), static_argnums=(1, -1))
    ws, xs = m.params(), m.batch()
    for jitted in (by_number, by_name, from_the_end):
        calls.clear()
        assert float(jitted(ws, 2.0, xs)) == pytest.approx(2 * plain)
        assert float(jitted(ws, 3.0, xs, "mean")) == pytest.approx(plain)
        assert float(jitted(ws, 3.0, xs, mode="mean")) == pytest.approx(plain)
        assert float(jitted(ws, 2.0, xs)) == pytest.approx(2 * plain)
        assert set(calls) == {(2.0, "sum"), (3.0, "mean")}
    assert float(by_name(ws, scale=2.0, xs=xs)) == pytest.approx(2 * plain)
    assert float(by_number(ws, scale=2.0, xs=xs)) == pytest.approx(2 * plain)


def test_compile_with_shapes_alone(after_plain_step: Any) -> None:
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (m.params(), m.batch())
    )
    function = JIT(m.training_step(TWO), make_mesh(2))
    compiled = function.compile(*shapes)
    assert_equal(compiled(m.params(), m.batch()), after_plain_step)
    assert len(function._compiled) == 1
    # A compiled step compiles again when it is called with a batch of another shape.
    other = m.plain_training_step(m.params(), m.batch(5))
    assert_equal(compiled(m.params(), m.batch(5)), other)


def test_trace_and_place_compiles_nothing() -> None:
    plan = JIT(m.training_step(TWO), make_mesh(2)).trace_and_place(m.params(), m.batch())
    assert "run" in plan.text.lower()
    names = [task.name for task in plan.staged.tasks()]
    assert {"fwd_0", "bwd_0", "fwd_1", "bwd_1"} <= {n.split(".")[0] for n in names}


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
@pytest.mark.parametrize(
    "axes, spec", [({}, P()), ({"data": 2}, P()), ({"data": 2}, P(None, "data"))]
)
def test_a_step_is_freed_with_its_last_reference(axes: dict[str, int], spec: P) -> None:
    # The planner keeps the reason why it cannot reduce this loss after the loop.
    fun = m.training_step(TWO, lambda ws, x: 1 - jnp.exp(m.loss(ws, x)))
    step = JIT(fun, make_mesh(2, **axes), in_specs=(None, spec))
    compiled = step.compile(m.params(), m.batch())
    jax.block_until_ready(compiled(m.params(), m.batch()))
    seen = [weakref.ref(each) for each in (step, compiled)]
    del compiled, step, fun
    assert [each() for each in seen] == [None, None]


def test_names_that_the_step_shadows() -> None:
    """A step may have parameters with the same names as those of mpmd_jit_with_loop."""

    def step(fun: Any, mpmd_mesh: jax.Array) -> Any:
        return m.training_step(TWO)(fun, mpmd_mesh)

    ours = JIT(step, make_mesh(2))(fun=m.params(), mpmd_mesh=m.batch())
    assert_equal(ours, m.plain_training_step(m.params(), m.batch()))


# --- Arguments and results --------------------------------------------------------------


def test_donating_the_whole_state() -> None:
    step = JIT(m.training_step(TWO), make_mesh(2), donate_argnames="ws")
    ws = m.params()
    plain = m.params()
    for _ in range(4):
        before = ws
        ws, total = step(ws, m.batch())
        plain, plain_total = m.plain_training_step(plain, m.batch())
        if isinstance(before[0], jaxpp.MpmdArray):
            assert all(w.is_deleted() for w in before)
    assert_equal((ws, total), (plain, plain_total))


def test_inputs_that_are_not_donated_stay_usable(after_plain_step: Any) -> None:
    step = JIT(m.training_step(TWO), make_mesh(2))
    ws, _ = step(m.params(), m.batch())
    first = step(ws, m.batch())
    second = step(ws, m.batch())
    assert_equal(ws, after_plain_step[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_numpy_and_python_numbers() -> None:
    def step(ws: Any, xs: jax.Array, rate: float, count: int, flag: bool, shift: Any) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(m.loss)(ws, x + shift)

        total, grads = jaxpp.treduce(one, xs, TWO, operation=jaxpp.Add)
        ws = jax.tree.map(lambda w, g: w - rate * g, ws, grads)
        return ws, total, count + 1, jnp.logical_not(flag), rate

    ws, xs = jax.tree.map(np.asarray, (m.params(), m.batch()))
    args = (ws, xs, 0.5, 3, True, np.float32(0.25))
    *_, count, flag, rate = assert_same_as_jax(step, *args)
    assert (int(count), bool(flag), float(rate)) == (4, False, 0.5)
    assert count.weak_type and rate.weak_type


def test_arguments_passed_straight_through() -> None:
    def step(ws: Any, xs: jax.Array, other: Any) -> Any:
        return m.training_step(TWO)(ws, xs), ws, other, xs

    for donated in ((), (0, 1, 2)):
        args = (m.params(), m.batch(), {"a": np.arange(3), "b": None})
        results = assert_same_as_jax(step, *args, donate_argnums=donated)
        again = JIT(step, make_mesh(2), donate_argnums=donated)
        (ws, _), _, other, xs = results
        assert_equal(again(ws, xs, other)[2], {"a": np.arange(3), "b": None})


def test_a_result_returned_twice() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        ws, total = m.training_step(TWO)(ws, xs)
        return ws, total, [total, ws[0]], xs, xs

    results = assert_same_as_jax(step, m.params(), m.batch(), donate_argnums=0)
    results[2][1].delete()
    np.asarray(results[0][0])  # still valid: results do not share memory


def test_results_feed_the_next_step_whatever_their_ranks() -> None:
    def swap(ws: Any, xs: jax.Array) -> Any:
        ws, total = m.training_step(TWO)(ws, xs)
        return ws[::-1], total

    step = JIT(swap, make_mesh(2), donate_argnums=0)
    ws, plain = m.params(), m.params()
    for _ in range(3):
        ws, total = step(ws, m.batch())
        plain, plain_total = m.plain_training_step(plain, m.batch())
        plain = plain[::-1]
    assert_equal((ws, total), (plain, plain_total))


def test_unused_arguments() -> None:
    def step(ws: Any, xs: jax.Array, unused: Any) -> Any:
        return m.training_step(TWO)(ws, xs)

    args = (m.params(), m.batch(), [np.ones(3), 5])
    assert_same_as_jax(step, *args)
    assert_same_as_jax(step, *args, donate_argnums=2)


def test_arguments_of_any_pytree() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        ws: Any
        step: Any

    def step(state: State, xs: jax.Array) -> Any:
        ws, total = m.training_step(TWO)(state.ws, xs)
        return State(ws, state.step + 1), total

    state, _ = assert_same_as_jax(step, State(m.params(), jnp.int32(0)), m.batch())
    assert int(state.step) == 1


def test_closed_over_constants() -> None:
    outer_numpy = np.full((4, 4), 0.25, np.float32)
    outer_jax = jnp.linspace(0.0, 1.0, 4)
    inner_numpy = np.arange(4, dtype=np.float32)
    inner_jax = 0.01 * jnp.ones((4, 4))

    def step(ws: Any, xs: jax.Array) -> Any:
        def loss(ws: Any, x: jax.Array) -> jax.Array:
            x = jaxpp.mark_stage_end(jnp.tanh((x + inner_numpy) @ (ws[0] + inner_jax)))
            x = jaxpp.mark_stage_end(jnp.tanh(x @ (ws[1] + inner_jax)))
            return jnp.mean((x - outer_jax) ** 2)

        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(loss)(ws, x)

        total, grads = jaxpp.treduce(one, xs, TWO, operation=jaxpp.Add)
        return jax.tree.map(lambda w, g: w - g @ outer_numpy + outer_jax, ws, grads), total

    assert_same_as_jax(step, m.params(), m.batch())
