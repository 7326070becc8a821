"""The loop over microbatches, which a user writes into a step."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxpp import _core
from jaxpp.errors import (
    JaxppError,
    check_arrays,
    describe,
    here,
    make_error,
    shorten,
    tree_text,
    warn,
)
from jaxpp.jax_internals.arrays import broadcast_prefix
from jaxpp.jax_internals.context import is_of_a_closed_trace, is_tracing
from jaxpp.jax_internals.jaxprs import (
    discharged,
    drop_unused,
    is_ref,
    is_transposed,
    without_constants,
)
from jaxpp.jax_internals.lines import name_after, user_line
from jaxpp.operations import Add, Concat, normalize, state_of
from jaxpp.schedules import BaseSchedule
from jaxpp.trace.marks import find_mistake, first_mark, inner_jaxprs, noting_marks

__all__ = [
    "loop_p",
    "refuse_refs_from_outside",
    "run_loop",
    "treduce",
    "treduce_i",
    "warn_of_marks_without_loop",
]

_DEFAULT = (Concat(), Add)  # operations: of a loss, and of its gradients

# A microbatch number is an int32.
_MOST_MICROBATCHES = _core.LARGEST_COUNT

# --- The loop ---------------------------------------------------------------------------

# Operands: what the body closes over. Parameters: `body`, a jaxpr from these and the
# microbatch number to one value of each result; `length`; `schedule`; `operations`, one a
# result; `title`, what messages call it; `mistake`, what is wrong with its marks or None.
# Results: the states after the last microbatch.
loop_p = Primitive("microbatch_loop")
loop_p.multiple_results = True


def _loop_abstract_eval(
    *avals: Any, body: Any, length: int, operations: tuple[Any, ...], **params: Any
) -> list[Any]:
    return [
        state_of(operation, length, value)
        for operation, value in zip(operations, body.out_avals, strict=True)
    ]


loop_p.def_abstract_eval(_loop_abstract_eval)


def _first_states(operations: Sequence[Any], values: Sequence[Any], length: int) -> list[Any]:
    """The states before the first microbatch, whose values have these shapes and dtypes."""
    return [
        operation.state(length, jax.ShapeDtypeStruct(value.shape, value.dtype))
        for operation, value in zip(operations, values, strict=True)
    ]


def _updated(
    operations: Sequence[Any], states: Sequence[Any], values: Sequence[Any], i: jax.Array
) -> list[Any]:
    """The states after one more microbatch."""
    return [
        operation.update(state, value, i)
        for operation, state, value in zip(operations, states, values, strict=True)
    ]


def _loop_in_order(
    *consts: Any, body: Any, length: int, operations: tuple[Any, ...], **params: Any
) -> list[Any]:
    """What the loop means: one microbatch after the other."""
    states = _first_states(operations, body.out_avals, length)
    run_body = jaxpr_as_fun(body)

    def run_one(i: jax.Array, states: list[Any]) -> list[Any]:
        return _updated(operations, states, run_body(*consts, i), i)

    return jax.lax.fori_loop(0, length, run_one, states)


loop_p.def_impl(lambda *args, **params: jax.jit(lambda *a: _loop_in_order(*a, **params))(*args))
mlir.register_lowering(loop_p, mlir.lower_fun(_loop_in_order, multiple_results=True))


def _refuse_transform(what: str, instead: str) -> Callable[..., Any]:
    def refuse(*args: Any, **params: Any) -> Any:
        raise make_error(
            "unsupported",
            f"treduce at {here()} is {what}; expected {instead} inside the function that "
            "treduce runs, found it around treduce",
        )

    return refuse


ad.primitive_jvps[loop_p] = _refuse_transform("differentiated", "jax.grad")
batching.primitive_batchers[loop_p] = _refuse_transform("vmapped", "jax.vmap")


def _match_operations(operation: Any, result: Any, length: int, title: str) -> tuple[Any, ...]:
    """One operation a leaf of `result`."""
    try:
        per_leaf = broadcast_prefix(operation, result)
    except ValueError:
        raise make_error(
            "operation",
            f"{title}: `operation` is no prefix of what the function returns.\n"
            f"  operation: {tree_text(operation)}\n"
            f"  result:    {tree_text(result)}\n"
            "Give one operation (Add, Max, Concat()) for the whole result or for each part.",
        ) from None
    operations = []
    for given, (path, value) in zip(
        per_leaf, jax.tree_util.tree_leaves_with_path(result), strict=True
    ):
        operation = normalize(given)
        if operation is None:
            raise make_error(
                "operation",
                f"{title}: {describe(given)} is no operation; expected Add, Max, "
                "Concat() or an object with state(n, value) and update(state, value, i)",
                wrong_type=True,
            )
        _check_operation(operation, length, value, "result" + jax.tree_util.keystr(path), title)
        operations.append(operation)
    return tuple(operations)


def _check_operation(operation: Any, length: int, value: Any, name: str, title: str) -> None:
    """The state exists for such a value, and an update keeps its shape and dtype."""
    problem = operation.refuses(value) if hasattr(operation, "refuses") else None
    if problem is None and not hasattr(operation, "refuses"):
        problem = _state_problem(operation, length, value)
    if problem:
        raise make_error(
            "operation",
            f"{title}: {describe(operation)} can not reduce {name}, "
            f"{value.dtype}{list(value.shape)} of each microbatch: {problem}",
        )


def _state_problem(operation: Any, length: int, value: Any) -> str | None:
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(lambda: operation.state(length, struct))
    if not hasattr(state, "shape"):
        return f"expected state(n, value) to give one array, found {type(state).__name__}"
    after = jax.eval_shape(operation.update, state, struct, index)
    if getattr(after, "shape", None) == state.shape and after.dtype == state.dtype:
        return None
    found = f"{after.dtype}{list(after.shape)}" if hasattr(after, "shape") else type(after)
    return (
        f"expected update(state, value, i) to give a state of {state.dtype}"
        f"{list(state.shape)} again, found {found}"
    )


def _check_length(length: Any) -> int:
    try:
        number = operator.index(length)
    except TypeError:
        number = -1
    if 1 <= number <= _MOST_MICROBATCHES:
        return number
    raise make_error(
        "microbatch",
        f"treduce_i at {here()}: length={shorten(length)}; expected a whole number from 1 to "
        f"{_MOST_MICROBATCHES}, known when the step is traced",
    )


def treduce_i(
    fun: Callable[[jax.Array], Any],
    length: int,
    schedule: BaseSchedule,
    operation: Any = _DEFAULT,
) -> Any:
    """Runs `fun(i)` for every microbatch i under a schedule, and reduces its results.

    Args:
      fun: from the microbatch number, an int32 scalar, to a pytree of arrays. Inside, stage
        marks (`mark_stage_end`) say where stages end.
      length: how many microbatches.
      schedule: which rank runs what when, inside `mpmd_jit_with_loop`. Elsewhere the
        microbatches run one after the other.
      operation: a pytree prefix of `fun`'s result with operations as leaves: `Add` sums,
        `Max` takes the largest, `Concat(axis)` puts the values side by side along a new
        axis. Results do not depend on the schedule.

    Returns:
      `fun`'s result with each leaf reduced.

    Raises:
      JaxppError: `operation` does not match the result ("operation"), `length` < 1
        ("microbatch"), `schedule` is no schedule ("schedule").
    """
    return run_loop(
        fun, fun, _check_length(length), schedule, operation, f"treduce at {here()}"
    )


def run_loop(
    body: Callable[[jax.Array], Any],
    fun: Callable[..., Any],
    length: int,
    schedule: Any,
    operation: Any,
    title: str,
    note: str | None = None,
) -> Any:
    """A loop of `body(i)`, which runs the user's `fun`.

    `schedule` is anything with a `build` like that of `BaseSchedule`. `title` is what messages
    call it, with the user's line: "treduce at FILE:LINE". `note` is
    added to what `fun` raises.
    """
    if isinstance(schedule, type) or not hasattr(schedule, "build"):
        raise make_error(
            "schedule",
            f"{title}: schedule={describe(schedule)}; expected an object such as "
            "Interleaved1F1B(num_stages, mpmd_dim) or of your subclass of BaseSchedule",
            wrong_type=True,
        )

    def run_body(i: jax.Array) -> Any:
        result = body(i)
        check_arrays(result, f"{title}: the function's result")
        return result

    if jax.config.jax_disable_jit and not is_tracing():
        return _run_eagerly(run_body, length, operation, title)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    name_after(run_body, fun, (index,), {})
    try:
        with noting_marks() as bound:
            closed, result = jax.make_jaxpr(run_body, return_shape=True)(index)
    except (TypeError, ValueError, IndexError) as error:
        if note and not isinstance(error, JaxppError):
            error.add_note(f"{title}: {note}")
        raise
    for const in closed.consts:
        if is_of_a_closed_trace(const):
            raise closed_over_error(const)
    refuse_refs_from_outside(closed, title)
    closed = discharged(closed)
    operations = _match_operations(operation, result, length, title)
    if operation is _DEFAULT:
        _warn_of_stacked_gradients(closed, result, operations, title)
    try:
        outs = loop_p.bind(
            *closed.consts,
            body=ClosedJaxpr(without_constants(drop_unused(closed.jaxpr)), ()),
            length=length,
            schedule=schedule,
            operations=operations,
            title=title,
            mistake=find_mistake(closed.jaxpr, bound, _stages_of(schedule)),
        )
    except jax.errors.UnexpectedTracerError as error:  # jax 0.11; before, graph.py finds it
        raise make_error(
            "unsupported",
            f"{title}: a function inside closes over a traced value, which JAX can not hand "
            "on; expected it to be one of the function's arguments. This happens with "
            "jax.custom_vjp around a closure, and with a value kept from an earlier trace",
        ) from error
    return jax.tree.unflatten(jax.tree.structure(result), outs)


def _run_eagerly(
    body: Callable[[jax.Array], Any], length: int, operation: Any, title: str
) -> Any:
    """What a loop means, op by op on values that the user can look at."""
    operations: tuple[Any, ...] = ()
    states: list[Any] = []
    tree = None
    for i in range(length):
        index = jnp.int32(i)
        result = body(index)
        values, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, result))
        if i == 0:
            operations = _match_operations(operation, tree.unflatten(values), length, title)
            states = _first_states(operations, values, length)
        states = _updated(operations, states, values, index)
    return jax.tree.unflatten(tree, states)


def closed_over_error(value: jax.core.Tracer) -> JaxppError:
    """For a function that kept a traced value after JAX was done with its trace."""
    return make_error(
        "unsupported",
        f"a function inside the step closes over a traced value, {jax.typeof(value)}, which "
        "JAX can not hand on; expected it to be one of the function's arguments. This happens "
        "with jax.custom_vjp around a closure",
    )


def refuse_refs_from_outside(closed: ClosedJaxpr, title: str) -> None:
    """Raises JaxppError("unsupported") for a function that uses a `jax.Ref` of another's."""
    for variable, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if not is_ref(const):
            continue
        uses = [eqn for eqn in closed.jaxpr.eqns if variable in eqn.invars]
        line = user_line(uses[0]) if uses else None
        raise make_error(
            "unsupported",
            f"{title}: the function uses at {line or '?'} a jax.Ref from outside, "
            f"{jax.typeof(const)}; expected it to make its own (jax.new_ref): "
            "stages and steps run side by side, so writes from them would have no order. Pass "
            "the value, ref[...], and return the new one",
        )


