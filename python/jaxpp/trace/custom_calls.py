"""Refuses, while a step is traced, what no task can run: custom calls without a handler,
ordered callbacks, computations in host memory."""

from __future__ import annotations

from jax.extend.core import Jaxpr, JaxprEqn
from jax.sharding import Sharding

from jaxpp.errors import make_error
from jaxpp.jax_internals.client import host_call_targets
from jaxpp.jax_internals.jaxprs import is_ordered, jaxprs_in
from jaxpp.jax_internals.lines import user_line
from jaxpp.mesh import memory_of
from jaxpp.trace.memories import is_in_host_memory

__all__ = ["check_equation", "check_targets"]

_CALLBACKS = {"debug_callback", "debug_print", "io_callback", "pure_callback"}


def _check_callback(eqn: JaxprEqn, outer: JaxprEqn) -> None:
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
                f"{eqn.primitive.name} at {user_line(outer)}: expected {option}=False, found "
                "True. Tasks of several ranks run concurrently, each on all devices of its "
                "rank, so output cannot be ordered: print the microbatch or stage to identify "
                "each line",
            )


def _check_memory(eqn: JaxprEqn, outer: JaxprEqn) -> None:
    """Refuses values in host memory, which tasks neither compute nor move: only equations
    at the top level of the step or of its loop can move them."""
    name = eqn.primitive.name
    inside = None if eqn is outer else outer.primitive.name
    for given in (eqn.params.get("sharding"), *eqn.params.get("devices", ())):
        if not isinstance(given, Sharding):
            continue
        where = f"{name} at {user_line(outer)}"
        if memory_of(given, where) != "device":
            raise make_error(
                "unsupported",
                f"{where}: expected memory_kind='device' or None"
                + (f" inside {inside}" if inside else "; jax.device_put moves between memories")
                + f", found memory_kind={given.memory_kind!r}",
            )
    for found in [v.aval for v in (*eqn.invars, *eqn.outvars)]:
        if not is_in_host_memory(found):
            continue
        place = f"{name} inside {inside}" if inside else name
        raise make_error(
            "unsupported",
            f"{place} at {user_line(outer)}: expected values in device memory, where tasks "
            f"compute, found {found.str_short()}; move them to the devices before it, with "
            "jax.device_put(x, jax.memory.Space.Device), and back after it"
            + (f", both outside {inside}" if inside else ""),
        )


def check_targets(jaxpr: Jaxpr) -> None:
    """Refuses calls to FFI targets that are not registered for the CPU, except in branches that
    only some platforms run.

    Raises:
      JaxppError: "unsupported", with the user's line.
    """
    for eqn in jaxpr.eqns:
        if eqn.params.get("branches_platforms") is None:
            for inner in jaxprs_in(eqn.params):
                check_targets(inner)
        target = eqn.params.get("target_name") if eqn.primitive.name == "ffi_call" else None
        if target is not None and target not in host_call_targets():
            raise make_error(
                "unsupported",
                f"custom call {target!r} at {user_line(eqn)}: no handler of that name is "
                "registered for the CPU; call jax.ffi.register_ffi_target before the step is "
                "compiled",
            )


def check_equation(eqn: JaxprEqn) -> None:
    """Refuses an equation that no plugin of this library can run.

    Raises:
      JaxppError: a callback into Python that is ordered or runs once per shard, or a value in
        host memory ("unsupported"), with the user's line.
    """
    _check_inside(eqn, eqn)


def _check_inside(eqn: JaxprEqn, outer: JaxprEqn) -> None:
    for jaxpr in jaxprs_in(eqn.params):
        for each in jaxpr.eqns:
            _check_inside(each, outer)
    _check_memory(eqn, outer)
    _check_callback(eqn, outer)
