"""XLA's client: processes, devices, profiles and compile options."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any

import jax
from jax._src import distributed, profiler, xla_bridge
from jaxlib import _profiler, xla_client

__all__ = [
    "add_to_profiles",
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
]


# JAX 0.10.2, 0.11.2: xla_client.make_cpu_client and its num_devices.
@functools.cache
def planning_devices(count: int) -> list[Any]:
    """CPU devices beside those that JAX uses: to trace and lower for, not to run on."""
    return list(xla_client.make_cpu_client(num_devices=count).devices())


# JAX 0.10.2: distributed.global_state, its client's key-value store and barriers.
def in_a_job() -> bool:
    """Whether jax.distributed.initialize() was called."""
    return distributed.global_state.client is not None


# JAX 0.10.2: initialize() sets the client, connects it, and then makes the manager.
def has_joined_a_job() -> bool:
    """Whether it has returned, as far as another thread can tell: a client that is asked for
    anything before it is connected ends the process."""
    return distributed.global_state.preemption_sync_manager is not None


# JAX 0.10.2: api.clean_up() shuts the client down at exit, which waits for all processes;
# so does the client's destructor.
def leave_job_at_once() -> None:
    """Forgets the coordination service, so that this process ends without the others."""
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


def coordination_process() -> int:
    """This process' number there, which jax.process_index() asks the devices for."""
    return int(distributed.global_state.process_id)


def coordination_size() -> int:
    """How many processes the job has."""
    return int(distributed.global_state.num_processes)


def coordination_address() -> str:
    """HOST:PORT of that service."""
    return str(distributed.global_state.coordinator_address)


# JAX 0.10.2, 0.11.2: jaxlib's _profiler.register_plugin_profiler.
def add_to_profiles(plugin: Any) -> None:
    """Has JAX ask a plugin's profiler as well, from the next profile on."""
    _profiler.register_plugin_profiler(plugin)


# JAX 0.10.2: profiler._profile_state, to whose log_dir stop_trace() writes a file that is
# named by the host.
def keep_profiles_apart() -> None:
    """Has each process of a job write its profiles to a folder of its own, `process-N`."""
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
    """Whether JAX has made its clients, which read the environment then."""
    return xla_bridge.backends_are_initialized()


# JAX 0.10.2, 0.11.2: jaxlib's xla_client.generate_pjrt_gpu_plugin_options.
def gpu_client_options() -> dict[str, Any]:
    """What JAX makes its client of GPUs with, as XLA_PYTHON_CLIENT_* say."""
    return xla_client.generate_pjrt_gpu_plugin_options()


# JAX 0.10.2, 0.11.2: jaxlib's xla_client.custom_call_targets.
def host_call_targets() -> dict[str, Any]:
    """All custom-call handlers that this process has registered for the CPU, by name."""
    return xla_client.custom_call_targets("Host")


# JAX 0.10.2, 0.11.2: xla_client.CompileOptions with its executable_build_options.
def serialized_compile_options(
    devices: int, user_options: dict[str, Any] | None, *, spans_processes: bool = False
) -> bytes:
    """A CompileOptionsProto for one SPMD program on so many devices; which ones, the request
    to compile it says. One: a program for any one device."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    overrides = dict(user_options or {})
    if devices > 1 and jax.__version_info__ >= (0, 11):
        # On there; a module in portable form is then refused its use, with a line in the
        # plugin's log for each task.
        overrides.setdefault("xla_enable_hlo_sharding_v3", False)
    if spans_processes:
        # Else the processes share the search for the fastest kernels, and tasks with the same
        # code on other ranks may get into each other's way in the store.
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
