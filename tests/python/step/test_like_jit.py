"""A step can be used like a function of jax.jit: lowered, traced, as a method, without jit."""

import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh

XS = m.batch(3)


@pytest.fixture(scope="module")
def step(mesh2):
    return jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2)), mpmd_mesh=mesh2)


@pytest.fixture(scope="module")
def expected():
    return m.plain_training_step(m.params(), XS)


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5)


def test_trace_lower_and_compile(step, expected):
    plain = jax.jit(m.plain_training_step)
    traced = step.trace(m.params(), XS)
    assert traced.fun_name == "step"
    assert [a.shape for a in traced.in_avals] == [w.shape for w in [*m.params(), XS]]
    assert isinstance(traced.jaxpr, jax.extend.core.ClosedJaxpr)
    shapes = plain.eval_shape(m.params(), XS)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), step.eval_shape(m.params(), XS)) == (
        jax.tree.map(lambda s: (s.shape, s.dtype), shapes)
    )
    step.clear_cache()
    lowered = traced.lower()
    assert lowered.as_text().count("task_name=fwd_0\n") == len(XS)
    assert jax.tree.structure(lowered.out_info) == jax.tree.structure(traced.out_info)
    compiled = lowered.compile()
    assert_equal(compiled(m.params(), XS), expected)
    assert step.compile(m.params(), XS).compiled is compiled.compiled  # not compiled again
    step.clear_cache()
    assert step.compile(m.params(), XS).compiled is not compiled.compiled
    assert_equal(step(m.params(), XS), expected)


def test_shardings_say_where_arguments_and_results_lie(step, expected):
    compiled = step.compile(m.params(), XS)
    for plan in (compiled, step.lower(m.params(), XS), step.trace_and_place(m.params(), XS)):
        (ws, xs), named = plan.in_shardings
        assert not named
        assert [w.mesh_ids for w in ws] == [(0,), (1,)]
        assert 0 in xs.mesh_ids
    found = compiled(m.params(), XS)
    assert jax.tree.map(lambda a: a.sharding, found) == compiled.out_shardings
    assert jax.tree.map(lambda a: a.shape, found) == (
        jax.tree.map(lambda s: s.shape, compiled.out_info)
    )

    made = jax.tree.map(lambda s, w: jax.jit(lambda: w, out_shardings=s)(), ws, m.params())
    assert [w.devices() for w in made] == [s.device_set for s in ws]
    assert_equal(compiled(made, jax.device_put(XS, xs)), expected)


def test_an_argument_that_nothing_uses_has_a_sharding(mesh2):
    def fun(ws, xs, unused):
        return m.training_step(jaxpp.Std1F1B(2))(ws, xs)

    step = jaxpp.mpmd_jit_with_loop(fun, mpmd_mesh=mesh2)
    (_, _, unused), _ = step.trace_and_place(m.params(), XS, jnp.zeros(3)).in_shardings
    assert unused.mesh_ids == (0,)


def test_methods(mesh2, expected):
    jit = functools.partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh2)

    class Model:
        schedule = jaxpp.Std1F1B(2)

        @jit(static_argnums=0)
        def step(self, ws, xs):
            return m.training_step(self.schedule)(ws, xs)

    model = Model()
    assert_equal(model.step(m.params(), XS), expected)
    compiled = model.step.compile(m.params(), XS)
    assert_equal(compiled(m.params(), XS), expected)
    assert "task_name=fwd_0" in model.step.lower(m.params(), XS).as_text()
    assert len(model.step.eval_shape(m.params(), XS)) == 2
    assert_equal(Model.step(model, m.params(), XS), expected)


def test_a_method_of_a_pytree(mesh2, expected):
    @jax.tree_util.register_pytree_node_class
    class Weights:
        def __init__(self, ws):
            self.ws = ws

        def tree_flatten(self):
            return (self.ws,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

        @jaxpp.mpmd_jit_with_loop(mpmd_mesh=mesh2)
        def step(self, xs):
            return m.training_step(jaxpp.Std1F1B(2))(self.ws, xs)

    assert_equal(Weights(m.params()).step(XS), expected)


def test_without_jit_it_runs_eagerly(step, mesh2):
    seen = []

    def loss(ws, x):
        seen.append(x)
        return m.loss(ws, x)

    ours = step(m.params(), XS)
    eager = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2), loss), mpmd_mesh=mesh2)
    with jax.disable_jit():
        found = eager(m.params(), XS)
        again = eager(found[0], XS)
    assert len(seen) == 2 * len(XS)  # once for each microbatch in each of two steps
    assert not any(isinstance(a, jaxpp.MpmdArray) for a in jax.tree.leaves(found))
    assert_equal(found, ours)
    assert_equal(again, step(ours[0], XS))


