"""The controller's side of a mesh of workers: sends messages and collects answers.

A message lists actions for the workers, in order: store shards of arrays, delete arrays, start
a step. Workers answer when that step is done. Actions are batched with the next step, so that a
step costs one message per worker.

A thread that waits for a message also monitors the workers. A worker that has died or does not
answer breaks the mesh: the others are ended too, and all later operations raise the same error.
"""

from __future__ import annotations

import collections
import pathlib
import secrets
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from jaxpp import _core
from jaxpp.errors import JaxppError, make_error, raised_text
from jaxpp.plan.planning import Planned
from jaxpp.remote.cluster import RAYLET, Cluster
from jaxpp.remote.connections import Answers
from jaxpp.remote.uploads import Upload, pack
from jaxpp.remote.value import RemoteValue
from jaxpp.remote.worker import Failure
from jaxpp.run.compiling import Code
from jaxpp.run.devices import Devices
from jaxpp.run.saving import TaskModules, modules_of_all
from jaxpp.trace.call import Options

__all__ = ["Message", "RemoteDevices", "RemoteRuntime", "Workers"]

_PATIENCE = 0.2  # fraction of the timeout after which a silent worker is probed
_AHEAD = 2  # messages queued beyond the steps in flight, so that workers do not idle
_MOST_MESSAGES = 32  # in flight
_GRACE = 2  # seconds for the others to report, when one has died


class Message:
    """A message to all workers, until they have executed it."""

    def __init__(self, workers: Workers, asked: Answers, what: str) -> None:
        self._workers, self.what = workers, what
        self._asked: Answers | None = asked  # None: all have arrived
        self._failure: Failure | None = None
        self.answers: list[Any] = []  # time at which all had arrived

    def wait(self) -> None:
        """Waits until all workers have executed it. Raises the error of a failure."""
        self.settle()
        if self._failure is not None:
            raise make_error(*self._failure)

    def is_done(self) -> bool:
        asked = self._asked
        return asked is None or self._workers.are_there(asked)

    @property
    def failed(self) -> bool:
        """Whether it is known to have failed."""
        return self._failure is not None or self._workers.broken is not None

    def settle(self) -> None:
        """Waits until all workers have answered."""
        asked = self._asked
        if asked is not None:
            self.answers = self._workers.await_answers(asked, self.what)
            self._failure = self._workers.first_failure(self.answers, self.what)
            self._asked = None

    def raise_if_known(self) -> None:
        """The failure, if one is known already."""
        if self._failure is not None:
            raise make_error(*self._failure)


