"""Stages that do more than others: the part that all stages share is compiled once. Stages with
scans, loops and conditions share a module as well, unless these differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import ClosedJaxpr

import jaxpp.api as jaxpp
from equality import (
    Problem,
    assert_trains_equal,
    compiler_options,
    make_mesh,
    module_of_each,
    pipelined_step,
)
from jaxpp.trace.keys import ParamKeys

STAGES, WIDTH, VOCABULARY = 4, 64, 96


def block(p: Any, x: jax.Array, gate: Any = jax.nn.gelu) -> jax.Array:
    normal = p["scale"] * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    q, k, v = jnp.split(normal @ p["qkv"], 3, -1)
    scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / WIDTH**0.5)
    x = x + scores @ v
    return x + gate(x @ p["up"]) @ p["down"]


def numbered_block(p: Any, x: jax.Array, i: Any, number: int) -> jax.Array:
    """A block with constants of its own: a key for noise, a factor and a limit."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(5), i), number)
    x = block(p, x) / (1 + number / 8) + 0.1 * jax.random.normal(key, x.shape)
    return jnp.where(jnp.arange(WIDTH) < WIDTH - number, x, 0)


def other_block(p: Any, x: jax.Array) -> jax.Array:
    return block(p, x, jnp.tanh)


def bounded_block(p: Any, x: jax.Array) -> jax.Array:
    """A block that is a single cond."""
    return jax.lax.cond(x[0, 0, 0] < 9, block, lambda p, x: x, p, x)


def decoder(
    numbered: bool = False, first: int = 0, remat: bool = True, even: Any = block
) -> Problem:
    """An embedding, one block per stage from the first one on, and a head without a mark.
    `even`: the block of stages 0 and 2."""
    run = jax.checkpoint if remat else lambda block, **_: block

    def loss(params: Any, tokens: jax.Array, i: Any, mark: Any) -> Any:
        x = params["embedding"][tokens]
        for stage, p in enumerate(params["blocks"]):
            if stage < first:
                pass
            elif numbered:
                x = run(numbered_block, static_argnums=3)(p, x, i, stage)
            else:
                x = run(block if stage % 2 else even)(p, x)
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


def modules_under_1f1b(problem: Problem) -> dict[str, int]:
    state = (problem.params, problem.optimizer.init(problem.params))
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(STAGES)),
        make_mesh(STAGES),
        donate_argnums=(0, 1),
        compiler_options=compiler_options(),
    ).compile(*state, problem.batch)
    return module_of_each(step)


