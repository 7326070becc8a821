"""Finds the sums over an axis that is sharded over devices, in MLIR: their operands, the
operations that are linear in them, and the reasons why other values are not such sums."""

from __future__ import annotations

import dataclasses
import types
from collections import ChainMap, Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jaxpp.jax_internals.mlir import (
    MANUAL,
    Axes,
    Dimensions,
    adds,
    axes_of_groups,
    callee,
    is_argument,
    is_integer,
    is_zero,
    keeps_sums,
    manual_axes,
    operation_of,
    returned,
    says_nothing,
    shape_of,
    widens_integers,
)

__all__ = ["BRANCHES", "Blocked", "Calls", "Sums"]

Calls = tuple[Any, ...]  # the calls and shard_maps that lead from main to a value
_Term = tuple[Any, Calls]  # a value that such calls lead to
_Use = tuple[Any, Calls, Any, int]  # a term, its user and the number of the operand

# Operations of one operand that are linear in it, or that round it.
_UNARY = frozenset(
    f"stablehlo.{name}"
    for name in (
        "broadcast_in_dim convert dynamic_slice fft imag negate real reshape reverse "
        "slice transpose"
    ).split()
)
_SUMS = frozenset(f"stablehlo.{name}" for name in ("add", "complex", "concatenate", "subtract"))
BRANCHES = ("stablehlo.case", "stablehlo.if")


@dataclasses.dataclass
class Blocked(Exception):
    """The reason why a value is not a partial sum, and the location of the operation that
    prevents it."""

    reason: str
    location: Any


# The axes over which a value is partial, None for zeros, or the reason of a `Blocked` and its
# location: a stored exception would keep the frames that raised it alive.
_Found = Axes | tuple[str, Any] | None
# What was found of a term, and its uses of other terms.
_Known = tuple[_Found, list[_Use]]


def _axes_or_raise(found: _Found) -> Axes | None:
    if isinstance(found, tuple):
        raise Blocked(*found)
    return found


