"""The loop over microbatches in a step."""

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
from jaxpp.jax_internals.arrays import as_addend, broadcast_prefix, is_cut_along, sharded_like
from jaxpp.jax_internals.context import is_of_a_closed_trace, is_tracing
from jaxpp.jax_internals.jaxprs import (
    discharged,
    drop_unused,
    is_ref,
    is_transposed,
    jaxprs_in,
    without_constants,
)
from jaxpp.jax_internals.lines import name_after, user_line
from jaxpp.operations import Add, Concat, normalize, state_of
from jaxpp.schedules import BaseSchedule
from jaxpp.trace.marks import collecting_marks, find_mistake, first_mark
from jaxpp.trace.terms import take_out_terms

__all__ = [
    "loop_p",
    "microbatch_of",
    "refuse_refs_from_outside",
    "run_loop",
    "treduce",
    "treduce_i",
    "warn_of_marks_without_loop",
]

_DEFAULT = (Concat(), Add)  # the default operations for a loss and its gradients

# A microbatch number is an int32.
_MOST_MICROBATCHES = _core.LARGEST_COUNT

# --- The loop ---------------------------------------------------------------------------

# Operands: the values that the body closes over. Parameters: `body`, a jaxpr from these and the
# microbatch number to one value per result; `length`; `schedule`; `operations`, one per result;
# `title`, its name in messages; `mistake`, a mistake in its marks or None. Results: the states
# after the last microbatch.
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
    """The states before the first microbatch, whose values have these types."""

    def first(operation: Any, value: Any) -> Any:
        state = operation.state(length, jax.ShapeDtypeStruct(value.shape, value.dtype))
        return sharded_like(state, state_of(operation, length, value))

    return list(map(first, operations, values))


def _updated(
    operations: Sequence[Any], states: Sequence[Any], values: Sequence[Any], i: jax.Array
) -> list[Any]:
    """The states after one more microbatch."""
    return [
        operation.update(state, as_addend(value, state), i)
        for operation, state, value in zip(operations, states, values, strict=True)
    ]


def _loop_in_order(
    *consts: Any, body: Any, length: int, operations: tuple[Any, ...], **params: Any
) -> list[Any]:
    """The reference semantics of the loop: one microbatch after the other."""
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


