"""Layers that are alike, divided into stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpp.errors import counted, here, make_error, shorten
from jaxpp.trace.marks import mark_stage_end

__all__ = ["stages"]


def _count_layers(params: Any) -> int:
    """The length of the first axis of all leaves."""
    lengths = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shape = getattr(leaf, "shape", ())
        lengths[jax.tree_util.keystr(path)] = shape[0] if shape else None
    if len(set(lengths.values())) == 1 and (length := next(iter(lengths.values()))) is not None:
        return int(length)
    raise make_error(
        "stage-marks",
        f"stages at {here()}: params: expected arrays with one layer per row of the first "
        f"axis, all of one length, or a list of layers, found lengths {shorten(lengths)}",
    )


def _layers_of_stages(num_stages: int | Sequence[int], layers: int) -> list[int]:
    """The number of layers of each stage."""
    if isinstance(num_stages, int) and not isinstance(num_stages, bool):
        if 1 <= num_stages <= layers:
            each, more = divmod(layers, num_stages)
            return [each + (stage < more) for stage in range(num_stages)]
    elif isinstance(num_stages, Sequence) and all(
        isinstance(n, int) and n > 0 for n in num_stages
    ):
        if sum(num_stages) == layers:
            return list(num_stages)
    raise make_error(
        "stage-marks",
        f"stages at {here()}: num_stages={shorten(num_stages)}; expected a number of stages up "
        f"to the {counted(layers, 'layer')}, or for each stage its number of layers, {layers} "
        "in all",
    )


def stages(
    layer_fn: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    num_stages: int | Sequence[int],
    *,
    scan: bool = True,
) -> Any:
    """Applies layers that are alike one after the other, in `num_stages` pipeline stages.

    Puts a stage mark (`mark_stage_end`) between the stages. What runs before the layers is part
    of the first stage, and what runs after them part of the last one.

    Args:
      layer_fn: called with the parameters of a layer and `x`; returns the next `x`, a pytree of
        the same shapes and dtypes where layers are scanned.
      params: a list of the layers' parameters; or any other pytree, whose leaves are arrays
        [layers, ...].
      x: a pytree, the input of the first layer.
      num_stages: the number of stages, of all ranks together; the first ones have a layer more
        if it does not divide the layers. Or a list with the number of layers of each stage.
      scan: whether a stage scans over its layers, if the parameters are stacked, or calls
        `layer_fn` for each.

    Returns:
      The output of the last layer.

    Raises:
      JaxppError("stage-marks"): the layers do not fit the number of stages.
    """
    listed = isinstance(params, list)
    layers = len(params) if listed else _count_layers(params)
    sizes = _layers_of_stages(num_stages, layers)

    def body(state: Any, layer: Any) -> tuple[Any, None]:
        return layer_fn(layer, state), None

    for stage, end in enumerate(itertools.accumulate(sizes)):
        rows = range(end - sizes[stage], end)
        if listed or not scan:
            for row in rows:
                layer = params[row] if listed else jax.tree.map(lambda p, r=row: p[r], params)
                x = layer_fn(layer, x)
        else:
            own = jax.tree.map(lambda p, r=rows: p[r.start : r.stop], params)
            x, _ = jax.lax.scan(body, x, own)
        if end < layers:
            x = mark_stage_end(x)
    return x