def _has_loop(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive is loop_p or any(map(_has_loop, inner_jaxprs(eqn))) for eqn in jaxpr.eqns
    )


def warn_of_marks_without_loop(jaxpr: Jaxpr) -> None:
    """Warns of a step that has stage marks, but no loop whose stages they could end."""
    mark = first_mark(jaxpr)
    if mark is None or _has_loop(jaxpr):
        return
    line = user_line(mark)
    warn(
        f"the stage mark at {line or '?'} stands outside treduce, and the step has no treduce: "
        "there is no pipeline, ranks compute the same or wait for each other. Run the function "
        "with the marks in treduce, over microbatches, or use mpmd_jit_by_yield",
        line,
    )


def _warn_of_stacked_gradients(
    closed: ClosedJaxpr, result: Any, operations: tuple[Any, ...], title: str
) -> None:
    """Warns of gradients like what the body closes over that go into a `Concat`."""
    weights = {(jnp.shape(c), jax.typeof(c).dtype) for c in closed.consts}
    made_by = {v: eqn for eqn in closed.jaxpr.eqns for v in eqn.outvars}
    leaves = jax.tree_util.tree_leaves_with_path(result)
    for (path, value), out, operation in zip(
        leaves, closed.jaxpr.outvars, operations, strict=True
    ):
        like_a_weight = value.shape and (value.shape, value.dtype) in weights
        eqn = None if isinstance(out, Literal) else made_by.get(out)
        if not (like_a_weight and eqn and type(operation) is Concat):
            continue
        if is_transposed(eqn):
            warn(
                f"{title}: result{jax.tree_util.keystr(path)}, {value.dtype}"
                f"{list(value.shape)}, looks like the gradient of a weight, and the default "
                "operation=(Concat(), Add) stacks it for all microbatches: it stacks the first "
                "part of the result and sums the second. Return (loss, grads), or say "
                "operation=Add",
                title.rpartition(" at ")[2],
            )
            return


