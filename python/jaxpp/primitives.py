"""The two things a user writes into a step: stage marks and the loop over microbatches."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxpp.errors import check_arrays, describe, here, make_error, shorten, tree_text
from jaxpp.jax_internals import broadcast_prefix, drop_unused, without_constants
from jaxpp.operations import Add, Concat, normalize, state_of
from jaxpp.schedules import BaseSchedule

__all__ = [
    "loop_p",
    "mark_backward_p",
    "mark_p",
    "mark_stage_end",
    "pipeline_enter_stage",
    "treduce",
    "treduce_i",
]

# --- Stage marks ------------------------------------------------------------------------

mark_p = Primitive("stage_mark")  # ends a stage's forward
mark_tangent_p = Primitive("stage_mark_tangent")  # between a mark and its transpose
mark_backward_p = Primitive("stage_mark_backward")  # begins the stage's backward

_next_uid = itertools.count()


def _make_identity(primitive: Primitive) -> None:
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **params: list(xs))
    primitive.def_abstract_eval(lambda *avals, **params: list(avals))
    mlir.register_lowering(primitive, lambda ctx, *xs, **params: list(xs))
    batching.primitive_batchers[primitive] = lambda xs, dims, **params: (
        primitive.bind(*xs, **params),
        dims,
    )


for _primitive in (mark_p, mark_tangent_p, mark_backward_p):
    _make_identity(_primitive)


def _mark_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = mark_p.bind(*primals, **params)
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    out_tangents = list(tangents)
    if live:
        marked = mark_tangent_p.bind(*(tangents[i] for i in live), **params)
        for i, tangent in zip(live, marked, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _mark_transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
    live = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    results = list(cotangents)
    if live:
        marked = mark_backward_p.bind(*(cotangents[i] for i in live), **params)
        for i, ct in zip(live, marked, strict=True):
            results[i] = ct
    return results


ad.primitive_jvps[mark_p] = _mark_jvp
ad.primitive_transposes[mark_tangent_p] = _mark_transpose
ad.primitive_jvps[mark_tangent_p] = lambda primals, tangents, **params: (
    mark_tangent_p.bind(*primals, **params),
    list(tangents),
)
ad.primitive_jvps[mark_backward_p] = lambda primals, tangents, **params: (
    mark_backward_p.bind(*primals, **params),
    list(tangents),
)


def mark_stage_end(x: Any, name: str | None = None) -> Any:
    """Ends a pipeline stage: what `x` needs belongs to it, what uses `x` to later ones.

    The identity on any pytree of arrays. A model of S stages has S marks, in order, the
    last one included. Differentiable (its transpose begins the same stage's backward) and
    vmappable; outside `treduce` it does nothing.

    Args:
      x: a pytree of arrays, of any shapes and dtypes.
      name: a name for error messages; has no other meaning.

    Returns:
      `x`.
    """
    check_arrays(x, f"mark_stage_end at {here()}: x")
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        return x
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    return tree.unflatten(mark_p.bind(*leaves, name=name, uid=next(_next_uid)))


pipeline_enter_stage = mark_stage_end

# A microbatch number is an int32.
_MOST_MICROBATCHES = 2**31 - 1

# --- The loop ---------------------------------------------------------------------------

# Operands: what the body closes over. Parameters: `body`, a jaxpr from these and the
# microbatch number to one value of each result; `length`; `schedule`; `operations`, one a
# result. Results: the states after the last microbatch.
loop_p = Primitive("microbatch_loop")
loop_p.multiple_results = True


@loop_p.def_abstract_eval
def _loop_abstract_eval(
    *avals: Any, body: Any, length: int, operations: tuple[Any, ...], **params: Any
) -> list[Any]:
    return [
        state_of(operation, length, value)
        for operation, value in zip(operations, body.out_avals, strict=True)
    ]


def _loop_in_order(
    *consts: Any, body: Any, length: int, operations: tuple[Any, ...], **params: Any
) -> list[Any]:
    """What the loop means: one microbatch after the other."""
    states = [
        operation.state(length, jax.ShapeDtypeStruct(value.shape, value.dtype))
        for operation, value in zip(operations, body.out_avals, strict=True)
    ]
    run_body = jaxpr_as_fun(body)

    def run_one(i: jax.Array, states: list[Any]) -> list[Any]:
        values = run_body(*consts, i)
        return [
            operation.update(state, value, i)
            for operation, state, value in zip(operations, states, values, strict=True)
        ]

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


def _match_operations(operation: Any, result: Any, length: int) -> tuple[Any, ...]:
    """One operation a leaf of `result`."""
    try:
        per_leaf = broadcast_prefix(operation, result)
    except ValueError:
        raise make_error(
            "operation",
            f"treduce at {here()}: `operation` is no prefix of what the function returns.\n"
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
                f"treduce at {here()}: {describe(given)} is no operation; expected Add, Max, "
                "Concat() or an object with state(n, value) and update(state, value, i)",
            )
        _check_operation(operation, length, value, "result" + jax.tree_util.keystr(path))
        operations.append(operation)
    return tuple(operations)


def _check_operation(operation: Any, length: int, value: Any, name: str) -> None:
    """The state exists for such a value, and an update keeps its shape and dtype."""
    problem = operation.refuses(value) if hasattr(operation, "refuses") else None
    if problem is None and not hasattr(operation, "refuses"):
        problem = _state_problem(operation, length, value)
    if problem:
        raise make_error(
            "operation",
            f"treduce at {here()}: {describe(operation)} can not reduce {name}, "
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
    operation: Any = (Concat(), Add),
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
    length = _check_length(length)
    if isinstance(schedule, type) or not hasattr(schedule, "build"):
        raise make_error(
            "schedule",
            f"treduce at {here()}: schedule={describe(schedule)}; expected an object such as "
            "Interleaved1F1B(num_stages, mpmd_dim) or of your subclass of BaseSchedule",
        )

    where = here()

    def run_body(i: jax.Array) -> Any:
        result = fun(i)
        check_arrays(result, f"treduce at {where}: the function's result")
        return result

    index = jax.ShapeDtypeStruct((), jnp.int32)
    body, result = jax.make_jaxpr(run_body, return_shape=True)(index)
    operations = _match_operations(operation, result, length)
    jaxpr = without_constants(drop_unused(body.jaxpr))
    outs = loop_p.bind(
        *body.consts,
        body=ClosedJaxpr(jaxpr, ()),
        length=length,
        schedule=schedule,
        operations=operations,
    )
    return jax.tree.unflatten(jax.tree.structure(result), outs)


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
            "microbatch", f"treduce at {here()}: axis={shorten(axis)}; expected a whole number"
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


def treduce(
    fun: Callable[[Any], Any],
    xs: Any,
    schedule: BaseSchedule,
    axis: int = 0,
    operation: Any = (Concat(), Add),
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

    def run_one(i: jax.Array) -> Any:
        def cut(x: Any) -> jax.Array:
            # Unsigned, so that no op looks for negative numbers.
            index = i.astype(jnp.uint32)
            return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)

        return fun(jax.tree.map(cut, xs))

    return treduce_i(run_one, length, schedule, operation)
