"""Leaves that hold the weights of all stages, `[layers, ...]`, are stored by parts.

Models that were written for `lax.scan` keep the weights of all layers in one array. Whole, that
array, its gradient and the optimizer's state would lie on every rank. So the traced step is
evaluated once more with such a leaf as several arguments, one for the layers of each stage:
what takes rows by constants, however it is written (`rows.py`), takes them from their parts,
its transpose gives parts of the gradient, and what is done element by element or reduced is
done part by part. A leaf of which anything else needs the whole stays whole. The user sees one
array.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.jax_internals.jaxprs import continued, drop_unused, settings_of, without_constants
from jaxpp.jax_internals.lines import at_line_of
from jaxpp.operations import Add
from jaxpp.trace.loop import loop_p
from jaxpp.trace.parting import ELEMENTWISE, Bounds, Parting, find_parting, is_reshape
from jaxpp.trace.rows import (
    Piece,
    Taking,
    constant,
    fold,
    moved_axes,
    placed_pieces,
    runs,
    takings,
)
from jaxpp.trace.splitting import inlined_call

__all__ = ["Bounds", "PartedStep", "cut_results", "part_step", "parts_of_leaves"]


def parts_of_leaves(bounds: Sequence[Bounds | None]) -> list[range]:
    """For each leaf the numbers of its parts among those of all; a whole leaf is one part."""
    found, at = [], 0
    for cut in bounds:
        stop = at + (len(cut) - 1 if cut else 1)
        found.append(range(at, stop))
        at = stop
    return found


_CALLS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("checkpoint", "remat", "remat2")
_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": jax.lax.add,
    "reduce_max": jax.lax.max,
    "reduce_min": jax.lax.min,
    "reduce_prod": jax.lax.mul,
    "reduce_and": jax.lax.bitwise_and,
    "reduce_or": jax.lax.bitwise_or,
}


# --- Evaluation by parts ----------------------------------------------------------------


@dataclasses.dataclass
class _Parted:
    """A value as its parts along an axis; None is a part of zeros."""

    parts: list[Any]
    bounds: Bounds
    aval: Any  # of the whole
    leaves: frozenset[int]  # that it is made of
    axis: int = 0

    def shape(self, k: int) -> tuple[int, ...]:
        size = self.bounds[k + 1] - self.bounds[k]
        return (*self.aval.shape[: self.axis], size, *self.aval.shape[self.axis + 1 :])

    def part(self, k: int) -> Any:
        found = self.parts[k]
        return jnp.zeros(self.shape(k), self.aval.dtype) if found is None else found

    def whole(self) -> Any:
        return jax.lax.concatenate([self.part(k) for k in range(len(self.parts))], self.axis)

    def each(self, change: Callable[[Any], Any], **changes: Any) -> _Parted:
        """With every part changed."""
        parts = [None if part is None else change(part) for part in self.parts]
        return dataclasses.replace(self, parts=parts, **changes)


def _rows(array: Any, start: int, stop: int, axis: int = 0) -> Any:
    return jax.lax.slice_in_dim(array, start, stop, axis=axis)


def _take_along(value: Any, places: Sequence[Sequence[int]], skipped: int) -> Any:
    """The elements at these places along all axes but one."""
    for axis, at in enumerate(places):
        if axis != skipped and runs(at) != [(0, value.shape[axis])]:
            pieces = [_rows(value, a, b, axis) for a, b in runs(at)]
            value = pieces[0] if len(pieces) == 1 else jax.lax.concatenate(pieces, axis)
    return value


# What puts its operands into zeros, or beside each other, as they are.
_PLACES = ("pad", "dynamic_update_slice", "concatenate")


def _pieces_of(piece: Piece) -> list[Piece]:
    """The parts of a piece."""
    value = piece.value
    if not isinstance(value, _Parted):
        return [piece]
    found = []
    for k, part in enumerate(value.parts):
        if part is not None:
            starts = list(piece.starts)
            starts[value.axis] += value.bounds[k]
            found.append(Piece(part, tuple(starts), value.shape(k)))
    return found


class _Evaluator:
    def __init__(self, parting: Parting) -> None:
        self.parting = parting
        self.refused: set[int] = set()  # leaves of which the whole is needed
        self.wanted: set[int] = set()  # leaves that meet parted values
        self.tags: dict[int, frozenset[int]] = {}  # by id of a whole value: its leaves
        self.keep: list[Any] = []  # so that ids stay theirs
        self.scalars: dict[int, Any] = {}  # by id of a whole value: what it is filled with
        # By shape: along which axes, and where, values that are views of leaves are cut.
        self.views: dict[tuple[int, ...], list[tuple[int, Bounds]]] = {}

    def tag(self, value: Any, leaves: Iterable[int]) -> None:
        self.keep.append(value)
        self.tags[id(value)] = frozenset(leaves)

    def as_whole(self, value: Any) -> Any:
        if not isinstance(value, _Parted):
            return value
        self.refused |= value.leaves
        return value.whole()

    def run(self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: dict[Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            with at_line_of(eqn):
                outs = self.equation(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def layouts(self, shape: tuple[int, ...]) -> list[tuple[int, Bounds]]:
        """Along which axes and where values of this shape may be cut."""
        bounds = self.parting.bounds.get(shape[0]) if shape else None
        return [*([(0, bounds)] if bounds else []), *self.views.get(shape, ())]

    def as_view(self, value: _Parted) -> _Parted:
        """Remembers how it is cut: a gradient in its shape will be cut like it."""
        known = self.views.setdefault(value.aval.shape, [])
        if (value.axis, value.bounds) not in known:
            known.append((value.axis, value.bounds))
        return value

    def is_zero(self, value: Any) -> bool:
        value = self.scalars.get(id(value), value)
        known = not isinstance(value, jax.core.Tracer | _Parted) and np.ndim(value) == 0
        return known and not np.any(np.asarray(value))

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if (known := fold(eqn, operands)) is not None:
            return known
        if (made := self.place(eqn, operands)) is not None:
            return [made]
        name = eqn.primitive.name
        if not any(isinstance(o, _Parted) for o in operands):
            if eqn.primitive is loop_p:
                return self.loop(eqn, operands)
            of_leaves = any(id(o) in self.tags for o in operands)
            # The transpose of a call that took rows puts them into zeros.
            makes_views = name in _CALLS and any(
                self.layouts(v.aval.shape) for v in eqn.outvars
            )
            if not makes_views and (not of_leaves or name not in ("cond", *_CALLS, *_REMATS)):
                return self.plain(eqn, operands)
        if operands and isinstance(operands[0], _Parted):
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
        called = inlined_call(eqn)
        if name in _REMATS:
            return self.remat(eqn, operands)
        if called is not None and name in _CALLS:
            inner = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
            return self.run(inner.jaxpr, inner.consts, operands)
        return self.plain(eqn, [self.as_whole(o) for o in operands])

    def bind(self, eqn: JaxprEqn, operands: Sequence[Any], **changes: Any) -> list[Any]:
        params = eqn.primitive.get_bind_params({**eqn.params, **changes})
        with settings_of(eqn):
            outs = eqn.primitive.bind(*operands, **params)
        return list(outs) if eqn.primitive.multiple_results else [outs]

    def plain(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """No part is involved; what a whole value is made of is remembered."""
        outs = self.bind(eqn, operands)
        if eqn.primitive.name in ELEMENTWISE:
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

    def place(self, eqn: JaxprEqn, operands: list[Any]) -> _Parted | None:
        """The transpose of what takes rows: rows of a gradient, and zeros around them."""
        aval: Any = eqn.outvars[0].aval if eqn.outvars else None
        layouts = self.layouts(aval.shape) if hasattr(aval, "shape") else []
        parted = [o for o in operands if isinstance(o, _Parted)]
        if not layouts or (parted and eqn.primitive.name not in _PLACES):
            return None
        placed = placed_pieces(eqn, operands, self.is_zero) or []
        pieces = [piece for whole in placed for piece in _pieces_of(whole)]
        fitting = (
            (axis, bounds)
            for axis, bounds in layouts
            if any(piece.shape[axis] < aval.shape[axis] for piece in pieces)
        )
        axis, bounds = next(fitting, (0, None))
        if bounds is None:
            return None
        leaves = frozenset().union(*(o.leaves for o in parted))
        gaps = _Parted([None] * (len(bounds) - 1), bounds, aval, leaves, axis)
        parts = [self._placed_part(pieces, gaps, k) for k in range(len(gaps.parts))]
        return dataclasses.replace(gaps, parts=parts)

    def _placed_part(self, pieces: Sequence[Piece], like: _Parted, k: int) -> Any:
        axis, begin, end = like.axis, like.bounds[k], like.bounds[k + 1]
        found = []
        for piece in pieces:
            first = piece.starts[axis]
            start, stop = max(begin, first), min(end, first + piece.shape[axis])
            if start >= stop:
                continue
            value = jnp.reshape(piece.value, piece.shape)
            value = _rows(value, start - first, stop - first, axis)
            own = zip(piece.starts, piece.shape, like.aval.shape, strict=True)
            around = [(at, whole - at - size, 0) for at, size, whole in own]
            around[axis] = (start - begin, end - stop, 0)
            found.append((start, value, around))
        if not found:
            return None
        found.sort(key=lambda each: each[0])
        sides = [c for _, _, around in found for d, c in enumerate(around) if d != axis]
        covered = sum(value.shape[axis] for _, value, _ in found) == end - begin
        if covered and not any(low or high for low, high, _ in sides):
            values = [value for _, value, _ in found]
            return values[0] if len(values) == 1 else jax.lax.concatenate(values, axis)
        zero = jnp.zeros((), like.aval.dtype)
        padded = [jax.lax.pad(value, zero, around) for _, value, around in found]
        return functools.reduce(jax.lax.add, padded)

    def rearranged(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        """What takes rows of a value, or gives it another shape; None: something else."""
        value, *others = operands
        if any(isinstance(o, _Parted) for o in others):
            return None
        aval = eqn.outvars[0].aval
        if (found := takings(eqn, operands)) is not None:
            outs = zip(found, eqn.outvars, strict=True)
            return [self.take(value, taking, v.aval) for taking, v in outs]
        if (places := moved_axes(eqn)) is not None:
            permutation = eqn.params["permutation"]
            moved = value.each(
                lambda part: jax.lax.transpose(part, permutation),
                aval=aval,
                axis=places[value.axis],
            )
            return [self.as_view(moved)]
        reshaped = self.reshape(value, aval) if is_reshape(eqn) else None
        return None if reshaped is None else [reshaped]

    def reshape(self, value: _Parted, aval: Any) -> _Parted | None:
        """Of the axes that the cut one becomes the first is cut, between whole units of it."""
        old, new, axis = value.aval.shape, aval.shape, value.axis
        before = math.prod(old[:axis])
        first = next((k for k in range(len(new)) if math.prod(new[:k]) == before), None)
        while first is not None and first < len(new) and new[first] == 1:
            first += 1
        if first is None or first == len(new):
            return None
        unit, new_unit = math.prod(old[axis + 1 :]), math.prod(new[first + 1 :])
        if any(bound * unit % new_unit for bound in value.bounds):
            return None
        bounds = tuple(bound * unit // new_unit for bound in value.bounds)
        made = _Parted([], bounds, aval, value.leaves, first)
        made.parts = [
            None if part is None else jax.lax.reshape(part, made.shape(k))
            for k, part in enumerate(value.parts)
        ]
        return self.as_view(made)

    def take(self, value: _Parted, taking: Taking, aval: Any) -> Any:
        if math.prod(taking.shape) == 0:
            return jnp.zeros(taking.shape, value.aval.dtype)
        rows = taking.places[value.axis]
        if runs(rows) == [(0, value.aval.shape[value.axis])]:
            shape = tuple(map(len, taking.places))
            cut = value.each(
                lambda part: _take_along(part, taking.places, value.axis),
                aval=jax.core.ShapedArray(shape, value.aval.dtype),
            )
            made = self.reshape(cut, aval)
            return jnp.reshape(self.as_whole(cut), taking.shape) if made is None else made
        if len(rows) == value.aval.shape[value.axis]:  # all, in another order
            return _take_along(self.as_whole(value), taking.places, -1)
        pieces = []
        for start, stop in runs(rows):
            for k, (begin, end) in enumerate(zip(value.bounds, value.bounds[1:], strict=False)):
                first, last = max(begin, start), min(end, stop)
                if first < last:
                    piece = _rows(value.part(k), first - begin, last - begin, value.axis)
                    pieces.append(_take_along(piece, taking.places, value.axis))
        if len(pieces) == 1:
            return jnp.reshape(pieces[0], taking.shape)
        # Of several parts: still by parts, for who takes some of it again. That it is used
        # whole is no reason to keep the leaf whole.
        ends = np.cumsum([0, *(piece.shape[value.axis] for piece in pieces)]).tolist()
        shape = tuple(map(len, taking.places))
        whole = jax.core.ShapedArray(shape, value.aval.dtype)
        some = _Parted(pieces, tuple(ends), whole, frozenset(), value.axis)
        made = self.reshape(some, aval)
        return jnp.reshape(some.whole(), taking.shape) if made is None else made

    def _part_of(self, value: Any, like: _Parted, k: int) -> Any:
        """What of an operand meets part k of `like`."""
        if isinstance(value, _Parted):
            return value.part(k)
        if jnp.shape(value) == ():
            return value
        if id(value) in self.scalars:
            return jnp.broadcast_to(self.scalars[id(value)], like.shape(k))
        self.wanted |= self.tags.get(id(value), frozenset())
        return _rows(value, like.bounds[k], like.bounds[k + 1], like.axis)

    def elementwise(self, eqn: JaxprEqn, operands: list[Any]) -> _Parted | Any:
        parted = [o for o in operands if isinstance(o, _Parted)]
        like = parted[0]
        aval = eqn.outvars[0].aval
        shapes = {jnp.shape(o) for o in operands if not isinstance(o, _Parted)}
        cuts = {(o.axis, o.bounds) for o in parted}
        if len(cuts) > 1 or not shapes <= {(), aval.shape}:
            return self.bind(eqn, [self.as_whole(o) for o in operands])[0]
        leaves = frozenset().union(*(o.leaves for o in parted))
        parts: list[Any] = []
        for k in range(len(like.parts)):
            if eqn.primitive.name in ("add_any", "convert_element_type", "neg", "copy"):
                present = [o for o in parted if o.parts[k] is not None]
                if not present and len(parted) == len(operands):
                    parts.append(None)
                    continue
                if len(present) == 1 and len(operands) == len(parted) == 2:
                    parts.append(present[0].parts[k])
                    continue
            inputs = [self._part_of(o, like, k) for o in operands]
            parts.append(self.bind(eqn, inputs)[0])
        return _Parted(parts, like.bounds, aval, leaves, like.axis)

    def reduce(self, eqn: JaxprEqn, value: _Parted) -> Any:
        aval = eqn.outvars[0].aval
        sums = eqn.primitive.name == "reduce_sum"  # parts of zeros add nothing
        if value.axis not in eqn.params["axes"]:
            full = value if sums else _without_gaps(value)
            axis = value.axis - sum(axis < value.axis for axis in eqn.params["axes"])
            return full.each(lambda part: self.bind(eqn, [part])[0], aval=aval, axis=axis)
        parts = [
            self.bind(eqn, [value.part(k)])[0]
            for k, part in enumerate(value.parts)
            if part is not None or not sums
        ]
        if not parts:
            return jnp.zeros(aval.shape, aval.dtype)
        return functools.reduce(_REDUCTIONS[eqn.primitive.name], parts)

    def barrier(self, operands: list[Any]) -> list[Any]:
        flat, make = _flatten(operands)
        return make(jax.lax.optimization_barrier(tuple(flat)))

    def cond(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        index, *rest = operands
        flat, make = _flatten(rest)
        found: list[list[Any]] = []  # what each branch gives

        def run_branch(branch: ClosedJaxpr, cut: Sequence[Any], *args: Any) -> list[Any]:
            given = make(args)
            self.same_origins(rest, given)
            outs = self.run(branch.jaxpr, branch.consts, given)
            outs = [self.cut_like(o, like) for o, like in zip(outs, cut, strict=True)]
            found.append(outs)
            return _flatten(outs)[0]

        def branches(cut: Sequence[Any]) -> list[Callable[..., Any]]:
            return [functools.partial(run_branch, b, cut) for b in eqn.params["branches"]]

        # What one branch gives by parts all must give so: once to see, once to do it.
        for branch in branches([None] * len(eqn.outvars)):
            jax.eval_shape(branch, *flat)
        cut = []
        for outs in zip(*found, strict=True):
            parted = [o for o in outs if isinstance(o, _Parted)]
            leaves = frozenset().union(*(o.leaves for o in parted))
            gaps = [None] * (len(parted[0].parts) if parted else 0)
            cut.append(
                dataclasses.replace(parted[0], parts=gaps, leaves=leaves) if parted else None
            )
        results = iter(jax.lax.switch(index, branches(cut), *flat))
        return [
            next(results)
            if like is None
            else dataclasses.replace(like, parts=[next(results) for _ in like.parts])
            for like in cut
        ]

    def traced(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Any],
        *more: Any,
        parted: Sequence[bool] | None = None,
    ) -> tuple[ClosedJaxpr, list[Any]]:
        """A jaxpr on the parts of its operands, then on `more`; and what it gives, by parts
        of which some are zeros and no result. `parted`: which results may be so."""
        flat, make = _flatten(operands)
        layouts: list[Any] = []

        def run(*args: Any) -> list[Any]:
            pairs = zip(flat, args, strict=False)
            given = make([x if constant(x) is not None else arg for x, arg in pairs])
            self.same_origins(operands, given)
            outs = self.run(jaxpr, (), [*given, *args[len(flat) :]])
            may = [True] * len(outs) if parted is None else parted
            layouts[:] = [o if m else self.as_whole(o) for o, m in zip(outs, may, strict=True)]
            return [x for o in layouts for x in _present(o)]

        closed = jax.make_jaxpr(run)(*(_struct(jax.typeof(x)) for x in flat), *more)
        return closed, layouts

    def remat(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        closed, layouts = self.traced(eqn.params["jaxpr"], operands)
        jaxpr = without_constants(drop_unused(closed.jaxpr))
        flat = [*closed.consts, *_flatten(operands)[0]]
        return _by_layout(self.bind(eqn, flat, jaxpr=jaxpr), layouts)

    def cut_like(self, value: Any, like: _Parted | None) -> Any:
        """The value by the parts of `like`, without gaps."""
        if like is None:
            return value
        parts = [self._part_of(value, like, k) for k in range(len(like.parts))]
        return dataclasses.replace(like, parts=parts)

    def same_origins(self, old: Sequence[Any], new: Sequence[Any]) -> None:
        """Inside another trace values are made of the leaves that they were made of."""
        for before, now in zip(old, new, strict=True):
            if id(before) in self.tags:
                self.tag(now, self.tags[id(before)])

    def loop(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        params = eqn.params
        operations = params["operations"]
        index = jax.ShapeDtypeStruct((), jnp.int32)
        added = [isinstance(operation, Add) for operation in operations]
        body, layouts = self.traced(params["body"].jaxpr, operands, index, parted=added)
        jaxpr = without_constants(drop_unused(body.jaxpr))
        pairs = zip(layouts, operations, strict=True)
        new_params = {
            **params,
            "body": ClosedJaxpr(jaxpr, ()),
            "operations": tuple(op for o, op in pairs for _ in _present(o)),
        }
        flat = [*body.consts, *_flatten(operands)[0]]
        return _by_layout(loop_p.bind(*flat, **new_params), layouts)


def _by_layout(arrays: Sequence[Any], layouts: Sequence[Any]) -> list[Any]:
    """Arrays as the values whose present parts they are."""
    return _flatten(layouts)[1](arrays)


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _present(value: Any) -> list[Any]:
    """The arrays that a value is: parts of zeros are none."""
    if not isinstance(value, _Parted):
        return [value]
    return [p for p in value.parts if p is not None]


def _without_gaps(value: Any) -> Any:
    if not isinstance(value, _Parted):
        return value
    parts = [value.part(k) for k in range(len(value.parts))]
    return dataclasses.replace(value, parts=parts)


def _flatten(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Arrays in place of parted values, and what makes such values of such arrays."""
    values = list(values)

    def make(arrays: Sequence[Any]) -> list[Any]:
        rest = iter(arrays)
        made: list[Any] = []
        for v in values:
            if isinstance(v, _Parted):
                parts = [None if p is None else next(rest) for p in v.parts]
                made.append(dataclasses.replace(v, parts=parts))
            else:
                made.append(next(rest))
        return made

    return [x for v in values for x in _present(v)], make


