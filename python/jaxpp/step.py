"""`mpmd_jit_with_loop`: from a step function to a pipeline that runs."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import inspect
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import partial_eval as pe
from jax._src.tree_util import broadcast_prefix
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec
from jaxlib import xla_client

from jaxpp import _core
from jaxpp.array import MpmdArray, Placement
from jaxpp.devices import Devices, devices_for
from jaxpp.errors import (
    JaxppError,
    annotate,
    check_arrays,
    describe,
    make_error,
    shorten,
    tree_text,
    where_raised,
)
from jaxpp.lowering import TaskLowerer
from jaxpp.mesh import MpmdMesh, MpmdSharding
from jaxpp.sharding import Specs, infer_specs
from jaxpp.times import collecting, note_step
from jaxpp.tracing import FrontLoop, Graph, build_graph

__all__ = ["CompiledStep", "MpmdFunction", "mpmd_jit_with_loop"]

_log = logging.getLogger("jaxpp")


@dataclasses.dataclass(frozen=True)
class _Options:
    """What `mpmd_jit_with_loop` was given."""

    mesh: MpmdMesh
    in_specs: Any
    out_specs: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    compiler_options: dict[str, Any] | None
    plugin: str | None


# --- Arguments --------------------------------------------------------------------------


@dataclasses.dataclass
class _Call:
    """One call's arguments: what is static, and the leaves of the rest."""

    static: Any  # hashable
    leaves: list[Any]
    tree: Any
    args: tuple[Any, ...]  # dynamic positional, as a tree
    kwargs: dict[str, Any]


def _parameters(fun: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a function's parameters, and whether it takes others as well."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return [], True
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters], any(p.kind in variadic for p in parameters)