class Workers:
    """The workers of a mesh, one a rank."""

    def __init__(self, cluster: Cluster, ranks: int, per_rank: int) -> None:
        self.ranks, self.per_rank = ranks, per_rank
        self.broken: Failure | None = None
        # Unreferenced arrays and plans. Garbage collection may append at any time.
        self.dropped: collections.deque[int] = collections.deque()
        self._cluster = cluster
        # Seconds after which a worker that does not answer counts as dead.
        self._timeout = (_core.option_ms("JPP_PEER_TIMEOUT") or 10_000) / 1000
        self._lock = threading.RLock()  # guards the fields below
        self._gathered: list[tuple[Any, ...]] = []  # for all ranks: numbers and strings
        self._uploads: list[list[Upload]] = [[] for _ in range(ranks)]
        self._uploaded: list[weakref.ref[RemoteValue]] = []  # sent with the next message
        self._numbers = 0  # ids of arrays and plans
        self._under_way: collections.deque[Message] = collections.deque()
        self._devices: dict[str | None, RemoteDevices] = {}

    @property
    def processes(self) -> list[tuple[str, int]]:
        """The host and the process id of each."""
        return [(worker.host, worker.process) for worker in self._cluster.identities]

    def shutdown(self) -> None:
        """Ends the workers. Arrays and steps of the mesh become unusable."""
        if self.broken is None:
            self.broken = Failure("mesh", "the workers of this mesh were shut down")
        self._cluster.end()

    def devices(self, plugin: str | None) -> RemoteDevices:
        """The workers' devices; each worker opens the plugin."""
        if plugin not in self._devices:
            found = self.call("open", "the plugin", *[(plugin,)] * self.ranks)
            self._devices[plugin] = RemoteDevices(self, plugin, *found[0])
        return self._devices[plugin]

    def numbers(self, count: int) -> int:
        """Allocates `count` ids and returns the first."""
        with self._lock:
            first = self._numbers + 1
            self._numbers += count
            return first

    # --- Messages ---

    def gather(self, *action: Any) -> None:
        """Adds an action to the next message."""
        with self._lock:
            self._gathered.append(action)

    def upload(self, value: RemoteValue, by_rank: dict[int, Upload]) -> None:
        """Deletes arrays with the next message."""
        with self._lock:
            self._uploaded.append(weakref.ref(value))
            for rank, upload in by_rank.items():
                self._uploads[rank].append(upload)

    def send(self, what: str, *action: Any) -> Message:
        """Sends the batched actions and then `action`, which is for all ranks."""
        self.raise_if_broken()
        with self._lock:
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
            first = [("delete", dropped)] if dropped else []
            actions = [*first, *self._gathered, *([action] if action else [])]
            packed = [pack(uploads) for uploads in self._uploads]
            self._gathered, self._uploads = [], [[] for _ in range(self.ranks)]
            requests = {
                rank: (("act", actions, table), shards)
                for rank, (table, shards) in enumerate(packed)
            }
            message = Message(self, self._cluster.connections.send(requests), what)
            for reference in self._uploaded:
                value = reference()
                if value is not None:
                    value.maker = message
            self._uploaded = []
            self._under_way.append(message)
            if len(self._under_way) == _MOST_MESSAGES:
                self._under_way.popleft().settle()
        return message

    def flush(self) -> None:
        """Sends the batched actions, if any."""
        with self._lock:
            if self._gathered or self._uploaded:
                self.send("an upload")

    def message_of(self, value: RemoteValue) -> Message:
        """The message that creates the array."""
        if value.maker is None:
            self.flush()
        assert value.maker is not None
        return value.maker

    def delete(self, number: int) -> None:
        """Sends an array immediately."""
        if self.broken is None:
            self.gather("delete", [number])
            self.flush()

    def read(self, value: RemoteValue, rank: int, device: int, size: int) -> Any:
        """The bytes of a shard."""
        message = self.message_of(value)  # sent first, so that the worker has the array
        self.raise_if_broken()
        request = ("read", value.number, device, size)
        asked = self._cluster.connections.send({rank: (request, [])})
        (found,) = self.await_answers(asked, message.what)
        if isinstance(found, Failure):
            message.wait()  # which knows the first cause
            raise make_error(*found)
        return found

    # --- Answers ---

    def are_there(self, asked: Answers) -> bool:
        return (
            not asked.missing
            or self.broken is not None
            or bool(self._cluster.connections.ended)
        )

    def await_answers(self, asked: Answers, what: str) -> list[Any]:
        """The answers of the workers. Breaks the mesh if one has died or does not answer."""
        connections = self._cluster.connections
        while True:
            self.raise_if_broken()
            if connections.wait(asked, self._timeout * _PATIENCE):
                ranks = sorted(asked.found)
                return [self._found(rank, what, *asked.found[rank]) for rank in ranks]
            for rank, problem in connections.problems.items():
                self._end(rank, what, problem)
            if connections.ended:
                self._connection_lost(connections.ended[0], what)
            self._look_for_silence(what)

    def _found(
        self, rank: int, what: str, answer: dict[str, Any], arrays: list[np.ndarray]
    ) -> Any:
        if "raised" in answer:
            self._end(rank, what, f"the worker raised {answer['raised']}")
        if "failure" in answer:
            return Failure(*answer["failure"])
        return arrays[0] if arrays else answer["found"]

    # --- Replies through Ray ---

    def call(self, method: str, what: str, *arguments: tuple[Any, ...]) -> list[Any]:
        """Calls a method on each worker with its arguments and returns the results."""
        self.raise_if_broken()
        self.flush()
        asked = [self._cluster.ask(r, method, *a) for r, a in enumerate(arguments)]
        found = self.replies(asked, what)
        for rank, reply in enumerate(found):
            if isinstance(reply, Failure):
                text = f"{self._cluster.name(rank)}, {what}: {reply.text}"
                raise make_error(reply.code, text)
        return found

    def first_failure(self, answers: list[Any], what: str) -> Failure | None:
        """The failure that caused the others."""
        failures = [answer for answer in answers if isinstance(answer, Failure)]
        first = next((f for f in failures if f.code != "peer"), None)
        if failures and first is None:
            self._look_for_silence(what)  # of a process that they could not reach
        return first or (failures[0] if failures else None)

    def replies(self, asked: list[Any], what: str) -> list[Any]:
        """The reply of each rank's worker. Breaks the mesh if one has died or does not
        answer."""
        while True:
            self.raise_if_broken()
            found = self._cluster.get(asked, self._timeout * _PATIENCE)
            if found is None:
                self._look_for_silence(what)
            elif isinstance(found, BaseException):
                self._break(asked, what, found)
            else:
                return found

    def _look_for_silence(self, what: str) -> None:
        limit = self._timeout * (1 - _PATIENCE)
        pings = [self._cluster.ping(rank) for rank in range(self.ranks)]
        silent = self._cluster.missing(pings, limit)
        for rank, ping in enumerate(pings):
            died = None if rank in silent else self._cluster.death_reason(ping)
            if died is not None:
                self._end(rank, what, died)
        if silent:
            self._end(
                silent[0],
                what,
                f"the worker has not answered for {self._timeout:g} s: it was stopped, it "
                "hangs, or its host is unreachable",
            )

    def _connection_lost(self, rank: int, what: str) -> NoReturn:
        """Handles a worker whose connection has ended."""
        ping = self._cluster.ping(rank)
        self._cluster.missing([ping], _GRACE)
        died = self._cluster.death_reason(ping)
        self._end(rank, what, died or "the connection to the worker has ended")

    def _break(self, asked: list[Any], what: str, error: BaseException) -> NoReturn:
        self._cluster.missing(asked, _GRACE)
        deaths = [self._cluster.death_reason(reply) for reply in asked]
        known = [(rank, death) for rank, death in enumerate(deaths) if death is not None]
        rank, text = known[0] if known else (0, str(error))
        self._end(rank, what, text)

    def _end(self, rank: int, what: str, text: str) -> NoReturn:
        """The error of the whole mesh."""
        if not self._cluster.has_raylet():
            self._end_because(f"{RAYLET} was killed")
        self._end_because(f"{self._cluster.name(rank)}, {what}: {text}")

    def _end_because(self, text: str) -> NoReturn:
        self.broken = Failure(
            "peer",
            f"{text}. All workers of the mesh were terminated; create the mesh again and "
            "continue from a checkpoint",
        )
        self._cluster.end()
        raise make_error(*self.broken)

    def raise_if_broken(self) -> None:
        if self.broken is None and (problem := self._cluster.problem()) is not None:
            self._end_because(problem)
        if self.broken is not None:
            raise make_error(*self.broken)


