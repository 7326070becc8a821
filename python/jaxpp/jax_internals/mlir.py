"""Reads modules in MLIR: their operations, shardings and constants."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

__all__ = [
    "Axes",
    "Dimensions",
    "adds",
    "behind",
    "callee",
    "is_argument",
    "is_integer",
    "is_zero",
    "keeps_sums",
    "mesh_of",
    "only_user",
    "operation_of",
    "operations",
    "returned",
    "shape_of",
    "sharded_axes",
]

Axes = frozenset[str]
Dimensions = list[tuple[str, ...]]  # the mesh axes that shard each dimension

_COMPLEX_ZERO = "dense<(0.000000e+00,0.000000e+00)>"


def operations(root: Any) -> Iterator[Any]:
    """All operations inside an operation, at any depth, in order."""
    for region in root.regions:
        for block in region.blocks:
            for op in block.operations:
                yield op.operation
                yield from operations(op.operation)


def sharded_axes(sharding: Any) -> Dimensions:
    """The mesh axes of a Shardy sharding by dimension. A dimension that is sharded over
    part of an axis counts as whole."""
    found = []
    for dimension in sdy.TensorShardingAttr(sharding).dimension_shardings:
        refs = [sdy.AxisRefAttr(ref) for ref in sdy.DimensionShardingAttr(dimension).axes]
        parts = any(ref.sub_axis_info is not None for ref in refs)
        found.append(() if parts else tuple(ref.name for ref in refs))
    return found


def mesh_of(module: Any) -> Any:
    """The sdy.mesh of a module; None if nothing in it is sharded."""
    found = (op.operation for op in module.regions[0].blocks[0].operations)
    return next((op for op in found if op.name == "sdy.mesh"), None)


def operation_of(value: Any) -> Any:
    return value.owner.operation


def is_argument(value: Any) -> bool:
    return isinstance(value.owner, ir.Block)


def shape_of(value: Any) -> list[int]:
    return ir.RankedTensorType(value.type).shape


def callee(call: Any) -> str:
    name: str = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    return name


def is_zero(value: Any) -> bool:
    if is_argument(value) or operation_of(value).name != "stablehlo.constant":
        return False
    if isinstance(ir.RankedTensorType(value.type).element_type, ir.ComplexType):
        # The bindings cannot read such elements.
        return _COMPLEX_ZERO in value.owner.get_asm(large_elements_limit=8)
    constant = ir.DenseElementsAttr(value.owner.attributes["value"])
    return constant.is_splat and not np.any(np.asarray(constant.get_splat_value().value))


def adds(op: Any) -> bool:
    """Whether the op's region returns the sum of its two arguments."""
    inner = [o.operation for o in op.regions[0].blocks[0].operations]
    return len(inner) == 2 and inner[0].name == "stablehlo.add"


def is_integer(value: Any) -> bool:
    return isinstance(ir.RankedTensorType(value.type).element_type, ir.IntegerType)


def widens_integers(op: Any) -> bool:
    """Whether a product of integers has wider ones as result."""
    widths = [
        ir.IntegerType(kind).width
        for kind in (
            ir.RankedTensorType(v.type).element_type for v in (op.results[0], op.operands[0])
        )
        if isinstance(kind, ir.IntegerType)
    ]
    return len(widths) == 2 and widths[0] > widths[1]


def only_user(value: Any) -> Any | None:
    """The only operation that uses the value; None if several do."""
    users = {use.owner.operation for use in value.uses}
    return users.pop() if len(users) == 1 else None


def behind(value: Any) -> Any:
    """The insertion point after the operation that makes a value."""
    if is_argument(value):
        return ir.InsertionPoint.at_block_begin(value.owner)
    return ir.InsertionPoint.after(value.owner.operation)


def keeps_sums(convert: Any) -> bool:
    """Whether a cast of a sum equals the sum of casts, apart from rounding."""
    before, after = (
        ir.RankedTensorType(v.type).element_type
        for v in (convert.operands[0], convert.results[0])
    )
    if not isinstance(before, ir.IntegerType):
        return not isinstance(after, ir.IntegerType)
    if isinstance(after, ir.IntegerType):
        return 1 < after.width <= before.width
    # One device's term of an unsigned difference may be less than 0, and its term of a narrow
    # sum may have wrapped around, although the sum does not.
    return before.width >= 32 and not before.is_unsigned


def returned(region: Any) -> Any:
    """The terminator of a region."""
    *_, last = region.blocks[0].operations
    return last.operation
