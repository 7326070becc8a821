"""The on-disk cache of compiled tasks.

It uses JAX's folder: `jax_compilation_cache_dir` (or JAX_COMPILATION_CACHE_DIR) enables it,
`jax_enable_compilation_cache` disables it. Every task is cached, however fast it compiles,
because a step has many small ones. The files (`jaxpp-*`, written by `src/device/cache.c`) are
separate from JAX's; `src/device/cache_key.c` defines their names.
"""

from __future__ import annotations

import logging
import os

import jax

__all__ = ["folder"]

_log = logging.getLogger("jaxpp")


def folder() -> str | None:
    """The cache folder, created if missing; None if the cache is disabled."""
    path = jax.config.jax_compilation_cache_dir
    if not path or not jax.config.jax_enable_compilation_cache:
        return None
    if "://" in path:
        _log.debug("compilation cache %s: not a local folder; the cache is disabled", path)
        return None
    try:
        os.makedirs(path, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the path contains a NUL
        _log.warning("compilation cache %s: %s; the cache is disabled", path, error)
        return None
    return path