def _names_of(result: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(result)
    return ["result" + jax.tree_util.keystr(path) for path, _ in leaves]


def _match_operations(
    operation: Any, result: Any, names: Sequence[str], length: int, title: str
) -> tuple[Any, ...]:
    """One operation per leaf of `result`."""
    try:
        per_leaf = broadcast_prefix(operation, result)
    except ValueError:
        raise make_error(
            "operation",
            f"{title}: `operation` is not a pytree prefix of the function's result.\n"
            f"  operation: {tree_text(operation)}\n"
            f"  result:    {tree_text(result)}\n"
            "Give one operation (Add, Max, Concat()) for the whole result or for each part.",
        ) from None
    operations = []
    for given, name, value in zip(per_leaf, names, jax.tree.leaves(result), strict=True):
        operation = normalize(given)
        if operation is None:
            raise make_error(
                "operation",
                f"{title}: {describe(given)} is not an operation; expected Add, Max, Concat() "
                "or an object with state(n, value) and update(state, value, i)",
                wrong_type=True,
            )
        _check_operation(operation, length, value, name, title)
        operations.append(operation)
    return tuple(operations)


def _check_operation(operation: Any, length: int, value: Any, name: str, title: str) -> None:
    """Checks that the operation has a state for such a value and that updates keep its type."""
    problem = operation.refuses(value) if hasattr(operation, "refuses") else None
    if problem is None and not hasattr(operation, "refuses"):
        problem = _state_problem(operation, length, value)
    if problem:
        raise make_error(
            "operation",
            f"{title}: {describe(operation)} cannot reduce {name}, "
            f"{value.dtype}{list(value.shape)} per microbatch: {problem}",
        )


def _state_problem(operation: Any, length: int, value: Any) -> str | None:
    struct = jax.ShapeDtypeStruct(value.shape, value.dtype)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    state = jax.eval_shape(lambda: operation.state(length, struct))
    if not hasattr(state, "shape"):
        return f"expected state(n, value) to return one array, found {type(state).__name__}"
    after = jax.eval_shape(operation.update, state, struct, index)
    if getattr(after, "shape", None) == state.shape and after.dtype == state.dtype:
        return None
    found = f"{after.dtype}{list(after.shape)}" if hasattr(after, "shape") else type(after)
    return (
        "expected update(state, value, i) to return a state of type "
        f"{state.dtype}{list(state.shape)}, found {found}"
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
    """Runs `fun(i)` for every microbatch i under a schedule and reduces the results.

    Args:
      fun: maps the microbatch number, an int32 scalar, to a pytree of arrays. Stage marks
        (`mark_stage_end`) in it end the stages.
      length: the number of microbatches.
      schedule: the pipeline schedule, used inside `mpmd_jit_with_loop`. Elsewhere the
        microbatches run one after the other.
      operation: a pytree prefix of `fun`'s result with operations as leaves: `Add` sums, `Max`
        takes the maximum, `Concat(axis)` stacks the values along a new axis. Results do not
        depend on the schedule.

    Returns:
      `fun`'s result with each leaf reduced.

    Raises:
      JaxppError: `operation` does not match the result ("operation"), `length` < 1
        ("microbatch"), or `schedule` is not a schedule ("schedule").
    """
    return run_loop(
        fun, fun, _check_length(length), schedule, operation, f"treduce at {here()}"
    )


# What a function raises for an array of an unexpected shape.
_OF_SHAPES = (TypeError, ValueError, IndexError)


def run_loop(
    body: Callable[[jax.Array], Any],
    fun: Callable[..., Any],
    length: int,
    schedule: Any,
    operation: Any,
    title: str,
    note: str | None = None,
    names: Sequence[str] | None = None,
) -> Any:
    """Traces a loop of `body(i)`, which calls the user's `fun`.

    `schedule` is any object with a `build` like `BaseSchedule`'s. `title` is the loop's name in
    messages, "treduce at FILE:LINE". `note` is added to exceptions that `fun` raises. `names`
    are those of the result's leaves in messages, by default their paths.
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
        with collecting_marks() as bound:
            closed, result = jax.make_jaxpr(run_body, return_shape=True)(index)
    except Exception as error:
        if "different trace level" in str(error):  # Flax NNX, in exceptions of two types
            raise make_error(
                "unsupported",
                f"{title}: the function uses a Flax NNX model that was made outside of it; "
                "divide the model outside, graph, state = nnx.split(model), and make a copy "
                "inside, nnx.merge(graph, state, copy=True)",
            ) from error
        if note and isinstance(error, _OF_SHAPES) and not isinstance(error, JaxppError):
            error.add_note(f"{title}: {note}")
        raise
    for const in closed.consts:
        if is_of_a_closed_trace(const):
            raise closed_over_error(const)
    refuse_refs_from_outside(closed, title)
    closed = discharged(closed)
    names = names or _names_of(result)
    operations = _match_operations(operation, result, names, length, title)
    if operation is _DEFAULT:
        _warn_of_stacked_gradients(closed, result, operations, title)
    sums = [type(o) is Add and length > 1 for o in operations]
    shorter, terms, counts = take_out_terms(closed, sums)
    try:
        outs = loop_p.bind(
            *closed.consts,
            body=ClosedJaxpr(without_constants(drop_unused(shorter.jaxpr)), ()),
            length=length,
            schedule=schedule,
            operations=operations,
            names=tuple(names),
            title=title,
            mistake=find_mistake(closed.jaxpr, bound, _stages_of(schedule)),
        )
    except (
        jax.errors.UnexpectedTracerError
    ) as error:  # JAX 0.11; in older versions graph.py detects it
        raise make_error(
            "unsupported",
            f"{title}: a function inside closes over a traced value, which JAX cannot pass "
            "on; expected it as an argument of that function. The causes are jax.custom_vjp "
            "around a closure and a value kept from an earlier trace",
        ) from error
    outs = _with_terms(outs, terms, counts, length)
    return jax.tree.unflatten(jax.tree.structure(result), outs)


def _with_terms(
    outs: Sequence[jax.Array], terms: ClosedJaxpr, counts: Sequence[int], length: int
) -> list[jax.Array]:
    """Adds the terms that `take_out_terms` removed to the loop's sums, once for each
    microbatch."""
    values = iter(jaxpr_as_fun(terms)())

    def whole(out: jax.Array, count: int) -> jax.Array:
        for term in itertools.islice(values, count):
            out = jax.lax.add(out, as_addend(length * term.astype(out.dtype), out))
        return out

    return list(map(whole, outs, counts))


def _run_eagerly(
    body: Callable[[jax.Array], Any], length: int, operation: Any, title: str
) -> Any:
    """Runs a loop op by op on concrete values."""
    operations: tuple[Any, ...] = ()
    states: list[Any] = []
    tree = None
    for i in range(length):
        index = jnp.int32(i)
        result = body(index)
        values, tree = jax.tree.flatten(jax.tree.map(jnp.asarray, result))
        if i == 0:
            result = tree.unflatten(values)
            names = _names_of(result)
            operations = _match_operations(operation, result, names, length, title)
            types = list(map(jax.typeof, values))
            states = _first_states(operations, types, length)
        states = _updated(operations, states, values, index)
    return jax.tree.unflatten(tree, states)


def closed_over_error(value: jax.core.Tracer) -> JaxppError:
    """The error for a function that keeps a tracer after its trace has ended."""
    return make_error(
        "unsupported",
        f"a function inside the step closes over a traced value, {jax.typeof(value)}, which "
        "JAX cannot pass on; expected it as an argument of that function. A common cause is "
        "jax.custom_vjp around a closure",
    )


def refuse_refs_from_outside(closed: ClosedJaxpr, title: str) -> None:
    """Raises JaxppError("unsupported") for a function that uses a `jax.Ref` from outside."""
    for variable, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        if not is_ref(const):
            continue
        uses = [eqn for eqn in closed.jaxpr.eqns if variable in eqn.invars]
        line = user_line(uses[0]) if uses else None
        raise make_error(
            "unsupported",
            f"{title}: the function uses a jax.Ref from outside, {jax.typeof(const)}, at "
            f"{line or '?'}; expected a ref created inside it (jax.new_ref), because stages "
            "and steps run concurrently and their writes would be unordered. Pass the value, "
            "ref[...], and return the new value",
        )


def _has_loop(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive is loop_p or any(map(_has_loop, jaxprs_in(eqn.params)))
        for eqn in jaxpr.eqns
    )


def warn_of_marks_without_loop(jaxpr: Jaxpr) -> None:
    """Warns of a step that has stage marks, but no loop whose stages they could end."""
    mark = first_mark(jaxpr)
    if mark is None or _has_loop(jaxpr):
        return
    line = user_line(mark)
    warn(
        f"the stage mark at {line or '?'} is outside treduce, and the step has no treduce, so "
        "nothing is pipelined. Call the function with the marks in treduce, over "
        "microbatches, or use mpmd_jit_by_yield; if a jax.lax.scan over microbatches calls it, "
        "give mpmd_jit_with_loop a schedule",
        line,
    )


def _warn_of_stacked_gradients(
    closed: ClosedJaxpr, result: Any, operations: tuple[Any, ...], title: str
) -> None:
    """Warns if a `Concat` stacks results that look like gradients of closed-over values."""
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
                f"{title}: result{jax.tree_util.keystr(path)}, "
                f"{value.dtype}{list(value.shape)}, looks like the gradient of a weight, and "
                "the default operation=(Concat(), Add), which stacks the first part of the "
                "result and sums the second, stacks it over all microbatches. Return (loss, "
                "grads), or pass operation=Add",
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
            f"treduce at {here()}: xs={shorten(xs)} has no arrays to split into microbatches; "
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
        if inside and is_cut_along(leaf, axis):
            raise make_error(
                "microbatch",
                f"treduce at {here()}: expected whole arrays along axis {axis}, the microbatch "
                f"axis, found {name} of type {jax.typeof(leaf)}. Shard the examples of a "
                "microbatch instead, as in P(None, 'data')",
            )
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
    """Explains the microbatch axis if a microbatch seems to be a single example."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(xs)]
    if min(map(len, shapes)) > 2:
        return None
    texts = [str(list(shape)) for shape in itertools.islice(dict.fromkeys(shapes), 4)]
    return (
        f"it splits xs, arrays of {', '.join(texts)}, along axis={axis} into {length} "
        "microbatches. If the function expects several examples per microbatch, add an axis "
        "for them: x.reshape(num_microbatches, -1, *x.shape[1:])"
    )


def microbatch_of(x: jax.Array, i: jax.Array, axis: int = 0) -> jax.Array:
    """Microbatch `i` of an array with all of them along an axis."""
    index = i.astype(jnp.uint32)  # unsigned, so that indexing adds no ops for negative numbers
    return jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)


def treduce(
    fun: Callable[[Any], Any],
    xs: Any,
    schedule: BaseSchedule,
    axis: int = 0,
    operation: Any = _DEFAULT,
) -> Any:
    """Runs `fun` on every microbatch of `xs` under a schedule and reduces the results.

    Args:
      fun: maps one microbatch, `xs` without `axis`, to a pytree of arrays.
      xs: a pytree of arrays; their size along `axis` is the number of microbatches.
      schedule, operation: as in `treduce_i`.
      axis: the microbatch axis of `xs`.

    Returns:
      `fun`'s result with each leaf reduced over the microbatches. `Add` sums: the mean loss of
      a microbatch is multiplied by the number of microbatches.

    Raises:
      JaxppError: as `treduce_i`, or the sizes along `axis` differ ("microbatch").
    """
    length = _microbatch_count(xs, axis)
    title = f"treduce at {here()}"

    def run_one(i: jax.Array) -> Any:
        return fun(jax.tree.map(lambda x: microbatch_of(x, i, axis), xs))

    note = _note_of_microbatches(xs, length, axis)
    return run_loop(run_one, fun, length, schedule, operation, title, note)
