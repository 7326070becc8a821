"""Steps on workers, with the interfaces of `Devices` and `_core.Runtime`."""

from __future__ import annotations

import collections
import contextlib
import functools
import pathlib
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpp import _core
from jaxpp.client.devices import StepDevices
from jaxpp.errors import JaxppError, make_error, raised_text
from jaxpp.lower.lowering import Code, TaskModules, modules_of_all
from jaxpp.placements import carrier_of
from jaxpp.plan.costs import Collectives
from jaxpp.plan.planned import Planned
from jaxpp.remote.controller import Message, Workers
from jaxpp.remote.messages import Measure, SetChecks, SetTracing, Step, Upload
from jaxpp.remote.value import RemoteValue
from jaxpp.remote.worker import Worker
from jaxpp.trace.call import Options

__all__ = ["RemoteDevices", "RemoteRuntime"]

_AHEAD = 2  # messages queued beyond the steps in flight, so that workers do not idle


class RemoteDevices(StepDevices):
    """The devices of workers."""

    can_move = False

    def __init__(
        self, workers: Workers, plugin: str | None, platform: str, version: str
    ) -> None:
        ids = [
            list(range(rank * workers.per_rank, (rank + 1) * workers.per_rank))
            for rank in range(workers.ranks)
        ]
        super().__init__(platform, version, ids, ids, None)
        self._workers, self._plugin = workers, plugin

    @property
    def layout(self) -> tuple[Any, ...]:
        return (id(self),)

    def put(
        self,
        ranks: Sequence[int],
        indices: Sequence[int],
        shards: list[Any],
        dtype: str,
        memory: str,
    ) -> RemoteValue:
        workers, per_rank = self._workers, self.per_rank
        workers.raise_if_broken()
        value = RemoteValue(workers, workers.numbers(1), None)
        # Copy: they are sent later, when the owner may have changed them. Ranks share
        # some of them.
        copies = {id(shard): np.array(shard, order="C") for shard in shards}
        taken = [copies[id(shard)] for shard in shards]
        by_rank = {
            rank: Upload(
                value.number,
                self._plugin,
                dtype,
                memory,
                taken[i * per_rank : (i + 1) * per_rank],
            )
            for i, rank in enumerate(ranks)
        }
        workers.upload(value, by_rank)
        return value

    def take(self, wanted: _core.Wanted, part: Any, source: Any, copies: bool) -> RemoteValue:
        decision = wanted.decide(source.given, source.deletion_reason(), copies)
        if decision.action == "use":
            used: RemoteValue = source.value(decision.part)
            return used
        dtype, blocks = part.dtype_name, decision.blocks
        arrays = [source.host(block, dtype) for block in blocks]
        carrier = carrier_of(jnp.dtype(dtype))
        shards = [np.empty(wanted.shape, carrier) for _ in range(self.per_rank)]
        for device, shard in enumerate(shards):
            wanted.gather(device, arrays, source.bounds[blocks], shard)
        shards *= len(part.ranks)
        return self.put(part.ranks, part.device_indices, shards, dtype, part.memory)

    def flush(self) -> None:
        self._workers.flush()

    def start(
        self, planned: Planned, code: Code, in_flight: int, options: Options
    ) -> tuple[RemoteRuntime, bool]:
        modules = modules_of_all(planned.plan, code)
        file = self._planfile(planned.plan, modules)
        functions = self._pickle(modules)
        runtime = RemoteRuntime(
            self._workers, self._plugin, planned, file, functions, in_flight
        )
        return runtime, bool(modules.functions)

    def _pickle(self, modules: TaskModules) -> bytes:
        """The callbacks of tasks, pickled together to preserve shared objects."""
        pickle = self._workers._cluster.pickle
        try:
            return pickle(modules.functions)
        except Exception as error:  # any exception from an object's own pickling
            task = next(
                t for t, each in modules.functions.items() if not _is_sent(pickle, each)
            )
            raise make_error(
                "unsupported",
                f"task {task} calls back into Python (jax.debug.print, a callback), with a "
                f"function that cannot be sent to its worker: {raised_text(error)}; expected "
                "a function with picklable variables",
            ) from None

    def _planfile(self, plan: _core.Plan, modules: TaskModules) -> bytes:
        """The plan without constants, which are sent like other arrays."""
        with tempfile.TemporaryDirectory(prefix="jaxpp-") as folder:
            path = pathlib.Path(folder) / "plan"
            plan.save(
                path,
                self.platform,
                self.per_rank,
                [device for ids in self.ids for device in ids],
                (),
                (),
                1,
                modules.compile_options,
                modules.modules,
                modules.of_task,
                modules.shard_dims,
                None,
                [],
                b"",
            )
            return path.read_bytes()


def _is_sent(pickle: Callable[[Any], bytes], found: Any) -> bool:
    try:
        pickle(found)
    except Exception:
        return False
    return True


