"""Gathers, for a loop, the weights that are sharded over the devices of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from jaxpp.trace.casts import without_casts
from jaxpp.trace.work import bytes_of

__all__ = ["Gather", "WeightGathers"]


@dataclasses.dataclass(frozen=True)
class Gather:
    """When a loop gathers a weight, and the weight's sharding before and after."""

    before: NamedSharding
    after: NamedSharding
    once: bool  # once a step, before the loop; False: in each task that uses it


def _constrained(weight: Any, *index: Any, sharding: NamedSharding) -> Any:
    return jax.lax.with_sharding_constraint(weight, sharding)


# Ops that only rearrange a weight, or cast it.
_PARTS = frozenset(
    (
        "broadcast_in_dim convert_element_type dynamic_slice expand_dims iota reshape rev "
        "slice squeeze transpose"
    ).split()
)

# A weight with a sharding. If it must run in each microbatch, it also takes the loop's
# index.
_gather_p = Primitive("gather_weight")
_gather_p.def_impl(_constrained)
_gather_p.def_abstract_eval(lambda weight, *index, sharding: weight)
mlir.register_lowering(_gather_p, mlir.lower_fun(_constrained, multiple_results=False))


class WeightGathers:
    """The gathers that a graph's loops need, added together with the ops that use the
    weights.

    Args:
      gathers: the gathers of weights, by value.
      add: adds an op of a primitive, with its params, operands and the type of its result
        (None: as the first operand), and returns the result; `cheap`: each task that needs the
        result computes it.
    """

    def __init__(
        self,
        gathers: Mapping[int, Gather],
        add: Callable[[Any, dict[str, Any], list[Any], Any, bool], int],
    ) -> None:
        self._of = dict(gathers)
        self._add = add
        self._weights = {value: value for value in gathers}  # of weights and of their casts
        self.gathered: set[int] = set()  # the weights that a loop gathers
        self._made: dict[int, int] = {}  # in a loop's body: the gathered values of weights
        self.parts: set[int] = set()  # values gathered at each use, and parts of them
        self._index: int | None = None  # of the loop

    def begin_loop(self, index: int) -> None:
        self._made, self.parts = {}, set()
        self._index = index

    def of(self, operand: Any) -> Gather | None:
        """How an operand is gathered; None if it is not gathered."""
        return self._of.get(operand) if isinstance(operand, int) else None

    def cast(self, eqn: JaxprEqn, operands: Sequence[Any]) -> int | None:
        """The result of a cast of a weight to a type that is not larger; None for any other
        equation."""
        if eqn.primitive is not jax.lax.convert_element_type_p or self.of(operands[0]) is None:
            return None
        (before,), (after,) = eqn.invars, eqn.outvars
        larger = bytes_of(after.aval) > bytes_of(before.aval)
        return None if larger else self._cast(operands[0], after.aval)

    def cast_before(self, eqn: JaxprEqn, operands: list[Any]) -> tuple[JaxprEqn, list[Any]]:
        """The equation and its operands. A scan whose iterations cast weights takes the casts
        instead."""
        if eqn.primitive.name != "scan":
            return eqn, operands
        chosen = [self.of(o) is not None for o in operands]
        if not any(chosen):
            return eqn, operands
        eqn, types = without_casts(eqn, chosen)
        return eqn, [
            self._cast(o, types[k]) if k in types else o for k, o in enumerate(operands)
        ]

    def _cast(self, weight: int, aval: Any) -> int:
        """Casts the shards of a weight, so that the cast is gathered instead of the weight. If
        the weight is gathered at each use, each task casts its shards again."""
        gather = self._of[weight]
        params = {"new_dtype": aval.dtype, "weak_type": False, "sharding": None}
        primitive, cheap = jax.lax.convert_element_type_p, not gather.once
        cast = self._add(primitive, params, [weight], aval, cheap)
        # Otherwise, Shardy could give the cast the sharding of its user, the gather.
        kept = self._add(_gather_p, {"sharding": gather.before}, [cast], None, cheap)
        self._of[kept], self._weights[kept] = gather, self._weights[weight]
        return kept

    def gather(self, operands: Sequence[Any]) -> list[Any]:
        """The operands with weights gathered."""
        for value in operands:
            gather = self.of(value)
            if gather is not None and value not in self._made:
                taken = [value] if gather.once else [value, self._index]
                params = {"sharding": gather.after}
                self._made[value] = self._add(_gather_p, params, taken, None, not gather.once)
                self.gathered.add(self._weights[value])
                if not gather.once:
                    self.parts.add(self._made[value])
        return [self._made.get(o, o) if isinstance(o, int) else o for o in operands]

    def is_part(self, primitive: Any, operands: Sequence[Any]) -> bool:
        """Whether an op makes a part of a weight that is gathered at each use: the part is
        freed with the weight, not kept for the backward."""
        values = [o for o in operands if isinstance(o, int)]
        return bool(values) and primitive.name in _PARTS and self.parts.issuperset(values)
