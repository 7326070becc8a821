"""Connections between a controller and its workers: frames arrive unchanged, peers prove
the token, and no call waits for a connection that has ended.

Time limits exist only to make hangs fail.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxpp.remote import connections
from jaxpp.remote.connections import Connection, Connections, Listener, connect, frame_of
from jaxpp.remote.messages import Upload, pack, unpack

LIMIT = 60  # seconds
NAME = "jaxpp connections"  # the threads' name
HOST = "127.0.0.1"
TOKEN = secrets.token_bytes(32)


def pair() -> tuple[Connection, Connection]:
    """The controller's and the worker's end of a connection."""
    listener = Listener(HOST, TOKEN)
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(listener.accept)
        return connect(HOST, listener.port, TOKEN), accepted.result(LIMIT)


def same(expected: np.ndarray, found: np.ndarray) -> bool:
    return (
        expected.shape == found.shape
        and expected.dtype.itemsize == found.dtype.itemsize
        and expected.tobytes() == found.tobytes()
    )


# --- Frames -------------------------------------------------------------------------------


def any_array(draw: random.Random) -> np.ndarray:
    dtype = draw.choice([np.float32, np.int8, bool, np.complex64, ml_dtypes.bfloat16, "S3"])
    shape = draw.choice([(), (0,), (0, 4), (1,), (3, 5), (1000,), (64, 64, 50)])
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(draw.randbytes(size), dtype).reshape(shape)


@pytest.mark.parametrize("seed", range(5))
def test_frames_arrive_as_they_were_sent(seed: int) -> None:
    draw = random.Random(seed)
    frames = [
        ([i, "text \u00e9", None, {"a": 0.1 + i}], [any_array(draw) for _ in range(i % 4)])
        for i in range(20)
    ]
    here, there = pair()
    with ThreadPoolExecutor() as threads:
        threads.submit(lambda: [here.send(frame_of(*frame)) for frame in frames])
        for head, arrays in frames:
            found_head, found = there.receive()
            assert found_head == head
            assert all(map(same, arrays, found)) and len(arrays) == len(found)


def test_frames_of_several_threads_stay_whole() -> None:
    here, there = pair()
    shard = np.arange(50_000, dtype=np.int32)
    with ThreadPoolExecutor() as threads:
        for i in range(16):
            threads.submit(here.send, frame_of(i, [shard + i]))
        found = dict(there.receive() for _ in range(16))
    assert sorted(found) == list(range(16))
    assert all(same(shard + i, arrays[0]) for i, arrays in found.items())


def test_uploads_are_packed() -> None:
    given = [
        Upload(
            4, None, "f32", "device", [np.ones(3, np.float32), np.zeros((2, 2), np.float32)]
        ),
        Upload(5, "plugin", "u16", "pinned_host", [np.array(7, np.uint16)]),
        Upload(6, None, "f32", "device", []),
    ]
    table, shards = pack(given)
    assert list(unpack(table, shards)) == given
    assert (pack([]), list(unpack([], []))) == (([], []), [])


@pytest.mark.parametrize("seed", range(5))
def test_a_frame_that_is_cut_is_an_error(seed: int) -> None:
    draw = random.Random(seed)
    here, there = pair()
    frame = b"".join(map(bytes, frame_of([1], [np.arange(1000)])))
    here.send([frame[: draw.randrange(len(frame))]])
    here.shut()
    with pytest.raises(OSError, match="the connection has ended"):
        there.receive()


def test_a_head_that_is_too_long_is_refused_unread() -> None:
    here, there = pair()
    here.send([b"\xff" * 4])
    with pytest.raises(OSError, match="expected a head of at most 1 GiB, found 4294967295"):
        there.receive()


# --- Authentication -----------------------------------------------------------------------


def silent(end: socket.socket) -> None:
    assert len(end.recv(100)) == 32
    assert end.recv(100) == b""  # the listener closes the connection


def leaves(end: socket.socket) -> None:
    end.close()


def garbage(end: socket.socket) -> None:
    end.sendall(b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n" + b"x" * 100)


def echo(end: socket.socket) -> None:
    """Echoes what it receives: the listener's own proof must not be accepted as the peer's."""
    for _ in range(2):
        end.sendall(end.recv(32, socket.MSG_WAITALL))
    assert end.recv(100) == b""


def other_token(end: socket.socket) -> None:
    with pytest.raises(OSError, match="does not know the token"):
        connections._prove(end, b"x" * 32)


@pytest.mark.parametrize("intruder", [silent, leaves, garbage, echo, other_token])
def test_who_does_not_know_the_token_is_let_go(
    intruder: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PROOF_SECONDS", 1)
    listener = Listener(HOST, TOKEN)
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(listener.accept)
        with socket.create_connection((HOST, listener.port), timeout=LIMIT) as end:
            intruder(end)
        here, there = connect(HOST, listener.port, TOKEN), accepted.result(LIMIT)
    here.send(frame_of("hello"))
    assert there.receive() == ("hello", [])


def test_connections_that_stay_silent_are_not_in_the_way() -> None:
    """The listener handles fewer handshakes at a time than there are silent connections, but
    the controller connects before any of them times out."""
    listener = Listener(HOST, TOKEN)
    with contextlib.ExitStack() as opened, ThreadPoolExecutor() as threads:
        accepted = threads.submit(listener.accept)
        for _ in range(connections._MOST_HANDSHAKES + 20):
            stranger = socket.create_connection((HOST, listener.port), timeout=LIMIT)
            opened.enter_context(stranger)
        start = time.monotonic()
        here, there = connect(HOST, listener.port, TOKEN), accepted.result(LIMIT)
        assert time.monotonic() - start < connections._PROOF_SECONDS
    here.send(frame_of("hello"))
    assert there.receive() == ("hello", [])


def test_a_listener_that_does_not_know_the_token_is_an_error() -> None:
    listener = Listener(HOST, b"x" * 32)
    threading.Thread(target=listener.accept, daemon=True).start()
    with pytest.raises(OSError, match="does not know the token|has ended"):
        connect(HOST, listener.port, TOKEN)


def test_a_listener_has_one_controller_at_its_own_address_only() -> None:
    listener = Listener(HOST, TOKEN)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", listener.port), timeout=LIMIT)
    with ThreadPoolExecutor() as threads:
        accepted = threads.submit(listener.accept)
        connect(HOST, listener.port, TOKEN)
        accepted.result(LIMIT)
    with pytest.raises(OSError, match="refused"):
        connect(HOST, listener.port, TOKEN)


# --- The controller's ends ----------------------------------------------------------------


def test_answers_come_in_any_order() -> None:
    pairs = [pair() for _ in range(3)]
    ours = Connections([here for here, _ in pairs])
    shard = np.arange(10)
    asked = [ours.send({worker: (["do", k], [shard]) for worker in range(3)}) for k in range(4)]
    one = ours.send({1: (["read"], [])})
    heard: list[Any] = [[there.receive()[0] for _ in range(4)] for _, there in pairs]
    number, request = pairs[1][1].receive()[0]
    assert request == ["read"]
    pairs[1][1].send(frame_of((number, "read"), [shard]))
    assert ours.wait(one, LIMIT)
    assert one.found[1][0] == "read" and same(shard, one.found[1][1][0])
    assert not ours.wait(asked[0], 0)
    for worker, (_, there) in enumerate(pairs):
        for number, (what, k) in reversed(heard[worker]):
            there.send(frame_of((number, [what, k, worker])))
    for k, answers in enumerate(asked):
        assert ours.wait(answers, LIMIT)
        assert {w: answer for w, (answer, _) in answers.found.items()} == {
            w: ["do", k, w] for w in range(3)
        }
    ours.end()


@pytest.mark.parametrize("last", [b"", b"\x05\x00\x00\x00wrong", b"\x05"])
def test_nobody_waits_for_a_line_that_has_ended(last: bytes) -> None:
    (first, _), (second, there) = pair(), pair()
    ours = Connections([first, second])
    answers = ours.send({0: (["do"], []), 1: (["do"], [])})
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(ours.wait, answers, LIMIT)
        there.send([last])
        there.shut()
        assert waiting.result(LIMIT) is False
    assert ours.ended == [1]
    ours.send({0: (["more"], []), 1: (["more"], [])})  # does not raise
    ours.end()


def test_no_call_waits_for_a_worker_that_does_not_read() -> None:
    here, _there = pair()
    ours = Connections([here])
    answers = [ours.send({0: (["do"], [np.zeros(2**22, np.uint8)])}) for _ in range(8)]
    assert not ours.wait(answers[-1], 0.1)
    ours.end()
    assert not ours.wait(answers[0], LIMIT)


def test_its_threads_end_with_it() -> None:
    before = set(threading.enumerate())
    pairs = [pair() for _ in range(2)]
    ours = Connections([here for here, _ in pairs])
    mine = [t for t in threading.enumerate() if t not in before and t.name == NAME]
    assert len(mine) == 2
    ours.end()
    for thread in mine:
        thread.join(LIMIT)
        assert not thread.is_alive()
