"""Splits leaves that hold the weights of all stages, `[layers, ...]`, into parts.

Models written for `lax.scan` keep the weights of all layers in one array. Unsplit, every rank
would hold that array, its gradient and its optimizer state. So the traced step is evaluated
again with such a leaf as several arguments, one for the layers of each stage. Equations that
read rows by constant indices (`rows.py`) read them from the parts, their transposes return
parts of the gradient, and elementwise operations and reductions run on each part. A leaf stays
whole if any other equation needs all of it. The layers may be along any axis; their places
along it are called rows. The user sees one array.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Sharding

from jaxpp import _core
from jaxpp.jax_internals.arrays import sharded_like
from jaxpp.jax_internals.jaxprs import (
    bind,
    continued,
    drop_unused,
    evaluate,
    without_constants,
)
from jaxpp.operations import Add
from jaxpp.trace.boxes import Bounds, Box, common_box, is_whole, sizes, whole_box
from jaxpp.trace.inlining import inlined
from jaxpp.trace.loop import loop_p
from jaxpp.trace.memories import is_put, move_of_one
from jaxpp.trace.pieces import Parted, Piece
from jaxpp.trace.rows import constant, fold, gathered_places, moved_axes, scattered_values
from jaxpp.trace.stage_rows import (
    ELEMENTWISE,
    LeafCuts,
    constrained_axes,
    find_parting,
    is_reshape,
)

__all__ = ["PartedStep", "cut_results", "part_step", "parts_of_leaves"]


def parts_of_leaves(bounds: Sequence[Bounds | None]) -> list[range]:
    """For each leaf the indices of its parts among all parts; a whole leaf is one part."""
    found, at = [], 0
    for cut in bounds:
        stop = at + (len(cut.ranges()) if cut else 1)
        found.append(range(at, stop))
        at = stop
    return found


_REMATS = ("checkpoint", "remat", "remat2")
_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


# --- Evaluation on parts ----------------------------------------------------------------


# Linear primitives: zeros map to zeros, sums of pieces to sums.
_KEEPS_ZEROS = ("add_any", "convert_element_type", "neg", "copy")


class _Evaluator:
    def __init__(self, parting: LeafCuts) -> None:
        self.parting = parting
        self.refused: set[int] = set()  # leaves that are needed whole
        self.wanted: set[int] = set()  # leaves that are combined with parted values
        self.tags: dict[int, frozenset[int]] = {}  # id of a whole value -> its leaves
        self.keep: list[Any] = []  # keeps values alive, so that their ids stay unique
        self.scalars: dict[int, Any] = {}  # id of a whole value -> its fill value
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
        value = self.scalars.get(id(value), value)
        known = not isinstance(value, jax.core.Tracer | Parted) and np.ndim(value) == 0
        is_key = jnp.issubdtype(getattr(value, "dtype", bool), jax.dtypes.prng_key)
        return known and not is_key and not np.any(np.asarray(value))

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if (known := fold(eqn, operands)) is not None:
            return known
        if (made := self.place(eqn, operands)) is not None:
            return [made]
        name = eqn.primitive.name
        called = inlined(eqn)
        if is_put(eqn):
            return [self.moved(eqn, k, operand) for k, operand in enumerate(operands)]
        if not any(isinstance(o, Parted) for o in operands):
            if eqn.primitive is loop_p:
                return self.loop(eqn, operands)
            of_leaves = any(id(o) in self.tags for o in operands)
            # The transpose of a call that read rows writes them into zeros.
            makes_views = (
                called is not None
                and name not in _REMATS
                and any(self.layouts(v.aval.shape) for v in eqn.outvars)
            )
            if not makes_views and not (of_leaves and (called is not None or name == "cond")):
                return self.plain(eqn, operands)
        if operands and isinstance(operands[0], Parted):
            if (outs := self.rearranged(eqn, operands)) is not None:
                return outs
        if name in ELEMENTWISE:
            return [self.elementwise(eqn, operands)]
        if name in _REDUCTIONS:
            return [self.reduce(eqn, operands[0])]
        if name == "optimization_barrier":
            return self.barrier(operands)
        if eqn.primitive is loop_p:
            return self.loop(eqn, operands)
        if name == "cond":
            return self.cond(eqn, operands)
        if name in _REMATS:
            return self.remat(eqn, operands)
        if called is not None:
            return evaluate(called, operands, self.equation)
        return self.plain(eqn, [self.as_whole(o) for o in operands])

    def bind(self, eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
        return bind(eqn.primitive, {**eqn.params, **changes}, operands)

    def plain(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """Evaluates an equation without parts; records the leaves that its results depend
        on."""
        outs = self.bind(eqn, operands)
        if eqn.primitive.name in ELEMENTWISE or constrained_axes(eqn) is not None:
            shape = eqn.outvars[0].aval.shape
            leaves = [
                self.tags.get(id(o), frozenset())
                for o, v in zip(operands, eqn.invars, strict=True)
                if v.aval.shape == shape
            ]
            if found := frozenset().union(*leaves):
                self.tag(outs[0], found)
        if eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == ():
            self.keep.append(outs[0])
            self.scalars[id(outs[0])] = operands[0]
        return outs

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
        elif (divided := constrained_axes(eqn)) is not None:
            outs = [self.constrained(eqn, value, divided)]
        else:
            return None
        return None if None in outs else [self.made(o) for o in outs]

    def constrained(self, eqn: JaxprEqn, value: Parted, divided: set[int]) -> Parted | None:
        """The value with each piece sharded like the whole; None if pieces are cut along an
        axis that the constraint divides over devices."""
        whole = whole_box(value.aval.shape)
        if any(box[axis] != whole[axis] for box in value.boxes for axis in divided):
            return None
        pieces = [p.shaped() for p in value.pieces]
        return value.of(
            [Piece(p.box, self.bind(eqn, [p.array])[0]) for p in pieces], value.aval
        )

    def _part_of(self, value: Any, box: Box) -> Any:
        """The part of an operand in a box."""
        if isinstance(value, Parted):
            return value.within(box)
        if jnp.shape(value) == ():
            return value
        if id(value) in self.scalars:
            part = jnp.broadcast_to(self.scalars[id(value)], sizes(box))
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
            inputs = [self._part_of(o, _within(box, v.aval.shape)) for o, v in pairs]
            pieces.append(Piece(box, self.bind(eqn, inputs)[0]))
        return Parted(pieces, aval, frozenset().union(*(o.leaves for o in parted)))

    def reduce(self, eqn: JaxprEqn, value: Parted) -> Any:
        aval: Any = eqn.outvars[0].aval
        combine, axes = _REDUCTIONS[eqn.primitive.name], eqn.params["axes"]
        if eqn.primitive.name != "reduce_sum":  # zeros add nothing
            value = value.cut_at(self.boxes_for([value]) or [whole_box(value.aval.shape)])
        found: dict[Box, Any] = {}
        for piece in value.pieces:
            box = tuple(own for axis, own in enumerate(piece.box) if axis not in axes)
            (part,) = self.bind(eqn, [piece.array])
            found[box] = combine(found[box], part) if box in found else part
        if any(common_box(a, b) for a, b in itertools.combinations(found, 2)):
            return self.bind(eqn, [self.as_whole(value)])[0]
        if not found:
            return sharded_like(jnp.zeros(aval.shape, aval.dtype), aval)
        return self.made(value.of((Piece(b, a) for b, a in found.items()), aval))

    def barrier(self, operands: list[Any]) -> list[Any]:
        flat, make = _flatten(operands)
        return make(jax.lax.optimization_barrier(tuple(flat)))

    def cond(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        index, *rest = operands
        flat, make = _flatten(rest)
        found: list[list[Any]] = []  # results of each branch

        def run_branch(branch: ClosedJaxpr, cut: Sequence[Any] | None, *args: Any) -> list[Any]:
            given = make(args)
            self.same_origins(rest, given)
            outs = evaluate(branch, given, self.equation)
            if cut is not None:
                outs = [self.cut_like(o, like) for o, like in zip(outs, cut, strict=True)]
            found.append(outs)
            return _flatten(outs)[0]

        def branches(cut: Sequence[Any] | None) -> list[Callable[..., Any]]:
            return [functools.partial(run_branch, b, cut) for b in eqn.params["branches"]]

        # All branches must return the same results in parts: a first pass finds these, a
        # second one converts the others.
        for branch in branches(None):
            jax.eval_shape(branch, *flat)
        cut: list[Any] = []
        for outs, v in zip(zip(*found, strict=True), eqn.outvars, strict=True):
            parted = [o for o in outs if isinstance(o, Parted)]
            leaves = frozenset().union(*(o.leaves for o in parted))
            boxes = self.boxes_for(parted) if parted else None
            gaps = [Piece(box, None) for box in boxes or ()]
            cut.append(Parted(gaps, v.aval, leaves) if boxes else None)
        return _by_layout(jax.lax.switch(index, branches(cut), *flat), cut)

    def traced(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Any],
        *more: Any,
        added: Sequence[bool] | None = None,
    ) -> tuple[ClosedJaxpr, list[Any]]:
        """A jaxpr on the parts of its operands and on `more`, with its results in parts.
        `added`: which results of a loop are sums; only these are in parts."""
        flat, make = _flatten(operands)
        layouts: list[Any] = []

        def run(*args: Any) -> list[Any]:
            pairs = zip(flat, args, strict=False)
            given = make([x if constant(x) is not None else arg for x, arg in pairs])
            self.same_origins(operands, given)
            outs = evaluate(jaxpr, [*given, *args[len(flat) :]], self.equation)
            if added is not None:
                pairs = zip(outs, added, strict=True)
                outs = [self.in_rows(o) if sums else self.as_whole(o) for o, sums in pairs]
            layouts[:] = outs
            return _flatten(outs)[0]

        closed = jax.make_jaxpr(run)(*(_struct(jax.typeof(x)) for x in flat), *more)
        return closed, layouts

    def remat(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        closed, layouts = self.traced(eqn.params["jaxpr"], operands)
        jaxpr = without_constants(drop_unused(closed.jaxpr))
        flat = [*closed.consts, *_flatten(operands)[0]]
        return _by_layout(self.bind(eqn, flat, jaxpr=jaxpr), layouts)

    def cut_like(self, value: Any, like: Parted | None) -> Any:
        """The value cut into the parts of `like`, without gaps; None: whole."""
        if like is None:
            return self.as_whole(value)
        return like.of(Piece(box, self._part_of(value, box)) for box in like.boxes)

    def same_origins(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        """In another trace, values depend on the same leaves as the values that they
        replace."""
        for before, now in zip(old, new, strict=True):
            if id(before) in self.tags:
                self.tag(now, self.tags[id(before)])

    def loop(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        params = eqn.params
        operations = params["operations"]
        index = jax.ShapeDtypeStruct((), jnp.int32)
        added = [type(operation) is Add for operation in operations]
        body, layouts = self.traced(params["body"].jaxpr, operands, index, added=added)
        # A sum may have another dtype than its terms.
        layouts = [
            dataclasses.replace(o, aval=v.aval) if isinstance(o, Parted) else o
            for o, v in zip(layouts, eqn.outvars, strict=True)
        ]
        jaxpr = without_constants(drop_unused(body.jaxpr))
        pairs = zip(layouts, operations, strict=True)
        named = zip(layouts, params["names"], strict=True)
        new_params = {
            **params,
            "body": ClosedJaxpr(jaxpr, ()),
            "names": tuple(n for o, n in named for _ in _arrays_of(o)),
            "operations": tuple(op for o, op in pairs for _ in _arrays_of(o)),
        }
        flat = [*body.consts, *_flatten(operands)[0]]
        return _by_layout(loop_p.bind(*flat, **new_params), layouts)


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


def _by_layout(arrays: Sequence[Any], layouts: Sequence[Any]) -> list[Any]:
    """Packs arrays into values with these pieces."""
    return _flatten(layouts)[1](arrays)


def _struct(aval: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """The type of a value, or of a part of it with this shape."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    shape = aval.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def _arrays_of(value: Any) -> list[Any]:
    return [p.array for p in value.pieces] if isinstance(value, Parted) else [value]


