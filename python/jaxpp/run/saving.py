"""From a compiled step to a plan file.

The file is C's (`jaxpp/planfile.h`); what it does not understand, pytrees and shardings by
the names of mesh axes, stands in a part of it that is Python's, as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

import jax

from jaxpp import _core
from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.arrays import key_implementation
from jaxpp.mesh import MpmdMesh
from jaxpp.placements import Placement, to_host
from jaxpp.plan.planning import Planned
from jaxpp.run.trees import CannotTravel, encode_tree, encode_value

if TYPE_CHECKING:
    from jaxpp.run.callbacks import Function
    from jaxpp.run.compiling import Code
    from jaxpp.run.devices import Devices
    from jaxpp.run.lowering import LoweredTask

__all__ = ["Lying", "TaskModules", "modules_of_all", "save_step"]


class TaskModules:
    """What a step's tasks were compiled from."""

    def __init__(self, compile_options: bytes) -> None:
        self.compile_options = compile_options
        self.modules: dict[bytes, int] = {}  # numbered as they come
        self.of_task: list[int] = []  # _core.NONE for a task without ops
        # Of the tasks whose modules only this process can run: functions by their addresses.
        self.functions: dict[str, dict[int, Function]] = {}

    def add(self, task: _core.StagedTask, lowered: LoweredTask | None) -> None:
        """The next task."""
        if lowered is None:
            self.of_task.append(_core.NONE)
            return
        self.of_task.append(self.modules.setdefault(lowered.code, len(self.modules)))
        if lowered.callbacks:
            self.functions[task.name] = {
                made.object.address(): made.function for made in lowered.callbacks
            }


def modules_of_all(plan: _core.Plan, code: Code) -> TaskModules:
    """Also of the tasks that other processes compile."""
    modules = TaskModules(code.compile_options)
    for task, donations in zip(plan.staged().tasks(), plan.donations(), strict=True):
        modules.add(task, code.lower(task, donations) if task.ops else None)
    return modules


@dataclasses.dataclass
class Lying:
    """Where a plan's arguments, constants included, and results lie."""

    devices: Devices
    mesh: MpmdMesh
    inputs: list[Placement]
    outputs: list[Placement]


# --- Layouts and constants --------------------------------------------------------------


def _layout(placement: Placement) -> list[int]:
    """The shape of a shard, and where that of each device begins."""
    shape = placement.physical_shape
    rows = [
        [part.indices(size)[:2] for part, size in zip(index, shape, strict=True)]
        for index in placement.slices
    ]
    box = [stop - start for start, stop in rows[0]]
    return box + [start for row in rows for start, _ in row]


def _layouts(lying: Lying) -> list[int] | None:
    if lying.devices.rank_size == 1:
        return None
    placements = [*lying.inputs, *lying.outputs]
    return [number for placement in placements for number in _layout(placement)]


def _constants(planned: Planned, lying: Lying) -> list[bytes]:
    placements = lying.inputs[len(planned.in_avals) :]
    pairs = zip(planned.consts, placements, strict=True)
    return [to_host(const, placement.dtype_name).tobytes() for const, placement in pairs]


# --- Python's part ----------------------------------------------------------------------


def _aval_json(aval: Any) -> list[Any]:
    weak = bool(getattr(aval, "weak_type", False))
    return [list(aval.shape), str(aval.dtype), weak, key_implementation(aval.dtype)]


def _static_json(static: Any) -> dict[str, Any]:
    row = {"position": static.position, "name": static.name}
    try:
        return {**row, "value": encode_value(static.value)}
    except CannotTravel:
        return {**row, "text": shorten(static.value)}


def _mesh_json(mesh: MpmdMesh) -> dict[str, Any]:
    whole = mesh.jax_mesh
    return {
        "axes": list(whole.axis_names),
        "shape": list(whole.devices.shape),
        "types": [kind.name for kind in whole.axis_types],
        "pipeline": mesh.mpmd_axis_name,
        "devices": [device.id for device in whole.devices.flat],
    }


def _front(planned: Planned, lying: Lying, steps_in_flight: int) -> bytes:
    front = {
        "mesh": _mesh_json(lying.mesh),
        "steps_in_flight": steps_in_flight,
        "tree": encode_tree(planned.tree, "the structure of the arguments"),
        "out_tree": encode_tree(planned.out_tree, "the structure of the results"),
        "in_avals": [_aval_json(aval) for aval in planned.in_avals],
        "out_avals": [_aval_json(aval) for aval in planned.out_avals],
        "constants": [
            [placement.dtype_name, list(placement.physical_shape)]
            for placement in lying.inputs[len(planned.in_avals) :]
        ],
        "in_specs": [encode_value(p.spec) for p in lying.inputs],
        "out_specs": [encode_value(p.spec) for p in lying.outputs],
        "arg_names": planned.arg_names,
        "donated": planned.donated,
        "argument_bounds": planned.argument_bounds,
        "result_bounds": planned.result_bounds,
        "schedule_text": planned.schedule_text,
        "statics": [_static_json(static) for static in planned.statics],
        "jax": jax.__version__,
    }
    return json.dumps(front).encode()


def _device_ids(lying: Lying) -> list[int]:
    """The plugin's, or of devices of several processes, each with ids of its own, JAX's."""
    if lying.devices.processes is None:
        return [device for ids in lying.devices.ids for device in ids]
    ranks = range(lying.mesh.mpmd_dim)
    return [device.id for rank in ranks for device in lying.mesh.devices_of(rank)]


# --- All --------------------------------------------------------------------------------


def save_step(
    path: str | os.PathLike[str],
    planned: Planned,
    modules: TaskModules,
    lying: Lying,
    steps_in_flight: int,
) -> None:
    """Writes a plan file."""
    if modules.functions:
        raise make_error(
            "unsupported",
            f"save: task {next(iter(modules.functions))} calls back into Python "
            "(jax.debug.print, a callback), to a function of this process that no other has; "
            "remove the callback to save the step",
        )
    if lying.devices.per_rank < lying.devices.rank_size:
        raise make_error(
            "unsupported",
            "save: the ranks of the step lie in several processes each; expected ranks that "
            "have their devices in one. Compile it for ShapeDtypeStructs on such a mesh, and "
            "save that",
        )
    planned.plan.save(
        path,
        lying.devices.platform,
        lying.devices.per_rank,
        _device_ids(lying),
        max(1, steps_in_flight),
        modules.compile_options,
        list(modules.modules),
        modules.of_task,
        _layouts(lying),
        _constants(planned, lying),
        _front(planned, lying, steps_in_flight),
    )
