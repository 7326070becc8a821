"""Steps as users write them, a few correct, most with a mistake.

docs/errors.md shows the message for each mistake, and the lines of this file that it names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from jaxpp.api import Task, TaskType

WIDTH = 4
F, B = TaskType.FWD, TaskType.BWD


def params(layers: int = 2) -> list[jax.Array]:
    return [0.1 * (k + 1) * jnp.eye(WIDTH) for k in range(layers)]


def batch(microbatches: int = 3, size: int = 2) -> jax.Array:
    return jnp.arange(microbatches * size * WIDTH, dtype=jnp.float32).reshape(
        microbatches, size, WIDTH
    )


def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    """Ends a stage after each layer."""
    for w in ws:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
    return jnp.mean(x**2)


def unmarked_loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def training_step(schedule: Any, loss: Callable[..., Any] = loss) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(ws: list[jax.Array], xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(loss)(ws, x)

        total, grads = jaxpp.treduce(one, xs, schedule, operation=jaxpp.Add)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, grads), total

    return step


def plain_training_step(ws: list[jax.Array], xs: jax.Array) -> Any:
    """The same as `training_step` in plain JAX."""
    pairs = [jax.value_and_grad(unmarked_loss)(ws, x) for x in xs]
    total, grads = jax.tree.map(lambda *leaves: sum(leaves), *pairs)
    return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], total


# --- Marks ------------------------------------------------------------------------------


def mark_in_scan(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        return jaxpp.mark_stage_end(jnp.tanh(x @ w)), None

    x, _ = jax.lax.scan(layer, x, jnp.stack(ws))
    return jnp.mean(x**2)


def mark_in_while(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array) -> jax.Array:
        return jaxpp.mark_stage_end(jnp.tanh(x @ ws[0]))

    return jnp.mean(jax.lax.while_loop(lambda x: jnp.sum(x) > 9.0, layer, x))


def mark_in_cond(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    def layer(x: jax.Array) -> jax.Array:
        return jaxpp.mark_stage_end(jnp.tanh(x @ ws[0]))

    return jnp.mean(jax.lax.cond(jnp.sum(x) > 9.0, layer, lambda x: x, x))


def used_around_a_mark_in_checkpoint(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    def both(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ ws[0])
        x = jaxpp.mark_stage_end(2 * y)
        return jaxpp.mark_stage_end(jnp.tanh(x @ ws[1]) * y)

    return jnp.mean(jax.checkpoint(both)(ws, x))


def mark_of_text() -> None:
    jaxpp.mark_stage_end({"x": "text"})


def mark_under_shard_map(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    sharded = jax.shard_map(lambda x: jaxpp.mark_stage_end(x), in_specs=P(), out_specs=P())
    return loss(ws, sharded(x))


def marks_not_assigned(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w)
        jaxpp.mark_stage_end(x)
    return jnp.mean(x**2)


def one_mark_not_assigned(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    x = jnp.tanh(x @ ws[0])
    jaxpp.mark_stage_end(x)
    x = jaxpp.mark_stage_end(jnp.tanh(x @ ws[1]))
    return jnp.mean(x**2)


def tower(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in ws:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
    return x


def siamese(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    left = tower(ws, x)
    right = tower(ws, 2 * x)
    return jnp.mean((left - right) ** 2)


def siamese_in_a_comprehension(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    left, right = [tower(ws, each) for each in (x, 2 * x)]
    return jnp.mean((left - right) ** 2)


def twice_one_after_the_other(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(tower(ws, tower(ws, x)) ** 2)


def marks_without_loop(ws: list[jax.Array], xs: jax.Array) -> Any:
    return jax.value_and_grad(loss)(ws, xs[0])


def gradients_first(ws: list[jax.Array], xs: jax.Array) -> Any:
    def one(x: jax.Array) -> Any:
        value, grads = jax.value_and_grad(loss)(ws, x)
        return grads, value

    return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2))


def branch_on_data(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    return loss(ws, x) if x.sum() > 0 else jnp.float32(0)


# --- The loop ---------------------------------------------------------------------------


def forward(xs: Any, fun: Callable[..., Any] | None = None, **options: Any) -> Any:
    """A loop of two stages that only pass `x` on."""

    def one(x: Any) -> Any:
        x = jaxpp.mark_stage_end(jaxpp.mark_stage_end(x))
        return fun(x) if fun else x

    options = {"schedule": jaxpp.Std1F1B(2), "operation": jaxpp.Add, **options}
    return jaxpp.treduce(one, xs, **options)


def forward_i(xs: jax.Array, length: Any) -> Any:
    def one(i: jax.Array) -> jax.Array:
        return jaxpp.mark_stage_end(jaxpp.mark_stage_end(xs[i]).sum())

    return jaxpp.treduce_i(one, length, jaxpp.Std1F1B(2), jaxpp.Add)


def loop_in_loop(ws: list[jax.Array], xs: jax.Array) -> Any:
    def one(x: jax.Array) -> jax.Array:
        return loss(ws, x + forward(jnp.stack([x, x])))

    return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)


def loop_in_scan(xs: jax.Array) -> Any:
    return jax.lax.scan(lambda c, x: (c, forward(x)), 0, jnp.stack([xs, xs]))


def scan_with_updates(ws: list[jax.Array], xs: jax.Array) -> Any:
    """Updates the weights after every microbatch."""

    def one(ws: list[jax.Array], x: jax.Array) -> Any:
        total, grads = jax.value_and_grad(loss)(ws, x)
        return [w - 0.1 * g for w, g in zip(ws, grads, strict=True)], total

    return jax.lax.scan(one, ws, xs)


def scan_of_losses(ws: list[jax.Array], xs: jax.Array) -> Any:
    def one(total: jax.Array, x: jax.Array) -> Any:
        return total + loss(ws, x), None

    return jax.lax.scan(one, jnp.float32(0), xs)[0]


def scan_of_running_sums(ws: list[jax.Array], xs: jax.Array) -> Any:
    def one(total: jax.Array, x: jax.Array) -> Any:
        total = total + loss(ws, x)
        return total, total

    return jax.lax.scan(one, jnp.float32(0), xs)


def gradient_of_scan(ws: list[jax.Array], xs: jax.Array) -> Any:
    return jax.grad(scan_of_losses)(ws, xs)


def gradient_of_loop(ws: list[jax.Array], xs: jax.Array) -> Any:
    def total(ws: list[jax.Array]) -> jax.Array:
        return jaxpp.treduce(lambda x: loss(ws, x), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    return jax.grad(total)(ws)


def vmapped_loop(xs: jax.Array) -> Any:
    return jax.vmap(forward)(jnp.stack([xs, xs]))


def closure_in_custom_vjp(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def layer(x: jax.Array) -> jax.Array:
        return x @ ws[0]

    layer.defvjp(lambda x: (layer(x), None), lambda _, g: (g @ ws[0].T,))
    return jnp.mean(jaxpp.mark_stage_end(jaxpp.mark_stage_end(layer(x)) @ ws[1]))


# --- Operations -------------------------------------------------------------------------


class NoUpdate:
    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, value.dtype)

    def __repr__(self) -> str:
        return "NoUpdate()"


class CountsInIntegers(NoUpdate):
    """An operation whose state is int32, whatever the dtype of the values."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, jnp.int32)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return state + value

    def __repr__(self) -> str:
        return "CountsInIntegers()"


