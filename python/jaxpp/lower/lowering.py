"""Lowers tasks to StableHLO, with one module for all tasks that compute the same."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import NamedSharding

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals.arrays import as_reduced, explicit_sharding, unreduced_axes
from jaxpp.jax_internals.context import context_mesh
from jaxpp.jax_internals.modules import LoweredModule, SharedContext
from jaxpp.lower.callbacks import Callback, Function, redirect_callbacks
from jaxpp.mesh import MpmdMesh
from jaxpp.operations import accumulate
from jaxpp.plan.evaluation import MadeOp, run_ops, with_calls
from jaxpp.plan.sharding import Specs
from jaxpp.trace.front import FrontOp, Graph
from jaxpp.trace.keys import literal_key

__all__ = ["Code", "Copies", "LoweredTask", "TaskLowerer", "TaskModules", "modules_of_all"]


@dataclasses.dataclass(frozen=True)
class LoweredTask:
    """A task's module: StableHLO bytecode; identical tasks share the object."""

    code: bytes
    callbacks: tuple[Callback, ...]  # callbacks whose addresses are in the code
    text: Callable[[], str]


# Of a task that only copies: an entry of `plan.copies()`.
Copies = Sequence[tuple[int | None, bool]]


class TaskLowerer:
    """Lowers the tasks of one plan.

    Args:
      graph: the traced step.
      staged: its partition.
      mesh: the mesh it runs on.
      specs: the shardings of the values that tasks exchange.
      platform: the target of the lowering ("cpu", "cuda", ...).
    """

    def __init__(
        self,
        graph: Graph,
        staged: _core.Staged,
        mesh: MpmdMesh,
        specs: Specs,
        platform: str,
    ) -> None:
        self.graph = graph
        self.staged = staged
        self._tasks = staged.tasks()
        self.mesh = mesh
        self.specs = specs
        self.platform = platform
        # The planner's own values have the types of the graph values that they are parts of,
        # unless they pack several of these.
        self.avals: list[Any] = [graph.avals.get(origin) for origin in staged.origins()]
        self._packed = staged.packed()
        for value, elements in self._packed.items():
            dtype = self.avals[value].dtype
            self.avals[value] = jax.core.ShapedArray((elements,), dtype)
        self._cache: dict[Any, LoweredTask] = {}
        self._context = SharedContext()

    # --- Evaluating a task ---

    def _made_op(self, made: _core.StagedOp) -> MadeOp:
        first = made.first_output

        def run(env: dict[int, Any]) -> None:
            values = [env[v] for v in made.inputs]
            if made.kind == _core.OP_SUM:
                env[first] = self._sum(values)
                if not unreduced_axes(self.avals[first]):
                    env[first] = as_reduced(env[first])
                return
            if made.kind == _core.OP_PACK:
                flat = [jnp.ravel(as_reduced(v)) for v in values]
                env[first] = jax.lax.concatenate(flat, 0)
                return
            if made.kind == _core.OP_UNPACK:
                shape = self.avals[first].shape
                end = made.attr + math.prod(shape)
                env[first] = jax.lax.slice(values[0], [made.attr], [end]).reshape(shape)
                return
            assert made.loop is not None
            front = self.graph.loops[made.loop]
            operation = front.operations[made.attr]
            if made.kind == _core.OP_INIT:
                is_packed = first in self._packed
                value = self.avals[first] if is_packed else front.value_avals[made.attr]
                struct = jax.ShapeDtypeStruct(value.shape, value.dtype)
                env[first] = operation.state(front.length, struct)
                if self.specs.of(first).unreduced:
                    env[first] = jax.reshard(env[first], self._sharding(first))
            elif made.kind == _core.OP_ACCUMULATE:
                index = values[2] if len(values) > 2 else None
                env[first] = accumulate(operation, values[0], values[1], index)

        outputs = tuple(range(first, first + made.num_outputs))
        return MadeOp(tuple(made.inputs), outputs, run)

    @staticmethod
    def _sum(terms: Sequence[jax.Array]) -> jax.Array:
        """The sum, which is unreduced if all terms are."""
        if len({unreduced_axes(jax.typeof(term)) for term in terms}) > 1:
            terms = list(map(as_reduced, terms))
        return functools.reduce(jax.lax.add, terms)

    def _front(self, op: int, staged: _core.StagedOp) -> FrontOp | None:
        """What an op of the graph, or a repeated one, computes; None for an op that only the
        planner makes."""
        if staged.kind == _core.OP_SUM:
            return None
        return self.graph.ops.get(staged.attr if staged.kind == _core.OP_REPEAT else op)

    def _op(self, op: int) -> FrontOp | MadeOp:
        staged = self.staged.op(op)
        front = self._front(op, staged)
        return self._made_op(staged) if front is None else self._resolved(front, staged)

    def _task_function(self, task: _core.StagedTask) -> Callable[..., list[Any]]:
        order: Sequence[int] = task.ops
        repeats: Sequence[tuple[int, int, int]] = ()
        # On several devices, calls save no time (docs/partition.md).
        if self.specs.one_device:
            order, repeats = self.staged.repeats(task.repeats)
        ops = [self._op(op) for op in order]
        wanted, aval_of = set(task.outputs), self.avals.__getitem__
        called = with_calls(ops, repeats, wanted, self.mesh, aval_of)

        def run(*args: Any) -> list[Any]:
            env = dict(zip(task.inputs, args, strict=True))
            if not self._is_written(task):
                env = {v: self._as_typed(v, arg) for v, arg in env.items()}
            run_ops(called, env, wanted, self.mesh, aval_of)
            return [env[v] for v in task.outputs]

        run.__name__ = task.name
        return run

    def _is_written(self, task: _core.StagedTask) -> bool:
        """Whether the user wrote the task: its types may then have shardings."""
        return self.staged.op(task.ops[0]).kind == _core.OP_TASK

    @staticmethod
    def _resolved(front: FrontOp, staged: _core.StagedOp) -> FrontOp:
        """The op with the inputs that the planner gave it, which bypass marks."""
        inputs = iter(staged.inputs)
        operands = tuple(
            [o if isinstance(o, Literal) else next(inputs) for o in front.operands]
        )
        first = staged.first_output
        if (operands, first) == (front.operands, front.first_output):
            return front
        return dataclasses.replace(front, operands=operands, first_output=first)

    # --- Identity of tasks ---

    def _op_key(self, op: int, local: dict[Any, int]) -> Any:
        staged = self.staged.op(op)
        front = self._front(op, staged)
        key: tuple[Any, ...]
        if front is None:
            what: Any = None
            if staged.kind in (_core.OP_INIT, _core.OP_ACCUMULATE):
                assert staged.loop is not None
                loop = self.graph.loops[staged.loop]
                value = str(loop.value_avals[staged.attr])
                what = (loop.operations[staged.attr], loop.length, value)
            elif staged.kind == _core.OP_UNPACK:
                what = (staged.attr, str(self.avals[staged.first_output]))
            key = (staged.kind, what, tuple(local[v] for v in staged.inputs))
        else:
            key = (front.code, tuple(local[v] for v in staged.inputs))
            key += self._split_key(front, local)
        for k in range(staged.num_outputs):
            local[staged.first_output + k] = len(local)
        return key

    @staticmethod
    def _split_key(op: FrontOp, local: dict[Any, int]) -> tuple[Any, ...]:
        """The groups of ops in a task that are rejoined."""
        key: list[Any] = []
        for branch in op.branches:
            index = branch.conditional.index
            at = literal_key(index) if isinstance(index, Literal) else local[index]
            conditional = local.setdefault(branch.conditional, len(local))
            key.append((conditional, branch.number, at))
        if op.part is not None:
            whole = local.setdefault(op.part.whole, len(local))
            key.append((whole, op.part.operands, op.part.results))
        return tuple(key)

    def _value_key(self, value: int) -> Any:
        specs = self.specs
        sharding = () if specs.one_device else (specs.of(value), specs.partial.get(value))
        return str(self.avals[value]), sharding

    def _task_key(self, task: _core.StagedTask, donations: Sequence[int | None]) -> Any:
        local: dict[Any, int] = {v: k for k, v in enumerate(task.inputs)}
        inputs = tuple(self._value_key(v) for v in task.inputs)
        ops = tuple(self._op_key(op, local) for op in task.ops)
        outputs = tuple((local[v], self._value_key(v)) for v in task.outputs)
        return inputs, ops, outputs, tuple(donations)

    # --- Lowering ---

    def lower(self, task: _core.StagedTask, donations: Sequence[int | None]) -> LoweredTask:
        """Lowers a task of `staged.tasks()` with its row of `plan.donations()`.

        Equal tasks have the same code in every process, including names.
        """
        mesh, repeated = self.mesh, self._tasks[task.repeats]
        if mesh.is_equal((task.rank, repeated.rank)):
            task = repeated
        key = self._task_key(task, donations)
        if mesh.unequal:
            key += (mesh.unstack[task.rank].devices.shape,)
        if key not in self._cache:
            self._cache[key] = self._lower(task, donations)
        return self._cache[key]

    def copied_dims(self, task: _core.StagedTask, copies: Copies) -> list[int] | None:
        mesh = self.mesh.unstack[task.rank]
        dims: list[int] = []
        for value, (position, by_rows) in zip(task.outputs, copies, strict=True):
            if position is not None:
                taken = task.inputs[position]
                if not by_rows or not self.specs.keeps_rows(taken, value, self.avals, mesh):
                    return None
            dims += self.specs.shard_shape(value, self.avals[value], mesh)
        return dims

    def _sharding(self, value: int) -> NamedSharding:
        return NamedSharding(self.mesh.lowering_mesh(), self.specs.of(value))

    def _type_in(self, value: int) -> NamedSharding | None:
        """The sharding in the type of a task's input; None if its axes are not explicit. It
        differs from the value's own type for a sum over the microbatches that is reduced
        after the loop, and for a value that is also a result of the step."""
        mesh, aval = self.mesh.lowering_mesh(), self.avals[value]
        own = explicit_sharding(aval, mesh)
        if self.specs.one_device:
            return own
        if own is None:
            return self._sharding(value) if self.specs.of(value).unreduced else None
        same = self.specs.is_laid_out(value, own.spec, aval, mesh)
        return own if same else self._sharding(value)

    def _as_typed(self, value: int, argument: jax.Array) -> jax.Array:
        """A task's input with the value's own type."""
        own = explicit_sharding(self.avals[value], self.mesh.lowering_mesh())
        if own is None or own == self._type_in(value):
            return argument
        return jax.reshard(argument, own)

    def _keep_partial(self, task: _core.StagedTask, module: LoweredModule) -> None:
        mesh = self.mesh.unstack[task.rank]
        several = {axis for axis, size in mesh.shape.items() if size > 1}

        def partial(values: Sequence[int]) -> dict[int, frozenset[str]]:
            axes = (self.specs.partial.get(v, frozenset()) & several for v in values)
            return {k: own for k, own in enumerate(axes) if own}

        arguments, results = partial(task.inputs), partial(task.outputs)
        if arguments or results:
            module.keep_partial(arguments, results, mesh)

    def _fit(self, module: LoweredModule, task: _core.StagedTask) -> None:
        """Gives the module's mesh the sizes of the mesh of the task's rank."""
        mesh = self.mesh.unstack[task.rank]
        if mesh.shape != self.mesh.lowering_mesh().shape and not module.set_sizes(mesh):
            raise make_error(
                "unsupported",
                f"task {task.name} has a shard_map, whose code is for a mesh of "
                f"{dict(self.mesh.lowering_mesh().shape)}; expected none on rank {task.rank}, "
                f"whose mesh is {dict(mesh.shape)}",
            )

    def _lower(self, task: _core.StagedTask, donations: Sequence[int | None]) -> LoweredTask:
        mesh = self.mesh.lowering_mesh()
        shardings = list(map(self._sharding, task.inputs))
        # Equations on explicit meshes expect operands whose types have shardings.
        if self._is_written(task):
            types: Sequence[NamedSharding | None] = shardings
        else:
            types = list(map(self._type_in, task.inputs))
            shardings = [t or s for t, s in zip(types, shardings, strict=True)]
        structs = [
            jax.ShapeDtypeStruct(self.avals[v].shape, self.avals[v].dtype, sharding=type_)
            for v, type_ in zip(task.inputs, types, strict=True)
        ]
        options: dict[str, Any] = {}
        if not self.specs.one_device or self._is_written(task):
            options["in_shardings"] = tuple(shardings)
            options["out_shardings"] = list(map(self._sharding, task.outputs))
        function = jax.jit(self._task_function(task), keep_unused=True, **options)
        with context_mesh(mesh), self._context.used():
            traced = function.trace(*structs)
            module = LoweredModule(traced.lower(lowering_platforms=(self.platform,)))
        if self.mesh.unequal:
            self._fit(module, task)
        self._keep_partial(task, module)
        module.set_aliases(donations)
        callbacks = redirect_callbacks(module)
        text = functools.cache(module.printer())  # each rank asks for the text
        return LoweredTask(module.into_bytecode(), callbacks, text)


