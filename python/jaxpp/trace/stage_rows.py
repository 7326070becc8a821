"""Finds the leaves that hold the weights of several stages, and the rows each stage reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.jax_internals.jaxprs import is_transposed, without_constants
from jaxpp.jax_internals.lines import user_line
from jaxpp.trace.boxes import groups
from jaxpp.trace.loop import loop_p
from jaxpp.trace.marks import mark_p
from jaxpp.trace.memories import is_move
from jaxpp.trace.rows import Places, fold, gathered_places, moved_axes
from jaxpp.trace.splitting import inlined_call, is_recomputation

__all__ = ["ELEMENTWISE", "Bounds", "LeafCuts", "find_parting", "is_reshape"]

Bounds = tuple[int, ...]  # 0, ..., the size of axis 0

ELEMENTWISE = {
    *("abs", "neg", "sign", "floor", "ceil", "round", "is_finite", "exp", "exp2", "log"),
    *("log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "sqrt", "rsqrt", "cbrt"),
    *("integer_pow", "square", "erf", "erfc", "erf_inv", "convert_element_type", "copy"),
    *("copy_p", "reduce_precision", "real", "imag", "conj", "not", "pow", "add", "sub"),
    *("mul", "div", "rem", "max", "min", "add_any", "and", "or", "xor", "eq", "ne", "lt"),
    *("le", "gt", "ge", "atan2", "nextafter", "select_n", "clamp"),
}


_MOST_IDS = 1 << 22  # limit on the rows of a view


@dataclasses.dataclass
class LeafCuts:
    """How leaves that are stored in parts are cut along axis 0."""

    bounds: dict[int, Bounds]  # by the size of axis 0
    leaves: set[int]  # numbers of the step's arguments


@dataclasses.dataclass(frozen=True)
class _Unknown:
    """A value that depends on rows of leaves in an unknown way."""

    leaves: frozenset[int]


@dataclasses.dataclass(frozen=True)
class _View:
    """Rows of leaves in some shape. `ids` has the value's axes and gives the row of each
    element; it has size 1 along axes that do not affect the row."""

    leaves: frozenset[int]
    ids: np.ndarray

    def reshaped(self, shape: Sequence[int], new_shape: Sequence[int]) -> _View | None:
        if 0 in shape:
            return _View(self.leaves, np.zeros([min(size, 1) for size in new_shape], int))
        given: list[int] = []  # sizes of the axes that `ids` broadcasts to
        found: list[int] = []
        for (first, end), (new_first, new_end) in groups(shape, new_shape):
            same = math.prod(self.ids.shape[first:end]) == 1
            given += [1] * (end - first) if same else shape[first:end]
            found += [1] * (new_end - new_first) if same else new_shape[new_first:new_end]
        if math.prod(given) > _MOST_IDS:
            return None
        ids = np.broadcast_to(self.ids, given).reshape(found)
        for axis in range(ids.ndim):
            one = ids.take([0], axis)
            ids = one if (ids == one).all() else ids
        return _View(self.leaves, ids)

    def moved(self, permutation: Sequence[int]) -> _View:
        return _View(self.leaves, self.ids.transpose(permutation))

    def taken(self, places: Places, shape: Sequence[int]) -> _View | None:
        ids = self.ids
        for axis, at in enumerate(places):
            if ids.shape[axis] > 1:
                ids = ids.take(at, axis)
        return _View(self.leaves, ids).reshaped(tuple(map(len, places)), shape)


def is_reshape(eqn: JaxprEqn) -> bool:
    """Whether the elements keep their order."""
    if eqn.primitive.name in ("reshape", "squeeze", "expand_dims"):
        return eqn.params.get("dimensions") is None or eqn.primitive.name != "reshape"
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    places = eqn.params["broadcast_dimensions"]
    return eqn.outvars[0].aval.size == eqn.invars[0].aval.size and list(places) == sorted(
        places
    )


def _joined(eqn: JaxprEqn, operands: Sequence[Any]) -> _View | None:
    """Concatenates views of the same leaves."""
    leaves = {o.leaves if isinstance(o, _View) else None for o in operands}
    if eqn.primitive.name != "concatenate" or len(leaves) > 1:
        return None
    axis = eqn.params["dimension"]
    shape = np.max([o.ids.shape for o in operands], axis=0)
    given = [(*shape[:axis], v.aval.shape[axis], *shape[axis + 1 :]) for v in eqn.invars]
    pairs = zip(operands, given, strict=True)
    ids = np.concatenate([np.broadcast_to(o.ids, own) for o, own in pairs], axis)
    return _View(operands[0].leaves, ids) if ids.size <= _MOST_IDS else None


def _views_after(eqn: JaxprEqn, operands: Sequence[Any]) -> list[_View | None] | None:
    """The results of an equation that only rearranges views or takes a part of one."""
    if (joined := _joined(eqn, operands)) is not None:
        return [joined]
    view, *others = [o for o in operands if isinstance(o, _View)]
    outs = [v.aval.shape for v in eqn.outvars]
    if eqn.primitive.name in ELEMENTWISE:
        pairs = zip(operands, eqn.invars, strict=True)
        scalars = all(isinstance(o, _View) or v.aval.shape == () for o, v in pairs)
        if not scalars or not all(np.array_equal(view.ids, o.ids) for o in others):
            return None
        return [_View(view.leaves.union(*(o.leaves for o in others)), view.ids)]
    if others or view is not operands[0]:
        return None
    if (found := gathered_places(eqn, operands)) is not None:
        return [view.taken(*one) for one in zip(found, outs, strict=True)]
    if (permutation := moved_axes(eqn)) is not None:
        return [view.moved(permutation)]
    return [view.reshaped(eqn.invars[0].aval.shape, outs[0])] if is_reshape(eqn) else None


_TAKES = ("slice", "dynamic_slice", "gather", "split", "unstack")
_REARRANGES = (*_TAKES, "rev", "reshape", "transpose", "concatenate")


class _StageFinder:
    """Walks a step to find the rows of arguments that each stage of its loops reads."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes  # rows of each argument
        self.marks: int | None = None  # the current stage; None: outside of loops
        self.in_backward = False
        # argument -> stage -> whether it reads each row
        self.rows: dict[int, dict[int, np.ndarray]] = {}
        self.cuts: dict[
            int, set[int]
        ] = {}  # argument -> rows at which another stage's rows begin
        self.lines: dict[int, str | None] = {}  # argument -> lines that read its rows
        self.unknown: dict[int, set[int]] = {}  # argument -> stages that read unknown parts
        self.unparted: set[int] = set()  # arguments with unknown parts read by several stages

    def walk(self, jaxpr: Jaxpr, given: Sequence[Any]) -> list[Any]:
        """For each result a view, `_Unknown`, a constant or None, from those for arguments."""
        env: dict[Var, Any] = dict(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env.get(atom)

        for eqn in jaxpr.eqns:
            found = [read(v) for v in eqn.invars]
            called = inlined_call(eqn)
            outs = None
            if eqn.primitive is loop_p:
                self._loop(eqn, found)
            elif called is not None:
                closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
                backward = is_recomputation(eqn) or is_transposed(eqn)
                outs = self._call(closed, found, backward)
            elif eqn.primitive is mark_p:
                self.marks = None if self.marks is None else self.marks + 1
            else:
                outs = self._follow(eqn, found)
            env.update(zip(eqn.outvars, outs or [None] * len(eqn.outvars), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _loop(self, eqn: JaxprEqn, found: list[Any]) -> None:
        self.marks, self.rows, self.unknown = 0, {}, {}
        self.walk(eqn.params["body"].jaxpr, [*found, None])
        self.marks = None
        for leaf, stages in self.rows.items():
            takes = np.stack(list(stages.values()))
            others = (takes[:, 1:] != takes[:, :-1]).any(axis=0)
            self.cuts.setdefault(leaf, set()).update((np.flatnonzero(others) + 1).tolist())
        self.unparted |= {leaf for leaf, stages in self.unknown.items() if len(stages) > 1}

    def _call(self, closed: ClosedJaxpr, found: list[Any], backward: bool) -> list[Any]:
        jaxpr = without_constants(closed.jaxpr)
        outer, self.in_backward = self.in_backward, self.in_backward or backward
        outs = self.walk(jaxpr, [*closed.consts, *found])
        self.in_backward = outer
        return outs

    def _follow(self, eqn: JaxprEqn, found: list[Any]) -> list[Any] | None:
        views = [f for f in found if isinstance(f, _View | _Unknown)]
        if not views:
            return fold(eqn, found)
        if is_move(eqn):
            return found
        name, known = eqn.primitive.name, all(isinstance(v, _View) for v in views)
        outs = _views_after(eqn, found) if known else None
        if outs is not None and None not in outs:
            if name in _REARRANGES and self.marks is not None:
                for leaf in views[0].leaves:
                    self.lines.setdefault(leaf, user_line(eqn))
            return list(outs)
        for view in views:
            for leaf in view.leaves:
                self._consume(eqn, view, leaf)
        wholes = {leaf for v in views for leaf in v.leaves if self._takes(v, leaf).all()}
        if name not in {*_REARRANGES, *ELEMENTWISE} or not wholes:
            return None
        return [_Unknown(frozenset(wholes))] * len(eqn.outvars)

    def _takes(self, view: _View | _Unknown, leaf: int) -> np.ndarray:
        """Whether the view contains every row of a leaf."""
        if isinstance(view, _Unknown):
            return np.ones(1, bool)  # all rows, without enumerating them
        found = np.zeros(self.sizes[leaf], bool)
        found[view.ids.ravel()] = True
        return found

    def _consume(self, eqn: JaxprEqn, view: _View | _Unknown, leaf: int) -> None:
        if self.marks is None or self.in_backward or is_transposed(eqn):
            return  # a backward pass reads a subset of its forward's rows
        if eqn.primitive.name in _TAKES:
            self.unknown.setdefault(leaf, set()).add(self.marks)
            self.lines.setdefault(leaf, user_line(eqn))
        rows = self._takes(view, leaf)
        if not rows.all():
            stages = self.rows.setdefault(leaf, {})
            stages[self.marks] = rows | stages.get(self.marks, False)


def find_parting(
    closed: ClosedJaxpr, may_cut: Sequence[bool]
) -> tuple[LeafCuts, dict[int, str | None]]:
    """The arguments whose rows the stages of a loop read by constant indices, and those whose
    rows several stages read in any way, each with a line that does.

    `may_cut`: for each argument whether its sharding leaves axis 0 whole.
    """
    avals = [v.aval for v in closed.jaxpr.invars]
    sizes = [aval.shape[0] if aval.shape else 0 for aval in avals]
    views: list[_View | _Unknown | None] = [None] * len(avals)
    for k, (size, aval) in enumerate(zip(sizes, avals, strict=True)):
        if may_cut[k] and size > _MOST_IDS:
            views[k] = _Unknown(frozenset([k]))
        elif may_cut[k] and size > 0:
            ids = np.arange(size).reshape(size, *[1] * (aval.ndim - 1))
            views[k] = _View(frozenset([k]), ids)
    finder = _StageFinder(sizes)
    finder.walk(without_constants(closed.jaxpr), [*closed.consts, *views])
    cuts: dict[int, set[int]] = {}
    leaves = {leaf for leaf, found in finder.cuts.items() if found}
    for leaf in leaves:
        cuts.setdefault(sizes[leaf], set()).update(finder.cuts[leaf])
    bounds = {size: (0, *sorted(found), size) for size, found in cuts.items()}
    lines = {leaf: finder.lines.get(leaf) for leaf in leaves | finder.unparted}
    return LeafCuts(bounds, leaves), lines
