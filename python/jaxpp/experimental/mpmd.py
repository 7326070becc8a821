"""Programs written by hand: tasks on ranks, and transfers between ranks, without a schedule.

    @mpmd(mesh, in_shardings=(on_0, on_0))
    def step(w, x):
        h = task(forward, out_shardings=on_0)(w, x)
        h = transfer(h, out_shardings=on_1).done()
        return task(loss, out_shardings=on_1)(h)

A rank runs its tasks in the order in which they are written. Such a program is planned, proved
and run like any other step.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpp.array import MpmdArray
from jaxpp.errors import definition_line, make_error
from jaxpp.mesh import MpmdMesh
from jaxpp.plan.planned import Traced
from jaxpp.step import BoundStep, LoweredStep, MpmdFunction, make_options
from jaxpp.trace.call import Call, struct_of
from jaxpp.trace.program import Program, TaskOptions, Transfer, current_program
from jaxpp.trace.stacked import parts_of_leaves

__all__ = [
    "LoweredMpmdFun",
    "MpmdFunction",
    "MpmdMesh",
    "Transfer",
    "mpmd",
    "slice",
    "stack",
    "task",
    "transfer",
]


class LocalJaxpr:
    """The program of one rank.

    Attributes:
      global_invar_indices: the numbers of the argument leaves that the rank receives.
      global_outvar_indices: the numbers of the result leaves that it produces.
    """

    def __init__(self, plan: Traced, rank: int) -> None:
        self._plan, self._rank = plan, rank
        arguments, results = plan.staged.args(), plan.staged.outputs()
        self.global_invar_indices = _on_rank(arguments, plan.argument_bounds, rank)
        self.global_outvar_indices = _on_rank(results, plan.result_bounds, rank)

    def __str__(self) -> str:
        _, *programs = self._plan.text.split("\nactor ")
        return f"actor {programs[self._rank]}"


def _on_rank(placed: Sequence[Any], bounds: Sequence[Any], rank: int) -> tuple[int, ...]:
    """The numbers of the leaves of which the rank has at least a part."""
    parts = enumerate(parts_of_leaves(bounds))
    return tuple(k for k, own in parts if any(rank in placed[v].ranks for v in own))


class LoweredMpmdFun(LoweredStep):
    """A program planned for given arguments.

    Attributes:
      local_jaxprs: the program of each rank.
    """

    def __init__(self, function: MpmdFunction, call: Call, plan: Traced) -> None:
        super().__init__(function, call, plan)
        self.mpmd_mesh = plan.mesh
        self.local_jaxprs = tuple(LocalJaxpr(plan, r) for r in range(plan.mesh.mpmd_dim))
        self._bound: BoundStep | None = None

    @property
    def _local_jaxpr(self) -> LocalJaxpr:
        return self.local_jaxprs[self.mpmd_mesh.my_mpmd_axis_index]

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments, as a tuple of their trees."""
        return super().in_shardings[0]

    @property
    def out_shape(self) -> Any:
        """The shapes and dtypes of the results."""
        return self.plan.out_info

    def _local_arguments(self) -> set[int]:
        unstack = enumerate(self.mpmd_mesh.unstack)
        own = [rank for rank, mesh in unstack if mesh.local_devices]
        return {k for rank in own for k in self.local_jaxprs[rank].global_invar_indices}

    @property
    def used_inputs(self) -> Any:
        """For each argument leaf whether this process has to pass it."""
        used, tree = self._local_arguments(), jax.tree.structure(self.in_shardings)
        return jax.tree.unflatten(tree, [k in used for k in range(tree.num_leaves)])

    def __call__(self, *args: Any) -> Any:
        if self._bound is None:
            self._bound = self.compile()
        return self._bound(*args)

    def eval_local(self, *local_args: Any) -> Any:
        """Runs the program on the argument leaves that this process has to pass, in order."""
        used = sorted(self._local_arguments())
        if len(local_args) != len(used):
            raise make_error(
                "invalid-argument",
                f"eval_local: expected the {len(used)} argument leaves that used_inputs marks, "
                f"found {len(local_args)}",
            )
        given = dict(zip(used, local_args, strict=True))
        shardings, tree = jax.tree.flatten(self.in_shardings)
        structs = map(struct_of, self._call.leaves)
        leaves = [
            given[k]
            if k in given
            else MpmdArray([], sharding, shape=struct.shape, dtype=struct.dtype)
            for k, (sharding, struct) in enumerate(zip(shardings, structs, strict=True))
        ]
        return self(*jax.tree.unflatten(tree, leaves))


class _Written(MpmdFunction):
    """The callable that `mpmd` returns."""

    def _bind(self, call: Call) -> Any:
        """In another trace, the program's equations become part of that trace."""
        return self._fun(*call.args)

    def lower(self, *args: Any, **kwargs: Any) -> LoweredMpmdFun:
        call = self._concrete(args, kwargs)
        return LoweredMpmdFun(self, call, self._plan(call))


