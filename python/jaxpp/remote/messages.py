"""The messages between the controller and its workers, and how they travel: each as a JSON list
of the name of its class and its fields."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "Act",
    "Action",
    "Answer",
    "Delete",
    "Failure",
    "Measure",
    "Read",
    "Request",
    "SetChecks",
    "SetTracing",
    "Step",
    "Upload",
    "decode_answer",
    "decode_request",
    "encode",
    "pack",
    "unpack",
]


class Failure(NamedTuple):
    """An error to send: pickling an exception would drop its code."""

    code: str
    text: str


# --- Actions, which a worker executes in order --------------------------------------------


class Delete(NamedTuple):
    """Deletes arrays and plans, which share one range of ids."""

    numbers: list[int]


class SetChecks(NamedTuple):
    """Sets which results the steps of a plan check for NaNs and infinities."""

    plan: int
    nans: bool
    infs: bool


class SetTracing(NamedTuple):
    """Starts or ends the tracing of a plan's steps."""

    plan: int
    enabled: bool


class Step(NamedTuple):
    """Starts a step of a plan, whose results get consecutive ids."""

    plan: int
    arguments: list[int]
    first_result: int
    results: int


class Measure(NamedTuple):
    """Measures the stages of a plan."""

    plan: int
    arguments: list[int]


Action = Delete | SetChecks | SetTracing | Step | Measure
_ACTIONS: dict[str, type[Action]] = {
    one.__name__: one for one in (Delete, SetChecks, SetTracing, Step, Measure)
}

# --- Requests and answers -----------------------------------------------------------------


class Act(NamedTuple):
    """Stores the arrays that follow it, by the rows of `pack`, and executes actions. The answer
    comes when the last action is done."""

    actions: list[Action]
    uploads: list[tuple[Any, ...]]


class Read(NamedTuple):
    """Reads a shard of an array as `size` bytes."""

    array: int
    device: int
    size: int


Request = Act | Read


class Answer(NamedTuple):
    """The outcome of a request, followed by the array if one was read."""

    found: Any = None
    failure: Failure | None = None  # an expected failure, such as a step's
    raised: str | None = None  # a bug in the worker


def encode(request: Request) -> list[Any]:
    """Encodes a request for JSON."""
    if isinstance(request, Read):
        return ["Read", *request]
    actions = [(type(action).__name__, *action) for action in request.actions]
    return ["Act", actions, request.uploads]


def decode_request(row: list[Any]) -> Request:
    """The inverse of `encode`."""
    name, *fields = row
    if name == "Read":
        return Read(*fields)
    actions, uploads = fields
    return Act([_ACTIONS[name](*fields) for name, *fields in actions], uploads)


def decode_answer(row: Sequence[Any]) -> Answer:
    """Decodes an answer that was sent as JSON."""
    found, failure, raised = row
    return Answer(found, failure and Failure(*failure), raised)


# --- Shards -------------------------------------------------------------------------------


class Upload(NamedTuple):
    """An array's shards on the devices of one rank."""

    number: int  # id of the array
    plugin: str | None
    dtype: str
    memory: str  # of the devices
    shards: list[np.ndarray]


def pack(uploads: Sequence[Upload]) -> tuple[list[tuple[Any, ...]], list[np.ndarray]]:
    """The rows of the uploads, and all their shards."""
    rows = [(u.number, u.plugin, u.dtype, u.memory, len(u.shards)) for u in uploads]
    return rows, [shard for u in uploads for shard in u.shards]


def unpack(rows: Iterable[Sequence[Any]], shards: Iterable[np.ndarray]) -> Iterator[Upload]:
    """The inverse of `pack`."""
    rest = iter(shards)
    for number, plugin, dtype, memory, count in rows:
        yield Upload(number, plugin, dtype, memory, [next(rest) for _ in range(count)])
