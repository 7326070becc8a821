"""Stage marks inside `jax.checkpoint`: what is recomputed, and on which rank."""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxpp.api as jaxpp
from equality import (
    Problem,
    assert_trains_equal,
    make_mesh,
    no_mark,
    pipelined_step,
    plain_step,
)

WIDTH, MICROBATCHES = 8, 6
Layer = Callable[[Any, jax.Array], jax.Array]
Mark = Callable[[Any], Any]
saved = jax.checkpoint_policies


def layer(p: Any, x: jax.Array) -> jax.Array:
    return x + checkpoint_name(jnp.tanh(x @ p["up"]), "hidden") @ p["down"]


def two_layers(p: Any, x: jax.Array) -> jax.Array:
    """Scans over two layers, each in a checkpoint."""
    stacked = jax.tree.map(lambda w: jnp.stack([w, 0.5 * w]), p)
    return jax.lax.scan(jax.checkpoint(lambda x, p: (layer(p, x), None)), x, stacked)[0]


def problem_of(model: Callable[[Sequence[Any], jax.Array, Mark], Any], layers: int) -> Problem:
    keys = iter(jax.random.split(jax.random.key(0), 2 * layers + 1))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / 4

    params = [
        {"up": weight(WIDTH, 2 * WIDTH), "down": weight(2 * WIDTH, WIDTH)}
        for _ in range(layers)
    ]
    return Problem(
        lambda params, x, i, mark: (jnp.mean(model(params, x, mark) ** 2), ()),
        params,
        4 * weight(MICROBATCHES, 16, WIDTH),
    )


def plan_of(problem: Problem, schedule: Any) -> tuple[Any, list[tuple[int, ...]]]:
    """The cost summary of a step, with transfers and peak memory, and each weight's ranks."""
    mesh = make_mesh(getattr(schedule, "mpmd_dim", schedule.num_stages))
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, schedule), mesh, donate_argnums=(0, 1)
    )
    state = problem.params, problem.optimizer.init(problem.params)
    planned = step.lower(*state, problem.batch)
    weights = planned.in_shardings[0][0]
    return planned.cost_summary(), [s.mesh_ids for s in jax.tree.leaves(weights)]


# --- Marks at the end -------------------------------------------------------------------


def at_end(wrap: Any, layer: Layer = layer) -> Any:
    def model(params: Any, x: jax.Array, mark: Mark) -> jax.Array:
        for p in params:
            x = wrap(lambda p, x: mark(layer(p, x)))(p, x)
        return x

    return model


def behind(wrap: Any, layer: Layer = layer) -> Any:
    def model(params: Any, x: jax.Array, mark: Mark) -> jax.Array:
        for p in params:
            x = mark(wrap(layer)(p, x))
        return x

    return model


WRAPS: dict[str, Any] = {
    "checkpoint": jax.checkpoint,
    "of jit": lambda f: jax.checkpoint(jax.jit(f)),
    "in jit": lambda f: jax.jit(jax.checkpoint(f)),
    "of a checkpoint": lambda f: jax.checkpoint(jax.checkpoint(f)),
    "without barrier": functools.partial(jax.checkpoint, prevent_cse=False),
    "without barrier, of one that saves a name": lambda f: WRAPS["without barrier"](
        WRAPS["saves a name"](f)
    ),
    "saves dots": functools.partial(jax.checkpoint, policy=saved.dots_saveable),
    "saves all": functools.partial(jax.checkpoint, policy=saved.everything_saveable),
    "saves a name": functools.partial(
        jax.checkpoint, policy=saved.save_only_these_names("hidden")
    ),
}
SCHEDULES = [
    jaxpp.Std1F1B(2),
    jaxpp.Std1F1B(4),
    jaxpp.ZeroBubble(4),
    jaxpp.Interleaved1F1B(4, 2),
]