def mpmd(
    mpmd_mesh: MpmdMesh,
    *,
    in_shardings: Any,
    donate_argnums: int | Sequence[int] | None = None,
    infer_donation: bool = False,
    compiler_options: Any = None,
    plugin: Any = None,
    memory_limit: Any = None,
    steps_in_flight: int | None = None,
) -> Callable[[Callable[..., Any]], MpmdFunction]:
    """A decorator for a program written by hand.

    Its function takes positional arguments and consists of calls of `task` and `transfer`;
    all computations are in tasks.

    Args:
      mpmd_mesh: the ranks and their devices.
      in_shardings: a pytree prefix of the arguments, with a `NamedSharding` on the mesh of one
        rank, `mpmd_mesh.unstack[i]`, or of several, `mpmd_mesh.mpmd_submesh([...]).jax_mesh`.
      donate_argnums: arguments whose memory the program may reuse.
      infer_donation: accepted for compatibility and ignored: the plan reuses the memory of
        every value inside the program after its last use.
      compiler_options, plugin, memory_limit, steps_in_flight: as for `mpmd_jit_with_loop`.

    Returns:
      A decorator, which returns an `MpmdFunction`. Its `lower` returns a `LoweredMpmdFun`.

    Raises:
      JaxppError: from the first call, `lower` or `compile`, before anything runs.
    """

    def decorate(fun: Callable[..., Any]) -> MpmdFunction:
        @functools.wraps(fun)
        def program(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                raise make_error(
                    "invalid-argument",
                    f"mpmd of the function at {definition_line(fun)}: expected positional "
                    f"arguments, found keyword arguments ({min(kwargs)}=)",
                )
            return Program(mpmd_mesh, fun, in_shardings).run(*args)

        made = make_options(
            "mpmd",
            program,
            mpmd_mesh,
            in_shardings=in_shardings,
            donate_argnums=donate_argnums,
            compiler_options=compiler_options,
            plugin=plugin,
            memory_limit=memory_limit,
            steps_in_flight=steps_in_flight,
        )
        return _Written(program, dataclasses.replace(made, written=True))

    return decorate


def task(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    out_shardings: Any,
    name: str | None = None,
    in_shardings: Any = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Any:
    """A function that runs as one program on one rank, or on each of several ranks.

    Args:
      fun: the function, of pytrees of arrays.
      out_shardings: a pytree prefix of its results, with a `NamedSharding` on the mesh of its
        ranks; or a `PartitionSpec`, if the arguments or `mesh` determine the ranks.
      name: for traces and messages; default: the name of `fun`.
      in_shardings: the shardings of the arguments, which are already known; they must be
        on the same ranks.
      mesh: the mesh of its ranks, for a function without arguments. On a mesh of several
        ranks, each of them computes the same from the same arguments.
      donate_argnums: arguments that the program does not use again. The plan reuses the memory
        of every value after its last use anyway; the argument only makes a later use an
        error.

    Returns:
      The function, to be called on values of the program; a decorator if `fun` is omitted.

    Raises:
      JaxppError: from the call: "mesh" (arguments of several ranks), "sharding", "donated",
        "invalid-argument".
    """
    options = TaskOptions(out_shardings, name, in_shardings, mesh, donate_argnums)

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def run(*args: Any) -> Any:
            return current_program("task").add_task(fun, args, options)

        return run

    return decorate if fun is None else decorate(fun)


def transfer(tree: Any, *, out_shardings: Any) -> Transfer:
    """Sends arrays to other ranks as soon as they exist.

    Args:
      tree: a pytree of values of the program.
      out_shardings: a pytree prefix of it, with a `NamedSharding` on the mesh of other ranks.
        An array may be sharded differently there.

    Returns:
      A `Transfer`, whose `done()` returns the arrays on their new ranks.

    Raises:
      JaxppError: "mesh" (the array is already on these ranks), "sharding", "donated",
        "invalid-argument".
    """
    return current_program("transfer").add_transfer(tree, out_shardings)


def stack(*arrays: Any) -> Any:
    """Arrays of disjoint ranks as one array, whose rows are divided over these ranks.

    It transfers nothing. A task over these ranks receives all rows on each of them.

    Args:
      *arrays: values of one rank each, or divided over several. They have the same dtype,
        the same number of rows on each rank, and the same further dimensions.
    """
    return current_program("stack").stack(arrays)


def slice(array: Any, groups: Sequence[int | Sequence[int]]) -> list[Any]:
    """The inverse of `stack`: for each group of ranks, its part of an array.

    Args:
      array: a value of several ranks. If each of them has a copy, each group has copies.
      groups: ranks, or lists of ranks.
    """
    return current_program("slice").slice(array, groups)
