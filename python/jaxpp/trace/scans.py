"""Scans over microbatches, which become loops of the pipeline.

The iterations of a loop do not wait for each other, so a state that a scan carries from one to
the next must be one of these:

- constant: no iteration changes it;
- reduced: each iteration only adds a value to it, or takes the maximum of both. The loop
  reduces the values, and the initial state is added after it;
- known in advance: it depends on no stage, such as a counter or a key. A scan before the loop
  computes it for every microbatch;
- replaced: each iteration overwrites it unread, so the value of the last one remains.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpp.errors import describe, make_error
from jaxpp.jax_internals.jaxprs import (
    changed_jaxpr,
    drop_unused,
    evaluate,
    names_of,
    scan_sizes,
)
from jaxpp.jax_internals.lines import user_line
from jaxpp.operations import Add, Concat, Max, accumulate
from jaxpp.trace.inlining import inlined
from jaxpp.trace.loop import microbatch_of, run_loop
from jaxpp.trace.marks import calls_marks, first_mark, holds_marks

__all__ = ["scans_to_loops"]

_OPERATIONS: dict[str, Add | Max] = {"add": Add(), "add_any": Add(), "max": Max()}

# Equations that leave their operand as it is if its shape and dtype stay the same.
_UNCHANGING = {"convert_element_type", "sharding_constraint"}


# --- The states of a scan ---------------------------------------------------------------


def _with_calls_inlined(closed: ClosedJaxpr, numbers: range) -> ClosedJaxpr:
    """The jaxpr with the calls inlined that take one of these arguments."""
    chosen = set(closed.jaxpr.invars[numbers.start : numbers.stop])
    if not any(inlined(eqn) and chosen.intersection(_variables(eqn)) for eqn in closed.eqns):
        return closed

    def run(*args: Any) -> list[Any]:
        taken = {id(args[k]) for k in numbers}

        def inline(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
            called = inlined(eqn)
            if called is None or not any(id(o) in taken for o in operands):
                return None
            return evaluate(called, operands, inline)

        return evaluate(closed, args, inline)

    return jax.make_jaxpr(run)(*closed.in_avals)


def _variables(eqn: JaxprEqn) -> list[Var]:
    return [v for v in eqn.invars if isinstance(v, Var)]


class _Scan:
    """A scan over microbatches. A state is given by its number.

    Attributes:
      title: its name in messages.
      body: an iteration.
      constant, known, replaced: the states of each kind.
      reduced: the operation that reduces each of the other states.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        self.title = f"jax.lax.scan at {user_line(eqn) or '?'}"
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        given: ClosedJaxpr = eqn.params["jaxpr"]
        self.arg_names, self.names = names_of(given)
        self.num_consts, self.num_states = scan_sizes(eqn.params)
        end = self.num_consts + self.num_states
        self.body = _with_calls_inlined(given, range(self.num_consts, end))
        jaxpr = self.body.jaxpr
        self._states = jaxpr.invars[self.num_consts : end]
        self._nexts = jaxpr.outvars[: self.num_states]
        self._readers: dict[Var, list[JaxprEqn | None]] = {}  # None: it is a result
        for reader in (*jaxpr.eqns, None):
            for v in _variables(reader) if reader else jaxpr.outvars:
                if isinstance(v, Var):
                    self._readers.setdefault(v, []).append(reader)
        self._steps: list[JaxprEqn] = []  # the equations that only reduce
        numbers = range(self.num_states)
        self.constant = {k for k in numbers if self._nexts[k] is self._states[k]}
        self.reduced: dict[int, Add | Max] = {}
        readers = {k: self._find_reduction(k) for k in numbers if k not in self.constant}
        self.known = self._find_known(readers.keys() - self.reduced)
        self.replaced = readers.keys() - self.reduced - self.known
        for k in sorted(self.replaced):
            if self._states[k] in self._readers:
                self._refuse(k, readers[k])

    def _find_reduction(self, k: int) -> JaxprEqn | None:
        """Finds out whether an iteration only reduces a value into a state. If not, returns
        an equation that reads the state for something else, or None if that is a result."""
        value, steps = self._states[k], []
        operation: Add | Max | None = None
        while value is not self._nexts[k] or len(self._readers[value]) > 1:
            # A reader that does something else comes first.
            reader, *others = sorted(self._readers.get(value, [None]), key=self._is_reduction)
            if reader is None or others or not self._is_reduction(reader):
                return reader
            own = _OPERATIONS.get(reader.primitive.name, operation)
            if operation not in (None, own):
                return reader
            operation = own
            steps.append(reader)
            value = reader.outvars[0]
        if operation is not None:
            self.reduced[k] = operation
            self._steps += steps
        return None

    @staticmethod
    def _is_reduction(eqn: JaxprEqn | None) -> bool:
        if eqn is None or eqn.primitive.name not in (*_OPERATIONS, *_UNCHANGING):
            return False
        types = {(v.aval.shape, v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)}
        return len(types) == 1

    def _find_known(self, candidates: set[int]) -> set[int]:
        """The states that depend on no stage and on no effect."""
        needs = {k: self._needs(k) for k in candidates}
        unknown = {k for k in candidates if needs[k] is None}
        while more := {k for k in candidates - unknown if unknown.intersection(needs[k] or ())}:
            unknown |= more
        return candidates - unknown

    def _needs(self, k: int) -> set[int] | None:
        """The states that the next one depends on; None if it depends on a stage or an
        effect."""
        part = self.part([k])
        atoms = [*part.outvars, *(v for eqn in part.eqns for v in eqn.invars)]
        used = {v for v in atoms if isinstance(v, Var)}
        made = {v for eqn in part.eqns for v in eqn.outvars}
        if holds_marks(part) or used - made - {*part.invars, *part.constvars}:
            return None
        return {n for n, v in enumerate(self._states) if v in used}

    def part(self, numbers: Collection[int]) -> Jaxpr:
        """The part of an iteration that computes the next of some states, without what has
        an effect."""
        eqns = [eqn for eqn in self.body.eqns if not eqn.effects]
        jaxpr = changed_jaxpr(self.body, eqns=eqns).jaxpr
        return drop_unused(jaxpr, [k in numbers for k in range(len(jaxpr.outvars))])

    def _refuse(self, k: int, reader: JaxprEqn | None) -> None:
        name = self.arg_names[self.num_consts + k] or f"state {k}"
        use = "each iteration returns it as well"
        if reader:
            use = f"{user_line(reader) or 'the iteration'} reads it"
        raise make_error(
            "unsupported",
            f"{self.title}: its carry {name}, {self._states[k].aval.str_short()}, depends on "
            f"the stages, and {use}, so a microbatch would wait until the one before has "
            "passed all stages; expected a carry that iterations only add to or take the "
            "maximum with, or that depends on no stage, such as a counter or a key.\n"
            "Read the sum after the scan, or stack the values of the microbatches",
        )

    def without_reductions(self) -> ClosedJaxpr:
        """The iteration with the values to reduce as its results, in place of the states that
        they are reduced into."""
        values: dict[Any, Any] = {self._states[k]: None for k in self.reduced}
        steps, eqns = set(map(id, self._steps)), []

        def read(atom: Any) -> Any:
            return values.get(atom, atom) if isinstance(atom, Var) else atom

        for eqn in self.body.eqns:
            operands = [read(v) for v in eqn.invars]
            if id(eqn) in steps and None in operands:  # there is no value yet
                others = [o for o in operands if o is not None]
                values[eqn.outvars[0]] = others[0] if others else None
            else:
                eqns.append(eqn.replace(invars=operands))
        outs = [read(v) for v in self.body.jaxpr.outvars]
        return changed_jaxpr(self.body, eqns=eqns, outvars=outs)


