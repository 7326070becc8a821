"""Saves a compiled step as a plan file.

The C library defines the format (`jaxpp/planfile.h`). Pytrees and shardings by axis name, which
it does not know, are stored as JSON in a section for Python.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax

from jaxpp import _core
from jaxpp.devices import Devices
from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import key_implementation
from jaxpp.lower.lowering import TaskModules
from jaxpp.mesh import MpmdMesh, rank_axes
from jaxpp.placements import Part, to_host
from jaxpp.plan.planned import Planned
from jaxpp.run.trees import EncodingError, encode_tree, encode_value

__all__ = ["StepLayout", "save_step"]


@dataclasses.dataclass
class StepLayout:
    """The placements of a plan's arguments, including constants, and results."""

    devices: Devices
    mesh: MpmdMesh
    inputs: list[Part]
    outputs: list[Part]


# --- Layouts and constants --------------------------------------------------------------


def _shard_layout(placement: Part) -> list[int]:
    """The shape of a shard, and the start of each device's shard."""
    shape = placement.physical_shape
    rows = [
        [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        for index in placement.slices
    ]
    box = [stop - start for start, stop in rows[0]]
    return box + [start for row in rows for start, _ in row]


def _shard_layouts(layout: StepLayout) -> list[int] | None:
    if layout.devices.rank_size == 1:
        return None
    placements = [*layout.inputs, *layout.outputs]
    return [number for placement in placements for number in _shard_layout(placement)]


def _constants(planned: Planned, layout: StepLayout) -> list[bytes]:
    placements = layout.inputs[len(planned.in_avals) :]
    pairs = zip(planned.consts, placements, strict=True)
    return [to_host(const, placement.dtype_name).tobytes() for const, placement in pairs]


# --- The section for Python
# ----------------------------------------------------------------------


def _aval_json(aval: Any) -> list[Any]:
    weak = bool(getattr(aval, "weak_type", False))
    return [list(aval.shape), str(aval.dtype), weak, key_implementation(aval.dtype)]


def _static_json(static: Any) -> dict[str, Any]:
    row = {"position": static.position, "name": static.name}
    try:
        return {**row, "value": encode_value(static.value)}
    except EncodingError:
        return {**row, "text": shorten(static.value)}


def _mesh_json(mesh: MpmdMesh) -> dict[str, Any]:
    meshes = mesh.unstack
    return {
        "axes": list(meshes[0].axis_names),
        "types": [kind.name for kind in meshes[0].axis_types],
        "pipeline": mesh.mpmd_axis_name,
        "shapes": [list(own.devices.shape) for own in meshes],
        "devices": [[device.id for device in own.devices.flat] for own in meshes],
    }


def _python_section(planned: Planned, layout: StepLayout, steps_in_flight: int) -> bytes:
    front = {
        "mesh": _mesh_json(layout.mesh),
        "steps_in_flight": steps_in_flight,
        "tree": encode_tree(planned.tree, "the structure of the arguments"),
        "out_tree": encode_tree(planned.out_tree, "the structure of the results"),
        "in_avals": [_aval_json(aval) for aval in planned.in_avals],
        "out_avals": [_aval_json(aval) for aval in planned.out_avals],
        "constants": [
            [placement.dtype_name, list(placement.physical_shape)]
            for placement in layout.inputs[len(planned.in_avals) :]
        ],
        "specs": [[v, encode_value(s)] for v, s in planned.specs.by_value.items()],
        "arg_names": planned.arg_names,
        "donated": planned.donated,
        "argument_bounds": planned.argument_bounds,
        "result_bounds": planned.result_bounds,
        "schedule_text": planned.schedule_text,
        "notes": planned.notes,
        "statics": [_static_json(static) for static in planned.statics],
        "jax": jax.__version__,
    }
    return json.dumps(front).encode()


def _device_ids(layout: StepLayout) -> list[int]:
    """The plugin's device ids; if several processes own the devices, JAX's ids, which are
    unique."""
    rows = layout.devices.ids
    if layout.devices.processes is not None:
        rows = [[device.id for device in own.devices.flat] for own in layout.mesh.unstack]
    most = layout.devices.per_rank
    padded = (row + [_core.NO_DEVICE] * (most - len(row)) for row in rows)
    return [device for row in padded for device in row]


# --- The whole file
# --------------------------------------------------------------------------------


def save_step(
    path: str,
    planned: Planned,
    modules: TaskModules,
    layout: StepLayout,
    steps_in_flight: int,
) -> None:
    """Writes a plan file."""
    if modules.functions:
        raise make_error(
            "unsupported",
            f"save: task {next(iter(modules.functions))} calls back into Python "
            "(jax.debug.print, a callback), to a function that exists only in this process; "
            "remove the callback to save the step",
        )
    if layout.devices.per_rank < layout.devices.rank_size:
        raise make_error(
            "unsupported",
            "save: the ranks of the step span processes; expected each rank's devices in one "
            "process. Compile it for ShapeDtypeStructs on such a mesh, and save that",
        )
    planned.plan.save(
        path,
        layout.devices.platform,
        layout.devices.per_rank,
        _device_ids(layout),
        *rank_axes(layout.mesh),
        max(1, steps_in_flight),
        modules.compile_options,
        modules.modules,
        modules.of_task,
        modules.shard_dims,
        _shard_layouts(layout),
        _constants(planned, layout),
        _python_section(planned, layout, steps_in_flight),
    )