class TwoStates(CountsInIntegers):
    def state(self, n: int, value: jax.ShapeDtypeStruct) -> Any:
        return jnp.zeros(value.shape), jnp.zeros(value.shape)

    def __repr__(self) -> str:
        return "TwoStates()"


# --- Schedules --------------------------------------------------------------------------


class UserSchedule(jaxpp.BaseSchedule):
    """All forwards, then all backwards, on two ranks; `edit` changes the lists."""

    def __init__(self, edit: Callable[[list[list[Any]]], Any] = lambda rows: None) -> None:
        super().__init__(num_stages=2)
        self.edit = edit

    def tasks(self, n_mubatches: int) -> Any:
        rows = [
            [Task(stage, mb, kind) for kind in (F, B) for mb in range(n_mubatches)]
            for stage in range(2)
        ]
        edited = self.edit(rows)
        return rows if edited is None else edited


def drop_last(rows: list[list[Any]]) -> None:
    del rows[1][-1]


def repeat_first(rows: list[list[Any]]) -> None:
    rows[1].append(rows[1][0])


def backward_first(rows: list[list[Any]]) -> None:
    rows[1].reverse()


def wait_in_a_circle(rows: list[list[Any]]) -> None:
    # Rank 0 waits for the first microbatch's gradient, but rank 1 begins with the second.
    rows[0] = [Task(0, 0, F), Task(0, 0, B), *rows[0][1:3], *rows[0][4:]]
    rows[1][0], rows[1][1] = rows[1][1], rows[1][0]