@pytest.mark.parametrize(
    "problem, shared",
    [
        (decoder, ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (decoder, ["bwd_0", "bwd_1", "bwd_2", "bwd_3_part2"]),
        (partial(decoder, numbered=True), ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (partial(decoder, numbered=True), ["bwd_0", "bwd_1", "bwd_2", "bwd_3_part2"]),
        (partial(decoder, numbered=True, first=1), ["fwd_1", "fwd_2", "fwd_3"]),
        (partial(decoder, numbered=True, first=1), ["bwd_1", "bwd_2", "bwd_3_part2"]),
        (partial(decoder, remat=False), ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (partial(decoder, remat=False), ["bwd_0", "bwd_1", "bwd_2", "bwd_3_part2"]),
        (partial(decoder, even=other_block), ["fwd_0_part2", "fwd_2"]),
        (partial(decoder, even=other_block), ["fwd_1", "fwd_3"]),
        (partial(decoder, even=other_block), ["bwd_0", "bwd_2"]),
        (partial(decoder, even=other_block), ["bwd_1", "bwd_3_part2"]),
        (partial(decoder, remat=False, even=bounded_block), ["fwd_0_part2", "fwd_2"]),
        (partial(decoder, remat=False, even=bounded_block), ["bwd_0", "bwd_2"]),
        (decoder, ["before_loop_0_0_part2", "before_loop_0_1", "before_loop_0_2"]),
        (residual, ["fwd_0_part2", "fwd_1", "fwd_2", "fwd_3"]),
        (residual, ["before_loop_0_0", "before_loop_0_1", "before_loop_0_3_part2"]),
    ],
)
def test_what_all_stages_have_is_one_module(problem: Any, shared: list[str]) -> None:
    module = modules_under_1f1b(problem())
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


# --- Scans, loops and conditions in stages ----------------------------------------------------

SMALL = 8
TABLE = jnp.linspace(0.5, 1.5, SMALL)
OTHER_TABLE = jnp.linspace(0.5, 1.5, SMALL)


def row(w: Any, x: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ w) * TABLE


def scanned(w: Any, x: jax.Array, stage: int, layer: Any = row, **options: Any) -> jax.Array:
    return jax.lax.scan(lambda x, w: (layer(w, x), None), x, w, **options)[0]


def rematerialised(w: Any, x: jax.Array, stage: int) -> jax.Array:
    policy = jax.checkpoint_policies.save_only_these_names("none")
    return scanned(w, x, stage, jax.checkpoint(row, policy=policy))


def mapped(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return jax.lax.map(lambda x: row(w[0], x), x)


def counted(w: Any, x: jax.Array, stage: int) -> jax.Array:
    """The numbers from which the stages count differ, and become arguments."""
    return jax.lax.fori_loop(stage, stage + 2, lambda i, x: row(w[0], x) / (1 + i / 8), x)


def chosen(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return jax.lax.cond(x.sum() > 0, lambda x: row(w[0], x), lambda x: x * 0.5, x)


def repeated_until(w: Any, x: jax.Array, stage: int) -> jax.Array:
    """A loop that is not differentiated, with rules for the derivatives of what is in it."""

    def halve(x: jax.Array) -> jax.Array:
        return jax.nn.relu(x) * 0.5

    limit = jax.lax.while_loop(lambda x: x.max() > 1, halve, jax.lax.stop_gradient(x))
    return row(w[0], x) + limit


def looping(layer: Callable[..., jax.Array]) -> Problem:
    """Stages that call `layer(weights of two layers, x, number of the stage)`."""

    def loss(params: Any, x: jax.Array, i: Any, mark: Any) -> Any:
        for stage, w in enumerate(params):
            x = mark(layer(w, x, stage))
        return jnp.mean(x**2), ()

    rng = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / SMALL**0.5, jnp.float32)

    params = [weight(2, SMALL, SMALL) for _ in range(STAGES)]
    return Problem(loss, params, weight(4, 3, SMALL), optax.sgd(0.1))


LOOPS = [scanned, rematerialised, mapped, counted, chosen, repeated_until]


@pytest.mark.parametrize("layer", LOOPS)
def test_stages_with_equal_loops_share_a_module(layer: Any) -> None:
    module = modules_under_1f1b(looping(layer))
    assert module["fwd_1"] == module["fwd_2"]
    assert module["bwd_1"] == module["bwd_2"]


def all_loops(w: Any, x: jax.Array, stage: int) -> jax.Array:
    for layer in LOOPS:
        x = layer(w, x, stage) / 2
    return x


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_stages_with_loops_train_as_plain_jax_does(schedule: Any) -> None:
    mesh = make_mesh(getattr(schedule, "mpmd_dim", STAGES))
    assert_trains_equal(looping(all_loops), schedule, mesh)


def with_own_factor(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return scanned(w, x, stage, lambda w, x: row(w, x) * (1 - stage / 8))


def with_own_direction(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return scanned(w, x, stage, reverse=stage % 2 == 1)


def with_own_function(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return scanned(w, x, stage, lambda w, x: (jnp.cos if stage % 2 else jnp.sin)(row(w, x)))


def with_own_order(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return scanned(w, x, stage, lambda w, x: row(w, x) - x if stage % 2 else x - row(w, x))


def with_own_count(w: Any, x: jax.Array, stage: int) -> jax.Array:
    return jax.lax.fori_loop(0, 1 + stage, lambda _, x: row(w[0], x), x)


UNLIKE = [with_own_factor, with_own_direction, with_own_function, with_own_order]
UNLIKE += [with_own_count]


@pytest.mark.parametrize("layer", UNLIKE)
def test_stages_whose_loops_differ_share_no_module(layer: Any) -> None:
    module = modules_under_1f1b(looping(layer))
    assert module["fwd_1"] != module["fwd_2"]
    assert module["bwd_1"] != module["bwd_2"]


def test_stages_whose_loops_differ_train_as_plain_jax_does() -> None:
    def layer(w: Any, x: jax.Array, stage: int) -> jax.Array:
        for unlike in UNLIKE:
            x = unlike(w, x, stage) / 2
        return x

    assert_trains_equal(looping(layer), SCHEDULES[0], make_mesh(STAGES))


# --- Keys of jaxprs ---------------------------------------------------------------------------


@jax.custom_jvp
def with_rule(x: Any) -> Any:
    return jnp.sin(x) + 1


with_rule.defjvp(lambda given, t: (with_rule(*given), t[0]))


def traced(
    factor: float = 0.0,
    function: Any = with_rule,
    swapped: bool = False,
    table: Any = TABLE,
    start: Any = np.float32(1),  # noqa: B008
    rows: Any = np.ones(3, np.float32),  # noqa: B008
    limit: int = 5,
    around: Any = jax.jit,
    **options: Any,
) -> ClosedJaxpr:
    """A scan with a condition and a loop in it, traced anew by each call."""

    def body(x: Any, row: Any) -> Any:
        y = around(lambda x: function(x) * factor)(x)
        x = x - y if swapped else y - x
        x = jax.lax.while_loop(lambda x: x > limit, lambda x: x - 1, x)
        return jax.lax.cond(row > 0, lambda: x, lambda: y), jnp.sum(row * table)

    return jax.make_jaxpr(lambda *args: jax.lax.scan(body, *args, **options))(start, rows)


DIFFERENT: dict[str, Callable[[], ClosedJaxpr]] = {
    "nothing": traced,
    "literal": lambda: traced(factor=0.5),
    "sign of zero": lambda: traced(factor=-0.0),
    "primitive": lambda: traced(function=jnp.cos),
    "primitive in a function with a rule": lambda: traced(function=jax.nn.relu),
    "order of operands": lambda: traced(swapped=True),
    "constant": lambda: traced(table=OTHER_TABLE),
    "dtype": lambda: traced(start=np.float16(1)),
    "dtype of rows": lambda: traced(rows=np.ones(3, np.int32)),
    "weak type": lambda: traced(start=1.0),
    "number of iterations": lambda: traced(rows=np.ones(4, np.float32)),
    "condition": lambda: traced(limit=6),
    "reverse": lambda: traced(reverse=True),
    "unroll": lambda: traced(unroll=3),
    "checkpoint": lambda: traced(around=jax.checkpoint),
    "no call": lambda: traced(around=lambda f: f),
    "effect": lambda: traced(function=lambda x: [jax.debug.print("x"), jnp.sin(x) + 1][1]),
    "precision": lambda: traced(function=lambda x: jax.lax.reduce_precision(x, 5, 10)),
    "parameter": lambda: traced(function=lambda x: jax.lax.reduce_precision(x, 8, 10)),
}


def test_keys_are_equal_only_for_jaxprs_that_compute_the_same() -> None:
    keys = ParamKeys()
    made = {what: keys.of(trace()) for what, trace in DIFFERENT.items()}
    for what, key in made.items():
        assert [other for other, own in made.items() if own == key] == [what]
        if what != "effect":  # a callback is another function each time
            assert keys.of(DIFFERENT[what]()) == key, what


def test_keys_know_the_settings_of_equations() -> None:
    keys = ParamKeys()

    def key(partitionable: bool) -> Any:
        with jax.threefry_partitionable(partitionable):
            return keys.of(traced())

    assert key(True) == key(True) != key(False)


def test_keys_keep_what_they_compare_by_identity() -> None:
    """Otherwise, a new constant could get the id of an old one."""
    keys, jaxpr = ParamKeys(), traced().jaxpr
    made = {keys.of(ClosedJaxpr(jaxpr, [np.ones(SMALL)])) for _ in range(20)}
    assert len(made) == 20


def test_keys_of_jaxprs_that_are_gone() -> None:
    """A jaxpr could get the id of another that was compared."""
    keys = ParamKeys()
    assert len({keys.of(traced(factor=float(k)).jaxpr) for k in range(20)}) == 20
