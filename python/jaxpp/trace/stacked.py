"""Leaves that hold the weights of all stages, `[layers, ...]`, are stored by parts.

Models that were written for `lax.scan` keep the weights of all layers in one array. Whole, that
array, its gradient and the optimizer's state would lie on every rank. So the traced step is
evaluated once more with such a leaf as several arguments, one for the layers of each stage: a
slice takes from its part, the transpose of a slice gives one part of the gradient, and what is
done element by element or reduced is done part by part. A leaf of which anything else needs
the whole stays whole. The user sees one array.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.jax_internals.jaxprs import continued, drop_unused, settings_of, without_constants
from jaxpp.jax_internals.lines import at_line_of
from jaxpp.operations import Add
from jaxpp.trace.loop import loop_p
from jaxpp.trace.marks import mark_p
from jaxpp.trace.splitting import inlined_call

__all__ = ["Bounds", "PartedStep", "cut_results", "part_step", "parts_of_leaves"]

Bounds = tuple[int, ...]  # 0, ..., the size of axis 0


def parts_of_leaves(bounds: Sequence[Bounds | None]) -> list[range]:
    """For each leaf the numbers of its parts among those of all; a whole leaf is one part."""
    found, at = [], 0
    for cut in bounds:
        stop = at + (len(cut) - 1 if cut else 1)
        found.append(range(at, stop))
        at = stop
    return found


_ELEMENTWISE = {
    *("abs", "neg", "sign", "floor", "ceil", "round", "is_finite", "exp", "exp2", "log"),
    *("log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "sqrt", "rsqrt", "cbrt"),
    *("integer_pow", "square", "erf", "erfc", "erf_inv", "convert_element_type", "copy"),
    *("copy_p", "reduce_precision", "real", "imag", "conj", "not", "pow", "add", "sub"),
    *("mul", "div", "rem", "max", "min", "add_any", "and", "or", "xor", "eq", "ne", "lt"),
    *("le", "gt", "ge", "atan2", "nextafter", "select_n", "clamp"),
}
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


# --- Which leaves, cut where ------------------------------------------------------------


@dataclasses.dataclass
class Parting:
    """How the leaves that are stored by parts are cut along axis 0."""

    bounds: dict[int, Bounds]  # by the size of axis 0
    leaves: set[int]  # numbers of the step's arguments


def _static_rows(eqn: JaxprEqn) -> tuple[int, int] | None:
    """The rows that a slice of axis 0 takes, if it does not take all of them."""
    if eqn.primitive.name != "slice":
        return None
    strides = eqn.params["strides"]
    if strides is not None and strides[0] != 1:
        return None
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    if not start or limit[0] - start[0] == eqn.invars[0].aval.shape[0]:
        return None
    return start[0], limit[0]


class _StageFinder:
    """Walks a loop's body: which stages take which rows of which arguments."""

    def __init__(self) -> None:
        self.marks = 0
        self.rows: dict[int, dict[int, set[int]]] = {}  # argument -> row -> stages

    def walk(self, jaxpr: Jaxpr, sources: Sequence[int | None]) -> list[int | None]:
        env: dict[Var, int | None] = dict(zip(jaxpr.invars, sources, strict=True))

        def read(atom: Any) -> int | None:
            return None if isinstance(atom, Literal) else env.get(atom)

        for eqn in jaxpr.eqns:
            found = [read(v) for v in eqn.invars]
            called = inlined_call(eqn)
            if called is not None:
                inner = called.jaxpr if isinstance(called, ClosedJaxpr) else called
                env.update(zip(eqn.outvars, self.walk(inner, found), strict=True))
            elif eqn.primitive is mark_p:
                self.marks += 1
            elif (rows := _static_rows(eqn)) and found[0] is not None:
                stages = self.rows.setdefault(found[0], {})
                for row in range(*rows):
                    stages.setdefault(row, set()).add(self.marks)
            elif len(eqn.invars) == 1 and eqn.primitive.name in _ELEMENTWISE:
                env[eqn.outvars[0]] = found[0]
        return [read(v) for v in jaxpr.outvars]


