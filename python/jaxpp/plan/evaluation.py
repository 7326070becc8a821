"""Evaluates ops of the graph on tracers, to lower them.

Ops that were split (`trace/splitting.py`) are rejoined if several of them are in the same task:
the parts of a scan run as one scan, and the ops of a branch under one condition.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, jaxpr_as_fun

from jaxpp.jax_internals.arrays import wrap_keys
from jaxpp.jax_internals.jaxprs import bind, repeat, settings_of
from jaxpp.mesh import MpmdMesh
from jaxpp.trace.front import FrontOp
from jaxpp.trace.splitting import Conditional, Whole
from jaxpp.trace.written import task_p

__all__ = ["MadeOp", "run_op", "run_ops", "with_calls", "zeros"]

_Env = dict[int, Any]


@dataclasses.dataclass(frozen=True)
class MadeOp:
    """An op that the planner created: `run` adds its outputs to the environment."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    run: Callable[[_Env], None]


_Op = FrontOp | MadeOp


def _bind(op: FrontOp, params: dict[str, Any], operands: Sequence[Any], mesh: MpmdMesh) -> Any:
    """Evaluates one equation on tracers."""
    if op.primitive.name == "sharding_constraint" and mesh.lowering_mesh().size == 1:
        return list(operands)
    if op.primitive is task_p:
        return jaxpr_as_fun(params["jaxpr"])(*operands)
    if op.eqn is not None and op.params is op.eqn.params and op.primitive is op.eqn.primitive:
        return repeat(op.eqn, operands)
    with settings_of(op.eqn) if op.eqn else contextlib.nullcontext():
        return bind(op.primitive, params, operands)


def _read(operand: Any, env: _Env) -> Any:
    return operand.val if isinstance(operand, Literal) else env[operand]


def run_op(op: FrontOp, env: _Env, mesh: MpmdMesh) -> None:
    """Evaluates a single op, ignoring its condition if it is in a branch. Operands and outputs
    are in `env` by value id."""
    operands = [_read(o, env) for o in op.operands]
    if op.is_choice:
        index = _read(op.branches[-1].conditional.index, env)
        env[op.first_output] = _choice(index, operands)
        return
    for k, out in enumerate(_bind(op, op.params, operands, mesh)):
        env[op.first_output + k] = out


def _choice(index: Any, cases: Sequence[Any]) -> Any:
    """Selects one of several computed values."""
    dtype = next((c.dtype for c in cases if hasattr(c, "aval")), None)
    arrays = [c if hasattr(c, "aval") else jnp.asarray(c, dtype) for c in cases]
    return jax.lax.select_n(jnp.asarray(index), *arrays)


def _run_together(ops: Sequence[FrontOp], env: _Env, mesh: MpmdMesh) -> None:
    """Evaluates several parts of an equation together."""
    parted = [(op, op.part) for op in ops if op.part is not None]
    whole = parted[0][1].whole
    num_operands, num_results = len(whole.eqn.invars), len(whole.eqn.outvars)
    operands: dict[int, Any] = {}
    for op, part in parted:
        operands.update(zip(part.operands, op.operands, strict=True))
    wanted = {r for _, part in parted for r in part.results if r < num_results}
    merged = whole.part_with(wanted)
    given = [_read(operands[k], env) for k in merged.part.operands if k < num_operands]
    outs = _bind(ops[0], merged.params, given, mesh)
    by_result = dict(zip(merged.part.results, outs, strict=True))
    for op, part in parted:
        for k, result in enumerate(part.results):
            if result in by_result:
                env[op.first_output + k] = by_result[result]


# --- Conditions -------------------------------------------------------------------------


def _values_in(op: _Op) -> list[int]:
    if isinstance(op, MadeOp):
        return list(op.inputs)
    indices = [branch.conditional.index for branch in op.branches]
    return [o for o in (*op.operands, *indices) if isinstance(o, int)]


def _values_out(op: _Op) -> range | tuple[int, ...]:
    if isinstance(op, MadeOp):
        return op.outputs
    return range(op.first_output, op.first_output + op.num_outputs)


def _inside(op: FrontOp) -> FrontOp:
    return dataclasses.replace(op, branches=op.branches[1:])