def task_on_wrong_rank(rows: list[list[Any]]) -> None:
    rows[0].append(rows[1].pop())


def stage_that_is_not(rows: list[list[Any]]) -> None:
    rows[1].append(Task(7, 0, F))


def negative_microbatch(rows: list[list[Any]]) -> None:
    rows[1].append(Task(1, -1, F))


def text_for_task(rows: list[list[Any]]) -> None:
    rows[1][0] = "fwd_1__0"


def text_for_kind(rows: list[list[Any]]) -> None:
    rows[1][0] = Task(1, 0, "FWD")


def no_lists(rows: list[list[Any]]) -> Any:
    return [None, None]


def task_without_fields(rows: list[list[Any]]) -> None:
    rows[1][0] = object.__new__(Task)


class NoArgument(jaxpp.BaseSchedule):
    def tasks(self) -> Any:
        return [[], []]


class NoStages(jaxpp.BaseSchedule):
    def __init__(self) -> None:
        pass

    def tasks(self, n_mubatches: int) -> Any:
        return [[], []]


def three_ranks(rows: list[list[Any]]) -> Any:
    return [*rows, []]


# --- Shardings --------------------------------------------------------------------------


def unknown_axis_in_constraint(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    x = jax.lax.with_sharding_constraint(x, P("modle"))
    return loss(ws, x)


# --- Numbers ----------------------------------------------------------------------------


def log_of_negative(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    x = jaxpp.mark_stage_end(jnp.tanh(x @ ws[0]))
    x = jnp.log(x - 1)
    return jnp.mean(jaxpp.mark_stage_end(x @ ws[1]))


# --- Memory -----------------------------------------------------------------------------

TOO_MANY = 1 << 45  # elements: more bytes than an address space has


def task_too_large(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x.sum(), (TOO_MANY,))[::-1]


def first_of(xs: jax.Array) -> jax.Array:
    return xs[0]


# --- Plan files -------------------------------------------------------------------------


def loss_that_prints(ws: list[jax.Array], x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x.sum())
    return loss(ws, x)


# --- Refs -------------------------------------------------------------------------------


def counting_step(ws: list[jax.Array], xs: jax.Array) -> Any:
    count = jax.new_ref(jnp.zeros((), jnp.int32))

    def counting_loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        count[...] += 1
        return loss(ws, x)

    return training_step(jaxpp.Std1F1B(2), counting_loss)(ws, xs), count[...]


KEPT = jax.new_ref(jnp.zeros(WIDTH))


def step_that_keeps(ws: list[jax.Array], xs: jax.Array) -> Any:
    result = training_step(jaxpp.Std1F1B(2))(ws, xs)
    KEPT[...] = xs[0, 0]
    return result


# --- A function called twice ------------------------------------------------------------


def loss_and_gradient_apart(ws: list[jax.Array], xs: jax.Array) -> Any:
    def one(x: jax.Array) -> Any:
        return loss(ws, x), jax.grad(loss)(ws, x)

    return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2))


# --- Valid, but probably unintended -----------------------------------------------------

LARGE = 1024  # columns: a float32 matrix of WIDTH * LARGE * LARGE bytes


def wide_params() -> list[jax.Array]:
    return [jnp.ones((LARGE, LARGE)) / LARGE, jnp.ones((LARGE, LARGE)) / LARGE]


def wide_batch() -> jax.Array:
    return jnp.ones((2, 2, LARGE))


def wide_step(ws: list[jax.Array], xs: jax.Array) -> Any:
    return training_step(jaxpp.Std1F1B(2))(ws, xs)


def step_with_a_constant(ws: list[jax.Array], xs: jax.Array) -> Any:
    def loss_with_table(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        return loss(ws, x @ TABLE)

    return training_step(jaxpp.Std1F1B(2), loss_with_table)(ws, xs)


TABLE = np.ones((LARGE, LARGE), np.float32)
