"""Sums that stay partial over the devices of a rank, in MLIR.

A sum over an axis that is sharded over devices is first a partial sum on each device. XLA adds
these immediately, with an all-reduce, unless Shardy is told that the value is `unreduced`
over the mesh's axes. `Partials` finds the results that are such sums, follows them
through the operations that are linear in them, and keeps them partial up to there.

Shardy does not check that a value declared unreduced is a partial sum: a value that each
device has whole would be counted once per device. Therefore the operands of a sum are
constrained to the shards that make it partial, only listed operations propagate partial
sums, and any other value that is added is first made partial: whole on one device, zero
on the others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from jaxpp.jax_internals.mlir import (
    Axes,
    Dimensions,
    adds,
    behind,
    callee,
    is_argument,
    is_integer,
    is_zero,
    keeps_sums,
    only_user,
    operation_of,
    operations,
    returned,
    shape_of,
    widens_integers,
)

__all__ = ["Blocked", "Partials"]

_Calls = tuple[Any, ...]  # the calls that lead from main to a function

# Operations of one operand that are linear in it, or that round it.
_UNARY = frozenset(
    f"stablehlo.{name}"
    for name in (
        "broadcast_in_dim convert dynamic_slice imag negate real reshape reverse slice "
        "transpose"
    ).split()
)
_SUMS = frozenset(f"stablehlo.{name}" for name in ("add", "complex", "concatenate", "subtract"))
_BRANCHES = ("stablehlo.case", "stablehlo.if")

# A function that returns its argument on the first device along some axes, and zeros on
# the others.
_ON_FIRST_DEVICE = """
{mesh}
func.func private @partial(%v: {type}) -> {type} {{
  %none = stablehlo.constant dense<0> : tensor<i32>
  %zero = stablehlo.convert %none : (tensor<i32>) -> tensor<{element}>
  %zeros = stablehlo.broadcast_in_dim %zero, dims = []
      : (tensor<{element}>) -> tensor<{shape}{element}>
  %at = stablehlo.iota dim = 0 : tensor<{shape}i32>
  %first = stablehlo.constant dense<0> : tensor<{shape}i32>
  %is_first = stablehlo.compare EQ, %at, %first
      : (tensor<{shape}i32>, tensor<{shape}i32>) -> tensor<{shape}i1>
  %all = stablehlo.broadcast_in_dim %v, dims = {dims} : ({type}) -> tensor<{shape}{element}>
  %one = stablehlo.select %is_first, %all, %zeros : tensor<{shape}i1>, tensor<{shape}{element}>
  %each = sdy.sharding_constraint %one {one_each} : tensor<{shape}{element}>
  %sum = stablehlo.reduce(%each init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<{shape}{element}>, tensor<{element}>) -> {type}
  %partial = sdy.sharding_constraint %sum {partial} : {type}
  return %partial : {type}
}}
"""


@dataclasses.dataclass
class Blocked(Exception):
    """The reason why a value is not a partial sum, and the location of the operation that
    prevents it."""

    reason: str
    location: Any


def _printed(sharding: Any) -> str:
    """A sharding in the form in which constraints print it."""
    return str(sharding).removeprefix("#sdy.sharding")


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


class Partials:
    """The partial sums of a module's main function.

    Args:
      functions: the module's functions by name.
      mesh: its sdy.mesh; None: nothing is sharded.
      sizes: of the mesh's axes.
      arguments: the sharding of main's arguments by dimension.
      of_ops: the propagated shardings of each operation's results. The key is the first result,
        because an operation's hash changes with its operands.
    """

    def __init__(
        self,
        functions: dict[str, Any],
        mesh: Any,
        sizes: dict[str, int],
        arguments: Sequence[Dimensions | None],
        of_ops: dict[Any, list[Dimensions]],
    ) -> None:
        self.functions = functions
        self.main = functions["main"]
        self.mesh = mesh
        self.sizes = sizes
        self.arguments = arguments
        self.of_ops = of_ops
        # Assumptions about loops that are being analysed.
        self._assumed: dict[Any, Axes | None] = {}
        # Values that are no partial sums under these assumptions, with the reason if there is
        # one: many terms have the same operands.
        self._known_whole: dict[Any, tuple[str, Any] | None] = {}
        # (value, calls, user, operand) of the sum that is being analysed.
        self._uses: list[Any] = []
        # Values that are not kept partial: the reason and the location of the cause.
        self._whole: dict[Any, tuple[str, Any]] = {}
        self._kept: dict[Any, Any] = {}  # values that have a constraint already
        self._partial: dict[Any, Axes] = {}  # values that are already partial
        # The first results of calls that got a function of their own.
        self._copied: list[Any] = []

    # --- Shardings ---

    def _dimensions(self, value: Any, calls: _Calls) -> Dimensions:
        """The sharding of a value in the function that the last call in `calls` calls."""
        number = value.arg_number if is_argument(value) else value.result_number
        owner = value.owner.owner.operation if is_argument(value) else operation_of(value)
        if owner.name == "func.call":
            end = returned(self._called(owner).regions[0])
            return self._dimensions(end.operands[number], (*calls, owner))
        if owner.name != "func.func":
            whole: Dimensions = [()] * len(shape_of(value))
            found = self.of_ops.get(owner.results[0])
            # A callback's result is on one device and has no dimensions there.
            return found[number] or whole if found else whole
        if calls:
            return self._dimensions(calls[-1].operands[number], calls[:-1])
        return self.arguments[number] or [()] * len(shape_of(value))

    def _constrained(self, value: Any, dimensions: Dimensions, axes: Axes) -> Any:
        """The value with a constraint after it that makes it unreduced over the axes."""
        with value.context, ir.Location.unknown(), behind(value):
            made = sdy.ShardingConstraintOp(value, self.attribute(dimensions, axes)).result
        self.of_ops[made] = [dimensions]
        return made

    def attribute(self, dimensions: Dimensions, axes: Axes) -> Any:
        """The Shardy sharding, as an attribute, with these mesh axes for each dimension."""

        def refs(names: Any) -> list[Any]:
            return [sdy.AxisRefAttr.get(name) for name in names]

        dims = [sdy.DimensionShardingAttr.get(refs(names), True) for names in dimensions]
        ordered = [name for name in self.sizes if name in axes]
        name = self.mesh.attributes["sym_name"].value
        return sdy.TensorShardingAttr.get(name, dims, unreduced_axes=refs(ordered))

    def _without(self, value: Any, calls: _Calls, axes: Axes) -> Dimensions:
        return [
            tuple(a for a in names if a not in axes) for names in self._dimensions(value, calls)
        ]

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

    def _product_rule(self, op: Any, calls: _Calls) -> _Rule | None:
        operands = op.operands[0], op.operands[1]
        both = [self._dimensions(v, calls) for v in operands]
        pairs = list(zip(*self._contracted(op), strict=True))
        summed = [both[0][i] or both[1][j] for i, j in pairs]
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

    def _sum_rule(self, op: Any, calls: _Calls) -> _Rule:
        """The rule of a reduction with addition."""
        if len(op.operands) != 2 or not adds(op) or not is_zero(op.operands[1]):
            raise Blocked("it is not reduced by a sum from zero", op.location)
        dims = self._dimensions(op.operands[0], calls)
        reduced = list(ir.DenseI64ArrayAttr(op.attributes["dimensions"]))
        axes = frozenset(a for d in reduced for a in dims[d])
        if not self._divides(op.operands[0], dims, reduced):
            raise Blocked("it sums shards of different sizes", op.location)
        return _Rule(axes=axes, sharded={0: dims}) if axes else _Rule([0])

    def _scatter_rule(self, op: Any, calls: _Calls) -> _Rule:
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

    def _gather_rule(self, op: Any, calls: _Calls) -> _Rule:
        """The rule of an operation that takes rows, whose indices must be whole: where they or
        the rows are sharded, XLA divides the operation by their shards."""
        numbers = stablehlo.GatherDimensionNumbers(op.attributes["dimension_numbers"])
        dims = self._dimensions(op.operands[0], calls)
        if any(dims[d] for d in numbers.start_index_map):
            raise Blocked("it takes rows of a sharded array", op.location)
        return _Rule([0], sharded={1: [()] * len(shape_of(op.operands[1]))})

    # --- Rules ---

    def _either(self, op: Any, calls: _Calls) -> _Rule:
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

    def _rule(self, op: Any, calls: _Calls) -> _Rule:
        name = op.name
        if name == "sdy.sharding_constraint":
            raise Blocked("the step constrains its sharding", op.location)
        if name in ("stablehlo.dot_general", "stablehlo.convolution"):
            if rule := self._product_rule(op, calls):
                return rule
            if widens_integers(op):
                raise Blocked("the step makes wider integers of it", op.location)
            return self._either(op, calls)
        if name == "stablehlo.reduce":
            return self._sum_rule(op, calls)
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
        if name == "stablehlo.constant":
            raise Blocked("a constant is not a sum over devices", op.location)
        raise Blocked(f"{name.partition('.')[2]} is not linear in the sum", op.location)

    # --- Where a value is partial ---

    def axes(self, results: Sequence[int]) -> dict[int, Axes | Blocked | None]:
        """The axes over which results of main are partial sums, or the reason why they
        are not; None for zeros.

        All users of such a sum must be linear in it too, up to other partial results, apart
        from those that add it up over the microbatches: `results` has its number once for
        each of these.
        """
        end = returned(self.main.regions[0])
        adders = Counter(end.operands[k] for k in results)
        found: dict[int, Axes | Blocked | None] = {}
        uses: dict[int, set[Any]] = {}  # the values that make each of them
        left = list(dict.fromkeys(results))
        while left:
            for k in left:
                found[k] = self._axes_or_reason(end.operands[k])
                uses[k] = {(end.operands[k], ()), *self._uses}
            shared = self._used_elsewhere(end, found, uses, adders)
            self._whole.update(shared)
            left = [k for k in found if any(use[0] in shared for use in uses[k])]
        return found

    def _axes_or_reason(self, value: Any) -> Axes | Blocked | None:
        self._uses = []
        try:
            if value in self._whole:
                raise Blocked(*self._whole[value])
            if is_argument(value):
                raise Blocked("it comes from outside the loop", self.main.location)
            axes = self._axes_of_result(value, ())
            if axes == frozenset():
                raise Blocked("it sums no sharded value", value.owner.location)
            return axes
        except Blocked as blocked:
            self._uses = []
            return blocked.with_traceback(None)  # which keeps frames alive

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
        for k, axes in live.items():
            known = set().union(*(uses[j] for j in live if live[j] == axes))
            for value, calls in {use[:2] for use in uses[k]}:
                others = [
                    use.owner.operation
                    for use in value.uses
                    if (value, calls, use.owner.operation, use.operand_number) not in known
                ]
                if value in adders:
                    others = [user for user in others if user != end][adders[value] :]
                if others:
                    shared[value] = "the step also uses it in the loop", others[0].location
        return shared

    def _axes(self, user: Any, k: int, calls: _Calls) -> Axes | None:
        """The axes over which an operand is a partial sum; None for zeros."""
        value = user.operands[k]
        if value in self._partial:
            return self._partial[value]
        if value in self._kept:  # for another user
            return self._partial[self._kept[value]]
        if is_zero(value):
            return None
        if value in self._whole:
            raise Blocked(*self._whole[value])
        if (value, calls) in self._known_whole:
            known = self._known_whole[value, calls]
            if known is None:
                return frozenset()
            raise Blocked(*known)
        self._uses.append((value, calls, user, k))
        try:
            if is_argument(value):
                found = self._axes_of_argument(value, calls)
            else:
                found = self._axes_of_result(value, calls)
        except Blocked as blocked:
            self._known_whole[value, calls] = blocked.reason, blocked.location
            raise
        if found == frozenset():
            self._known_whole[value, calls] = None
        return found

    def _axes_of_result(self, value: Any, calls: _Calls) -> Axes | None:
        op, k = operation_of(value), value.result_number
        if op.name == "stablehlo.while":
            return self._axes_of_carry(op, k, calls)
        if op.name in _BRANCHES:
            ends = [returned(region) for region in op.regions]
            return self._axes_of_all([(end, k) for end in ends], calls)
        if op.name == "func.call":
            end = returned(self._called(op).regions[0])
            return self._axes(end, k, (*calls, op))
        if op.name == "stablehlo.optimization_barrier":
            return self._axes(op, k, calls)
        rule = self._rule(op, calls)
        return _meet(rule.axes, self._axes_of_all([(op, i) for i in rule.partial], calls))

    def _axes_of_all(self, terms: Sequence[tuple[Any, int]], calls: _Calls) -> Axes | None:
        """The axes over which the terms are partial sums, apart from whole ones, which are made
        partial: whole on one device, zero on the others."""
        axes: Axes | None = None
        blocked: Blocked | None = None
        whole = False
        for user, k in terms:
            before = len(self._uses)
            try:
                found = self._axes(user, k, calls)
            except Blocked as error:
                blocked = blocked or error
                found = frozenset()
            if found == frozenset():
                del self._uses[before:]
                whole = True
            else:
                axes = _meet(axes, found)
        if axes is None and blocked:
            raise blocked
        return frozenset() if axes is None and whole else axes

    def _called(self, call: Any) -> Any:
        return self.functions[callee(call)]

    def _axes_of_argument(self, value: Any, calls: _Calls) -> Axes | None:
        owner, k = value.owner.owner.operation, value.arg_number
        if owner.name == "stablehlo.while":
            key = owner.results[k], calls
            if key in self._assumed:
                return self._assumed[key]
            if list(owner.results[k].uses):
                raise Blocked("the step also uses it in the loop", owner.location)
            return self._axes_of_carry(owner, k, calls)
        if owner.name == "func.func" and calls:
            return self._axes(calls[-1], k, calls[:-1])
        raise Blocked("it comes from outside the loop", owner.location)

    def _axes_of_carry(self, op: Any, k: int, calls: _Calls) -> Axes | None:
        """The largest set of axes that a loop keeps from its start to its end."""
        key, end = (op.results[k], calls), returned(op.regions[1])
        if list(op.regions[0].blocks[0].arguments[k].uses):
            raise Blocked("the step also uses it in the loop", op.location)
        axes = self._axes(op, k, calls)
        while True:
            self._assumed[key] = axes
            outer, self._known_whole = self._known_whole, {}
            try:
                found = _meet(axes, self._axes(end, k, calls))
            finally:
                del self._assumed[key]
                self._known_whole = outer
            if found == axes:
                return axes
            axes = found

    # --- Keeping a value partial ---

    def keep(self, arguments: dict[int, Axes], results: dict[int, Axes]) -> None:
        """Declares arguments of main, by number, partial sums, and makes results partial.

        Arguments that are terms of no partial result are added to each other and reduced.
        """
        block = self.main.regions[0].blocks[0]
        for k, axes in arguments.items():
            self._partial[block.arguments[k]] = axes
        end = returned(self.main.regions[0])
        found = self.axes(list(results))
        others = [k for k, axes in results.items() if found[k] not in (None, axes)]
        for k, axes in results.items():
            if k not in others:
                end.operands[k] = self._kept_value(end.operands[k], (), axes)
        for k in others:
            end.operands[k] = self._made_partial(end.operands[k], (), results[k])
        self._reduce([block.arguments[k] for k in arguments])
        self._share_copies()

    def _keep_operand(self, user: Any, k: int, calls: _Calls, axes: Axes) -> None:
        value = user.operands[k]
        try:
            found = self._axes(user, k, calls)
        except Blocked:
            found = frozenset()
        if found is None or axes == found:
            user.operands[k] = self._kept_value(value, calls, axes)
        else:
            user.operands[k] = self._made_partial(value, calls, axes)

    def _kept_value(self, value: Any, calls: _Calls, axes: Axes) -> Any:
        if value in self._partial:
            return self._kept.get(value, value)
        if is_argument(value):
            self._keep_argument(value, calls, axes)
            return self._kept[value]
        if is_zero(value):
            # The barrier prevents a merge with a zero that is not partial.
            with value.context, ir.Location.unknown(), behind(value):
                own = stablehlo.OptimizationBarrierOp([value]).results[0]
            return self._constrained(own, self._without(value, calls, axes), axes)
        if value not in self._kept:
            kept = self._constrained(value, self._without(value, calls, axes), axes)
            self._kept[value] = kept
            self._partial[kept] = axes
            self._keep_operands(operation_of(value), value.result_number, calls, axes)
        return self._kept[value]

    def _keep_argument(self, value: Any, calls: _Calls, axes: Axes) -> None:
        owner, k = value.owner.owner.operation, value.arg_number
        if owner.name == "stablehlo.while":
            self._keep_carry(owner, k, calls, axes)
        else:
            self._constrain_argument(value, calls, axes)
            self._keep_operand(calls[-1], k, calls[:-1], axes)

    def _constrain_argument(self, value: Any, calls: _Calls, axes: Axes) -> None:
        """Without a constraint of its own, Shardy could reduce it where it enters."""
        kept = self._constrained(value, self._without(value, calls, axes), axes)
        value.replace_all_uses_except(kept, kept.owner.operation)
        self._kept[value] = kept
        self._partial[value] = self._partial[kept] = axes

    def _keep_carry(self, op: Any, k: int, calls: _Calls, axes: Axes) -> None:
        argument = op.regions[1].blocks[0].arguments[k]
        if argument not in self._partial:
            end = returned(op.regions[1])
            self._constrain_argument(argument, calls, axes)
            self._keep_operand(op, k, calls, axes)
            self._keep_operand(end, k, calls, axes)

    def _keep_operands(self, op: Any, k: int, calls: _Calls, axes: Axes) -> None:
        """Makes the operands of `op` partial, as its result `k` requires."""
        if op.name == "stablehlo.while":
            self._keep_carry(op, k, calls, axes)
        elif op.name in _BRANCHES:
            for region in op.regions:
                self._keep_operand(returned(region), k, calls, axes)
        elif op.name == "func.call":
            self._own_function(op)
            end = returned(self._called(op).regions[0])
            self._keep_operand(end, k, (*calls, op), axes)
        elif op.name == "stablehlo.optimization_barrier":
            self._keep_operand(op, k, calls, axes)
        else:
            if op.name == "stablehlo.broadcast_in_dim":
                self._drop_repeated(op, calls)
            rule = self._rule(op, calls)
            for i, dims in rule.sharded.items():
                op.operands[i] = self._constrained(op.operands[i], dims, frozenset())
            for i in rule.partial:
                self._keep_operand(op, i, calls, axes)

    def _drop_repeated(self, op: Any, calls: _Calls) -> None:
        """Takes the dimensions of size 1 that a broadcast repeats out of its operand. XLA makes
        several operations of a broadcast that has them, and reduces before the last one."""
        value, shape = op.operands[0], shape_of(op.results[0])
        kind, to = ir.RankedTensorType(value.type), op.attributes["broadcast_dimensions"]
        dims = list(enumerate(ir.DenseI64ArrayAttr(to)))
        left = [(k, d) for k, d in dims if kind.shape[k] == shape[d]]
        if left == dims:
            return
        sharding = self._dimensions(value, calls)
        with value.context, ir.Location.unknown(), ir.InsertionPoint(op):
            narrow = ir.RankedTensorType.get(
                [kind.shape[k] for k, _ in left], kind.element_type
            )
            op.operands[0] = stablehlo.ReshapeOp(narrow, value).result
            op.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(
                [d for _, d in left]
            )
        self.of_ops[op.operands[0]] = [[sharding[k] for k, _ in left]]

    def _made_partial(self, value: Any, calls: _Calls, axes: Axes) -> Any:
        """The value on the first of the devices along the axes, zeros on the others."""
        kind = ir.RankedTensorType(value.type)
        names = tuple(a for a in self.sizes if a in axes)
        dims = self._without(value, calls, axes)
        with value.context, ir.Location.unknown():
            text = _ON_FIRST_DEVICE.format(
                type=kind,
                element=kind.element_type,
                shape="".join(f"{size}x" for size in (self._ways(names), *kind.shape)),
                dims=list(range(1, kind.rank + 1)),
                mesh=self.mesh,
                one_each=_printed(self.attribute([names, *dims], frozenset())),
                partial=_printed(self.attribute(dims, axes)),
            )
            module = ir.Module.parse(text)
            call = self._add_function(module.body.operations[1].operation, "partial")
            with behind(value):
                made = func.CallOp([kind], call, [value]).result
        self._partial[made] = axes
        return made

    # --- Functions ---

    def _add_function(self, function: Any, name: str) -> str:
        """Adds a copy of a function to the module, and returns its name."""
        name = f"{name}_{len(self.functions)}"
        with self.main.context:
            copy = function.clone(ip=ir.InsertionPoint(self.main.operation))
            copy.attributes["sym_name"] = ir.StringAttr.get(name)
        self.functions[name] = copy
        return name

    def _own_function(self, call: Any) -> None:
        """Gives a call a function that no other call uses."""
        if call.results[0] in self._copied:
            return
        function = self._called(call)
        name = self._add_function(function.operation, callee(call))
        with call.context:
            call.attributes["callee"] = ir.FlatSymbolRefAttr.get(name)
        copy = self.functions[name]
        for old, new in zip(operations(function), operations(copy), strict=True):
            if len(old.results) and old.results[0] in self.of_ops:
                self.of_ops[new.results[0]] = self.of_ops[old.results[0]]
        self._copied.append(call.results[0])

    def _share_copies(self) -> None:
        """Makes calls of equal copies of a function call the same copy."""
        first: dict[str, str] = {}
        for call in map(operation_of, self._copied):
            name = callee(call)
            body = str(self.functions[name].operation).partition("(")[2]
            shared = first.setdefault(body, name)
            if shared != name:
                with call.context:
                    call.attributes["callee"] = ir.FlatSymbolRefAttr.get(shared)
                self.functions.pop(name).erase()

    # --- The end of a partial sum ---

    def _reduce(self, values: list[Any]) -> None:
        """Adds partial arguments of main that are terms of one sum, and then reduces the
        result over the devices."""
        left = [v for v in values if any(True for _ in v.uses)]
        while left:
            value = left.pop()
            axes = self._partial[value]
            op = only_user(value)
            if op and op.name == "stablehlo.add":
                terms = [v for v in op.operands if v != value]
                shared = any(v in left and not only_user(v) for v in terms)
                if not shared and all(self._partial.get(v) == axes for v in terms):
                    left = [v for v in left if v not in terms]
                    if op.results[0] in self._kept:
                        continue  # the state of an accumulator
                    dims = self._without(op.results[0], (), axes)
                    total = self._constrained(op.results[0], dims, axes)
                    op.results[0].replace_all_uses_except(total, total.owner.operation)
                    self._partial[total] = axes
                    left.append(total)
                    continue
            whole = self._constrained(value, self._dimensions(value, ()), frozenset())
            value.replace_all_uses_except(whole, whole.owner.operation)
