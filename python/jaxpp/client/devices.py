"""The PJRT client that runs the tasks, in addition to JAX's own."""

from __future__ import annotations

import concurrent.futures
import functools
import json
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp import _core
from jaxpp.client.identity import identity_of
from jaxpp.client.lending import can_share, lent_array
from jaxpp.client.nodes import client_of_node, numbers_of
from jaxpp.client.plugins import client_options, is_gpu_plugin, platform_of, plugin_path
from jaxpp.client.processes import Processes, processes_of
from jaxpp.devices import Devices, RankOwner
from jaxpp.errors import make_error
from jaxpp.jax_internals.client import add_to_profiles, keep_profiles_apart
from jaxpp.lower.compiling import CompiledTasks, Compiler
from jaxpp.lower.lowering import Code
from jaxpp.mesh import MpmdMesh, rank_axes
from jaxpp.plan.costs import Collectives
from jaxpp.plan.planned import Planned
from jaxpp.trace.call import Options

__all__ = [
    "LocalDevices",
    "NodeDevices",
    "StepDevices",
    "begin_devices",
    "client_of",
    "devices_for",
]


class StepDevices(Devices):
    """Devices that run steps."""

    def start(
        self, planned: Planned, code: Code, in_flight: int, options: Options
    ) -> tuple[Any, bool]:
        """The runtime of a plan, and whether its tasks call back into Python."""
        raise NotImplementedError

    def collectives(self, runtime: Any, mesh: MpmdMesh) -> Callable[[], Collectives]:
        """A function that finds the collectives of all ranks. Call this when the runtime is
        made, and the function in any process at any time."""
        return functools.partial(runtime.collectives, *rank_axes(mesh))


