"""Arguments, numbers and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, case, loop, mesh, state, step_of, train

# --- Arguments --------------------------------------------------------------------------


def donated_again() -> None:
    step = step_of(donate_argnums=0)
    ws, _ = step(m.params(), m.batch())
    step(ws, m.batch())
    step(ws, m.batch())


def deleted() -> None:
    step = step_of()
    ws, _ = step(m.params(), m.batch())
    ws[1].delete()
    step(ws, m.batch())


def deleted_jax_array() -> None:
    ws = m.params()
    ws[1].delete()
    step_of()(ws, m.batch())


def donated_twice() -> None:
    step = step_of(donate_argnums=0)
    (w, _), _ = step(m.params(), m.batch())
    try:
        step([w, w], m.batch())
    finally:
        assert not w.is_deleted()


def donated_and_not() -> None:
    def step(ws: Any, xs: jax.Array, others: Any) -> Any:
        return m.training_step(TWO)(ws, xs), jax.tree.map(jnp.sum, others)

    jitted = JIT(step, mesh(), donate_argnums=0)
    ws, _ = step_of()(m.params(), m.batch())
    try:
        jitted(ws, m.batch(), ws)
    finally:
        assert not any(w.is_deleted() for w in ws)


def read_after_donation() -> None:
    step = step_of(donate_argnums=0)
    ws, _ = step(m.params(), m.batch())
    step(ws, m.batch())
    np.asarray(ws[0])


case(
    "A donated array used again",
    "donated",
    donated_again,
    "argument ws[0]",
    "expected an array, found one that was deleted or donated",
)
case("A deleted array", "donated", deleted, "argument ws[1]", "deleted or donated")
case("A deleted JAX array", "donated", deleted_jax_array, "argument ws[1]", "deleted")
case(
    "One array donated as two arguments",
    "donated",
    donated_twice,
    "arguments ws[0] and ws[1] are the same array",
    "expected a donated array once",
)
case(
    "An array donated and also passed as another argument",
    "donated",
    donated_and_not,
    "arguments ws[0] and others[0] are the same array, which the first donates",
)
case("Reading a donated array", "donated", read_after_donation, "deleted or donated")
case(
    "An argument that is not an array",
    "invalid-argument",
    lambda: step_of()(m.params(), "text"),
    "argument xs: expected an array or a number, found 'text' of type str",
)
case(
    "A mode as an argument",
    "invalid-argument",
    lambda: JIT(lambda ws, mode: ws, mesh())(m.params(), "train"),
    "argument mode: expected an array or a number, found 'train' of type str",
    "static_argnames",
)
case(
    "An int that is too large",
    "invalid-argument",
    lambda: step_of()(m.params(), 2**40),
    "argument xs: expected a number that fits int32, found 1099511627776",
    "jax_enable_x64",
)


def leaked() -> Any:
    kept: list[Any] = []
    jax.jit(lambda x: kept.append(x) or x)(m.batch())
    return kept[0]


case(
    "A traced value kept for later",
    "invalid-argument",
    lambda: step_of()(m.params(), leaked()),
    "argument xs: expected an array, found JitTracer",
    "a tracer that leaked from a function that JAX traced earlier",
)
for name, called in {
    "jit": lambda step: jax.jit(step)(m.params(), m.batch()),
    "scan": lambda step: jax.lax.scan(step, m.params(), m.batch()[None]),
    "grad": lambda step: jax.grad(lambda *args: step(*args)[1])(m.params(), m.batch()),
    "vmap": lambda step: jax.vmap(step, (None, 0))(m.params(), m.batch()[None]),
    "another step": lambda step: JIT(lambda *args: step(*args), mesh())(m.params(), m.batch()),
}.items():
    case(
        f"A step under {name}",
        "unsupported",
        lambda called=called: called(step_of()),
        "step step called at ",
        "cases_arguments.py:",
        "expected arrays, found traced values",
        "Call it from plain Python",
    )
case(
    "Compiling for traced values",
    "invalid-argument",
    lambda: jax.jit(lambda xs: step_of().compile(m.params(), xs))(m.batch()),
    "step step: argument ws[0]: expected an array or a jax.ShapeDtypeStruct to compile for",
)
case(
    "A step that returns text",
    "invalid-argument",
    lambda: JIT(lambda xs: {"loss": "low"}, mesh())(m.batch()),
    "the step's result['loss']: expected an array or a number, found 'low'",
)
case(
    "A static argument without a hash",
    "invalid-argument",
    lambda: step_of(static_argnums=0)(m.params(), m.batch()),
    "static argument ws: expected something hashable",
)
case(
    "donate_argnums out of range",
    "invalid-argument",
    lambda: step_of(donate_argnums=2),
    "donate_argnums has 2; expected numbers from 0 to 1 of the arguments (ws, xs)",
)
case(
    "An unknown name in static_argnames",
    "invalid-argument",
    lambda: step_of(static_argnames="schedule"),
    "static_argnames has 'schedule'; expected names of the arguments (ws, xs)",
)
case(
    "A static argument donated",
    "invalid-argument",
    lambda: step_of(static_argnames="ws", donate_argnums=0),
    "argument ws is both static and donated; expected",
)
case(
    "A plan over its memory limit",
    "out-of-memory",
    lambda: train(jaxpp.GPipe(2), microbatches=8, mpmd_mesh=mesh(2), memory_limit=700),
    "memory limit: rank ",
    "expected at most 700 bytes",
    "(recv of ",
    "weights 64, gradients ",
    "schedule zb-h1 of 2 stages on 2 ranks with 8 microbatches fits",
)
case(
    "A memory limit that no schedule fits",
    "out-of-memory",
    lambda: train(TWO, memory_limit=[2**20, 100]),
    "memory limit: rank 1: expected at most 100 bytes",
    "the smallest limit that one fits is ",
)
case(
    "A memory limit that activations exceed",
    "out-of-memory",
    lambda: train(TWO, memory_limit=390),
    "activations",
    "jax.checkpoint around the layers",
)
case(
    "A memory limit list of the wrong length",
    "invalid-argument",
    lambda: train(TWO, memory_limit=[2**20]),
    "memory_limit=[1048576]",
    "one for each of the 2 ranks",
)
case(
    "fun that is not a function",
    "invalid-argument",
    lambda: JIT(3, mesh()),
    "fun=3; expected a function",
)
case(
    "An unknown compiler option",
    "invalid-argument",
    lambda: train(TWO, compiler_options={"xla_unheard_of": True}),
    "xla_unheard_of",
)
case(
    "float() of an array of several elements",
    "invalid-argument",
    lambda: float(state()[0]),
    "float() of an MpmdArray: expected one element, found shape (4, 4)",
)

case(
    "Compiler options that are not a dict",
    "invalid-argument",
    lambda: train(TWO, compiler_options=["xla_cpu_enable_fast_math"]),
    "compiler_options=['xla_cpu_enable_fast_math']; expected a dict",
)
case(
    "A compiler option without a name",
    "invalid-argument",
    lambda: train(TWO, compiler_options={None: None}),
    "compiler_options has the name None; expected text",
)
case(
    "A compiler option without a value",
    "invalid-argument",
    lambda: train(TWO, compiler_options={"xla_cpu_enable_fast_math": None}),
    "compiler_options['xla_cpu_enable_fast_math']=None; expected text, True, False or a number",
)


def format_deleted() -> str:
    _, total = step_of()(m.params(), m.batch())
    total.delete()
    return f"{total:.3f}"


case("Formatting a deleted array", "donated", format_deleted, "deleted or donated")
case(
    "Formatting an array of several elements",
    "invalid-argument",
    lambda: f"{state()[0]:.3f}",
    "as '.3f': expected a scalar, found shape (4, 4)",
)

# --- Numbers ----------------------------------------------------------------------------


def with_flag(flag: str, run: Callable[[], Any]) -> Any:
    jax.config.update(flag, True)
    try:
        return run()
    finally:
        jax.config.update(flag, False)


case(
    "A NaN under jax_debug_nans",
    "nan",
    lambda: with_flag("jax_debug_nans", lambda: train(TWO, loss=m.log_of_negative)),
    "fwd_1 of microbatch 0: expected numbers, found a NaN",
    "mistakes.py:",
)

# --- Memory -----------------------------------------------------------------------------


def too_large_argument() -> None:
    xs = np.broadcast_to(np.float32(0), (m.TOO_MANY,))
    JIT(m.first_of, mesh())(xs)


case(
    "A result that exceeds the memory",
    "out-of-memory",
    lambda: loop(m.batch(), m.task_too_large),
    "instruction",
    "the plan's values take up to 140737488355",
    "To need less:",
)
case(
    "An argument that exceeds the memory",
    "out-of-memory",
    too_large_argument,
    "rank 0, argument xs: ",
    "the plan's values take up to",
    "To need less:",
)

# --- Static arguments -------------------------------------------------------------------


@dataclasses.dataclass
class Settings:
    rates: list[float]


@dataclasses.dataclass(frozen=True)
class FrozenSettings:
    rates: Any


for what, value, *says in (
    ("a list", [1, 2], "settings: ", "found [1, 2] of type list; make it a tuple"),
    ("a list in a tuple", (1, [2]), "settings[1]: ", "of type list; make it a tuple"),
    ("a dict", {"rate": 1}, "settings: ", "make it a tuple of pairs"),
    ("an array", np.ones(2), "settings: ", "make the argument non-static"),
    ("a dataclass", Settings([1]), "settings: ", "@dataclasses.dataclass(frozen=True)"),
    ("a list in a dataclass", FrozenSettings([1]), "settings.rates: ", "make it a tuple"),
):
    case(
        f"A static argument that is {what}",
        "invalid-argument",
        lambda value=value: JIT(lambda xs, settings: xs, mesh(), static_argnames="settings")(
            m.batch(), settings=value
        ),
        "static argument ",
        *says,
    )

# --- Kinds of memory --------------------------------------------------------------------


def in_memory(kind: str) -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(mesh().lowering_mesh(), P(), memory_kind=kind)


def step_that_moves(move: Any, kind: str) -> Any:
    def step(ws: Any, xs: jax.Array) -> Any:
        new, total = m.training_step(TWO)(ws, xs)
        return jax.tree.map(lambda w: move(w, in_memory(kind)), new), total

    return JIT(step, mesh())(m.params(), m.batch())


HOST = jax.memory.Space.Host


def step_that_computes_there() -> Any:
    def step(ws: Any, xs: jax.Array) -> Any:
        new, total = m.training_step(TWO)(ws, xs)
        hosted = jax.device_put(new, HOST)
        return jax.tree.map(lambda w: w * 2, hosted), total

    return JIT(step, mesh())(m.params(), m.batch())


def step_that_moves_in_a_while() -> Any:
    def step(ws: Any, xs: jax.Array) -> Any:
        new, total = m.training_step(TWO)(ws, xs)

        def body(w: Any) -> Any:
            return jax.device_put(jax.device_put(w, HOST), jax.memory.Space.Device) * 2

        return jax.lax.while_loop(lambda w: w[0, 0] < total, body, new[0])

    return JIT(step, mesh())(m.params(), m.batch())


def loop_of_values_there() -> Any:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.device_put(m.loss(ws, x), HOST)

        return jaxpp.treduce(one, xs, TWO, operation=jaxpp.Concat)

    return JIT(step, mesh())(m.params(), m.batch())


def memory(title: str, run: Callable[[], Any], *says: str) -> None:
    case(title, "unsupported", run, *says)


ONE_OF = (
    "expected memory_kind='device', 'pinned_host' or None, found memory_kind='unpinned_host'"
)

memory(
    "An argument in unpinned host memory",
    lambda: step_of()(jax.device_put(m.params(), in_memory("unpinned_host")), m.batch()),
    f"argument ws[0]: {ONE_OF}",
)
memory(
    "in_shardings in unpinned host memory",
    lambda: step_of(in_shardings=(in_memory("unpinned_host"), None))(m.params(), m.batch()),
    f"in_shardings of ws[0]: {ONE_OF}",
)
memory(
    "out_shardings in unpinned host memory",
    lambda: step_of(out_shardings=(in_memory("unpinned_host"), None))(m.params(), m.batch()),
    f"out_shardings of result[0][0]: {ONE_OF}",
)
memory(
    "An MpmdSharding in unpinned host memory",
    lambda: jaxpp.MpmdSharding(mesh(), (0, 1), P(), memory_kind="unpinned_host"),
    f"MpmdSharding: {ONE_OF}",
)
memory(
    "A value moved to unpinned host memory",
    lambda: step_that_moves(jax.device_put, "unpinned_host"),
    "device_put at",
    "cases_arguments.py:",
    ONE_OF,
)
memory(
    "A constraint to host memory",
    lambda: step_that_moves(jax.lax.with_sharding_constraint, "pinned_host"),
    "sharding_constraint at",
    "cases_arguments.py:",
    "expected memory_kind='device' or None; jax.device_put moves between memories, found "
    "memory_kind='pinned_host'",
)
memory(
    "A computation in host memory",
    step_that_computes_there,
    "mul at",
    "cases_arguments.py:",
    "expected values in device memory, where tasks compute, found float32<host>[4,4]",
    "jax.device_put(x, jax.memory.Space.Device)",
)
memory(
    "A move between memories in a while loop",
    step_that_moves_in_a_while,
    "device_put inside while at",
    "cases_arguments.py:",
    "expected values in device memory, where tasks compute, found float32<host>[4,4]",
    "outside while",
)
memory(
    "A loop's result in host memory",
    loop_of_values_there,
    "treduce at",
    "cases_arguments.py:",
    "result: expected a value in device memory, where the loop reduces it, found one in "
    "pinned_host",
    "move it after the loop",
)

# --- Refs -------------------------------------------------------------------------------

case(
    "A ref from outside the loop",
    "unsupported",
    lambda: JIT(m.counting_step, mesh())(m.params(), m.batch()),
    "treduce at",
    "the function uses a jax.Ref from outside, Ref{int32[]}, at ",
    "mistakes.py:",
    "jax.new_ref",
)
case(
    "A ref from outside the step",
    "unsupported",
    lambda: JIT(m.step_that_keeps, mesh())(m.params(), m.batch()),
    "step step_that_keeps: the function uses a jax.Ref from outside, Ref{float32[4]}, at ",
    "mistakes.py:",
)
case(
    "A ref as an argument",
    "invalid-argument",
    lambda: step_of()([jax.new_ref(w) for w in m.params()], m.batch()),
    "argument ws[0]: expected an array, found a jax.Ref",
    "ref[...]",
)
case(
    "A ref as a result",
    "invalid-argument",
    lambda: JIT(lambda ws: jax.new_ref(ws[0]), mesh())(m.params()),
    "the step's result: expected an array, found a jax.Ref",
)
