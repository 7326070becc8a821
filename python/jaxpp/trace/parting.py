"""Which leaves hold the weights of several stages, and which rows of them each stage takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.jax_internals.jaxprs import is_transposed, without_constants
from jaxpp.jax_internals.lines import user_line
from jaxpp.trace.loop import loop_p
from jaxpp.trace.marks import mark_p
from jaxpp.trace.rows import Taking, fold, moved_axes, reshaped_axis, takings
from jaxpp.trace.splitting import inlined_call, is_recomputation

__all__ = ["ELEMENTWISE", "Bounds", "Parting", "find_parting", "is_reshape"]

Bounds = tuple[int, ...]  # 0, ..., the size of axis 0

ELEMENTWISE = {
    *("abs", "neg", "sign", "floor", "ceil", "round", "is_finite", "exp", "exp2", "log"),
    *("log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "sqrt", "rsqrt", "cbrt"),
    *("integer_pow", "square", "erf", "erfc", "erf_inv", "convert_element_type", "copy"),
    *("copy_p", "reduce_precision", "real", "imag", "conj", "not", "pow", "add", "sub"),
    *("mul", "div", "rem", "max", "min", "add_any", "and", "or", "xor", "eq", "ne", "lt"),
    *("le", "gt", "ge", "atan2", "nextafter", "select_n", "clamp"),
}


_MOST_ROWS = 1 << 16  # of a leaf that may hold layers


@dataclasses.dataclass
class Parting:
    """How the leaves that are stored by parts are cut along axis 0."""

    bounds: dict[int, Bounds]  # by the size of axis 0
    leaves: set[int]  # numbers of the step's arguments


@dataclasses.dataclass(frozen=True)
class _View:
    """Rows of a leaf in some shape: `ids` are the rows along the value's `axes`."""

    leaf: int
    axes: tuple[int, ...]  # ascending
    ids: np.ndarray

    def reshaped(self, shape: Sequence[int], new_shape: Sequence[int]) -> _View | None:
        first = self.axes[0] if self.axes else 0
        if self.axes != tuple(range(first, first + len(self.axes))):
            return None
        found = reshaped_axis(shape, new_shape, first, first + len(self.axes))
        if found is None:
            return None
        ids = self.ids.reshape([new_shape[axis] for axis in range(*found)])
        return _View(self.leaf, tuple(range(*found)), ids)

    def moved(self, places: Sequence[int]) -> _View:
        axes = [places[axis] for axis in self.axes]
        return _View(self.leaf, tuple(sorted(axes)), self.ids.transpose(np.argsort(axes)))

    def taken(self, taking: Taking) -> _View | None:
        ids = self.ids
        for at, axis in enumerate(self.axes):
            ids = np.take(ids, taking.places[axis], axis=at)
        return _View(self.leaf, self.axes, ids).reshaped(
            tuple(map(len, taking.places)), taking.shape
        )


def is_reshape(eqn: JaxprEqn) -> bool:
    """Whether the elements stay as they are, one after the other."""
    if eqn.primitive.name in ("reshape", "squeeze", "expand_dims"):
        return eqn.params.get("dimensions") is None or eqn.primitive.name != "reshape"
    if eqn.primitive.name != "broadcast_in_dim":
        return False
    places = eqn.params["broadcast_dimensions"]
    return eqn.outvars[0].aval.size == eqn.invars[0].aval.size and list(places) == sorted(
        places
    )


def views_after(eqn: JaxprEqn, operands: Sequence[Any]) -> list[_View | None] | None:
    """The results of an equation that only rearranges a view, or takes some of it."""
    view, *others = operands or [None]
    if not isinstance(view, _View) or any(isinstance(o, _View) for o in others):
        return None
    out = eqn.outvars[0].aval.shape
    if (found := takings(eqn, operands)) is not None:
        return [view.taken(taking) for taking in found]
    if (places := moved_axes(eqn)) is not None:
        return [view.moved(places)]
    if is_reshape(eqn):
        return [view.reshaped(eqn.invars[0].aval.shape, out)]
    scalars = all(v.aval.shape == () for v in eqn.invars[1:])
    return [view] if eqn.primitive.name in ELEMENTWISE and scalars else None


_TAKES = ("slice", "dynamic_slice", "gather", "split", "unstack", "reshape", "transpose")


