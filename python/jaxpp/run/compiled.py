"""A step that is ready to run, with its tasks compiled and its state on the devices."""

from __future__ import annotations

import logging
import os
import pathlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.array import MpmdArray
from jaxpp.client.devices import StepDevices
from jaxpp.errors import (
    JaxppError,
    check_number,
    check_path,
    check_whole,
    make_error,
    shorten,
    warn,
)
from jaxpp.jax_internals.client import serialized_compile_options
from jaxpp.lower.compiling import explain
from jaxpp.lower.lowering import Code, TaskLowerer, modules_of_all
from jaxpp.placements import (
    Part,
    Placement,
)
from jaxpp.plan.costs import CostSummary, MemoryAnalysis, Prediction
from jaxpp.plan.evaluation import zeros
from jaxpp.plan.planned import Planned, Traced
from jaxpp.run.arguments import Argument, Source, source_of
from jaxpp.run.saving import StepLayout, save_step
from jaxpp.run.times import collecting, note_step
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.call import Options
from jaxpp.trace.stacked import parts_of_leaves
from jaxpp.trace.work import bytes_of

__all__ = ["CompiledStep"]

_ELSEWHERE = (
    "the sharding {0.sharding}; create or restore the array with "
    "step.compile(...).in_shardings or, if its rows belong to stages that alternate between "
    "the ranks, with a copy on each rank, MpmdSharding(mesh, range(mesh.mpmd_dim), "
    "PartitionSpec())"
)

_KEPT_BYTES = 1 << 16  # the size of an array up to which a copy is kept
_MOST_PLACEMENTS = 64  # of arrays for one leaf whose parts are remembered

_log = logging.getLogger("jaxpp")


def _zeros(aval: Any) -> Any:
    """Zeros in the host's memory, of which no device ever holds all; keys are small."""
    is_key = jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return zeros(aval) if is_key else np.zeros(aval.shape, aval.dtype)


class _Kept(weakref.ref):  # type: ignore[type-arg]
    """Copies that end with the array that they are copies of.

    The callback is a method of a list, because Python code could swallow a Ctrl-C that arrives
    while it runs.
    """

    __slots__ = ("values",)
    values: list[_core.Value]


class _Leaf:
    """A leaf of a step's arguments: the plan's arguments for it, and what earlier calls have
    found out."""

    def __init__(self, arguments: list[Argument], aval: Any) -> None:
        self.arguments = arguments
        # By the placement of an MpmdArray: which of its parts to use as they are. Arrays that
        # users make, such as batches, each have a placement of their own.
        self.used: dict[Placement, list[int]] = {}
        self._keeps = not arguments[0].donated and bytes_of(aval) < _KEPT_BYTES
        self._kept: list[_Kept] = []  # at most one

    def use_parts(self, placement: Placement, parts: list[int]) -> None:
        """Adds to `used`."""
        if len(self.used) >= _MOST_PLACEMENTS:
            self.used.clear()
        self.used[placement] = parts

    def keep(self, array: Any, values: list[_core.Value]) -> None:
        """Keeps copies of a small JAX array for the next call with the same array."""
        if self._keeps and isinstance(array, jax.Array):
            self._kept = []
            kept = _Kept(array, self._kept.remove)
            kept.values = values
            self._kept.append(kept)

    def kept(self, array: Any) -> list[_core.Value] | None:
        """The copies that were kept of this array, unless it has been deleted."""
        for kept in self._kept:
            is_same = kept() is array
            if is_same and not array.is_deleted():
                return kept.values
        return None


class _TracedCode(TaskLowerer):
    """A step whose tasks JAX has lowered."""

    def __init__(self, traced: Traced, devices: StepDevices, options: Options) -> None:
        super().__init__(
            traced.graph, traced.staged, options.mesh, traced.specs, devices.platform
        )
        self.compile_options = serialized_compile_options(
            devices.rank_size,
            options.compiler_options,
            spans_processes=devices.per_rank < devices.rank_size,
        )


