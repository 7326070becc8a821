"""Evaluates equations on values in parts, except those that contain jaxprs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import Sharding

from jaxpp.jax_internals.arrays import sharded_like
from jaxpp.jax_internals.jaxprs import bind
from jaxpp.trace.boxes import Bounds, Box, common_box, is_whole, sizes, whole_box
from jaxpp.trace.memories import move_of_one
from jaxpp.trace.pieces import Parted, Piece, sum_of
from jaxpp.trace.rows import gathered_places, moved_axes, scattered_values
from jaxpp.trace.stage_rows import LeafCuts, constrained_axes, is_elementwise, is_reshape

__all__ = ["PartArrays"]

_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}

# These treat the matrices along the last two axes one by one.
_OF_MATRICES = {"cholesky", "eigh", "svd", "qr", "lu", "triangular_solve", "tridiagonal"}
_ALONG_AXIS = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}

# Linear primitives: zeros map to zeros, sums of pieces to sums.
_KEEPS_ZEROS = ("add_any", "convert_element_type", "neg", "copy")


class PartArrays:
    """Evaluates equations that contain no jaxprs, and records which leaves they need whole."""

    def __init__(self, parting: LeafCuts) -> None:
        self.parting = parting
        self.refused: set[int] = set()  # leaves that are needed whole
        self.wanted: set[int] = set()  # leaves that are combined with parted values
        self.tags: dict[int, frozenset[int]] = {}  # id of a whole value -> its leaves
        self.keep: list[Any] = []  # keeps values alive, so that their ids stay unique
        # id of a whole value -> the operand that it broadcasts, and the axes of that
        self.broadcasts: dict[int, tuple[Any, Sequence[int]]] = {}
        # By shape: the cuts of values that are views of leaves.
        self.views: dict[tuple[int, ...], list[tuple[Box, ...]]] = {}

    def tag(self, value: Any, leaves: Iterable[int]) -> None:
        self.keep.append(value)
        self.tags[id(value)] = frozenset(leaves)

    def as_whole(self, value: Any) -> Any:
        if not isinstance(value, Parted):
            return value
        self.refused |= value.leaves
        return value.whole

    def layouts(self, shape: tuple[int, ...]) -> list[tuple[Box, ...]]:
        """The ways in which values of this shape may be cut."""
        bounds = self.parting.of(shape)
        parts = [tuple(bounds.boxes(shape))] if bounds else []
        return [*parts, *self.views.get(shape, ())]

    def made(self, value: Parted) -> Any:
        """The value, as an array if it is a single piece. Records how it is cut, because values
        written into zeros of its shape are its gradients."""
        shape = value.aval.shape
        if len(value.pieces) == 1 and is_whole(value.boxes[0], shape):
            return value.pieces[0].array
        if value.boxes not in self.layouts(shape) and not value.has_gaps():
            self.views.setdefault(shape, []).append(value.boxes)
        return value

    def is_zero(self, value: Any) -> bool:
        value, _ = self.broadcasts.get(id(value), (value, ()))
        known = not isinstance(value, jax.core.Tracer | Parted) and np.ndim(value) == 0
        is_key = jnp.issubdtype(getattr(value, "dtype", bool), jax.dtypes.prng_key)
        return known and not is_key and not np.any(np.asarray(value))

    def bind(self, eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
        return bind(eqn.primitive, {**eqn.params, **changes}, operands)

    def plain(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Evaluates an equation without parts; records the leaves that its results depend
        on."""
        outs = self.bind(eqn, operands)
        if is_elementwise(eqn) or constrained_axes(eqn) is not None:
            shape = eqn.outvars[0].aval.shape
            leaves = [
                self.tags.get(id(o), frozenset())
                for o, v in zip(operands, eqn.invars, strict=True)
                if v.aval.shape == shape
            ]
            if found := frozenset().union(*leaves):
                self.tag(outs[0], found)
        if eqn.primitive.name == "broadcast_in_dim":
            self.keep.append(outs[0])
            self.broadcasts[id(outs[0])] = operands[0], eqn.params["broadcast_dimensions"]
        return outs

    def on_parts(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        """The results of an equation of which some operands are in parts; None if it needs
        whole operands."""
        name = eqn.primitive.name
        if isinstance(operands[0], Parted):
            if (outs := self.rearranged(eqn, operands)) is not None:
                return outs
        if is_elementwise(eqn):
            return [self.elementwise(eqn, operands)]
        if name in _REDUCTIONS:
            return [self.reduce(eqn, operands[0])]
        if name == "dot_general":
            return [self.product(eqn, operands)]
        if (mixed := _mixed_axes(eqn)) is not None:
            return self.batched(eqn, operands, mixed)
        return None

    # --- Equations on parts ---

    def moved(self, eqn: JaxprEqn, number: int, operand: Any) -> Any:
        """One array of a `device_put`, piece by piece unless that also reshards it."""
        aval, one = eqn.outvars[number].aval, move_of_one(eqn, number)
        sharded = isinstance(eqn.params["devices"][number], Sharding)
        if isinstance(operand, Parted) and not sharded:
            pieces = [Piece(p.box, self.bind(eqn, [p.array], **one)[0]) for p in operand.pieces]
            return operand.of(pieces, aval)
        (out,) = self.bind(eqn, [self.as_whole(operand)], **one)
        if leaves := self.tags.get(id(operand)):
            self.tag(out, leaves)
        return out

    def place(self, eqn: JaxprEqn, operands: list[Any]) -> Any | None:
        """The transpose of reading rows: rows of a gradient, surrounded by zeros."""
        aval: Any = eqn.outvars[0].aval if eqn.outvars else None
        layouts = self.layouts(aval.shape) if hasattr(aval, "shape") else []
        if not layouts or (scattered := scattered_values(eqn, operands, self.is_zero)) is None:
            return None
        parted = any(isinstance(each.value, Parted) for each in scattered)
        found = Parted([], aval, frozenset())
        for each in scattered:
            value = each.value
            own = jax.core.ShapedArray(each.shape, aval.dtype)
            if not isinstance(value, Parted):
                value = Parted([Piece(whole_box(each.shape), value)], own, frozenset())
            elif value.aval.shape != each.shape:
                value = value.reshaped(own)
            if value is None:
                return None
            found += value.scattered(each.places, aval)
        outside = (
            common_box(a, b) is None for a in found.boxes for boxes in layouts for b in boxes
        )
        return self.made(found) if parted or any(outside) else None

    def rearranged(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        """Equations that read rows of a value or reshape it; None for others."""
        value, *others = operands
        if any(isinstance(o, Parted) for o in others):
            return None
        avals: list[Any] = [v.aval for v in eqn.outvars]
        if (found := gathered_places(eqn, operands)) is not None:
            outs = [value.taken(at, aval) for at, aval in zip(found, avals, strict=True)]
        elif (permutation := moved_axes(eqn)) is not None:
            outs = [value.transposed(permutation, avals[0])]
        elif is_reshape(eqn):
            outs = [value.reshaped(avals[0])]
        elif eqn.primitive.name == "broadcast_in_dim":
            outs = [self.broadcast(eqn, value)]
        elif (divided := constrained_axes(eqn)) is not None:
            outs = [self.constrained(eqn, value, divided)]
        else:
            return None
        return None if None in outs else [self.made(o) for o in outs]

    def broadcast(self, eqn: JaxprEqn, value: Parted) -> Parted:
        aval: Any = eqn.outvars[0].aval
        places = eqn.params["broadcast_dimensions"]
        pieces = []
        for piece in value.pieces:
            ranges = list(whole_box(aval.shape))
            for axis, own, size in zip(places, piece.box, value.aval.shape, strict=True):
                ranges[axis] = own if size == aval.shape[axis] else ranges[axis]
            box = tuple(ranges)
            (array,) = self.bind(eqn, [piece.shaped().array], shape=sizes(box))
            pieces.append(Piece(box, array))
        return value.of(pieces, aval)

    def constrained(self, eqn: JaxprEqn, value: Parted, divided: set[int]) -> Parted | None:
        """The value with each piece sharded like the whole; None if pieces are cut along an
        axis that the constraint divides over devices."""
        if value.is_cut_along(divided):
            return None
        arrays = ((p.box, p.shaped().array) for p in value.pieces)
        pieces = [Piece(box, self.bind(eqn, [array])[0]) for box, array in arrays]
        return value.of(pieces, eqn.outvars[0].aval)

    def part_of(self, value: Any, box: Box) -> Any:
        """The part of an operand in a box."""
        if isinstance(value, Parted):
            return value.within(box)
        if jnp.shape(value) == ():
            return value
        if id(value) in self.broadcasts:
            operand, places = self.broadcasts[id(value)]
            pairs = zip(places, jnp.shape(operand), strict=True)
            own = tuple(box[axis] if size > 1 else range(size) for axis, size in pairs)
            part = jax.lax.broadcast_in_dim(self.part_of(operand, own), sizes(box), places)
            return sharded_like(part, jax.typeof(value))
        self.wanted |= self.tags.get(id(value), frozenset())
        return Piece(whole_box(value.shape), value).cut(box, box).array

    def boxes_for(self, values: Sequence[Parted]) -> tuple[Box, ...] | None:
        """A common cut of operands that covers the whole array; None if their rows
        differ."""
        owners = {o.boxes for o in values if o.leaves} or {values[0].boxes}
        if len(owners) == 1 and not any(o.has_gaps() for o in values if o.boxes in owners):
            return owners.pop()
        layouts = self.layouts(values[0].aval.shape)
        fitting = [boxes for boxes in layouts if all(_fits(own, boxes) for own in owners)]
        if not fitting and not any(o.leaves for o in values):
            fitting = layouts
        return fitting[0] if fitting else None

    def in_rows(self, value: Any) -> Any:
        """A loop's result, cut like the leaves of its shape, if there are any."""
        bounds = None
        if isinstance(value, Parted):
            bounds = self.parting.of(value.aval.shape)
        if bounds is None:
            return value
        boxes = bounds.boxes(value.aval.shape)
        some = [b for b in boxes if any(common_box(b, own) for own in value.boxes)]
        return value.cut_at(some)

    def by_rows(self, value: Any) -> Any:
        """The step's result with all parts, in order."""
        if not isinstance(value, Parted):
            return value
        if not value.pieces:
            return value.whole
        shape, axis = value.aval.shape, self.axis_of(value)
        parts = value.of(sorted(value.pieces, key=lambda piece: piece.box[axis][0]))
        bounds = self.bounds_of(parts)
        if list(parts.boxes) == bounds.boxes(shape) and bounds.ends[-1] == shape[axis]:
            return parts
        known = self.parting.of(shape)
        return value.cut_at(known.boxes(shape)) if known else value.whole

    def axis_of(self, value: Parted) -> int:
        """The axis along which a result of the step is cut."""
        known = self.parting.of(value.aval.shape)
        return known.axis if known else 0

    def bounds_of(self, value: Parted) -> Bounds:
        """Where the pieces of a result end."""
        axis = self.axis_of(value)
        return Bounds(axis, (0, *(box[axis][-1] + 1 for box in value.boxes)))

    def elementwise(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        parted = [o for o in operands if isinstance(o, Parted)]
        aval: Any = eqn.outvars[0].aval
        if eqn.primitive.name in _KEEPS_ZEROS and len(parted) == len(operands):
            if len(operands) == 2:
                return self.made(parted[0] + parted[1])
            changed = [Piece(p.box, self.bind(eqn, [p.array])[0]) for p in parted[0].pieces]
            return parted[0].of(changed, aval)
        boxes = self.boxes_for([_stretched(o, aval) for o in parted])
        if boxes is None:
            return self.bind(eqn, [self.as_whole(o) for o in operands])[0]
        pieces = []
        for box in boxes:
            pairs = zip(operands, eqn.invars, strict=True)
            inputs = [self.part_of(o, _within(box, v.aval.shape)) for o, v in pairs]
            pieces.append(Piece(box, self.bind(eqn, inputs)[0]))
        return Parted(pieces, aval, frozenset().union(*(o.leaves for o in parted)))

    def reduce(self, eqn: JaxprEqn, value: Parted) -> Any:
        combine, axes = _REDUCTIONS[eqn.primitive.name], eqn.params["axes"]
        if eqn.primitive.name != "reduce_sum":  # zeros add nothing
            value = value.cut_at(self.boxes_for([value]) or [whole_box(value.aval.shape)])
        pieces = [
            Piece(_without(p.box, axes), self.bind(eqn, [p.array])[0]) for p in value.pieces
        ]
        return self.combined(eqn, [value], pieces, combine)

    def combined(
        self,
        eqn: JaxprEqn,
        operands: list[Any],
        pieces: list[Piece] | None,
        combine: Callable[[Any, Any], Any],
    ) -> Any:
        """The result of an equation from pieces, of which those with the same box are
        combined. It is computed from the whole operands if others overlap, or if `pieces` is
        None."""
        found: dict[Box, Any] = {}
        for box, array in ((p.box, p.array) for p in pieces or ()):
            found[box] = combine(found[box], array) if box in found else array
        if pieces is None or any(common_box(a, b) for a, b in itertools.combinations(found, 2)):
            return self.bind(eqn, [self.as_whole(o) for o in operands])[0]
        aval: Any = eqn.outvars[0].aval
        if not found:
            return sharded_like(jnp.zeros(aval.shape, aval.dtype), aval)
        leaves = frozenset().union(*(o.leaves for o in operands if isinstance(o, Parted)))
        return self.made(Parted([Piece(b, a) for b, a in found.items()], aval, leaves))

    def product(self, eqn: JaxprEqn, operands: list[Any]) -> Any:
        """A `dot_general`: the sum of the products of pieces, for example the inner product of
        two leaves."""
        k = 0 if isinstance(operands[0], Parted) else 1
        value, other = operands[k], operands[1 - k]
        shape = eqn.invars[1 - k].aval.shape
        summed, batch = eqn.params["dimension_numbers"]
        # An axis of `other` -> the axis of `value` beside it.
        axes = dict(zip((*batch[1 - k], *summed[1 - k]), (*batch[k], *summed[k]), strict=True))
        boxes = [
            tuple(
                box[axes[axis]] if axis in axes else own
                for axis, own in enumerate(whole_box(shape))
            )
            for box in value.boxes
        ]
        pieces: list[Piece] | None = None
        rest = [axis for axis in range(len(shape)) if axis not in axes]
        if not isinstance(other, Parted) or (
            _fits(other.boxes, boxes) and not other.is_cut_along(rest)
        ):
            pieces = []
            for piece, box in zip(value.pieces, boxes, strict=True):
                pair = [piece.shaped().array, self.part_of(other, box)]
                free = [_without(piece.box, axes.values()), _without(box, axes)]
                order = 1 if k == 0 else -1
                (array,) = self.bind(eqn, pair[::order])
                shared = tuple(piece.box[axis] for axis in batch[k])
                pieces.append(Piece(sum(free[::order], shared), array))
        return self.combined(eqn, operands, pieces, lambda a, b: sum_of((a, b)))

    def batched(self, eqn: JaxprEqn, operands: list[Any], mixed: set[int]) -> list[Any]:
        """An equation that mixes elements only along the `mixed` axes of its operands."""
        parted = [o for o in operands if isinstance(o, Parted)]
        boxes = self.boxes_for([_stretched(o, parted[0].aval) for o in parted])
        if boxes is None or any(o.is_cut_along(mixed) for o in parted):
            return self.bind(eqn, [self.as_whole(o) for o in operands])

        def in_shape(box: Box, shape: Sequence[int]) -> Box:
            pairs = enumerate(whole_box(shape))
            return tuple(own if axis in mixed else box[axis] for axis, own in pairs)

        avals: list[Any] = [v.aval for v in eqn.outvars]
        pieces: list[list[Piece]] = [[] for _ in avals]
        for box in boxes:
            pairs = zip(operands, eqn.invars, strict=True)
            parts = [self.part_of(o, in_shape(box, v.aval.shape)) for o, v in pairs]
            for some, out, aval in zip(pieces, self.bind(eqn, parts), avals, strict=True):
                some.append(Piece(in_shape(box, aval.shape), out))
        leaves = frozenset().union(*(o.leaves for o in parted))
        return [Parted(some, aval, leaves) for some, aval in zip(pieces, avals, strict=True)]

    def cut_like(self, value: Any, like: Parted | None) -> Any:
        """The value cut into the parts of `like`, without gaps; None: whole."""
        if like is None:
            return self.as_whole(value)
        return like.of(Piece(box, self.part_of(value, box)) for box in like.boxes)


def _mixed_axes(eqn: JaxprEqn) -> set[int] | None:
    """The axes along which an equation mixes elements; None if that is not known."""
    name = eqn.primitive.name
    if name in _OF_MATRICES:
        ndim = eqn.invars[0].aval.ndim
        return {ndim - 2, ndim - 1}
    if name == "sort":
        return {eqn.params["dimension"]}
    return {eqn.params["axis"]} if name in _ALONG_AXIS else None


def _without(box: Box, axes: Collection[int]) -> Box:
    return tuple(own for axis, own in enumerate(box) if axis not in axes)


def _stretched(value: Parted, aval: Any) -> Parted:
    """The boxes of an operand's pieces in the result of an elementwise equation, along whose
    axes an operand may have the size 1."""
    shapes = list(zip(value.aval.shape, aval.shape, strict=True))

    def stretched(box: Box) -> Box:
        pairs = zip(box, shapes, strict=True)
        return tuple(own if size == full else range(full) for own, (size, full) in pairs)

    return dataclasses.replace(
        value, pieces=[Piece(stretched(box), None) for box in value.boxes], aval=aval
    )


def _within(box: Box, shape: Sequence[int]) -> Box:
    """The box in an operand of this shape, in which axes may have the size 1, or which may
    be a scalar."""
    return tuple(
        own if size > 1 else range(size) for own, size in zip(box, shape, strict=bool(shape))
    )


def _fits(own: Sequence[Box], boxes: Sequence[Box]) -> bool:
    """Whether each box is in one of `boxes`."""
    return all(any(common_box(a, b) == a for b in boxes) for a in own)
