"""The PJRT client that runs the tasks: a second one beside JAX's own."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.mesh import MpmdMesh
from jaxpp.run.handlers import register_handlers
from jaxpp.run.processes import processes_of

__all__ = ["Devices", "devices_for"]


class Devices:
    """A client and the devices of each rank of a mesh, as the client numbers them.

    A rank of another process has none here: its indices are 0.
    """

    def __init__(self, client: _core.Client, mesh: MpmdMesh) -> None:
        self.client = client
        register_handlers(client)
        info = client.info()
        self.platform, self.version, self.found = info.platform, info.version, info.devices
        by_id = {device.id: index for index, device in enumerate(self.found)}
        self.processes = processes_of(mesh)
        self.local_ranks = [r for r in range(mesh.mpmd_dim) if self.has_rank(r)]
        self.ids = [
            [_local_id(d) if self.has_rank(r) else 0 for d in mesh.devices_of(r)]
            for r in range(mesh.mpmd_dim)
        ]
        missing = sorted({i for r in self.local_ranks for i in self.ids[r]} - by_id.keys())
        if missing:
            raise make_error(
                "devices",
                f"not enough devices: the mesh expects the devices "
                f"{sorted(i for r in self.local_ranks for i in self.ids[r])}, found "
                f"{len(self.found)} in the plugin ({self.platform}), without {missing}; use a "
                "smaller mesh or a plugin with more devices",
            )
        self.indices = [[by_id[i] for i in ids] for ids in self.ids]

    def has_rank(self, rank: int) -> bool:
        """Whether the rank is this process'."""
        return self.processes is None or self.processes.has_rank(rank)

    @property
    def per_rank(self) -> int:
        """How many devices a rank has."""
        return len(self.indices[0])

    @functools.cached_property
    def layout(self) -> tuple[Any, ...]:
        """Equal for meshes whose ranks are the same devices of the same client."""
        return (id(self.client), tuple(map(tuple, self.indices)))


def _local_id(device: jax.Device) -> int:
    """The number of one of this process' devices, as a client of its own gives it."""
    return device.id if jax.process_count() == 1 else device.local_hardware_id


def _default_plugin() -> str:
    try:
        import lammps_jax_pjrt_cpu
    except ImportError:
        raise make_error(
            "plugin",
            "no PJRT plugin: the package lammps-jax-pjrt-cpu is not installed and neither "
            "plugin= nor JPP_PLUGIN names one; pip install lammps-jax-pjrt-cpu",
        ) from None
    return str(lammps_jax_pjrt_cpu.PLUGIN_PATH)


@functools.cache
def _client(plugin: str, cpu_devices: int) -> _core.Client:
    options = {"cpu_device_count": cpu_devices} if cpu_devices else {}
    # The plugin's own log; its errors come as exceptions.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return _core.Client(plugin, options)


def devices_for(mesh: MpmdMesh, plugin: str | None) -> Devices:
    """The devices of a mesh on the plugin named by argument, JPP_PLUGIN or default.

    Raises:
      JaxppError: the plugin is missing, is none or is too old ("plugin"); it has too few
        devices ("devices").
    """
    path = plugin or _core.option("JPP_PLUGIN") or _default_plugin()
    local = [_local_id(d) for d in mesh.jax_mesh.local_devices]
    on_cpu = mesh.jax_mesh.devices.flat[0].platform == "cpu"
    cpu_devices = max([*local, len(jax.local_devices(backend="cpu")) - 1]) + 1 if on_cpu else 0
    return _devices(_client(path, cpu_devices), mesh)


@functools.cache
def _devices(client: _core.Client, mesh: MpmdMesh) -> Devices:
    return Devices(client, mesh)
