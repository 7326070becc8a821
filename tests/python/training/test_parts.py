"""Stages that do more than others: the part that all stages share is compiled once."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
from equality import Problem, assert_trains_equal, make_mesh, modules_of, pipelined_step

STAGES, WIDTH, VOCABULARY = 4, 64, 96


def block(p: Any, x: jax.Array) -> jax.Array:
    normal = p["scale"] * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = jnp.split(normal @ p["qkv"], 3, -1)
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / WIDTH**0.5)
    x = x + scores @ v
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def numbered_block(p: Any, x: jax.Array, i: Any, number: int) -> jax.Array:
    """A block with constants of its own: a key for noise, a factor and a limit."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), i), number)
    x = block(p, x) / (1 + number / 8) + 0.1 * jax.random.normal(key, x.shape)
    return jnp.where(jnp.arange(WIDTH) < WIDTH - number, x, 0)


def decoder(numbered: bool = False) -> Problem:
    """An embedding, one rematerialised block per stage, and a head."""

    def loss(params: Any, tokens: jax.Array, i: Any, mark: Any) -> Any:
        x = params["embedding"][tokens]
        for stage, p in enumerate(params["blocks"]):
            if numbered:
                x = jax.checkpoint(numbered_block, static_argnums=3)(p, x, i, stage)
            else:
                x = jax.checkpoint(block)(p, x)
            if stage + 1 < STAGES:
                x = mark(x)
        logits = x @ params["head"]
        labels = jnp.roll(tokens, -1, -1)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), ()

    keys = iter(jax.random.split(jax.random.key(0), 2 + 3 * STAGES))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[0] ** 0.5

    def layer() -> Any:
        shapes = {
            "qkv": (WIDTH, 3 * WIDTH),
            "up": (WIDTH, 4 * WIDTH),
            "down": (4 * WIDTH, WIDTH),
        }
        return {"scale": jnp.ones(WIDTH)} | {k: weight(*s) for k, s in shapes.items()}

    params = {
        "embedding": weight(VOCABULARY, WIDTH),
        "blocks": [layer() for _ in range(STAGES)],
        "head": weight(WIDTH, VOCABULARY),
    }
    tokens = jax.random.randint(jax.random.key(1), (4, 4, 64), 0, VOCABULARY)
    # Not Adam, which would magnify the rounding of gradients that are almost zero.
    return Problem(loss, params, tokens, optax.sgd(0.1, momentum=0.9))


SCHEDULES = [jaxpp.Std1F1B(STAGES), jaxpp.ZeroBubble(STAGES), jaxpp.Interleaved1F1B(STAGES, 2)]


@pytest.mark.soak
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_parts_train_as_plain_jax_does(schedule: Any) -> None:
    assert_trains_equal(decoder(), schedule, make_mesh(getattr(schedule, "mpmd_dim", STAGES)))


def residual() -> Problem:
    """Two blocks per stage; the first block takes its microbatch as a slice of the batch."""

    def loss(params: Any, x: jax.Array, i: Any, mark: Any) -> Any:
        for number, p in enumerate(params):
            x = x + jnp.tanh(x @ p["up"]) @ p["down"]
            if number % 2 and number + 1 < len(params):
                x = mark(x)
        return jnp.mean(x**2), ()

    keys = jax.random.split(jax.random.key(0), 4 * STAGES + 1)
    shapes = {"up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    params = [
        {name: jax.random.normal(next(pair), s) / s[0] ** 0.5 for name, s in shapes.items()}
        for pair in (iter(keys[2 * k : 2 * k + 2]) for k in range(2 * STAGES))
    ]
    batch = jax.random.normal(keys[-1], (4, 8, 64, WIDTH))
    return Problem(loss, params, batch, optax.sgd(0.1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_a_part_takes_the_microbatch_of_the_part_before(schedule: Any) -> None:
    assert_trains_equal(residual(), schedule, make_mesh(getattr(schedule, "mpmd_dim", STAGES)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{}, {"data": 2}])
def test_constants_that_are_arguments_do_not_change_numbers(axes: dict[str, int]) -> None:
    assert_trains_equal(decoder(numbered=True), SCHEDULES[0], make_mesh(STAGES, **axes))


def module_of_each(problem: Problem) -> dict[str, int]:
    """The index of each task's module under 1F1B, by the task's name."""
    state = (problem.params, problem.optimizer.init(problem.params))
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(STAGES)), make_mesh(STAGES), donate_argnums=(0, 1)
    ).compile(*state, problem.batch)
    tasks = step._traced.staged.tasks()
    return {t.name: m for t, m in zip(tasks, modules_of(step).of_task, strict=True)}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "problem, shared",
    [
        (decoder, ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (decoder, ["bwd_0", "bwd_1", "bwd_2", "bwd_3_part2"]),
        (partial(decoder, numbered=True), ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (partial(decoder, numbered=True), ["bwd_0", "bwd_1", "bwd_2", "bwd_3_part2"]),
        (decoder, ["before_loop_0_0_part2", "before_loop_0_1", "before_loop_0_2"]),
        (residual, ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (residual, ["before_loop_0_0", "before_loop_0_1", "before_loop_0_3_part2"]),
    ],
)
def test_what_all_stages_have_is_one_module(problem: Any, shared: list[str]) -> None:
    module = module_of_each(problem())
    assert len({module[name] for name in shared}) == 1


def test_explain_counts_all_parts_of_a_stage() -> None:
    problem = residual()
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(STAGES)), make_mesh(STAGES)
    )
    state = (problem.params, problem.optimizer.init(problem.params))
    text = step.lower(*state, problem.batch).explain()
    rows = re.findall(r"^ +\d+ +\d+ +(\S+) +(\S+) +\d+%$", text, re.MULTILINE)
    forward, backward = np.array(rows, float).T
    # Slices, a loss, and the first stage's missing gradient of its input are small.
    np.testing.assert_allclose(forward, forward[1], rtol=0.02)
    np.testing.assert_allclose(backward[1:], backward[1], rtol=0.02)
    assert "move layers" not in text
