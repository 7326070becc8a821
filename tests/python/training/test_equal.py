"""All kinds of models train to the same numbers as in plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_trains_equal

SCHEDULES = {
    "1f1b": lambda s, p: jaxpp.Std1F1B(s),
    "eager": lambda s, p: jaxpp.Eager1F1B(s),
    "gpipe": lambda s, p: jaxpp.GPipe(s),
    "interleaved": lambda s, p: jaxpp.Interleaved1F1B(s, p),
    "interleaved-fused": lambda s, p: jaxpp.Interleaved1F1B(s, p, fuse_steady_state=True),
    "interleaved-gpipe": lambda s, p: jaxpp.InterleavedGPipe(s, p),
    "kimi-k2": lambda s, p: jaxpp.KimiK2(s, p),
    "zero-bubble": lambda s, p: jaxpp.ZeroBubble(s),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("microbatches", [1, 3, 9])
def test_mlp_under_every_schedule(name, microbatches, mesh4):
    problem = models.mlp([1, 1, 1, 1], microbatches)
    assert_trains_equal(problem, SCHEDULES[name](4, 4), mesh4)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_mlp_on_every_mesh(name, any_mesh4):
    assert_trains_equal(models.mlp([1, 1, 1, 1], 4), SCHEDULES[name](4, 4), any_mesh4)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["interleaved", "interleaved-fused", "kimi-k2"])
@pytest.mark.parametrize("microbatches", [4, 6])
def test_eight_stages_on_four_ranks(name, microbatches, any_mesh4):
    problem = models.mlp([1] * 8, microbatches)
    assert_trains_equal(problem, SCHEDULES[name](8, 4), any_mesh4)


def test_dualpipe_v(any_mesh2):
    assert_trains_equal(models.mlp([1] * 4, 6), jaxpp.DualPipeV(4, 2), any_mesh2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", SCHEDULES)
def test_transformer_under_every_schedule(name, any_mesh4):
    problem = models.transformer(stages=4, blocks=4, microbatches=5)
    assert_trains_equal(problem, SCHEDULES[name](4, 4), any_mesh4)


@pytest.mark.sample(1)
@pytest.mark.soak("2-devices-zero-bubble")
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
def test_transformer_under_remat_and_jit(name, any_mesh4):
    problem = models.transformer(stages=4, blocks=8, microbatches=4, remat=True)
    # XLA splits sums over devices differently in a stage than in the whole step. Adam
    # magnifies the difference where a gradient is 1e-3 of its leaf's largest: two elements
    # differ by up to 5e-5.
    tolerance = 1e-5 if any_mesh4.lowering_mesh().size == 1 else 1e-4
    assert_trains_equal(problem, SCHEDULES[name](4, 4), any_mesh4, tolerance=tolerance)


def test_uneven_stages(any_mesh4):
    assert_trains_equal(models.mlp([3, 1, 2, 1], 6), jaxpp.Std1F1B(4), any_mesh4)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_one_stage(name, any_mesh1):
    assert_trains_equal(models.mlp([2], 3), SCHEDULES[name](1, 1), any_mesh1)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero-bubble"])
def test_tied_embedding_and_head(name, any_mesh4):
    problem = models.transformer(stages=4, blocks=4, microbatches=4, tied=True)
    step = assert_trains_equal(problem, SCHEDULES[name](4, 4), any_mesh4)
    params, *_ = step(problem.params, problem.optimizer.init(problem.params), problem.batch)
    assert params["embed"].mpmd_idxs == (0, 3)
    replicas = list(params["embed"]._partially_addressable_arrays.values())
    np.testing.assert_array_equal(replicas[0], replicas[1])


def test_weight_shared_by_three_stages(any_mesh4):
    def loss(params, mb, i, mark):
        x = mark(models.layer(params["shared"], mb["x"]))
        x = mark(models.layer(params["own"], x))
        x = mark(models.layer(params["shared"], x))
        x = mark(models.layer(params["shared"], x))
        return models.mse(x, mb["y"]), ()

    shared, own = models.weights(2)
    problem = Problem(loss, {"shared": shared, "own": own}, models.batch(5))
    assert_trains_equal(problem, jaxpp.Std1F1B(4), any_mesh4)


def test_skip_from_first_to_last_stage(any_mesh4):
    def loss(params, mb, i, mark):
        skip = models.layer(params[0], mb["x"])
        x = mark(skip)
        x = mark(models.layer(params[1], x))
        x = mark(models.layer(params[2], x))
        x = mark(models.layer(params[3], x) + skip)
        return models.mse(x, mb["y"]), ()

    problem = Problem(loss, models.weights(4), models.batch(6))
    assert_trains_equal(problem, jaxpp.Std1F1B(4), any_mesh4)


def test_dropout_with_a_key_per_microbatch(any_mesh4):
    def loss(params, mb, i, mark):
        key = jax.random.fold_in(jax.random.key(7), i)
        x = mb["x"]
        for k, p in enumerate(params):
            x = models.layer(p, x)
            keep = jax.random.bernoulli(jax.random.fold_in(key, k), 0.8, x.shape)
            x = mark(jnp.where(keep, x / 0.8, 0.0))
        return models.mse(x, mb["y"]), ()

    problem = Problem(loss, models.weights(4), models.batch(5))
    assert_trains_equal(problem, jaxpp.Eager1F1B(4), any_mesh4)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_global_norm_clipping(name, any_mesh4):
    problem = models.transformer(stages=4, blocks=4, microbatches=4)
    # Not Adam, which would magnify the rounding of gradients near zero to full steps.
    problem.optimizer = optax.chain(
        optax.clip_by_global_norm(0.1), optax.sgd(1.0, momentum=0.9)
    )
    assert_trains_equal(problem, SCHEDULES[name](4, 4), any_mesh4)


def test_bf16_compute_with_fp32_master_weights(any_mesh4):
    def loss(params, mb, i, mark):
        x = mb["x"].astype(jnp.bfloat16)
        for p in jax.tree.map(lambda w: w.astype(jnp.bfloat16), params):
            x = mark(models.layer(p, x))
        return models.mse(x.astype(jnp.float32), mb["y"]), ()

    problem = Problem(loss, models.weights(4), models.batch(4))
    # Not Adam, which would magnify the rounding of gradients near zero to full steps.
    problem.optimizer = optax.sgd(1e-2, momentum=0.9)
    # Sums in bf16 are rounded in a different order, an error of a few 2^-8.
    assert_trains_equal(problem, jaxpp.Std1F1B(4), any_mesh4, tolerance=2e-2)


def test_auxiliary_outputs_under_concat_and_max(any_mesh4):
    def loss(params, mb, i, mark):
        x, largest = mb["x"], []
        for p in params:
            x = models.layer(p, x)
            largest.append(jnp.abs(x).max())
            x = mark(x)
        return models.mse(x, mb["y"]), {"out": x, "largest": largest, "i": i}

    problem = Problem(loss, models.weights(4), models.batch(5))
    problem.aux_operation = {
        "out": jaxpp.Concat(axis=1),
        "largest": jaxpp.Max,
        "i": jaxpp.Concat(),
    }

    def reduce_aux(aux):
        return {
            "out": np.moveaxis(aux["out"], 0, 1),
            "largest": [np.max(v) for v in aux["largest"]],
            "i": aux["i"],
        }

    assert_trains_equal(problem, jaxpp.Std1F1B(4), any_mesh4, reduce_aux=reduce_aux)


def test_scan_over_layers_inside_a_stage(any_mesh2):
    def loss(params, mb, i, mark):
        x = mb["x"]
        for stage in params:
            x, _ = jax.lax.scan(lambda x, p: (models.layer(p, x), None), x, stage)
            x = mark(x)
        return models.mse(x, mb["y"]), ()

    stacked = [
        jax.tree.map(lambda *ws: jnp.stack(ws), *models.weights(3, seed=s)) for s in range(2)
    ]
    assert_trains_equal(Problem(loss, stacked, models.batch(4)), jaxpp.Std1F1B(2), any_mesh2)


def test_donated_state_with_a_python_int_in_it(mesh4):
    problem = models.mlp([1] * 4, 4)

    def step(state, xs, ys):
        def one(mb):
            fun = jax.value_and_grad(problem.loss, has_aux=True)
            (loss, _), grads = fun(state["params"], mb, 0, jaxpp.mark_stage_end)
            return loss, grads

        loss, grads = jaxpp.treduce(
            one, {"x": xs, "y": ys}, schedule=jaxpp.Std1F1B(4), operation=jaxpp.Add
        )
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
        return {"params": params, "step": state["step"] + 1}, loss

    ours = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh4, donate_argnums=0)
    state, previous = {"params": problem.params, "step": 0}, None
    expected = {"params": jax.tree.map(jnp.copy, problem.params), "step": 0}
    plain = jax.jit(step)
    for _ in range(3):
        state, _ = ours(state, problem.batch["x"], problem.batch["y"])
        expected, _ = plain(expected, problem.batch["x"], problem.batch["y"])
        if previous is not None:
            assert previous["params"][0]["w"].is_deleted()
        previous = state
    assert int(state["step"]) == 3
    assert state["step"].mpmd_idxs == (0, 1, 2, 3)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


class TwoRounds(jaxpp.BaseSchedule):
    """A handwritten schedule: all forwards, then all backwards."""

    def tasks(self, n_mubatches):
        kinds = (jaxpp.TaskType.FWD, jaxpp.TaskType.BWD)
        return [
            [jaxpp.Task(stage, mb, kind) for kind in kinds for mb in range(n_mubatches)]
            for stage in range(self.num_stages)
        ]


def test_user_defined_schedule(any_mesh4):
    assert_trains_equal(models.mlp([1] * 4, 5), TwoRounds(4), any_mesh4)