class _Signature:
    """Which arguments are static or donated, and what they are called."""

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        self.names, self.variadic = _parameters(fun)
        self.static_nums = self._numbers(
            "static", options.static_argnums, options.static_argnames
        )
        self.static_names = self._names("static", options.static_argnames, self.static_nums)
        self.donate_nums = self._numbers(
            "donate", options.donate_argnums, options.donate_argnames
        )
        self.donate_names = self._names("donate", options.donate_argnames, self.donate_nums)
        both = [self._name(n) for n in sorted(self.static_nums & self.donate_nums)]
        if both:
            raise make_error(
                "invalid-argument",
                f"mpmd_jit_with_loop: argument {both[0]} is both static and donated; expected "
                "at most one of them, for only arrays can be donated",
            )

    def _numbers(self, kind: str, numbers: Iterable[int], names: Iterable[str]) -> set[int]:
        count = len(self.names)
        for n in numbers:
            if not isinstance(n, int) or not (self.variadic or -count <= n < count):
                raise make_error(
                    "invalid-argument",
                    f"mpmd_jit_with_loop: {kind}_argnums has {n!r}; expected numbers from 0 to "
                    f"{count - 1} of the arguments ({', '.join(self.names)})",
                )
        for n in names:
            if not isinstance(n, str) or not (self.variadic or n in self.names):
                raise make_error(
                    "invalid-argument",
                    f"mpmd_jit_with_loop: {kind}_argnames has {n!r}; expected names of the "
                    f"arguments ({', '.join(self.names)})",
                )
        named = {self.names.index(n) for n in names if n in self.names}
        return {n + count if n < 0 else n for n in numbers} | named

    def _names(self, kind: str, names: Iterable[str], numbers: set[int]) -> set[str]:
        """The same arguments when they are passed by keyword."""
        return {*names, *(self.names[n] for n in numbers if n < len(self.names))}

    def _name(self, position: int) -> str:
        known = position < len(self.names)
        return self.names[position] if known else f"args[{position}]"

    def check(self, call: _Call) -> None:
        """Says which argument can not be one; every leaf must be an array or a number."""
        for key, value in (*call.static[0], *call.static[1]):
            try:
                hash(value)
            except TypeError:
                name = self._name(key) if isinstance(key, int) else key
                raise make_error(
                    "invalid-argument",
                    f"static argument {name}: expected something hashable, found "
                    f"{shorten(value)} of type {type(value).__name__}",
                ) from None
        for name, leaf in zip(self.describe(call)[0], call.leaves, strict=True):
            if not isinstance(leaf, MpmdArray | jax.ShapeDtypeStruct):
                check_arrays(leaf, f"argument {name}")

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        static_args = tuple((i, a) for i, a in enumerate(args) if i in self.static_nums)
        static_kwargs = tuple((k, v) for k, v in kwargs.items() if k in self.static_names)
        dynamic = tuple(a for i, a in enumerate(args) if i not in self.static_nums)
        named = {k: v for k, v in kwargs.items() if k not in self.static_names}
        leaves, tree = jax.tree.flatten((dynamic, named))
        return _Call((static_args, static_kwargs), leaves, tree, dynamic, named)

    def _position(self, dynamic_position: int) -> int:
        """The number of a dynamic argument among all arguments."""
        position = 0
        for skipped in sorted(self.static_nums):
            if skipped <= dynamic_position + position:
                position += 1
        return dynamic_position + position

    def describe(self, call: _Call) -> tuple[list[str], list[bool]]:
        """The name of each leaf, and whether it is donated."""
        names, donated = [], []
        for path, _ in jax.tree_util.tree_leaves_with_path((call.args, call.kwargs)):
            group, which, rest = path[0].idx, path[1], path[2:]
            if group == 0:
                position = self._position(which.idx)
                head = self._name(position)
                donated.append(position in self.donate_nums)
            else:
                head = which.key
                donated.append(head in self.donate_names)
            names.append(head + jax.tree_util.keystr(rest))
        return names, donated

    def merge(
        self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Puts static arguments back."""
        merged = list(args)
        for position, value in static[0]:
            merged.insert(position, value)
        return merged, {**kwargs, **dict(static[1])}


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract value of an argument's leaf."""
    if isinstance(leaf, MpmdArray | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _struct_key(leaf: Any) -> Any:
    if type(leaf) is MpmdArray:
        return leaf._placement.key
    struct = _struct(leaf)
    return (tuple(struct.shape), struct.dtype, struct.weak_type)


# --- Tracing and planning ---------------------------------------------------------------


@dataclasses.dataclass
class Traced:
    """A step traced, split, placed and scheduled, before anything is compiled."""

    graph: Graph
    schedules: list[_core.Schedule]
    staged: _core.Staged
    specs: Specs
    plan: _core.Plan
    proof: str  # what the checker found of the plan
    tree: Any
    out_tree: Any
    in_avals: list[Any]
    out_avals: list[Any]
    arg_names: list[str]
    donated: list[bool]

    @property
    def text(self) -> str:
        """The programs of all actors."""
        return self.plan.text()


def _broadcast_specs(given: Any, tree: Any, what: str) -> list[Any]:
    """One spec or None a leaf."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding | MpmdSharding)

    whose = "arguments" if what == "in_specs" else "results"
    if given is None:
        return [None] * len(jax.tree.leaves(tree))
    try:
        found = broadcast_prefix(given, tree, is_leaf=is_leaf)
    except ValueError:
        raise make_error(
            "sharding",
            f"{what}: expected a pytree prefix of the step's {whose}\n"
            f"  {what}: {tree_text(given)}\n"
            f"  {whose}: {tree_text(tree)}",
        ) from None
    return [_spec_of(spec, what) for spec in found]


def _spec_of(given: Any, what: str) -> PartitionSpec | None:
    spec = given if isinstance(given, PartitionSpec) else getattr(given, "spec", None)
    if given is None or isinstance(spec, PartitionSpec):
        return spec
    raise make_error(
        "sharding",
        f"{what}: expected PartitionSpecs, NamedShardings, MpmdShardings or None, found "
        f"{describe(given)}",
    )


def _trace(fun: Callable[..., Any], signature: _Signature, call: _Call, mesh: MpmdMesh) -> Any:
    """The step's jaxpr on flat arguments, and the tree of its results."""
    out_trees = []

    def flat_fun(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(call.tree, leaves)
        merged, named = signature.merge(call.static, args, kwargs)
        result = fun(*merged, **named)
        check_arrays(result, "the step's result")
        outs, out_tree = jax.tree.flatten(result)
        out_trees.append(out_tree)
        return outs

    structs = [_struct(leaf) for leaf in call.leaves]
    with mesh.tracing_context():
        try:
            closed = jax.make_jaxpr(flat_fun)(*structs)
        except ValueError as error:
            if "is not found in mesh" not in str(error):
                raise
            where = where_raised(error.__traceback__)
            raise make_error(
                "sharding",
                f"{where}: {shorten(str(error), 300)[1:-1]} Expected axes of a rank's mesh",
            ) from None
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = pe.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts), out_trees[-1]


def _output_names(out_tree: Any) -> list[str]:
    numbered = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    leaves = jax.tree_util.tree_leaves_with_path(numbered)
    return ["result" + jax.tree_util.keystr(path) for path, _ in leaves]


def _is_of(mesh: MpmdMesh, leaf: Any) -> bool:
    return isinstance(leaf, MpmdArray) and leaf.sharding.mpmd_mesh == mesh


def _ask_schedule(loop: FrontLoop, ranks: int) -> Any:
    """What the loop's schedule builds; anything with `build` is a schedule."""
    build_for = getattr(loop.schedule, "build_for", None)
    if build_for is None:
        return loop.schedule.build(loop.length, ranks)
    return build_for(loop.length, ranks, loop.num_marks)


def _build_schedule(loop: FrontLoop, ranks: int) -> _core.Schedule:
    try:
        schedule = _ask_schedule(loop, ranks)
    except JaxppError as error:
        raise annotate(error, f"loop at {loop.where}") from None
    if isinstance(schedule, _core.Schedule):
        return schedule
    raise make_error(
        "schedule",
        f"loop at {loop.where}: schedule={describe(loop.schedule)}: expected its build() to "
        f"give what BaseSchedule.build() gives, found {shorten(schedule)}",
    )


def trace_step(
    fun: Callable[..., Any], signature: _Signature, call: _Call, options: _Options
) -> Traced:
    """Traces and plans a step. Nothing runs, nothing is compiled."""
    mesh = options.mesh
    names, donated = signature.describe(call)
    in_specs = _broadcast_specs(options.in_specs, call.args, "in_specs")
    in_specs += [None] * (len(call.leaves) - len(in_specs))
    in_specs = [
        leaf.spec if spec is None and _is_of(mesh, leaf) else spec
        for spec, leaf in zip(in_specs, call.leaves, strict=True)
    ]
    closed, out_tree = _trace(fun, signature, call, mesh)
    out_specs = _broadcast_specs(
        options.out_specs, jax.tree.unflatten(out_tree, closed.out_avals), "out_specs"
    )
    name = getattr(fun, "__name__", "step")
    out_names = _output_names(out_tree)
    graph = build_graph(name, mesh.mpmd_dim, closed, donated, names, out_names)
    schedules = [_build_schedule(loop, mesh.mpmd_dim) for loop in graph.loops]
    staged = _core.Staged(graph.core, mesh.mpmd_dim, schedules)
    specs = infer_specs(graph, staged, mesh, in_specs, out_specs, names, out_names)
    plan = _core.Plan(staged, schedules, specs.value_bytes)
    proof = plan.check()
    return Traced(
        graph,
        schedules,
        staged,
        specs,
        plan,
        proof,
        call.tree,
        out_tree,
        [v.aval for v in closed.jaxpr.invars],
        closed.out_avals,
        names,
        donated,
    )


# --- Compiling --------------------------------------------------------------------------


def _compile_options(device_ids: Sequence[int], user_options: dict[str, Any] | None) -> bytes:
    """A serialized CompileOptionsProto for a rank, or for any one device."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    if user_options:
        options.env_option_overrides = list(user_options.items())
    if len(device_ids) == 1:
        options.compile_portable_executable = True
        return options.SerializeAsString()
    options.num_partitions = build.num_partitions = len(device_ids)
    options.num_replicas = build.num_replicas = 1
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    assignment = np.array([device_ids])
    build.device_assignment = xla_client.DeviceAssignment.create(assignment)
    return options.SerializeAsString()


class _Compiler:
    """Lowers and compiles the tasks of a plan, each distinct one once, in parallel."""

    def __init__(self, traced: Traced, devices: Devices, options: _Options) -> None:
        self.traced = traced
        self.devices = devices
        self.user_options = options.compiler_options
        specs = None if traced.specs.one_device else traced.specs.by_value
        self.lowerer = TaskLowerer(
            traced.graph, traced.staged, options.mesh, specs, devices.platform
        )
        self.futures: dict[Any, concurrent.futures.Future[_core.Executable]] = {}

    def _submit(
        self, pool: concurrent.futures.Executor, task: Any, donations: Any
    ) -> concurrent.futures.Future[_core.Executable] | None:
        rank, ops = task[2], task[5]
        if not ops:
            return None
        code = self.lowerer.lower(task, donations).code
        portable = self.devices.per_rank == 1
        key = (code, None if portable else rank)
        if key not in self.futures:
            ids = self.devices.ids[rank]
            options = _compile_options(ids, self.user_options)
            self.futures[key] = pool.submit(self.devices.client.compile, code, options)
        return self.futures[key]

    def compile_all(self) -> list[_core.Executable | None]:
        tasks = self.traced.staged.tasks()
        donations = self.traced.plan.donations()
        workers = max(2, os.cpu_count() or 1)
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            found = [
                self._submit(pool, task, row)
                for task, row in zip(tasks, donations, strict=True)
            ]
            return [None if f is None else f.result() for f in found]


class CompiledStep:
    """A step ready to run: call it as the function it was made from.

    State stays on the devices between calls. The call returns when the step is done; it
    raises JaxppError if a device failed, with the rank, task and microbatch.
    """

    def __init__(self, traced: Traced, devices: Devices, options: _Options) -> None:
        self._traced = traced
        self._devices = devices
        self._mesh = options.mesh
        self._tracing = False
        compiler = _Compiler(traced, devices, options)
        self._executables = compiler.compile_all()
        self._distinct = len(compiler.futures)
        flat_devices = [d for row in devices.indices for d in row]
        self._runtime = _core.Runtime(
            devices.client,
            traced.plan,
            devices.per_rank,
            flat_devices,
            self._executables,
            devices.per_rank == 1,
            0,
            bool(os.environ.get("JPP_BENCHMARK")),
        )
        args = zip(traced.staged.args(), self._arg_avals(), strict=True)
        self._inputs = [
            self._placement(value, aval, ranks) for (value, ranks), aval in args
        ]
        self._outputs = [
            self._placement(value, aval, ranks)
            for (value, ranks), aval in zip(
                traced.staged.outputs(), traced.out_avals, strict=True
            )
        ]
        constants = self._inputs[traced.graph.num_args :]
        self._constants = [
            self._upload(placement, const, f"constant {k} that the step closes over")
            for k, (placement, const) in enumerate(
                zip(constants, traced.graph.consts, strict=True)
            )
        ]
        _dump(traced, compiler)

    def _arg_avals(self) -> list[Any]:
        consts = [jax.typeof(c) for c in self._traced.graph.consts]
        return [*self._traced.in_avals, *consts]

    def _placement(self, value: int, aval: Any, ranks: Sequence[int]) -> Placement:
        spec = self._traced.specs.of(value)
        return Placement(self._devices, self._mesh, aval, ranks, spec)

    # --- Running ---

    def _upload(self, placement: Placement, leaf: Any, name: str) -> _core.Value:
        deleted = getattr(leaf, "is_deleted", None)
        if deleted is not None and deleted():
            raise make_error(
                "donated",
                f"{name}: expected an array, found one that was deleted or donated to a "
                "step; use what the step returned in its place",
            )
        return placement.put(leaf._read() if type(leaf) is MpmdArray else leaf)

    def _value_of(self, position: int, leaf: Any) -> _core.Value:
        placement = self._inputs[position]
        name = self._traced.arg_names[position]
        if type(leaf) is not MpmdArray:
            return self._upload(placement, leaf, f"argument {name}")
        given = leaf._placement
        one_device = self._devices.per_rank == 1
        same_devices = given.devices is self._devices or (
            given.devices.layout == self._devices.layout
        )
        if same_devices and (one_device or given.spec == placement.spec):
            return leaf._value
        value = self._upload(placement, leaf, f"argument {name}")
        value.stands_for(leaf._value)
        return value

    def _run(
        self, values: list[_core.Value], step: Callable[..., list[_core.Value]]
    ) -> list[_core.Value]:
        while True:
            try:
                return step(values)
            except KeyError as error:
                # The array is not on all ranks that need it: bring it there.
                position = error.args[0]
                placement = self._inputs[position]
                values[position] = values[position].place(
                    placement.ranks, placement.device_indices
                )

    def run_leaves(
        self, leaves: list[Any], step: Callable[..., list[_core.Value]] | None = None
    ) -> Any:
        """Runs on flat arguments whose shapes and dtypes are those compiled for."""
        values = [self._value_of(i, leaf) for i, leaf in enumerate(leaves)]
        times_wanted = collecting()
        if times_wanted:
            self._runtime.set_tracing(True)
        results = self._run(values + self._constants, step or self._runtime.step)
        if times_wanted:
            note_step(self._runtime.trace())
            self._runtime.set_tracing(self._tracing)
        arrays = list(map(MpmdArray, self._outputs, results))
        return self._traced.out_tree.unflatten(arrays)

    # --- Looking ---

    @property
    def closed_jaxpr(self) -> Any:
        """The whole program; its text shows every task, transfer and deletion."""
        return ProgramText(self._traced.plan)

    def set_tracing(self, enabled: bool = True) -> None:
        """Records when each task really ran, from the next call on."""
        self._tracing = enabled
        self._runtime.set_tracing(enabled)

    def trace_json(self) -> str:
        """The last traced call in Chrome's trace format, which Perfetto opens."""
        return self._runtime.trace_json()

    def draw_trace(self, columns: int = 100, color: bool = False) -> str:
        """The last traced call, a line a rank."""
        return self._runtime.trace_draw(columns, color)


class ProgramText:
    """The program of all actors, to print."""

    def __init__(self, plan: _core.Plan) -> None:
        self._plan = plan

    def __str__(self) -> str:
        return self._plan.program_text()

    __repr__ = __str__


def _dump(traced: Traced, compiler: _Compiler) -> None:
    """JPP_DUMP=dir: what each part of the planner made, as `jaxpp plan` prints it."""
    folder = os.environ.get("JPP_DUMP")
    if not folder:
        return
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / "graph.jpp").write_text(traced.graph.core.text())
    (path / "partition.txt").write_text(traced.staged.text())
    (path / "program.txt").write_text(traced.plan.text())
    (path / "check.txt").write_text(traced.proof)
    for i, schedule in enumerate(traced.schedules):
        (path / f"schedule{i or ''}.txt").write_text(schedule.text())
    for task, row in zip(traced.staged.tasks(), traced.plan.donations(), strict=True):
        if task[5]:
            (path / f"{task[0]}.mlir").write_text(compiler.lowerer.lower(task, row).text())


# --- What users call --------------------------------------------------------------------


class MpmdFunction:
    """What `mpmd_jit_with_loop` makes of a function. Compiles at first use."""

    def __init__(self, fun: Callable[..., Any], options: _Options) -> None:
        self._fun = fun
        self._options = options
        self._signature = _Signature(fun, options)
        self._compiled: dict[Any, CompiledStep] = {}
        functools.update_wrapper(self, fun, updated=())

    def _key(self, call: _Call) -> Any:
        try:
            key = (call.static, call.tree, tuple(_struct_key(leaf) for leaf in call.leaves))
            hash(key)
        except TypeError:
            self._signature.check(call)
            raise
        return key

    def _compile(self, call: _Call) -> CompiledStep:
        if self._compiled:
            _log.debug("%s: new shapes, dtypes or statics: tracing again", self._fun)
        traced = trace_step(self._fun, self._signature, call, self._options)
        devices = devices_for(self._options.mesh, self._options.plugin)
        return CompiledStep(traced, devices, self._options)

    def _get(self, call: _Call) -> CompiledStep:
        key = self._key(call)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(call)
        return compiled

    def trace_and_place(self, *args: Any, **kwargs: Any) -> Traced:
        """The plan for these arguments (arrays or ShapeDtypeStructs), not compiled."""
        call = self._signature.split(args, kwargs)
        self._key(call)  # refuses what can not be an argument
        return trace_step(self._fun, self._signature, call, self._options)

    def compile(self, *args: Any, **kwargs: Any) -> BoundStep:
        """The step compiled for these arguments (arrays or ShapeDtypeStructs)."""
        return BoundStep(self, self._get(self._signature.split(args, kwargs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.split(args, kwargs)
        return self._get(call).run_leaves(call.leaves)


class BoundStep:
    """A compiled step. Called with other shapes or dtypes it compiles again."""

    def __init__(self, function: MpmdFunction, compiled: CompiledStep) -> None:
        self._function = function
        self.compiled = compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def _one_of(way: str, specs: Any, shardings: Any) -> Any:
    if specs is not None and shardings is not None:
        raise make_error(
            "invalid-argument",
            f"mpmd_jit_with_loop: expected {way}_specs or {way}_shardings, found both",
        )
    return shardings if specs is None else specs


def _as_tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int | str) else tuple(given)


def mpmd_jit_with_loop(
    fun: Callable[..., Any] | None = None,
    mpmd_mesh: MpmdMesh | None = None,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    compiler_options: dict[str, Any] | None = None,
    plugin: str | None = None,
) -> Any:
    """Makes a pipeline of a training step that has a `treduce` in it.

    Args:
      fun: the step. Arguments and results are pytrees of arrays.
      mpmd_mesh: its ranks and their devices.
      in_shardings, out_shardings: pytree prefixes of `NamedSharding`s or `MpmdSharding`s,
        of which the specs count; or
      in_specs, out_specs: pytree prefixes of `PartitionSpec`s over the axes of a rank's
        mesh. Left out or None: inferred.
      static_argnums, static_argnames: arguments that are compiled in; hashable.
      donate_argnums, donate_argnames: arguments whose memory the step may reuse; they must
        not be used again.
      compiler_options: XLA's, for every task.
      plugin: the path of a PJRT plugin; default: JPP_PLUGIN, then the embedded CPU one.

    Returns:
      The pipelined step, with `compile`, `trace_and_place` and `__call__`; a decorator if
      `fun` is left out.

    Raises:
      JaxppError: from the first call or `compile`, before anything runs: "stage-marks",
        "schedule", "mesh", "microbatch", "operation", "sharding", "plugin", "devices",
        "donated", "unsupported", "invalid-argument".
    """
    if fun is None:
        keywords = {k: v for k, v in locals().items() if k != "fun"}
        return functools.partial(mpmd_jit_with_loop, **keywords)
    if not isinstance(mpmd_mesh, MpmdMesh):
        raise make_error(
            "mesh", f"mpmd_jit_with_loop: mpmd_mesh={shorten(mpmd_mesh)}; expected an MpmdMesh"
        )
    if not callable(fun):
        raise make_error(
            "invalid-argument",
            f"mpmd_jit_with_loop: fun={shorten(fun)}; expected a function",
        )
    options = _Options(
        mpmd_mesh,
        _one_of("in", in_specs, in_shardings),
        _one_of("out", out_specs, out_shardings),
        _as_tuple(static_argnums),
        _as_tuple(static_argnames),
        _as_tuple(donate_argnums),
        _as_tuple(donate_argnames),
        compiler_options,
        plugin,
    )
    return MpmdFunction(fun, options)
