"""Where compiled tasks are kept on disk.

The folder is JAX's own: `jax_compilation_cache_dir` (or the environment's
JAX_COMPILATION_CACHE_DIR) switches it on, `jax_enable_compilation_cache` off. Every task is
kept, however quickly it compiled: a step has many small ones. The files are this library's
(`jaxpp-*`, `src/device/cache.c`), beside those that JAX writes; what a file's name stands
for is in `src/device/cache_key.c`.
"""

from __future__ import annotations

import logging
import os

import jax

__all__ = ["folder"]

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
