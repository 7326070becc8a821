"""Optax's optimizers, as listed in docs/compatibility.md."""

from __future__ import annotations

from typing import Any

import jax
import optax
import optax.contrib

import jaxpp.api as jaxpp
import models
from equality import assert_trains_equal, make_mesh
from libraries import (
    MICROBATCHES,
    SGD,
    STAGES,
    Loop,
    Stack,
    assert_same_training,
    linen_state,
    linen_step,
    make_batch,
)


def check_optimizer(optimizer: Any, tolerance: float = 3e-5) -> None:
    problem = models.mlp([1] * STAGES, MICROBATCHES)
    problem.optimizer = optimizer
    assert_trains_equal(
        problem, jaxpp.Std1F1B(STAGES), make_mesh(STAGES), steps=4, tolerance=tolerance
    )


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim == 2, params)


def test_optax_masked() -> None:
    decay = optax.masked(optax.add_decayed_weights(0.1), matrices)
    check_optimizer(optax.chain(decay, SGD))


def test_optax_multi_transform() -> None:
    labels = lambda params: jax.tree.map(  # noqa: E731
        lambda x: "matrix" if x.ndim == 2 else "bias", params
    )
    by_label = {"matrix": optax.adamw(1e-2, eps=1e-3), "bias": optax.sgd(0.1)}
    check_optimizer(optax.multi_transform(by_label, labels))


def test_optax_multi_steps() -> None:
    check_optimizer(optax.MultiSteps(SGD, 2).gradient_transformation())


def test_optax_adafactor() -> None:
    check_optimizer(optax.adafactor(1e-2, min_dim_size_to_factor=8))


def test_optax_lion() -> None:
    check_optimizer(optax.lion(1e-2))


def test_optax_muon() -> None:
    check_optimizer(optax.contrib.muon(1e-2, eps=1e-3), tolerance=1e-4)


def test_optax_schedule_free() -> None:
    check_optimizer(optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2, eps=1e-3))


def test_optax_apply_if_finite() -> None:
    check_optimizer(optax.apply_if_finite(SGD, 3))


def test_optax_ema() -> None:
    check_optimizer(optax.chain(optax.ema(0.9), optax.sgd(0.1)))


def test_optax_clipping_and_schedule() -> None:
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)
    check_optimizer(optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(rate)))


def test_optax_average_of_weights() -> None:
    def step(loop: Loop, state: Any, batch: Any) -> Any:
        average, train_state = state
        train_state, losses = linen_step(loop, train_state, batch)
        return (
            optax.incremental_update(train_state.params, average, 0.1),
            train_state,
        ), losses

    train_state = linen_state(Stack())
    assert_same_training(step, (train_state.params, train_state), make_batch())
