"""TCP connections between the controller and its workers for requests and answers.

A call through Ray crosses several threads of both processes and takes about a millisecond of
processor time, as much as a step of a small model, and several with a batch. So Ray only starts
and monitors the workers; the traffic of steps uses separate TCP connections.

A worker listens for its controller at the address by which Ray knows its node. Both prove
knowledge of a token, exchanged through Ray, before either reads anything else. A frame is a
JSON head, which lists the arrays that follow, and the bytes of the arrays. The head has the
number of the request; answers repeat it and may arrive in any order.

The controller has one sending and one receiving thread, so that no call blocks on a worker that
does not read, and Ctrl-C cannot interrupt a frame.
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

__all__ = ["PROBLEM", "Answers", "Connection", "Connections", "Listener", "connect", "frame_of"]

_PROOF_BYTES = 32
_PROOF_SECONDS = 5  # time limit for an unauthenticated connection to prove its token
_MOST_HANDSHAKES = 256  # unauthenticated connections at a time
_CONNECT_SECONDS = 60
PROBLEM = 0  # the request number of unsolicited reports
_HEAD = struct.Struct("<I")  # length of the head
_MOST_HEAD_BYTES = 2**30


Frame = list[bytes | memoryview]


def frame_of(head: Any, arrays: Sequence[np.ndarray] = ()) -> Frame:
    """The frame of a head and contiguous arrays."""
    rows = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps((head, rows)).encode()
    contents = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return [_HEAD.pack(len(text)) + text, *contents]


class Connection:
    """One end of an authenticated connection."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._sending = threading.Lock()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, frame: Frame) -> None:
        """Sends a frame. Any thread may call it."""
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
        """Closes the connection, which wakes the receiver."""
        with contextlib.suppress(OSError):  # it may have ended already
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


# --- Handshake ------------------------------------------------------------------


def _proof(token: bytes, name: bytes, nonce: bytes | bytearray) -> bytes:
    """The proof that the named end sends to show that it knows the token."""
    return hmac.digest(token, name + nonce, hashlib.sha256)


class _Handshake:
    """A connection that is not authenticated yet."""

    def __init__(self, end: socket.socket, token: bytes) -> None:
        self.end, self._token = end, token
        self.deadline = time.monotonic() + _PROOF_SECONDS
        self._nonce, self._heard = secrets.token_bytes(_PROOF_BYTES), bytearray()
        end.setblocking(False)
        end.sendall(self._nonce)

    def advance(self) -> bool:
        """Reads available bytes, a nonce and then a proof; True once the proof is valid.

        Raises:
          OSError: the connection has ended, or the proof is invalid.
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
            raise ConnectionError("the peer does not know the token")
        return True


class Listener:
    """The worker's listening socket, until the controller has connected."""

    def __init__(self, host: str, token: bytes) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server, self._token = socket.create_server((host, 0), family=family), token
        self.port: int = self._server.getsockname()[1]

    def accept(self) -> Connection:
        """Waits for the controller's connection. Peers authenticate concurrently, each with its
        own deadline; if there are too many, the oldest are dropped."""
        handshakes: list[_Handshake] = []  # oldest first
        with self._server, selectors.DefaultSelector() as selector:
            self._server.setblocking(False)
            selector.register(self._server, selectors.EVENT_READ)

            def drop(handshake: _Handshake) -> None:
                selector.unregister(handshake.end)
                handshakes.remove(handshake)
                handshake.end.close()

            try:
                while True:
                    for key, _ in selector.select(_PROOF_SECONDS if handshakes else None):
                        handshake: _Handshake | None = key.data
                        if handshake is None:
                            self._shake_hands(selector, handshakes)
                            continue
                        try:
                            if handshake.advance():
                                handshakes.remove(handshake)
                                return Connection(handshake.end)
                        except OSError:
                            drop(handshake)
                    late = len(handshakes) - _MOST_HANDSHAKES
                    for handshake in handshakes[:]:
                        if late > 0 or handshake.deadline < time.monotonic():
                            drop(handshake)
                        late -= 1
            finally:
                for handshake in handshakes:
                    handshake.end.close()

    def _shake_hands(
        self, selector: selectors.BaseSelector, handshakes: list[_Handshake]
    ) -> None:
        """A new connection, unless the peer has closed it."""
        with contextlib.suppress(OSError):
            end, _ = self._server.accept()
            try:
                handshakes.append(_Handshake(end, self._token))
                selector.register(end, selectors.EVENT_READ, handshakes[-1])
            except OSError:
                end.close()
                raise