@dataclasses.dataclass
class _Runner:
    env: _Env
    mesh: MpmdMesh
    aval_of: Callable[[int], Any]

    def _condition(
        self, conditional: Conditional, ops: Sequence[FrontOp], wanted: Collection[int]
    ) -> None:
        """Runs ops of a conditional under one condition and returns the wanted values."""
        index = _read(conditional.index, self.env)
        if all(op.branches[0].number is None for op in ops):
            for op in ops:
                run_op(op, self.env, self.mesh)
            return
        chosen = {op.first_output: op for op in ops if op.branches[0].number is None}
        made_in = {
            v: op.branches[0].number
            for op in ops
            if op.branches[0].number is not None
            for v in _values_out(op)
        }
        results = [v for op in ops for v in _values_out(op) if v in wanted]

        def run_branch(number: int) -> list[Any]:
            runner = _Runner(dict(self.env), self.mesh, self.aval_of)
            inside = [_inside(op) for op in ops if op.branches[0].number == number]
            cases = {v: op.operands[number] for v, op in chosen.items()}
            own = {v for v, branch in made_in.items() if branch == number}
            needed = {c for c in cases.values() if isinstance(c, int)} | own
            runner.run(inside, needed)

            def result(value: int) -> Any:
                aval = self.aval_of(value)
                if value in cases:
                    return _typed(_read(cases[value], runner.env), aval)
                return runner.env[value] if value in own else zeros(aval)

            return [result(v) for v in results]

        branches = [lambda n=n: run_branch(n) for n in range(conditional.num_branches)]
        self.env.update(zip(results, jax.lax.switch(index, branches), strict=True))

    def run(self, ops: Sequence[_Op], wanted: Collection[int]) -> None:
        """Evaluates ops in order, and split ops together.

        `wanted`: the values that are used elsewhere.
        """
        users: dict[int, int] = {}  # for each value, the number of ops left that use it
        for op in ops:
            for v in _values_in(op):
                users[v] = users.get(v, 0) + 1
        wholes: dict[Whole, list[FrontOp]] = {}
        for op in ops:
            if isinstance(op, FrontOp) and op.part is not None and not op.branches:
                wholes.setdefault(op.part.whole, []).append(op)
        pending: dict[Conditional, list[FrontOp]] = {}

        def flush(conditional: Conditional) -> None:
            group = pending.pop(conditional)
            for op in group:
                for v in _values_in(op):
                    users[v] -= 1
            outside = {
                v for op in group for v in _values_out(op) if users.get(v) or v in wanted
            }
            self._condition(conditional, group, outside)

        def flush_makers(op: _Op, but: Conditional | None) -> None:
            values = set(_values_in(op))
            for conditional, group in list(pending.items()):
                if conditional is but or conditional not in pending:
                    continue
                if any(v in values for g in group for v in _values_out(g)):
                    flush(conditional)

        for op in ops:
            if isinstance(op, FrontOp) and op.branches:
                conditional = op.branches[0].conditional
                flush_makers(op, conditional)
                pending.setdefault(conditional, []).append(op)
                continue
            parts = [] if isinstance(op, MadeOp) or not op.part else wholes[op.part.whole]
            if not parts or op is parts[0]:
                for each in (op, *parts):
                    flush_makers(each, None)
            for v in _values_in(op):
                users[v] -= 1
            if isinstance(op, MadeOp):
                op.run(self.env)
            elif len(parts) < 2:
                run_op(op, self.env, self.mesh)
            elif op is parts[0]:
                _run_together(parts, self.env, self.mesh)
        for conditional in list(pending):
            flush(conditional)


def _typed(value: Any, aval: Any) -> Any:
    """A literal as an array of the type that the other branches return."""
    return value if hasattr(value, "aval") else jnp.asarray(value, aval.dtype)


def zeros(aval: Any) -> jax.Array:
    """Zeros of an abstract value's shape and dtype; for PRNG keys, keys with zero data."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.zeros(aval.shape, aval.dtype)
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    data = jax.eval_shape(jax.random.key_data, struct)
    return wrap_keys(jnp.zeros(data.shape, data.dtype), aval.dtype)


def run_ops(
    ops: Sequence[_Op],
    env: _Env,
    wanted: Collection[int],
    mesh: MpmdMesh,
    aval_of: Callable[[int], Any],
) -> None:
    """Evaluates the ops of a task.

    Args:
      ops: in a valid order.
      env: the task's inputs by value id; computed values are added.
      wanted: the task's outputs.
      mesh: the mesh that the task runs on.
      aval_of: the abstract value of a value id.
    """
    _Runner(env, mesh, aval_of).run(ops, wanted)


# --- Repeats ----------------------------------------------------------------------------


def _uses(ops: Sequence[_Op]) -> collections.Counter[int]:
    """How often ops use each value, in the order of first use."""
    return collections.Counter([v for op in ops for v in _values_in(op)])


def _as_calls(
    blocks: Sequence[Sequence[_Op]],
    uses: Mapping[int, int],
    mesh: MpmdMesh,
    aval_of: Callable[[int], Any],
) -> list[MadeOp]:
    """A call for each of several equal blocks, to one function. `uses`: how often the whole
    task uses each value."""
    inside = [_uses(block) for block in blocks]
    made = [[v for op in block for v in _values_out(op)] for block in blocks]
    taken = [
        tuple([v for v in used if v not in own])
        for used, own in zip(inside, map(set, made), strict=True)
    ]
    # Positions, in a block, of the values that are used outside it.
    returned = [
        k
        for k, values in enumerate(zip(*made, strict=True))
        if any(uses[v] > used[v] for v, used in zip(values, inside, strict=True))
    ]
    results = [tuple([values[k] for k in returned]) for values in made]

    def repeated(*args: Any) -> list[Any]:
        env = dict(zip(taken[0], args, strict=True))
        run_ops(blocks[0], env, results[0], mesh, aval_of)
        return [env[v] for v in results[0]]

    calls: list[JaxprEqn] = []  # empty until the first block runs, then one call

    def run(block: int, env: _Env) -> None:
        operands = [env[v] for v in taken[block]]
        if not calls:
            with jax.disable_jit(False):  # otherwise jax.jit makes no call
                calls.extend(jax.make_jaxpr(jax.jit(repeated))(*map(jax.typeof, operands)).eqns)
        outs = repeat(calls[0], operands)
        env.update(zip(results[block], outs, strict=True))

    return [MadeOp(taken[k], results[k], functools.partial(run, k)) for k in range(len(blocks))]


def with_calls(
    ops: Sequence[_Op],
    repeats: Sequence[tuple[int, int, int]],
    wanted: Collection[int],
    mesh: MpmdMesh,
    aval_of: Callable[[int], Any],
) -> Sequence[_Op]:
    """The ops of a task, with calls to one function in place of blocks that compute the same,
    so that JAX lowers it once. `repeats` as `Staged.repeats()` returns them, the others as
    in `run_ops`."""
    if not repeats:
        return ops
    uses = _uses(ops)
    uses.update(wanted)
    found: list[_Op] = []
    end = 0
    for first, length, count in repeats:
        found += ops[end:first]
        end = first + length * count
        blocks = [ops[k : k + length] for k in range(first, end, length)]
        found += _as_calls(blocks, uses, mesh, aval_of)
    return [*found, *ops[end:]]
