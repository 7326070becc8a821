"""Gathers, for a loop, the weights that are sharded over the devices of the batch."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxpp.jax_internals.jaxprs import changed_jaxpr, new_var, scan_sizes
from jaxpp.mesh import axes_by_dimension
from jaxpp.trace.bodies import bodies_of, returned_operands
from jaxpp.trace.casts import without_casts
from jaxpp.trace.stage_rows import is_elementwise
from jaxpp.trace.work import bytes_of

__all__ = ["Gather", "WeightGathers", "is_weight_gather"]


@dataclasses.dataclass(frozen=True)
class Gather:
    """When a loop gathers a weight, and the weight's sharding before and after."""

    before: NamedSharding
    after: NamedSharding
    once: bool  # once a step, before the loop; False: in each task that uses it

    def along(self, dimensions: Sequence[int | None]) -> Gather | None:
        """The gather of a value that is computed from the weight. `dimensions` maps each
        dimension of the value to the same one of the weight, or to None. Returns None if the
        value lacks a dimension that shards the weight."""
        parts = axes_by_dimension(self.before.spec)
        if any(part and d not in dimensions for d, part in enumerate(parts)):
            return None

        def moved(sharding: NamedSharding) -> NamedSharding:
            axes = dict(enumerate(sharding.spec))
            spec = (None if d is None else axes.get(d) for d in dimensions)
            return NamedSharding(sharding.mesh, PartitionSpec(*spec))

        return Gather(moved(self.before), moved(self.after), self.once)


def _constrained(weight: Any, *index: Any, shardings: Sequence[NamedSharding]) -> Any:
    for sharding in shardings:
        weight = jax.lax.with_sharding_constraint(weight, sharding)
    return weight


# A weight that gets one sharding after another. If it must run in each microbatch, it also
# takes the loop's index.
_gather_p = Primitive("gather_weight")
_gather_p.def_impl(_constrained)
_gather_p.def_abstract_eval(lambda weight, *index, shardings: weight)
mlir.register_lowering(_gather_p, mlir.lower_fun(_constrained, multiple_results=False))


def is_weight_gather(eqn: JaxprEqn) -> bool:
    """Whether an equation in the body of a scan gathers a slice of a weight."""
    return eqn.primitive is _gather_p


def _gathering(eqn: JaxprEqn, gathers: Mapping[int, Gather]) -> JaxprEqn:
    """The scan whose iterations gather their slices of these operands, or leave that to the
    iterations of a scan in its body."""
    (closed,) = bodies_of(eqn)
    shards = {closed.jaxpr.invars[k]: gather for k, gather in gathers.items()}
    whole: dict[Var, Var] = {}
    eqns: list[JaxprEqn] = []

    def gathered(shard: Var) -> Var:
        if shard not in whole:
            # Without the first sharding, Shardy could give the shard the second one, and gather
            # the operand of the scan.
            params = {"shardings": (shards[shard].before, shards[shard].after)}
            traced = jax.make_jaxpr(lambda w: _gather_p.bind(w, **params))(shard.aval)
            whole[shard] = new_var(shard.aval)
            eqns.append(traced.jaxpr.eqns[0].replace(invars=[shard], outvars=[whole[shard]]))
        return whole[shard]

    for inner in closed.jaxpr.eqns:
        own = [shards.get(v) if isinstance(v, Var) else None for v in inner.invars]
        if inner.primitive is jax.lax.optimization_barrier_p:
            shards.update((v, g) for v, g in zip(inner.outvars, own, strict=True) if g)
            eqns.append(inner)
            continue
        slices = _slices(inner, own)
        invars = [
            v if gather is None or k in slices else gathered(v)
            for k, (v, gather) in enumerate(zip(inner.invars, own, strict=True))
        ]
        inner = _gathering(inner, slices) if slices else inner
        eqns.append(inner.replace(invars=invars))
    # The backward gathers the slices again.
    returned = returned_operands(eqn)
    outvars = [
        closed.jaxpr.invars[returned[k]] if returned.get(k) in gathers else v
        for k, v in enumerate(closed.jaxpr.outvars)
    ]
    body = changed_jaxpr(closed, outvars=outvars, eqns=eqns)
    return eqn.replace(params={**eqn.params, "jaxpr": body})