def _cut(rows: dict[int, set[int]], size: int) -> set[int]:
    """Where the stages that take a row are others than those of the row before."""
    return {r for r in range(1, size) if rows.get(r, set()) != rows.get(r - 1, set())}


def find_parting(closed: ClosedJaxpr, may_cut: Sequence[bool]) -> Parting:
    """The arguments of which stages of a loop take rows by constants.

    `may_cut`: for each argument whether its sharding leaves axis 0 whole.
    """
    numbers = {v: k for k, v in enumerate(closed.jaxpr.invars) if may_cut[k]}
    cuts: dict[int, set[int]] = {}
    leaves: set[int] = set()
    sources: dict[Var, int] = dict(numbers)
    for eqn in closed.jaxpr.eqns:
        if len(eqn.invars) == 1 and eqn.primitive.name in _ELEMENTWISE:
            if not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in sources:
                sources[eqn.outvars[0]] = sources[eqn.invars[0]]
        if eqn.primitive is not loop_p:
            continue
        finder = _StageFinder()
        of = [None if isinstance(v, Literal) else sources.get(v) for v in eqn.invars]
        finder.walk(eqn.params["body"].jaxpr, [*of, None])
        for leaf, rows in finder.rows.items():
            size = closed.jaxpr.invars[leaf].aval.shape[0]
            found = _cut(rows, size)
            if found:
                leaves.add(leaf)
                cuts.setdefault(size, set()).update(found)
    bounds = {size: (0, *sorted(found), size) for size, found in cuts.items()}
    return Parting(bounds, leaves)


# --- Evaluation by parts ----------------------------------------------------------------


@dataclasses.dataclass
class _Parted:
    """A value as its parts along axis 0; None is a part of zeros."""

    parts: list[Any]
    bounds: Bounds
    aval: Any  # of the whole
    leaves: frozenset[int]  # that it is made of

    def shape(self, k: int) -> tuple[int, ...]:
        return (self.bounds[k + 1] - self.bounds[k], *self.aval.shape[1:])

    def part(self, k: int) -> Any:
        found = self.parts[k]
        return jnp.zeros(self.shape(k), self.aval.dtype) if found is None else found

    def whole(self) -> Any:
        return jax.lax.concatenate([self.part(k) for k in range(len(self.parts))], 0)


def _rows(array: Any, start: int, stop: int) -> Any:
    return jax.lax.slice_in_dim(array, start, stop, axis=0)


