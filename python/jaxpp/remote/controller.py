"""The controller's side of a mesh of workers: sends messages and collects answers.

A message lists actions for the workers, in order: store shards of arrays, delete arrays, start
a step. Workers answer when that step is done. Actions are batched with the next step, so that a
step costs one message per worker.

A thread that waits for a message also monitors the workers. A worker that has died or does not
answer breaks the mesh: the others are ended too, and all later operations raise the same error.
"""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from jaxpp import _core
from jaxpp.client.devices import StepDevices
from jaxpp.errors import make_error
from jaxpp.remote.cluster import RAYLET, Cluster
from jaxpp.remote.connections import Answers
from jaxpp.remote.messages import (
    Act,
    Action,
    Delete,
    Failure,
    Read,
    Upload,
    decode_answer,
    encode,
    pack,
)
from jaxpp.remote.worker import Worker

__all__ = ["Message", "Numbered", "Workers"]

_PATIENCE = 0.2  # fraction of the timeout after which a silent worker is probed
_MOST_MESSAGES = 32  # in flight
_GRACE = 2  # seconds for the others to report, when one has died


class Numbered:
    """An array that a message creates on workers."""

    __slots__ = ("__weakref__", "maker", "number")

    def __init__(self, number: int, maker: Message | None) -> None:
        self.number = number
        self.maker = maker  # None: the next message


class Message:
    """A message to all workers, until they have executed it.

    Args:
      asked: the answers to it.
      what: its name in errors.
      on_failure: called once if it fails.
    """

    def __init__(
        self, workers: Workers, asked: Answers, what: str, on_failure: Callable[[], None]
    ) -> None:
        self._workers, self.what, self._on_failure = workers, what, on_failure
        self._asked: Answers | None = asked  # None: all have arrived
        self._failure: Failure | None = None
        self.answers: list[Any] = []  # time at which all had arrived

    def wait(self) -> None:
        """Waits until all workers have executed it. Raises the error if it failed."""
        self.settle()
        if self._failure is not None:
            raise make_error(*self._failure)

    def is_done(self) -> bool:
        asked = self._asked
        return asked is None or self._workers.are_there(asked)

    def settle(self) -> None:
        """Waits until all workers have answered."""
        asked = self._asked
        if asked is None:
            return
        self.answers = self._workers.await_answers(asked, self.what)
        self._failure = self._workers.first_failure(self.answers, self.what)
        self._asked = None
        if self._failure is not None:
            self._on_failure()

    def give_up(self) -> None:
        """Marks the message as failed because the mesh is broken, unless it has been
        answered."""
        if self._asked is not None:
            self._on_failure()

    def raise_if_known(self) -> None:
        """The failure, if one is known already."""
        if self._failure is not None:
            raise make_error(*self._failure)


