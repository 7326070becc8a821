"""Loads a plan file as a step, without tracing or lowering."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxpp import _core
from jaxpp.client.devices import devices_for
from jaxpp.errors import check_path, make_error, shorten, tree_text
from jaxpp.lower.callbacks import Callback, Function, renew_callbacks
from jaxpp.lower.lowering import Copies, LoweredTask
from jaxpp.mesh import MpmdMesh
from jaxpp.placements import carrier_of
from jaxpp.plan.planned import Planned
from jaxpp.plan.sharding import Specs
from jaxpp.run.compiled import CompiledStep
from jaxpp.run.trees import decode_tree, decode_value
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.call import (
    Options,
    Static,
    TracedArgument,
    plugin_of,
    static_key,
    struct_key,
)

__all__ = ["FileCode", "LoadedStep", "load"]


# --- Contents of the file ----------------------------------------------------------------


class FileCode:
    """The modules of a file, by task. `functions`: the callbacks of tasks, by the addresses in
    their modules."""

    def __init__(
        self,
        contents: _core.PlanFileContents,
        staged: _core.Staged,
        functions: Mapping[str, Mapping[int, Function]] = MappingProxyType({}),
    ) -> None:
        self.compile_options = contents.compile_options
        self._modules, self._functions = contents.modules, functions
        tasks = [task.name for task in staged.tasks()]
        self._of_task = dict(zip(tasks, contents.task_modules, strict=True))
        self._shard_dims = dict(zip(tasks, contents.shard_dims, strict=True))

    def lower(self, task: _core.StagedTask, donations: Any) -> LoweredTask:
        number = self._of_task[task.name]
        assert number is not None
        code = self._modules[number]
        callbacks: tuple[Callback, ...] = ()
        if task.name in self._functions:
            code, callbacks = renew_callbacks(code, self._functions[task.name])
        return LoweredTask(code, callbacks, code.hex)

    def copied_dims(self, task: _core.StagedTask, copies: Copies) -> list[int] | None:
        return self._shard_dims[task.name]


class _Front(dict[str, Any]):
    """The section for Python."""

    def __init__(self, path: str, text: bytes) -> None:
        super().__init__(json.loads(text))
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise make_error(
            "unsupported",
            f"plan file {self.path}: expected an entry {key!r}, found none, because another "
            "version of JaxPP wrote the file; save the step again with this version",
        )


def _aval_of(row: Sequence[Any]) -> Any:
    shape, name, weak, implementation = row
    if implementation is not None:
        dtype = jax.eval_shape(lambda: jax.random.key(0, impl=implementation)).dtype
    else:
        dtype = jnp.dtype(name)
    return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak)


def _constant_of(data: bytes, row: Sequence[Any]) -> np.ndarray:
    name, shape = row
    dtype = jnp.dtype(name)
    return np.frombuffer(data, carrier_of(dtype)).reshape(shape).view(dtype)


def _bounds_of(rows: Sequence[Any]) -> list[Any]:
    return [None if row is None else Bounds(row[0], tuple(row[1])) for row in rows]


def _tree_of(path: str, front: dict[str, Any], key: str) -> Any:
    try:
        return decode_tree(front[key])
    except (ImportError, AttributeError, ValueError) as error:
        raise make_error(
            "unsupported",
            f"plan file {path}: its {'arguments' if key == 'tree' else 'results'} have a type "
            f"that cannot be imported: {error}; expected the module that defined it when the "
            "step was saved",
        ) from None


def _static_of(row: dict[str, Any]) -> Static:
    value = decode_value(row["value"]) if "value" in row else _UnstoredStatic(row["text"])
    return Static(row["position"], row["name"], value)


class _UnstoredStatic:
    """A static argument that the file could not store."""

    def __init__(self, text: str) -> None:
        self.text = text


def _planned_of(
    path: str, mesh: MpmdMesh, file: _core.PlanFile, contents: Any, front: Any
) -> Planned:
    plan = file.plan()
    staged = plan.staged()
    specs = {value: decode_value(spec) for value, spec in front["specs"]}
    return Planned(
        mesh=mesh,
        staged=staged,
        specs=Specs(specs, None),
        plan=plan,
        tree=_tree_of(path, front, "tree"),
        out_tree=_tree_of(path, front, "out_tree"),
        in_avals=[_aval_of(row) for row in front["in_avals"]],
        out_avals=[_aval_of(row) for row in front["out_avals"]],
        arg_names=front["arg_names"],
        donated=front["donated"],
        argument_bounds=_bounds_of(front["argument_bounds"]),
        result_bounds=_bounds_of(front["result_bounds"]),
        consts=[
            _constant_of(data, row)
            for data, row in zip(contents.constants, front["constants"], strict=True)
        ],
        statics=[_static_of(row) for row in front["statics"]],
        schedule_text=front["schedule_text"],
        notes=front["notes"],
    )


# --- The mesh ---------------------------------------------------------------------------


def _saved_mesh(path: str, saved: dict[str, Any]) -> MpmdMesh:
    """The mesh over the devices with the saved ids, or over the first ones if some are
    missing. Ranks that share devices repeat them."""
    ids = list(dict.fromkeys(i for row in saved["devices"] for i in row))
    count = len(ids)
    by_id = {device.id: device for device in jax.devices()}
    if len(by_id) < count:
        raise make_error(
            "devices",
            f"plan file {path}: expected {count} devices, {_mesh_text(saved)}, found "
            f"{len(by_id)}; on CPUs set jax_num_cpu_devices",
        )
    if not by_id.keys() >= set(ids):
        by_id = dict(zip(ids, by_id.values(), strict=False))
    types = tuple(AxisType[name] for name in saved["types"])
    meshes = []
    for row, shape in zip(saved["devices"], saved["shapes"], strict=True):
        devices = np.array([by_id[i] for i in row], dtype=object).reshape(shape)
        meshes.append(jax.sharding.Mesh(devices, tuple(saved["axes"]), axis_types=types))
    return MpmdMesh(meshes, saved["pipeline"])


def _mesh_text(saved: dict[str, Any]) -> str:
    """A mesh by the shapes of its ranks."""
    sizes = [dict(zip(saved["axes"], shape, strict=True)) for shape in saved["shapes"]]
    if all(each == sizes[0] for each in sizes):
        return f"a mesh of {sizes[0] | {saved['pipeline']: len(sizes)}}"
    return f"ranks with meshes of {', '.join(map(str, sizes))}"


def _check_mesh(path: str, mesh: Any, saved: dict[str, Any]) -> MpmdMesh:
    if not isinstance(mesh, MpmdMesh):
        raise make_error(
            "mesh", f"load: mpmd_mesh={shorten(mesh)}; expected an MpmdMesh", wrong_type=True
        )
    found = {
        "axes": list(mesh.unstack[0].axis_names),
        "shapes": [list(own.devices.shape) for own in mesh.unstack],
        "pipeline": mesh.mpmd_axis_name,
    }
    if all(saved[key] == value for key, value in found.items()):
        return mesh
    raise make_error(
        "mesh",
        f"plan file {path}: expected {_mesh_text(saved)} with the ranks along "
        f"{saved['pipeline']!r}, as it was saved for, found {_mesh_text(found)} along "
        f"{found['pipeline']!r}",
    )


# --- The step ---------------------------------------------------------------------------


class LoadedStep:
    """A step from a plan file: call it like the function it was made from.

    Arguments must have the structure, shapes and dtypes that the step was compiled for. Static
    arguments are compiled in: leave them out, or pass the same values.
    """

    def __init__(self, path: str, planned: Planned, compiled: CompiledStep) -> None:
        self._path = path
        self._planned = planned
        self._types = compiled.argument_types()
        self.compiled = compiled

    @property
    def path(self) -> str:
        """The path of the plan file."""
        return self._path

    @property
    def structure(self) -> Any:
        """The treedef of (positional arguments, keyword arguments) without the static ones."""
        return self._planned.tree

    def _check_static(self, static: Static, found: Any) -> None:
        if isinstance(static.value, _UnstoredStatic):
            raise make_error(
                "unsupported",
                f"static argument {static.name} of the step in {self._path}: its value "
                f"{static.value.text} is compiled in and cannot be compared with "
                f"{shorten(found)}; leave it out",
            )
        if static_key(found) != static_key(static.value):
            raise make_error(
                "invalid-argument",
                f"static argument {static.name} of the step in {self._path}: expected "
                f"{static.value!r}, which is compiled in, found {shorten(found)}; save a step "
                "for that value",
            )

    def _without_statics(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_position = {s.position: s for s in self._planned.statics if s.position is not None}
        dynamic = self._planned.tree.children()[0]
        if by_position and len(args) == len(dynamic.children()) + len(by_position):
            for position, static in by_position.items():
                self._check_static(static, args[position])
            args = tuple(a for i, a in enumerate(args) if i not in by_position)
        for static in self._planned.statics:
            if static.name in kwargs:
                self._check_static(static, kwargs[static.name])
                kwargs = {k: v for k, v in kwargs.items() if k != static.name}
        return args, kwargs

    def _refuse_structure(self, given: Any) -> None:
        arrays = [np.float32(0)] * self._planned.tree.num_leaves
        args, kwargs = jax.tree.unflatten(self._planned.tree, arrays)
        raise make_error(
            "invalid-argument",
            f"the step in {self._path}: expected the arguments that it was saved with\n"
            f"  saved: {tree_text(args)} {tree_text(kwargs)}\n"
            f"  found: {tree_text(given[0])} {tree_text(given[1])}",
        )

    def _refuse_type(self, number: int, leaf: Any) -> None:
        name, (shape, dtype) = self._types[number]
        shape_found, dtype_found, *_ = struct_key(leaf)
        raise make_error(
            "invalid-argument",
            f"argument {name} of the step in {self._path}: expected {dtype}{list(shape)}, "
            f"found {dtype_found}{list(shape_found)}; save a step for that shape and dtype",
        )

    def _leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        if self._planned.statics:
            args, kwargs = self._without_statics(args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        if tree != self._planned.tree:
            self._refuse_structure((args, kwargs))
        for number, (leaf, (name, expected)) in enumerate(
            zip(leaves, self._types, strict=True)
        ):
            try:
                found = struct_key(leaf)[:2]
            except TracedArgument:
                raise make_error(
                    "unsupported",
                    f"argument {name} of the step in {self._path}: expected an array, found "
                    f"{shorten(leaf)}, a value that JAX traces; a loaded step cannot be traced",
                ) from None
            except TypeError:
                raise make_error(
                    "invalid-argument",
                    f"argument {name} of the step in {self._path}: expected an array or a "
                    f"number, found {shorten(leaf)} of type {type(leaf).__name__}",
                    wrong_type=True,
                ) from None
            if found != expected:
                self._refuse_type(number, leaf)
        return leaves

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compiled.run_leaves(self._leaves(args, kwargs))

    def __getattr__(self, name: str) -> Any:
        if name == "compiled":  # copy.copy() asks before it is set
            raise AttributeError(name)
        return getattr(self.compiled, name)


def load(
    path: str | os.PathLike[str],
    mpmd_mesh: MpmdMesh | None = None,
    plugin: str | os.PathLike[str] | None = None,
) -> LoadedStep:
    """Loads and compiles a step that `save` wrote.

    Nothing is traced: the process does not need the model's code.

    Args:
      path: the plan file. Load only files that you trust: their code is executed.
      mpmd_mesh: the devices to run on, a mesh with the axes and sizes that the step was saved
        for; default: the devices with the same ids, otherwise the first ones.
      plugin: the path of a PJRT plugin; default: JPP_PLUGIN, then the embedded one for CPUs.

    Returns:
      The step, called like the function it was made from, with arguments of the structure,
      shapes and dtypes that it was compiled for. Static arguments are compiled in: leave them
      out, or pass the same values.

    Raises:
      JaxppError: "parse" for a damaged file or one that is not a plan file; "unsupported" for
        another format, planner or platform; "invalid-argument" if it cannot be
        read; "mesh" and "devices" if it does not fit the devices.
    """
    name = check_path("load: path", path, "the path of a plan file")
    plugin_path = plugin_of(plugin, "load")
    _core.check_process()
    file = _core.PlanFile(name)
    contents = file.contents()
    if not contents.front:
        raise make_error(
            "unsupported",
            f"plan file {name}: it was written by a C program and has no pytrees; expected a "
            "file that a step's save() wrote. Run it with jaxpp run",
        )
    front = _Front(name, contents.front)
    saved = front["mesh"]
    mesh = _saved_mesh(name, saved) if mpmd_mesh is None else None
    mesh = mesh or _check_mesh(name, mpmd_mesh, saved)
    devices = devices_for(mesh, plugin_path)
    if devices.platform != contents.platform:
        raise make_error(
            "unsupported",
            f"plan file {name}: its tasks are lowered for platform {contents.platform}; "
            f"expected a plugin for that platform, found {devices.platform}",
        )
    planned = _planned_of(name, mesh, file, contents, front)
    options = Options(
        "load",
        mesh,
        in_specs=None,
        out_specs=None,
        static_argnums=(),
        static_argnames=(),
        donate_argnums=(),
        donate_argnames=(),
        compiler_options={},
        plugin=plugin_path,
        memory_limits=None,
        steps_in_flight=front["steps_in_flight"],
    )
    code = FileCode(contents, planned.staged)
    return LoadedStep(name, planned, CompiledStep(planned, devices, options, code))