class RemoteDevices(Devices):
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
        self, ranks: Sequence[int], indices: Sequence[int], shards: list[Any], dtype: str
    ) -> RemoteValue:
        workers, per_rank = self._workers, self.per_rank
        workers.raise_if_broken()
        value = RemoteValue(workers, workers.numbers(1), tuple(ranks), None)
        # Copy: they are sent later, when their owner may have changed them. Ranks share some.
        copies = {id(shard): np.array(shard, order="C") for shard in shards}
        taken = [copies[id(shard)] for shard in shards]
        by_rank = {
            rank: Upload(
                value.number, self._plugin, dtype, taken[i * per_rank : (i + 1) * per_rank]
            )
            for i, rank in enumerate(ranks)
        }
        workers.upload(value, by_rank)
        return value

    def flush(self) -> None:
        self._workers.flush()

    def start(
        self, planned: Planned, code: Code, in_flight: int, options: Options
    ) -> tuple[RemoteRuntime, TaskModules]:
        modules = modules_of_all(planned.plan, code)
        file = self._planfile(planned.plan, modules)
        functions = self._pickle(modules)
        runtime = RemoteRuntime(
            self._workers, self._plugin, planned, file, functions, in_flight
        )
        return runtime, modules

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
                1,
                modules.compile_options,
                list(modules.modules),
                modules.of_task,
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
        self._turn = threading.Lock()  # of a call of a step
        self._set: dict[str, tuple[Any, ...]] = {}
        args, outputs = planned.staged.args(), planned.staged.outputs()
        constants = len(args) - len(planned.donated)
        self._donated = [*planned.donated, *[False] * constants]
        self._names = [*planned.arg_names, *[f"constant {k}" for k in range(constants)]]
        self._result_ranks = [tuple(placed.ranks) for placed in outputs]
        weakref.finalize(self, workers.dropped.append, self._number).atexit = False
        self._prepare(plugin, file, functions)

    def _prepare(self, plugin: str | None, file: bytes, functions: bytes) -> None:
        workers, number = self._workers, self._number
        shared, token = workers._cluster.share(file), secrets.token_bytes(32)
        row = (number, shared, functions, plugin, max(1, self._in_flight), token)
        addresses = workers.call("prepare", "compiling", *[row] * workers.ranks)
        donated = [i for i, gone in enumerate(self._donated) if gone]
        rows = [(number, addresses, donated)] * workers.ranks
        workers.call("connect", "connecting", *rows)

    # --- Steps ---

    def step(self, values: list[RemoteValue], waits: bool) -> list[RemoteValue]:
        """Starts a step; returns promises of its results unless it waits."""
        workers = self._workers
        with self._turn:
            self._await_turn()
            self._raise_failure()
            self._check(values)
            first = workers.numbers(len(self._result_ranks))
            self._steps += 1
            arguments = [value.number for value in values]
            action = ("step", self._number, arguments, first, len(self._result_ranks))
            message = workers.send(f"step {self._steps}", *action)
            for value, gone in zip(values, self._donated, strict=True):
                if gone:
                    value.donate(message)
            self._under_way.append(message)
        if waits or not self._in_flight:
            self._await(message)
        numbered = enumerate(self._result_ranks, first)
        return [RemoteValue(workers, number, ranks, message) for number, ranks in numbered]

    def _await_turn(self) -> None:
        """Limits the queue; the workers' runtimes enforce the steps in flight."""
        limit = max(1, self._in_flight) + _AHEAD
        steps = self._under_way
        while len(steps) >= limit or (steps and steps[0].is_done()):
            self._await(steps[0])
            steps.popleft()

    def _await(self, message: Message) -> None:
        try:
            message.wait()
        except JaxppError:
            self._failed = message
            raise

    def _raise_failure(self) -> None:
        """No step can run after a failure: the workers' connections are closed."""
        self._workers.raise_if_broken()
        if self._failed is not None:
            self._failed.wait()
        for message in self._under_way:
            message.raise_if_known()

    def _check(self, values: list[RemoteValue]) -> None:
        for value in values:
            if value.maker is not None:
                value.maker.raise_if_known()
        takers: dict[int, int] = {}  # by id of the array
        for i, value in enumerate(values):
            root = value.root
            if root.deleted:
                raise make_error(
                    "donated",
                    f"argument {self._names[i]}: expected an array, found one that {root.fate}",
                )
            if self._donated[i]:
                self._refuse_second(takers.setdefault(root.number, i), i)
        for i, value in enumerate(values):
            if not self._donated[i]:
                self._refuse_second(takers.get(value.root.number, i), i)

    def _refuse_second(self, taker: int, other: int) -> None:
        if taker == other:
            return
        first, second = sorted((taker, other))
        raise make_error(
            "donated",
            f"arguments {self._names[first]} and {self._names[second]} are the same array, "
            f"which {'the first' if self._donated[first] else 'the second'} donates; expected "
            "a donated array once",
        )

    def wait(self) -> None:
        """Waits until all steps so far are done."""
        while self._under_way:
            self._await(self._under_way[0])
            self._under_way.popleft()

    # --- Settings and traces ---

    def _tell(self, what: str, *arguments: Any) -> None:
        """Calls a method of the workers' runtimes, before the next step."""
        if self._set.get(what) != arguments:
            self._set[what] = arguments
            self._workers.gather("set", self._number, what, *arguments)

    def set_checks(self, nans: bool, infs: bool) -> None:
        if (nans, infs) != (False, False) or "set_checks" in self._set:
            self._tell("set_checks", nans, infs)

    def set_tracing(self, enabled: bool) -> None:
        self._tell("set_tracing", enabled)

    def _ask(self, what: str, *arguments: Any) -> list[Any]:
        self.wait()
        row = (self._number, what, *arguments)
        return self._workers.call("ask", what, *[row] * self._workers.ranks)

    def trace(self) -> list[_core.TaskRun]:
        """The times of each rank are relative to its worker's start of the step."""
        return [run for runs in self._ask("trace") for run in runs]

    def measure(self, values: list[RemoteValue]) -> list[list[tuple[float, ...]]]:
        """The costs of each loop's stages; each worker has measured its own."""
        self.wait()
        self._check(values)
        numbers = [value.number for value in values]
        message = self._workers.send("measuring", "measure", self._number, numbers)
        message.wait()
        loops = zip(*message.answers, strict=True)
        return [
            [tuple(map(sum, zip(*stage, strict=True))) for stage in zip(*loop, strict=True)]
            for loop in loops
        ]

    def trace_peaks(self) -> list[int]:
        return [peaks[rank] for rank, peaks in enumerate(self._ask("trace_peaks"))]

    def trace_json(self, steps: int) -> str:
        """The workers' traces on one axis, by the clocks of their hosts."""
        return _core.join_traces(self._ask("trace_json", steps))
