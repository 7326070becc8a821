"""Lines between the controller and its workers, which carry requests and their answers.

A call of Ray passes several threads of both processes and takes about a millisecond of
processor time, as much as a step of a small model, and several with a batch. So Ray starts the
workers and looks after them, and what each step needs goes over a TCP connection of its own.

A worker listens at the address by which Ray knows its node, for its controller alone: both
prove that they know a token, which Ray has carried, before either reads anything else. Then a
frame is a head in JSON, which lists the arrays that follow it, and their bytes. The head has
the number of a request, and of its answer: answers come in any order.

The controller's ends have a thread that sends and one that hears, so that no call waits for a
worker which does not read, and Ctrl-C finds no frame half sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import queue
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["TROUBLE", "Answers", "Line", "Lines", "Listener", "connect", "frame_of"]

_PROOF_BYTES = 32
_PROOF_SECONDS = 5  # for a stranger to prove that it knows the token
_MOST_STRANGERS = 256  # who may do so at a time
_CONNECT_SECONDS = 60
TROUBLE = 0  # the number of what a worker says unasked
_HEAD = struct.Struct("<I")  # its length
_MOST_HEAD_BYTES = 2**30


Frame = list[bytes | memoryview]


def frame_of(head: Any, arrays: Sequence[np.ndarray] = ()) -> Frame:
    """Of arrays that are contiguous."""
    rows = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps((head, rows)).encode()
    contents = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return [_HEAD.pack(len(text)) + text, *contents]


class Line:
    """One end of a connection whose other end has proved that it knows the token."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, frame: Frame) -> None:
        """Any thread may."""
        with self._sending:
            for part in frame:
                self._end.sendall(part)

    def receive(self) -> tuple[Any, list[np.ndarray]]:
        """The head and the arrays of the next frame.

        Raises:
          OSError: the connection has ended.
        """
        (length,) = _HEAD.unpack(_read(self._end, _HEAD.size))
        if length > _MOST_HEAD_BYTES:
            raise ConnectionError(f"expected a head of at most 1 GiB, found {length} bytes")
        head, rows = json.loads(_read(self._end, length))
        return head, [self._array(*row) for row in rows]

    def _array(self, dtype: str, shape: Sequence[int]) -> np.ndarray:
        found = np.empty(math.prod(shape) * np.dtype(dtype).itemsize, np.uint8)
        _fill(self._end, found.data)
        return found.view(dtype).reshape(shape)

    def shut(self) -> None:
        """Ends the connection; whoever receives hears of it."""
        with contextlib.suppress(OSError):  # which may have ended before
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


def _read(end: socket.socket, length: int) -> bytearray:
    found = bytearray(length)
    _fill(end, memoryview(found))
    return found


def _fill(end: socket.socket, view: memoryview) -> None:
    while view:
        count = end.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]


# --- How a line is made ------------------------------------------------------------------


def _proof(token: bytes, name: bytes, nonce: bytes | bytearray) -> bytes:
    """What the end of that name sends to show that it knows the token."""
    return hmac.digest(token, name + nonce, hashlib.sha256)


class _Stranger:
    """A connection whose other end has not proved yet that it knows the token."""

    def __init__(self, end: socket.socket, token: bytes) -> None:
        self.end, self._token = end, token
        self.deadline = time.monotonic() + _PROOF_SECONDS
        self._nonce, self._heard = secrets.token_bytes(_PROOF_BYTES), bytearray()
        end.setblocking(False)
        end.sendall(self._nonce)

    def advance(self) -> bool:
        """Reads what has come, a nonce and then a proof; true: it is the right one.

        Raises:
          OSError: the connection has ended, or the proof is wrong.
        """
        had = len(self._heard)
        found = self.end.recv(2 * _PROOF_BYTES - had)
        if not found:
            raise ConnectionError("the connection has ended")
        self._heard += found
        if had < _PROOF_BYTES <= len(self._heard):
            self.end.sendall(_proof(self._token, b"worker", self._heard[:_PROOF_BYTES]))
        if len(self._heard) < 2 * _PROOF_BYTES:
            return False
        expected = _proof(self._token, b"controller", self._nonce)
        if not hmac.compare_digest(self._heard[_PROOF_BYTES:], expected):
            raise ConnectionError("the other end does not know the token")
        return True