def test_without_jit_operations_are_the_same(mesh2):
    @jaxpp.mpmd_jit_with_loop(mpmd_mesh=mesh2)
    def step(ws, xs):
        def one(x):
            loss = m.loss(ws, x)
            return loss, loss, loss

        operation = (jaxpp.Add, jaxpp.Max, jaxpp.Concat())
        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=operation)

    with jax.disable_jit():
        found = step(m.params(), XS)
    assert_equal(found, jax.tree.map(np.asarray, step(m.params(), XS)))


def test_cost_summary(step):
    compiled = step.compile(m.params(), XS)
    costs = compiled.cost_summary()
    assert costs == step.lower(m.params(), XS).cost_summary()
    assert costs.tasks == compiled.as_text().count("= task[")
    products = 3 * len(XS) * 2  # forward and the gradients of x and w, in each of two layers
    of_one = 2 * XS.shape[1] * m.WIDTH * m.WIDTH
    assert (products - len(XS)) * of_one <= costs.flops < 2 * products * of_one
    peaks = [rank.peak_bytes for rank in compiled.compiled._traced.plan.summary()]
    assert [rank.peak_bytes for rank in costs.ranks] == peaks
    assert costs.peak_bytes == max(peaks)
    size = len(XS) * XS[0].nbytes  # activations one way, their gradients the other
    there, back = costs.links
    assert (there.src, there.dst, there.messages, there.bytes) == (0, 1, len(XS), size)
    assert (back.src, back.dst, back.messages, back.bytes) == (1, 0, len(XS), size)
    assert str(costs).splitlines()[1].split()[0] == "0"
    assert "0 -> 1" in str(costs)


# --- Donated JAX arrays ------------------------------------------------------------------


def update(ws, xs):
    """The first result reuses the memory of `ws`; no result can reuse that of `xs`."""
    return [w + xs.sum() for w in ws], xs.sum()


JITS = {
    "jax": lambda: jax.jit(update, donate_argnums=(0, 1)),
    "jaxpp": lambda: jaxpp.mpmd_jit_with_loop(update, make_mesh(2), donate_argnums=(0, 1)),
}


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_donated_array_is_deleted(jit):
    step, ws, xs = JITS[jit](), m.params(), m.batch()
    new, _ = step(ws, xs)
    assert all(w.is_deleted() for w in ws) and not xs.is_deleted()
    # JAX raises a different exception when it does not take its fast path.
    errors = (ValueError, RuntimeError) if jit == "jax" else ValueError
    with pytest.raises(errors, match="deleted or donated|has been deleted"):
        step(ws, xs)
    step(new, xs)


@pytest.mark.parametrize("jit", JITS)
@pytest.mark.parametrize("donated", [0, (0, 1)])
def test_a_donated_array_is_passed_once(jit, donated):
    def both(a, b):
        return a + 1, b * 2

    jits = {
        "jax": lambda: jax.jit(both, donate_argnums=donated),
        "jaxpp": lambda: jaxpp.mpmd_jit_with_loop(both, make_mesh(2), donate_argnums=donated),
    }
    step, x = jits[jit](), jnp.ones(4)
    with pytest.raises((RuntimeError, ValueError)):
        step(x, x)
    assert not x.is_deleted()
    ours, _ = step(x, jnp.ones(4))
    np.testing.assert_array_equal(ours, 2 * np.ones(4))
    assert x.is_deleted()


def test_a_step_that_refuses_its_arguments_takes_none():
    step = JITS["jaxpp"]()
    ws, xs = m.params(), m.batch()
    step([w.copy() for w in ws], xs)
    xs.delete()
    with pytest.raises(jaxpp.JaxppError, match="argument xs: expected an array"):
        step(ws, xs)
    assert not any(w.is_deleted() for w in ws)


def test_a_stacked_array_that_is_donated_is_deleted():
    def step(ws, xs):
        def loss(ws, x):
            for w in (ws[0], ws[1]):
                x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
            return jnp.mean(x**2)

        losses, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x), xs, jaxpp.Std1F1B(2)
        )
        return ws - 0.1 * grads, losses

    jitted = jaxpp.mpmd_jit_with_loop(step, make_mesh(2), donate_argnums=0)
    ws = jnp.stack(m.params())
    jitted(ws, m.batch())
    assert ws.is_deleted()
    with pytest.raises(jaxpp.JaxppError, match="argument ws: expected an array"):
        jitted(ws, m.batch())