def _meet(a: Axes | None, b: Axes | None) -> Axes | None:
    """The axes over which both are partial; None means all axes."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


@dataclasses.dataclass
class _Rule:
    """When an operation's result is partial.

    `sharded`: the sum's operands, with the shards that make it partial over `axes`; if
    there are none, axes is None. `partial`: the operands that must be partial themselves.
    """

    partial: Sequence[int] = ()
    axes: Axes | None = None
    sharded: dict[int, Dimensions] = dataclasses.field(default_factory=dict)


class Sums:
    """Finds the partial sums among the results of a module's main function.

    Args:
      functions: the module's functions by name.
      sizes: of the mesh's axes.
      arguments: the sharding of main's arguments by dimension.
      of_ops: the propagated shardings of each operation's results. The key is the first result,
        because an operation's hash changes with its operands.
    """

    def __init__(
        self,
        functions: dict[str, Any],
        sizes: dict[str, int],
        arguments: Sequence[Dimensions | None],
        of_ops: dict[Any, list[Dimensions]],
    ) -> None:
        self.functions = functions
        self.main = functions["main"]
        self.sizes = sizes
        self.arguments = arguments
        self.of_ops = of_ops
        # The required axes of the sum being analysed; None: the analysis finds them.
        self._required: Axes | None = None
        # Sums share terms, so results are kept: under the current required axes, and by them.
        self._known: MutableMapping[_Term, _Known] = {}
        self._known_by_required: dict[Axes | None, MutableMapping[_Term, _Known]] = {}
        # What is assumed of the results of loops that are being analysed.
        self._assumed: dict[_Term, _Found] = {}
        self._uses: list[_Use] = []  # by the term that is being analysed
        # Values that are not kept partial: the reason and the location of the cause.
        self._whole: dict[Any, tuple[str, Any]] = {}
        self._batch_axes: Axes | None = None
        self._kept: dict[Any, Any] = {}  # values that have a constraint already
        self._partial: dict[Any, Axes] = {}  # values that are already partial

    # --- Shardings ---

    def _dimensions(self, value: Any, calls: Calls) -> Dimensions:
        """The sharding of a value that `calls` lead to."""
        number = value.arg_number if is_argument(value) else value.result_number
        owner = value.owner.owner.operation if is_argument(value) else operation_of(value)
        if owner.name == "func.call":
            end = returned(self._called(owner).regions[0])
            return self._dimensions(end.operands[number], (*calls, owner))
        enters = is_argument(value) and owner.name in ("func.func", MANUAL)
        if not enters:
            whole: Dimensions = [()] * len(shape_of(value))
            found = self.of_ops.get(owner.results[0])
            # A callback's result is on one device and has no dimensions there.
            return found[number] or whole if found else whole
        if calls:
            dims = self._dimensions(calls[-1].operands[number], calls[:-1])
            manual = manual_axes(calls[-1:])
            return [tuple(a for a in names if a not in manual) for names in dims]
        return self.arguments[number] or [()] * len(shape_of(value))

    # --- Sums over a sharded dimension ---

    @staticmethod
    def _contracted(op: Any) -> tuple[list[int], list[int]]:
        """The pairs of dimensions over which a product sums."""
        if op.name == "stablehlo.dot_general":
            numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
            return (
                list(numbers.lhs_contracting_dimensions),
                list(numbers.rhs_contracting_dimensions),
            )
        numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
        if ir.IntegerAttr(op.attributes["feature_group_count"]).value != 1:
            return [], []
        return [numbers.input_feature_dimension], [numbers.kernel_input_feature_dimension]

    def _left_sharded(
        self, both: Sequence[Dimensions], pairs: Sequence[tuple[int, int]]
    ) -> set[str]:
        """The axes over which a product must not be partial. If the sum has required axes,
        these are all others. Otherwise, they are the axes, except the batch's, that shard an
        operand along a dimension that is not summed."""
        if self._required is not None:
            return self.sizes.keys() - self._required
        if self._batch_axes is None:
            return set()
        rest = (
            names
            for k, dims in enumerate(both)
            for d, names in enumerate(dims)
            if d not in [pair[k] for pair in pairs]
        )
        return {a for names in rest for a in names} - self._batch_axes

    def _product_rule(self, op: Any, calls: Calls) -> _Rule | None:
        operands = op.operands[0], op.operands[1]
        both = [self._dimensions(v, calls) for v in operands]
        pairs = list(zip(*self._contracted(op), strict=True))
        left = self._left_sharded(both, pairs)
        summed = [tuple(a for a in both[0][i] or both[1][j] if a not in left) for i, j in pairs]
        named = [a for names in summed for a in names]
        axes = frozenset(named)
        if not axes or len(axes) < len(named):
            return None
        sharded = {}
        for k, value in enumerate(operands):
            dims = [tuple(a for a in names if a not in axes) for names in both[k]]
            for pair, names in zip(pairs, summed, strict=True):
                dims[pair[k]] = names
            if not self._divides(value, dims, [pair[k] for pair in pairs]):
                return None
            sharded[k] = dims
        return _Rule(axes=axes, sharded=sharded)

    def _ways(self, names: tuple[str, ...]) -> int:
        return int(np.prod([self.sizes[a] for a in names]))

    def _divides(self, value: Any, dims: Dimensions, which: Sequence[int]) -> bool:
        """Whether all shards along these dimensions have the same size."""
        shape = shape_of(value)
        return not any(shape[d] % self._ways(dims[d]) for d in which)

    def _sum_rule(self, op: Any, calls: Calls) -> _Rule:
        """The rule of a reduction with addition."""
        if len(op.operands) != 2 or not adds(op) or not is_zero(op.operands[1]):
            raise Blocked("it is not reduced by a sum from zero", op.location)
        dims = self._dimensions(op.operands[0], calls)
        reduced = list(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
        axes = frozenset(a for d in reduced for a in dims[d])
        if not self._divides(op.operands[0], dims, reduced):
            raise Blocked("it sums shards of different sizes", op.location)
        return _Rule(axes=axes, sharded={0: dims}) if axes else _Rule([0])

    def _all_reduce_rule(self, op: Any) -> _Rule:
        """The rule of a sum over devices in a shard_map: its operand is one device's term."""
        if len(op.operands) != 1 or not adds(op):
            raise Blocked("it is not reduced by a sum over devices", op.location)
        if (axes := axes_of_groups(op, self.sizes)) is None:
            raise Blocked("it is a sum over some of an axis's devices", op.location)
        return _Rule(axes=axes)

    def _scatter_rule(self, op: Any, calls: Calls) -> _Rule:
        """The rule of an operation that adds rows, as in the gradient of an embedding."""
        numbers = stablehlo.ScatterDimensionNumbers(op.attributes["scatter_dimension_numbers"])
        plain = len(op.operands) == 3 and not list(numbers.input_batching_dims)
        if not plain or not adds(op):
            raise Blocked("it overwrites rows instead of adding to them", op.location)
        updates, window = op.operands[2], list(numbers.update_window_dims)
        if self._axes(op, 0, calls) is not None:  # the terms of other devices would be lost
            raise Blocked("it adds rows to an array that is not zero", op.location)
        dims = self._dimensions(updates, calls)
        rank = len(shape_of(updates))
        rows = [d for d in range(rank) if d not in window]
        axes = frozenset(a for d in rows for a in dims[d])
        if not self._divides(updates, dims, rows):
            axes = frozenset()
        if not axes:
            return _Rule([0, 2], sharded={1: [()] * len(shape_of(op.operands[1]))})
        kept: list[Any] = [dims[d] for d in rows]
        kept.insert(numbers.index_vector_dim, ())
        indices = kept[: len(shape_of(op.operands[1]))]
        windows = [() if d in window else dims[d] for d in range(rank)]
        return _Rule([0], axes, {1: indices, 2: windows})

    def _gather_rule(self, op: Any, calls: Calls) -> _Rule:
        """The rule of an operation that takes rows, whose indices must be whole: where they or
        the rows are sharded, XLA divides the operation by their shards."""
        numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        dims = self._dimensions(op.operands[0], calls)
        if any(dims[d] for d in numbers.start_index_map):
            raise Blocked("it takes rows of a sharded array", op.location)
        return _Rule([0], sharded={1: [()] * len(shape_of(op.operands[1]))})

    # --- Rules ---

    def _either(self, op: Any, calls: Calls) -> _Rule:
        """The rule of a product that does not itself sum over a sharded dimension."""
        reasons: list[tuple[str, Any]] = []
        for k in (0, 1):
            before = len(self._uses)
            try:
                axes = self._axes(op, k, calls)
            except Blocked as blocked:
                del self._uses[before:]
                reasons.append((blocked.reason, blocked.location))
                continue
            other = self._dimensions(op.operands[1 - k], calls)
            if axes and any(a in axes for names in other for a in names):
                del self._uses[before:]
                reasons.append(("it is multiplied by a sharded array", op.location))
                continue
            return _Rule([k])
        raise Blocked(*reasons[0])

    def _rule(self, op: Any, calls: Calls) -> _Rule:
        name = op.name
        if name == "sdy.sharding_constraint":
            if says_nothing(op):
                return _Rule([0])
            raise Blocked("the step constrains its sharding", op.location)
        if name in ("stablehlo.dot_general", "stablehlo.convolution"):
            if rule := self._product_rule(op, calls):
                return rule
            if widens_integers(op):
                raise Blocked("the step makes wider integers of it", op.location)
            return self._either(op, calls)
        if name == "stablehlo.reduce":
            return self._sum_rule(op, calls)
        if name == "stablehlo.all_reduce":
            return self._all_reduce_rule(op)
        if name == "stablehlo.scatter":
            return self._scatter_rule(op, calls)
        if name == "stablehlo.convert" and not keeps_sums(op):
            raise Blocked("the step converts it from or to integers", op.location)
        if name == "stablehlo.divide" and is_integer(op.results[0]):
            raise Blocked("the step divides whole numbers", op.location)
        if name in _UNARY or name == "stablehlo.divide":
            return _Rule([0])
        if name == "stablehlo.gather":
            return self._gather_rule(op, calls)
        if name in _SUMS:
            return _Rule(range(len(op.operands)))
        if name in ("stablehlo.pad", "stablehlo.dynamic_update_slice"):
            return _Rule([0, 1])
        if name == "stablehlo.select":
            return _Rule([1, 2])
        if name == "stablehlo.multiply":
            return self._either(op, calls)
        if name == "stablehlo.reduce_scatter":
            raise Blocked("a shard_map scatters it over devices", op.location)
        if name == "stablehlo.constant":
            raise Blocked("a constant is not a sum over devices", op.location)
        raise Blocked(f"{name.partition('.')[2]} is not linear in the sum", op.location)

    # --- Where a value is partial ---

    def axes(
        self,
        results: Sequence[int],
        required: Mapping[int, Axes] = types.MappingProxyType({}),
        batch_axes: Axes | None = None,
    ) -> dict[int, Axes | Blocked | None]:
        """The axes over which results of main are partial sums, or the reason why they
        are not; None for zeros.

        Args:
          results: their numbers.
          required: the required axes of results: products are partial over no others.
          batch_axes: the axes that shard the batch, if known. A product is not partial over any
            other axis that shards an operand along a dimension that is not summed: with
            sequence parallelism, gradients of tensor-parallel weights stay sharded.

        All users of such a sum must be linear in it too, up to other partial results, apart
        from those that add it up over the microbatches: `results` has its number once for
        each of these.
        """
        self._batch_axes = batch_axes
        end = returned(self.main.regions[0])
        adders = Counter(end.operands[k] for k in results)
        found: dict[int, Axes | Blocked | None] = {}
        uses: dict[int, set[Any]] = {}  # what each of them consists of
        left = list(dict.fromkeys(results))
        while left:
            self._known_by_required = {}
            for k in left:
                self._require(required.get(k))
                found[k] = self._axes_or_reason(end.operands[k])
                uses[k] = {(end.operands[k], ()), *self._all_uses(end.operands[k])}
            shared = self._used_elsewhere(end, found, uses, adders)
            self._whole.update(shared)
            left = [k for k in found if any(use[0] in shared for use in uses[k])]
        return found

    def _require(self, axes: Axes | None) -> None:
        """Sets the required axes of the sums that are analysed next."""
        self._required = axes
        self._known = self._known_by_required.setdefault(axes, {})

    def _axes_or_reason(self, value: Any) -> Axes | Blocked | None:
        try:
            axes = self._axes_of_term(value, ())
        except Blocked as blocked:
            return blocked.with_traceback(None)  # which keeps frames alive
        if axes == frozenset():
            return Blocked("it sums no sharded value", value.owner.location)
        return axes

    def _all_uses(self, value: Any) -> set[_Use]:
        """The uses by an analysed value of main, and by the terms that it uses."""
        left, found = list(self._known[value, ()][1]), set[_Use]()
        while left:
            use = left.pop()
            if use not in found:
                found.add(use)
                left += self._known[use[:2]][1]
        return found

    @staticmethod
    def _used_elsewhere(
        end: Any,
        found: dict[int, Axes | Blocked | None],
        uses: dict[int, set[Any]],
        adders: Counter[Any],
    ) -> dict[Any, tuple[str, Any]]:
        """The terms of partial results that another operation uses too, with the reason why
        they must be whole."""
        shared: dict[Any, tuple[str, Any]] = {}
        live = {k: axes for k, axes in found.items() if axes and not isinstance(axes, Blocked)}
        of_axes: dict[Axes, set[Any]] = {}
        for k, axes in live.items():
            of_axes.setdefault(axes, set()).update(uses[k])
        for k, axes in live.items():
            for value, calls in {use[:2] for use in uses[k]}:
                others = [
                    use.owner.operation
                    for use in value.uses
                    if (value, calls, use.owner.operation, use.operand_number)
                    not in of_axes[axes]
                ]
                if value in adders:
                    others = [user for user in others if user != end][adders[value] :]
                if others == [end]:
                    shared[value] = "a task passes it to another one", value.location
                elif others:
                    shared[value] = "the step also uses it in the loop", others[0].location
        return shared

    def _axes(self, user: Any, k: int, calls: Calls) -> Axes | None:
        """The axes over which an operand is a partial sum; None for zeros."""
        value = user.operands[k]
        if value in self._partial:
            return self._partial[value]
        if value in self._kept:  # for another user
            return self._partial[self._kept[value]]
        if is_zero(value):
            return None
        self._uses.append((value, calls, user, k))
        return self._axes_of_term(value, calls)

    def _axes_of_term(self, value: Any, calls: Calls) -> Axes | None:
        if (value, calls) not in self._known:
            self._known[value, calls] = self._analysed(self._find_axes, value, calls)
        return _axes_or_raise(self._known[value, calls][0])

    def _analysed(
        self, find: Callable[[Any, Calls], Axes | None], value: Any, calls: Calls
    ) -> _Known:
        """What `find` returns for a term, or why it is blocked, and the uses that it notes."""
        outer, self._uses = self._uses, []
        try:
            found: _Known = find(value, calls), self._uses
        except Blocked as blocked:
            found = (blocked.reason, blocked.location), []
        self._uses = outer
        return found

    def _find_axes(self, value: Any, calls: Calls) -> Axes | None:
        if value in self._whole:
            raise Blocked(*self._whole[value])
        if is_zero(value):
            return None
        if is_argument(value):
            return self._axes_of_argument(value, calls)
        return self._axes_of_result(value, calls)

    def _axes_of_result(self, value: Any, calls: Calls) -> Axes | None:
        op, k = operation_of(value), value.result_number
        if op.name == "stablehlo.while":
            return self._axes_of_carry(op, k, calls)
        if op.name in BRANCHES:
            ends = [returned(region) for region in op.regions]
            return self._axes_of_all([(end, k) for end in ends], calls)
        if op.name == "func.call":
            end = returned(self._called(op).regions[0])
            return self._axes(end, k, (*calls, op))
        if op.name == "stablehlo.optimization_barrier":
            return self._axes(op, k, calls)
        if op.name == MANUAL:
            return self._axes_of_mapped(op, k, calls)
        rule = self._rule(op, calls)
        if manual_axes(calls):
            self._check_rule_of_mapped(rule, op, calls)
        return _meet(rule.axes, self._axes_of_all([(op, i) for i in rule.partial], calls))

    def _axes_of_all(self, terms: Sequence[tuple[Any, int]], calls: Calls) -> Axes | None:
        """The axes over which the terms are partial sums, apart from whole ones, which are made
        partial: whole on one device, zero on the others. Inside a shard_map, all terms must be
        partial over the same axes."""
        axes: Axes | None = None
        reasons: list[tuple[str, Any]] = []  # a stored error would keep this frame alive
        whole = differ = False
        for user, k in terms:
            before = len(self._uses)
            try:
                found = self._axes(user, k, calls)
            except Blocked as blocked:
                reasons.append((blocked.reason, blocked.location))
                found = frozenset()
            if found == frozenset():
                del self._uses[before:]
                whole = True
            else:
                differ |= None not in (axes, found) and axes != found
                axes = _meet(axes, found)
        if axes is None and reasons:
            raise Blocked(*reasons[0])
        if (differ or (whole and axes)) and manual_axes(calls):
            raise Blocked("a shard_map adds it to another value", terms[0][0].location)
        return frozenset() if axes is None and whole else axes

    def _axes_of_mapped(self, op: Any, k: int, calls: Calls) -> Axes | None:
        """The axes over which the result of a shard_map is partial."""
        if manual_axes(calls):  # XLA cannot compile such results
            raise Blocked("a shard_map inside another one makes it", op.location)
        axes = self._axes(returned(op.regions[0]), k, (*calls, op))
        dims = self._dimensions(op.results[k], calls)
        if axes and any(a in axes for names in dims for a in names):
            raise Blocked("a shard_map stacks copies of it", op.location)
        return axes

    def _check_rule_of_mapped(self, rule: _Rule, op: Any, calls: Calls) -> None:
        """Blocks what needs constraints, which XLA cannot compile inside a shard_map."""
        if rule.axes and rule.sharded:
            why = "a shard_map adds it up along axes that it does not map"
            raise Blocked(why, op.location)
        if any(self._dimensions(op.operands[i], calls) != d for i, d in rule.sharded.items()):
            raise Blocked("a shard_map shards what chooses its rows", op.location)

    def _called(self, call: Any) -> Any:
        return self.functions[callee(call)]

    def _axes_of_argument(self, value: Any, calls: Calls) -> Axes | None:
        owner, k = value.owner.owner.operation, value.arg_number
        if owner.name == "stablehlo.while":
            self._uses.append((owner.results[k], calls, owner, k))
            return self._axes_of_term(owner.results[k], calls)
        if owner.name == "func.func" and calls:
            return self._axes(calls[-1], k, calls[:-1])
        raise Blocked("it comes from outside the loop", owner.location)

    def _axes_of_carry(self, op: Any, k: int, calls: Calls) -> Axes | None:
        """The largest set of axes that a loop keeps from its start to its end."""
        term = op.results[k], calls
        if term not in self._assumed:
            first = not self._assumed
            self._assumed[term] = None
            if first:
                return self._axes_of_carries(term)
        return _axes_or_raise(self._assumed[term])

    def _axes_of_carries(self, term: _Term) -> Axes | None:
        """As _axes_of_carry, for this result of a loop. Results that depend on each other are
        analysed together: first all are assumed to be partial over all axes, then only over
        those that are found, until nothing changes."""
        known, before = self._known, dict[_Term, _Found]()
        while before != self._assumed:
            before = dict(self._assumed)
            assuming, carries = dict[_Term, _Known](), dict[_Term, _Known]()
            self._known = ChainMap(assuming, known)
            while left := [other for other in self._assumed if other not in carries]:
                carries[left[0]] = self._analysed(self._kept_by_loop, *left[0])
                self._assumed[left[0]] = carries[left[0]][0]
        known.update(assuming | carries)
        self._known, self._assumed = known, {}
        found, uses = known[term]
        self._uses += uses
        return _axes_or_raise(found)

    def _kept_by_loop(self, result: Any, calls: Calls) -> Axes | None:
        """The axes over which a loop's result is partial under the assumptions."""
        assumed = _axes_or_raise(self._assumed[result, calls])
        op, k = operation_of(result), result.result_number
        end = returned(op.regions[1])
        if list(op.regions[0].blocks[0].arguments[k].uses):
            raise Blocked("the step also uses it in the loop", op.location)
        terms = self._axes(op, k, calls), self._axes(end, k, calls)
        axes = _meet(assumed, _meet(*terms))
        if manual_axes(calls) and any(term not in (None, axes) for term in terms):
            raise Blocked("a shard_map adds it to another value", op.location)
        return axes