class Workers:
    """The workers of a mesh, one per rank.

    Args:
      ranks, per_rank: the number of workers, and of devices per worker.
      make_devices: makes the workers' devices, given these workers and a plugin's path,
        platform and version.
    """

    def __init__(
        self,
        cluster: Cluster,
        ranks: int,
        per_rank: int,
        make_devices: Callable[[Workers, str | None, str, str], StepDevices],
    ) -> None:
        self.ranks, self.per_rank, self._make_devices = ranks, per_rank, make_devices
        self.broken: Failure | None = None
        # Unreferenced arrays and plans. Garbage collection may append at any time.
        self.dropped: collections.deque[int] = collections.deque()
        self._cluster = cluster
        # Seconds after which a worker that does not answer counts as dead.
        self._timeout = (_core.option_ms("JPP_PEER_TIMEOUT") or 10_000) / 1000
        self._lock = threading.RLock()  # guards the fields below
        self._gathered: list[Action] = []  # for all ranks
        self._uploads: list[list[Upload]] = [[] for _ in range(ranks)]
        self._uploaded: list[weakref.ref[Numbered]] = []  # sent with the next message
        self._numbers = 0  # ids of arrays and plans
        self._under_way: collections.deque[Message] = collections.deque()
        self._devices: dict[str | None, StepDevices] = {}

    @property
    def processes(self) -> list[tuple[str, int]]:
        """The host and the process id of each."""
        return [(worker.host, worker.process) for worker in self._cluster.identities]

    def shutdown(self) -> None:
        """Ends the workers. Arrays and steps of the mesh become unusable."""
        if self.broken is None:
            self.broken = Failure(
                "peer",
                "the workers of this mesh were shut down; create the mesh again and continue "
                "from a checkpoint",
            )
        self._cluster.end()

    def devices(self, plugin: str | None) -> StepDevices:
        """The workers' devices; each worker opens the plugin."""
        if plugin not in self._devices:
            found = self.call(Worker.open, "the plugin", *[(plugin,)] * self.ranks)
            self._devices[plugin] = self._make_devices(self, plugin, *found[0])
        return self._devices[plugin]

    def start_trace(self, folder: str) -> None:
        """Begins a profile of each worker, in a folder of its own."""
        own = ((os.path.join(folder, f"process-{rank}"),) for rank in range(self.ranks))
        self.call(Worker.profile, "start_trace", *own)

    def stop_trace(self) -> None:
        """Ends the profiles."""
        self.call(Worker.profile, "stop_trace", *[(None,)] * self.ranks)

    def numbers(self, count: int) -> int:
        """Allocates `count` ids and returns the first."""
        with self._lock:
            first = self._numbers + 1
            self._numbers += count
            return first

    # --- Messages ---

    def gather(self, action: Action) -> None:
        """Adds an action to the next message."""
        with self._lock:
            self._gathered.append(action)

    def upload(self, value: Numbered, by_rank: dict[int, Upload]) -> None:
        """Uploads an array's shards with the next message."""
        with self._lock:
            self._uploaded.append(weakref.ref(value))
            for rank, upload in by_rank.items():
                self._uploads[rank].append(upload)

    def send(
        self,
        what: str,
        action: Action | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> Message:
        """Sends the batched actions and then `action`, which goes to all ranks."""
        self.raise_if_broken()
        with self._lock:
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
            first = [Delete(dropped)] if dropped else []
            actions = [*first, *self._gathered, *([action] if action is not None else [])]
            packed = [pack(uploads) for uploads in self._uploads]
            self._gathered, self._uploads = [], [[] for _ in range(self.ranks)]
            requests = {
                rank: (encode(Act(actions, rows)), shards)
                for rank, (rows, shards) in enumerate(packed)
            }
            asked = self._cluster.connections.send(requests)
            message = Message(self, asked, what, on_failure)
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

    def message_of(self, value: Numbered) -> Message:
        """The message that creates the array."""
        if value.maker is None:
            self.flush()
        assert value.maker is not None
        return value.maker

    def delete(self, number: int) -> None:
        """Deletes an array immediately."""
        if self.broken is None:
            self.gather(Delete([number]))
            self.flush()

    def read(self, value: Numbered, rank: int, device: int, size: int) -> Any:
        """The bytes of a shard."""
        message = self.message_of(value)  # send it first, so that the worker has the array
        self.raise_if_broken()
        request = encode(Read(value.number, device, size))
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

    def _found(self, rank: int, what: str, row: list[Any], arrays: list[np.ndarray]) -> Any:
        answer = decode_answer(row)
        if answer.raised is not None:
            self._end(rank, what, f"the worker raised {answer.raised}")
        if answer.failure is not None:
            return answer.failure
        return arrays[0] if arrays else answer.found

    # --- Replies through Ray ---

    def call(
        self, method: Callable[..., Any], what: str, *arguments: tuple[Any, ...]
    ) -> list[Any]:
        """Calls a method of `Worker` on each worker with its arguments and returns the
        results."""
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
            self._look_for_silence(what)  # another process could not reach this one
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
        """Breaks the whole mesh and raises the error."""
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
        with self._lock:
            for message in self._under_way:
                message.give_up()
        raise make_error(*self.broken)

    def raise_if_broken(self) -> None:
        if self.broken is None and (problem := self._cluster.problem()) is not None:
            self._end_because(problem)
        if self.broken is not None:
            raise make_error(*self.broken)
