"""The worker process of one rank: its devices, its part of each step, its shards.

A worker executes the controller's messages one after the other, and serves reads of arrays in
between. Both use the TCP connection of `connections.py`. Calls outside of steps use Ray, and
transfers between ranks use the network of `jaxpp.transport`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pathlib
import pickle
import platform
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import numpy as np

import jaxpp
from jaxpp import _core
from jaxpp.client.devices import LocalDevices, client_of
from jaxpp.client.plugins import plugin_path
from jaxpp.client.processes import make_network
from jaxpp.devices import Devices
from jaxpp.errors import DELETED, JaxppError, make_error, raised_text
from jaxpp.lower.callbacks import Function
from jaxpp.lower.compiling import CompiledTasks, Compiler
from jaxpp.plan.costs import Collectives
from jaxpp.remote.connections import PROBLEM, Connection, Listener, frame_of
from jaxpp.remote.messages import (
    Action,
    Answer,
    Delete,
    Failure,
    Measure,
    Read,
    SetChecks,
    SetTracing,
    Step,
    Upload,
    decode_request,
    unpack,
)
from jaxpp.remote.ray_monitor import RayMonitor, ask_raylet, raylet_socket
from jaxpp.run.loading import FileCode

__all__ = ["Identity", "Worker", "versions"]

_READERS = 4  # threads for reading arrays, which may wait for a step


class Identity(NamedTuple):
    """A worker's process, its address, and the versions that must match."""

    host: str
    process: int
    address: tuple[str, int]  # address and port
    versions: dict[str, str]


_KILL_SECONDS = 5  # time limit for Ray to end a worker whose controller has ended


