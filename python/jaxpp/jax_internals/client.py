"""XLA's client: processes, devices, profiles and compile options."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import distributed, profiler, xla_bridge
from jax.experimental import multihost_utils
from jaxlib import _profiler, xla_client

__all__ = [
    "add_to_profiles",
    "after_initialize",
    "backends_are_made",
    "coordination",
    "coordination_address",
    "coordination_process",
    "coordination_size",
    "gpu_client_options",
    "has_joined_a_job",
    "host_call_targets",
    "in_a_job",
    "keep_profiles_apart",
    "leave_job_at_once",
    "planning_devices",
    "serialized_compile_options",
    "watch_waits",
]


# JAX 0.10.2, 0.11.2: xla_client.make_cpu_client and its num_devices.
@functools.cache
def planning_devices(count: int) -> list[Any]:
    """Additional CPU devices for tracing and lowering, not for execution."""
    return list(xla_client.make_cpu_client(num_devices=count).devices())


# JAX 0.10.2: distributed.global_state, its client's key-value store and barriers.
def in_a_job() -> bool:
    """Whether jax.distributed.initialize() was called."""
    return distributed.global_state.client is not None


# JAX 0.10.2: initialize() sets the client, connects it, and then creates the manager.
def has_joined_a_job() -> bool:
    """Whether initialize() has returned, as seen from another thread. Using a client before it
    is connected terminates the process."""
    return distributed.global_state.preemption_sync_manager is not None


# JAX 0.10.2, 0.11.2: jax.distributed.initialize() is a method of global_state.
def after_initialize(run: Callable[[], object]) -> None:
    """Calls `run` after each return of jax.distributed.initialize()."""
    state_type = type(distributed.global_state)
    initialize = state_type.initialize

    @functools.wraps(initialize)
    def watched(*args: Any, **options: Any) -> None:
        initialize(*args, **options)
        run()

    state_type.initialize = watched


# JAX 0.10.2: api.clean_up() shuts the client down at exit, which waits for all processes; so
# does the client's destructor.
def leave_job_at_once() -> None:
    """Detaches from the coordination service, so that this process exits without the others."""
    state = distributed.global_state
    for kept in (state.client, state.service):
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    state.client = state.service = None


def coordination() -> Any:
    """The client of the job's coordination service."""
    client = distributed.global_state.client
    if client is None:
        raise RuntimeError("jax.distributed.initialize() was not called")
    return client


# JAX 0.10.2, 0.11.2: DistributedRuntimeClient.wait_at_barrier(), which JAX and orbax call, and
# the two functions of multihost_utils that all others there call.
def watch_waits(begin: Callable[[str, Sequence[int] | None], object]) -> None:
    """Calls `begin` when JAX starts to wait for other processes, with the name of the
    wait and the processes (None: all). The object it returns is released after the wait.
    """

    def barrier(client: Any, name: str, timeout_in_ms: int, process_ids: Any = None) -> None:
        wait = begin(name, process_ids)
        try:
            wait_at_barrier(client, name, timeout_in_ms, process_ids)
        finally:
            del wait

    def collective(run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def watched(*args: Any, **options: Any) -> Any:
            wait = begin(f"multihost_utils.{run.__name__}", None)
            try:
                return run(*args, **options)
            finally:
                del wait

        return watched

    client_type = type(coordination())
    wait_at_barrier = client_type.wait_at_barrier
    client_type.wait_at_barrier = functools.wraps(wait_at_barrier)(barrier)
    for name in "process_allgather", "broadcast_one_to_all":
        setattr(multihost_utils, name, collective(getattr(multihost_utils, name)))


def coordination_process() -> int:
    """This process's number in the job. (jax.process_index() would create the devices.)"""
    return int(distributed.global_state.process_id)


def coordination_size() -> int:
    """The number of processes in the job."""
    return int(distributed.global_state.num_processes)


def coordination_address() -> str:
    """HOST:PORT of the coordination service."""
    return str(distributed.global_state.coordinator_address)


# JAX 0.10.2, 0.11.2: jaxlib's _profiler.register_plugin_profiler.
def add_to_profiles(plugin: Any) -> None:
    """Makes JAX use a plugin's profiler too, from the next profile on."""
    _profiler.register_plugin_profiler(plugin)


# JAX 0.10.2: profiler._profile_state; stop_trace() writes a file named after the host to its
# log_dir.
def keep_profiles_apart() -> None:
    """Makes each process of a job write its profiles to its own folder, `process-N`."""
    state = profiler._profile_state
    kept = vars(state)

    def folder(_: Any) -> str | None:
        return kept["log_dir"] and os.path.join(
            kept["log_dir"], f"process-{distributed.global_state.process_id}"
        )

    setter = functools.partial(kept.__setitem__, "log_dir")
    apart = {"log_dir": property(folder, lambda _, given: setter(given))}
    state.__class__ = type("ProfileState", (type(state),), apart)


# JAX 0.10.2, 0.11.2: jax._src.xla_bridge.
def backends_are_made() -> bool:
    """Whether JAX has created its clients, which read the environment at that point."""
    return xla_bridge.backends_are_initialized()


# JAX 0.10.2, 0.11.2: jaxlib's xla_client.generate_pjrt_gpu_plugin_options.
def gpu_client_options() -> dict[str, Any]:
    """The options of JAX's GPU client, from XLA_PYTHON_CLIENT_*."""
    return xla_client.generate_pjrt_gpu_plugin_options()


# JAX 0.10.2, 0.11.2: jaxlib's xla_client.custom_call_targets.
def host_call_targets() -> dict[str, Any]:
    """All custom-call handlers that this process has registered for the CPU, by name."""
    return xla_client.custom_call_targets("Host")


# JAX 0.10.2, 0.11.2: xla_client.CompileOptions with its executable_build_options.
def serialized_compile_options(
    devices: int, user_options: dict[str, Any] | None, *, spans_processes: bool = False
) -> bytes:
    """A CompileOptionsProto for one SPMD program on `num_devices` devices, which the compile
    request names. With 1, the program can run on any device."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    overrides = dict(user_options or {})
    if devices > 1 and jax.__version_info__ >= (0, 11):
        # On by default in newer versions; plugins then refuse a module in portable form,
        # and log a line for each task.
        overrides.setdefault("xla_enable_hlo_sharding_v3", False)
    if spans_processes:
        # Otherwise the processes share the autotuning of kernels through the store, where
        # tasks with the same code on different ranks may conflict.
        overrides.setdefault("xla_gpu_shard_autotuning", False)
    options.env_option_overrides = list(overrides.items())
    if devices == 1:
        options.compile_portable_executable = True
        return options.SerializeAsString()
    options.num_partitions = build.num_partitions = devices
    options.num_replicas = build.num_replicas = 1
    build.use_spmd_partitioning = True
    build.use_shardy_partitioner = True
    return options.SerializeAsString()
