"""Moves between memories, which a step writes as `jax.device_put`.

In the graph, a value's type includes its memory, and tasks compute in device memory only.
So the equation of a move computes nothing.

A scan whose body moves values moves them together, before it or after it: a policy of
`jax.checkpoint` that offloads the activations of each layer offloads those of all layers
of the scan.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import Sharding

from jaxpp.jax_internals.jaxprs import bind, changed_jaxpr, evaluate, new_var
from jaxpp.mesh import memory_of

__all__ = [
    "is_in_host_memory",
    "is_move",
    "is_put",
    "memory_after",
    "move_of_one",
    "puts_of_one",
    "run_in_device_memory",
    "with_moves_around",
    "without_memory",
]


def is_in_host_memory(aval: Any) -> bool:
    """Whether JAX's type of a value is in host memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def is_move(eqn: JaxprEqn) -> bool:
    """Whether an equation moves arrays between memories."""
    if not is_put(eqn):
        return False
    if any(isinstance(device, jax.memory.Space) for device in eqn.params["devices"]):
        return True
    return any(is_in_host_memory(v.aval) for v in (*eqn.invars, *eqn.outvars))


def is_put(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `device_put`, to another memory or not."""
    return eqn.primitive is jax.lax.device_put_p


def move_of_one(eqn: JaxprEqn, number: int) -> dict[str, Any]:
    """The parameters of a `device_put` for one of its arrays."""
    names = ("devices", "srcs", "copy_semantics")
    return {name: (eqn.params[name][number],) for name in names}


def puts_of_one(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """A `device_put` of a tree as one for each array, which may be on different ranks."""
    for k, (taken, made) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
        params = {**eqn.params, **move_of_one(eqn, k)}
        yield eqn.replace(invars=[taken], outvars=[made], params=params)


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

    def without_moves(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if not is_move(eqn):
            return None
        ways = [without_memory(eqn, k) for k in range(len(operands))]
        pairs = zip(ways, operands, strict=True)
        return [out for (primitive, params), x in pairs for out in bind(primitive, params, [x])]

    return evaluate(closed, args, without_moves)


# --- Moves in a scan ----------------------------------------------------------------------


def _in_memory(aval: Any, memory: jax.memory.Space) -> Any:
    return aval.update(memory_space=memory)


def _without_moves(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with all its values in device memory."""
    found: dict[Any, Any] = {}

    def define(v: Any) -> Any:
        if is_in_host_memory(v.aval):
            found[v] = new_var(_in_memory(v.aval, jax.memory.Space.Device))
        return found.get(v, v)

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else found.get(atom, atom)

    invars = list(map(define, closed.jaxpr.invars))
    eqns = []
    for eqn in closed.eqns:
        operands = list(map(read, eqn.invars))
        if not is_move(eqn):
            params = {name: _param_without_moves(param) for name, param in eqn.params.items()}
            outvars = list(map(define, eqn.outvars))
            eqns.append(eqn.replace(invars=operands, outvars=outvars, params=params))
            continue
        for number, (operand, out) in enumerate(zip(operands, eqn.outvars, strict=True)):
            primitive, params = without_memory(eqn, number)
            outvar = define(out)
            eqns.append(
                eqn.replace(
                    primitive=primitive, params=params, invars=[operand], outvars=[outvar]
                )
            )
    return changed_jaxpr(
        closed, invars=invars, outvars=list(map(read, closed.jaxpr.outvars)), eqns=eqns
    )


def _param_without_moves(param: Any) -> Any:
    if isinstance(param, ClosedJaxpr):
        return _without_moves(param)
    if isinstance(param, Jaxpr):
        return _without_moves(ClosedJaxpr(param, ())).jaxpr
    if type(param) in (tuple, list):
        return type(param)(map(_param_without_moves, param))
    return param


@functools.cache
def _params_of_move(memory: jax.memory.Space) -> dict[str, Any]:
    closed = jax.make_jaxpr(lambda x: jax.device_put(x, memory))(0.0)
    return dict(closed.eqns[0].params)


def _moved(eqn: JaxprEqn, v: Any, memory: jax.memory.Space) -> JaxprEqn:
    """An equation beside `eqn` that moves a variable."""
    return eqn.replace(
        primitive=jax.lax.device_put_p,
        params=_params_of_move(memory),
        invars=[v],
        outvars=[new_var(_in_memory(v.aval, memory))],
        effects=set(),
    )


def with_moves_around(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """A scan on values in device memory, after moves of its operands from the host and
    before moves of its results to the host; None if it has no such operands and results."""
    if not any(is_in_host_memory(v.aval) for v in (*eqn.invars, *eqn.outvars)):
        return None
    invars = [new_var(v.aval) for v in eqn.invars]
    before = {
        v: _moved(eqn, v, jax.memory.Space.Device) for v in invars if is_in_host_memory(v.aval)
    }
    outvars = [new_var(_in_memory(v.aval, jax.memory.Space.Device)) for v in eqn.outvars]
    after = {
        made: _moved(eqn, made, jax.memory.Space.Host)
        for made, v in zip(outvars, eqn.outvars, strict=True)
        if is_in_host_memory(v.aval)
    }
    scan = eqn.replace(
        invars=[before[v].outvars[0] if v in before else v for v in invars],
        outvars=outvars,
        params={**eqn.params, "jaxpr": _without_moves(eqn.params["jaxpr"])},
    )
    results = [after[v].outvars[0] if v in after else v for v in outvars]
    eqns = [*before.values(), scan, *after.values()]
    return changed_jaxpr(eqn.params["jaxpr"], invars=invars, outvars=results, eqns=eqns)