def _slices(eqn: JaxprEqn, gathers: Sequence[Gather | None]) -> dict[int, Gather]:
    """The gathers that a scan's iterations do themselves, by the number of the operand that
    the scan slices. `gathers`: those of all operands."""
    if eqn.primitive.name != "scan":
        return {}
    first = sum(scan_sizes(eqn.params))
    slices = {
        k: gather.along(range(1, eqn.invars[k].aval.ndim))
        for k, gather in enumerate(gathers)
        if gather is not None and k >= first
    }
    return {k: gather for k, gather in slices.items() if gather is not None}


# Ops that only rearrange a weight, or cast it.
_PARTS = frozenset(
    (
        "broadcast_in_dim convert_element_type dynamic_slice expand_dims iota reshape rev "
        "slice squeeze transpose"
    ).split()
)


_REDUCTIONS = frozenset("reduce_max reduce_min reduce_sum".split())


def _dimensions(eqn: JaxprEqn) -> Sequence[int | None] | None:
    """Maps each dimension of an equation's result to the same one of its first operand, or to
    None. Returns None for an equation that does more than rearrange its operand, take a part of
    it, or cast it to a type that is not larger."""
    name, params = eqn.primitive.name, eqn.params
    taken, made = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if name == "convert_element_type":
        before, after = (bytes_of(v.aval) for v in (eqn.invars[0], eqn.outvars[0]))
        return range(len(taken)) if after <= before else None
    if name == "slice":
        return [d if made[d] == size else None for d, size in enumerate(taken)]
    if name == "squeeze":
        return [d for d in range(len(taken)) if d not in params["dimensions"]]
    # A matrix is often used as it is, too, and would be gathered twice.
    if name == "transpose" and len(taken) > 2:
        return list(params["permutation"])
    if name == "reshape" and params["dimensions"] is None:
        pairs = zip(reversed(taken), reversed(made), strict=False)
        same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return [None] * (len(made) - same) + list(range(len(taken) - same, len(taken)))
    if name == "broadcast_in_dim" and math.prod(made) == math.prod(taken):
        of_each = {k: d for d, k in enumerate(params["broadcast_dimensions"])}
        return [of_each.get(k) for k in range(len(made))]
    return None


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
        self._weights = {value: value for value in gathers}  # also of their casts and parts
        self.gathered: set[int] = set()  # the weights that a loop gathers
        self._made: dict[int, int] = {}  # in a loop's body: the gathered values of weights
        self.parts: set[int] = set()  # values gathered at each use, and parts of them
        # In a loop's body: maps a value that elementwise ops compute from gathered weights to
        # the same value computed from the weights' shards, and their sharding.
        self._shards: dict[int, tuple[int, NamedSharding]] = {}
        self._index: int | None = None  # of the loop

    def begin_loop(self, index: int) -> None:
        self._made, self.parts, self._shards = {}, set(), {}
        self._index = index

    def of(self, operand: Any) -> Gather | None:
        """How an operand is gathered; None if it is not gathered."""
        return self._of.get(operand) if isinstance(operand, int) else None

    def of_shards(self, eqn: JaxprEqn, operands: Sequence[Any]) -> int | None:
        """The result of an equation that casts a weight to a type that is not larger, or
        rearranges or takes a part of a weight that is gathered at each use: it is computed from
        the weight's shards, and gathered instead of the weight. None for any other equation."""
        gather = self.of(operands[0]) if operands else None
        if gather is None or len(eqn.outvars) != 1:
            return None
        if gather.once and eqn.primitive is not jax.lax.convert_element_type_p:
            return None
        dimensions = _dimensions(eqn)
        made = None if dimensions is None else gather.along(dimensions)
        if made is None:
            return None
        aval = eqn.outvars[0].aval
        return self._from_shards(eqn.primitive, eqn.params, operands[0], aval, made)

    def _shards_of(self, operand: Any) -> tuple[int, NamedSharding] | None:
        """The shards of an operand, and their sharding: of a weight that each task gathers, or
        of a value that elementwise ops compute from such weights. None for other operands."""
        gather = self.of(operand)
        if gather is not None:
            return None if gather.once else (operand, gather.before)
        return self._shards.get(operand) if isinstance(operand, int) else None

    def note_elementwise(
        self,
        eqn: JaxprEqn,
        operands: Sequence[Any],
        results: Sequence[Any],
        is_outside: Callable[[int], bool],
    ) -> None:
        """Adds an elementwise equation a second time, on the shards of the weights that each
        task gathers. reduced() uses its result. Does nothing for an equation that also takes
        values of the microbatch."""
        shards = [self._shards_of(o) for o in operands]
        sharding = next((s[1] for s in shards if s), None)
        if sharding is None or not is_elementwise(eqn):
            return
        taken = []
        for operand, shard in zip(operands, shards, strict=True):
            fixed = not isinstance(operand, int) or is_outside(operand)
            if not fixed and (shard is None or shard[1] != sharding):
                return
            taken.append(shard[0] if shard else operand)
        result = self._add(eqn.primitive, eqn.params, taken, eqn.outvars[0].aval, False)
        self._shards[results[0]] = result, sharding

    def reduced(self, eqn: JaxprEqn, operands: Sequence[Any]) -> int | None:
        """The result of an equation that reduces a weight, or an elementwise function of
        weights, to a number, such as a norm. It is computed from the shards and needs no
        gather. None for any other equation."""
        if eqn.primitive.name not in _REDUCTIONS or eqn.outvars[0].aval.shape:
            return None
        shards = self._shards_of(operands[0])
        if shards is None:
            return None
        return self._add(eqn.primitive, eqn.params, [shards[0]], eqn.outvars[0].aval, False)

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

    def _from_shards(
        self, primitive: Any, params: dict[str, Any], weight: int, aval: Any, gather: Gather
    ) -> int:
        """Adds an op on the shards of a weight, whose result is gathered instead of it. If that
        is at each use, each task computes the result again."""
        cheap = not gather.once
        result = self._add(primitive, params, [weight], aval, cheap)
        # Otherwise, Shardy could give the result the sharding of its user, the gather.
        kept = self._add(_gather_p, {"shardings": (gather.before,)}, [result], None, cheap)
        self._of[kept], self._weights[kept] = gather, self._weights[weight]
        return kept

    def _cast(self, weight: int, aval: Any) -> int:
        params = {"new_dtype": aval.dtype, "weak_type": False, "sharding": None}
        cast = jax.lax.convert_element_type_p
        return self._from_shards(cast, params, weight, aval, self._of[weight])

    def gather(self, eqn: JaxprEqn, operands: Sequence[Any]) -> tuple[JaxprEqn, list[Any]]:
        """The equation and its operands, with weights gathered. A scan over weights that are
        gathered at each use takes their shards, and each iteration gathers its slice."""
        gathers = [self.of(o) for o in operands]
        slices = _slices(eqn, [g if g and not g.once else None for g in gathers])
        taken = list(operands)
        for k, (value, gather) in enumerate(zip(operands, gathers, strict=True)):
            if gather is not None:
                self.gathered.add(self._weights[value])
                if k not in slices:
                    taken[k] = self._gathered(value, gather)
        return _gathering(eqn, slices) if slices else eqn, taken

    def _gathered(self, weight: int, gather: Gather) -> int:
        if weight not in self._made:
            taken = [weight] if gather.once else [weight, self._index]
            params = {"shardings": (gather.after,)}
            self._made[weight] = self._add(_gather_p, params, taken, None, not gather.once)
            if not gather.once:
                self.parts.add(self._made[weight])
        return self._made[weight]

    def in_each_task(self, operand: Any) -> bool:
        """Whether each task gathers an operand, or takes it from such a weight."""
        gather = self.of(operand)
        if gather is not None:
            return not gather.once
        return isinstance(operand, int) and operand in self.parts

    def is_part(self, primitive: Any, operands: Sequence[Any]) -> bool:
        """Whether an op makes a part of a weight that is gathered at each use: the part is
        freed with the weight, not kept for the backward."""
        values = [o for o in operands if isinstance(o, int)]
        return bool(values) and primitive.name in _PARTS and self.parts.issuperset(values)
