"""Scans over microbatches, which become loops of the pipeline.

The iterations of a loop do not wait for each other, so a state that a scan carries from one to the
next must be one of these:

- constant: no iteration changes it;
- a reduction: each iteration only adds a value to it, or takes the maximum of both. The loop
  reduces the values, and the initial state is added after it;
- known in advance: it depends on no stage, such as a counter or a key. A scan before the loop
  computes it for every microbatch;
- replaced: each iteration overwrites it unread, so the value of the last one remains.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

from jaxpp.errors import describe, make_error
from jaxpp.jax_internals.jaxprs import (
    bind,
    changed_jaxpr,
    drop_unused,
    jaxprs_in,
    names_of,
    scan_sizes,
    settings_of,
)
from jaxpp.jax_internals.lines import at_line_of, user_line
from jaxpp.operations import Add, Concat, Max, accumulate
from jaxpp.trace.inlining import inlined
from jaxpp.trace.loop import microbatch_of, run_loop
from jaxpp.trace.marks import first_mark, holds_marks

__all__ = ["scans_to_loops"]

_OPERATIONS = {"add": Add(), "add_any": Add(), "max": Max()}


def _is_marked(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" and any(map(holds_marks, jaxprs_in(eqn.params)))


# --- The states of a scan ---------------------------------------------------------------


class _States:
    """What becomes of the states that a scan carries, each given by its number."""

    def __init__(self, eqn: JaxprEqn) -> None:
        self.title = f"jax.lax.scan at {user_line(eqn) or '?'}"
        self.closed: ClosedJaxpr = eqn.params["jaxpr"]
        jaxpr = self.closed.jaxpr
        self.num_consts, self.num_states = scan_sizes(eqn.params)
        self.states = jaxpr.invars[self.num_consts : self.num_consts + self.num_states]
        self.outs = jaxpr.outvars[: self.num_states]
        self.readers: dict[Var, list[JaxprEqn | None]] = {}  # None: the result
        for reader in (*jaxpr.eqns, None):
            for v in reader.invars if reader else jaxpr.outvars:
                if isinstance(v, Var):
                    self.readers.setdefault(v, []).append(reader)
        self.reduced: dict[int, Add | Max] = {}
        self.steps: list[JaxprEqn] = []  # the equations that only reduce
        for k, (state, out) in enumerate(zip(self.states, self.outs, strict=True)):
            if out is not state:
                self._follow(k)
        self.known = self._find_known()
        changed = set(range(self.num_states)) - self.known - self.reduced.keys()
        self.constant = {k for k in changed if self.outs[k] is self.states[k]}
        self.replaced = changed - self.constant
        self._refuse_read(self.replaced)

    def _follow(self, k: int) -> None:
        """Finds out whether the iteration does nothing with a state but reduce into it."""
        value, operation, steps = self.states[k], None, []
        while len(readers := self.readers.get(value, [])) == 1 and readers[0] is not None:
            (eqn,) = readers
            given, own = eqn.outvars[0].aval, _OPERATIONS.get(eqn.primitive.name)
            same = (given.shape, given.dtype) == (value.aval.shape, value.aval.dtype)
            is_step = own is not None and operation in (None, own)
            if not same or not (is_step or eqn.primitive.name in _UNCHANGING):
                return
            operation = own or operation
            steps.append(eqn)
            value = eqn.outvars[0]
        if operation is not None and value is self.outs[k]:
            self.reduced[k] = operation
            self.steps += steps

    def _find_known(self) -> set[int]:
        """The states that depend on no stage and on no effect."""
        candidates = {
            k
            for k in range(self.num_states)
            if k not in self.reduced and self.outs[k] is not self.states[k]
        }
        needs = {k: self._needs([k]) for k in candidates}
        unknown = {k for k in candidates if needs[k] is None}
        while more := {k for k in candidates - unknown if needs[k] & unknown}:
            unknown |= more
        return candidates - unknown

    def _needs(self, numbers: list[int]) -> set[int] | None:
        """The states that those of the next iteration depend on; None if they depend on a
        stage or an effect."""
        part = self.part(numbers)
        atoms = [*part.outvars, *(v for eqn in part.eqns for v in eqn.invars)]
        used = {v for v in atoms if isinstance(v, Var)}
        made = {v for eqn in part.eqns for v in eqn.outvars}
        if holds_marks(part) or used - made - {*part.invars, *part.constvars}:
            return None
        return {k for k, v in enumerate(self.states) if v in used}

    def part(self, numbers: Collection[int]) -> Jaxpr:
        """The part of the iteration that computes the next of some states, without what has
        an effect."""
        jaxpr = self.closed.jaxpr
        quiet = changed_jaxpr(self.closed, eqns=[eqn for eqn in jaxpr.eqns if not eqn.effects])
        return drop_unused(quiet.jaxpr, [k in numbers for k in range(len(jaxpr.outvars))])

    def _refuse_read(self, numbers: set[int]) -> None:
        for k in sorted(numbers):
            state = self.states[k]
            if state not in self.readers:
                continue
            reader = self.readers[state][0]
            line = user_line(reader) if reader else None
            names, _ = names_of(self.closed)
            name = names[self.num_consts + k] or f"carry {k}"
            raise make_error(
                "unsupported",
                f"{self.title}: its carry {name}, {state.aval.str_short()}, depends on the "
                f"stages, and {line or 'the iteration'} reads it, so a microbatch would wait "
                "until the one before has passed all stages; expected a carry that iterations "
                "only add to or take the maximum with, or that depends on no stage, such as a "
                "counter or a key.\n"
                "Read the sum after the scan, or stack the values of the microbatches",
            )

    # --- Their iterations ---

    def body(self) -> ClosedJaxpr:
        """The iteration with its values to reduce in place of the reduced states."""
        values: dict[Any, Any] = {self.states[k]: None for k in self.reduced}
        steps, eqns = set(map(id, self.steps)), []

        def read(atom: Any) -> Any:
            return values.get(atom, atom) if isinstance(atom, Var) else atom

        for eqn in self.closed.jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            if id(eqn) in steps and None in operands:  # there is no state to reduce into
                (values[eqn.outvars[0]],) = [o for o in operands if o is not None] or [None]
            else:
                eqns.append(eqn.replace(invars=operands))
        outs = [read(v) for v in self.closed.jaxpr.outvars]
        return changed_jaxpr(self.closed, eqns=eqns, outvars=outs)


# Equations that leave their operand as it is if its shape and dtype stay the same.
_UNCHANGING = {"convert_element_type", "sharding_constraint"}


# --- The loop ---------------------------------------------------------------------------


def _run_as_loop(eqn: JaxprEqn, operands: Sequence[Any], schedule: Any) -> list[Any]:
    """The results of a scan over microbatches, from a loop."""
    states = _States(eqn)
    params, count = eqn.params, states.num_states
    operands = [
        jnp.asarray(o, v.aval.dtype) if isinstance(v, Literal) else o
        for o, v in zip(operands, eqn.invars, strict=True)
    ]
    consts = operands[: states.num_consts]
    first = operands[states.num_consts : states.num_consts + count]
    rows = tuple(operands[states.num_consts + count :])
    known = sorted(states.known)

    def filled(current: Sequence[Any]) -> list[Any]:
        state = list(first)
        for k, value in zip(known, current, strict=True):
            state[k] = value
        return state

    last: Sequence[Any] = ()
    before: Sequence[Any] = ()
    if known:
        advance = jaxpr_as_fun(ClosedJaxpr(states.part(known), states.closed.consts))

        def run_advance(current: Any, row: Any) -> tuple[Any, Any]:
            return advance(*consts, *filled(current), *row), current

        given = [first[k] for k in known]
        length, reverse = params["length"], params["reverse"]
        last, before = jax.lax.scan(run_advance, given, rows, length, reverse)
    left = [k for k in range(len(eqn.outvars)) if k not in states.known | states.constant]
    run_body = jaxpr_as_fun(states.body())

    def run_one(i: jax.Array) -> list[Any]:
        current, row = ([microbatch_of(x, i) for x in xs] for xs in (before, rows))
        outs = run_body(*consts, *filled(current), *row)
        return [jnp.asarray(outs[k]) for k in left]

    _, names = names_of(states.closed)
    operations = [states.reduced.get(k, Concat()) for k in left]
    found = run_loop(
        run_one,
        run_one,
        params["length"],
        schedule,
        operations,
        states.title,
        names=[names[k] for k in left],
    )
    results = dict(zip(left, found, strict=True))
    for k, operation in states.reduced.items():
        results[k] = accumulate(operation, first[k], results[k], None)
    for k in states.replaced:
        results[k] = results[k][0 if params["reverse"] else -1]
    results.update((k, first[k]) for k in states.constant)
    results.update(zip(known, last, strict=True))
    return [results[k] for k in range(len(eqn.outvars))]


def _evaluate(closed: ClosedJaxpr, args: Sequence[Any], schedule: Any) -> list[Any]:
    env: dict[Var, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        called = inlined(eqn)
        with settings_of(eqn), at_line_of(eqn):
            if _is_marked(eqn):
                outs = _run_as_loop(eqn, operands, schedule)
            elif called is not None and _marked_scans(called):
                inner = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
                outs = _evaluate(inner, operands, schedule)
            else:
                outs = bind(eqn.primitive, eqn.params, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in closed.jaxpr.outvars]


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
      JaxppError("schedule"): there is none; ("unsupported"): its iterations wait for each
      other, or it was differentiated.
    """
    scans = _marked_scans(closed)
    if not scans:
        raise make_error(
            "schedule",
            f"{who}: schedule={describe(schedule)} is for a jax.lax.scan over microbatches that "
            "runs the function with the stage marks; found none in the step. treduce takes its "
            "schedule as an argument",
        )
    for eqn in scans:
        if first_mark(eqn.params["jaxpr"].jaxpr) is None:
            raise make_error(
                "unsupported",
                f"jax.lax.scan at {user_line(eqn) or '?'} is differentiated, so every forward "
                "would end before the first backward; expected jax.value_and_grad inside the "
                "function that the scan runs, and the sum of the gradients as its carry",
            )
    run = functools.partial(_evaluate, closed, schedule=schedule)
    return jax.make_jaxpr(lambda *args: run(args))(*closed.in_avals)
