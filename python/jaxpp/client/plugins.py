"""The PJRT plugin of a mesh and the options of its client.

This library creates a second client in addition to JAX's own. On a GPU each would preallocate
three quarters of the memory. So importing this library disables JAX's preallocation, unless the
user has configured it: then both allocate memory as needed.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import pathlib
import pkgutil
from typing import Any

import jax

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals.client import backends_are_made, gpu_client_options

__all__ = [
    "client_options",
    "is_gpu_plugin",
    "platform_of",
    "plugin_path",
    "share_memory_with_jax",
]

_log = logging.getLogger("jaxpp")
_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_DEFAULT_FRACTION = 0.75  # fraction of a device's memory, JAX's documented default


def plugin_path(given: str | None, platform: str) -> str:
    """The file of the plugin given by argument or by JPP_PLUGIN, otherwise of the plugin for a
    platform.

    Args:
      given: a file, or the platform of a plugin installed for JAX: "cuda", "rocm".
        "cpu" is the embedded one.
      platform: the devices' platform, from `platform_of`.

    Raises:
      JaxppError: no such plugin is installed ("plugin").
    """
    name = given or _core.option("JPP_PLUGIN") or platform
    if name == "cpu":
        return _embedded_plugin()
    if os.sep in name or name.endswith(".so") or os.path.exists(name):
        return name
    return _installed_plugin(name)


def platform_of(device: jax.Device) -> str:
    """The name of a device's plugins: "cpu", "cuda", "rocm", "tpu"."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _embedded_plugin() -> str:
    try:
        import lammps_jax_pjrt_cpu
    except ImportError:
        raise make_error(
            "plugin",
            "no PJRT plugin: the package lammps-jax-pjrt-cpu is not installed and neither "
            "plugin= nor JPP_PLUGIN names one; pip install lammps-jax-pjrt-cpu",
        ) from None
    return str(lammps_jax_pjrt_cpu.PLUGIN_PATH)


def _installed_plugin(platform: str) -> str:
    """The plugin of a package such as jax-cuda13-plugin, which adds a module to
    `jax_plugins`."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    modules = sorted(module.name for module in pkgutil.iter_modules(folders))
    for folder in folders:
        for module in modules:
            path = pathlib.Path(folder, module, f"xla_{platform}_plugin.so")
            if module.startswith(f"xla_{platform}") and path.exists():
                return str(path)
    found = ", ".join(modules) or "none"
    raise make_error(
        "plugin",
        f"no PJRT plugin for {platform!r}: expected the path of a plugin, or one installed "
        f"for JAX (pip install jax[cuda13]); found in jax_plugins: {found}",
    )


def is_gpu_plugin(path: str) -> bool:
    """Whether a file is XLA's plugin for CUDA or ROCm."""
    return pathlib.Path(path).name.startswith(("xla_cuda", "xla_rocm"))


def client_options(path: str, cpu_devices: int, alone: bool = False) -> dict[str, Any]:
    """The options of a plugin's client.

    Args:
      path: the plugin's file.
      cpu_devices: the number of devices of a CPU plugin; 0: its default.
      alone: each rank of this client's steps is one device, and none is in another process.
        A CPU plugin then runs programs on the threads of the runtime that execute them,
        which saves handing each one to a thread of the plugin. With other processes, these
        threads have to look after the network; and two programs with collectives at a time
        would wait for each other's threads.

    Raises:
      JaxppError: this client and JAX's own would both preallocate the devices' memory
        ("devices").
    """
    if not is_gpu_plugin(path):
        options: dict[str, Any] = {"cpu_device_count": cpu_devices} if cpu_devices else {}
        return options | {"asynchronous": False} if alone else options
    options = gpu_client_options()
    fraction = options.get("memory_fraction", _DEFAULT_FRACTION)
    takes_it = options.get("preallocate", True) and options.get("allocator") != "platform"
    if not takes_it or fraction <= 0.5:
        return options
    raise make_error(
        "devices",
        f"{_PREALLOCATE}={_core.option(_PREALLOCATE) or 'true'}: JAX's own client "
        f"preallocates {fraction:.0%} of each device's memory, and the client that runs the "
        f"step would take the same again; set {_PREALLOCATE}=false, import jaxpp before JAX "
        f"initialises its devices (which sets it), or set {_FRACTION} to at most 0.5",
    )


def share_memory_with_jax() -> None:
    """Disables the preallocation of JAX's client, unless it exists already or the environment
    configures it."""
    if _core.option(_PREALLOCATE) is not None or backends_are_made():
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _log.debug("set %s=false, so that JAX's client leaves memory for the steps", _PREALLOCATE)