def _stages_of(schedule: Any) -> int | None:
    stages = getattr(schedule, "num_stages", None)
    return stages if isinstance(stages, int) and stages > 0 else None


def _microbatch_count(xs: Any, axis: int) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(xs)
    if not leaves:
        raise make_error(
            "microbatch",
            f"treduce at {here()}: xs={shorten(xs)} has no arrays to cut into microbatches; "
            "expected at least one, or treduce_i(fun, length, ...)",
        )
    if not isinstance(axis, int):
        raise make_error(
            "microbatch",
            f"treduce at {here()}: axis={shorten(axis)}; expected a whole number",
            wrong_type=True,
        )
    check_arrays(xs, f"treduce at {here()}: xs")
    sizes: dict[str, int | None] = {}
    for path, leaf in leaves:
        shape = jnp.shape(leaf)
        inside = -len(shape) <= axis < len(shape)
        name = "xs" + jax.tree_util.keystr(path)
        sizes[f"{name} {shape}"] = shape[axis] if inside else None
    if len(set(sizes.values())) == 1 and None not in sizes.values():
        (length,) = set(sizes.values())
        if length:
            return length
        raise make_error(
            "microbatch",
            f"treduce at {here()}: the arrays of xs have size 0 along axis {axis}; expected at "
            "least 1 microbatch",
        )
    lines = [
        f"  {name}: {'no such axis' if size is None else size}"
        for name, size in itertools.islice(sizes.items(), 8)
    ]
    if len(sizes) > 8:
        lines.append(f"  and {len(sizes) - 8} more")
    raise make_error(
        "microbatch",
        f"treduce at {here()}: every array of xs must have the same size along axis {axis}, "
        "the number of microbatches; found\n" + "\n".join(lines),
    )