class CompiledStep:
    """A compiled step: call it like the function it was made from.

    State stays on the devices between calls. A call returns as soon as the runtime has taken
    its arguments. If the step fails, reading a result raises JaxppError with the rank, task,
    microbatch and step; if no result is read, the next call raises it.
    """

    def __init__(
        self, traced: Planned, devices: StepDevices, options: Options, code: Code | None = None
    ) -> None:
        self._traced = traced
        self._devices = devices
        self._mesh = options.mesh
        self._in_flight = self._steps_in_flight(options)
        self._tracing = False
        self._options, self._given_code = options, code
        code = self._make_code()
        started = devices.start(traced, code, self._in_flight, options)
        self._runtime, self._calls_back = started
        self._collectives = devices.collectives(self._runtime, self._mesh)
        args = zip(traced.staged.args(), self._arg_avals(), strict=True)
        outputs = zip(traced.staged.outputs(), traced.out_avals, strict=True)
        self._inputs = [self._part(placed, aval) for placed, aval in args]
        self._outputs = [self._part(placed, aval) for placed, aval in outputs]
        self._argument_groups = self._groups(self._inputs, traced.argument_bounds)
        self._result_groups = self._groups(self._outputs, traced.result_bounds)
        self._freed = self._freed_by_donation()
        freed = [leaf in self._freed for leaf in range(len(self._argument_groups))]
        self._freed_params = _core.Params(self.argument_names(), freed)
        self._leaves = [self._leaf(*group) for group in self._argument_groups]
        constants = self._inputs[len(traced.in_avals) :]
        self._constants = [
            self._constant(k, part, const)
            for k, (part, const) in enumerate(zip(constants, traced.consts, strict=True))
        ]
        devices.flush()
        _dump(traced, code)

    def _make_code(self) -> Code:
        """Create a new one each time, because it keeps every module that it has lowered."""
        if self._given_code is not None:
            return self._given_code
        assert isinstance(self._traced, Traced)
        return _TracedCode(self._traced, self._devices, self._options)

    def _steps_in_flight(self, options: Options) -> int:
        wanted, limits = options.steps_in_flight, options.memory_limits
        fit = self._traced.plan.steps_in_flight(limits, wanted)
        if fit < wanted:
            _log.debug("memory_limit allows %d steps in flight instead of %d", fit, wanted)
        return min(fit, wanted)

    def _arg_avals(self) -> list[Any]:
        consts = [jax.typeof(c) for c in self._traced.consts]
        return [*self._traced.in_avals, *consts]

    def _part(self, placed: _core.PlacedValue, aval: Any) -> Part:
        spec = self._traced.specs.of(placed.value)
        return Part(self._devices, self._mesh, aval, placed.ranks, spec, placed.memory)

    @staticmethod
    def _groups(
        parts: Sequence[Part], bounds: Sequence[Bounds | None]
    ) -> list[tuple[range, Placement]]:
        """For each of the step's own arguments or results, the numbers of its parts and its
        placement."""
        groups = []
        for cut, numbers in zip(bounds, parts_of_leaves(bounds), strict=True):
            own = parts[numbers.start : numbers.stop]
            aval = own[0].aval
            if cut is not None:
                aval = jax.core.ShapedArray(cut.whole_shape(aval.shape), aval.dtype)
            groups.append((numbers, Placement(own, aval)))
        return groups

    # --- Running ---

    def _leaf(self, numbers: range, placement: Placement) -> _Leaf:
        return _Leaf(self._arguments_of(numbers, placement), placement.aval)

    def _arguments_of(self, numbers: range, placement: Placement) -> list[Argument]:
        """The plan's arguments for a leaf: one, or one for each of its parts."""
        first = numbers.start
        name, donated = f"argument {self._traced.arg_names[first]}", self._traced.donated[first]
        if placement.is_whole:
            return [Argument(placement.parts[0], name, donated)]
        name = name.rpartition("[")[0]  # the name of the leaf, without the rows of a part
        parts = zip(placement.parts, placement.rows(), strict=True)
        axis = placement.axis
        return [Argument(part, name, donated, (axis, rows.start)) for part, rows in parts]

    def _constant(self, number: int, part: Part, array: Any) -> _core.Value:
        name = f"constant {number} that the step closes over"
        argument = Argument(part, name, donated=False, can_move=False)
        return self._take(argument, array, source_of(array, self._devices, self._mesh))

    def _take(self, argument: Argument, leaf: Any, source: Source) -> _core.Value:
        try:
            return argument.take(source)
        except JaxppError as error:
            if error.code == "out-of-memory":
                rank = argument.part.ranks[0]
                raise explain(error, self._traced.plan, rank, argument.name) from None
            if error.code == "mesh" and isinstance(leaf, jax.Array):
                raise make_error("mesh", f"{error}, with {_ELSEWHERE.format(leaf)}") from None
            raise

    def _values_of(self, leaves: list[Any], copied: list[MpmdArray]) -> list[_core.Value]:
        """Adds to `copied` the donated arrays of which the step only has copies."""
        values: list[_core.Value] = []
        for leaf, array in zip(self._leaves, leaves, strict=True):
            parts = leaf.used.get(array._placement) if type(array) is MpmdArray else None
            if parts is None:
                values += leaf.kept(array) or self._take_leaf(leaf, array, copied)
            else:
                values += [array._values[part] for part in parts]
        return values

    def _take_leaf(self, leaf: _Leaf, array: Any, copied: list[MpmdArray]) -> list[_core.Value]:
        """The values of a leaf's parts. Notes in the leaf the decision that the library
        always makes for arrays with this placement, or the copy of a small array."""
        if type(array) is MpmdArray:
            self._take_over(array, leaf.arguments)
        elif isinstance(array, jax.ShapeDtypeStruct):
            raise make_error(
                "invalid-argument",
                f"{leaf.arguments[0].name}: expected an array, found {shorten(array)}; "
                "lower(), compile() and prepare() take shapes, a call runs the step",
                wrong_type=True,
            )
        source = source_of(array, self._devices, self._mesh)
        taken = [self._take(argument, array, source) for argument in leaf.arguments]
        if type(array) is not MpmdArray:
            leaf.keep(array, taken)
            return taken
        given = array._values
        if all(value in given for value in taken):
            leaf.use_parts(array._placement, [given.index(value) for value in taken])
        elif len(given) == len(taken) == 1 and self._has(array):
            taken[0].set_origin(given[0])
        elif leaf.arguments[0].donated:
            copied.append(array)
        return taken

    def _has(self, array: MpmdArray) -> bool:
        """Whether the array is on the devices of this step, and not built from JAX arrays."""
        if array._is_built:
            return False
        return bool(array._placement.devices.number == self._devices.number)

    def _take_over(self, leaf: MpmdArray, arguments: list[Argument]) -> None:
        """Transfers an array built from JAX arrays to the runtime, in place or, if the step may
        write to it, as a copy."""
        made, wanted = leaf._placement, arguments[0]
        if not leaf._is_built or made.mesh != self._mesh:
            return
        needed = any(argument.part.local_ranks for argument in arguments)
        if leaf.is_deleted() or (needed and not made.local_ranks):
            return
        part = Part(self._devices, self._mesh, made.aval, made.ranks, made.spec, made.memory)
        own = Argument(part, wanted.name, wanted.donated, can_move=False)
        source = source_of(leaf, self._devices, self._mesh)
        value = self._take(own, leaf, source)
        leaf._placement, leaf._values = Placement([part], made.aval), [value]

    def _arrays_of(self, results: list[_core.Value]) -> list[MpmdArray]:
        return [
            MpmdArray._of(placement, results[numbers.start : numbers.stop])
            for numbers, placement in self._result_groups
        ]

    def _freed_by_donation(self) -> set[int]:
        """The donated leaves whose memory a result of the same type can reuse. Like `jax.jit`,
        the step deletes only these JAX arrays."""
        types = [placement.key[:2] for _, placement in self._result_groups]
        freed = set()
        for leaf, (numbers, placement) in enumerate(self._argument_groups):
            if self._traced.donated[numbers.start] and placement.key[:2] in types:
                types.remove(placement.key[:2])
                freed.add(leaf)
        return freed

    def _claim_arrays_of_jax(self, leaves: list[Any]) -> list[jax.Array]:
        """The donated JAX arrays. Raises for an array that is passed twice."""
        of_jax = {
            number: leaf
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, jax.Array) and type(leaf) is not MpmdArray
        }
        states = {id(leaf): _core.Value.elsewhere() for leaf in of_jax.values()}
        self._freed_params.claim([states.get(id(leaf)) for leaf in leaves])
        return [leaf for number, leaf in of_jax.items() if number in self._freed]

    def run_leaves(self, leaves: list[Any]) -> Any:
        """Runs on flat arguments of the compiled shapes and dtypes."""
        donated_by_jax = self._claim_arrays_of_jax(leaves) if self._freed else []
        copied: list[MpmdArray] = []
        values = self._values_of(leaves, copied)
        nans, infs = jax.config.jax_debug_nans, jax.config.jax_debug_infs
        self._runtime.set_checks(nans, infs)
        values += self._constants
        if collecting():
            results = self._timed_step(values, nans or infs)
        else:
            results = self._runtime.step(values, nans or infs)
        for array in (*copied, *donated_by_jax):
            array.delete()
        return self._traced.out_tree.unflatten(self._arrays_of(results))

    def _timed_step(self, values: list[_core.Value], checks: bool) -> list[_core.Value]:
        """Runs a step for `collect_task_times_ms`."""
        self._runtime.set_tracing(True)
        try:
            results = self._runtime.step(values, checks)
            note_step(self._runtime.trace())
        finally:
            self._runtime.set_tracing(self._tracing)
        return results

    def warm_up(self) -> None:
        """Runs the step once on zeros and drops the results, unless it has callbacks."""
        if self._calls_back:
            return
        self._runtime.set_checks(False, False)
        values = self._values_of([_zeros(p.aval) for _, p in self._argument_groups], [])
        try:
            self._runtime.step(values + self._constants, True)
        except JaxppError as error:
            raise make_error(error.code, f"prepare, running once on zeros: {error}") from None

    def measure(self, leaves: list[Any]) -> list[Any]:
        """Measures the costs of each loop's stages in a few runs; leaves without a value are
        zeros.

        They are (forward, input gradient, weight gradient) in ms for a microbatch, followed by
        their standard deviations.
        """
        leaves = [zeros(x) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
        values = self._values_of(leaves, []) + self._constants
        return [list(map(tuple, loop)) for loop in self._runtime.measure(values)]

    def argument_names(self) -> list[str]:
        """The name of each argument leaf."""
        names = self._traced.arg_names
        return [
            names[numbers.start]
            if placement.is_whole
            else names[numbers.start].rpartition("[")[0]
            for numbers, placement in self._argument_groups
        ]

    def argument_types(self) -> list[tuple[str, Any]]:
        """The name, shape and dtype of each argument leaf."""
        types = [placement.key[:2] for _, placement in self._argument_groups]
        return list(zip(self.argument_names(), types, strict=True))

    # --- Saving ---

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the step to a file that `jaxpp.load` and `jaxpp run` can run.

        The file holds the plan, the StableHLO of its tasks, its constants, and the types of its
        arguments and results, but not their values.

        Args:
          path: the file. An existing one is replaced once the new one is complete.

        Raises:
          JaxppError: "unsupported" for a step that calls back into Python
            (`jax.debug.print`), and for pytrees of types that no other process can import;
            "invalid-argument" if the file cannot be written.
        """
        name = check_path("save: path", path, "the path of a plan file")
        layout = StepLayout(self._devices, self._mesh, self._inputs, self._outputs)
        modules = modules_of_all(self._traced.plan, self._make_code())
        save_step(name, self._traced, modules, layout, self._in_flight)

    # --- Inspection ---

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments: (args, kwargs) with an `MpmdSharding` per array.

        An unused argument is placed on the first rank. Pass these as `out_shardings` of a step
        to initialise weights on the ranks that own them, or to `jax.device_put`.
        """
        return self._traced.in_shardings

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results: their tree with an `MpmdSharding` per array."""
        return self._traced.out_shardings

    @property
    def out_info(self) -> Any:
        """The shapes, dtypes and shardings of the results."""
        return self._traced.out_info

    @property
    def closed_jaxpr(self) -> Any:
        """The whole program; its text lists every task, transfer and deletion."""
        return ProgramText(self._traced)

    def cost_summary(self) -> CostSummary:
        """The costs of a step: tasks, floating-point operations and peak bytes per rank, the
        bytes that ranks send to each other, and the collectives among the devices of a rank,
        by task. They print as tables."""
        return self._traced.cost_summary(self._collectives())

    def explain(self) -> str:
        """A page on what the step does: the work of its stages, what ranks send, the
        collectives of a rank's devices, memory, sums, gathered weights, and what looks
        wrong."""
        return self._traced.explain(self._collectives())

    def memory_analysis(self) -> MemoryAnalysis:
        """The memory of a step, under the names of JAX's `Compiled`: the memory that the
        plan uses on a device, and the temporary memory of the task that needs most. It
        describes the device of this process with the largest peak."""
        found = (
            MemoryAnalysis(*self._runtime.memory(rank))
            for rank in range(self._mesh.mpmd_dim)
            if self._devices.has_rank(rank)
        )
        return max(found, key=lambda memory: memory.peak_memory_in_bytes)

    def cost_analysis(self) -> dict[str, float]:
        """The floating-point operations of all ranks in a step, as "flops"."""
        return {"flops": self.cost_summary().flops}

    def set_tracing(self, enabled: bool = True) -> None:
        """Starts to record when each task runs, from the next call on."""
        self._tracing = enabled
        self._runtime.set_tracing(enabled)

    def trace_json(self, steps: int = 1) -> str:
        """The last traced call in Chrome's trace format, which Perfetto opens; or the last
        `steps` calls, at most the number in flight, to see how they overlap.

        In a job of several processes the trace covers this process's ranks; `jaxpp plot` joins
        the files of all processes."""
        return self._runtime.trace_json(check_whole("steps", steps, 1))

    def draw_trace(self, columns: int = 100, color: bool = False, steps: int = 1) -> str:
        """The last traced call as text for a terminal, one line per rank."""
        return _core.draw_traces([self.trace_json(steps)], columns, color)

    def predict(
        self,
        traces: Sequence[str] | None = None,
        *,
        cores: int | None = None,
        threads: float = 0.0,
        processes: int = 1,
        call: float = 0.0,
        latency: float = 0.0,
        bandwidth: float = 0.0,
        host_bandwidth: float = 0.0,
        steps: int = 1,
    ) -> Prediction:
        """Predicts the time of a step from the times of its tasks.

        Args:
          traces: results of trace_json() of one or more calls, each from every process, of this
            step or of one with the same tasks, such as fewer microbatches or another schedule.
            Default: the last traced call.
          cores: how many cores the devices share, 0 for no limit. Default: on CPUs the
            cores of this process, otherwise no limit.
          threads: how many cores a task keeps busy. Default: 1.5 for each device of a rank, at
            most the cores of its process.
          processes: the number of processes that share the ranks.
          call: milliseconds to issue an instruction.
          latency: of messages between processes, in milliseconds. Default: as in the traces.
          bandwidth: bytes per millisecond between processes, 0 for no limit.
          host_bandwidth: bytes per millisecond between a rank's devices and pinned host memory,
            each way, 0 for no limit.
          steps: how many steps to predict, with as many in flight as the step allows.
        """
        devices = self._devices
        if cores is None:
            cores = len(os.sched_getaffinity(0)) if devices.platform == "cpu" else 0
        first = [row[0] for row in devices.indices]
        found = self._traced.plan.predict(
            [self.trace_json()] if traces is None else _check_traces(traces),
            [first.index(index) for index in first],
            devices.rank_size,
            check_whole("cores", cores, 0),
            check_number("threads", threads),
            check_whole("processes", processes, 1),
            check_number("call", call),
            check_number("latency", latency),
            check_number("bandwidth", bandwidth),
            check_number("host_bandwidth", host_bandwidth),
            check_whole("steps", steps, 1),
            self._in_flight,
        )
        return Prediction(*found)


def _check_traces(traces: Any) -> list[str]:
    found = list(traces) if isinstance(traces, Iterable) else []
    if isinstance(traces, str) or not found or not all(isinstance(x, str) for x in found):
        raise make_error(
            "invalid-argument",
            f"traces={shorten(traces)}; expected a list of one or more results of trace_json()",
            wrong_type=True,
        )
    return found


class ProgramText:
    """The programs of all ranks, for printing."""

    def __init__(self, planned: Planned) -> None:
        self._planned = planned

    def __str__(self) -> str:
        return self._planned.program_text

    __repr__ = __str__


def _dump(traced: Planned, code: Code) -> None:
    """JPP_DUMP=dir: writes the output of each part of the planner, as `jaxpp plan` prints
    it."""
    folder = _core.option("JPP_DUMP")
    if not folder or not isinstance(traced, Traced):
        return
    try:
        _write_dump(pathlib.Path(folder), traced, code)
    except JaxppError:
        raise
    except (OSError, ValueError) as error:
        warn(f"JPP_DUMP={folder!r}: {error}; the remaining files are not written")


def _write_dump(path: pathlib.Path, traced: Traced, code: Code) -> None:
    def write(name: str, text: str) -> None:
        # Write to a new name first: the name may be a link to another file.
        fresh = path / f"{name}.{os.getpid()}"
        with fresh.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        fresh.replace(path / name)

    path.mkdir(parents=True, exist_ok=True)
    value_bytes = traced.specs.value_bytes  # the planner's own values follow those of the graph
    of_graph = None if value_bytes is None else value_bytes[: len(traced.graph.avals)]
    write("graph.jpp", traced.graph.core.text(of_graph))
    write("partition.txt", traced.staged.text())
    write("program.txt", traced.plan.text())
    write("check.txt", traced.proof)
    for i, schedule in enumerate(traced.schedules):
        write(f"schedule{i or ''}.txt", schedule.text())
    for task, row in zip(traced.staged.tasks(), traced.plan.donations(), strict=True):
        if task.ops:
            write(f"{task.name}.mlir", code.lower(task, row).text())
