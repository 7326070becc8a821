"""Where compiled tasks are kept on disk, and under which names.

The folder is JAX's own: `jax_compilation_cache_dir` (or the environment's
JAX_COMPILATION_CACHE_DIR) switches it on, `jax_enable_compilation_cache` off. Every task is
kept, however quickly it compiled: a step has many small ones. The files are this library's
(`jaxpp-*`, `src/device/cache.c`), beside those that JAX writes.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import pathlib
import platform
from collections.abc import Sequence

import jax

from jaxpp import _core

__all__ = ["folder", "key_of", "plugin_key"]

_log = logging.getLogger("jaxpp")


def folder() -> str | None:
    """The folder, made if it is not there; None when nothing is to be kept."""
    path = jax.config.jax_compilation_cache_dir
    if not path or not jax.config.jax_enable_compilation_cache:
        return None
    if "://" in path:
        _log.debug("compilation cache %s: not a local folder, nothing is kept", path)
        return None
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        _log.warning("compilation cache %s: %s; nothing is kept", path, error)
        return None
    return path


@functools.cache
def _processor() -> str:
    """What code compiled for this machine's CPU may use."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), *sorted({x for x in lines if x.startswith(names)})])


def plugin_key(path: str, version: str) -> str:
    """What stands for a plugin: another build of it must not find the old one's code."""
    info = os.stat(path)
    return f"{version} {info.st_size} {info.st_mtime_ns}"


def _xla_flags() -> str:
    """XLA_FLAGS, which the plugin reads as well, without those that change no code."""
    flags = (_core.option("XLA_FLAGS") or "").split()
    no_code = ("--xla_force_host_platform_device_count=", "--xla_dump_")
    return " ".join(flag for flag in flags if not flag.startswith(no_code))


def key_of(module: str, options: bytes, devices: Sequence[int], plugin: str) -> str:
    """The name of a compiled task.

    Args:
      module: its StableHLO as text without locations, so that a line added above a step does
        not compile it again.
      options: the serialized CompileOptionsProto.
      devices: the ids of those that the task is compiled for; none: each one device.
      plugin: of `plugin_key`.
    """
    digest = hashlib.sha256()
    texts = (module, str(devices), plugin, _processor(), _xla_flags())
    for part in (options, *(text.encode(errors="surrogatepass") for text in texts)):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
