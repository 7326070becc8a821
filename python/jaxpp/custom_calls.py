"""Custom calls: what JAX's own operations, callbacks and a user's FFI calls need from the
plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpp import _core
from jaxpp.callbacks import TARGET, check_callback
from jaxpp.errors import make_error
from jaxpp.jax_internals import host_call_targets

__all__ = ["check_equation", "has_callbacks", "register_handlers"]

_NO_TRAITS = 0
_registered: dict[int, set[str]] = {}  # by client


def _handlers() -> dict[str, Any]:
    found = {
        name: stages["execute"]
        for name, stages in host_call_targets().items()
        if set(stages) == {"execute"} and "python" not in name
    }
    return {TARGET: _core.callback_handler(), **found}


def register_handlers(client: _core.Client) -> None:
    """Gives the plugin the CPU handlers registered with JAX that it does not have yet:
    jaxlib's (LAPACK: qr, cholesky, eigh, svd, solve, ...), the user's
    (`jax.ffi.register_ffi_target`) and the one for callbacks into Python. A plugin for
    another device, or without an FFI extension that this library knows, gets none."""
    platform, _, _ = client.info()
    known = _registered.setdefault(id(client), set())
    if platform.lower() not in ("cpu", "host"):
        return
    for name, handler in _handlers().items():
        if name in known:
            continue
        try:
            client.register_custom_call(name, "Host", handler, _NO_TRAITS)
        except _core.JaxppError:
            return
        known.add(name)


def has_callbacks(client: _core.Client) -> bool:
    """Whether tasks on this client can call back into Python."""
    return TARGET in _registered.get(id(client), ())


# --- What can not run -----------------------------------------------------------------


def _equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation and all inside it."""
    yield eqn
    for param in eqn.params.values():
        for inner in param if isinstance(param, tuple | list) else (param,):
            jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            for each in jaxpr.eqns if isinstance(jaxpr, Jaxpr) else ():
                yield from _equations(each)


def check_equation(eqn: JaxprEqn, where: str | None) -> None:
    """Refuses an equation that no plugin of this library can run.

    Raises:
      JaxppError: a callback into Python that must be ordered or run a shard at a time, or a
        call of an FFI target that nobody registered ("unsupported"), with the user's line.
    """
    for each in _equations(eqn):
        check_callback(each, where)
        target = each.params.get("target_name") if each.primitive.name == "ffi_call" else None
        if target is not None and target not in host_call_targets():
            raise make_error(
                "unsupported",
                f"custom call {target!r} at {where}: nobody registered a handler of that name "
                "for the CPU; call jax.ffi.register_ffi_target before the step is compiled",
            )