def _note_of_microbatches(xs: Any, length: int, axis: int) -> str | None:
    """What a microbatch is, where one seems to be a single example."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(xs)]
    if min(map(len, shapes)) > 2:
        return None
    texts = [str(list(shape)) for shape in itertools.islice(dict.fromkeys(shapes), 4)]
    return (
        f"it cuts xs, arrays of {', '.join(texts)}, along axis={axis} into {length} "
        "microbatches. If the function expects several examples in a microbatch, give xs an "
        "axis for them: x.reshape(num_microbatches, -1, *x.shape[1:])"
    )


def treduce(
    fun: Callable[[Any], Any],
    xs: Any,
    schedule: BaseSchedule,
    axis: int = 0,
    operation: Any = _DEFAULT,
) -> Any:
    """Runs `fun` on every microbatch of `xs` under a schedule, and reduces its results.

    Args:
      fun: from one microbatch, `xs` without `axis`, to a pytree of arrays.
      xs: a pytree of arrays; their size along `axis` is the number of microbatches.
      schedule, operation: as in `treduce_i`.
      axis: the axis of `xs` that counts microbatches.

    Returns:
      `fun`'s result with each leaf reduced over the microbatches. Under `Add` a mean loss
      comes out times the number of microbatches.

    Raises:
      JaxppError: as `treduce_i`; sizes along `axis` differ ("microbatch").
    """
    length = _microbatch_count(xs, axis)
    title = f"treduce at {here()}"

    def run_one(i: jax.Array) -> Any:
        def cut(x: Any) -> jax.Array:
            # Unsigned, so that no op looks for negative numbers.
            index = i.astype(jnp.uint32)
            return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)

        return fun(jax.tree.map(cut, xs))

    note = _note_of_microbatches(xs, length, axis)
    return run_loop(run_one, fun, length, schedule, operation, title, note)
