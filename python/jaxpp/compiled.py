"""A step ready to run: its tasks compiled, its state on the devices."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp import _core
from jaxpp.array import MpmdArray, Placement
from jaxpp.call import Options
from jaxpp.compilation_cache import folder, key_of
from jaxpp.custom_calls import has_callbacks
from jaxpp.devices import Devices
from jaxpp.errors import JaxppError, make_error
from jaxpp.jax_internals import serialized_compile_options
from jaxpp.lowering import LoweredTask, TaskLowerer
from jaxpp.planning import Traced
from jaxpp.times import collecting, note_step

__all__ = ["CompiledStep"]

_MEASURED_RUNS = 4  # of a trial


def explain(error: JaxppError, plan: _core.Plan, rank: int, what: str) -> JaxppError:
    """The error with `what` it was about and, out of memory, what the plan says of that."""
    text = str(error)
    if error.code == "out-of-memory":
        text = plan.explain_memory(rank, text)
    return make_error(error.code, f"rank {rank}, {what}: {text}")


class _Compiler:
    """Lowers and compiles the tasks of a plan, each distinct one once, in parallel."""

    def __init__(self, traced: Traced, devices: Devices, options: Options) -> None:
        self.traced = traced
        self.devices = devices
        self.user_options = options.compiler_options
        specs = None if traced.specs.one_device else traced.specs.by_value
        self.lowerer = TaskLowerer(
            traced.graph, traced.staged, options.mesh, specs, devices.platform
        )
        self.cache_folder = folder()
        self.futures: dict[Any, concurrent.futures.Future[_core.Executable]] = {}

    def _submit(
        self, pool: concurrent.futures.Executor, task: Any, donations: Any
    ) -> concurrent.futures.Future[_core.Executable] | None:
        rank, ops = task[2], task[5]
        if not ops:
            return None
        lowered = self.lowerer.lower(task, donations)
        if lowered.callbacks and not has_callbacks(self.devices.client):
            raise make_error(
                "unsupported",
                f"task {task[0]} calls back into Python (jax.debug.print, a callback), which "
                f"the plugin ({self.devices.platform}: {self.devices.version}) can not; use a "
                "CPU plugin of PJRT API 0.115 or later, or remove the callback",
            )
        portable = self.devices.per_rank == 1
        key = (lowered.code, None if portable else rank)
        if key not in self.futures:
            ids = self.devices.ids[rank]
            options = serialized_compile_options(ids, self.user_options)
            self.futures[key] = pool.submit(self._compile, lowered, options)
        return self.futures[key]

    def _compile(self, lowered: LoweredTask, options: bytes) -> _core.Executable:
        # The code of a callback names an address of this process.
        folder = None if lowered.callbacks else self.cache_folder
        key = folder and key_of(lowered.text(), options, self.devices.plugin_key)
        compile_ = self.devices.client.compile
        return compile_(lowered.code, options, lowered.callbacks, folder, key)

    def _result(
        self, task: Any, future: concurrent.futures.Future[_core.Executable]
    ) -> _core.Executable:
        try:
            return future.result()
        except JaxppError as error:
            raise explain(error, self.traced.plan, task[2], f"task {task[0]}") from None

    def compile_all(self) -> list[_core.Executable | None]:
        tasks = self.traced.staged.tasks()
        donations = self.traced.plan.donations()
        pool = concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 1))
        try:
            found = [
                self._submit(pool, task, row)
                for task, row in zip(tasks, donations, strict=True)
            ]
            return [
                None if future is None else self._result(task, future)
                for task, future in zip(tasks, found, strict=True)
            ]
        finally:
            # After an error or Ctrl-C: what has not begun does not, nobody waits for the rest.
            pool.shutdown(wait=False, cancel_futures=True)


def _zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    if not jax.dtypes.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return jax.numpy.zeros(struct.shape, struct.dtype)
    data = jax.eval_shape(jax.random.key_data, struct)
    zeros = jax.numpy.zeros(data.shape, data.dtype)
    return jax.random.wrap_key_data(zeros, impl=jax.random.key_impl(struct))


class CompiledStep:
    """A step ready to run: call it as the function it was made from.

    State stays on the devices between calls. The call returns when the step is done; it
    raises JaxppError if a device failed, with the rank, task and microbatch.
    """

    def __init__(self, traced: Traced, devices: Devices, options: Options) -> None:
        self._traced = traced
        self._devices = devices
        self._mesh = options.mesh
        self._tracing = False
        compiler = _Compiler(traced, devices, options)
        self._executables = compiler.compile_all()
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
        self._inputs = [self._placement(value, aval, ranks) for (value, ranks), aval in args]
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
            fate = "was deleted or donated to a step; use what the step returned in its place"
            if type(leaf) is MpmdArray:
                fate = leaf._value.fate
            raise make_error("donated", f"{name}: expected an array, found one that {fate}")
        host = leaf._read() if type(leaf) is MpmdArray else leaf
        return self._moved(lambda: placement.put(host), placement, name)

    def _place(self, value: _core.Value, position: int) -> _core.Value:
        placement = self._inputs[position]
        name = f"argument {self._traced.arg_names[position]}"
        return self._moved(
            lambda: value.place(placement.ranks, placement.device_indices), placement, name
        )

    def _moved(
        self, move: Callable[[], _core.Value], placement: Placement, name: str
    ) -> _core.Value:
        try:
            return move()
        except JaxppError as error:
            if error.code != "out-of-memory":
                raise
            raise explain(error, self._traced.plan, placement.ranks[0], name) from None

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
                values[position] = self._place(values[position], position)

    def run_leaves(
        self, leaves: list[Any], step: Callable[..., list[_core.Value]] | None = None
    ) -> Any:
        """Runs on flat arguments whose shapes and dtypes are those compiled for."""
        values = [self._value_of(i, leaf) for i, leaf in enumerate(leaves)]
        self._runtime.set_checks(jax.config.jax_debug_nans, jax.config.jax_debug_infs)
        times_wanted = collecting()
        if times_wanted:
            self._runtime.set_tracing(True)
        results = self._run(values + self._constants, step or self._runtime.step)
        if times_wanted:
            note_step(self._runtime.trace())
            self._runtime.set_tracing(self._tracing)
        arrays = list(map(MpmdArray, self._outputs, results))
        return self._traced.out_tree.unflatten(arrays)

    def measure(self, leaves: list[Any]) -> list[Any]:
        """The costs of each loop's stages, from a few runs; leaves without a value are zeros.

        They are (forward, input gradient, weight gradient) in ms for a microbatch.
        """
        leaves = [_zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        self.run_leaves(leaves)
        self.set_tracing()
        loops = range(len(self._traced.graph.loops))
        costs = []
        for _ in range(_MEASURED_RUNS):
            self.run_leaves(leaves)
            costs.append([self._runtime.costs(loop) for loop in loops])
        means = [np.mean(runs, axis=0) for runs in zip(*costs, strict=True)]
        return [[tuple(stage) for stage in loop.tolist()] for loop in means]

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
    (path / "graph.jpp").write_text(traced.graph.core.text(traced.specs.value_bytes))
    (path / "partition.txt").write_text(traced.staged.text())
    (path / "program.txt").write_text(traced.plan.text())
    (path / "check.txt").write_text(traced.proof)
    for i, schedule in enumerate(traced.schedules):
        (path / f"schedule{i or ''}.txt").write_text(schedule.text())
    for task, row in zip(traced.staged.tasks(), traced.plan.donations(), strict=True):
        if task[5]:
            (path / f"{task[0]}.mlir").write_text(compiler.lowerer.lower(task, row).text())
