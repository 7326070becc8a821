"""Finds the leaves that hold the weights of several stages, the axis of the layers in each, and
the places along it that each stage reads. These places are called rows along any axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import NamedSharding

from jaxpp.jax_internals.jaxprs import is_transposed, without_constants
from jaxpp.jax_internals.lines import user_line
from jaxpp.trace.bodies import inlined_call, is_recomputation
from jaxpp.trace.boxes import Bounds, groups
from jaxpp.trace.loop import loop_p
from jaxpp.trace.marks import mark_p
from jaxpp.trace.memories import is_put
from jaxpp.trace.rows import Places, fold, gathered_places, moved_axes

__all__ = ["LeafCuts", "constrained_axes", "find_parting", "is_elementwise", "is_reshape"]

_ELEMENTWISE = {
    *("abs", "neg", "sign", "floor", "ceil", "round", "is_finite", "exp", "exp2", "log"),
    *("log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "sqrt", "rsqrt", "cbrt"),
    *("integer_pow", "square", "erf", "erfc", "erf_inv", "convert_element_type", "copy"),
    *("log2", "one_minus_square"),  # since JAX 0.11
    *("copy_p", "reduce_precision", "real", "imag", "conj", "not", "pow", "add", "sub"),
    *("mul", "div", "rem", "max", "min", "add_any", "and", "or", "xor", "eq", "ne", "lt"),
    *("le", "gt", "ge", "atan2", "nextafter", "select_n", "clamp", "stop_gradient"),
    *("asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "lgamma", "digamma"),
    *("shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count"),
    *("clz", "complex", "bitcast_convert_type"),
}


_MOST_IDS = 1 << 22  # limit on the rows of a view


@dataclasses.dataclass
class LeafCuts:
    """How leaves that are stored in parts are cut."""

    rows: dict[int, Bounds]  # leaves cut along axis 0, by its size
    others: dict[tuple[int, ...], Bounds]  # leaves cut along another axis, by their shape
    leaves: set[int]  # numbers of the step's arguments

    def of(self, shape: tuple[int, ...]) -> Bounds | None:
        """How leaves of this shape are cut."""
        return self.others.get(shape) or (self.rows.get(shape[0]) if shape else None)

    def add(
        self,
        axis: int,
        finder: _StageFinder,
        leaves: Iterable[int],
        shapes: Sequence[tuple[int, ...]],
        lines: dict[int, str | None],
    ) -> None:
        """Adds the leaves that can be cut along an axis, and the lines that read them."""
        # Gradients are recognised by their shapes, so all leaves of one shape are cut in
        # the same way.
        known = ((shapes[k], self.of(shapes[k])) for k in self.leaves)
        taken = {shape for shape, cut in known if cut and cut.axis != axis}
        found = {k for k in leaves if finder.cuts[k] and shapes[k] not in taken}
        self.leaves |= found
        lines.update((leaf, finder.lines.get(leaf)) for leaf in found)
        cuts: dict[tuple[int, ...], set[int]] = {}
        for leaf in found:
            key = shapes[leaf] if axis else shapes[leaf][:1]
            cuts.setdefault(key, set()).update(finder.cuts[leaf])
        for shape, at in cuts.items():
            size = shape[axis]
            if axis:
                self.others[shape] = Bounds(axis, (0, *sorted(at), size))
            else:
                ends = self.rows.get(size, Bounds(0, ())).ends
                self.rows[size] = Bounds(0, tuple(sorted({0, *ends, *at, size})))


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


_OF_LEAVES = (_View, _Unknown)


def is_elementwise(eqn: JaxprEqn) -> bool:
    """Whether each element of the result depends on the elements at its place."""
    if eqn.primitive.name not in _ELEMENTWISE:
        return False
    # A cast of bits to a type of another size adds or removes an axis.
    return eqn.outvars[0].aval.ndim == max(v.aval.ndim for v in eqn.invars)


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


def constrained_axes(eqn: JaxprEqn) -> set[int] | None:
    """The axes that a sharding constraint divides over devices; None for other equations."""
    name = eqn.primitive.name
    if name not in ("sharding_constraint", "reshard"):
        return None
    sharding = eqn.params["dst_sharding" if name == "reshard" else "sharding"]
    if not isinstance(sharding, NamedSharding) or sharding.spec.unreduced:
        return set(range(eqn.invars[0].aval.ndim))
    found = set()
    for axis, names in enumerate(sharding.spec.partitions):
        names = names if isinstance(names, tuple) else (names,)
        if any(isinstance(n, str) and sharding.mesh.shape[n] > 1 for n in names):
            found.add(axis)
    return found


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
    """The views that result if an equation only rearranges views or takes a part of one."""
    if (joined := _joined(eqn, operands)) is not None:
        return [joined]
    view, *others = [o for o in operands if isinstance(o, _View)]
    outs = [v.aval.shape for v in eqn.outvars]
    if is_elementwise(eqn):
        pairs = zip(operands, eqn.invars, strict=True)
        scalars = all(isinstance(o, _View) or v.aval.shape == () for o, v in pairs)
        if not scalars or not all(np.array_equal(view.ids, o.ids) for o in others):
            return None
        return [_View(view.leaves.union(*(o.leaves for o in others)), view.ids)]
    if others or view is not operands[0]:
        return None
    if (divided := constrained_axes(eqn)) is not None:
        return None if any(view.ids.shape[axis] > 1 for axis in divided) else [view]
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
        # argument -> stage -> whether it reads each row
        self.rows: dict[int, dict[int, np.ndarray]] = {}
        self.cuts: dict[
            int, set[int]
        ] = {}  # argument -> rows at which another stage's rows begin
        self.divided: set[int] = set()  # arguments that stages read different rows of
        self.lines: dict[int, str | None] = {}  # argument -> lines that read its rows
        self.unknown: dict[int, set[int]] = {}  # argument -> stages that read unknown parts
        self.unparted: set[int] = set()  # arguments with unknown parts read by several stages
        self.taken: set[int] = set()  # arguments that are read at known elements

    def walk(self, jaxpr: Jaxpr, given: Sequence[Any]) -> list[Any]:
        """For each result a view, `_Unknown`, a constant or None, computed from those of
        the arguments."""
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
                # A backward pass reads a subset of its forward's rows.
                if not is_recomputation(eqn) and not is_transposed(eqn):
                    outs = self._call(called, found)
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
            if (takes != takes[0]).any():
                self.divided.add(leaf)
        self.unparted |= {leaf for leaf, stages in self.unknown.items() if len(stages) > 1}

    def _call(self, called: ClosedJaxpr | Jaxpr, found: list[Any]) -> list[Any]:
        closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
        return self.walk(without_constants(closed.jaxpr), [*closed.consts, *found])

    def _follow(self, eqn: JaxprEqn, found: list[Any]) -> list[Any] | None:
        views = [f for f in found if isinstance(f, _OF_LEAVES)]
        if not views:
            return fold(eqn, found, in_numpy=True)
        if is_put(eqn):
            return found
        name, known = eqn.primitive.name, all(isinstance(v, _View) for v in views)
        outs = _views_after(eqn, found) if known else None
        if outs is not None and None not in outs:
            self.taken |= views[0].leaves if name in _TAKES else set()
            if name in _REARRANGES and self.marks is not None:
                for leaf in views[0].leaves:
                    self.lines.setdefault(leaf, user_line(eqn))
            return list(outs)
        for view in views:
            for leaf in view.leaves:
                self._consume(eqn, view, leaf)
        wholes = {leaf for v in views for leaf in v.leaves if self._takes(v, leaf).all()}
        if name not in {*_REARRANGES, *_ELEMENTWISE} or not wholes:
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
        if self.marks is None or is_transposed(eqn):
            return  # outside of stages, or in a backward pass
        if eqn.primitive.name in _TAKES:
            self.unknown.setdefault(leaf, set()).add(self.marks)
            self.lines.setdefault(leaf, user_line(eqn))
        rows = self._takes(view, leaf)
        if not rows.all():
            stages = self.rows.setdefault(leaf, {})
            stages[self.marks] = rows | stages.get(self.marks, False)


def _find_along(
    axis: int, leaves: Iterable[int], closed: ClosedJaxpr, may_cut: Callable[[int, int], bool]
) -> _StageFinder:
    """Walks the step to find the places along an axis of some arguments that each stage
    reads."""
    shapes = [v.aval.shape for v in closed.jaxpr.invars]
    sizes = [shape[axis] if len(shape) > axis else 0 for shape in shapes]
    views: list[_View | _Unknown | None] = [None] * len(shapes)
    for k in leaves:
        if may_cut(k, axis) and sizes[k] > _MOST_IDS:
            views[k] = _Unknown(frozenset([k]))
        elif may_cut(k, axis) and sizes[k] > 0:
            one = [1] * len(shapes[k])
            ids = np.arange(sizes[k]).reshape(*one[:axis], sizes[k], *one[axis + 1 :])
            views[k] = _View(frozenset([k]), ids)
    finder = _StageFinder(sizes)
    finder.walk(without_constants(closed.jaxpr), [*closed.consts, *views])
    return finder


def find_parting(
    closed: ClosedJaxpr, may_cut: Callable[[int, int], bool]
) -> tuple[LeafCuts, dict[int, str | None]]:
    """The arguments of which the stages of a loop read different places along an axis by
    constant indices, and those of which several stages read rows in any way, each with a line
    that reads them. The cut is along the first axis for which this holds.

    `may_cut`: whether the sharding of an argument, by its number, leaves an axis
    unsharded.
    """
    shapes = [v.aval.shape for v in closed.jaxpr.invars]
    parting = LeafCuts({}, {}, set())
    lines: dict[int, str | None] = {}
    same: _StageFinder | None = None  # along axis 0: also for leaves that all stages read alike
    axis, candidates = 0, set(range(len(shapes)))
    while candidates:
        finder = _find_along(axis, candidates, closed, may_cut)
        parting.add(axis, finder, finder.divided, shapes, lines)
        if axis == 0:
            same = finder
        axis += 1
        # Exclude leaves if no stage reads a known part of them.
        candidates -= parting.leaves
        candidates &= finder.taken | {k for k in candidates if not may_cut(k, axis - 1)}
        candidates = {k for k in candidates if len(shapes[k]) > axis}
    if same is not None:
        parting.add(0, same, set(same.cuts) - parting.leaves, shapes, lines)
        lines.update((leaf, same.lines.get(leaf)) for leaf in same.unparted)
    return parting, lines