class LocalDevices(StepDevices):
    """The devices of a client in this process."""

    def __init__(
        self, client: _core.Client, ids: list[list[int]], processes: RankOwner | None
    ) -> None:
        self.client = client
        info = client.info()
        by_id = {device.id: index for index, device in enumerate(info.devices)}
        owned = [processes is None or processes.has_rank(r) for r in range(len(ids))]
        wanted = {i for row, own in zip(ids, owned, strict=True) if own for i in row}
        missing = sorted(wanted - by_id.keys())
        if missing:
            raise make_error(
                "devices",
                f"not enough devices: the mesh expects the devices {sorted(wanted)}, "
                f"found {len(info.devices)} in the plugin ({info.platform}), without "
                f"{missing}; use a smaller mesh or a plugin with more devices",
            )
        most = max(map(len, ids))
        indices = [
            [by_id[i] if own else 0 for i in row] + [_core.NO_DEVICE] * (most - len(row))
            for row, own in zip(ids, owned, strict=True)
        ]
        self._set(info, ids, indices, processes)

    def _set(
        self,
        info: _core.ClientInfo,
        ids: list[list[int]],
        indices: list[list[int]],
        processes: RankOwner | None,
    ) -> None:
        Devices.__init__(self, info.platform, info.version, ids, indices, processes)
        on_cpu = info.platform == "cpu"
        wanted = _core.option("JPP_SHARE_MEMORY")
        if wanted not in (None, "0", "1"):
            text = f"JPP_SHARE_MEMORY={wanted!r}: expected 0 or 1"
            raise make_error("invalid-argument", text)
        tried = info.platform in ("cpu", "cuda")
        self._shares = tried if wanted is None else wanted == "1"
        if on_cpu:
            self.least_borrowed = 1 << 16  # below this size a copy is faster

    @functools.cached_property
    def layout(self) -> tuple[Any, ...]:
        return (id(self.client), tuple(map(tuple, self.indices)))

    @functools.cached_property
    def all_indices(self) -> list[int]:
        """The client's indices of the devices of all ranks, one rank after the other."""
        return [device for row in self.indices for device in row]

    def assignment(self, rank: int) -> list[int]:
        """The client's indices of all devices of a rank."""
        return self.indices[rank][: self.count(rank)]

    def put(
        self,
        ranks: Sequence[int],
        indices: Sequence[int],
        shards: list[Any],
        dtype: str,
        memory: str,
    ) -> _core.Value:
        return _core.Value.put(
            self.client, ranks, self.per_rank, indices, shards, dtype, memory
        )

    def take(self, wanted: _core.Wanted, part: Any, source: Any, copies: bool) -> _core.Value:
        reason, dtype = source.deletion_reason(), part.dtype_name
        return wanted.take(
            self.client, self.all_indices, source, source.given, reason, dtype, copies
        )

    def can_borrow(self, given: jax.Device, wanted: jax.Device) -> bool:
        return self._shares_with(wanted) and can_share(given, wanted)

    def hardware_id(self) -> int:
        processes = self.processes
        mine = next(
            row
            for rank, row in enumerate(self.indices)
            if processes is None or processes.has_rank(rank)
        )
        return self.client.info().devices[mine[0]].hardware_id

    def _shares_with(self, device: jax.Device) -> bool:
        return self._shares and self.platform == platform_of(device)

    def lend(
        self, value: _core.Value, rank: int, index: int, device: jax.Device
    ) -> np.ndarray | jax.Array | None:
        if not self._shares_with(device):
            return None
        return lent_array(value, rank, index, device)

    def start(
        self, planned: Planned, code: Code, in_flight: int, options: Options
    ) -> tuple[_core.Runtime, bool]:
        compiled = Compiler(planned.plan, self, code).compile_all()
        network = None
        if self.processes is not None:
            client = f"{self.platform}: {self.version}"
            identity = identity_of(planned, options, code, client)
            network = self.processes.connect(identity, self)
        return self.run(planned.plan, compiled, in_flight, network), compiled.calls_back

    def collectives(self, runtime: _core.Runtime, mesh: MpmdMesh) -> Callable[[], Collectives]:
        own = StepDevices.collectives(self, runtime, mesh)
        if not isinstance(self.processes, Processes) or self.rank_size == 1:
            return own
        shared = self.processes.share(zlib.compress(json.dumps(own()).encode()))

        def of_all() -> Collectives:
            known: dict[int, list[Any]] = {}  # processes that share a rank report the same
            for packed in shared():
                rows = json.loads(zlib.decompress(packed))
                ranks = {row[0] for row in rows} - known.keys()
                known |= {r: [tuple(row) for row in rows if row[0] == r] for r in ranks}
            return [row for rank in sorted(known) for row in known[rank]]

        return of_all

    def run(
        self,
        plan: _core.Plan,
        compiled: CompiledTasks,
        in_flight: int,
        network: _core.Network | None,
    ) -> _core.Runtime:
        """Compiles a plan's tasks and returns its runtime."""
        return _core.Runtime(
            self.client,
            plan,
            self.per_rank,
            self.all_indices,
            compiled.executables,
            compiled.shard_dims,
            self.rank_size == 1,
            in_flight,
            self.processes.rank_process if self.processes else None,
            network,
        )


class NodeDevices(LocalDevices):
    """The devices of a multi-node client, for ranks that span processes."""

    def __init__(self, client: _core.Client, mesh: MpmdMesh, processes: Processes) -> None:
        self.client = client
        info = client.info()
        numbers = numbers_of(client, mesh.jax_mesh.devices.flat[0].client.devices())
        ranks = range(mesh.mpmd_dim)
        self._assignment = [[numbers[d] for d in mesh.devices_of(rank)] for rank in ranks]
        self._places = processes.places
        here = [
            [row[i] if processes.has_rank(rank) else 0 for i in self._places]
            for rank, row in enumerate(self._assignment)
        ]
        ids = [[info.global_devices[i].id for i in row] for row in self._assignment]
        self._set(info, ids, here, processes)

    @property
    def rank_size(self) -> int:
        return len(self._assignment[0])

    @property
    def places(self) -> Sequence[int]:
        return self._places

    @functools.cached_property
    def layout(self) -> tuple[Any, ...]:
        return (id(self.client), self._places, tuple(map(tuple, self._assignment)))

    def assignment(self, rank: int) -> list[int]:
        return self._assignment[rank]


