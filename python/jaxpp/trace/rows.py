"""Finds the elements that slices, splits, reversals and gathers with constant indices
read, and the places to which their transposes write."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jaxpp.jax_internals.context import context_mesh
from jaxpp.jax_internals.jaxprs import bind, evaluate
from jaxpp.trace.bodies import inlined_call

__all__ = [
    "Places",
    "ScatteredValue",
    "constant",
    "fold",
    "moved_axes",
    "scattered_values",
    "gathered_places",
]

_MOST_FOLDED = 4096  # size limit of values computed while a step is traced


# --- Constants --------------------------------------------------------------------------


def constant(value: Any) -> np.ndarray | None:
    """A small value that is known while the step is traced."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return np.asarray(value) if isinstance(value, bool | int) else None
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    whole = value.dtype == bool or np.issubdtype(value.dtype, np.integer)
    return np.asarray(value) if whole and np.size(value) <= _MOST_FOLDED else None


# Operations on integers and booleans, elementwise, which numpy computes like JAX.
_NUMPY: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum},
    **{"min": np.minimum, "lt": np.less, "le": np.less_equal, "gt": np.greater},
    **{"ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "not": np.invert},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    "convert_element_type": np.asarray,
}


def _fold_in_numpy(eqn: JaxprEqn, operands: Sequence[Any]) -> np.ndarray | None:
    """The result of an equation of a frequent kind; None for others."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if name in _NUMPY:
        with np.errstate(over="ignore"):
            found = _NUMPY[name](*operands)
    elif name == "select_n" and operands[0].dtype == bool and len(operands) == 3:
        found = np.where(operands[0], operands[2], operands[1])
    elif name == "broadcast_in_dim" and len(operands) == 1:
        shape = np.ones(len(aval.shape), int)
        shape[list(eqn.params["broadcast_dimensions"])] = operands[0].shape
        found = operands[0].reshape(shape)
    else:
        return None
    return np.broadcast_to(found, aval.shape).astype(aval.dtype)


_SHARDINGS = {"sharding", "out_sharding"}  # parameters of equations


def fold(eqn: JaxprEqn, operands: Sequence[Any], in_numpy: bool = False) -> list[Any] | None:
    """Evaluates an equation on small known integers; None if that is not possible.

    `in_numpy`: only the values matter, not JAX's weak types; JAX compiles a program for each
    new equation that it evaluates.
    """
    if not operands or any(o is None for o in operands):
        return None
    outs = [v.aval for v in eqn.outvars]
    counts = all(
        hasattr(a, "dtype")
        and not jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
        and (a.dtype == bool or np.issubdtype(a.dtype, np.integer))
        and a.size <= _MOST_FOLDED
        for a in outs
    )
    if not outs or not counts or eqn.effects:
        return None
    known = [constant(o) for o in operands]
    if any(value is None for value in known):
        return None
    found = _fold_in_numpy(eqn, known) if in_numpy else None
    if found is not None:
        return [found]
    called = inlined_call(eqn)
    if called is not None and not jax.sharding.get_abstract_mesh().empty:
        return evaluate(called, operands, fold)  # JAX cannot evaluate it on an abstract mesh
    # Known integers are on no mesh, whatever the equation says.
    if eqn.primitive.name == "reshard":
        return list(operands)
    params = {**eqn.params, **dict.fromkeys(_SHARDINGS & eqn.params.keys())}
    with context_mesh(None), jax.ensure_compile_time_eval():
        return bind(eqn.primitive, params, operands)


# --- Taking and placing -----------------------------------------------------------------


Places: TypeAlias = tuple[Sequence[int], ...]  # along each axis; ranges, mostly


@dataclasses.dataclass(frozen=True)
class ScatteredValue:
    """A value that an equation writes into zeros of this shape at these places."""

    value: Any
    shape: tuple[int, ...]
    places: Places


def _clamped_starts(
    starts: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]
) -> list[int] | None:
    found = []
    for start, size, whole in zip(starts, sizes, shape, strict=True):
        known = 0 if size == whole else constant(start)
        if known is None:
            return None
        found.append(min(max(int(known), 0), whole - size))
    return found


def _ranges(starts: Sequence[int], sizes: Sequence[int]) -> Places:
    return tuple(range(a, a + size) for a, size in zip(starts, sizes, strict=True))


def _indexed(
    shape: Sequence[int],
    indices: Any,
    axes: Sequence[int],
    single: Sequence[int],
    windows: Sequence[int],
    ndim: int,
) -> Places | None:
    """The places that a gather or scatter with constant indices accesses in an array.

    The last axis of `indices` has places along `axes`, which are `single`: along other
    axes all elements are meant. `windows`: the positions of these other axes in the
    gathered array, of `ndim` axes. None: the places are not a product of places along
    each axis, or are in another order.
    """
    found = constant(indices)
    if found is None or not axes or sorted(axes) != sorted(single):
        return None
    columns = dict(zip(axes, found.reshape(-1, found.shape[-1]).T.tolist(), strict=True))
    if any(not 0 <= at < shape[axis] for axis in axes for at in columns[axis]):
        return None
    several = [axis for axis in axes if len(set(columns[axis])) > 1] or list(axes[:1])
    if len(several) > 1:
        return None
    before = sum(axis not in axes for axis in range(several[0]))
    batch = [axis for axis in range(ndim) if axis not in windows]
    if found.size > len(axes) and batch != list(range(before, before + len(batch))):
        return None
    places: list[Sequence[int]] = [range(size) for size in shape]
    for axis, column in columns.items():
        places[axis] = column if axis in several else column[:1]
    return tuple(places)


def _sliced(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    params = eqn.params
    steps = params["strides"] or (1,) * len(whole)
    ends = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [tuple(range(a, b, step) for a, b, step in ends)]


def _sliced_at(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    sizes = eqn.params["slice_sizes"]
    starts = _clamped_starts(operands[1:], sizes, tuple(map(len, whole)))
    return None if starts is None else [_ranges(starts, sizes)]


def _gathered(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    numbers = eqn.params["dimension_numbers"]
    shape, axes = tuple(map(len, whole)), numbers.start_index_map
    windows = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    if numbers.operand_batching_dims or tuple(eqn.params["slice_sizes"]) != windows:
        return None
    found = _indexed(
        shape,
        operands[1],
        axes,
        numbers.collapsed_slice_dims,
        numbers.offset_dims,
        eqn.outvars[0].aval.ndim,
    )
    return None if found is None else [found]


def _reversed(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    axes = eqn.params["dimensions"]
    return [tuple(at[::-1] if axis in axes else at for axis, at in enumerate(whole))]


def _divided(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    axis = eqn.params["axis"]
    sizes = eqn.params.get("sizes", [1] * len(eqn.outvars))
    ends = [0, *itertools.accumulate(map(int, sizes))]
    found = []
    for begin, end in itertools.pairwise(ends):
        found.append((*whole[:axis], range(begin, end), *whole[axis + 1 :]))
    return found


_TAKINGS = {
    "slice": _sliced,
    "dynamic_slice": _sliced_at,
    "gather": _gathered,
    "rev": _reversed,
    "split": _divided,
    "unstack": _divided,
}


def gathered_places(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Places] | None:
    """The constant places of the first operand that each result reads, and its shape; None for
    other equations."""
    find = _TAKINGS.get(eqn.primitive.name)
    return find and find(eqn, operands, tuple(map(range, eqn.invars[0].aval.shape)))


def _beside_each_other(eqn: JaxprEqn, operands: Sequence[Any]) -> list[ScatteredValue]:
    out = eqn.outvars[0].aval.shape
    stacks = eqn.primitive.name == "stack"
    axis = eqn.params["axis" if stacks else "dimension"] % len(out)
    found, at = [], 0
    for value, variable in zip(operands, eqn.invars, strict=True):
        shape = variable.aval.shape
        own = (*shape[:axis], 1, *shape[axis:]) if stacks else shape
        starts = [at * (k == axis) for k in range(len(out))]
        found.append(ScatteredValue(value, own, _ranges(starts, own)))
        at += own[axis]
    return found


def scattered_values(
    eqn: JaxprEqn, operands: Sequence[Any], is_zero: Callable[[Any], bool]
) -> list[ScatteredValue] | None:
    """The values that an equation writes into zeros or concatenates; None for other equations.
    Places outside the result are ignored; elements at the same place are added."""
    name = eqn.primitive.name
    if name in ("concatenate", "stack"):
        return [p for p in _beside_each_other(eqn, operands) if not is_zero(p.value)]
    shapes = [v.aval.shape for v in eqn.invars]
    if name == "pad" and is_zero(operands[1]):
        config = zip(shapes[0], eqn.params["padding_config"], strict=True)
        ends = [(int(low), size, int(inside) + 1) for size, (low, _, inside) in config]
        places = tuple(range(low, low + size * step, step) for low, size, step in ends)
        return [ScatteredValue(operands[0], shapes[0], places)]
    if name == "dynamic_update_slice" and is_zero(operands[0]):
        starts = _clamped_starts(operands[2:], shapes[1], shapes[0])
        found = None if starts is None else _ranges(starts, shapes[1])
        return None if found is None else [ScatteredValue(operands[1], shapes[1], found)]
    if name == "scatter-add" and is_zero(operands[0]):
        found = _scattered(eqn, operands[1])
        if found is not None:
            return [ScatteredValue(operands[2], tuple(map(len, found)), found)]
    return None


def _scattered(eqn: JaxprEqn, indices: Any) -> Places | None:
    numbers = eqn.params["dimension_numbers"]
    out, updates = eqn.outvars[0].aval.shape, eqn.invars[2].aval.shape
    axes, windows = numbers.scatter_dims_to_operand_dims, numbers.update_window_dims
    rest = tuple(size for axis, size in enumerate(out) if axis not in axes)
    if numbers.operand_batching_dims or tuple(updates[axis] for axis in windows) != rest:
        return None
    return _indexed(out, indices, axes, numbers.inserted_window_dims, windows, len(updates))


def moved_axes(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """The permutation of a transposition."""
    return tuple(eqn.params["permutation"]) if eqn.primitive.name == "transpose" else None