class _StageFinder:
    """Walks a loop's body: which stages take which rows of which arguments."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes  # rows of each argument
        self.marks = 0
        self.in_backward = False
        self.rows: dict[int, dict[int, set[int]]] = {}  # argument -> row -> stages
        self.lines: dict[int, str | None] = {}  # argument -> where rows of it are taken
        self.unknown: dict[int, set[int]] = {}  # argument -> stages that take unknown parts

    def walk(self, jaxpr: Jaxpr, given: Sequence[Any]) -> list[Any]:
        """A `_View`, a constant or None for each result, from those for each argument."""
        env: dict[Var, Any] = dict(zip(jaxpr.invars, given, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env.get(atom)

        for eqn in jaxpr.eqns:
            found = [read(v) for v in eqn.invars]
            called = inlined_call(eqn)
            if called is not None:
                closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
                backward = is_recomputation(eqn) or is_transposed(eqn)
                outs = self._call(closed, found, backward)
            elif eqn.primitive is mark_p:
                self.marks += 1
                outs = None
            else:
                outs = self._follow(eqn, found)
            env.update(zip(eqn.outvars, outs or [None] * len(eqn.outvars), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _call(self, closed: ClosedJaxpr, found: list[Any], backward: bool) -> list[Any]:
        jaxpr = without_constants(closed.jaxpr)
        outer, self.in_backward = self.in_backward, self.in_backward or backward
        outs = self.walk(jaxpr, [*closed.consts, *found])
        self.in_backward = outer
        return outs

    def _follow(self, eqn: JaxprEqn, found: list[Any]) -> list[Any] | None:
        views = [f for f in found if isinstance(f, _View)]
        if not views:
            return fold(eqn, found)
        outs = views_after(eqn, found)
        if outs is None or None in outs:
            for view in views:
                self._consume(eqn, view)
            return None
        if eqn.primitive.name in _TAKES:
            self.lines.setdefault(views[0].leaf, user_line(eqn))
        return list(outs)

    def _consume(self, eqn: JaxprEqn, view: _View) -> None:
        if self.in_backward or is_transposed(eqn):
            return  # a backward pass takes what its forward took, or less
        rows = set(map(int, view.ids.flat))
        if eqn.primitive.name in _TAKES:
            self.unknown.setdefault(view.leaf, set()).add(self.marks)
            self.lines.setdefault(view.leaf, user_line(eqn))
        if len(rows) == self.sizes[view.leaf]:
            return
        stages = self.rows.setdefault(view.leaf, {})
        for row in rows:
            stages.setdefault(row, set()).add(self.marks)


def _cut(rows: dict[int, set[int]], size: int) -> set[int]:
    """Where the stages that take a row are others than those of the row before."""
    return {r for r in range(1, size) if rows.get(r, set()) != rows.get(r - 1, set())}


def find_parting(
    closed: ClosedJaxpr, may_cut: Sequence[bool]
) -> tuple[Parting, dict[int, str | None]]:
    """The arguments of which stages of a loop take rows by constants; and those of which
    several stages take rows in any way, each with a line that does.

    `may_cut`: for each argument whether its sharding leaves axis 0 whole.
    """
    invars = closed.jaxpr.invars
    sizes = [v.aval.shape[0] if v.aval.shape else 0 for v in invars]
    cuts: dict[int, set[int]] = {}
    leaves: set[int] = set()
    lines: dict[int, str | None] = {}
    env: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    for k, v in enumerate(invars):
        if may_cut[k] and 0 < sizes[k] <= _MOST_ROWS:
            env[v] = _View(k, (0,), np.arange(sizes[k]))
    for eqn in closed.jaxpr.eqns:
        given = [v.val if isinstance(v, Literal) else env.get(v) for v in eqn.invars]
        if eqn.primitive is not loop_p:
            known: Sequence[Any] = views_after(eqn, given) or fold(eqn, given) or ()
            env.update(zip(eqn.outvars, known, strict=False))
            continue
        finder = _StageFinder(sizes)
        finder.walk(eqn.params["body"].jaxpr, [*given, None])
        for leaf, rows in finder.rows.items():
            if found := _cut(rows, sizes[leaf]):
                leaves.add(leaf)
                cuts.setdefault(sizes[leaf], set()).update(found)
                lines.setdefault(leaf, finder.lines.get(leaf))
        for leaf, stages in finder.unknown.items():
            if len(stages) > 1:
                lines.setdefault(leaf, finder.lines[leaf])
    bounds = {size: (0, *sorted(found), size) for size, found in cuts.items()}
    return Parting(bounds, leaves), lines
