"""The job that this process is in: watched from its start to its end.

The library's own threads notice when another process fails, whatever this one is doing
(`jaxpp/job.h`). Here they learn how the processes reach each other, and when this one ends.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401  # whose hook is to run after the one here
import contextlib
import functools
import json
import os
import secrets
import socket
import sys
import threading
import traceback
import warnings

import jax

from jaxpp import _core
from jaxpp.errors import JaxppError
from jaxpp.jax_internals.client import (
    coordination,
    coordination_address,
    coordination_process,
    coordination_size,
    has_joined_a_job,
    in_a_job,
    leave_job_at_once,
)

__all__ = ["own_address", "watch_job"]

_KEY = "jaxpp/job/"  # where process 0 is reached
_ENDED = "jaxpp/ended/"  # processes that ended before it was known
_JOIN_S = 2
_STOP_S = 10


def own_address() -> str:
    """The address by which other processes of the job reach this one."""
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
    """Joins the job once `jax.distributed.initialize()` was called, and ends this process
    when the library says that its time is over. It starts early: from Python 3.12 on, no
    thread can be started while the interpreter exits."""

    def __init__(self) -> None:
        super().__init__(name="jaxpp job", daemon=True)
        self.ready = threading.Event()  # initialize() has returned
        self.last_words = ""  # why this process failed
        self._joined = threading.Event()
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            self._join_or_say_why_not()
        except (JaxppError, OSError) as error:
            warnings.warn(
                f"the processes of the job do not watch each other: {error}", stacklevel=1
            )
        except (RuntimeError, jax.errors.JaxRuntimeError):  # the coordinator is gone
            return
        finally:
            self._joined.set()
        text = _core.job_await_end()
        if text is not None:
            _end_process(text)

    def await_join(self) -> None:
        """For a moment: others are to hear from this process before it ends."""
        if in_a_job():
            self.ready.set()
            self._joined.wait(_JOIN_S)

    def stop(self) -> None:
        """Before the interpreter ends, which ends threads in the middle of their work."""
        self._stopping.set()
        self.join(_STOP_S)

    def _join_or_say_why_not(self) -> None:
        while not ((self.ready.is_set() or has_joined_a_job()) and _join_job()):
            if not self._stopping.wait(0.05):
                continue
            if in_a_job():
                key = f"{_ENDED}{coordination_process()}"
                coordination().key_value_set_bytes(key, self.last_words.encode())
            return


def _end_process(text: str) -> None:
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(Exception):
            stream.flush()
    if text:
        print(text, file=sys.stderr, flush=True)
    os._exit(1)


def _join_job() -> bool:
    """False: process 0 has not said yet where the others reach it."""
    me, count = coordination_process(), coordination_size()
    if count == 1:
        return True
    if me == 0:
        address, token = own_address(), secrets.token_bytes(32)
        port = _core.job_join(me, count, address, 0, token)
        where = {"address": address, "port": port, "token": token.hex()}
        coordination().key_value_set_bytes(f"{_KEY}0", json.dumps(where).encode())
        for key, text in coordination().key_value_dir_get_bytes(_ENDED):
            _core.job_note_absent(int(key.rpartition("/")[2]), bytes(text).decode())
        return True
    for _, found in coordination().key_value_dir_get_bytes(_KEY):
        where = json.loads(found)
        token = bytes.fromhex(where["token"])
        _core.job_join(me, count, where["address"], where["port"], token)
        return True
    return False


@functools.cache
def _watcher() -> _Watcher:
    watcher = _Watcher()
    watcher.start()
    return watcher


def watch_job(stacklevel: int) -> None:
    """Has the job watched. Warns in a process of `jaxpp launch` that is in none."""
    count = int(_core.option("JPP_NUM_PROCESSES") or 1)
    if in_a_job():
        _watcher().ready.set()
    elif count > 1:
        warnings.warn(
            f"jaxpp launch has started {count} processes, and this one trains alone, as do "
            "the others: call jax.distributed.initialize() before jax.devices()",
            stacklevel=stacklevel + 1,
        )


def _tell_of_failure() -> None:
    """Before the interpreter waits for threads: one of orbax's may wait for this job."""
    if not _is_failing():
        return
    error = sys.last_value
    own = not (isinstance(error, JaxppError) and error.code == "peer")
    text = str(error)
    if own:
        text = traceback.format_exception_only(error)[0].partition("\n")[0]
    if in_a_job() and _watcher.cache_info().currsize:
        _watcher().last_words = text
        _watcher().await_join()
    _core.job_fail(text, own)


def _leave() -> None:
    """At this process' end: no other one has to wait for it any longer.

    Once the job has failed it does not wait for others in JAX's barrier either, which lasts
    minutes: a process that was stopped never reaches it.
    """
    failed = _core.runtimes_close() or _is_failing()
    waits = in_a_job() and not failed
    if _watcher.cache_info().currsize:
        _watcher().await_join()
    try:
        if _core.job_leave(waits) and waits:
            jax.distributed.shutdown()  # all are there: it takes a moment
        elif waits:
            _core.job_check()
    except JaxppError as error:
        failed = True
        print(f"jaxpp: error: {error}", file=sys.stderr, flush=True)
    _core.job_end()
    if _watcher.cache_info().currsize:
        _watcher().stop()
    if failed and in_a_job():
        leave_job_at_once()


atexit.register(_leave)
threading._register_atexit(_tell_of_failure)  # type: ignore[attr-defined]
if _core.option("JPP_NUM_PROCESSES") is not None or in_a_job():
    _watcher()
