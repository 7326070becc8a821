"""Custom calls: what JAX's own operations and a user's FFI calls need from the plugin."""

from __future__ import annotations

from typing import Any

from jaxlib import xla_client

from jaxpp import _core
from jaxpp.errors import make_error

__all__ = ["check_equation", "register_handlers"]

_NO_TRAITS = 0
# These call back into Python through a table that only JAX's own client has.
_CALLBACKS = {"debug_callback", "debug_print", "io_callback", "pure_callback"}
_registered: dict[int, set[str]] = {}  # by client


def _targets() -> dict[str, Any]:
    """All handlers that this process has registered for the CPU, by name."""
    return xla_client.custom_call_targets("Host")


def register_handlers(client: _core.Client) -> None:
    """Gives the plugin the CPU handlers registered with JAX that it does not have yet:
    jaxlib's (LAPACK: qr, cholesky, eigh, svd, solve, ...) and the user's
    (`jax.ffi.register_ffi_target`). A plugin for another device, or without an FFI
    extension that this library knows, gets none."""
    platform, _, _ = client.info()
    known = _registered.setdefault(id(client), set())
    if platform.lower() not in ("cpu", "host"):
        return
    for name, handlers in _targets().items():
        if name in known or set(handlers) != {"execute"} or "python" in name:
            continue
        try:
            client.register_custom_call(name, "Host", handlers["execute"], _NO_TRAITS)
        except _core.JaxppError:
            return
        known.add(name)


def check_equation(eqn: Any, where: str | None) -> None:
    """Refuses an equation that no plugin of this library can run.

    Raises:
      JaxppError: a callback into Python, or a call of an FFI target that nobody registered
        ("unsupported"), with the user's line.
    """
    name = eqn.primitive.name
    if name in _CALLBACKS:
        raise make_error(
            "unsupported",
            f"{name} at {where}: a step can not call back into Python; return what is to be "
            "shown from the step (under Concat() for every microbatch), or look at it before "
            "or after the step",
        )
    target = eqn.params.get("target_name") if name == "ffi_call" else None
    if target is not None and target not in _targets():
        raise make_error(
            "unsupported",
            f"custom call {target!r} at {where}: nobody registered a handler of that name for "
            "the CPU; call jax.ffi.register_ffi_target before the step is compiled",
        )
