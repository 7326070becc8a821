"""Sums that stay partial over the devices of a rank, in MLIR.

A sum over an axis that is sharded over devices is first a partial sum on each device. XLA adds
these immediately, with an all-reduce, unless Shardy is told that the value is `unreduced`
over the mesh's axes. `Partials` keeps results that are such sums partial, through the
operations that are linear in them (`sums.py`).

Shardy does not check that a value declared unreduced is a partial sum: a value that each
device has whole would be counted once per device. Therefore the operands of a sum are
constrained to the shards that make it partial, only listed operations propagate partial
sums, and any other value that is added is first made partial: whole on one device, zero
on the others.

In a `shard_map`, each device computes its term, and an all-reduce adds the terms. To keep the
sum partial, the all-reduce is removed, and the map's result becomes unreduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, sdy, stablehlo

from jaxpp.jax_internals.mlir import (
    MANUAL,
    Axes,
    Dimensions,
    behind,
    callee,
    is_argument,
    is_zero,
    manual_axes,
    only_user,
    operation_of,
    operations,
    returned,
    shape_of,
)
from jaxpp.jax_internals.sums import BRANCHES, Blocked, Calls, Sums

__all__ = ["Partials"]

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


def _printed(sharding: Any) -> str:
    """A sharding in the form in which constraints print it."""
    return str(sharding).removeprefix("#sdy.sharding")


class Partials(Sums):
    """Keeps partial sums of a module's main function partial.

    Args:
      functions: the module's functions by name.
      mesh: its sdy.mesh; None: nothing is sharded.
      sizes, arguments, of_ops: as in `Sums`.
    """

    def __init__(
        self,
        functions: dict[str, Any],
        mesh: Any,
        sizes: dict[str, int],
        arguments: Sequence[Dimensions | None],
        of_ops: dict[Any, list[Dimensions]],
    ) -> None:
        super().__init__(functions, sizes, arguments, of_ops)
        self.mesh = mesh
        # The first results of calls that got a function of their own.
        self._copied: list[Any] = []
        self._originals: set[str] = set()  # the functions that these called before
        self._dropped: list[Any] = []  # sums over devices that became partial

    # --- Shardings ---

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

    def _declared(self, value: Any, calls: Calls, axes: Axes) -> Any:
        """The value, which is partial, with a constraint that says so. Inside a shard_map, each
        device has its own values along the manual axes in any case."""
        axes -= manual_axes(calls)
        if not axes:
            return value
        return self._constrained(value, self._without(value, calls, axes), axes)

    def _without(self, value: Any, calls: Calls, axes: Axes) -> Dimensions:
        return [
            tuple(a for a in names if a not in axes) for names in self._dimensions(value, calls)
        ]

    # --- Keeping a value partial ---

    def keep(self, arguments: dict[int, Axes], results: dict[int, Axes]) -> None:
        """Declares arguments of main, by number, partial sums, and makes results partial.

        Arguments that are terms of no partial result are added to each other and reduced.
        """
        block = self.main.regions[0].blocks[0]
        for k, axes in arguments.items():
            self._partial[block.arguments[k]] = axes
        end = returned(self.main.regions[0])
        found = self.axes(list(results), required=results)
        others = [k for k, axes in results.items() if found[k] not in (None, axes)]
        for k, axes in results.items():
            if k not in others:
                self._require(axes)
                end.operands[k] = self._kept_value(end.operands[k], (), axes)
        for k in others:
            end.operands[k] = self._made_partial(end.operands[k], (), results[k])
        self._reduce([block.arguments[k] for k in arguments])
        for op in self._dropped:
            op.erase()
        self._share_copies()
        self._erase_originals()

    def _keep_operand(self, user: Any, k: int, calls: Calls, axes: Axes) -> None:
        value = user.operands[k]
        try:
            found = self._axes(user, k, calls)
        except Blocked:
            found = frozenset()
        if found is None or axes == found:
            user.operands[k] = self._kept_value(value, calls, axes)
        else:
            user.operands[k] = self._made_partial(value, calls, axes)

    def _kept_value(self, value: Any, calls: Calls, axes: Axes) -> Any:
        if value in self._partial:
            return self._kept.get(value, value)
        if is_argument(value):
            self._keep_argument(value, calls, axes)
            return self._kept[value]
        if is_zero(value):
            if axes <= manual_axes(calls):
                return value
            # The barrier prevents a merge with a zero that is not partial.
            with value.context, ir.Location.unknown(), behind(value):
                own = stablehlo.OptimizationBarrierOp([value]).results[0]
            return self._constrained(own, self._without(value, calls, axes), axes)
        if value not in self._kept:
            op = operation_of(value)
            sums = op.name == "stablehlo.all_reduce"
            kept = self._term(op) if sums else self._declared(value, calls, axes)
            self._kept[value] = kept
            self._partial[kept] = axes
            if not sums:
                self._keep_operands(op, value.result_number, calls, axes)
        return self._kept[value]

    def _term(self, all_reduce: Any) -> Any:
        """What each device adds to a sum over devices, as a value of its own."""
        value = all_reduce.operands[0]
        with value.context, ir.Location.unknown(), ir.InsertionPoint(all_reduce):
            term = stablehlo.ReshapeOp(value.type, value).result
        self._dropped.append(all_reduce)
        return term

    def _keep_argument(self, value: Any, calls: Calls, axes: Axes) -> None:
        owner, k = value.owner.owner.operation, value.arg_number
        if owner.name == "stablehlo.while":
            self._keep_carry(owner, k, calls, axes)
        else:
            self._constrain_argument(value, calls, axes)
            self._keep_operand(calls[-1], k, calls[:-1], axes)

    def _constrain_argument(self, value: Any, calls: Calls, axes: Axes) -> None:
        """Without a constraint of its own, Shardy could reduce it where it enters."""
        kept = self._declared(value, calls, axes)
        if kept is not value:
            value.replace_all_uses_except(kept, kept.owner.operation)
        self._kept[value] = kept
        self._partial[value] = self._partial[kept] = axes

    def _keep_carry(self, op: Any, k: int, calls: Calls, axes: Axes) -> None:
        argument = op.regions[1].blocks[0].arguments[k]
        if argument not in self._partial:
            end = returned(op.regions[1])
            self._constrain_argument(argument, calls, axes)
            self._keep_operand(op, k, calls, axes)
            self._keep_operand(end, k, calls, axes)

    def _keep_operands(self, op: Any, k: int, calls: Calls, axes: Axes) -> None:
        """Makes the operands of `op` partial, as its result `k` requires."""
        if op.name == "stablehlo.while":
            self._keep_carry(op, k, calls, axes)
        elif op.name in BRANCHES:
            for region in op.regions:
                self._keep_operand(returned(region), k, calls, axes)
        elif op.name == "func.call":
            self._own_function(op)
            end = returned(self._called(op).regions[0])
            self._keep_operand(end, k, (*calls, op), axes)
        elif op.name == "stablehlo.optimization_barrier":
            self._keep_operand(op, k, calls, axes)
        elif op.name == MANUAL:
            self._declare_result(op, k, calls, axes)
            self._keep_operand(returned(op.regions[0]), k, (*calls, op), axes)
        else:
            if op.name == "stablehlo.broadcast_in_dim":
                self._drop_repeated(op, calls)
            rule = self._rule(op, calls)
            for i, dims in rule.sharded.items() if not manual_axes(calls) else ():
                op.operands[i] = self._constrained(op.operands[i], dims, frozenset())
            for i in rule.partial:
                self._keep_operand(op, i, calls, axes)

    def _declare_result(self, mapped: Any, k: int, calls: Calls, axes: Axes) -> None:
        """Makes a result of a shard_map unreduced over the axes."""
        given = sdy.TensorShardingPerValueAttr(mapped.attributes["out_shardings"])
        shardings = list(given.shardings)
        shardings[k] = self.attribute(self._without(mapped.results[k], calls, axes), axes)
        mapped.attributes["out_shardings"] = sdy.TensorShardingPerValueAttr.get(shardings)

    def _drop_repeated(self, op: Any, calls: Calls) -> None:
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

    def _made_partial(self, value: Any, calls: Calls, axes: Axes) -> Any:
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
        self._originals.add(callee(call))
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

    def _erase_originals(self) -> None:
        """Erases functions that nothing calls any more."""
        while self._originals:
            inner = (op for f in self.functions.values() for op in operations(f))
            unused = self._originals - {callee(op) for op in inner if op.name == "func.call"}
            if not unused:
                return
            self._originals -= unused
            for name in unused:
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