class Listener:
    """The worker's end, until the controller has come."""

    def __init__(self, host: str, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server, self._token = socket.create_server((host, 0), family=family), token
        self.port: int = self._server.getsockname()[1]

    def accept(self) -> Line:
        """The controller's line. Strangers prove themselves side by side, each within its own
        time; of too many the oldest go."""
        strangers: list[_Stranger] = []  # oldest first
        with self._server, selectors.DefaultSelector() as selector:
            self._server.setblocking(False)
            selector.register(self._server, selectors.EVENT_READ)

            def drop(stranger: _Stranger) -> None:
                selector.unregister(stranger.end)
                strangers.remove(stranger)
                stranger.end.close()

            try:
                while True:
                    for key, _ in selector.select(_PROOF_SECONDS if strangers else None):
                        stranger: _Stranger | None = key.data
                        if stranger is None:
                            self._greet(selector, strangers)
                            continue
                        try:
                            if stranger.advance():
                                strangers.remove(stranger)
                                return Line(stranger.end)
                        except OSError:
                            drop(stranger)
                    late = len(strangers) - _MOST_STRANGERS
                    for stranger in strangers[:]:
                        if late > 0 or stranger.deadline < time.monotonic():
                            drop(stranger)
                        late -= 1
            finally:
                for stranger in strangers:
                    stranger.end.close()

    def _greet(self, selector: selectors.BaseSelector, strangers: list[_Stranger]) -> None:
        """A new connection, if it is still there."""
        with contextlib.suppress(OSError):
            end, _ = self._server.accept()
            try:
                strangers.append(_Stranger(end, self._token))
                selector.register(end, selectors.EVENT_READ, strangers[-1])
            except OSError:
                end.close()
                raise


def _prove(end: socket.socket, token: bytes) -> None:
    """The controller's part, to a listener; raises OSError if that does not know the token."""
    nonce = secrets.token_bytes(_PROOF_BYTES)
    end.sendall(nonce)
    end.sendall(_proof(token, b"controller", _read(end, _PROOF_BYTES)))
    proof = _read(end, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"worker", nonce)):
        raise ConnectionError("whoever listens there does not know the token of the mesh")


def connect(host: str, port: int, token: bytes) -> Line:
    """The controller's end.

    Raises:
      OSError: there is no such listener, or it does not know the token.
    """
    end = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    try:
        _prove(end, token)
    except BaseException:
        end.close()
        raise
    return Line(end)


# --- The controller's ends ---------------------------------------------------------------


class Answers:
    """What workers answer to one request."""

    def __init__(self, count: int) -> None:
        self.missing = count
        self.found: dict[int, tuple[Any, list[np.ndarray]]] = {}  # by worker


class Lines:
    """A line to each worker."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self._frames: queue.SimpleQueue[list[tuple[Line, Frame]]] = queue.SimpleQueue()
        self._heard = threading.Condition()
        self._numbers = 0  # of requests
        self._asked: dict[int, Answers] = {}
        self.ended: list[int] = []  # the workers whose line has, in the order in which it did
        self.troubles: dict[int, str] = {}  # by worker: what it says is wrong with its host
        for run in self._send_all, self._hear_all:
            threading.Thread(target=run, name="jaxpp lines", daemon=True).start()

    def send(self, requests: Mapping[int, tuple[Any, Sequence[np.ndarray]]]) -> Answers:
        """To each of these workers a request with arrays, which must not change any more."""
        answers = Answers(len(requests))
        with self._heard:
            self._numbers += 1
            frames = [
                (self._lines[worker], frame_of((self._numbers, request), arrays))
                for worker, (request, arrays) in requests.items()
            ]
            self._asked[self._numbers] = answers
            self._frames.put(frames)
        return answers

    def wait(self, answers: Answers, seconds: float) -> bool:
        """Until all have come, a line has ended, a worker is in trouble, or that long; whether
        all have come."""

        def is_over() -> bool:
            return not answers.missing or bool(self.ended) or bool(self.troubles)

        with self._heard:
            self._heard.wait_for(is_over, seconds)
            return not answers.missing

    def end(self) -> None:
        """Ends the threads, and with them the connections; does not wait."""
        self._frames.put([])
        for line in self._lines:
            line.shut()

    def _send_all(self) -> None:
        while frames := self._frames.get():
            for line, frame in frames:
                with contextlib.suppress(OSError):  # of a line that has ended, which is heard
                    line.send(frame)

    def _hear_all(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, line in enumerate(self._lines):
                selector.register(line, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
                        self._lines[key.data].close()

    def _hear(self, worker: int) -> bool:
        """One answer of a worker; false: its line has ended."""
        try:
            (number, answer), arrays = self._lines[worker].receive()
        except (OSError, ValueError):
            with self._heard:
                self.ended.append(worker)
                self._heard.notify_all()
            return False
        with self._heard:
            if number == TROUBLE:
                self.troubles[worker] = answer
                self._heard.notify_all()
                return True
            answers = self._asked[number]
            answers.found[worker] = (answer, arrays)
            answers.missing -= 1
            if not answers.missing:
                del self._asked[number]
                self._heard.notify_all()
        return True
