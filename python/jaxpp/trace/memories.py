"""Moves between memories, which a step writes as `jax.device_put`.

In the graph, a value's type includes its memory, and tasks compute in device memory only.
So the equation of a move computes nothing.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.sharding import Sharding

from jaxpp.jax_internals.jaxprs import bind, settings_of
from jaxpp.jax_internals.lines import at_line_of
from jaxpp.mesh import memory_of

__all__ = [
    "is_in_host_memory",
    "is_move",
    "memory_after",
    "move_of_one",
    "run_in_device_memory",
    "without_memory",
]


def is_in_host_memory(aval: Any) -> bool:
    """Whether JAX's type of a value is in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def is_move(eqn: JaxprEqn) -> bool:
    """Whether an equation moves arrays between memories."""
    if eqn.primitive is not jax.lax.device_put_p:
        return False
    if any(isinstance(device, jax.memory.Space) for device in eqn.params["devices"]):
        return True
    return any(is_in_host_memory(v.aval) for v in (*eqn.invars, *eqn.outvars))


def move_of_one(eqn: JaxprEqn, number: int) -> dict[str, Any]:
    """The parameters of a `device_put` for one of its arrays."""
    names = ("devices", "srcs", "copy_semantics")
    return {name: (eqn.params[name][number],) for name in names}


def memory_after(eqn: JaxprEqn, number: int, where: str | None) -> str:
    """The memory to which a `device_put` moves one of its arrays.

    Raises:
      JaxppError: a sharding names a memory kind other than "device" and "pinned_host"
        ("unsupported").
    """
    memory_of(eqn.params["devices"][number], f"device_put at {where}")
    return "pinned_host" if is_in_host_memory(eqn.outvars[number].aval) else "device"


def without_memory(eqn: JaxprEqn, number: int) -> tuple[Any, dict[str, Any]]:
    """The primitive and the parameters for the part of a `device_put` of one array that a
    task must do: to shard it."""
    device = eqn.params["devices"][number]
    if not isinstance(device, Sharding):
        return jax.lax.copy_p, {}
    on_devices = {"devices": (device.with_memory_kind("device"),), "srcs": (None,)}
    return eqn.primitive, {**move_of_one(eqn, number), **on_devices}


def run_in_device_memory(closed: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates the equations of a task without its moves; the types of its results and
    arguments give their memories."""
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.eqns:
        given = list(map(read, eqn.invars))
        with settings_of(eqn), at_line_of(eqn):
            if is_move(eqn):
                ways = [without_memory(eqn, k) for k in range(len(given))]
                outs = [
                    out
                    for (primitive, params), x in zip(ways, given, strict=True)
                    for out in bind(primitive, params, [x])
                ]
            else:
                outs = bind(eqn.primitive, eqn.params, given)
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, closed.jaxpr.outvars))
