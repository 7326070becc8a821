"""Evaluates jaxprs on values in parts: loops, conditions and calls."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpp.jax_internals.jaxprs import drop_unused, evaluate, scan_sizes, without_constants
from jaxpp.operations import Add
from jaxpp.trace.boxes import Box, whole_box
from jaxpp.trace.inlining import inlined
from jaxpp.trace.loop import loop_p
from jaxpp.trace.memories import is_put
from jaxpp.trace.part_arrays import PartArrays
from jaxpp.trace.pieces import Parted, Piece
from jaxpp.trace.rows import constant, fold

__all__ = ["Evaluator", "flatten", "struct"]

_REMATS = ("checkpoint", "remat", "remat2")


class Evaluator(PartArrays):
    def equation(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if (known := fold(eqn, operands)) is not None:
            return known
        if (made := self.place(eqn, operands)) is not None:
            return [made]
        if is_put(eqn):
            return [self.moved(eqn, k, operand) for k, operand in enumerate(operands)]
        parted = any(isinstance(o, Parted) for o in operands)
        if parted and (outs := self.on_parts(eqn, operands)) is not None:
            return outs
        if eqn.primitive is loop_p:
            return self.loop(eqn, operands)
        if parted or self.may_make_parts(eqn, operands):
            if (outs := self.by_body(eqn, operands)) is not None:
                return outs
        return self.plain(eqn, [self.as_whole(o) for o in operands])

    def may_make_parts(self, eqn: JaxprEqn, operands: list[Any]) -> bool:
        """Whether an equation on whole values may have results in parts."""
        called, name = inlined(eqn), eqn.primitive.name
        if called is None and name != "cond":
            return False
        if any(id(o) in self.tags for o in operands):
            return True
        # The transpose of a call that read rows writes them into zeros.
        views = any(self.layouts(v.aval.shape) for v in eqn.outvars)
        return called is not None and name not in _REMATS and views

    def by_body(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        """The results of an equation that calls jaxprs; None for others."""
        name = eqn.primitive.name
        if name == "optimization_barrier":
            flat, make = flatten(operands)
            return make(jax.lax.optimization_barrier(tuple(flat)))
        if name == "cond":
            return self.cond(eqn, operands)
        if name == "scan":
            return self.scan(eqn, operands)
        # A loop in vmap has a condition for each row, and goes on while any of them holds.
        if name == "while" and eqn.params["cond_jaxpr"].out_avals[0].ndim == 0:
            return self.while_loop(eqn, operands)
        if name in _REMATS:
            return self.remat(eqn, operands)
        called = inlined(eqn)
        return None if called is None else evaluate(called, operands, self.equation)

    def cond(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        index, *rest = operands
        flat, make = self.taken_apart(rest)
        found: list[list[Any]] = []  # results of each branch

        def run_branch(branch: ClosedJaxpr, cut: Sequence[Any] | None, *args: Any) -> list[Any]:
            outs = evaluate(branch, make(args), self.equation)
            if cut is not None:
                outs = [self.cut_like(o, like) for o, like in zip(outs, cut, strict=True)]
            found.append(outs)
            return flatten(outs)[0]

        def branches(cut: Sequence[Any] | None) -> list[Callable[..., Any]]:
            return [functools.partial(run_branch, b, cut) for b in eqn.params["branches"]]

        # All branches must return the same results in parts: a first pass finds these, a
        # second one converts the others.
        for branch in branches(None):
            jax.eval_shape(branch, *flat)
        cut = [self.layout(outs) for outs in zip(*found, strict=True)]
        return _by_layout(jax.lax.switch(index, branches(cut), *flat), cut)

    def layout(self, values: Sequence[Any]) -> Parted | None:
        """How values of one type are cut together; None: they are whole."""
        parted = [value for value in values if isinstance(value, Parted)]
        boxes = self.boxes_for(parted) if parted else None
        if boxes is None:
            return None
        leaves = frozenset().union(*(value.leaves for value in parted))
        return Parted([Piece(box, None) for box in boxes], parted[0].aval, leaves)

    def scan(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        """A scan: one for each part, if it is over rows in parts."""
        params: Any = eqn.params
        num_consts, num_states = scan_sizes(params)
        consts, rest = operands[:num_consts], operands[num_consts:]
        states, rows = rest[:num_states], rest[num_states:]
        ends = {0, params["length"]}
        for k, value in enumerate(rows):
            if isinstance(value, Parted) and (
                value.is_cut_along(range(1, value.aval.ndim))
                or any(box[0].step > 1 for box in value.boxes)
            ):
                rows[k] = self.as_whole(value)
            elif isinstance(value, Parted):
                ends |= {end for box in value.boxes for end in (box[0].start, box[0].stop)}

        def step(states: list[Any], xs: Sequence[Any]) -> list[Any]:
            return evaluate(params["jaxpr"], [*consts, *states, *xs], self.equation)

        stacked = eqn.outvars[num_states:]
        pieces: list[list[Piece]] = [[] for _ in stacked]
        ranges = list(itertools.pairwise(sorted(ends)))
        for begin, end in reversed(ranges) if params["reverse"] else ranges:
            pairs = zip(rows, eqn.invars[len(operands) - len(rows) :], strict=True)
            own = [self.part_of(x, _rows(begin, end, v.aval.shape)) for x, v in pairs]
            states, found = self.scan_whole(step, states, own, end - begin, params)
            for some, array, v in zip(pieces, found, stacked, strict=True):
                some.append(Piece(_rows(begin, end, v.aval.shape), array))
        leaves = frozenset().union(*(o.leaves for o in operands if isinstance(o, Parted)))
        made = zip(pieces, stacked, strict=True)
        return [*states, *(self.made(Parted(some, v.aval, leaves)) for some, v in made)]

    def scan_whole(
        self,
        step: Callable[[list[Any], Sequence[Any]], list[Any]],
        states: list[Any],
        rows: Sequence[Any],
        length: int,
        params: Any,
    ) -> tuple[list[Any], list[Any]]:
        """The states after a scan over whole rows, and its stacked results."""
        count = len(states)
        states = self.as_returned(
            lambda states: step(states, [x[0] for x in rows])[:count], states
        )
        flat, make = self.taken_apart(states)

        def body(flat: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            outs = step(make(flat), xs)
            return self.flat_like(outs[:count], states), list(map(self.as_whole, outs[count:]))

        options = {"length": length, "reverse": params["reverse"], "unroll": params["unroll"]}
        flat, made = jax.lax.scan(body, flat, list(rows), **options)
        return _by_layout(flat, states), made

    def while_loop(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        params: Any = eqn.params
        tested, rest = operands[: params["cond_nconsts"]], operands[params["cond_nconsts"] :]
        consts, states = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]

        def step(states: list[Any]) -> list[Any]:
            return evaluate(params["body_jaxpr"], [*consts, *states], self.equation)

        states = self.as_returned(step, states)
        flat, make = self.taken_apart(states)

        def test(flat: Sequence[Any]) -> Any:
            (more,) = evaluate(params["cond_jaxpr"], [*tested, *make(flat)], self.equation)
            return self.as_whole(more)

        def body(flat: Sequence[Any]) -> list[Any]:
            return self.flat_like(step(make(flat)), states)

        return _by_layout(jax.lax.while_loop(test, body, flat), states)

    def as_returned(
        self, step: Callable[[list[Any]], list[Any]], states: list[Any]
    ) -> list[Any]:
        """The states of a loop, those in parts that its step returns in parts."""
        flat, make = self.taken_apart(states)
        found: list[Any] = []

        def once(flat: Sequence[Any]) -> list[Any]:
            found.extend(step(make(flat)))
            return flatten(found)[0]

        jax.eval_shape(once, flat)
        cuts = [
            None if isinstance(state, Parted) else self.layout([value])
            for state, value in zip(states, found, strict=True)
        ]
        if not any(cuts):
            return states
        pairs = zip(states, cuts, strict=True)
        states = [self.cut_like(state, cut) if cut else state for state, cut in pairs]
        return self.as_returned(step, states)

    def flat_like(self, values: Sequence[Any], states: Sequence[Any]) -> list[Any]:
        """The arrays of values that are cut like the states of a loop."""
        likes = [state if isinstance(state, Parted) else None for state in states]
        pairs = zip(values, likes, strict=True)
        return flatten([self.cut_like(value, like) for value, like in pairs])[0]

    def taken_apart(
        self, values: Sequence[Any]
    ) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
        """The arrays of values, and a function that makes from arrays in another trace values
        that depend on the same leaves."""
        flat, make = flatten(values)

        def again(arrays: Sequence[Any]) -> list[Any]:
            made = make(arrays)
            for old, new in zip(values, made, strict=True):
                if id(old) in self.tags:
                    self.tag(new, self.tags[id(old)])
            return made

        return flat, again

    def traced(
        self,
        jaxpr: Jaxpr,
        operands: Sequence[Any],
        *more: Any,
        added: Sequence[bool] | None = None,
    ) -> tuple[ClosedJaxpr, list[Any]]:
        """A jaxpr on the parts of its operands and on `more`, with its results in parts.
        `added`: which results of a loop are sums; only these are in parts."""
        flat, make = self.taken_apart(operands)
        layouts: list[Any] = []

        def run(*args: Any) -> list[Any]:
            pairs = zip(flat, args, strict=False)
            given = make([x if constant(x) is not None else arg for x, arg in pairs])
            outs = evaluate(jaxpr, [*given, *args[len(flat) :]], self.equation)
            if added is not None:
                pairs = zip(outs, added, strict=True)
                outs = [self.in_rows(o) if sums else self.as_whole(o) for o, sums in pairs]
            layouts[:] = outs
            return flatten(outs)[0]

        closed = jax.make_jaxpr(run)(*(struct(jax.typeof(x)) for x in flat), *more)
        return closed, layouts

    def remat(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        closed, layouts = self.traced(eqn.params["jaxpr"], operands)
        jaxpr = without_constants(drop_unused(closed.jaxpr))
        flat = [*closed.consts, *flatten(operands)[0]]
        return _by_layout(self.bind(eqn, flat, jaxpr=jaxpr), layouts)

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
            "names": tuple(n for o, n in named for _ in arrays_of(o)),
            "operations": tuple(op for o, op in pairs for _ in arrays_of(o)),
        }
        flat = [*body.consts, *flatten(operands)[0]]
        return _by_layout(loop_p.bind(*flat, **new_params), layouts)


def _rows(begin: int, end: int, shape: Sequence[int]) -> Box:
    return (range(begin, end), *whole_box(shape[1:]))


def _by_layout(arrays: Sequence[Any], layouts: Sequence[Any]) -> list[Any]:
    """Packs arrays into values with these pieces."""
    return flatten(layouts)[1](arrays)


def struct(aval: Any, shape: Sequence[int] | None = None) -> jax.ShapeDtypeStruct:
    """The type of a value, or of a part of it with this shape."""
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    shape = aval.shape if shape is None else shape
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def arrays_of(value: Any) -> list[Any]:
    return [p.array for p in value.pieces] if isinstance(value, Parted) else [value]


def flatten(values: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
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

    return [x for v in values for x in arrays_of(v)], make
