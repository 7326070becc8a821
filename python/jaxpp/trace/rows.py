"""What equations do with the rows of an array, however it is written: which elements a slice, a
split or a gather by constants takes, where the transposes of these put them, and where a
reshape or a transposition leaves the axis along which an array is cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.extend.core import JaxprEqn

__all__ = [
    "Piece",
    "Taking",
    "constant",
    "fold",
    "moved_axes",
    "placed_pieces",
    "reshaped_axis",
    "runs",
    "takings",
]

_MOST_FOLDED = 4096  # elements of what is computed while a step is traced


# --- Constants --------------------------------------------------------------------------


def constant(value: Any) -> np.ndarray | None:
    """A small value that is known while the step is traced."""
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return np.asarray(value) if isinstance(value, bool | int) else None
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        return None
    whole = value.dtype == bool or np.issubdtype(value.dtype, np.integer)
    return np.asarray(value) if whole and np.size(value) <= _MOST_FOLDED else None


def fold(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """What an equation on small whole numbers that are known gives; None: it is no such one."""
    outs = [v.aval for v in eqn.outvars]
    counts = all(
        hasattr(a, "dtype")
        and not jax.dtypes.issubdtype(a.dtype, jax.dtypes.extended)
        and (a.dtype == bool or np.issubdtype(a.dtype, np.integer))
        and a.size <= _MOST_FOLDED
        for a in outs
    )
    if not operands or not outs or not counts or eqn.effects:
        return None
    if any(constant(o) is None for o in operands):
        return None
    with jax.ensure_compile_time_eval():
        found = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


# --- Taking -----------------------------------------------------------------------------


Places: TypeAlias = tuple[Sequence[int], ...]  # along each axis; ranges, mostly


@dataclasses.dataclass(frozen=True)
class Taking:
    """The elements at these places along each axis, as an array of this shape."""

    places: Places
    shape: tuple[int, ...]


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


def _gathered_rows(eqn: JaxprEqn, indices: Any, shape: Sequence[int]) -> np.ndarray | None:
    """The rows of axis 0 that a gather by constants takes, where it takes whole ones."""
    numbers = eqn.params["dimension_numbers"]
    found = constant(indices)
    rest = eqn.outvars[0].aval.ndim - len(numbers.offset_dims)
    simple = (
        found is not None
        and rest <= 1
        and tuple(numbers.collapsed_slice_dims) == tuple(numbers.start_index_map) == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(rest, eqn.outvars[0].aval.ndim))
    )
    if found is None or not simple:
        return None
    rows = found.reshape(-1)
    return rows if ((rows >= 0) & (rows < shape[0])).all() else None


def _sliced(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    params = eqn.params
    steps = params["strides"] or (1,) * len(whole)
    ends = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
    return [tuple(range(a, b, step) for a, b, step in ends)]


def _sliced_at(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    sizes = eqn.params["slice_sizes"]
    starts = _clamped_starts(operands[1:], sizes, tuple(map(len, whole)))
    if starts is None:
        return None
    return [tuple(range(a, a + size) for a, size in zip(starts, sizes, strict=True))]


def _gathered(eqn: JaxprEqn, operands: Sequence[Any], whole: Places) -> list[Places] | None:
    rows = _gathered_rows(eqn, operands[1], tuple(map(len, whole)))
    return None if rows is None else [(rows.tolist(), *whole[1:])]


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


def takings(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Taking] | None:
    """What each result takes of the first operand, by constants; None: something else."""
    find = _TAKINGS.get(eqn.primitive.name)
    if find is None:
        return None
    found = find(eqn, operands, tuple(map(range, eqn.invars[0].aval.shape)))
    if found is None:
        return None
    outs = [v.aval.shape for v in eqn.outvars]
    return [Taking(places, shape) for places, shape in zip(found, outs, strict=True)]


def runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """Places as ranges (start, stop) of consecutive ones, in their order."""
    if isinstance(places, range) and places.step == 1:
        return [(places.start, places.stop)]
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return found


# --- Placing: the transposes ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Piece:
    """An array of this shape that stands at `starts` in a larger one of zeros."""

    value: Any
    starts: tuple[int, ...]
    shape: tuple[int, ...]


def _beside_each_other(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Piece]:
    out = eqn.outvars[0].aval.shape
    stacks = eqn.primitive.name == "stack"
    axis = eqn.params["axis" if stacks else "dimension"] % len(out)
    found, at = [], 0
    for value, variable in zip(operands, eqn.invars, strict=True):
        shape = variable.aval.shape
        own = (*shape[:axis], 1, *shape[axis:]) if stacks else shape
        found.append(Piece(value, tuple(at * (k == axis) for k in range(len(out))), own))
        at += own[axis]
    return found


def placed_pieces(
    eqn: JaxprEqn, operands: Sequence[Any], is_zero: Callable[[Any], bool]
) -> list[Piece] | None:
    """The pieces that an equation puts beside each other into zeros; None: something else."""
    name = eqn.primitive.name
    if name in ("concatenate", "stack"):
        return [p for p in _beside_each_other(eqn, operands) if not is_zero(p.value)]
    shapes = [v.aval.shape for v in eqn.invars]
    if name == "pad" and is_zero(operands[1]):
        config = eqn.params["padding_config"]
        inside = all(low >= 0 and high >= 0 and not within for low, high, within in config)
        lows = tuple(int(low) for low, *_ in config)
        return [Piece(operands[0], lows, shapes[0])] if inside else None
    if name == "dynamic_update_slice" and is_zero(operands[0]):
        starts = _clamped_starts(operands[2:], shapes[1], shapes[0])
        return None if starts is None else [Piece(operands[1], tuple(starts), shapes[1])]
    if name == "scatter-add" and is_zero(operands[0]):
        return _scattered_rows(eqn, operands)
    return None


def _scattered_rows(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Piece] | None:
    numbers = eqn.params["dimension_numbers"]
    out, updates = eqn.outvars[0].aval.shape, eqn.invars[2].aval.shape
    rows = constant(operands[1])
    rest = len(updates) - len(numbers.update_window_dims)
    simple = (
        rows is not None
        and rest <= 1
        and tuple(numbers.inserted_window_dims) == (0,)
        and tuple(numbers.scatter_dims_to_operand_dims) == (0,)
        and not numbers.operand_batching_dims
        and updates[rest:] == out[1:]
        and tuple(numbers.update_window_dims) == tuple(range(rest, len(updates)))
    )
    if rows is None or not simple:
        return None
    rows = rows.reshape(-1)
    if len(set(rows.tolist())) < len(rows) or not ((rows >= 0) & (rows < out[0])).all():
        return None
    value = jax.lax.reshape(operands[2], (len(rows), *out[1:]))
    found, at = [], 0
    for start, stop in runs(rows.tolist()):
        piece = jax.lax.slice_in_dim(value, at, at + stop - start, axis=0)
        found.append(Piece(piece, (start, *[0] * (len(out) - 1)), (stop - start, *out[1:])))
        at += stop - start
    return found


# --- Shapes -----------------------------------------------------------------------------


def reshaped_axis(
    shape: Sequence[int], new_shape: Sequence[int], first: int, last: int
) -> tuple[int, int] | None:
    """The axes of `new_shape` (first, end) that the axes first .. last - 1 of `shape` become
    in a reshape, alone; None: it merges them with others."""
    before, inside = math.prod(shape[:first]), math.prod(shape[first:last])
    begin = 0
    while begin < len(new_shape) and math.prod(new_shape[:begin]) != before:
        begin += 1
    if math.prod(new_shape[:begin]) != before:
        return None
    for end in range(begin, len(new_shape) + 1):
        if math.prod(new_shape[begin:end]) == inside:
            return begin, end
    return None


def moved_axes(eqn: JaxprEqn) -> tuple[int, ...] | None:
    """For each axis of a transposition's operand where it is in the result."""
    if eqn.primitive.name != "transpose":
        return None
    permutation = tuple(eqn.params["permutation"])
    return tuple(permutation.index(axis) for axis in range(len(permutation)))
