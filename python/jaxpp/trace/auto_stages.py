"""Functions without stage marks, cut into stages of equal work.

`auto_stages` traces the function, lets the planner divide its equations
(`jaxpp/partition_cut.h`), and evaluates them again with a stage mark at each boundary, on all
values that pass it. It does so before the function is differentiated: the marks bring their own
backward.

- Equations that use one argument alone (a cast of a weight, a mask) cost nothing, since most of
  them leave the loop. They are part of the first stage that uses them, and no mark passes their
  results.
- A scan over layers can be cut between any two of its iterations.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp import _core
from jaxpp.errors import JaxppError, definition_line, make_error, shorten
from jaxpp.jax_internals.jaxprs import bind, drop_unused, scan_sizes, settings_of
from jaxpp.jax_internals.lines import at_line_of
from jaxpp.trace.bodies import PLAIN_CALLS, inlined_call, is_plain_jit
from jaxpp.trace.marks import holds_marks, mark_stage_end
from jaxpp.trace.work import bytes_of, work

__all__ = ["Cut", "auto_stages", "cutting"]

_MOST_LAYERS = 1024  # of a scan that can be cut


# --- The function -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: Any


# A value's number in the function, or a constant.
_Operand = int | _Constant


@dataclasses.dataclass
class _Op:
    """An equation, `rows` of a scan over layers, or one stacked result of all its rows."""

    eqn: JaxprEqn
    operands: list[_Operand]
    results: list[int]
    cost: float
    rows: range | None = None
    stacks: bool = False
    has_work: bool = True  # False: it is part of the first stage that uses it

    def values(self) -> Iterator[int]:
        return (v for v in self.operands if isinstance(v, int))


class _Function:
    """The ops of a jaxpr, with its jits inlined and its scans over layers unrolled."""

    def __init__(self, closed: ClosedJaxpr) -> None:
        self.ops: list[_Op] = []
        self.bytes: list[int] = []  # of each value
        self.sources: list[frozenset[int]] = []  # the arguments that each value is made of
        args = [*closed.jaxpr.constvars, *closed.jaxpr.invars]
        for number, var in enumerate(args):
            self._new_value(var.aval, frozenset([number]))
        numbers, num_consts = list(range(len(args))), len(closed.consts)
        self.results = self._add(closed.jaxpr, numbers[:num_consts], numbers[num_consts:])

    def _new_value(self, aval: Any, sources: frozenset[int], share: int = 1) -> int:
        self.bytes.append(bytes_of(aval) // share)
        self.sources.append(sources)
        return len(self.bytes) - 1

    def sources_of(self, operands: Iterable[_Operand]) -> frozenset[int]:
        """The arguments that some operands are made of."""
        found = (self.sources[v] for v in operands if isinstance(v, int))
        return functools.reduce(frozenset.union, found, frozenset())

    def _add(
        self, jaxpr: Jaxpr, consts: Sequence[_Operand], args: Sequence[_Operand]
    ) -> list[_Operand]:
        """Appends the ops of a jaxpr and returns its results."""
        env: dict[Var, _Operand] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any) -> _Operand:
            return _Constant(atom.val) if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            called = inlined_call(eqn) if eqn.primitive.name in PLAIN_CALLS else None
            outs: list[_Operand]
            if isinstance(called, ClosedJaxpr) and is_plain_jit(eqn):
                outs = self._add(called.jaxpr, [_Constant(c) for c in called.consts], operands)
            elif self._is_over_layers(eqn, operands):
                outs = self._add_rows(eqn, operands)
            else:
                sources = self.sources_of(operands)
                if eqn.effects:  # never part of another op
                    sources |= {-1, -2}
                results = [self._new_value(v.aval, sources) for v in eqn.outvars]
                self.ops.append(_Op(eqn, operands, results, work(eqn)))
                outs = [*results]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _is_over_layers(self, eqn: JaxprEqn, operands: Sequence[_Operand]) -> bool:
        """Whether a scan takes most of its weights row by row."""
        if eqn.primitive.name != "scan" or eqn.effects or eqn.params["reverse"]:
            return False
        consts, states = scan_sizes(eqn.params)
        shared, by_row = (
            sum(self.bytes[v] for v in part if isinstance(v, int) and len(self.sources[v]) == 1)
            for part in (operands[:consts], operands[consts + states :])
        )
        return 1 < eqn.params["length"] <= _MOST_LAYERS and states > 0 and by_row > shared

    def _add_rows(self, eqn: JaxprEqn, operands: Sequence[_Operand]) -> list[_Operand]:
        """Appends an op for each row of a scan, and one for each stacked result."""
        consts, states = scan_sizes(eqn.params)
        length, sources = eqn.params["length"], self.sources_of(operands)
        state: list[_Operand] = [*operands[consts : consts + states]]
        stacked = []
        for row in range(length):
            given = [*operands[:consts], *state, *operands[consts + states :]]
            new = [self._new_value(v.aval, sources) for v in eqn.outvars[:states]]
            more = [self._new_value(v.aval, sources, length) for v in eqn.outvars[states:]]
            cost = work(eqn) / length
            self.ops.append(_Op(eqn, given, [*new, *more], cost, range(row, row + 1)))
            state = [*new]
            stacked.append(more)
        outs = [self._new_value(v.aval, sources) for v in eqn.outvars[states:]]
        for out, rows in zip(outs, zip(*stacked, strict=True), strict=True):
            self.ops.append(_Op(eqn, [*rows], [out], 0.0, stacks=True))
        return [*state, *outs]


# --- The cut ----------------------------------------------------------------------------

Times = tuple[float, float, float]  # forward, input gradient, weight gradient


@dataclasses.dataclass
class Cut:
    """How a step's trace cuts a function whose number of stages the user left open.

    Attributes:
      num_stages: into how many stages.
      times: of each op with work; None: `jaxpp.trace.work.work` counts instead.
      functions: how many such functions the trace has cut.
      costs, stages: of each op with work of the function that was cut last.
    """

    num_stages: int
    times: list[Times] | None = None
    functions: int = 0
    costs: list[float] = dataclasses.field(default_factory=list)
    stages: list[int] = dataclasses.field(default_factory=list)

    def measured(self, stages: Sequence[Times]) -> list[Times]:
        """The time of each op, if each stage takes these times: its share of the costs."""
        totals = [0.0] * self.num_stages
        for cost, stage in zip(self.costs, self.stages, strict=True):
            totals[stage] += cost
        shares = (
            (cost / totals[stage] if totals[stage] else 0.0, stages[stage])
            for cost, stage in zip(self.costs, self.stages, strict=True)
        )
        return [(share * f, share * i, share * w) for share, (f, i, w) in shares]

    def stage_times(self) -> list[Times]:
        """The sums of `times` by stage."""
        assert self.times is not None
        sums = np.zeros((self.num_stages, 3))
        np.add.at(sums, self.stages, self.times)
        return [(f, i, w) for f, i, w in sums.tolist()]


_open_cut: contextvars.ContextVar[Cut | None] = contextvars.ContextVar("cut", default=None)


@contextlib.contextmanager
def cutting(cut: Cut) -> Iterator[None]:
    """Functions that are traced meanwhile, and whose number of stages is open, are cut like
    this."""
    token = _open_cut.set(cut)
    try:
        yield
    finally:
        _open_cut.reset(token)


def _stages_of(function: _Function, num_stages: int, cut: Cut | None) -> list[int]:
    """The stage of each op. Finds out which ops have work of their own."""
    ops = function.ops
    for op in ops:
        op.has_work = len(function.sources_of(op.values())) > 1 or bool(op.eqn.effects)
    if not any(op.has_work for op in ops):  # a function of one argument
        for op in ops:
            op.has_work = True
    work = [op for op in ops if op.has_work]
    maker = {v: k for k, op in enumerate(work) for v in op.results}
    number = {v: k for k, v in enumerate(maker)}
    operands = [(v, k) for k, op in enumerate(work) for v in set(op.values())]
    uses = [(number[v], user) for v, user in operands if v in number]
    costs = [op.cost for op in work]
    if cut and cut.times and len(cut.times) == len(costs):
        costs = [sum(times) for times in cut.times]
    found = _core.cut_stages(
        costs,
        list(maker.values()),
        [function.bytes[v] for v in maker],
        [value for value, _ in uses],
        [user for _, user in uses],
        num_stages,
    )
    if cut is not None:
        cut.functions, cut.costs, cut.stages = cut.functions + 1, costs, list(found)
    stages = []
    first_use: dict[int, int] = {}  # the first stage that uses each value
    for op in reversed(ops):
        stage = min((first_use[v] for v in op.results if v in first_use), default=0)
        if op.has_work:
            stage = found.pop()
        stages.append(stage)
        first_use.update((v, min(stage, first_use.get(v, stage))) for v in op.values())
    return stages[::-1]


def _join_rows(ops: Sequence[_Op], stages: Sequence[int]) -> Iterator[tuple[_Op, int]]:
    """The ops, with the rows of a scan joined where they are in the same stage. Joined rows
    return their stacked results as those of their first row."""
    last: tuple[_Op, int] | None = None
    for op, stage in zip(ops, stages, strict=True):
        if last and op.rows and op.rows.start > 0 and stage == last[1]:
            joined, _ = last
            assert joined.rows is not None
            _, states = scan_sizes(op.eqn.params)
            rows = range(joined.rows.start, op.rows.stop)
            results = [*op.results[:states], *joined.results[states:]]
            last = dataclasses.replace(joined, results=results, rows=rows), stage
            continue
        if last:
            yield last
        last = op, stage
    if last:
        yield last


# --- The evaluation ---------------------------------------------------------------------


def _run(op: _Op, operands: list[Any]) -> list[Any]:
    if op.stacks:
        return [jnp.concatenate(operands)]
    params = op.eqn.params
    if op.rows:
        first = sum(scan_sizes(params))
        begin, end = op.rows.start, op.rows.stop
        stacked = [jax.lax.slice_in_dim(x, begin, end) for x in operands[first:]]
        operands = [*operands[:first], *stacked]
        length = len(op.rows)
        params = {**params, "length": length, "unroll": min(params["unroll"], length)}
    return bind(op.eqn.primitive, params, operands)


def _run_in_stages(
    closed: ClosedJaxpr, function: _Function, stages: Sequence[int], args: Sequence[Any]
) -> list[Any]:
    """The results of the function, with a mark at the end of each stage."""
    env: dict[int, Any] = dict(enumerate([*closed.consts, *args]))
    ops = list(_join_rows(function.ops, stages))
    by_stage = sorted(ops, key=operator.itemgetter(1))
    last_use = {v: stage for op, stage in by_stage for v in op.values()}
    passing: set[int] = set()
    for stage in range(max(stages) + 1):
        for op in (op for op, at in ops if at == stage):
            given = [
                env[v] if isinstance(v, int) else v.value
                for v in op.operands
                if not op.stacks or v in env  # other rows are part of the first of their stage
            ]
            with settings_of(op.eqn), at_line_of(op.eqn):
                env.update(zip(op.results, _run(op, given), strict=True))
            if op.has_work:
                passing.update(op.results)
        passed = [v for v in sorted(passing) if last_use.get(v, 0) > stage]
        if stage == max(stages):
            made = {v for op, at in ops if at == stage and op.has_work for v in op.results}
            passed = sorted(
                made.intersection(v for v in function.results if isinstance(v, int))
            )
        env.update(zip(passed, mark_stage_end([env[v] for v in passed]), strict=True))
    return [env[v] if isinstance(v, int) else v.value for v in function.results]


# --- The public function ----------------------------------------------------------------


def auto_stages(fun: Callable[..., Any], num_stages: int | None = None) -> Callable[..., Any]:
    """A function that computes the same in `num_stages` pipeline stages of equal work.

    Traces `fun` and puts stage marks (`mark_stage_end`) where the stage with the most work has
    as little as possible, and little is passed from stage to stage. An operation's work is the
    larger of its floating-point operations and of those that the device could do while it
    reads and writes memory.
    For functions that `treduce` runs, such as a loss, before they are differentiated. Skip
    connections, several inputs, heavy heads and scans over layers are cut as well; what is
    inside of `jax.checkpoint`, other loops and `custom_vjp` is not.

    Args:
      fun: a function of pytrees without marks. Leaves that are not arrays stay as they are.
      num_stages: at least 1. None: one for each rank or, in a loop with `schedule=Auto(...)`,
        the number that lets the loop end first, with stages of equal measured time.

    Raises:
      JaxppError("stage-marks"): `fun` has marks already, or too few operations that depend on
      each other.
    """
    is_number = isinstance(num_stages, int) and not isinstance(num_stages, bool)
    if num_stages is not None and (not is_number or num_stages < 1):
        raise make_error(
            "invalid-argument",
            f"auto_stages: num_stages={shorten(num_stages)}; expected a whole "
            "number, at least 1",
            wrong_type=not isinstance(num_stages, int),
        )

    @functools.wraps(fun)
    def in_stages(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [k for k, leaf in enumerate(leaves) if isinstance(leaf, _ARRAYS)]
        out_tree = None

        def flat(*given: Any) -> list[Any]:
            nonlocal out_tree
            filled = list(leaves)
            for k, leaf in zip(arrays, given, strict=True):
                filled[k] = leaf
            filled_args, filled_kwargs = tree.unflatten(filled)
            results, out_tree = jax.tree.flatten(fun(*filled_args, **filled_kwargs))
            return results

        given = [leaves[k] for k in arrays]
        closed = jax.make_jaxpr(flat)(*given)
        assert out_tree is not None
        where = definition_line(fun)
        if holds_marks(closed.jaxpr):
            raise make_error(
                "stage-marks",
                f"auto_stages of the function at {where}: it has stage marks; expected a "
                "function without them",
            )
        closed = ClosedJaxpr(drop_unused(closed.jaxpr), closed.consts)
        function = _Function(closed)
        cut = None if num_stages is not None else _open_cut.get()
        wanted = cut.num_stages if cut else num_stages or 1
        try:
            stages = _stages_of(function, wanted, cut)
        except JaxppError as error:
            raise make_error(
                "stage-marks", f"auto_stages of the function at {where}: {error}"
            ) from None
        return out_tree.unflatten(_run_in_stages(closed, function, stages, given))

    return in_stages


_ARRAYS = (jax.Array, np.ndarray, np.generic)
