"""A rematerialised backward with stage marks in it, cut at the marks.

JAX transposes a function under `jax.checkpoint` into one equation, which first recomputes
the values that the backward uses, and then runs the backward of the whole function. A
backward mark in it ends the part that the later stage runs and begins the part that the
earlier one runs. Each of these parts has its own barrier and recomputes the values that
it uses, so that a mark inside a checkpoint cuts the backward as a mark between two
checkpoints does.

JAX saves the results of a mark (`never_recompute`), so a part never recomputes a value
from before a mark, unless the value bypasses the mark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jaxpp.errors import make_error
from jaxpp.jax_internals.jaxprs import is_recomputed, jaxprs_in
from jaxpp.jax_internals.lines import user_line
from jaxpp.trace.marks import calls_marks, mark_backward_p

__all__ = ["CutRecomputation", "Item"]

# The jaxpr that an equation calls; None if it stays a call.
Called: TypeAlias = Callable[[JaxprEqn], ClosedJaxpr | Jaxpr | None]

_PRODUCTS = {jax.lax.dot_general_p, jax.lax.conv_general_dilated_p}


@dataclasses.dataclass
class Item:
    """An equation of the recomputation. Values are numbered; operands may also be literals."""

    eqn: JaxprEqn
    operands: list[Any]
    results: list[int]
    recomputed: bool
    parts: set[int]  # the parts that contain it; several if each recomputes it


class CutRecomputation:
    """The equations of a rematerialised backward, each with its part.

    Calls that are recomputed, and calls that contain marks, are inlined, including
    checkpoints inside this one. Part 0 is the backward of the latest stage. A mark is the
    last item of the part that it ends.

    Attributes:
      items: in order.
      num_parts: one more than the marks.
      num_operands: the operands are the values 0 .. num_operands - 1.
      consts: constants, by the number of their value.
      results: numbers or literals.

    Raises:
      JaxppError: "stage-marks", if two parts would both recompute a product.
    """

    def __init__(self, jaxpr: Jaxpr, called: Called) -> None:
        self._called = called
        self.items: list[Item] = []
        self.consts: dict[int, Any] = {}
        self.num_operands = self._num_values = len(jaxpr.invars)
        self.results = self._flatten(jaxpr, range(self.num_operands), False)
        marks = [item for item in self.items if item.eqn.primitive is mark_backward_p]
        self.num_parts = len(marks) + 1
        self._place_backward()
        self._place_recomputed()
        self._refuse_repeated_products(marks)

    def operands_of(self, part: int) -> list[int]:
        """The operands that the equations of a part take, except for its mark."""
        items = (i for i in self.items if part in i.parts)
        used = {
            v
            for i in items
            if i.eqn.primitive is not mark_backward_p
            for v in _numbers(i.operands)
        }
        return [v for v in range(self.num_operands) if v in used]

    def _new_values(self, count: int) -> list[int]:
        self._num_values += count
        return list(range(self._num_values - count, self._num_values))

    def _flatten(
        self, called: ClosedJaxpr | Jaxpr, operands: Sequence[Any], recomputed: bool
    ) -> list[Any]:
        jaxpr, consts = called, []
        if isinstance(called, ClosedJaxpr):
            jaxpr, consts = called.jaxpr, called.consts
        numbers = self._new_values(len(consts))
        self.consts.update(zip(numbers, consts, strict=True))
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, numbers, strict=True))
        values.update(zip(jaxpr.invars, operands, strict=True))

        def read(atoms: Sequence[Any]) -> list[Any]:
            return [a if isinstance(a, Literal) else values[a] for a in atoms]

        for eqn in jaxpr.eqns:
            inner = self._called(eqn)
            again = recomputed or is_recomputed(eqn)
            if inner is not None and (again or calls_marks(eqn)):
                results = self._flatten(inner, read(eqn.invars), again)
            else:
                results = self._new_values(len(eqn.outvars))
                self.items.append(Item(eqn, read(eqn.invars), results, again, set()))
            values.update(zip(eqn.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def _place_backward(self) -> None:
        """An equation that depends on a mark is in the part that the mark begins."""
        begun: dict[int, int] = {}  # the last part on which a value depends
        marks = 0
        for item in self.items:
            part = max((begun.get(v, 0) for v in _numbers(item.operands)), default=0)
            if item.eqn.primitive is mark_backward_p:
                item.parts, item.recomputed = {marks}, False
                marks += 1
                part = marks
            elif part or not item.recomputed:
                item.parts, item.recomputed = {part}, False
            begun.update(dict.fromkeys(item.results, part))

    def _place_recomputed(self) -> None:
        """A recomputed equation is in the parts that use it. An effect happens once: in
        the first part that uses it or, if no part does, in the last one that has one of
        its operands."""
        self._place_by_users()
        made_in = {v: item.parts for item in self.items for v in item.results}
        for item in self.items:
            if not item.eqn.effects or not item.recomputed:
                continue
            near = set().union(*(made_in.get(v, ()) for v in _numbers(item.operands)))
            last = max(near, default=self.num_parts - 1)
            item.parts, item.recomputed = {min(item.parts, default=last)}, False
        self._place_by_users()

    def _place_by_users(self) -> None:
        users = {v: {self.num_parts - 1} for v in _numbers(self.results)}
        for item in reversed(self.items):
            if item.recomputed:
                item.parts = set().union(*(users.get(v, ()) for v in item.results))
            for v in _numbers(item.operands):
                users.setdefault(v, set()).update(item.parts)

    def _refuse_repeated_products(self, marks: Sequence[Item]) -> None:
        for item in self.items:
            if len(item.parts) < 2 or not _holds_product(item.eqn):
                continue
            mark = marks[min(item.parts)].eqn.params["where"]
            raise make_error(
                "stage-marks",
                f"the stage mark at {mark} is inside jax.checkpoint, and the backward "
                "of the stages on both sides of it uses what "
                f"{user_line(item.eqn) or '?'} computes, so both would compute it "
                "again; expected only values that pass through the mark to be used "
                "after it.\nPass the value through the mark, as in `x, value = "
                "mark_stage_end((x, value))`, or end the checkpoint at the mark and "
                "begin another one after it.",
            )


def _numbers(values: Sequence[Any]) -> list[int]:
    return [v for v in values if isinstance(v, int)]


def _holds_product(eqn: JaxprEqn) -> bool:
    inner = (e for jaxpr in jaxprs_in(eqn.params) for e in jaxpr.eqns)
    return eqn.primitive in _PRODUCTS or any(map(_holds_product, inner))