def _local_id(device: jax.Device) -> int:
    """The index that a single-process client gives to one of this process's devices."""
    return device.id if jax.process_count() == 1 else device.local_hardware_id


@functools.cache
def _prepare_for_clients() -> None:
    """Must run before the first client is created."""
    add_to_profiles(_core.profile_plugin())
    if jax.process_count() > 1:
        keep_profiles_apart()
    # Silences the plugin's own log; its errors are raised as exceptions.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


@functools.cache
def client_of(plugin: str, cpu_devices: int, alone: bool = False) -> _core.Client:
    """A plugin's client, created once. `cpu_devices`: the number of devices of a CPU plugin,
    otherwise 0; `alone`: of `client_options`."""
    _prepare_for_clients()
    return _core.Client(plugin, client_options(plugin, cpu_devices, alone))


@functools.cache
def _node_client(plugin: str, visible: tuple[int, ...]) -> _core.Client:
    """The same for ranks that span processes, over the local devices of JAX's client."""
    _prepare_for_clients()
    options = client_options(plugin, 0)
    if is_gpu_plugin(plugin):
        options["visible_devices"] = list(visible)
    return client_of_node(plugin, options)


def devices_for(mesh: MpmdMesh, plugin: str | None) -> StepDevices:
    """The devices of a mesh on the plugin named by argument or JPP_PLUGIN, or the mesh's own.

    Raises:
      JaxppError: the plugin is missing, invalid or too old ("plugin"); it has too few
        devices ("devices"); a rank spans processes, which the plugin, or this library on CPUs,
        does not support ("unsupported").
    """
    if mesh.workers is not None:
        return mesh.workers.devices(plugin)
    first = mesh.jax_mesh.devices.flat[0]
    path = plugin_path(plugin, platform_of(first))
    processes = _processes_of(mesh)
    if processes is not None and processes.spans:
        here = first.client.local_devices()
        visible = sorted(d.local_hardware_id for d in here)
        return _node_devices(_node_client(path, tuple(visible)), mesh)
    local = [_local_id(d) for d in mesh.jax_mesh.local_devices]
    on_cpu = first.platform == "cpu"
    cpu_devices = max([*local, len(jax.local_devices(backend="cpu")) - 1]) + 1 if on_cpu else 0
    with _creating:
        return _devices(client_of(path, cpu_devices, _is_alone(mesh)), mesh)


def _is_alone(mesh: MpmdMesh) -> bool:
    """`alone` of `client_options`, for steps on this mesh."""
    ranks = range(mesh.mpmd_dim)
    return jax.process_count() == 1 and all(len(mesh.devices_of(r)) == 1 for r in ranks)


_creating = threading.Lock()  # the caches alone would let two threads create a client each


def begin_devices(mesh: MpmdMesh, plugin: str | None) -> Callable[[], StepDevices]:
    """A function that returns `devices_for` these arguments. If no other process has to take
    part, a thread already loads the plugin and sets it up, while JAX traces the step."""
    if mesh.workers is not None or jax.process_count() > 1:
        return functools.partial(devices_for, mesh, plugin)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    found = pool.submit(devices_for, mesh, plugin)
    pool.submit(lambda: _warm_up(found.result()))
    pool.shutdown(wait=False)
    return found.result


@functools.cache
def _warm_up(devices: StepDevices) -> None:
    if isinstance(devices, LocalDevices):
        devices.client.warm_up()


_processes_of = functools.cache(processes_of)


@functools.cache
def _node_devices(client: _core.Client, mesh: MpmdMesh) -> StepDevices:
    processes = _processes_of(mesh)
    assert processes is not None
    return NodeDevices(client, mesh, processes)


@functools.cache
def _devices(client: _core.Client, mesh: MpmdMesh) -> StepDevices:
    processes = _processes_of(mesh)
    ids = [
        [
            _local_id(device) if processes is None or processes.has_rank(rank) else 0
            for device in mesh.devices_of(rank)
        ]
        for rank in range(mesh.mpmd_dim)
    ]
    return LocalDevices(client, ids, processes)
