"""Functions without a loop over microbatches, and `collect_task_times_ms`."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import difference, make_mesh, pipelined_step


def forward(params, x):
    for p in params:
        x = jaxpp.mark_stage_end(models.layer(p, x))
    return x, {"mean": x.mean()}


@pytest.mark.parametrize("layers", [4, 6, 9])
def test_forward_of_any_number_of_stages(layers, mesh4):
    params, x = models.weights(layers), models.batch(1)["x"][0]
    ours = jaxpp.mpmd_jit_by_yield(forward, mpmd_mesh=mesh4)
    plain = jax.jit(forward)(params, x)
    out, aux = ours(params, x)
    assert difference((out, aux), plain) < 1e-5
    assert out.mpmd_idxs == ((layers - 1) % 4,)


def test_decorator_and_target_num_stages(mesh2):
    params, x = models.weights(4), models.batch(1)["x"][0]

    @jaxpp.mpmd_jit_by_yield(mpmd_mesh=mesh2, target_num_stages=4)
    def ours(params, x):
        return forward(params, x)[0]

    assert difference(ours(params, x), forward(params, x)[0]) < 1e-5


def test_gradient_in_one_pass(mesh4):
    params, x = models.weights(4), models.batch(1)["x"][0]

    def gradient(params, x):
        return jax.grad(lambda p: (forward(p, x)[0] ** 2).mean())(params)

    ours = jaxpp.mpmd_jit_by_yield(gradient, mpmd_mesh=mesh4)(params, x)
    assert difference(ours, jax.jit(gradient)(params, x)) < 1e-5


def test_token_of_generation_is_one_task_a_rank(mesh4):
    """No task runs before or after the stages, and the caches are updated in place."""

    def token(params, caches, x, position):
        updated = []
        for p, cache in zip(params, caches, strict=True):
            cache = jax.lax.dynamic_update_slice(cache, x[None], (position, 0))
            x = jaxpp.mark_stage_end(models.layer(p, x + cache.sum(0)))
            updated.append(cache)
        return updated, x

    params, x = models.weights(4), models.batch(1)["x"][0][0]
    caches = [np.zeros((64, x.size), x.dtype) for _ in params]
    ours = jaxpp.mpmd_jit_by_yield(token, mesh4, donate_argnums=1)
    compiled = ours.compile(params, caches, x, np.int32(0))
    ranks = compiled.cost_summary().ranks
    assert [rank.tasks for rank in ranks] == [1, 1, 1, 1]
    assert all(rank.peak_bytes < 2 * caches[0].nbytes for rank in ranks)
    expected = caches
    for position in range(3):
        caches, y = compiled(params, caches, x, np.int32(position))
        expected, plain = jax.jit(token)(params, expected, x, np.int32(position))
        assert difference((caches, y), (expected, plain)) < 1e-5


def test_no_marks_is_an_error(mesh2):
    with pytest.raises(jaxpp.JaxppError, match="no stage marks") as caught:
        jaxpp.mpmd_jit_by_yield(lambda x: x * 2, mpmd_mesh=mesh2)(np.ones(4))
    assert caught.value.code == "stage-marks"


def test_collect_task_times(mesh4):
    params, x = models.weights(4), models.batch(1)["x"][0]
    ours = jaxpp.mpmd_jit_by_yield(forward, mpmd_mesh=mesh4)
    with jaxpp.collect_task_times_ms(enabled=False) as nothing:
        ours(params, x)
    with jaxpp.collect_task_times_ms() as times:
        with jaxpp.collect_task_times_ms() as inside:
            ours(params, x)
        ours(params, x)
    ours(params, x)
    assert nothing == {}
    assert [len(inside[f"fwd_{s}"]) for s in range(4)] == [1, 1, 1, 1]
    assert [len(times[f"fwd_{s}"]) for s in range(4)] == [2, 2, 2, 2]
    assert all(t >= 0 for row in times.values() for t in row)


# --- Split by results -------------------------------------------------------------------


def create(key, scale):
    up, down = jax.random.split(key)
    gain = jax.numpy.exp(scale)
    weights = {"up": jax.random.normal(up, (8, 32)) * gain, "down": [gain, down]}
    return weights, jax.numpy.zeros(3, "int32")


@pytest.mark.parametrize("devices", [1, 2])
def test_each_rank_computes_its_results(devices):
    mesh = make_mesh(2, data=devices)
    ours = jaxpp.mpmd_jit_rev(
        create,
        mesh,
        out_refs=({"up": {1}, "down": {0, 1}}, frozenset({0})),
        out_shardings=({"up": P("data"), "down": None}, None),
    )
    args = jax.random.key(1), 0.5
    weights, count = ours(*args)
    assert difference((weights, count), create(*args)) < 1e-5
    assert weights["up"].mpmd_idxs == (1,) and weights["up"].spec == P("data")
    assert [w.mpmd_idxs for w in weights["down"]] == [(0, 1), (0, 1)]
    assert count.mpmd_idxs == (0,)
    assert not ours.compile(*args).cost_summary().links


def test_weights_are_created_where_a_step_takes_them(mesh2):
    problem = models.mlp([2, 2], 4)
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(2)), mesh2)
    state = problem.optimizer.init(problem.params)
    traced = step.trace_and_place(problem.params, state, problem.batch)
    ranks = jax.tree.map(lambda sharding: sharding.mesh_ids, traced.in_shardings[0][0])
    made = jaxpp.mpmd_jit_rev(lambda: models.weights(4), mesh2, out_refs=ranks)()
    assert [w.mpmd_idxs for w in jax.tree.leaves(made)] == jax.tree.leaves(ranks)
