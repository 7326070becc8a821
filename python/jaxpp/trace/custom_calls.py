"""Refuses equations that no task can run while the step is traced: custom calls without a
handler, ordered callbacks, values in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Sharding

from jaxpp.errors import make_error
from jaxpp.jax_internals.client import host_call_targets
from jaxpp.jax_internals.jaxprs import is_ordered
from jaxpp.mesh import refuse_memory_kind

__all__ = ["check_equation"]

_CALLBACKS = {"debug_callback", "debug_print", "io_callback", "pure_callback"}


def _check_callback(eqn: JaxprEqn, where: str | None) -> None:
    """Refuses a callback that is ordered or runs once per shard ("unsupported")."""
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
                "of several ranks run concurrently, each on all devices of its rank, so "
                "output cannot be ordered: print the microbatch or stage to identify each "
                "line",
            )


def _equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """An equation and all equations inside it."""
    yield eqn
    for param in eqn.params.values():
        for inner in param if isinstance(param, tuple | list) else (param,):
            jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            for each in jaxpr.eqns if isinstance(jaxpr, Jaxpr) else ():
                yield from _equations(each)


def _check_memory(eqn: JaxprEqn, where: str | None) -> None:
    """Refuses values in host memory, including those from an offloading policy of
    jax.checkpoint."""
    name = eqn.primitive.name
    for given in (eqn.params.get("sharding"), *eqn.params.get("devices", ())):
        if isinstance(given, Sharding):
            refuse_memory_kind(given, f"{name} at {where}")
    if any(getattr(v.aval, "memory_space", None) is jax.memory.Space.Host for v in eqn.outvars):
        raise make_error(
            "unsupported",
            f"{name} at {where}: expected a value in device memory, where a step keeps all "
            f"values, found {eqn.outvars[0].aval} in host memory",
        )


def check_equation(eqn: JaxprEqn, where: str | None) -> None:
    """Refuses an equation that no plugin of this library can run.

    Raises:
      JaxppError: a callback into Python that is ordered or runs once per shard, a value
        in host memory, or a call to an unregistered FFI target ("unsupported"), with the user's
        line.
    """
    for each in _equations(eqn):
        _check_memory(each, where)
        _check_callback(each, where)
        target = each.params.get("target_name") if each.primitive.name == "ffi_call" else None
        if target is not None and target not in host_call_targets():
            raise make_error(
                "unsupported",
                f"custom call {target!r} at {where}: no handler of that name is registered "
                "for the CPU; call jax.ffi.register_ffi_target before the step is compiled",
            )