class RemoteRuntime:
    """A plan ready to run on workers, with the interface of `_core.Runtime`."""

    def __init__(
        self,
        workers: Workers,
        plugin: str | None,
        planned: Planned,
        file: bytes,
        functions: bytes,
        in_flight: int,
    ) -> None:
        self._workers, self._in_flight = workers, in_flight
        self._number = workers.numbers(1)
        self._steps = 0
        self._under_way: collections.deque[Message] = collections.deque()
        self._failed: Message | None = None
        self._turn = threading.Lock()  # held during a call of a step
        self._checks, self._tracing = (False, False), False  # settings of the workers' runtimes
        args, outputs = planned.staged.args(), planned.staged.outputs()
        constants = len(args) - len(planned.donated)
        self._donated = [*planned.donated, *[False] * constants]
        self._names = [*planned.arg_names, *[f"constant {k}" for k in range(constants)]]
        self._params = _core.Params(self._names, self._donated)
        self._results = len(outputs)
        weakref.finalize(self, workers.dropped.append, self._number).atexit = False
        self._prepare(plugin, file, functions)

    def _prepare(self, plugin: str | None, file: bytes, functions: bytes) -> None:
        workers, number = self._workers, self._number
        shared, token = workers._cluster.share(file), secrets.token_bytes(32)
        row = (number, shared, functions, plugin, max(1, self._in_flight), token)
        addresses = workers.call(Worker.prepare, "compiling", *[row] * workers.ranks)
        donated = [i for i, gone in enumerate(self._donated) if gone]
        rows = [(number, addresses, donated)] * workers.ranks
        workers.call(Worker.connect, "connecting", *rows)

    # --- Steps ---

    def step(self, values: list[RemoteValue], waits: bool) -> list[RemoteValue]:
        """Starts a step; returns promises of its results unless it waits."""
        workers = self._workers
        with self._turn:
            self._await_turn()
            self._raise_failure()
            states = self._claim(values)
            first = workers.numbers(self._results)
            self._steps += 1
            arguments = [value.number for value in values]
            step = Step(self._number, arguments, first, self._results)
            lose = functools.partial(self._params.lose, states)
            message = workers.send(f"step {self._steps}", step, lose)
            self._under_way.append(message)
        if waits or not self._in_flight:
            self._await(message)
        numbers = range(first, first + self._results)
        return [RemoteValue(workers, number, message) for number in numbers]

    def _claim(self, values: list[RemoteValue]) -> list[_core.Value | None]:
        """Takes the donated arguments. A worker deletes those itself, but not their origins."""
        for value in values:
            if value.maker is not None:
                value.maker.raise_if_known()
        states: list[_core.Value | None] = [value.state for value in values]
        self._params.claim(states)
        for value, donated in zip(values, self._donated, strict=True):
            if donated and value.origin is not None:
                self._workers.delete(value.origin.number)
        return states

    def _await_turn(self) -> None:
        """Limits the queue; the workers' runtimes enforce the steps in flight."""
        limit = max(1, self._in_flight) + _AHEAD
        steps = self._under_way
        while len(steps) >= limit or (steps and steps[0].is_done()):
            self._await_oldest()

    def _await(self, message: Message) -> None:
        try:
            message.wait()
        except JaxppError:
            self._failed = message
            raise

    def _await_oldest(self) -> None:
        """Waits for the oldest step, for which another thread may wait too."""
        try:
            message = self._under_way[0]
        except IndexError:
            return
        self._await(message)
        with contextlib.suppress(ValueError):
            self._under_way.remove(message)

    def _raise_failure(self) -> None:
        """No step can run after a failure: the workers' connections are closed."""
        self._workers.raise_if_broken()
        if self._failed is not None:
            self._failed.wait()
        for message in self._under_way:
            message.raise_if_known()

    def wait(self) -> None:
        """Waits until all steps so far are done."""
        while self._under_way:
            self._await_oldest()

    # --- Settings and traces ---

    def set_checks(self, nans: bool, infs: bool) -> None:
        if self._checks != (nans, infs):
            self._checks = nans, infs
            self._workers.gather(SetChecks(self._number, nans, infs))

    def set_tracing(self, enabled: bool) -> None:
        if self._tracing != enabled:
            self._tracing = enabled
            self._workers.gather(SetTracing(self._number, enabled))

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.wait()
        row = (self._number, *arguments)
        return self._workers.call(method, method.__name__, *[row] * self._workers.ranks)

    def trace(self) -> list[_core.TaskRun]:
        """A rank's times begin when its worker starts the step."""
        return [run for runs in self._ask(Worker.trace) for run in runs]

    def measure(self, values: list[RemoteValue]) -> list[list[tuple[float, ...]]]:
        """The costs of each loop's stages; each worker measures its own."""
        self.wait()
        reads = _core.Params(self._names, [False] * len(values))
        reads.claim([value.state for value in values])
        numbers = [value.number for value in values]
        message = self._workers.send("measuring", Measure(self._number, numbers))
        message.wait()
        loops = zip(*message.answers, strict=True)
        return [
            [tuple(map(sum, zip(*stage, strict=True))) for stage in zip(*loop, strict=True)]
            for loop in loops
        ]

    def collectives(self, names: tuple[str, ...], sizes: Sequence[int]) -> Collectives:
        """The collectives of all workers' tasks."""
        return [row for rows in self._ask(Worker.collectives, names, sizes) for row in rows]

    def memory(self, rank: int) -> list[int]:
        return self._memory_of_ranks[rank]

    @functools.cached_property
    def _memory_of_ranks(self) -> list[list[int]]:
        return self._ask(Worker.memory)

    def trace_peaks(self) -> list[int]:
        return [peaks[rank] for rank, peaks in enumerate(self._ask(Worker.trace_peaks))]

    def trace_json(self, steps: int) -> str:
        """The workers' traces on one time axis, aligned by the clocks of their hosts."""
        return _core.join_traces(self._ask(Worker.trace_json, steps))