# --- The step ---------------------------------------------------------------------------


@dataclasses.dataclass
class PartedStep:
    """A step whose stacked leaves are several arguments and results.

    `arguments`, `results`: for each of the step's own the bounds of its parts, or None.
    """

    closed: ClosedJaxpr
    arguments: list[Bounds | None]
    results: list[Bounds | None]


def part_step(
    closed: ClosedJaxpr, may_cut: Sequence[bool]
) -> tuple[PartedStep | None, dict[int, str | None]]:
    """The step with the leaves that stages take rows of by parts, None if there are none; and
    the leaves that stay whole though several stages take rows of them, each with a line."""
    parting, lines = find_parting(closed, may_cut)
    refused: set[int] = set()
    while parting.leaves:
        evaluator = _Evaluator(parting)
        found = _evaluate(closed, evaluator)
        more = {k for k in evaluator.wanted if may_cut[k]} - refused - parting.leaves
        if not more:
            refused |= evaluator.refused
            if not parting.leaves & refused:
                return found, {k: v for k, v in lines.items() if k not in parting.leaves}
        parting = Parting(parting.bounds, (parting.leaves | more) - refused)
    return None, lines


def cut_results(closed: ClosedJaxpr, bounds: Sequence[Bounds | None]) -> ClosedJaxpr:
    """The step that gives the rows within these bounds as results of their own."""

    def cut(*wholes: Any) -> list[Any]:
        results: list[Any] = []
        for whole, at in zip(wholes, bounds, strict=True):
            if at is None:
                results.append(whole)
            else:
                results += [_rows(whole, a, b) for a, b in zip(at, at[1:], strict=False)]
        return results

    structs = map(_struct, closed.out_avals)
    return continued(closed, jax.make_jaxpr(cut)(*structs).jaxpr)


