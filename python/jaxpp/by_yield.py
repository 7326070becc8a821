"""Functions without a loop: one pass through stages, or each rank's own results."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpp import _core
from jaxpp.errors import definition_line, make_error
from jaxpp.mesh import MpmdMesh
from jaxpp.schedules import check_count
from jaxpp.step import MpmdFunction, check_function, make_options, mpmd_jit_with_loop
from jaxpp.trace.loop import run_loop

__all__ = ["mpmd_jit_by_yield", "mpmd_jit_rev"]


@dataclasses.dataclass(frozen=True)
class _Last:
    """Keeps the value of the only microbatch."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return value


@dataclasses.dataclass(frozen=True)
class _OnePass:
    """A one-pass schedule, with one stage per mark or as many as the user gives."""

    target_num_stages: int | None

    def build_for(self, n_mubatches: int, mpmd_dim: int, num_marks: int) -> _core.Schedule:
        stages = self.target_num_stages or num_marks
        if not num_marks:
            raise make_error(
                "stage-marks",
                "mpmd_jit_by_yield: the function has no stage marks; expected one at the end "
                "of each stage (mark_stage_end)",
            )
        if num_marks not in (stages, stages - 1):
            raise make_error(
                "stage-marks",
                f"mpmd_jit_by_yield: target_num_stages={stages}, so expected {stages} stage "
                "marks (one at the end of each stage; the last may be left out), found "
                f"{num_marks}. Leave it out to get one stage per mark",
            )
        return _core.Schedule.one_pass(stages, mpmd_dim, n_mubatches, False)

    def build(self, n_mubatches: int, mpmd_dim: int) -> _core.Schedule:
        return self.build_for(n_mubatches, mpmd_dim, 0)


def _known(who: str, options: dict[str, Any]) -> dict[str, Any]:
    """Refuses unknown options and `schedule`, which needs a loop. Drops the option that
    `mpmd_jit_with_loop` ignores."""
    taken = inspect.signature(mpmd_jit_with_loop).parameters.keys() - {"schedule"}
    unknown = options.keys() - taken
    if unknown:
        raise TypeError(f"{who}() got an unexpected keyword argument {min(unknown)!r}")
    return {name: value for name, value in options.items() if name != "use_pgle"}


def mpmd_jit_by_yield(
    fun: Callable[..., Any] | None = None,
    mpmd_mesh: MpmdMesh | None = None,
    *,
    target_num_stages: int | None = None,
    **options: Any,
) -> Any:
    """Pipelines a function that has no loop: stage s runs on rank s mod ranks.

    Use it for inference, or for one pass of a model that exceeds the memory of one rank.

    Args:
      fun: the function. `mark_stage_end` ends each stage. It may compute gradients.
      mpmd_mesh: the ranks and their devices.
      target_num_stages: the number of stages; default: the number of marks.
      **options: as for `mpmd_jit_with_loop`.

    Returns:
      The pipelined function; a decorator if `fun` is omitted.

    Raises:
      JaxppError: for the same reasons as `mpmd_jit_with_loop`.
    """
    options = _known("mpmd_jit_by_yield", options)
    if target_num_stages is not None:
        what = "mpmd_jit_by_yield: target_num_stages"
        target_num_stages = check_count(what, target_num_stages)
    if fun is None:
        options.update(mpmd_mesh=mpmd_mesh, target_num_stages=target_num_stages)
        return functools.partial(mpmd_jit_by_yield, **options)
    check_function("mpmd_jit_by_yield", fun, mpmd_mesh)
    title = f"mpmd_jit_by_yield of the function at {definition_line(fun)}"
    schedule = _OnePass(target_num_stages)

    @functools.wraps(fun)
    def one_pass(*args: Any, **kwargs: Any) -> Any:
        return run_loop(lambda i: fun(*args, **kwargs), fun, 1, schedule, _Last(), title)

    made = make_options("mpmd_jit_by_yield", one_pass, mpmd_mesh, **options)
    return MpmdFunction(one_pass, made)


def mpmd_jit_rev(
    fun: Callable[..., Any] | None = None,
    mpmd_mesh: MpmdMesh | None = None,
    *,
    out_refs: Any,
    **options: Any,
) -> Any:
    """Splits a function without a loop by its results: each rank computes those that it holds.

    Use it to create weights on the ranks that own them. What the results of several ranks need,
    each of these ranks computes.

    Args:
      fun: the function.
      mpmd_mesh: the ranks and their devices.
      out_refs: a pytree prefix of the results: for each, the set of the ranks that must have
        it, such as the `mesh_ids` of an `MpmdSharding`.
      **options: as for `mpmd_jit_with_loop`.

    Returns:
      The function, an `MpmdFunction`; a decorator if `fun` is omitted.

    Raises:
      JaxppError: "sharding" from the first call if `out_refs` does not fit the results;
        otherwise for the same reasons as `mpmd_jit_with_loop`.
    """
    options = _known("mpmd_jit_rev", options)
    if fun is None:
        options.update(mpmd_mesh=mpmd_mesh, out_refs=out_refs)
        return functools.partial(mpmd_jit_rev, **options)
    made = make_options("mpmd_jit_rev", fun, mpmd_mesh, out_ranks=out_refs, **options)
    return MpmdFunction(fun, made)
