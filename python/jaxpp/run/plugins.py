"""The PJRT plugin that a mesh runs on, and the options that its client is made with.

JAX has a client of its own, and this library makes a second one beside it. On a GPU each would
take three quarters of the memory at its start. So importing this library asks JAX not to,
where nobody has said otherwise: then both take what they need and no more.
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
_DEFAULT_FRACTION = 0.75  # of a device's memory, as JAX's documentation of GPU memory says


def plugin_path(given: str | None, platform: str) -> str:
    """The file of the plugin that was asked for by argument or by JPP_PLUGIN, or else of the
    one for devices of a platform.

    Args:
      given: a file, or the platform of a plugin that is installed for JAX: "cuda", "rocm".
        "cpu" is the embedded one.
      platform: of the devices, as `platform_of` says.

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
    """The name of the plugins for such a device: "cpu", "cuda", "rocm", "tpu"."""
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
    """Of a package such as jax-cuda13-plugin, which puts a module into `jax_plugins`."""
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
        f"no PJRT plugin for {platform!r}: expected the path of one, or one that is installed "
        f"for JAX (pip install jax[cuda13]); found of jax_plugins: {found}",
    )


def is_gpu_plugin(path: str) -> bool:
    """Whether a file is XLA's plugin for CUDA or ROCm."""
    return pathlib.Path(path).name.startswith(("xla_cuda", "xla_rocm"))


def client_options(path: str, cpu_devices: int) -> dict[str, Any]:
    """What a plugin's client is made with.

    Args:
      path: the plugin's file.
      cpu_devices: how many devices a CPU plugin is to have; 0: as many as it likes.

    Raises:
      JaxppError: this client and JAX's own would both take the memory of the devices
        ("devices").
    """
    if not is_gpu_plugin(path):
        return {"cpu_device_count": cpu_devices} if cpu_devices else {}
    options = gpu_client_options()
    fraction = options.get("memory_fraction", _DEFAULT_FRACTION)
    takes_it = options.get("preallocate", True) and options.get("allocator") != "platform"
    if not takes_it or fraction <= 0.5:
        return options
    raise make_error(
        "devices",
        f"{_PREALLOCATE}={_core.option(_PREALLOCATE) or 'true'}: JAX's own client takes "
        f"{fraction:.0%} of each device's memory at its start, and the one that runs the step "
        f"would take as much again; set {_PREALLOCATE}=false, or import jaxpp before JAX makes "
        f"its devices, which does so, or {_FRACTION} to 0.5 at most",
    )


def share_memory_with_jax() -> None:
    """Has JAX's client take memory as it needs it, unless it is made already or the
    environment says how."""
    if _core.option(_PREALLOCATE) is not None or backends_are_made():
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _log.debug("%s=false: JAX's client leaves memory to that of the steps", _PREALLOCATE)
