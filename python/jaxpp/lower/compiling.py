"""Compiles the StableHLO of a plan's tasks."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import weakref
from typing import Any, Protocol

from jaxpp import _core
from jaxpp.errors import JaxppError, make_error, warn
from jaxpp.lower.compilation_cache import folder
from jaxpp.lower.handlers import has_callbacks, register_handlers
from jaxpp.lower.lowering import Code, Copies, LoweredTask
from jaxpp.progress import show

__all__ = ["CompiledTasks", "Compiler", "explain"]


def explain(error: JaxppError, plan: _core.Plan, rank: int, what: str) -> JaxppError:
    """Adds the rank and task to the error and, if out of memory, the plan's memory estimate."""
    text = str(error)
    if error.code == "out-of-memory":
        text = plan.explain_memory(rank, text)
    return make_error(error.code, f"rank {rank}, {what}: {text}")


class Target(Protocol):
    """The devices that tasks are compiled for."""

    client: _core.Client
    platform: str
    version: str

    @property
    def rank_size(self) -> int: ...

    def has_rank(self, rank: int) -> bool: ...

    def assignment(self, rank: int) -> list[int]: ...


# The executables of this process, by client, code, compile options and devices: a step that
# is compiled for other shapes shares the tasks that these shapes do not change. The references
# have no callbacks, in which a Ctrl-C would be lost.
_known: dict[Any, weakref.ref[_core.Executable]] = {}


def _forget_unused() -> None:
    for key, known in list(_known.items()):
        if known() is None:
            _known.pop(key, None)


_Future = concurrent.futures.Future[_core.Executable]

# A module, and the devices that run it together; none: each device alone.
_Key = tuple[bytes, tuple[int, ...]]


@dataclasses.dataclass
class CompiledTasks:
    """What a plan's runtime runs, for each task.

    Attributes:
      executables: None for a task that needs none in this process.
      shard_dims: the dims of the results on each device, for a task that the runtime copies to
        several devices.
      calls_back: whether a task calls back into Python.
    """

    executables: list[_core.Executable | None]
    shard_dims: list[list[int] | None]
    calls_back: bool


class Compiler:
    """Compiles the tasks of a plan in parallel, each distinct one once. Other ranks of several
    devices get copies of the compiled code."""

    def __init__(self, plan: _core.Plan, devices: Target, code: Code) -> None:
        self.plan = plan
        self.devices = devices
        self.code = code
        self.cache_folder = folder()
        self.calls_back = False
        self.all_written = True  # to the cache folder; set by any thread of the pool
        self.futures: dict[_Key, _Future] = {}
        self.first: dict[bytes, _Key] = {}  # by module
        self.others: dict[_Key, LoweredTask] = {}  # modules that are `first` on other devices
        self.shard_dims: dict[int, list[int]] = {}  # by task

    def _needs_module(self, number: int, task: _core.StagedTask, copies: Copies | None) -> bool:
        """Whether this process needs a module for the task."""
        if not task.ops or not self.devices.has_rank(task.rank):
            return False
        # The runtime copies to CPU devices itself.
        if copies is None or self.devices.platform != "cpu":
            return True
        if self.devices.rank_size == 1:
            return False
        dims = self.code.copied_dims(task, copies)
        if dims is not None:
            self.shard_dims[number] = dims
        return dims is None

    def _submit(
        self, pool: concurrent.futures.Executor, task: _core.StagedTask, donations: Any
    ) -> _Key:
        """Begins to compile the task."""
        lowered = self.code.lower(task, donations)
        self.calls_back |= bool(lowered.callbacks)
        if lowered.callbacks and not has_callbacks(self.devices.client):
            raise make_error(
                "unsupported",
                f"task {task.name} calls back into Python (jax.debug.print, a callback), "
                f"which the plugin ({self.devices.platform}: {self.devices.version}) does not "
                "support; use a plugin for CPUs, or for CUDA with PJRT API 0.115 or later, "
                "or remove the callback",
            )
        portable = self.devices.rank_size == 1
        devices = () if portable else tuple(self.devices.assignment(task.rank))
        key = (lowered.code, devices)
        if self.first.setdefault(lowered.code, key) != key:
            self.others[key] = lowered
        elif key not in self.futures:
            self.futures[key] = pool.submit(self._compile, lowered, devices)
        return key

    def _compile(
        self, lowered: LoweredTask, devices: tuple[int, ...], first: _Future | None = None
    ) -> _core.Executable:
        """Compiles for these devices together, or for each device separately. `first`: what
        compiles the module for other devices."""
        client, options = self.devices.client, self.code.compile_options
        # Strip locations, so that a line added above a step does not recompile it.
        identity = lowered.text().encode(errors="surrogatepass")
        key = (id(client), identity, options, devices)
        known = _known.get(key)
        if known and (executable := known()):
            return executable
        # The code of a callback contains an address in this process.
        folder = os.fsencode("" if lowered.callbacks else self.cache_folder or "")
        other = [first.result()] if first else []
        compiled = client.compile(
            lowered.code, options, devices, lowered.callbacks, folder, identity, *other
        )
        if not compiled.written:
            self.all_written = False
        _known[key] = weakref.ref(compiled.executable)
        return compiled.executable

    def _submit_others(self, pool: concurrent.futures.Executor) -> None:
        """Begins what waits for other modules, behind these in the pool's queue."""
        for key, lowered in self.others.items():
            code, devices = key
            first = self.futures[self.first[code]]
            self.futures[key] = pool.submit(self._compile, lowered, devices, first)

    def _result(self, task: _core.StagedTask, future: _Future) -> _core.Executable:
        try:
            return future.result()
        except JaxppError as error:
            raise explain(error, self.plan, task.rank, f"task {task.name}") from None

    def compile_all(self) -> CompiledTasks:
        staged = self.plan.staged()
        tasks = staged.tasks()
        donations, copies = self.plan.donations(), self.plan.copies()
        _forget_unused()
        # Again for each plan: a user may have registered more since the last one.
        register_handlers(self.devices.client)
        pool = concurrent.futures.ThreadPoolExecutor(max(2, os.cpu_count() or 1))
        try:
            # Long ones first: no core is idle while another compiles the last one.
            order = sorted(range(len(tasks)), key=lambda t: len(tasks[t].ops), reverse=True)
            found: dict[int, _Key] = {}
            for count, t in enumerate(order, start=1):
                show(f"lowering task {count} of {len(tasks)}")
                if self._needs_module(t, tasks[t], copies[t]):
                    found[t] = self._submit(pool, tasks[t], donations[t])
            self._submit_others(pool)
            executables: list[_core.Executable | None] = []
            for t, task in enumerate(tasks):
                show(f"compiling task {t + 1} of {len(tasks)}")
                key = found.get(t)
                executables.append(key and self._result(task, self.futures[key]))
        finally:
            # After an error or Ctrl-C: cancel the pending tasks and do not wait for the others.
            pool.shutdown(wait=False, cancel_futures=True)
        if not self.all_written:
            warn(
                f"compilation cache {self.cache_folder}: cannot write compiled tasks; "
                "expected a writable folder with free space (jax_compilation_cache_dir)"
            )
        shard_dims = [self.shard_dims.get(t) for t in range(len(tasks))]
        return CompiledTasks(executables, shard_dims, self.calls_back)
