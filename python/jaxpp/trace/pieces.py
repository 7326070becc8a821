"""Arrays represented as pieces: each piece fills a box of the array, the rest is zero.

A leaf that is stored in parts is such an array. So are its slices and reshapes, and its
gradient, in which each stage fills its own pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp.jax_internals.arrays import key_implementation, sharded_like, wrap_keys
from jaxpp.trace.boxes import (
    Box,
    atoms,
    common_box,
    common_factors,
    groups,
    is_whole,
    matches,
    merged,
    positions,
    sizes,
    split,
    whole_box,
)

__all__ = ["Parted", "Piece", "sum_of"]

_MOST_PIECES = 1 << 12  # limit on the pieces after a reshape


@dataclasses.dataclass(frozen=True)
class Piece:
    """An array whose elements are those of a box, in the same order."""

    box: Box
    array: Any  # its shape may differ from the box's

    def shaped(self) -> Piece:
        shape = sizes(self.box)
        same = jnp.shape(self.array) == shape
        return self if same else Piece(self.box, jnp.reshape(self.array, shape))

    def cut(self, where: Sequence[range], box: Box) -> Piece:
        """The elements at these positions along each axis, as a piece of `box`."""
        if all(at == range(len(own)) for at, own in zip(where, self.box, strict=True)):
            return Piece(box, self.array)
        array = self.shaped().array
        up = [at if at.step > 0 else at[::-1] for at in where]
        limits = [at[-1] + 1 for at in up]
        array = jax.lax.slice(array, [at[0] for at in up], limits, [at.step for at in up])
        back = [axis for axis, at in enumerate(where) if at.step < 0]
        return Piece(box, jax.lax.rev(array, back) if back else array)

    def cuts(self, along: Sequence[Iterable[tuple[range, range]]]) -> Iterator[Piece]:
        """The elements at positions along each axis, given as pairs: destination, ascending,
        and source."""
        for pairs in itertools.product(*along):
            box, where = zip(*pairs, strict=True)
            yield self.cut(where, box)

    def within(self, box: Box) -> Piece | None:
        """The part of the value inside a box, relative to that box."""
        common = common_box(self.box, box)
        if common is None:
            return None
        inside = tuple(map(positions, common, box))
        return self.cut(tuple(map(positions, common, self.box)), inside)


def sum_of(arrays: Iterable[Any]) -> Any:
    """The sum of arrays of equal shapes; of booleans, whether one of them is true."""

    def add(a: Any, b: Any) -> Any:
        return (jax.lax.bitwise_or if a.dtype == jnp.bool_ else jax.lax.add)(a, b)

    return functools.reduce(add, arrays)


def _assembled_keys(pieces: Sequence[Piece], shape: Sequence[int], dtype: Any) -> Any:
    """The same for PRNG keys, from their data."""
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
    found = [
        Piece((*piece.box, *whole_box(data.shape)), jax.random.key_data(piece.shaped().array))
        for piece in pieces
    ]
    return wrap_keys(_assembled(found, (*shape, *data.shape), data.dtype), dtype)


def _assembled(pieces: Sequence[Piece], shape: Sequence[int], dtype: Any) -> Any:
    """An array assembled from zeros and disjoint pieces."""
    if len(pieces) == 1 and is_whole(pieces[0].box, shape):
        return pieces[0].shaped().array
    if key_implementation(dtype):
        return _assembled_keys(pieces, shape, dtype)
    if not pieces:
        return jnp.zeros(shape, dtype)
    for axis, size in enumerate(shape):
        if len(beside := _beside(pieces, axis, size)) > 1:
            parts = [(*shape[:axis], len(own), *shape[axis + 1 :]) for own in beside]
            pairs = zip(beside.values(), parts, strict=True)
            arrays = [_assembled(some, part, dtype) for some, part in pairs]
            return jax.lax.concatenate(arrays, axis)
    zero = jnp.zeros((), dtype)
    padded = []
    for piece in pieces:
        around = [
            (own[0], size - own[-1] - 1, own.step - 1 if len(own) > 1 else 0)
            for own, size in zip(piece.box, shape, strict=True)
        ]
        padded.append(jax.lax.pad(piece.shaped().array, zero, around))
    return sum_of(padded)


def _beside(pieces: Sequence[Piece], axis: int, size: int) -> dict[range, list[Piece]]:
    """Splits pieces along consecutive ranges of an axis; empty if they have no such ranges."""
    found: dict[range, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda p: p.box[axis][0]):
        own = range(len(piece.box[axis]))
        inside = Piece((*piece.box[:axis], own, *piece.box[axis + 1 :]), piece.array)
        found.setdefault(piece.box[axis], []).append(inside)
    ends = itertools.pairwise([0, *(own[-1] + 1 for own in found), size])
    return found if list(found) == [range(a, b) for a, b in ends if a < b] else {}


def _added(pieces: Iterable[Piece], more: Iterable[Piece]) -> list[Piece]:
    """Adds pieces to disjoint pieces; the result is disjoint too."""
    found = {piece.box: piece for piece in pieces}
    for piece in more:
        meets = [p for p in found.values() if common_box(p.box, piece.box)]
        for p in meets:
            del found[p.box]
        boxes = {p.box: None for p in (*meets, piece)}
        for box in atoms(list(boxes)) if len(boxes) > 1 else boxes:
            arrays = [own.shaped().array for p in (*meets, piece) if (own := p.within(box))]
            found[box] = Piece(box, sum_of(arrays))
    return list(found.values())


@dataclasses.dataclass
class Parted:
    """A value as disjoint pieces."""

    pieces: list[Piece]
    aval: Any  # of the whole array
    leaves: frozenset[int]  # leaves that it depends on

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(piece.box for piece in self.pieces)

    def has_gaps(self) -> bool:
        return sum(math.prod(sizes(box)) for box in self.boxes) < math.prod(self.aval.shape)

    def is_cut_along(self, axes: Iterable[int]) -> bool:
        whole = whole_box(self.aval.shape)
        return any(box[axis] != whole[axis] for axis in axes for box in self.boxes)

    def within(self, box: Box) -> Any:
        pieces = [inside for p in self.pieces if (inside := p.within(box))]
        return sharded_like(_assembled(pieces, sizes(box), self.aval.dtype), self.aval)

    @functools.cached_property
    def whole(self) -> Any:
        return self.within(whole_box(self.aval.shape))

    def cut_at(self, boxes: Iterable[Box]) -> Parted:
        """The pieces for other boxes, including boxes of zeros."""
        return self.of(Piece(box, self.within(box)) for box in boxes)

    def of(self, pieces: Iterable[Piece], aval: Any = None) -> Parted:
        """Another value that depends on the same leaves."""
        aval = self.aval if aval is None else aval
        return Parted([piece.shaped() for piece in pieces], aval, self.leaves)

    def __add__(self, other: Parted) -> Parted:
        pieces = _added(self.pieces, other.pieces)
        return Parted(pieces, self.aval, self.leaves | other.leaves)

    def transposed(self, permutation: Sequence[int], aval: Any) -> Parted:
        found = []
        for piece in self.pieces:
            box = tuple(piece.box[axis] for axis in permutation)
            found.append(Piece(box, jax.lax.transpose(piece.array, permutation)))
        return self.of(found, aval)

    def reshaped(self, aval: Any) -> Parted | None:
        """The value in another shape; None if its pieces would not be boxes or too many."""
        pieces = _reshaped(self.pieces, self.aval.shape, aval.shape)
        return None if pieces is None else self.of(pieces, aval)

    def taken(self, places: Sequence[Sequence[int]], aval: Any) -> Parted | None:
        """The elements at these places along each axis, in another shape; None as above."""
        found: list[Piece] = []
        leaves = self.leaves
        for piece in self.pieces:
            pairs = zip(places, piece.box, strict=True)
            some = list(piece.cuts([matches(at, own) for at, own in pairs]))
            # Using all of some rows does not require the whole leaf.
            leaves = leaves if some else frozenset()
            found += some
        pieces = _reshaped(found, tuple(map(len, places)), aval.shape)
        return (
            None
            if pieces is None
            else dataclasses.replace(self.of(pieces, aval), leaves=leaves)
        )

    def scattered(self, places: Sequence[Sequence[int]], aval: Any) -> Parted:
        """Scatters the elements to these places of zeros; elements at the same place are
        added."""
        found: list[Piece] = []
        for piece in self.pieces:
            along = []
            for at, own, size in zip(places, piece.box, aval.shape, strict=True):
                some = matches(at[own.start : own.stop : own.step], range(size))
                along.append([(b, a) if b.step > 0 else (b[::-1], a[::-1]) for a, b in some])
            found += piece.cuts(along)
        return self.of(_added([], found), aval)


# --- Reshapes ---------------------------------------------------------------------------


def _split(piece: Piece, axis: int, size: int, inner: int) -> list[Piece]:
    """Splits an axis into two, the second of size `inner`."""
    box, found = piece.box, []
    for where, *both in split(box[axis], size, inner):
        at = [range(len(own)) for own in box]
        at[axis] = where
        found.append(piece.cut(at, (*box[:axis], *both, *box[axis + 1 :])))
    return found


def _merge(piece: Piece, axis: int, inner: int) -> list[Piece]:
    """Merges an axis with the next one, of size `inner`."""
    box, found = piece.box, []
    for *both, own in merged(box[axis], box[axis + 1], inner):
        at = [range(len(own)) for own in box]
        at[axis : axis + 2] = both
        found.append(piece.cut(at, (*box[:axis], own, *box[axis + 2 :])))
    return found


def _reshaped(
    pieces: list[Piece], shape: Sequence[int], new_shape: Sequence[int]
) -> list[Piece] | None:
    axes = groups(shape, new_shape) if pieces else []  # else a size may be 0
    for (first, end), (new_first, new_end) in reversed(axes):
        old, new = shape[first:end], new_shape[new_first:new_end]
        if old == new:
            continue
        if all(is_whole(p.box[first:end], old) for p in pieces):
            pieces = [
                Piece((*p.box[:first], *whole_box(new), *p.box[end:]), p.array) for p in pieces
            ]
            continue
        found = common_factors(old, new)
        if found is None:
            return None
        pieces = _refactored(pieces, first, old, *found)
        if len(pieces) > _MOST_PIECES:
            return None
    return pieces


def _refactored(
    pieces: list[Piece],
    first: int,
    shape: Sequence[int],
    factors: Sequence[Sequence[int]],
    new_factors: Sequence[Sequence[int]],
) -> list[Piece]:
    """Reshapes the axes from `first` on by splitting them into factors and merging these."""
    for axis in reversed(range(first, first + len(shape))):
        own = factors[axis - first]
        if not own:
            pieces = [Piece(p.box[:axis] + p.box[axis + 1 :], p.array) for p in pieces]
        for k in range(len(own) - 1):
            size, inner = math.prod(own[k:]), math.prod(own[k + 1 :])
            pieces = [q for p in pieces for q in _split(p, axis + k, size, inner)]
    axis = first + sum(map(len, factors))
    for own in reversed(new_factors):
        axis -= len(own)
        if not own:
            pieces = [Piece((*p.box[:axis], range(1), *p.box[axis:]), p.array) for p in pieces]
        for k in reversed(range(len(own) - 1)):
            inner = math.prod(own[k + 1 :])
            pieces = [q for p in pieces for q in _merge(p, axis + k, inner)]
    return pieces
