"""Boxes of an array: a `range` of elements, possibly with a step, along each axis.

These functions compute how slices, reversals, transpositions and reshapes map boxes, without
touching elements. Ranges are ascending. A result of pairs has in each pair the positions in the
input and the resulting box or range.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

__all__ = [
    "Bounds",
    "Box",
    "atoms",
    "common_box",
    "common_factors",
    "common_range",
    "groups",
    "is_whole",
    "matches",
    "merged",
    "positions",
    "sizes",
    "split",
    "whole_box",
]

Box: TypeAlias = tuple[range, ...]


def whole_box(shape: Sequence[int]) -> Box:
    return tuple(map(range, shape))


class Bounds(NamedTuple):
    """How an array is cut into parts that are ranges along one axis."""

    axis: int
    ends: tuple[int, ...]  # 0, the ends of the parts, the size of the axis

    def ranges(self) -> list[tuple[int, int]]:
        """Where each part begins and ends."""
        return list(itertools.pairwise(self.ends))

    def resized(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape with another size along the axis."""
        return (*shape[: self.axis], size, *shape[self.axis + 1 :])

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole array, from that of a part."""
        return self.resized(part, self.ends[-1])

    def boxes(self, shape: Sequence[int]) -> list[Box]:
        """The box of each part of an array of this shape."""
        rest = whole_box(shape)
        return [
            (*rest[: self.axis], range(a, b), *rest[self.axis + 1 :]) for a, b in self.ranges()
        ]


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(map(len, box))


def is_whole(box: Box, shape: Sequence[int]) -> bool:
    return sizes(box) == tuple(shape)


def _progression(start: int, step: int, count: int) -> range:
    return range(start, start + step * count, step) if step else range(start, start + 1)


def common_range(a: range, b: range) -> range:
    """The intersection of two ranges."""
    if not (a and b):
        return range(0)
    shared, step = math.gcd(a.step, b.step), math.lcm(a.step, b.step)
    if (b.start - a.start) % shared:
        return range(0)
    # The first common element from a.start on, by the Chinese remainder theorem.
    modulus = b.step // shared
    ahead = (b.start - a.start) // shared * pow(a.step // shared, -1, modulus) % modulus
    start = a.start + a.step * ahead
    start += max(0, -((start - b.start) // step)) * step
    return range(start, min(a[-1], b[-1]) + 1, step)


def common_box(a: Box, b: Box) -> Box | None:
    found = tuple(x if x == y else common_range(x, y) for x, y in zip(a, b, strict=True))
    return found if all(found) else None


def positions(some: range, own: range) -> range:
    """The positions within `own` of the elements `some`, a subset of it."""
    step = some.step // own.step if len(some) > 1 else 1
    return _progression((some.start - own.start) // own.step, step, len(some))


def _progressions(places: Sequence[int]) -> Iterator[range]:
    """Splits places into consecutive ranges, ascending or descending."""
    if isinstance(places, range):
        yield places
        return
    at = 0
    while at < len(places):
        count, step = 1, 1
        if at + 1 < len(places) and places[at + 1] != places[at]:
            step = places[at + 1] - places[at]
            while at + count < len(places) and places[at + count] == places[at] + count * step:
                count += 1
        yield _progression(places[at], step, count)
        at += count


def matches(places: Sequence[int], own: range) -> Iterator[tuple[range, range]]:
    """The places that are elements of `own`, as pairs: (positions in `places`, positions
    in `own`). The latter descend if the places do."""
    at = 0
    for run in _progressions(places):
        ascending = run if run.step > 0 else run[::-1]
        if found := common_range(ascending, own):
            first, second = positions(found, ascending), positions(found, own)
            if run.step < 0:
                last = len(run) - 1
                first, second = (
                    _progression(last - first[-1], first.step, len(first)),
                    second[::-1],
                )
            yield _progression(at + first.start, first.step, len(first)), second
        at += len(run)


def _at(own: range, where: range) -> range:
    return own[where.start : where.stop : where.step]


# --- Reshapes ---------------------------------------------------------------------------


def groups(
    shape: Sequence[int], new_shape: Sequence[int]
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """The minimal groups of axes (first, end) in both shapes that a reshape maps to each other.
    Neither shape has a size of 0."""
    found = []
    i = j = 0
    while i < len(shape) or j < len(new_shape):
        first, new_first, size, new_size = i, j, 1, 1
        while size != new_size or (i, j) == (first, new_first):
            if i < len(shape) and size <= new_size:
                size, i = size * shape[i], i + 1
            else:
                new_size, j = new_size * new_shape[j], j + 1
        found.append(((first, i), (new_first, j)))
    return found


def common_factors(
    shape: Sequence[int], new_shape: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]] | None:
    """Factors each axis of both shapes into one common list of factors; None if impossible."""
    rest, new_rest = list(shape), list(new_shape)
    factors: list[list[int]] = [[] for _ in shape]
    new_factors: list[list[int]] = [[] for _ in new_shape]
    i = j = 0
    while True:
        while i < len(rest) and rest[i] == 1:
            i += 1
        while j < len(new_rest) and new_rest[j] == 1:
            j += 1
        if i == len(rest) or j == len(new_rest):
            return factors, new_factors
        factor = min(rest[i], new_rest[j])
        if rest[i] % factor or new_rest[j] % factor:
            return None
        factors[i].append(factor)
        new_factors[j].append(factor)
        rest[i] //= factor
        new_rest[j] //= factor


def split(own: range, size: int, inner: int) -> list[tuple[range, range, range]]:
    """Splits an axis of `size` elements into two, the second of size `inner`: positions in
    `own`, and the ranges along both axes."""
    if len(own) == size:
        return [(range(size), range(size // inner), range(inner))]
    if len(own) == 1 or own.step % inner == 0:
        outer = _progression(own.start // inner, max(own.step // inner, 1), len(own))
        return [(range(len(own)), outer, range(own.start % inner, own.start % inner + 1))]
    found: list[tuple[range, range, range]] = []
    at = 0
    for block in range(own[0] // inner, own[-1] // inner + 1):
        some = common_range(own, range(block * inner, (block + 1) * inner))
        some = _progression(some.start - block * inner, some.step, len(some))
        if not some:
            continue
        rows, outer, last = found[-1] if found else (range(0), range(0), range(0))
        if last == some and outer.stop == block:
            found[-1] = (range(rows.start, at + len(some)), range(outer.start, block + 1), some)
        else:
            found.append((range(at, at + len(some)), range(block, block + 1), some))
        at += len(some)
    return found


def merged(outer: range, own: range, inner: int) -> list[tuple[range, range, range]]:
    """Merges two axes, the second of size `inner`: positions in both, and the range along the
    merged axis."""
    start, count = outer.start * inner + own.start, len(outer) * len(own)
    every, all_own = range(len(outer)), range(len(own))
    if len(own) == 1:
        return [(every, all_own, _progression(start, outer.step * inner, count))]
    if len(outer) == 1 or outer.step * inner == own.step * len(own):
        return [(every, all_own, _progression(start, own.step, count))]
    if len(outer) <= len(own):
        ones = ((range(k, k + 1), all_own) for k in every)
    else:
        ones = ((every, range(k, k + 1)) for k in all_own)
    return [
        (rows, columns, merged(_at(outer, rows), _at(own, columns), inner)[0][2])
        for rows, columns in ones
    ]


# --- Overlaps ---------------------------------------------------------------------------


def atoms(boxes: Sequence[Box]) -> list[Box]:
    """Disjoint boxes such that each given box is a union of some of them."""
    along_axes = []
    for own in map(dict.fromkeys, zip(*boxes, strict=True)):
        size = max(r[-1] for r in own) + 1
        member = np.zeros((len(own), size), bool)
        for row, r in zip(member, own, strict=True):
            row[r.start : r.stop : r.step] = True
        _, kind = np.unique(member, axis=1, return_inverse=True)
        kinds = [np.flatnonzero(kind == k).tolist() for k in range(kind.max() + 1)]
        along_axes.append([r for places in kinds for r in _progressions(places)])
    found = itertools.product(*along_axes)
    return [box for box in found if any(common_box(box, b) == box for b in boxes)]
