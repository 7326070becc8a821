"""Handlers of the custom calls that JAX's own operations lower to."""

from __future__ import annotations

import importlib

from jaxpp import _core

__all__ = ["register_handlers"]

# Traits of the handlers that jaxlib ships: none.
_NO_TRAITS = 0


def register_handlers(client: _core.Client) -> int:
    """Registers jaxlib's handlers for the CPU (LAPACK: qr, cholesky, eigh, svd, solve, ...).

    Returns:
      How many the plugin took: 0 if it has no FFI extension that this library knows, or no
      CPU; steps that need one of them then fail when they are compiled, by name.
    """
    platform, _, _ = client.info()
    if platform.lower() not in ("cpu", "host"):
        return 0
    lapack = importlib.import_module("jaxlib.cpu._lapack")
    lapack.initialize()
    taken = 0
    for name, capsule in lapack.registrations().items():
        if not name.endswith("_ffi"):
            continue
        try:
            client.register_custom_call(name, "Host", capsule, _NO_TRAITS)
        except _core.JaxppError:
            return taken
        taken += 1
    return taken
