"""Random update rules of stacked leaves compute the same on parts as on the whole arrays.

JPP_TEST_SEED and JPP_TEST_TIMES choose other rules.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jaxpp.api as jaxpp
from equality import compiler_options
from jaxpp import _core
from jaxpp.trace.stacked import part_step

SEED = int(os.environ.get("JPP_TEST_SEED") or 0)
TIMES = int(os.environ.get("JPP_TEST_TIMES") or 20)

LAYERS, ROWS, COLUMNS = 4, 3, 2
SHAPE = (LAYERS, ROWS, COLUMNS)
# Of the leaves that are read row by row: weights, and scales that broadcast to them.
SHAPES = [SHAPE, (LAYERS, 1, 1), (LAYERS, 1, COLUMNS), (LAYERS, ROWS, 1)]


def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    scaled = weights[0] * weights[1]  # before the rows are read
    for layer in range(LAYERS):
        w = scaled[layer] + weights[0][layer] * weights[1][layer]
        x = jnp.tanh(x @ w) @ jnp.ones((COLUMNS, ROWS))
        if layer == LAYERS // 2 - 1:
            x = jaxpp.mark_stage_end(x)
    return jnp.sum(x**2)


# --- Rules ------------------------------------------------------------------------------

Rule = Callable[[list[jax.Array]], jax.Array]


def full(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, SHAPE)


def some_axes(draw: random.Random) -> tuple[int, ...]:
    return tuple(sorted(draw.sample(range(3), draw.randint(1, 3))))


def reduced(draw: random.Random) -> Callable[[jax.Array], jax.Array]:
    reduce, axes = draw.choice([jnp.sum, jnp.max, jnp.mean, jnp.min]), some_axes(draw)
    if draw.random() < 0.7:
        return lambda x: reduce(x, axis=axes, keepdims=True)
    return lambda x: jnp.expand_dims(reduce(x, axis=axes), axes)


def by_layer(draw: random.Random) -> Callable[[jax.Array], jax.Array]:
    rule = draw.choice(
        [
            lambda v: v / (1 + jnp.linalg.norm(v)),
            lambda v: v - jnp.mean(v, 0, keepdims=True),
            lambda v: jnp.cumsum(v, axis=0),
            lambda v: jnp.sort(v, axis=0),
            lambda v: v @ v.T @ v,
            lambda v: jnp.linalg.cholesky(v @ v.T + jnp.eye(ROWS)) @ v,
            lambda v: jnp.abs(jnp.linalg.qr(v.T)[1].T @ jnp.ones((COLUMNS, COLUMNS))),
            lambda v: jax.lax.fori_loop(0, 3, lambda _, u: u - 0.1 * u @ u.T @ u, v),
            lambda v: jax.lax.while_loop(
                lambda u: jnp.sum(u * u) > 1, lambda u: 0.5 * u, jnp.tanh(v)
            ),
        ]
    )
    if draw.random() < 0.6:
        return lambda x: jax.vmap(rule)(full(x))
    if draw.random() < 0.5:
        backwards, kept = draw.random() < 0.5, draw.choice([0.0, 0.5])

        def row(c: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
            made = rule(v) + kept * c
            return made, made

        return lambda x: jax.lax.scan(row, full(x)[0], full(x), reverse=backwards)[1]
    return lambda x: jnp.stack([rule(v) for v in full(x)])


def whole_loop(draw: random.Random) -> Callable[[jax.Array], jax.Array]:
    """A loop whose states are whole leaves; some begin as zeros."""
    first = draw.choice([jnp.zeros_like, jnp.tanh])

    def rule(x: jax.Array) -> jax.Array:
        def body(states: Any, decay: Any) -> Any:
            k, total = states
            return (k + 1, decay * total + jnp.tanh(x) / (k + 1)), jnp.sum(total)

        states, sums = jax.lax.scan(body, (0, first(x)), jnp.array([0.5, 0.2, 0.1]))
        return states[1] + 0.1 * jnp.max(sums)

    def until(x: jax.Array) -> jax.Array:
        more = lambda state: (jnp.linalg.norm(state[1]) > 0.1) & (state[0] < 3)  # noqa: E731
        halve = lambda state: (state[0] + 1, 0.5 * state[1] + 0.1 * x)  # noqa: E731
        return jax.lax.while_loop(more, halve, (0, first(x)))[1]

    return draw.choice([rule, until])


def product(draw: random.Random) -> Callable[[jax.Array, jax.Array], jax.Array]:
    matrix = jnp.cos(jnp.arange(1.0 * ROWS * ROWS)).reshape(ROWS, ROWS)
    return draw.choice(
        [
            lambda a, b: a * jnp.tanh(jnp.vdot(full(a), full(b))),
            lambda a, b: jnp.einsum("lrc,lsc->lrs", full(a), full(b)) @ full(a),
            lambda a, b: jnp.einsum("lrc,mrc->lm", full(a), full(b))[:, :1, None] * full(b),
            lambda a, b: jnp.einsum("rs,lsc->lrc", matrix, full(a)) - b,
            lambda a, b: jnp.einsum("lrc,lrc,rs->lsc", full(a), full(b), matrix),
            lambda a, b: a + jnp.einsum("lrc,lsc->rs", full(a), full(b))[:, :1],
        ]
    )


def rearranged(draw: random.Random) -> Callable[[jax.Array], jax.Array]:
    axis, order = draw.randrange(3), draw.sample(range(3), 3)
    back = [order.index(k) for k in range(3)]
    at, row = draw.randrange(1, SHAPE[axis]), draw.randrange(LAYERS)
    return draw.choice(
        [
            lambda x: jnp.sin(full(x).reshape(LAYERS, -1)).reshape(SHAPE),
            lambda x: jnp.cos(full(x).transpose(order)).transpose(back),
            lambda x: jnp.roll(full(x), 1, axis),
            lambda x: jnp.flip(full(x), axis),
            lambda x: jnp.concatenate(jnp.split(full(x), [at], axis)[::-1], axis),
            lambda x: full(x).at[row].mul(0.5),
            lambda x: jnp.cumsum(full(x), axis),
            lambda x: jnp.sort(full(x), axis),
            lambda x: jnp.where((jnp.sum(x, 2, keepdims=True) > 0), full(x), 0.5),
        ]
    )


def unary(draw: random.Random) -> Callable[[jax.Array], jax.Array]:
    return draw.choice(
        [
            jnp.tanh,
            jax.nn.relu,
            jnp.square,
            lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
            lambda x: jnp.clip(x, -0.5, 0.5),
            lambda x: (x.view(jnp.uint32) >> 16 << 16).view(jnp.float32),
            lambda x: jax.lax.cond(jnp.sum(x) > 0, lambda: x * 2, lambda: -x),
            jax.checkpoint(lambda x: jnp.sin(x) * x),
            jax.jit(lambda x: x / (1 + jnp.max(jnp.abs(x), -1, keepdims=True))),
        ]
    )


def binary(draw: random.Random) -> Callable[[jax.Array, jax.Array], jax.Array]:
    return draw.choice(
        [
            jnp.add,
            jnp.multiply,
            jnp.maximum,
            lambda a, b: a / (1 + jnp.abs(b)),
            lambda a, b: jnp.where(a > b, a, -b),
            lambda a, b: jax.lax.cond(jnp.sum(a) > jnp.sum(b), jnp.add, jnp.subtract, a, b),
        ]
    )


def make_rule(draw: random.Random, pool: int) -> Rule:
    """Each step of the rule adds an array that broadcasts to SHAPE."""
    steps: list[Rule] = []
    for at in range(pool, pool + draw.randint(1, 4)):
        a, b = draw.randrange(at), draw.randrange(at)
        if draw.random() < 0.5:
            combine = draw.choice([binary, binary, product])(draw)
            steps.append(lambda xs, f=combine, a=a, b=b: f(xs[a], xs[b]))
        else:
            change = draw.choice(
                [
                    reduced,
                    reduced,
                    reduced,
                    unary,
                    unary,
                    by_layer,
                    by_layer,
                    whole_loop,
                    rearranged,
                ]
            )(draw)
            steps.append(lambda xs, f=change, a=a: f(xs[a]))

    def rule(arrays: list[jax.Array]) -> jax.Array:
        found = list(arrays)
        for step in steps:
            found.append(step(found))
        return full(found[-1])

    return rule


def make_step(draw: random.Random) -> tuple[Any, list[jax.Array]]:
    """A training step of flat arguments, and these: weights, state and a batch."""
    of_state = [draw.choice([*SHAPES, (1, ROWS, COLUMNS), (1, 1, 1)]) for _ in range(2)]
    shapes = [SHAPE, draw.choice(SHAPES), *of_state]
    rules = [make_rule(draw, 6) for _ in shapes]
    batch = (2, 5, ROWS)
    args = [
        jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32) + k).reshape(shape)
        for k, shape in enumerate([*shapes, batch])
    ]

    def step(*flat: jax.Array) -> list[jax.Array]:
        *leaves, x = flat
        value, grads = jaxpp.treduce(
            lambda mb: jax.value_and_grad(loss)(leaves[:2], mb), x, jaxpp.Std1F1B(2)
        )
        pool = [*grads, *leaves]
        results = []
        for leaf, rule in zip(leaves, rules, strict=True):
            small = tuple(k for k, size in enumerate(leaf.shape) if size == 1)
            update = rule(pool)
            update = jnp.mean(update, small, keepdims=True) if small else update
            results.append(leaf - 0.1 * jnp.tanh(update))
        return [*results, value]

    return step, args


# --- Parts ------------------------------------------------------------------------------


def in_parts(arrays: list[Any], bounds: list[Any]) -> list[Any]:
    found: list[Any] = []
    for array, cut in zip(arrays, bounds, strict=True):
        ends = cut.ranges() if cut else []
        found += [jax.lax.slice_in_dim(array, a, b, axis=cut.axis) for a, b in ends] or [array]
    return found


def joined(parts: list[Any], bounds: list[Any]) -> list[Any]:
    rest = iter(parts)
    return [
        jnp.concatenate([next(rest) for _ in cut.ranges()], cut.axis) if cut else next(rest)
        for cut in bounds
    ]


def assert_parts_compute_the_same(step: Any, args: list[Any]) -> Any:
    """Returns the step in parts; None: it needs all leaves whole."""
    closed = jax.make_jaxpr(step)(*args)
    states, results = range(len(args) - 1), range(len(closed.out_avals))
    next_args = [k if k in states else _core.NONE for k in results]
    found, _ = part_step(closed, lambda k, axis: True, next_args)
    if found is None:
        return None
    evaluate = jax.jit(jaxpr_as_fun(found.closed), compiler_options=compiler_options())
    made = joined(evaluate(*in_parts(args, found.arguments)), found.results)
    expected = jax.jit(step, compiler_options=compiler_options())(*args)
    for ours, theirs in zip(made, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_allclose(data_of(ours), data_of(theirs), rtol=2e-4, atol=1e-5)
    return found


def data_of(array: jax.Array) -> np.ndarray:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(array))
    return np.asarray(array, float)


@pytest.mark.parametrize("seed", [SEED] if SEED else range(1, TIMES + 1))
def test_parts_compute_what_wholes_do(seed: int) -> None:
    assert_parts_compute_the_same(*make_step(random.Random(seed)))


# --- Steps that went wrong --------------------------------------------------------------


class Normed(jaxpp.Add):
    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return state + value / jnp.linalg.norm(value)


class FromOne(jaxpp.Add):
    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.ones(value.shape, value.dtype)


def interleaved(x: jax.Array) -> jax.Array:
    return jnp.stack([x[::2], x[1::2]], 1).reshape(-1, *x.shape[1:])


SUM_IN_FLOAT = jaxpp.Add(dtype=jnp.float32)
CASES: dict[str, tuple[Any, Any, Any]] = {
    "an operation of the user": (Normed(), jnp.float32, lambda w, g, k: [w - g, g]),
    "that begins with ones": (FromOne(), jnp.float32, lambda w, g, k: [w, g]),
    "a sum of another dtype": (
        SUM_IN_FLOAT,
        jnp.bfloat16,
        lambda w, g, k: [w - (0.1 * g).astype(w.dtype), jnp.sqrt(jnp.sum(g * g))],
    ),
    "no rows": (jaxpp.Add(), jnp.float32, lambda w, g, k: [w - g, w[5:], g[:0]]),
    "booleans": (
        jaxpp.Add(),
        jnp.float32,
        lambda w, g, k: [w - g, jnp.sort((jnp.abs(w) > 0.5).T.reshape(-1))],
    ),
    "keys": (
        jaxpp.Add(),
        jnp.float32,
        lambda w, g, k: [w - g, interleaved(k[:4]), k[4:], k[5:]],
    ),
    "another key": (
        jaxpp.Add(),
        jnp.float32,
        lambda w, g, k: [
            w - g,
            jnp.concatenate([jnp.broadcast_to(jax.random.key(9), (1,)), k[1:]]),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_that_no_stage_reads(name: str) -> None:
    operation, dtype, update = CASES[name]

    def of_rows(w: Any, keys: Any, x: Any) -> Any:
        for layer in range(4):
            x = jnp.tanh(x @ w[layer]) + jax.random.normal(keys[layer], x.shape, x.dtype)
            if layer == 1:
                x = jaxpp.mark_stage_end(x)
        return jnp.mean(x**2)

    def step(w: Any, keys: Any, xs: Any) -> Any:
        one = lambda x: jax.grad(of_rows)(w, keys, x)  # noqa: E731
        grad = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=operation)
        return update(w, grad, keys)

    keys = jax.random.split(jax.random.key(1), 5)
    w = (jnp.sin(jnp.arange(80.0)) + 0.1).reshape(5, 4, 4).astype(dtype)
    xs = jnp.cos(jnp.arange(24.0)).reshape(2, 3, 4).astype(dtype)
    found = assert_parts_compute_the_same(step, [w, keys, xs])
    assert found is not None and any(found.arguments)