class Code(Protocol):
    """Produces the StableHLO of a plan's tasks and its compile options."""

    compile_options: bytes

    def lower(self, task: _core.StagedTask, donations: Any) -> LoweredTask: ...

    def copied_dims(self, task: _core.StagedTask, copies: Copies) -> list[int] | None:
        """The dims on each device of the results of a task that only copies, one result after
        the other. None: some device does not have all elements that it copies."""


@dataclasses.dataclass
class TaskModules:
    """The modules of a plan's tasks."""

    compile_options: bytes
    modules: list[bytes]  # in order of first use
    of_task: list[int]  # a number for each task; _core.NONE for one without ops
    shard_dims: list[list[int] | None]  # by task, as of `Code.copied_dims()`
    # By task and address, the functions of modules that only this process can run.
    functions: dict[str, dict[int, Function]]


def modules_of_all(plan: _core.Plan, code: Code) -> TaskModules:
    """Lowers all tasks, including those that other processes compile, or that the runtime
    runs without a module."""
    numbers: dict[bytes, int] = {}
    of_task: list[int] = []
    shard_dims: list[list[int] | None] = []
    functions: dict[str, dict[int, Function]] = {}
    rows = zip(plan.staged().tasks(), plan.donations(), plan.copies(), strict=True)
    for task, donations, copies in rows:
        shard_dims.append(None if copies is None else code.copied_dims(task, copies))
        if not task.ops:
            of_task.append(_core.NONE)
            continue
        lowered = code.lower(task, donations)
        of_task.append(numbers.setdefault(lowered.code, len(numbers)))
        if lowered.callbacks:
            functions[task.name] = {
                made.object.address(): made.function for made in lowered.callbacks
            }
    return TaskModules(code.compile_options, list(numbers), of_task, shard_dims, functions)
