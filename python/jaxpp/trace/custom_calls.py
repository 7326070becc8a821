"""Custom calls that no plugin of this library can run, refused while the step is traced."""

from __future__ import annotations

from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from jaxpp.errors import make_error
from jaxpp.jax_internals.client import host_call_targets
from jaxpp.jax_internals.jaxprs import is_ordered

__all__ = ["check_equation"]

_CALLBACKS = {"debug_callback", "debug_print", "io_callback", "pure_callback"}


def _check_callback(eqn: JaxprEqn, where: str | None) -> None:
    """Refuses a callback that must be ordered or run a shard at a time ("unsupported")."""
    if eqn.primitive.name not in _CALLBACKS:
        return
    found = {
        "ordered": any(map(is_ordered, eqn.effects)),
        "partitioned": eqn.params.get("partitioned", False),
    }
    for option, given in found.items():
        if given:
            raise make_error(
                "unsupported",
                f"{eqn.primitive.name} at {where}: expected {option}=False, found True. Tasks "
                "of several ranks run at the same time, each on all devices of its rank: "
                "print what tells the lines apart (the microbatch, the stage)",
            )


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
        _check_callback(each, where)
        target = each.params.get("target_name") if each.primitive.name == "ffi_call" else None
        if target is not None and target not in host_call_targets():
            raise make_error(
                "unsupported",
                f"custom call {target!r} at {where}: nobody registered a handler of that name "
                "for the CPU; call jax.ffi.register_ffi_target before the step is compiled",
            )
