"""Tensor and data parallelism inside the ranks of a pipeline."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_trains_equal


def tp_dp_problem(microbatches=4):
    """Two stages of two layers, each column- then row-parallel, batch over "data"."""

    def loss(params, mb, i, mark):
        x = jax.lax.with_sharding_constraint(mb["x"], P("data"))
        for k in range(0, len(params), 2):
            h = models.layer(params[k], x)
            h = jax.lax.with_sharding_constraint(h, P("data", "model"))
            x = models.layer(params[k + 1], h)
            x = jax.lax.with_sharding_constraint(x, P("data"))
            x = mark(x)
        return models.mse(x, mb["y"]), ()

    return Problem(loss, models.weights(4), models.batch(microbatches))


def specs_for(problem):
    layers = [
        {"w": P(None, "model"), "b": P("model")} if k % 2 == 0 else {"w": P("model"), "b": P()}
        for k in range(4)
    ]
    state = problem.optimizer.init(problem.params)
    by_shape = jax.tree.map(lambda _: P(), state)
    return (layers, by_shape, P(None, "data"))


@pytest.mark.parametrize("schedule", [jaxpp.Std1F1B(2), jaxpp.GPipe(2), jaxpp.ZeroBubble(2)])
def test_tensor_and_data_parallel(schedule, mesh222):
    problem = tp_dp_problem()
    assert_trains_equal(problem, schedule, mesh222, in_specs=specs_for(problem))


def test_parameters_sharded_fsdp_style(mesh222):
    problem = models.transformer(stages=2, blocks=2, microbatches=4)
    params = jax.tree.map(lambda _: P("data"), problem.params)
    state = jax.tree.map(
        lambda x: P("data") if x.ndim else P(), problem.optimizer.init(problem.params)
    )
    step = assert_trains_equal(
        problem,
        jaxpp.Std1F1B(2),
        mesh222,
        in_specs=(params, state, P()),
        out_specs=(params, state, P(), P()),
    )
    new, *_ = step(problem.params, problem.optimizer.init(problem.params), problem.batch)
    array = new["blocks"][0]["q"]
    assert array.spec == P("data")
    local = array.to_mpmd_local_array
    assert local.sharding.shard_shape(local.shape) == (8, 16)
    np.testing.assert_array_equal(np.asarray(local), np.asarray(array))


def test_shardings_are_inferred(mesh222):
    problem = tp_dp_problem()
    assert_trains_equal(problem, jaxpp.Std1F1B(2), mesh222)


def test_interleaved_on_sharded_ranks(mesh222):
    def loss(params, mb, i, mark):
        x = mb["x"]
        for p in params:
            x = jax.lax.with_sharding_constraint(models.layer(p, x), P("data", "model"))
            x = mark(x)
        return models.mse(x, mb["y"]), ()

    problem = Problem(loss, models.weights(4), models.batch(4))
    assert_trains_equal(problem, jaxpp.Interleaved1F1B(4, 2), mesh222)


def test_empty_arrays_are_sharded(mesh222):
    step = jaxpp.mpmd_jit_with_loop(
        lambda tree: jax.tree.map(lambda x: x + 1, tree), mesh222, in_specs=P("data")
    )
    tree = {"empty": np.zeros((2, 0), np.float32), "full": np.zeros((2, 3), np.float32)}
    for times in (1, 2):
        tree = step(tree)
        assert tree["empty"].shape == (2, 0) and tree["empty"].spec == P("data")
        assert (np.asarray(tree["full"]) == times).all()