def _prove(end: socket.socket, token: bytes) -> None:
    """The controller's handshake; raises OSError if the listener does not know the token."""
    nonce = secrets.token_bytes(_PROOF_BYTES)
    end.sendall(nonce)
    end.sendall(_proof(token, b"controller", _read(end, _PROOF_BYTES)))
    proof = _read(end, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(token, b"worker", nonce)):
        raise ConnectionError("the listener does not know the token of the mesh")


def connect(host: str, port: int, token: bytes) -> Connection:
    """Connects to a worker as the controller.

    Raises:
      OSError: the listener is unreachable or does not know the token.
    """
    end = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    try:
        _prove(end, token)
    except BaseException:
        end.close()
        raise
    return Connection(end)


# --- The controller's connections
# ---------------------------------------------------------------


class Answers:
    """The answers of workers to one request."""

    def __init__(self, count: int) -> None:
        self.missing = count
        self.found: dict[int, tuple[Any, list[np.ndarray]]] = {}  # by worker


class Connections:
    """The connections to all workers."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections
        self._frames: queue.SimpleQueue[list[tuple[Connection, Frame]]] = queue.SimpleQueue()
        self._heard = threading.Condition()
        self._numbers = 0  # of requests
        self._asked: dict[int, Answers] = {}
        self.ended: list[int] = []  # workers whose connection has ended, in that order
        self.problems: dict[
            int, str
        ] = {}  # by worker: the problem that it reports about its host
        for run in self._send_all, self._receive_answers:
            threading.Thread(target=run, name="jaxpp connections", daemon=True).start()

    def send(self, requests: Mapping[int, tuple[Any, Sequence[np.ndarray]]]) -> Answers:
        """Sends each of these workers a request with arrays, which must not change
        afterwards."""
        answers = Answers(len(requests))
        with self._heard:
            self._numbers += 1
            frames = [
                (self._connections[worker], frame_of((self._numbers, request), arrays))
                for worker, (request, arrays) in requests.items()
            ]
            self._asked[self._numbers] = answers
            self._frames.put(frames)
        return answers

    def wait(self, answers: Answers, seconds: float) -> bool:
        """Waits until all answers have arrived, a connection has ended, a worker reports a
        problem, or the timeout. Returns whether all have arrived."""

        def is_over() -> bool:
            return not answers.missing or bool(self.ended) or bool(self.problems)

        with self._heard:
            self._heard.wait_for(is_over, seconds)
            return not answers.missing

    def end(self) -> None:
        """Ends the threads and closes the connections, without waiting."""
        self._frames.put([])
        for connection in self._connections:
            connection.shut()

    def _send_all(self) -> None:
        while frames := self._frames.get():
            for connection, frame in frames:
                with contextlib.suppress(OSError):  # the receiver sees the ended connection
                    connection.send(frame)

    def _receive_answers(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, connection in enumerate(self._connections):
                selector.register(connection, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._receive_answer(key.data):
                        selector.unregister(key.fileobj)
                        self._connections[key.data].close()

    def _receive_answer(self, worker: int) -> bool:
        """Receives one answer of a worker; False if its connection has ended."""
        try:
            (number, answer), arrays = self._connections[worker].receive()
        except (OSError, ValueError, MemoryError):
            with self._heard:
                self.ended.append(worker)
                self._heard.notify_all()
            return False
        with self._heard:
            if number == PROBLEM:
                self.problems[worker] = answer
                self._heard.notify_all()
                return True
            answers = self._asked[number]
            answers.found[worker] = (answer, arrays)
            answers.missing -= 1
            if not answers.missing:
                del self._asked[number]
                self._heard.notify_all()
        return True
