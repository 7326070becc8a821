"""Detects that Ray itself no longer answers.

Steps do not use Ray: workers continue when their raylet or the control service has stopped,
until Ray kills their processes a minute later without an error. So each process probes Ray
periodically, in separate threads because a probe may never return.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["RayMonitor", "ask_gcs", "ask_raylet", "is_listening", "raylet_socket"]

_PERIOD = 3  # seconds between two probes
_SILENCE = 15  # seconds without an answer that count as a failure
_OBJECT_BYTES = 1 << 18  # too large for Ray to keep inside the process


def is_listening(path: str) -> bool:
    """Whether a running or stopped process owns the socket at that path."""
    with socket.socket(socket.AF_UNIX) as end:
        return end.connect_ex(path) == 0


def raylet_socket(ray: Any) -> str:
    """The path of the socket through which this process reaches its raylet's object store."""
    own = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["ObjectStoreSocketName"] for node in ray.nodes()}
    return str(nodes[own])


def ask_raylet(ray: Any, path: str, name: str) -> str | None:
    """Stores an object with this process's raylet, which owns that socket, and releases it.
    Returns a message if the raylet was killed."""
    # Ray terminates a process that uses a store after the store has ended.
    if not is_listening(path):
        return f"{name} was killed"
    ray.put(np.empty(_OBJECT_BYTES, np.uint8))
    return None


def ask_gcs(ray: Any, hosts: set[str]) -> str | None:
    """Asks the control service for the live nodes. Returns a message if a node is dead."""
    alive = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    gone = sorted(hosts - alive)
    if not gone:
        return None
    return f"Ray's node at {gone[0]} is dead: the raylet there was stopped or killed"


class RayMonitor:
    """Probes Ray until the process ends.

    Args:
      questions: probes by the name of the component. A probe returns a problem or None; an
        exception also counts as a problem.
    """

    def __init__(self, questions: Mapping[str, Callable[[], str | None]]) -> None:
        self._asked_at: dict[str, float] = {}  # by name: when the pending probe began
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
        """Stops the probes."""
        self._ended.set()

    def problem(self) -> str | None:
        """The problem with Ray, if one is known."""
        now = time.monotonic()
        for name, since in list(self._asked_at.items()):
            if now - since > _SILENCE:
                return (
                    f"{name} has not answered for {_SILENCE} s: it was stopped or killed, or "
                    "its host hangs"
                )
        return self._wrong
