"""Reads modules in MLIR: their operations, shardings and constants."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

__all__ = [
    "MANUAL",
    "Axes",
    "Dimensions",
    "adds",
    "axes_of_groups",
    "behind",
    "callee",
    "is_argument",
    "is_integer",
    "is_zero",
    "keeps_sums",
    "manual_axes",
    "mesh_of",
    "only_user",
    "operation_of",
    "operations",
    "returned",
    "says_nothing",
    "shape_of",
    "sharded_axes",
]

Axes = frozenset[str]
Dimensions = list[tuple[str, ...]]  # the mesh axes that shard each dimension

MANUAL = "sdy.manual_computation"  # a shard_map

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


def says_nothing(constraint: Any) -> bool:
    """Whether a constraint leaves the sharding of every dimension to Shardy. JAX adds such
    constraints to shard_maps that leave axes to Shardy."""
    sharding = sdy.TensorShardingAttr(constraint.attributes["sharding"])
    dims = map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
    is_open = all(not dim.is_closed and not list(dim.axes) for dim in dims)
    return is_open and not (list(sharding.replicated_axes) or list(sharding.unreduced_axes))


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
    """Whether the op's region returns the sum of its two arguments. In a shard_map, JAX adds
    a constraint to the sum, which is a scalar."""
    every = (o.operation for o in op.regions[0].blocks[0].operations)
    inner = [o for o in every if o.name != "sdy.sharding_constraint"]
    return len(inner) == 2 and inner[0].name == "stablehlo.add"


def manual_axes(calls: Sequence[Any]) -> Axes:
    """The mesh axes along which each device runs its own part of the shard_maps among
    `calls`."""
    mapped = (op for op in calls if op.name == MANUAL)
    lists = (sdy.ManualAxesAttr(op.attributes["manual_axes"]) for op in mapped)
    return frozenset(name for names in lists for name in names)


def axes_of_groups(collective: Any, sizes: dict[str, int]) -> Axes | None:
    """The mesh axes along which a collective's devices are in one group, apart from those of
    size 1; None if the groups are not all devices along such axes."""
    groups = collective.attributes["replica_groups"]
    if not isinstance(groups, ir.DenseElementsAttr):  # since JAX 0.11
        named = stablehlo.ReplicaGroupMeshAxesAttr(groups)
        axes = [stablehlo.AxisRefAttr(axis) for axis in named.axes]
        if any(axis.sub_axis_info is not None for axis in axes):
            return None
        return frozenset(axis.name for axis in axes if sizes[axis.name] > 1)
    numbers = np.array(groups)
    devices = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    places = np.argwhere(np.isin(devices, numbers[0]))
    along = [d for d in range(devices.ndim) if len(set(places[:, d])) > 1]
    ways = math.prod(devices.shape[d] for d in along)
    expected = np.moveaxis(devices, along, range(-len(along), 0)).reshape(-1, ways)
    same = sorted(map(sorted, numbers.tolist())) == sorted(expected.tolist())
    return frozenset(list(sizes)[d] for d in along) if same else None


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