CASES = [(layer, jaxpp.Std1F1B(4), name) for name in WRAPS]
CASES += [(two_layers, schedule, "checkpoint") for schedule in SCHEDULES]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("inner", "schedule", "wrap"), CASES)
def test_a_mark_at_the_end_is_as_behind(inner: Layer, schedule: Any, wrap: str) -> None:
    stages = schedule.num_stages
    costs, ranks = plan_of(problem_of(at_end(WRAPS[wrap], inner), stages), schedule)
    expected, same_ranks = plan_of(problem_of(behind(WRAPS[wrap], inner), stages), schedule)
    assert ranks == same_ranks
    assert costs.links == expected.links
    assert [(r.tasks, r.peak_bytes) for r in costs.ranks] == [
        (r.tasks, r.peak_bytes) for r in expected.ranks
    ]
    if wrap != "of a checkpoint" and "without barrier" not in wrap:  # FLOPs count barriers
        assert costs == expected


@pytest.mark.sample(3)
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_mark_at_the_end_trains(wrap: Any) -> None:
    problem = problem_of(at_end(wrap, two_layers), 2)
    assert_trains_equal(problem, jaxpp.Std1F1B(2), make_mesh(2))


# --- Marks anywhere ---------------------------------------------------------------------


def halves(p: Any, x: jax.Array, mark: Mark) -> jax.Array:
    """A mark in the middle; the second half uses the stage's input only through the mark."""
    x, hidden = mark((x, jnp.tanh(x @ p["up"])))
    return x + hidden @ p["down"]


def random_model(random: random.Random, layers: int, stages: int) -> Any:
    """Layers under random, possibly nested checkpoints and jits, with marks at random."""
    marks = set(random.sample(range(layers), stages))
    wraps = [lambda f: f, *WRAPS.values()]

    def group(begin: int, end: int) -> Any:
        """The layers begin .. end - 1 as a function f(params, x, mark)."""
        wrap = random.choice(wraps)
        if end - begin == 1:
            inner, marked = random.choice([layer, two_layers]), begin in marks
            return lambda params, x, mark: wrap(
                lambda p, x: (mark if marked else no_mark)(inner(p, x))
            )(params[begin], x)
        cut = random.randrange(begin + 1, end)
        first, second = group(begin, cut), group(cut, end)
        return lambda params, x, mark: wrap(
            lambda params, x: second(params, first(params, x, mark), mark)
        )(params, x)

    return group(0, layers)


SEEDS = (
    [int(os.environ["JPP_TEST_SEED"])]
    if "JPP_TEST_SEED" in os.environ
    else range(int(os.environ.get("JPP_TEST_TIMES", 12)))
)


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_layer_is_computed_again_on_its_own_rank(seed: int) -> None:
    drawn = random.Random(seed)
    stages = drawn.randint(2, 4)
    layers = drawn.randint(stages, 7)
    problem = problem_of(random_model(drawn, layers, stages), layers)
    schedule = drawn.choice([jaxpp.Std1F1B, jaxpp.ZeroBubble, jaxpp.GPipe])(stages)
    costs, ranks = plan_of(problem, schedule)
    assert all(len(of_weight) == 1 for of_weight in ranks)
    neighbours = {(k, k + 1) for k in range(stages - 1)}
    neighbours |= {(b, a) for a, b in neighbours}
    links = {(link.src, link.dst): link.messages for link in costs.links if link.bytes > 64}
    assert links == dict.fromkeys(neighbours, MICROBATCHES)
    assert_trains_equal(problem, schedule, make_mesh(stages), steps=1)


def test_a_mark_in_the_middle_cuts_there() -> None:
    def parts(wrap: Any) -> Any:
        def model(params: Any, x: jax.Array, mark: Mark) -> jax.Array:
            for p in params:
                x = wrap(lambda p, x: halves(p, x, mark))(p, x)
            return x

        return problem_of(model, 3)

    problem = parts(jax.checkpoint)
    costs, ranks = plan_of(problem, jaxpp.Std1F1B(4))
    without, same_ranks = plan_of(parts(lambda f: f), jaxpp.Std1F1B(4))
    assert ranks == same_ranks
    assert costs.links == without.links
    assert_trains_equal(problem, jaxpp.Std1F1B(4), make_mesh(4))


