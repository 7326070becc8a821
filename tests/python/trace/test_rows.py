"""Rows of stacked leaves, selected in random ways: steps compute the same numbers as plain JAX,
and each rank holds only the bytes of its own rows.

JPP_TEST_SEED and JPP_TEST_TIMES choose other models.
"""

from __future__ import annotations

import collections
import functools
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import jaxpp.api as jaxpp
from equality import compiler_options, make_mesh, mesh_of, some_devices
from jaxpp.jax_internals.context import context_mesh
from jaxpp.trace.rows import fold

WIDTH = 4
SEED = int(os.environ.get("JPP_TEST_SEED") or 0)
TIMES = int(os.environ.get("JPP_TEST_TIMES") or 6)

Rows = Callable[[jax.Array, int, int], jax.Array]


def seeds(count: int) -> list[Any]:
    """`count` seeds, the second half only for `make soak`."""
    half = SEED + (count + 1) // 2
    longer = (pytest.param(n, marks=pytest.mark.soak) for n in range(half, SEED + count))
    return [*range(SEED, half), *longer]


def by_slice(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[start:stop]


def by_negative_slice(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[start - len(w) : stop - len(w) or None]


def one_by_one(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.stack([w[k] for k in range(start, stop)])


def by_dynamic_slice(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(w, start, stop - start)


def by_dynamic_index(w: jax.Array, start: int, stop: int) -> jax.Array:
    index = jax.lax.dynamic_index_in_dim
    return jnp.stack([index(w, k, keepdims=False) for k in range(start, stop)])


def by_array_index(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.stack([w[jnp.array(k)] for k in range(start, stop)])


def by_take(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.stack([jnp.take(w, k, axis=0) for k in range(start, stop)])


def by_gather(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[np.arange(start, stop)]


def by_split(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.split(w, [start, stop])[1]


def by_unstack(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.stack(jnp.unstack(w)[start:stop])


def by_list(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.stack(list(w)[start:stop])


def by_transposed_view(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w.T[..., start:stop].T


def by_moved_axis(w: jax.Array, start: int, stop: int) -> jax.Array:
    view = jnp.moveaxis(w, 0, 1)
    return jnp.stack([view[:, k] for k in range(start, stop)])


def by_new_axis(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[None][0, start:stop]


def by_half_of_half(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[start:][: stop - start]


def in_jit(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jax.jit(by_dynamic_slice, static_argnums=(1, 2))(w, start, stop)


def of_what_is_made_of_it(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.where(w > 0, w, 0.5 * w)[start:stop]


def by_reshape(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w.reshape(-1, stop - start, *w.shape[1:])[start // (stop - start)]


ANY = [
    by_slice,
    by_negative_slice,
    one_by_one,
    by_dynamic_slice,
    by_dynamic_index,
    by_array_index,
    by_take,
    by_gather,
    by_split,
    by_unstack,
    by_list,
    by_transposed_view,
    by_moved_axis,
    by_new_axis,
    by_half_of_half,
    in_jit,
    of_what_is_made_of_it,
]


Takes = Callable[[jax.Array], jax.Array]  # selects the rows of a stage


def step_of(takes: list[Takes], schedule: Any, optimizer: Any, remat: bool) -> Any:
    """A training step whose stage s selects its rows with `takes[s]`."""

    def layers(w: jax.Array, x: jax.Array, s: int) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, takes[s](w))[0]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for s in range(len(takes)):
            stage = jax.checkpoint(layers, static_argnums=2) if remat else layers
            x = jaxpp.mark_stage_end(stage(w, x, s))
        return jnp.mean(x**2)

    def step(w: jax.Array, state: Any, xs: jax.Array) -> Any:
        losses, grads = jaxpp.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, schedule)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state, losses

    return step


def check_takes(
    takes: list[Takes],
    layers: int,
    optimizer: Any,
    remat: bool,
    ranks: int | None = None,
    dtype: Any = jnp.float32,
) -> None:
    """Checks the numbers and the bytes on each device; stage s is on rank s mod `ranks`."""
    ranks = ranks or len(takes)
    schedule: Any = jaxpp.Std1F1B(len(takes))
    if ranks < len(takes):
        schedule = jaxpp.Interleaved1F1B(len(takes), ranks)
    step = step_of(takes, schedule, optimizer, remat)
    w = jax.random.normal(jax.random.key(0), (layers, WIDTH, WIDTH)).astype(dtype)
    xs = jax.random.normal(jax.random.key(1), (2 * ranks, 2, WIDTH)).astype(dtype)
    mesh = make_mesh(ranks)
    ours = jaxpp.mpmd_jit_with_loop(step, mesh, compiler_options=compiler_options())
    plain = jax.jit(step, compiler_options=compiler_options())
    expected, found = [(w, optimizer.init(w))] * 2
    for _ in range(2):
        expected = plain(*expected[:2], xs)
        found = ours(*found[:2], xs)
    rtol, atol = (1e-4, 1e-6) if dtype == jnp.float32 else (0.05, 0.02)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        pair = (np.asarray(each).astype(np.float32) for each in (a, b))
        np.testing.assert_allclose(*pair, rtol=rtol, atol=atol)
    numbers = jnp.broadcast_to(jnp.arange(layers)[:, None, None], w.shape)
    rows: list[set[int]] = [set() for _ in range(ranks)]
    for s, take in enumerate(takes):
        rows[s % ranks] |= set(take(numbers).ravel().tolist())
    moments = [leaf for leaf in jax.tree.leaves(found[1]) if leaf.ndim == 3]
    for array in (found[0], *moments):
        held: collections.Counter[Any] = collections.Counter()
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
        # Each device of a rank has a copy, and ranks may share devices.
        of_ranks: collections.Counter[Any] = collections.Counter()
        for r, own in enumerate(rows):
            for device in array.sharding.mpmd_mesh.devices_of(r):
                of_ranks[device] += len(own) * WIDTH * WIDTH * array.dtype.itemsize
        assert held == of_ranks
        assert array.on_device_size_in_bytes() == held.total()


def check_step(spellings: list[Rows], ends: list[int], optimizer: Any, remat: bool) -> None:
    """Checks stages that select the rows ends[s] to ends[s + 1]."""
    takes = [
        functools.partial(rows, start=a, stop=b)
        for rows, a, b in zip(spellings, ends, ends[1:], strict=False)
    ]
    check_takes(takes, ends[-1], optimizer, remat)


@pytest.mark.sample(7)
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("spelling", ANY, ids=lambda s: s.__name__)
def test_a_spelling(spelling: Rows, remat: bool) -> None:
    check_step([spelling] * 2, [0, 3, 4], optax.sgd(0.1), remat)


@pytest.mark.parametrize("remat", [False, True])
def test_an_axis_for_stages(remat: bool) -> None:
    check_step([by_reshape] * 3, [0, 2, 4, 6], optax.adam(1e-2), remat)


@pytest.mark.parametrize("seed", seeds(TIMES))
def test_random_spellings(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(2, 4)
    ends = [0, *np.cumsum([draw.randint(1, 3) for _ in range(stages)]).tolist()]
    optimizer = draw.choice([optax.sgd(0.1), optax.adam(1e-2), optax.adamw(1e-2)])
    check_step(draw.choices(ANY, k=stages), ends, optimizer, draw.random() < 0.5)


# --- Rows in other orders, and rows that alternate between stages -----------------------


def reversed_first(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[::-1][start:stop]


def reversed_one_by_one(w: jax.Array, start: int, stop: int) -> jax.Array:
    view = jnp.flip(w, 0)
    return jnp.stack([view[k] for k in range(start, stop)])


def reversed_behind(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.moveaxis(jnp.moveaxis(w, 0, 2)[..., ::-1][..., start:stop], 2, 0)


def rolled(w: jax.Array, start: int, stop: int) -> jax.Array:
    return jnp.roll(w, 1, axis=0)[start:stop]


def in_an_order(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[np.random.default_rng(len(w)).permutation(len(w))[start:stop]]


def ordered_first(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[np.random.default_rng(len(w)).permutation(len(w))][start:stop]


def some_twice(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w[np.array([start, *range(start, stop)])]


def merged(w: jax.Array, start: int, stop: int) -> jax.Array:
    layers, d, e = w.shape
    return w.reshape(layers * d, e)[start * d : stop * d].reshape(-1, d, e)


def merged_with_columns(w: jax.Array, start: int, stop: int) -> jax.Array:
    layers, d, e = w.shape
    flat = jnp.swapaxes(w, 0, 1).reshape(d, layers * e)
    return jnp.swapaxes(flat[:, start * e : stop * e].reshape(d, -1, e), 0, 1)


def raveled(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w.ravel()[start * w[0].size : stop * w[0].size].reshape(-1, *w.shape[1:])


OTHERWISE = [
    reversed_first,
    reversed_one_by_one,
    reversed_behind,
    rolled,
    in_an_order,
    ordered_first,
    some_twice,
    merged,
    merged_with_columns,
    raveled,
]

# Stage s of `stages` takes every `stages`-th row, so all stages have equally many.
Strided = Callable[[jax.Array, int, int], jax.Array]


def strided(w: jax.Array, s: int, stages: int) -> jax.Array:
    return w[s::stages]


def strided_from_behind(w: jax.Array, s: int, stages: int) -> jax.Array:
    return w[len(w) - 1 - s :: -stages]


def strided_in_reverse(w: jax.Array, s: int, stages: int) -> jax.Array:
    return w[::-1][s::stages]


def by_column(w: jax.Array, s: int, stages: int) -> jax.Array:
    return w.reshape(-1, stages, *w.shape[1:])[:, s]


def by_column_and_row(w: jax.Array, s: int, stages: int) -> jax.Array:
    view = w.reshape(-1, stages, *w.shape[1:])
    return jnp.stack([view[r, s] for r in range(len(view))])


def by_arrays(w: jax.Array, s: int, stages: int) -> jax.Array:
    return w.reshape(-1, stages, *w.shape[1:])[np.arange(len(w) // stages), s]


def by_swapped_column(w: jax.Array, s: int, stages: int) -> jax.Array:
    return w.reshape(-1, stages, *w.shape[1:]).swapaxes(0, 1)[s]


def by_last_axis(w: jax.Array, s: int, stages: int) -> jax.Array:
    _, d, e = w.shape
    return jnp.moveaxis(jnp.moveaxis(w, 0, -1).reshape(d, e, -1, stages)[..., s], -1, 0)


def merged_strided(w: jax.Array, s: int, stages: int) -> jax.Array:
    layers, d, e = w.shape
    columns = jnp.moveaxis(w, 0, -1).reshape(d, e * layers)[:, s::stages]
    return jnp.moveaxis(columns.reshape(d, e, -1), -1, 0)


STRIDED = [
    strided,
    strided_from_behind,
    strided_in_reverse,
    by_column,
    by_column_and_row,
    by_arrays,
    by_swapped_column,
    by_last_axis,
    merged_strided,
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("spelling", OTHERWISE, ids=lambda s: s.__name__)
def test_a_spelling_of_rows_otherwise(spelling: Rows) -> None:
    check_step([spelling] * 2, [0, 3, 4], optax.sgd(0.1), False)


@pytest.mark.sample(3)
@pytest.mark.parametrize("spelling", STRIDED, ids=lambda s: s.__name__)
def test_a_spelling_of_strided_rows(spelling: Strided) -> None:
    takes = [functools.partial(spelling, s=s, stages=2) for s in range(2)]
    check_takes(takes, 4, optax.sgd(0.1), False)


OPTIMIZERS = [
    optax.sgd(0.1, momentum=0.9),
    optax.adam(1e-2, eps=1e-3),
    optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-3)),
    optax.MultiSteps(optax.adam(1e-2, eps=1e-3), 2).gradient_transformation(),
]


def circular(draw: random.Random, ranks: int, repeats: int) -> tuple[list[Takes], int]:
    """Stage s takes the s-th block of rows; the blocks go around the ranks `repeats` times."""
    block = draw.randint(1, 3)
    spelling = draw.choice(["blocks", "layers", "last axis"])

    def take(w: jax.Array, s: int) -> jax.Array:
        at = divmod(s, ranks)
        if spelling == "blocks":
            return w.reshape(repeats, ranks, block, *w.shape[1:])[at]
        if spelling == "layers":
            view = w.reshape(repeats, ranks, block, *w.shape[1:])
            return jnp.stack([view[(*at, k)] for k in range(block)])
        view = jnp.moveaxis(w, 0, -1).reshape(*w.shape[1:], repeats, ranks, block)
        return jnp.moveaxis(view[:, :, *at], -1, 0)

    stages = repeats * ranks
    return [functools.partial(take, s=s) for s in range(stages)], stages * block


def uneven(draw: random.Random, stages: int) -> tuple[list[Takes], int]:
    """Stages with different numbers of rows, all selected by the same random spelling."""
    ends = [0, *np.cumsum([draw.randint(1, 3) for _ in range(stages)]).tolist()]
    one = draw.choice(OTHERWISE)  # one for all stages: different orders could share rows
    pairs = zip(ends, ends[1:], strict=False)
    return [functools.partial(one, start=a, stop=b) for a, b in pairs], ends[-1]


def mixed(draw: random.Random, stages: int) -> tuple[list[Takes], int]:
    """Stages that select strided rows, each in a random spelling."""
    rows = draw.randint(1, 3)
    same = [f for f in STRIDED if f not in (strided_from_behind, strided_in_reverse)]
    spellings = draw.choices(same, k=stages)
    takes = [functools.partial(f, s=s, stages=stages) for s, f in enumerate(spellings)]
    return takes, stages * rows


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", seeds(2 * TIMES))
def test_random_orders(seed: int) -> None:
    draw = random.Random(seed)
    ranks = draw.randint(2, 3)
    repeats = draw.choice([1, 2])
    made = [
        lambda: circular(draw, ranks, repeats),
        lambda: uneven(draw, ranks * repeats),
        lambda: mixed(draw, ranks * repeats),
    ]
    takes, layers = made[seed % 3]()
    dtype = draw.choice([jnp.float32, jnp.float32, jnp.bfloat16])
    optimizer = draw.choice(OPTIMIZERS)
    check_takes(takes, layers, optimizer, draw.random() < 0.3, ranks, dtype)


def test_strided_rows_take_the_memory_of_stacked_ones() -> None:
    peaks = []
    for consecutive in (True, False):
        takes = [
            functools.partial(one_by_one, start=4 * s, stop=4 * s + 4)
            if consecutive
            else functools.partial(strided, s=s, stages=2)
            for s in range(2)
        ]
        step = step_of(takes, jaxpp.Std1F1B(2), optax.sgd(0.1), False)
        w, xs = jnp.ones((8, 64, 64)), jnp.ones((2, 1, 64))
        traced = jaxpp.mpmd_jit_with_loop(step, make_mesh(2)).trace_and_place(
            w, optax.sgd(0.1).init(w), xs
        )
        peaks.append(max(rank.peak_bytes for rank in traced.plan.summary()))
    assert peaks[1] < 1.05 * peaks[0]


def test_a_view_from_outside_of_the_loop() -> None:
    def step(w: jax.Array, xs: jax.Array) -> Any:
        def loss(view: jax.Array, x: jax.Array) -> jax.Array:
            for s in range(2):
                for r in range(2):
                    x = jnp.tanh(x @ view[r, s])
                x = jaxpp.mark_stage_end(x)
            return jnp.mean(x**2)

        view = w.reshape(2, 2, WIDTH, WIDTH)
        value, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(view, x), xs, jaxpp.Std1F1B(2)
        )
        return w - 0.1 * grads.reshape(w.shape), value

    w = jax.random.normal(jax.random.key(0), (4, WIDTH, WIDTH))
    xs = jax.random.normal(jax.random.key(1), (3, 2, WIDTH))
    mesh = make_mesh(2)
    found = jaxpp.mpmd_jit_with_loop(step, mesh)(w, xs)
    for a, b in zip(found, jax.jit(step)(w, xs), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)
    shards = found[0].addressable_shards
    assert [shard.data.shape[0] for shard in shards] == [1] * 2 * mesh.jax_mesh.size


def test_rows_of_what_is_made_of_two_leaves() -> None:
    def step(params: Any, xs: jax.Array) -> Any:
        def loss(params: Any, x: jax.Array) -> jax.Array:
            scaled = (params["w"] * jnp.tanh(params["scale"])).astype(jnp.float32)
            for s in range(2):
                for w in scaled.reshape(2, 2, WIDTH, WIDTH)[:, s]:
                    x = jnp.tanh(x @ w)
                x = jaxpp.mark_stage_end(x)
            return jnp.mean(x**2)

        one = lambda x: jax.value_and_grad(loss)(params, x)  # noqa: E731
        value, grads = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2))
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    keys = dict(zip(["w", "scale"], jax.random.split(jax.random.key(0)), strict=True))
    params = {name: jax.random.normal(key, (4, WIDTH, WIDTH)) for name, key in keys.items()}
    xs = jax.random.normal(jax.random.key(1), (3, 2, WIDTH))
    mesh = make_mesh(2)
    found = jaxpp.mpmd_jit_with_loop(step, mesh)(params, xs)
    expected = jax.tree.leaves(jax.jit(step)(params, xs))
    for a, b in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)
    for leaf in found[0].values():
        rows = [shard.data.shape[0] for shard in leaf.addressable_shards]
        assert rows == [1] * 2 * mesh.jax_mesh.size


# --- Leaves that are not cut ------------------------------------------------------------


def test_rows_that_are_not_recognised_are_warned_of() -> None:
    def loss(w: jax.Array, x: jax.Array, order: jax.Array) -> jax.Array:
        for s in range(2):
            rows = jax.lax.dynamic_slice_in_dim(w, order[s], 1)
            x = jaxpp.mark_stage_end(jnp.tanh(x @ rows[0]))
        return jnp.mean(x**2)

    def step(w: jax.Array, order: jax.Array, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(loss)(w, x, order)

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2))

    # On other ranks, JaxPP also warns of axes that nothing uses.
    mesh = mesh_of(2, {})
    w, xs = jnp.ones((2, 512, 512)), jnp.ones((2, 1, 512))
    with pytest.warns(UserWarning, match=r"holds all of w \(2\.0 MiB\)") as caught:
        jaxpp.mpmd_jit_with_loop(step, mesh)(w, jnp.arange(2), xs)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small, xs = jnp.ones((2, 4, 4)), jnp.ones((2, 1, 4))
        jaxpp.mpmd_jit_with_loop(step, mesh)(small, jnp.arange(2), xs)


def of_a_masked_leaf(w: jax.Array, start: int, stop: int) -> jax.Array:
    return (w * jnp.ones(w.shape).at[0, 0].set(2))[start:stop]


def by_a_diagonal(w: jax.Array, start: int, stop: int) -> jax.Array:
    return w.reshape(2, 2, *w.shape[1:])[[0, 1], [start, stop % 2]]


def across_axes(w: jax.Array, start: int, stop: int) -> jax.Array:
    """Regroups the data of four rows in three, across the boundaries of rows."""
    return w.reshape(3, -1, w.shape[2])[start, : w.shape[1]][None]


@pytest.mark.parametrize("spelling", [raveled, of_a_masked_leaf, by_a_diagonal, across_axes])
def test_what_is_not_followed_is_warned_of(spelling: Rows, monkeypatch: Any) -> None:
    monkeypatch.setattr("jaxpp.trace.stage_rows._MOST_IDS", 1 << 14)
    takes = [functools.partial(spelling, start=s, stop=s + 1) for s in range(2)]
    optimizer = optax.sgd(0.1)
    step = step_of(takes, jaxpp.Std1F1B(2), optimizer, False)
    w, xs = jnp.ones((4, 300, 300)), jnp.ones((2, 1, 300))
    mesh = make_mesh(2)
    with pytest.warns(UserWarning, match=r"holds all of w \(1\.4 MiB\)"):
        found, *_ = jaxpp.mpmd_jit_with_loop(step, mesh)(w, optimizer.init(w), xs)
    assert found.on_device_size_in_bytes() == w.nbytes * len(set(mesh.jax_mesh.devices.flat))


def test_known_numbers_under_explicit_axes() -> None:
    """A remainder is a call, whose equations name the mesh."""
    mesh = Mesh(np.array(some_devices(2)), ("data",), axis_types=(AxisType.Explicit,))
    with context_mesh(mesh):
        (eqn,) = jax.make_jaxpr(lambda n: n % 3)(np.int32(7)).eqns
        found: list[Any] = []
        jax.make_jaxpr(lambda: found.append(fold(eqn, [np.int32(7), 3])))()
    assert found == [[1]]
