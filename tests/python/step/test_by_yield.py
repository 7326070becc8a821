"""Pipelines without a loop over microbatches, and `collect_task_times_ms`."""

import jax
import numpy as np
import pytest

import jaxpp.api as jaxpp
import models
from equality import difference


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
        ours(params, x)
        ours(params, x)
    ours(params, x)
    assert nothing == {}
    assert [len(times[f"fwd_{s}"]) for s in range(4)] == [2, 2, 2, 2]
    assert all(t >= 0 for row in times.values() for t in row)