def versions() -> dict[str, str]:
    """The versions that workers and the controller must have in common."""
    return {
        "jaxpp": jaxpp.__version__,
        "jax": jax.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _nothing() -> None:
    pass


def _raise(error: Exception) -> None:
    raise error


def _report_problem(connection: Connection) -> None:
    """Tells the controller when the raylet of this host does not answer."""
    import ray

    path = raylet_socket(ray)
    name = "the raylet of its host"
    monitor = RayMonitor({name: lambda: ask_raylet(ray, path, name)})
    while (problem := monitor.problem()) is None:
        time.sleep(1)
    with contextlib.suppress(OSError):
        connection.send(frame_of((PROBLEM, problem)))


class _Answering:
    """Threads that run the given calls in order and send their results as answers."""

    def __init__(self, connection: Connection, threads: int) -> None:
        self._connection = connection
        self._calls: queue.SimpleQueue[tuple[int, Callable[[], Any]]] = queue.SimpleQueue()
        for _ in range(threads):
            threading.Thread(target=self._answer_all, daemon=True).start()

    def put(self, number: int, call: Callable[[], Any]) -> None:
        """Queues a call for the request of that number."""
        self._calls.put((number, call))

    def _answer_all(self) -> None:
        with contextlib.suppress(OSError):  # the controller has ended
            while True:
                number, call = self._calls.get()
                answer, arrays = _answer_of(call)
                self._connection.send(frame_of((number, answer), arrays))


def _answer_of(call: Callable[[], Any]) -> tuple[Answer, list[np.ndarray]]:
    try:
        found = call()
    except Exception as error:
        return Answer(raised=f"{type(error).__name__}: {error}"), []
    if isinstance(found, np.ndarray):
        return Answer(), [found]
    return Answer(failure=found) if isinstance(found, Failure) else Answer(found), []


class _Ranks:
    """The job of a remote mesh: each rank is one process."""

    def __init__(self, mine: int, count: int) -> None:
        self.mine = mine
        self.rank_process = list(range(count))

    def has_rank(self, rank: int) -> bool:
        return rank == self.mine

    def connect(self, identity: Any, devices: Devices) -> _core.Network:
        raise NotImplementedError  # the controller distributes the addresses


class _Program:
    """A loaded plan: this worker's part."""

    def __init__(self, plan: _core.Plan, in_flight: int, devices: LocalDevices) -> None:
        self.plan, self.in_flight, self.devices = plan, in_flight, devices
        self.compiled: CompiledTasks | None = None
        self.network: _core.Network | None = None
        self.runtime: _core.Runtime | None = None
        self.donated: list[int] = []
        self.failure: Failure | None = None

    def finish(self, steps: int) -> Failure | None:
        """Waits for the first `steps` steps. A runtime reports a failure once and runs no step
        after it."""
        assert self.runtime is not None
        try:
            self.runtime.wait(steps)
        except JaxppError as error:
            self.failure = self.failure or Failure(error.code, str(error))
        return self.failure


_Given = ParamSpec("_Given")
_Found = TypeVar("_Found")


def _or_failure(method: Callable[_Given, _Found]) -> Callable[_Given, _Found | Failure]:
    """Decorates a method to return this library's errors as `Failure`s."""

    @functools.wraps(method)
    def answer(*args: _Given.args, **kwargs: _Given.kwargs) -> _Found | Failure:
        try:
            return method(*args, **kwargs)
        except JaxppError as error:
            return Failure(error.code, str(error))

    return answer


def _planfile(data: bytes) -> _core.PlanFile:
    with tempfile.TemporaryDirectory(prefix="jaxpp-") as folder:
        path = pathlib.Path(folder) / "plan"
        path.write_bytes(data)
        return _core.PlanFile(path)


def _unpickle(functions: bytes) -> dict[str, dict[int, Function]]:
    """Unpickles the callbacks of tasks, received through Ray."""
    try:
        found: dict[str, dict[int, Function]] = pickle.loads(functions)
    except Exception as error:  # any exception from importing the function's module
        raise make_error(
            "unsupported",
            "the step calls back into Python (jax.debug.print, a callback), with a function "
            f"that the worker cannot import: {raised_text(error)}; ship its module with "
            "ray_options' runtime_env=, or start Ray where the module is importable",
        ) from None
    return found


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


class Worker:
    """One rank. Methods return a `Failure` for expected errors."""

    def __init__(self, rank: int, ranks: int, per_rank: int) -> None:
        self._rank, self._ranks, self._per_rank = rank, ranks, per_rank
        self._devices: dict[str | None, LocalDevices] = {}
        self._programs: dict[int, _Program] = {}
        # By id: the array, or the reason for its absence.
        self._values: dict[int, _core.Value | Failure] = {}

    # --- Before the first step ---

    def begin(self, import_modules: Sequence[str], token: bytes) -> Identity | Failure:
        """Imports the modules that the user's tasks need, and listens for the controller."""
        for name in import_modules:
            try:
                importlib.import_module(name)
            except Exception as error:
                text = f"import_modules: {name}: {type(error).__name__}: {error}"
                return Failure("invalid-argument", text)
        address = _node_address()
        listener = Listener(address, token)
        threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        where = (address, listener.port)
        return Identity(socket.gethostname(), os.getpid(), where, versions())

    def ping(self) -> None:
        """Returns as long as the process runs."""

    @_or_failure
    def open(self, plugin: str | None) -> tuple[str, str]:
        """Opens a plugin and returns its platform and version."""
        devices = self._open(plugin)
        return devices.platform, devices.version

    def _open(self, plugin: str | None) -> LocalDevices:
        import ray

        given = ray.get_runtime_context().get_accelerator_ids()
        on_cpu = not any(given.values())
        path = plugin_path(plugin, "cpu" if on_cpu else "cuda")
        client = client_of(path, self._per_rank if on_cpu else 0)
        found = [device.id for device in client.info().devices]
        if len(found) < self._per_rank:
            raise make_error(
                "devices",
                f"expected {self._per_rank} devices for mesh_shape, found {len(found)} in the "
                f"plugin ({client.info().platform})",
            )
        ids = [[0] * self._per_rank for _ in range(self._ranks)]
        ids[self._rank] = found[: self._per_rank]
        devices = LocalDevices(client, ids, _Ranks(self._rank, self._ranks))
        self._devices[plugin] = devices
        return devices

    @_or_failure
    def profile(self, folder: str | None) -> None:
        """Begins a profile of this process, or ends it and writes it to its folder."""
        try:
            if folder is not None:
                jax.profiler.start_trace(folder)
            else:
                jax.profiler.stop_trace()
        except Exception as error:  # of any type: the profiler's own
            raise make_error("invalid-argument", raised_text(error)) from None

    @_or_failure
    def prepare(
        self,
        number: int,
        file: bytes,
        functions: bytes,
        plugin: str | None,
        in_flight: int,
        token: bytes,
    ) -> bytes:
        """Compiles this rank's tasks, which may call back `functions`. Returns the network
        address of this rank."""
        planfile = _planfile(file)
        plan, contents = planfile.plan(), planfile.contents()
        program = _Program(plan, in_flight, self._devices[plugin])
        code = FileCode(contents, plan.staged(), _unpickle(functions))
        program.compiled = Compiler(plan, program.devices, code).compile_all()
        program.network = make_network(
            self._rank,
            self._ranks,
            _core.option("JPP_ADDRESS") or _node_address(),
            token,
            program.devices,
        )
        self._programs[number] = program
        return program.network.address()

    @_or_failure
    def connect(self, number: int, addresses: Sequence[bytes], donated: list[int]) -> None:
        """Connects to the other ranks, once all have compiled their tasks."""
        program = self._programs[number]
        program.donated = donated
        assert program.compiled is not None and program.network is not None
        for rank, address in enumerate(addresses):
            if rank != self._rank:
                program.network.connect(rank, address)
        program.runtime = program.devices.run(
            program.plan, program.compiled, program.in_flight, program.network
        )

    # --- Messages ---

    def _serve(self, listener: Listener) -> None:
        """Executes messages until the controller has ended. Each is answered when the step that
        it started is done; later messages are read meanwhile."""
        connection = listener.accept()
        threading.Thread(target=_report_problem, args=(connection,), daemon=True).start()
        begun, reads = _Answering(connection, 1), _Answering(connection, _READERS)
        try:
            while True:
                (number, row), arrays = connection.receive()
                request = decode_request(row)
                if isinstance(request, Read):
                    value = self._values.get(request.array)  # a later message may delete it
                    reads.put(number, functools.partial(self._read, value, request))
                else:
                    uploads = unpack(request.uploads, arrays)
                    begun.put(number, self._act(request.actions, uploads))
        except OSError:
            pass  # the controller has ended
        finally:
            connection.shut()
            time.sleep(_KILL_SECONDS)
            os._exit(1)  # Ray should have ended this process but does not answer

    def _act(self, actions: Sequence[Action], uploads: Iterable[Upload]) -> Callable[[], Any]:
        """Executes the actions. Returns a function that waits for the last one."""
        try:
            for upload in uploads:
                self._put(upload)
            began = [self._begin(action) for action in actions]
            return began[-1] if began else _nothing
        except Exception as error:  # a bug of this library, reported to the user
            return functools.partial(_raise, error)

    def _begin(self, action: Action) -> Callable[[], Any]:
        match action:
            case Delete(numbers):
                self._delete(numbers)
            case SetChecks(plan, nans, infs):
                self._runtime(plan).set_checks(nans, infs)
            case SetTracing(plan, enabled):
                self._runtime(plan).set_tracing(enabled)
            case Step():
                return self._begin_step(action)
            case Measure():
                return self._begin_measuring(action)
        return _nothing

    def _put(self, upload: Upload) -> None:
        devices = self._devices[upload.plugin]
        value: _core.Value | Failure
        try:
            indices = devices.indices[self._rank]
            value = devices.put(
                [self._rank], indices, upload.shards, upload.dtype, upload.memory
            )
        except JaxppError as error:
            value = Failure(error.code, f"rank {self._rank}, upload: {error}")
        self._values[upload.number] = value

    def _delete(self, numbers: list[int]) -> None:
        for number in numbers:
            value = self._values.pop(number, None)
            if isinstance(value, _core.Value):
                value.delete()
            self._programs.pop(number, None)

    def _runtime(self, number: int) -> _core.Runtime:
        runtime = self._programs[number].runtime
        assert runtime is not None
        return runtime

    def _begin_step(self, step: Step) -> Callable[[], Failure | None]:
        program, runtime = self._programs[step.plan], self._runtime(step.plan)
        results = range(step.first_result, step.first_result + step.results)
        values = [self._value(program, n) for n in step.arguments]
        failure = next((v for v in values if isinstance(v, Failure)), None)
        made: list[_core.Value] = []
        if failure is None:
            try:
                made = runtime.step([v for v in values if isinstance(v, _core.Value)], False)
            except JaxppError as error:
                failure = Failure(error.code, str(error))
        for position in program.donated:
            self._values.pop(step.arguments[position], None)
        if failure is not None:
            self._values.update((n, failure) for n in results)
            return lambda: failure
        self._values.update(zip(results, made, strict=True))
        return functools.partial(program.finish, runtime.num_steps())

    def _begin_measuring(self, action: Measure) -> Callable[[], Any]:
        """The costs of each loop's stages; zeros for stages of other ranks."""
        program, runtime = self._programs[action.plan], self._runtime(action.plan)
        values = [self._value(program, n) for n in action.arguments]

        @_or_failure
        def measure() -> Any:
            failure = next((v for v in values if isinstance(v, Failure)), None)
            if failure is not None:
                return failure
            loops = runtime.measure([v for v in values if isinstance(v, _core.Value)])
            return [[tuple(stage) for stage in loop] for loop in loops]

        return measure

    def _value(self, program: _Program, number: int) -> _core.Value | Failure:
        """A value without shards, for an array that exists only on other ranks."""
        found = self._values.get(number)
        return program.devices.put([], [], [], "float32", "device") if found is None else found

    # --- Requests outside of messages ---

    def _read(self, value: _core.Value | Failure | None, request: Read) -> np.ndarray | Failure:
        """The bytes of a shard."""
        if isinstance(value, Failure):
            return value
        if value is None:
            return Failure("donated", f"expected an array, found one that {DELETED}")
        shard = np.empty(request.size, np.uint8)
        try:
            value.read(self._rank, request.device, shard)
        except JaxppError as error:
            return Failure(error.code, str(error))
        return shard

    @_or_failure
    def trace(self, number: int) -> list[_core.TaskRun]:
        return self._runtime(number).trace()

    @_or_failure
    def collectives(
        self, number: int, names: tuple[str, ...], sizes: Sequence[int]
    ) -> Collectives:
        return self._runtime(number).collectives(names, sizes)

    @_or_failure
    def memory(self, number: int) -> list[int]:
        return self._runtime(number).memory(self._rank)

    @_or_failure
    def trace_peaks(self, number: int) -> list[int]:
        return self._runtime(number).trace_peaks()

    @_or_failure
    def trace_json(self, number: int, steps: int) -> str:
        return self._runtime(number).trace_json(steps)