# --- The loop ---------------------------------------------------------------------------


def _run_as_loop(eqn: JaxprEqn, operands: Sequence[Any], schedule: Any) -> list[Any]:
    """The results of a scan over microbatches, from a loop."""
    scan = _Scan(eqn)
    operands = [
        jnp.asarray(o, v.aval.dtype) if isinstance(v, Literal) else o
        for o, v in zip(operands, eqn.invars, strict=True)
    ]
    known, end = sorted(scan.known), scan.num_consts + scan.num_states
    first, rows = operands[scan.num_consts : end], tuple(operands[end:])

    def arguments(states: Sequence[Any], row: Sequence[Any]) -> list[Any]:
        """The arguments of an iteration with these states known in advance and this row."""
        found = list(operands[:end])
        for k, state in zip(known, states, strict=True):
            found[scan.num_consts + k] = state
        return [*found, *row]

    advance = jaxpr_as_fun(ClosedJaxpr(scan.part(known), scan.body.consts))
    body = jaxpr_as_fun(scan.without_reductions())
    last, before = (
        jax.lax.scan(
            lambda states, row: (advance(*arguments(states, row)), states),
            [first[k] for k in known],
            rows,
            scan.length,
            scan.reverse,
        )
        if known
        else ((), ())
    )
    left = [k for k in range(len(eqn.outvars)) if k not in scan.known | scan.constant]

    def run_one(i: jax.Array) -> list[Any]:
        states, row = ([microbatch_of(x, i) for x in xs] for xs in (before, rows))
        outs = body(*arguments(states, row))
        return [jnp.asarray(outs[k]) for k in left]

    names = [scan.names[k] for k in left]
    operations = [scan.reduced.get(k, Concat()) for k in left]
    found = run_loop(
        run_one, run_one, scan.length, schedule, operations, scan.title, names=names
    )
    results = dict(zip(left, found, strict=True))
    for k, operation in scan.reduced.items():
        results[k] = accumulate(operation, first[k], results[k], None)
    for k in scan.replaced:
        results[k] = results[k][0 if scan.reverse else -1]
    results.update((k, first[k]) for k in scan.constant)
    results.update(zip(known, last, strict=True))
    return [results[k] for k in range(len(eqn.outvars))]


