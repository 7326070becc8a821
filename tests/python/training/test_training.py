"""Larger and more unusual steps than those of test_equal.py, compared with plain JAX."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
import mistakes as m
import models
from equality import Problem, assert_trains_equal, make_mesh


@pytest.mark.soak("2-devices")
def test_64_stages_on_4_devices(any_mesh4: Any) -> None:
    problem = models.mlp([1] * 64, 4)
    assert_trains_equal(
        problem, jaxpp.Interleaved1F1B(64, 4), any_mesh4, steps=2, tolerance=1e-4
    )


@pytest.mark.soak("2-devices")
def test_512_microbatches(any_mesh2: Any) -> None:
    assert_trains_equal(models.mlp([1, 1], 512), jaxpp.Std1F1B(2), any_mesh2, steps=2)


@pytest.mark.parametrize("schedule", [jaxpp.Std1F1B(4), jaxpp.ZeroBubble(4)], ids=str)
def test_a_skip_that_several_stages_use(schedule: Any, any_mesh4: Any) -> None:
    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        skip = x = mark(models.layer(params[0], mb["x"]))
        for k, p in enumerate(params[1:]):
            x = mark(models.layer(p, x + (k + 1) * skip))
        return models.mse(x, mb["y"]), ()

    assert_trains_equal(Problem(loss, models.weights(4), models.batch(5)), schedule, any_mesh4)


def with_average(inner: Any, decay: float) -> optax.GradientTransformation:
    """Keeps a moving average of the parameters, such as is used for evaluation."""

    def init(params: Any) -> Any:
        return inner.init(params), params

    def update(grads: Any, state: Any, params: Any) -> Any:
        updates, inner_state = inner.update(grads, state[0], params)
        after = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state[1], after)
        return updates, (inner_state, average)

    return optax.GradientTransformation(init, update)


def test_moving_average_of_the_parameters(any_mesh4: Any) -> None:
    problem = models.mlp([1] * 4, 4)
    problem.optimizer = with_average(optax.adamw(1e-2), 0.9)
    assert_trains_equal(problem, jaxpp.Std1F1B(4), any_mesh4, donate_argnums=(0, 1))


FROZEN = {
    "adamw": optax.adamw(1e-2, eps=1e-3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)),
    "if finite": optax.apply_if_finite(optax.adamw(1e-2, eps=1e-3), 3),
    "every second": optax.MultiSteps(optax.adamw(1e-2), 2).gradient_transformation(),
    "average": with_average(optax.sgd(0.1, momentum=0.9), 0.9),
}


def adapted(stages: int) -> Problem:
    """Trains an adapter beside the frozen weights of each stage. The last stage also uses the
    weights of the first."""

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x, frozen = mb["x"], jax.lax.stop_gradient(params["frozen"])
        for p, adapter in zip(frozen, params["adapters"], strict=True):
            if p is frozen[-1]:
                x = models.layer(frozen[0], x)
            x = mark(models.layer(p, x) + x @ adapter["w"])
        return models.mse(x, mb["y"]), ()

    params = {"frozen": models.weights(stages), "adapters": models.weights(stages, seed=5)}
    return Problem(loss, params, models.batch(4))


@pytest.mark.parametrize("schedule", [jaxpp.Std1F1B(4), jaxpp.ZeroBubble(4)], ids=str)
@pytest.mark.parametrize("name", FROZEN)
def test_frozen_weights_stay_on_their_ranks(name: str, schedule: Any, any_mesh4: Any) -> None:
    problem = adapted(4)
    problem.optimizer = FROZEN[name]
    step = assert_trains_equal(problem, schedule, any_mesh4, donate_argnums=(0, 1))
    state = problem.optimizer.init(problem.params)
    summary = step.compile(problem.params, state, problem.batch).cost_summary()
    # Each link sends the activations of four microbatches and a few scalars.
    activations = problem.batch["x"].nbytes
    assert max(link.bytes for link in summary.links) < activations + 64
    after = step(*jax.tree.map(jnp.copy, (problem.params, state)), problem.batch)
    for path, array in jax.tree_util.tree_leaves_with_path(after[:2]):
        keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
        if "frozen" in keys:
            stage = keys[keys.index("frozen") + 1]
            ranks = set(array.mpmd_idxs)
            assert ranks == ({0, 3} if stage == 0 else {stage}) or ranks == {stage}, path


def test_embedding_of_integers(any_mesh2: Any) -> None:
    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        ids = mb["ids"].astype(jnp.int32) % 7
        x = mark(jnp.take(params["table"], ids, axis=0).sum(1))
        return models.cross_entropy(mark(x @ params["head"]), mb["label"]), ids.max()

    batch = {
        "ids": np.arange(4 * 3 * 5, dtype=np.uint8).reshape(4, 3, 5),
        "label": np.arange(12, dtype=np.int16).reshape(4, 3) % 5,
    }
    k1, k2 = jax.random.split(models.key(0))
    params = {"table": jax.random.normal(k1, (7, 16)), "head": jax.random.normal(k2, (16, 5))}
    problem = Problem(loss, params, batch, aux_operation=jaxpp.Max)
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2, reduce_aux=jnp.max)


def test_while_loop_whose_length_the_data_decides(any_mesh2: Any) -> None:
    def halvings(x: Any) -> Any:
        def body(state: Any) -> Any:
            size, count = state
            return size / 2, count + 1

        largest = jax.lax.stop_gradient(jnp.abs(x).max())
        return jax.lax.while_loop(lambda state: state[0] > 0.1, body, (largest, 0))[1]

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mark(models.layer(params[0], mb["x"]))
        count = halvings(x)
        x = mark(models.layer(params[1], x / (1 + count)))
        return models.mse(x, mb["y"]), count

    problem = Problem(loss, models.weights(2), models.batch(4), aux_operation=jaxpp.Concat())
    assert_trains_equal(problem, jaxpp.Std1F1B(2), any_mesh2)


# --- Options of the compiler ------------------------------------------------------------


def test_compiler_options_reach_every_task(tmp_path: pathlib.Path) -> None:
    step = jaxpp.mpmd_jit_with_loop(
        m.training_step(jaxpp.Std1F1B(2)),
        make_mesh(2),
        compiler_options={"xla_dump_to": str(tmp_path)},
    )
    step.compile(m.params(), m.batch())
    dumped = {path.name.split(".")[1] for path in tmp_path.glob("module_*")}
    assert len(dumped) >= 4, dumped  # forward and backward tasks of two stages


def test_an_unknown_compiler_option_is_named() -> None:
    options = {"xla_unheard_of": 3}
    step = jaxpp.mpmd_jit_with_loop(
        m.training_step(jaxpp.Std1F1B(2)), make_mesh(2), compiler_options=options
    )
    with pytest.raises(jaxpp.JaxppError, match="No such compile option: 'xla_unheard_of'"):
        step(m.params(), m.batch())
