"""Arrays that are tracked as pieces: reshapes, transpositions, takes and their transposes on
the pieces give what NumPy gives on the whole array.

JPP_TEST_SEED and JPP_TEST_TIMES choose other arrays.
"""

from __future__ import annotations

import math
import os
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpp.trace.boxes import Bounds, common_range
from jaxpp.trace.pieces import Parted, Piece

SEED = int(os.environ.get("JPP_TEST_SEED") or 0)
TIMES = int(os.environ.get("JPP_TEST_TIMES") or 20)


def aval_of(array: np.ndarray) -> Any:
    return jax.core.ShapedArray(array.shape, array.dtype)


def by_rows(array: np.ndarray, bounds: list[int]) -> Parted:
    boxes = Bounds(0, tuple(bounds)).boxes(array.shape)
    pieces = [Piece(box, jnp.asarray(array[box[0].start : box[0].stop])) for box in boxes]
    return Parted(pieces, aval_of(array), frozenset([0]))


def check(value: Parted, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(value.whole, expected)
    covered = np.zeros(expected.shape, int)
    for piece in value.pieces:
        assert piece.array.shape == tuple(map(len, piece.box))
        covered[np.ix_(*piece.box)] += 1
    assert covered.max(initial=0) <= 1
    assert value.has_gaps() == (not covered.all())
    np.testing.assert_array_equal(expected[covered == 0], 0)


def factors_of(number: int) -> list[int]:
    least = next((k for k in range(2, number) if number % k == 0), number)
    return [] if number == 1 else [least, *factors_of(number // least)]


def some_shape(draw: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A random shape with the same number of elements, made by merging and splitting axes."""
    factors = [f for size in shape for f in factors_of(size)]
    if draw.random() < 0.1:
        draw.shuffle(factors)
    found = [1]
    for factor in factors:
        if draw.random() < 0.5:
            found[-1] *= factor
        else:
            found.append(factor)
    return tuple(found)


def some_places(draw: random.Random, size: int) -> Any:
    kind = draw.choice(["all", "all", "slice", "reversed", "list"])
    if kind == "all" or size == 1:
        return range(size)
    first, last = sorted(draw.sample(range(size + 1), 2))
    some = range(first, last, draw.randint(1, 3))
    if kind == "reversed":
        return some[::-1]
    return some if kind == "slice" else draw.choices(range(size), k=draw.randint(1, size))


def change(draw: random.Random, value: Parted, array: np.ndarray) -> tuple[Parted | None, Any]:
    kind = draw.choice(["reshape", "reshape", "transpose", "take", "place", "add"])
    if kind == "reshape":
        new = array.reshape(some_shape(draw, array.shape))
        return value.reshaped(aval_of(new)), new
    if kind == "transpose":
        order = draw.sample(range(array.ndim), array.ndim)
        return value.transposed(order, aval_of(array.transpose(order))), array.transpose(order)
    if kind == "add":
        places = [range(size)[draw.randrange(size) :] for size in array.shape]
        other = value.taken(places, aval_of(array[np.ix_(*places)]))
        assert other is not None
        total = array.copy()
        total[np.ix_(*places)] += array[np.ix_(*places)]
        return value + other.scattered(places, aval_of(array)), total
    places = [some_places(draw, size) for size in array.shape]
    if kind == "take":
        new = array[np.ix_(*places)]
        return value.taken(places, aval_of(new)), new
    new = np.zeros([size + draw.randint(0, 2) for size in array.shape], array.dtype)
    places = [draw.choices(range(new.shape[k]), k=size) for k, size in enumerate(array.shape)]
    if draw.random() < 0.7:
        starts = [draw.randint(0, b - a) for a, b in zip(array.shape, new.shape, strict=True)]
        places = [range(at, at + size) for at, size in zip(starts, array.shape, strict=True)]
    np.add.at(new, np.ix_(*places), array)
    return value.scattered(places, aval_of(new)), new


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(SEED, SEED + TIMES))
def test_as_numpy(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.choice([2, 3, 4, 6]) for _ in range(draw.randint(1, 3)))
    array = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    inner = draw.sample(range(1, shape[0]), draw.randint(1, shape[0] - 1))
    value = by_rows(array, [0, *sorted(inner), shape[0]])
    check(value, array)
    for _ in range(6):
        changed, expected = change(draw, value, array)
        if changed is None or expected.size == 0 or expected.size > 1000:
            continue
        value, array = changed, expected
        check(value, array)


@pytest.mark.parametrize("seed", range(SEED, SEED + TIMES))
def test_common_ranges(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):
        a, b = (
            range(draw.randint(0, 9), draw.randint(1, 40), draw.randint(1, 7)) for _ in "ab"
        )
        assert list(common_range(a, b)) == sorted({*a} & {*b})


def test_rows_stay_rows() -> None:
    array = np.arange(48, dtype=np.int32).reshape(6, 2, 4)
    value = by_rows(array, [0, 2, 4, 6])

    def reshaped(*shape: int) -> Parted:
        found = value.reshaped(aval_of(array.reshape(shape)))
        assert found is not None
        return found

    assert [p.box for p in reshaped(3, 2, 8).pieces] == [
        (range(k, k + 1), range(2), range(8)) for k in range(3)
    ]
    ends = [range(0, 16), range(16, 32), range(32, 48)]
    assert [p.box for p in reshaped(48).pieces] == [(own,) for own in ends]
    assert value.reshaped(aval_of(array.reshape(4, 3, 4))) is None
    column = reshaped(3, 2, 2, 4).taken(
        [range(3), range(1, 2), range(2), range(4)], aval_of(array[1::2])
    )
    assert column is not None and [len(p.box[0]) for p in column.pieces] == [1, 1, 1]
