"""Custom-call handlers, which JAX's own operations, callbacks and a user's FFI calls need
from the plugin."""

from __future__ import annotations

from typing import Any

from jaxpp import _core
from jaxpp.jax_internals.client import host_call_targets
from jaxpp.lower.callbacks import TARGET

__all__ = ["has_callbacks", "register_handlers"]

_NO_TRAITS = 0
_registered: dict[int, set[str]] = {}  # by client


def _handlers() -> dict[str, Any]:
    found = {
        name: stages["execute"]
        for name, stages in host_call_targets().items()
        if set(stages) == {"execute"} and "python" not in name
    }
    return {TARGET: _core.callback_handler("Host"), **found}


def register_handlers(client: _core.Client) -> None:
    """Registers with a CPU plugin the handlers from JAX that it does not have yet: jaxlib's
    (LAPACK: qr, cholesky, eigh, svd, solve, ...), the user's (`jax.ffi.register_ffi_target`)
    and the one for callbacks into Python. A CUDA plugin, which it shares with JAX's client,
    needs only the last of these. Other plugins, and those without a known FFI extension,
    get none."""
    known = _registered.setdefault(id(client), set())
    platform = client.info().platform.lower()
    if platform in ("cpu", "host"):
        where, handlers = "Host", _handlers()
    elif platform == "cuda":
        where, handlers = "CUDA", {TARGET: _core.callback_handler("CUDA")}
    else:
        return
    for name, handler in handlers.items():
        if name in known:
            continue
        try:
            client.register_custom_call(name, where, handler, _NO_TRAITS)
        except _core.JaxppError:
            return
        known.add(name)


def has_callbacks(client: _core.Client) -> bool:
    """Whether tasks on this client can call back into Python."""
    return TARGET in _registered.get(id(client), ())
