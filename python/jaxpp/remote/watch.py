"""Notices that Ray itself no longer answers.

Steps need nothing of Ray: workers whose raylet or whose control service was stopped go on,
until Ray ends their processes a minute later, without an error. So each process asks Ray
something small now and then, in threads of its own, as such a call may never come back.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["Watch", "ask_gcs", "ask_raylet", "is_listening", "raylet_socket"]

_PERIOD = 3  # seconds between two questions
_SILENCE = 15  # seconds after which who does not answer counts as gone
_OBJECT_BYTES = 1 << 18  # more than Ray keeps within a process


def is_listening(path: str) -> bool:
    """Whether a process, stopped or not, has the socket of that path."""
    with socket.socket(socket.AF_UNIX) as end:
        return end.connect_ex(path) == 0


def raylet_socket(ray: Any) -> str:
    """The path of the socket through which this process reaches its raylet's object store."""
    own = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["ObjectStoreSocketName"] for node in ray.nodes()}
    return str(nodes[own])


def ask_raylet(ray: Any, path: str, name: str) -> str | None:
    """Returns when the raylet of this process, which has that socket, has stored an object and
    let it go; says so if a raylet of that name was killed."""
    if not is_listening(path):  # Ray ends a process that talks to a store which has gone
        return f"{name} was killed"
    ray.put(np.empty(_OBJECT_BYTES, np.uint8))
    return None


def ask_gcs(ray: Any, hosts: set[str]) -> str | None:
    """Returns when the control service has said which nodes live; names a host without one."""
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    gone = sorted(hosts - alive)
    if not gone:
        return None
    return f"Ray's node at {gone[0]} is dead: the raylet there was stopped or killed"


class Watch:
    """Asks until the process ends.

    Args:
      questions: by the name of who is asked. A question returns what is wrong, or None; an
        exception says what is wrong, too.
    """

    def __init__(self, questions: Mapping[str, Callable[[], str | None]]) -> None:
        self._asked_at: dict[str, float] = {}  # by name: since when an answer is awaited
        self._wrong: str | None = None
        self._ended = threading.Event()
        for name, question in questions.items():
            thread = threading.Thread(
                target=self._ask, args=(name, question), name="jaxpp watch", daemon=True
            )
            thread.start()

    def _ask(self, name: str, question: Callable[[], str | None]) -> None:
        while not self._ended.is_set():
            self._asked_at[name] = time.monotonic()
            try:
                wrong = question()
            except Exception as error:
                wrong = f"{name} failed: {type(error).__name__}: {error}"
            del self._asked_at[name]
            if wrong is not None:
                self._wrong = self._wrong or wrong
                return
            self._ended.wait(_PERIOD)

    def end(self) -> None:
        """Asks no more."""
        self._ended.set()

    def trouble(self) -> str | None:
        """What is wrong with Ray, as far as that is known."""
        now = time.monotonic()
        for name, since in list(self._asked_at.items()):
            if now - since > _SILENCE:
                return (
                    f"{name} has not answered for {_SILENCE} s: it was stopped or killed, or "
                    "its host hangs"
                )
        return self._wrong
