"""What equations do with the rows of an array, in whatever spelling: which elements a slice, a
split or a gather by constants takes, where the transposes of these put them, and where a reshape
or a transposition leaves the axis along which an array is cut."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Taking:
    """The elements at these places along each axis, as an array of this shape."""

    places: tuple[np.ndarray, ...]
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


def _box(starts: Sequence[int], limits: Sequence[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.arange(a, b) for a, b in zip(starts, limits, strict=True))


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


def takings(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Taking] | None:
    """What each result takes of the first operand, by constants; None: something else."""
    name, params = eqn.primitive.name, eqn.params
    shape = eqn.invars[0].aval.shape if eqn.invars else ()
    outs = [v.aval.shape for v in eqn.outvars]
    if name == "slice":
        steps = params["strides"] or (1,) * len(shape)
        ends = zip(params["start_indices"], params["limit_indices"], steps, strict=True)
        return [Taking(tuple(np.arange(a, b, step) for a, b, step in ends), outs[0])]
    if name == "dynamic_slice":
        sizes = params["slice_sizes"]
        starts = _clamped_starts(operands[1:], sizes, shape)
        if starts is None:
            return None
        limits = [a + size for a, size in zip(starts, sizes, strict=True)]
        return [Taking(_box(starts, limits), outs[0])]
    if name == "gather":
        rows = _gathered_rows(eqn, operands[1], shape)
        return rows is not None and [Taking((rows, *_box([0] * len(shape), shape)[1:]), outs[0])] or None
    if name == "rev":
        places = list(_box([0] * len(shape), shape))
        for axis in params["dimensions"]:
            places[axis] = places[axis][::-1]
        return [Taking(tuple(places), outs[0])]
    if name in ("split", "unstack"):
        axis = params["axis"]
        sizes = params["sizes"] if name == "split" else [1] * len(outs)
        ends = np.cumsum([0, *sizes])
        found = []
        for begin, end, out in zip(ends, ends[1:], outs, strict=False):
            places = list(_box([0] * len(shape), shape))
            places[axis] = np.arange(begin, end)
            found.append(Taking(tuple(places), out))
        return found
    return None


def runs(places: np.ndarray) -> list[tuple[int, int]]:
    """Places as ranges (start, stop) of consecutive ones, in their order."""
    found: list[tuple[int, int]] = []
    for place in map(int, places):
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


def placed_pieces(
    eqn: JaxprEqn, operands: Sequence[Any], is_zero: Callable[[Any], bool]
) -> list[Piece] | None:
    """The pieces that an equation puts beside each other into zeros; None: something else."""
    name, params = eqn.primitive.name, eqn.params
    out = eqn.outvars[0].aval.shape if eqn.outvars else ()
    shapes = [v.aval.shape for v in eqn.invars]
    if name == "pad":
        config = params["padding_config"]
        inside = all(low >= 0 and high >= 0 and not within for low, high, within in config)
        if not inside or not is_zero(operands[1]):
            return None
        return [Piece(operands[0], tuple(int(low) for low, *_ in config), shapes[0])]
    if name == "dynamic_update_slice" and is_zero(operands[0]):
        starts = _clamped_starts(operands[2:], shapes[1], out)
        return None if starts is None else [Piece(operands[1], tuple(starts), shapes[1])]
    if name == "scatter-add" and is_zero(operands[0]):
        return _scattered_rows(eqn, operands)
    if name in ("concatenate", "stack"):
        axis = params["dimension"] if name == "concatenate" else params["axis"]
        axis %= len(out)
        found, at = [], 0
        for value, shape in zip(operands, shapes, strict=True):
            own = shape if name == "concatenate" else (*shape[:axis], 1, *shape[axis:])
            starts = tuple(at if k == axis else 0 for k in range(len(out)))
            found.append(Piece(value, starts, own))
            at += own[axis]
        return [piece for piece in found if not is_zero(piece.value)]
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
    for start, stop in runs(rows):
        piece = jax.lax.slice_in_dim(value, at, at + stop - start, axis=0)
        found.append(Piece(piece, (start, *[0] * (len(out) - 1)), (stop - start, *out[1:])))
        at += stop - start
    return found


# --- Shapes -----------------------------------------------------------------------------


def reshaped_axis(
    shape: Sequence[int], new_shape: Sequence[int], first: int, last: int
) -> tuple[int, int] | None:
    """Where the axes first .. last - 1 of a shape are in another of as many elements: they are
    these axes there, whatever they are divided into or merged from; None: merged with others."""
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