def _is_marked(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and calls_marks(eqn)


def _marked_scans(jaxpr: ClosedJaxpr | Jaxpr) -> list[JaxprEqn]:
    """The scans with stage marks that a step runs, not those in other scans or branches."""
    found = []
    for eqn in jaxpr.eqns:
        if _is_marked(eqn):
            found.append(eqn)
        elif (called := inlined(eqn)) is not None:
            found += _marked_scans(called)
    return found


def scans_to_loops(closed: ClosedJaxpr, schedule: Any, who: str) -> ClosedJaxpr:
    """The step with each scan that has stage marks replaced by a loop under the schedule.

    Raises:
      JaxppError: the schedule has several stages, but no scan has stage marks ("schedule");
        iterations wait for each other, or the scan was differentiated ("unsupported").
    """
    scans = _marked_scans(closed)
    if not scans:
        if getattr(schedule, "num_stages", None) == 1:  # the last stage needs no mark
            return closed
        raise make_error(
            "schedule",
            f"{who}: schedule={describe(schedule)} is for a jax.lax.scan over microbatches "
            "that runs the function with the stage marks, at the top level of the step; found "
            "none. treduce takes its schedule as an argument",
        )
    for eqn in scans:
        if first_mark(eqn.params["jaxpr"].jaxpr) is None:
            raise make_error(
                "unsupported",
                f"jax.lax.scan at {user_line(eqn) or '?'} is differentiated, so every forward "
                "would end before the first backward; expected jax.value_and_grad inside the "
                "function that the scan runs, and the sum of the gradients as its carry",
            )

    def replace(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if _is_marked(eqn):
            return _run_as_loop(eqn, operands, schedule)
        called = inlined(eqn)
        if called is None or not _marked_scans(called):
            return None
        return evaluate(called, operands, replace)

    return jax.make_jaxpr(lambda *args: evaluate(closed, args, replace))(*closed.in_avals)