def masked(p: Any, x: jax.Array, mark: Mark) -> jax.Array:
    mask = jnp.where(x > 0, x, 0.1)
    return mask * (mark(jnp.tanh((mask * x) @ p["up"])) @ p["down"])


def test_both_sides_of_a_mark_compute_a_mask_again() -> None:
    """Each layer has a mark in the middle and uses a mask from before the mark after it."""

    def model(params: Any, x: jax.Array, mark: Mark) -> jax.Array:
        for p in params:
            x = mark(jax.checkpoint(masked, static_argnums=2)(p, x, mark))
        return x

    problem = problem_of(model, 2)
    _, ranks = plan_of(problem, jaxpp.Std1F1B(4))
    assert ranks == [(1,), (0,), (3,), (2,)]
    assert_trains_equal(problem, jaxpp.Std1F1B(4), make_mesh(4))


def test_effects_on_both_sides_of_a_mark_happen_as_in_plain_jax(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def printing(p: Any, x: jax.Array, mark: Mark) -> jax.Array:
        jax.debug.print("first {}", jnp.tanh(x @ p["up"]).shape[0])
        x = mark(x + jnp.tanh(x @ p["up"]) @ p["down"])
        jax.debug.print("second {}", jnp.sum(x * 0))
        return x * p["up"][0, 0]

    def model(params: Any, x: jax.Array, mark: Mark) -> jax.Array:
        for p in params:
            x = jax.checkpoint(printing, static_argnums=2)(p, x, mark)
        return x

    def printed() -> list[int]:
        jax.effects_barrier()
        text = capfd.readouterr().out
        return [text.count(line) for line in ("first", "second")]

    problem = problem_of(model, 2)
    state = problem.params, problem.optimizer.init(problem.params)
    jax.block_until_ready(plain_step(problem)(*state, problem.batch))
    in_plain_jax = printed()
    assert min(in_plain_jax) > 0
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(2)), make_mesh(2))
    jax.block_until_ready(step(*state, problem.batch))
    assert printed() == in_plain_jax


# --- Flax -------------------------------------------------------------------------------


class MarkedBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return jaxpp.mark_stage_end(x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x))))


def test_linen_remat() -> None:
    plans = []
    for block in (nn.remat(MarkedBlock), MarkedBlock):
        modules = [block() for _ in range(2)]
        x = jnp.ones((4, WIDTH))
        params = [m.init(jax.random.key(k), x) for k, m in enumerate(modules)]

        def loss(params: Any, x: jax.Array, i: Any, mark: Any, modules: Any = modules) -> Any:
            for module, p in zip(modules, params, strict=True):
                x = module.apply(p, x)
            return jnp.mean(x**2), ()

        problem = Problem(loss, params, jnp.ones((MICROBATCHES, 4, WIDTH)))
        plans.append(plan_of(problem, jaxpp.Std1F1B(2)))
    (costs, ranks), (plain_costs, plain_ranks) = plans
    assert ranks == plain_ranks
    assert costs.links == plain_costs.links


def test_nnx_remat() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
            self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return jaxpp.mark_stage_end(x + self.down(nnx.gelu(self.up(x))))

    graphs, states = zip(*(nnx.split(Block(nnx.Rngs(k))) for k in range(2)), strict=True)

    def problem_with(wrap: Any) -> Problem:
        def loss(params: Any, x: jax.Array, i: Any, mark: Any) -> Any:
            for graph, state in zip(graphs, params, strict=True):
                x = wrap(lambda block, x: block(x))(nnx.merge(graph, state), x)
            return jnp.mean(x**2), ()

        return Problem(loss, list(states), jnp.ones((MICROBATCHES, 4, WIDTH)))

    costs, ranks = plan_of(problem_with(nnx.remat), jaxpp.Std1F1B(2))
    plain_costs, plain_ranks = plan_of(problem_with(lambda f: f), jaxpp.Std1F1B(2))
    assert ranks == plain_ranks
    assert costs.links == plain_costs.links
