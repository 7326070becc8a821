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

__all__ = ["StageOp", "differing", "scalars_of"]

# A module for the ops that a larger stage shares with others has at least so many ops
# (src/partition/share.c).
_FEWEST_OPS = 8


@dataclasses.dataclass(frozen=True)
class StageOp:
    """An op of a stage.

    Attributes:
      op: its number in the graph.
      code: equal for ops that compute the same, apart from scalars.
      scalars: its scalar constants, by their positions among its operands.
    """

    op: int
    code: int
    scalars: Mapping[int, Literal]


# Operations that XLA computes in another way if an operand is a constant.
_FIXED = {"pow"}


def scalars_of(primitive: Any, operands: Sequence[Any]) -> dict[int, Literal]:
    """The constants among an op's operands that may become arguments, by position."""
    if primitive.name in _FIXED:
        return {}
    literals = ((k, o) for k, o in enumerate(operands) if isinstance(o, Literal))
    return {k: literal for k, literal in literals if literal.aval.shape == ()}


def _find(pattern: Sequence[int], codes: Sequence[int]) -> int | None:
    """Where the pattern begins in a stage with these codes."""
    if len(pattern) < len(codes) and len(pattern) < _FEWEST_OPS:
        return None
    for at in range(len(codes) - len(pattern) + 1):
        if codes[at] == pattern[0] and codes[at : at + len(pattern)] == pattern:
            return at
    return None


def differing(stages: Sequence[Sequence[StageOp]]) -> dict[int, dict[int, Literal]]:
    """By op, the constants that differ between stages that otherwise compute the same, by
    their positions. Each stage has the ops of one of its forwards or backwards, in order."""
    codes = [tuple(op.code for op in stage) for stage in stages]
    found: dict[int, dict[int, Literal]] = {}
    for pattern, count in collections.Counter(codes).items():
        if count < 2 or not pattern:
            continue
        starts = [_find(pattern, own) for own in codes]
        equal = [
            stage[at : at + len(pattern)]
            for stage, at in zip(stages, starts, strict=True)
            if at is not None
        ]
        for ops in zip(*equal, strict=True):
            for k in ops[0].scalars:
                if len({literal_key(op.scalars[k]) for op in ops}) > 1:
                    for op in ops:
                        found.setdefault(op.op, {})[k] = op.scalars[k]
    return found