def _flatten(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """The arrays of parted values, and a function that rebuilds the values from arrays."""
    values = list(values)

    def make(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        return [
            dataclasses.replace(v, pieces=[Piece(box, next(rest)) for box in v.boxes])
            if isinstance(v, Parted)
            else next(rest)
            for v in values
        ]

    return [x for v in values for x in _arrays_of(v)], make


# --- The step ---------------------------------------------------------------------------


@dataclasses.dataclass
class PartedStep:
    """A step whose stacked leaves are split into several arguments and results.

    `arguments`, `results`: for each argument and result of the original step, the bounds
    of its parts or None.
    """

    closed: ClosedJaxpr
    arguments: list[Bounds | None]
    results: list[Bounds | None]


def part_step(
    closed: ClosedJaxpr, may_cut: Callable[[int, int], bool], next_args: Sequence[int]
) -> tuple[PartedStep | None, dict[int, str | None]]:
    """The step in which leaves that several stages read in parts are split, or None if
    there are none; and the leaves that stay whole although several stages read rows of
    them, each with a line. `may_cut`: as for `find_parting`. `next_args`: for each result the
    argument that it becomes in the next step, or NONE; it stays whole if the argument does.
    """
    parting, lines = find_parting(closed, may_cut)
    refused: set[int] = set()
    while parting.leaves:
        evaluator = _Evaluator(parting)
        found = _evaluate(closed, evaluator, next_args)
        wanted = evaluator.wanted - refused - parting.leaves
        bounds = {k: parting.of(closed.jaxpr.invars[k].aval.shape) for k in wanted}
        more = {k for k, cut in bounds.items() if cut and may_cut(k, cut.axis)}
        if not more:
            refused |= evaluator.refused
            if not parting.leaves & refused:
                return found, {k: v for k, v in lines.items() if k not in parting.leaves}
        parting = dataclasses.replace(parting, leaves=(parting.leaves | more) - refused)
    return None, lines


def cut_results(closed: ClosedJaxpr, bounds: Sequence[Bounds | None]) -> ClosedJaxpr:
    """The step that returns the parts within these bounds as separate results."""

    def cut(*wholes: Any) -> list[Any]:
        results: list[Any] = []
        for whole, at in zip(wholes, bounds, strict=True):
            if at is None:
                results.append(whole)
            else:
                results += [
                    jax.lax.slice_in_dim(whole, a, b, axis=at.axis) for a, b in at.ranges()
                ]
        return results

    structs = map(_struct, closed.out_avals)
    return continued(closed, jax.make_jaxpr(cut)(*structs).jaxpr)


def _evaluate(
    closed: ClosedJaxpr, evaluator: _Evaluator, next_args: Sequence[int]
) -> PartedStep:
    jaxpr, parting = closed.jaxpr, evaluator.parting
    arguments = [
        parting.of(v.aval.shape) if k in parting.leaves else None
        for k, v in enumerate(jaxpr.invars)
    ]
    structs: list[Any] = []
    for v, bounds in zip(jaxpr.invars, arguments, strict=True):
        if bounds is None:
            structs.append(_struct(v.aval))
            continue
        for begin, end in bounds.ranges():
            shape = bounds.resized(v.aval.shape, end - begin)
            structs.append(_struct(v.aval, shape))
    results: list[Bounds | None] = []

    def is_whole_next(result: int) -> bool:
        argument = next_args[result]
        return argument != _core.NONE and arguments[argument] is None

    def run(*flat: Any) -> list[Any]:
        rest, args = iter(flat), []
        for k, (v, bounds) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
            if bounds is None:
                args.append(next(rest))
                evaluator.tag(args[-1], [k])
            else:
                boxes = bounds.boxes(v.aval.shape)
                pieces = [Piece(box, next(rest)) for box in boxes]
                args.append(Parted(pieces, v.aval, frozenset([k])))
        outs = [
            o.whole if isinstance(o, Parted) and is_whole_next(k) else evaluator.by_rows(o)
            for k, o in enumerate(evaluate(closed, args, evaluator.equation))
        ]
        results.extend(evaluator.bounds_of(o) if isinstance(o, Parted) else None for o in outs)
        return _flatten(outs)[0]

    made = jax.make_jaxpr(run)(*structs)
    return PartedStep(ClosedJaxpr(drop_unused(made.jaxpr), made.consts), arguments, results)
