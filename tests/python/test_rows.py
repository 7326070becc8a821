"""Rows of stacked leaves in random spellings: the numbers of plain JAX, and on each rank the
bytes of its own rows alone.

JPP_TEST_SEED and JPP_TEST_TIMES choose other models.
"""

from __future__ import annotations

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

import jaxpp.api as jaxpp
from equality import make_mesh

WIDTH = 4
SEED = int(os.environ.get("JPP_TEST_SEED") or 0)
TIMES = int(os.environ.get("JPP_TEST_TIMES") or 6)

Rows = Callable[[jax.Array, int, int], jax.Array]


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
]


def step_of(spellings: list[Rows], ends: list[int], optimizer: Any, remat: bool) -> Any:
    """Trains stages that take the rows ends[s] to ends[s + 1], each in its own spelling."""

    def layers(w: jax.Array, x: jax.Array, s: int) -> jax.Array:
        rows = spellings[s](w, ends[s], ends[s + 1])
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, rows)[0]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for s in range(len(spellings)):
            stage = jax.checkpoint(layers, static_argnums=2) if remat else layers
            x = jaxpp.mark_stage_end(stage(w, x, s))
        return jnp.mean(x**2)

    def step(w: jax.Array, state: Any, xs: jax.Array) -> Any:
        schedule = jaxpp.Std1F1B(len(spellings))
        losses, grads = jaxpp.treduce(lambda x: jax.value_and_grad(loss)(w, x), xs, schedule)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state, losses

    return step


def check_step(spellings: list[Rows], ends: list[int], optimizer: Any, remat: bool) -> None:
    step = step_of(spellings, ends, optimizer, remat)
    w = jax.random.normal(jax.random.key(0), (ends[-1], WIDTH, WIDTH))
    xs = jax.random.normal(jax.random.key(1), (3, 2, WIDTH))
    ours = jaxpp.mpmd_jit_with_loop(step, make_mesh(len(spellings)))
    expected, found = [(w, optimizer.init(w))] * 2
    for _ in range(2):
        expected = jax.jit(step)(*expected[:2], xs)
        found = ours(*found[:2], xs)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-6)
    moments = [leaf for leaf in jax.tree.leaves(found[1]) if leaf.ndim == 3]
    for array in (found[0], *moments):
        held = dict.fromkeys(range(len(spellings)), 0)
        ranks = {device: r for r in held for device in array.sharding.mpmd_mesh.devices_of(r)}
        for shard in array.addressable_shards:
            held[ranks[shard.device]] += shard.data.nbytes
        rows = np.diff(ends) * WIDTH * WIDTH * array.dtype.itemsize
        assert list(held.values()) == rows.tolist()
        assert array.on_device_size_in_bytes() == rows.sum()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("spelling", ANY, ids=lambda s: s.__name__)
def test_a_spelling(spelling: Rows, remat: bool) -> None:
    check_step([spelling] * 2, [0, 3, 4], optax.sgd(0.1), remat)


@pytest.mark.parametrize("remat", [False, True])
def test_an_axis_for_stages(remat: bool) -> None:
    check_step([by_reshape] * 3, [0, 2, 4, 6], optax.adam(1e-2), remat)


@pytest.mark.parametrize("seed", range(SEED, SEED + TIMES))
def test_random_spellings(seed: int) -> None:
    draw = random.Random(seed)
    stages = draw.randint(2, 4)
    ends = [0, *np.cumsum([draw.randint(1, 3) for _ in range(stages)]).tolist()]
    optimizer = draw.choice([optax.sgd(0.1), optax.adam(1e-2), optax.adamw(1e-2)])
    check_step(draw.choices(ANY, k=stages), ends, optimizer, draw.random() < 0.5)


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

    w, xs = jnp.ones((2, 512, 512)), jnp.ones((2, 1, 512))
    with pytest.warns(UserWarning, match=r"holds all of w \(2\.0 MiB\)") as caught:
        jaxpp.mpmd_jit_with_loop(step, make_mesh(2))(w, jnp.arange(2), xs)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small, xs = jnp.ones((2, 4, 4)), jnp.ones((2, 1, 4))
        jaxpp.mpmd_jit_with_loop(step, make_mesh(2))(small, jnp.arange(2), xs)
