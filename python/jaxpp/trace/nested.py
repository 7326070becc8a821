"""Steps called while JAX traces another function.

`jax.eval_shape` and `jax.make_jaxpr` of a step work: the call becomes one equation whose
results have the shapes of the step's results. Transformations that would run that equation
(`jax.jit`, `jax.grad`, `jax.vmap`, `jax.lax.scan`, another step) are refused, because a step
runs on the devices of its own mesh, under its own runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from jaxpp.errors import here, make_error
from jaxpp.jax_internals.jaxprs import without_constants

__all__ = ["bind_step", "refuse_traced", "step_p"]

# Operands: the values that the step's function closes over, then its flat arguments.
# Parameters: `body`, a jaxpr from these to its results; `name`, the function's name; `where`,
# the line of the call.
step_p = Primitive("mpmd_step")
step_p.multiple_results = True
step_p.def_abstract_eval(lambda *avals, body, **params: list(body.out_avals))


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, name: str, where: str, **params: Any) -> Any:
        raise make_error(
            "unsupported",
            f"step {name} called at {where}: expected arrays, found traced values: it is "
            f"{what}. Call it from plain Python, where it is compiled; jax.grad, jax.vmap and "
            "loops belong inside the step's function",
        )

    return refuse


refuse_traced = _refuse("called inside jax.jit, jax.lax.scan or another step")
step_p.def_impl(refuse_traced)
mlir.register_lowering(step_p, lambda ctx, *args, **params: refuse_traced(**params))
ad.primitive_jvps[step_p] = _refuse("differentiated (jax.grad, jax.jvp)")
batching.primitive_batchers[step_p] = _refuse("vmapped")


def bind_step(name: str, closed: ClosedJaxpr, leaves: Sequence[Any]) -> list[Any]:
    """The results of a step whose function has this jaxpr, on traced arguments."""
    body = ClosedJaxpr(without_constants(closed.jaxpr), ())
    operands = [*closed.consts, *map(jnp.asarray, leaves)]
    return step_p.bind(*operands, body=body, name=name, where=here())
