"""Failure detection for the job that this process belongs to.

The library's threads detect the failure of another process at any time (`jaxpp/job.h`). This
module tells them how to reach each other, and when this process ends.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # its exit hook must run after the one here
import contextlib
import functools
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
import traceback
import warnings

import jax

from jaxpp import _core
from jaxpp.errors import JaxppError
from jaxpp.jax_internals.client import (
    after_initialize,
    coordination,
    coordination_address,
    coordination_process,
    coordination_size,
    has_joined_a_job,
    in_a_job,
    leave_job_at_once,
    watch_waits,
)

__all__ = ["own_address", "watch_job"]

_KEY = "jaxpp/job/"  # the address of process 0
_ENDED = "jaxpp/ended/"  # processes that ended before the address was known
# The name of the process in which a step failed, in the error that the others raise.
_ANOTHER_PROCESS = re.compile(r"process \d+ at ")
_JOIN_S = 2
_LOOK_S = 0.5
_STOP_S = 10


def own_address() -> str:
    """The address at which the job's other processes reach this one."""
    address = _core.option("JPP_ADDRESS")
    if address:
        return address
    host, port = coordination_address().rsplit(":", 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))
        return str(probe.getsockname()[0])


def _is_failing() -> bool:
    """Whether Python has printed an exception that ends the process."""
    return hasattr(sys, "last_value")


class _Watcher(threading.Thread):
    """A thread that joins the job and ends this process when the library reports a failure. It
    starts as soon as `jax.distributed.initialize()` has returned, because Python 3.12 and later
    cannot start threads while the interpreter exits."""

    def __init__(self) -> None:
        super().__init__(name="jaxpp job", daemon=True)
        self.last_words = ""  # the reason why this process failed
        self._joined = threading.Event()
        self._stopping = threading.Event()
        self._coordinator_is_gone = False
        # Whether JAX's coordinator still owes an answer, and since when.
        self._asking, self._asked_at = False, 0.0

    def run(self) -> None:
        threading.Thread(target=self._join, name="jaxpp join", daemon=True).start()
        limit = (_core.option_ms("JPP_PEER_TIMEOUT") or 10_000) / 1000
        looked = time.monotonic()
        while not self._joined.wait(_LOOK_S):
            now = time.monotonic()
            if now - looked > limit / 2:  # this process itself was suspended
                self._asked_at = now
            looked = now
            if self._asking and now - self._asked_at > limit:
                _end_process(
                    f"jaxpp: error: process 0 at {coordination_address()}: it has "
                    f"sent nothing for {limit:g} s: it was stopped, its machine "
                    "hangs, or the network to it is down"
                )
        text = None if self._coordinator_is_gone else _core.job_await_end()
        if text is not None:
            _end_process(text)

    def _join(self) -> None:
        try:
            self._join_or_say_why_not()
        except (JaxppError, OSError) as error:
            warnings.warn(
                f"the processes of the job cannot detect each other's failures: {error}",
                stacklevel=1,
            )
        except (RuntimeError, jax.errors.JaxRuntimeError):
            self._coordinator_is_gone = True
        else:
            watch_waits(_core.job_begin_wait)
        finally:
            self._joined.set()

    def await_join(self) -> None:
        """Waits briefly, so that the others receive this process's last message before it
        ends."""
        if in_a_job():
            self._joined.wait(_JOIN_S)

    def stop(self) -> None:
        """Stops the thread before the interpreter exits, which would kill it in
        the middle of an operation."""
        self._stopping.set()
        self.join(_STOP_S)

    def _join_or_say_why_not(self) -> None:
        while not self._join_job():
            if not self._stopping.wait(0.05):
                continue
            key = f"{_ENDED}{coordination_process()}"
            coordination().key_value_set_bytes(key, self.last_words.encode())
            return

    def _join_job(self) -> bool:
        """False if process 0 has not published its address yet."""
        me, count = coordination_process(), coordination_size()
        if me == 0 and count > 1:
            _listen(count)
        if me == 0:
            return True
        self._asked_at, self._asking = time.monotonic(), True
        found = coordination().key_value_dir_get_bytes(_KEY)
        self._asking = False
        if found:
            where = json.loads(found[0][1])
            token = bytes.fromhex(where["token"])
            _core.job_join(me, count, where["address"], where["port"], token)
        return bool(found)


def _end_process(text: str) -> None:
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(Exception):
            stream.flush()
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _listen(count: int) -> None:
    """Process 0: starts failure detection and publishes the address."""
    address, token = own_address(), secrets.token_bytes(32)
    port = _core.job_join(0, count, address, 0, token)
    where = {"address": address, "port": port, "token": token.hex()}
    coordination().key_value_set_bytes(f"{_KEY}0", json.dumps(where).encode())
    for key, text in coordination().key_value_dir_get_bytes(_ENDED):
        _core.job_note_absent(int(key.rpartition("/")[2]), bytes(text).decode())


@functools.cache
def _watcher() -> _Watcher:
    watcher = _Watcher()
    watcher.start()
    return watcher


def watch_job(stacklevel: int) -> None:
    """Starts failure detection. Warns if `jaxpp launch` started this process but it is in no
    job."""
    count = int(_core.option("JPP_NUM_PROCESSES") or 1)
    if in_a_job():
        _watcher()
    elif count > 1:
        warnings.warn(
            f"jaxpp launch started {count} processes, but this one has not joined the job and "
            "trains alone; call jax.distributed.initialize() before jax.devices()",
            stacklevel=stacklevel + 1,
        )


def _tell_of_failure() -> None:
    """Runs before the interpreter joins threads, because a thread of orbax may be waiting
    for this job."""
    if not _is_failing():
        return
    error = sys.last_value
    text = str(error)
    own = not isinstance(error, JaxppError) or not (
        error.code == "peer" or _ANOTHER_PROCESS.search(text)
    )
    if own:
        text = traceback.format_exception_only(error)[0].partition("\n")[0]
    if in_a_job() and _watcher.cache_info().currsize:
        _watcher().last_words = text
        _watcher().await_join()
    _core.job_fail(text, own)


def _leave() -> None:
    """Leaves the job at exit, so that no other process waits for this one.

    After a failure it also skips JAX's shutdown barrier, which a stopped process never reaches
    and which would time out only after minutes.
    """
    failed = _core.runtimes_close() or _is_failing()
    waits = in_a_job() and not failed
    if _watcher.cache_info().currsize:
        _watcher().await_join()
    try:
        if _core.job_leave(waits) and waits:
            jax.distributed.shutdown()  # all processes are alive, so this is quick
        elif waits:
            _core.job_check()
    except JaxppError as error:
        failed = True
        print(f"jaxpp: error: {error}", file=sys.stderr, flush=True)
        _core.job_fail(str(error), False)
    _core.job_end()
    if _watcher.cache_info().currsize:
        _watcher().stop()
    if failed and in_a_job():
        leave_job_at_once()


atexit.register(_leave)
threading._register_atexit(_tell_of_failure)  # type: ignore[attr-defined]
if has_joined_a_job():
    _watcher()
else:
    after_initialize(_watcher)