class _Evaluator:
    def __init__(self, parting: Parting) -> None:
        self.parting = parting
        self.refused: set[int] = set()  # leaves of which the whole is needed
        self.wanted: set[int] = set()  # leaves that meet parted values
        self.tags: dict[int, frozenset[int]] = {}  # by id of a whole value: its leaves
        self.keep: list[Any] = []  # so that ids stay theirs
        self.scalars: dict[int, Any] = {}  # by id of a whole value: what it is filled with

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

    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if eqn.primitive.name == "pad" and (made := self.pad(eqn, operands)):
            return [made]
        name = eqn.primitive.name
        if not any(isinstance(o, _Parted) for o in operands):
            if eqn.primitive is loop_p:
                return self.loop(eqn, operands)
            of_leaves = any(id(o) in self.tags for o in operands)
            if not of_leaves or name not in ("cond", *_CALLS, *_REMATS):
                return self.plain(eqn, operands)
        if name == "slice":
            return [self.slice(eqn, operands[0])]
        if name in _ELEMENTWISE:
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
        if eqn.primitive.name in _ELEMENTWISE:
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

    def pad(self, eqn: JaxprEqn, operands: list[Any]) -> _Parted | None:
        """The transpose of a slice: rows of a gradient, and zeros around them."""
        aval = eqn.outvars[0].aval
        value, fill = operands
        config = eqn.params["padding_config"]
        bounds = self.parting.bounds.get(aval.shape[0]) if aval.shape else None
        zero = isinstance(eqn.invars[1], Literal) and not eqn.invars[1].val
        rows_only = all(tuple(c) == (0, 0, 0) for c in config[1:])
        if not bounds or isinstance(value, _Parted) or not zero or not rows_only:
            return None
        low, high, interior = config[0]
        if interior or low < 0 or high < 0 or not (low or high):
            return None
        first, last = low, aval.shape[0] - high
        parts: list[Any] = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            start, stop = max(begin, first), min(end, last)
            if start >= stop:
                parts.append(None)
                continue
            piece = _rows(value, start - first, stop - first)
            around = [(start - begin, end - stop, 0), *config[1:]]
            parts.append(jax.lax.pad(piece, jnp.asarray(fill, piece.dtype), around))
        return _Parted(parts, bounds, aval, frozenset())

    def slice(self, eqn: JaxprEqn, value: _Parted) -> Any:
        rows = _static_rows(eqn)
        if rows is None:
            return self.bind(eqn, [self.as_whole(value)])[0]
        params = eqn.params
        pieces = []
        for k, (begin, end) in enumerate(zip(value.bounds, value.bounds[1:], strict=False)):
            start, stop = max(begin, rows[0]), min(end, rows[1])
            if start >= stop:
                continue
            starts = (start - begin, *params["start_indices"][1:])
            limits = (stop - begin, *params["limit_indices"][1:])
            pieces.append(jax.lax.slice(value.part(k), starts, limits, params["strides"]))
        return pieces[0] if len(pieces) == 1 else jax.lax.concatenate(pieces, 0)

    def _part_of(self, value: Any, like: _Parted, k: int) -> Any:
        """What of an operand meets part k of `like`."""
        if isinstance(value, _Parted):
            return value.part(k)
        if jnp.shape(value) == ():
            return value
        if id(value) in self.scalars:
            return jnp.broadcast_to(self.scalars[id(value)], like.shape(k))
        self.wanted |= self.tags.get(id(value), frozenset())
        return _rows(value, like.bounds[k], like.bounds[k + 1])

    def elementwise(self, eqn: JaxprEqn, operands: list[Any]) -> _Parted | Any:
        parted = [o for o in operands if isinstance(o, _Parted)]
        like = parted[0]
        aval = eqn.outvars[0].aval
        shapes = {jnp.shape(o) for o in operands if not isinstance(o, _Parted)}
        if any(o.bounds != like.bounds for o in parted) or not shapes <= {(), aval.shape}:
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
        return _Parted(parts, like.bounds, aval, leaves)

    def reduce(self, eqn: JaxprEqn, value: _Parted) -> Any:
        parts = [
            self.bind(eqn, [value.part(k)])[0]
            for k, part in enumerate(value.parts)
            if part is not None or eqn.primitive.name != "reduce_sum"
        ]
        if 0 not in eqn.params["axes"]:
            if len(parts) != len(value.parts):
                return self.bind(eqn, [self.as_whole(value)])[0]
            return _Parted(parts, value.bounds, eqn.outvars[0].aval, value.leaves)
        if not parts:
            return jnp.zeros(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype)
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
            given = make(args[: len(flat)])
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


def part_step(closed: ClosedJaxpr, may_cut: Sequence[bool]) -> PartedStep | None:
    """The step with the leaves that stages take rows of by parts; None if there are none."""
    parting = find_parting(closed, may_cut)
    refused: set[int] = set()
    while parting.leaves:
        evaluator = _Evaluator(parting)
        found = _evaluate(closed, evaluator)
        more = {k for k in evaluator.wanted if may_cut[k]} - refused - parting.leaves
        if not more:
            refused |= evaluator.refused
            if not parting.leaves & refused:
                return found
        parting = Parting(parting.bounds, (parting.leaves | more) - refused)
    return None


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
        results.extend(o.bounds if isinstance(o, _Parted) else None for o in outs)
        return _flatten([_without_gaps(o) for o in outs])[0]

    made = jax.make_jaxpr(run)(*structs)
    return PartedStep(ClosedJaxpr(drop_unused(made.jaxpr), made.consts), arguments, results)