def _evaluate(closed: ClosedJaxpr, evaluator: _Evaluator) -> PartedStep:
    jaxpr, parting = closed.jaxpr, evaluator.parting
    arguments = [
        parting.bounds.get(v.aval.shape[0]) if k in parting.leaves else None
        for k, v in enumerate(jaxpr.invars)
    ]
    structs: list[Any] = []
    for v, bounds in zip(jaxpr.invars, arguments, strict=True):
        if bounds is None:
            structs.append(_struct(v.aval))
            continue
        for begin, end in zip(bounds, bounds[1:], strict=False):
            shape = (end - begin, *v.aval.shape[1:])
            structs.append(jax.ShapeDtypeStruct(shape, v.aval.dtype))
    results: list[Bounds | None] = []

    def run(*flat: Any) -> list[Any]:
        rest, args = iter(flat), []
        for k, (v, bounds) in enumerate(zip(jaxpr.invars, arguments, strict=True)):
            if bounds is None:
                args.append(next(rest))
                evaluator.tag(args[-1], [k])
            else:
                parts = [next(rest) for _ in bounds[1:]]
                args.append(_Parted(parts, bounds, v.aval, frozenset([k])))
        outs = evaluator.run(jaxpr, closed.consts, args)
        outs = [o.whole() if isinstance(o, _Parted) and o.axis != 0 else o for o in outs]
        results.extend(o.bounds if isinstance(o, _Parted) else None for o in outs)
        return _flatten([_without_gaps(o) for o in outs])[0]

    made = jax.make_jaxpr(run)(*structs)
    return PartedStep(ClosedJaxpr(drop_unused(made.jaxpr), made.consts), arguments, results)
