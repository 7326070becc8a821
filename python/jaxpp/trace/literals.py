"""Constants in which the stages of a loop differ, such as the number of a layer from which a
key for dropout is made.

Stages that compute the same share a module. If they differ in scalars only, these become
arguments of the step, so that the stages still share it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxpp.trace.keys import literal_key

__all__ = ["StageConstants"]

# A module for the ops that a larger stage shares with others has at least so many ops
# (src/partition/share.c).
_FEWEST_OPS = 8

# Operations that XLA computes in another way if an operand is a constant.
_FIXED = {"pow"}


@dataclasses.dataclass(frozen=True)
class _StageOp:
    op: int  # its number in the graph
    code: int  # equal for ops that compute the same, apart from scalars
    scalars: Mapping[int, Literal]  # its scalar constants, by position


class StageConstants:
    """The constants of the ops in a step's loops, and the values that replace some of them."""

    def __init__(self) -> None:
        # The ops of each forward and backward of a stage, in order.
        self._stages: list[list[_StageOp]] = []
        self._codes: dict[Any, int] = {}
        self._values: dict[tuple[int, int], int] = {}  # by op and position

    def begin_stage(self) -> None:
        """The following ops belong to the forward or the backward of another stage."""
        self._stages.append([])

    def note(self, op: int, computed: Any, operands: Sequence[Any]) -> None:
        """Adds an op to the stage. `computed`, its primitive and keys of its parameters and of
        JAX's settings, is equal for ops that compute the same from the same operands."""
        literals = {k: o for k, o in enumerate(operands) if isinstance(o, Literal)}
        scalars = {
            k: o
            for k, o in literals.items()
            if o.aval.shape == () and computed[0].name not in _FIXED
        }
        others = tuple((k, k in scalars or literal_key(o)) for k, o in literals.items())
        key = (computed, len(operands), others)
        code = self._codes.setdefault(key, len(self._codes))
        self._stages[-1].append(_StageOp(op, code, scalars))

    def differing(self) -> dict[int, dict[int, Literal]]:
        """By op and position, the constants in which stages differ that otherwise compute the
        same."""
        codes = [tuple(op.code for op in stage) for stage in self._stages]
        found: dict[int, dict[int, Literal]] = {}
        for pattern, count in collections.Counter(codes).items():
            if count < 2 or not pattern:
                continue
            starts = [_find(pattern, own) for own in codes]
            equal = [
                stage[at : at + len(pattern)]
                for stage, at in zip(self._stages, starts, strict=True)
                if at is not None
            ]
            for ops in zip(*equal, strict=True):
                for k in ops[0].scalars:
                    if len({literal_key(op.scalars[k]) for op in ops}) > 1:
                        for op in ops:
                            found.setdefault(op.op, {})[k] = op.scalars[k]
        return found

    def replace(self, op: int, position: int, value: int) -> None:
        """Makes a value of the graph the operand of an op in place of a constant."""
        self._values[op, position] = value

    def replaced(self, op: int, operands: Sequence[Any]) -> Sequence[Any]:
        """The operands of an op with values in place of the constants that they replace."""
        if not self._values:
            return operands
        return [self._values.get((op, k), o) for k, o in enumerate(operands)]


def _find(pattern: Sequence[int], codes: Sequence[int]) -> int | None:
    """Where the pattern begins in a stage with these codes."""
    if len(pattern) < len(codes) and len(pattern) < _FEWEST_OPS:
        return None
    for at in range(len(codes) - len(pattern) + 1):
        if codes[at] == pattern[0] and codes[at : at + len(pattern)] == pattern:
            return at
    return None
