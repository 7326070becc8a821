"""Mistakes in programs written by hand: refused before anything runs, with the user's line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from jaxpp.experimental import mpmd
from written import hand_mesh, on

MESH = hand_mesh(3)
A, B, C = (on(MESH, rank) for rank in range(3))
OTHER = Mesh(np.array(jax.devices()[3:5]).reshape(2, 1), ("stage", "data"))


def identity(x: Any) -> Any:
    return x


def run_twice(x: Any) -> Any:
    future = mpmd.transfer(x, out_shardings=B)
    future.done()
    return future.done()


def never_done(x: Any) -> Any:
    mpmd.transfer(x, out_shardings=B)
    return x


def donated_after_sending(x: Any) -> Any:
    y = mpmd.task(identity, out_shardings=A)(x)
    future = mpmd.transfer(y, out_shardings=B)
    z = mpmd.task(identity, name="reuse", out_shardings=A, donate_argnums=0)(y)
    return future.done(), z


def used_after_donation(x: Any) -> Any:
    y = mpmd.task(identity, name="first", out_shardings=A, donate_argnums=(0,))(x)
    return y, mpmd.task(identity, name="second", out_shardings=A)(x)


def sent_after_donation(x: Any) -> Any:
    mpmd.task(identity, name="first", out_shardings=A, donate_argnums=(0,))(x)
    return mpmd.transfer(x, out_shardings=B).done()


def two_ranks(x: Any) -> Any:
    y = mpmd.transfer(x, out_shardings=B).done()
    return mpmd.task(jnp.add, out_shardings=A)(x, y)


def results_elsewhere(x: Any) -> Any:
    return mpmd.task(identity, out_shardings=B)(x)


def another_mesh(x: Any) -> Any:
    return mpmd.task(identity, out_shardings=NamedSharding(OTHER, P()))(x)


def nowhere(x: Any) -> Any:
    return mpmd.task(lambda: jnp.zeros(2), name="zeros", out_shardings=P())()


def to_itself(x: Any) -> Any:
    return mpmd.transfer(x, out_shardings=A).done()


def computes(x: Any) -> Any:
    return mpmd.task(identity, out_shardings=A)(x + 1)


def computes_the_result(x: Any) -> Any:
    return mpmd.task(identity, out_shardings=A)(x) * 2


def closes_over(x: Any) -> Any:
    return mpmd.task(lambda y: x + y, name="closing", out_shardings=A)(x)


def task_in_task(x: Any) -> Any:
    def outer(x: Any) -> Any:
        return mpmd.task(identity, out_shardings=A)(x)

    return mpmd.task(outer, out_shardings=A)(x)


def wrong_tree(x: Any) -> Any:
    return mpmd.task(lambda x: (x, x), name="pair", out_shardings=(A, A, A))(x)


def a_spec_that_does_not_divide(x: Any) -> Any:
    mesh = hand_mesh(1, data=2)
    wide = on(mesh, 0)

    @mpmd.mpmd(mesh, in_shardings=(wide,))
    def inner(x: Any) -> Any:
        return mpmd.task(identity, out_shardings=P("data"))(x)

    return inner(np.ones((3, 2), np.float32))


def no_sharding(x: Any) -> Any:
    return mpmd.transfer(x, out_shardings=None).done()


def overlapping_stack(x: Any) -> Any:
    return mpmd.stack(x, mpmd.task(identity, out_shardings=A)(x))


def stack_of_two_types(x: Any) -> Any:
    y = mpmd.task(lambda x: x.astype(jnp.int32), out_shardings=A)(x)
    return mpmd.stack(x, mpmd.transfer(y, out_shardings=B).done())


def slice_of_others(x: Any) -> Any:
    y = mpmd.transfer(x, out_shardings=B).done()
    return mpmd.slice(mpmd.stack(x, y), [0, 2])


def not_an_axis_alone(x: Any) -> Any:
    both = mpmd.MpmdMesh(hand_mesh(2, data=2).jax_mesh, "stage")
    sharding = NamedSharding(both.jax_mesh, P(("data", "stage")))

    @mpmd.mpmd(both, in_shardings=(sharding,))
    def inner(x: Any) -> Any:
        return mpmd.slice(x, [0, 1])

    return inner(np.ones((4, 2), np.float32))


CASES: list[tuple[Callable[..., Any], str, str]] = [
    (run_twice, "invalid-argument", r"test_refused.py:\d+.*may only be called once"),
    (never_done, "invalid-argument", r"test_refused.py:\d+ is never completed"),
    (donated_after_sending, "donated", r"task reuse at .*test_refused.py:\d+.*was sent by"),
    (used_after_donation, "donated", r"task second.*was donated to the task at .*py:\d+"),
    (sent_after_donation, "donated", r"transfer: array.*was donated to the task at"),
    (two_ranks, "mesh", r"test_refused.py:\d+: argument \[0\] is on rank 0 and argument \[1\]"),
    (results_elsewhere, "mesh", r"argument \[0\] is on rank 0 and out_shardings on rank 1"),
    (another_mesh, "mesh", r"does not belong to the MPMD mesh"),
    (nowhere, "mesh", r"task zeros at .*py:\d+: nothing says where it runs"),
    (to_itself, "mesh", r"is on rank 0 already; expected out_shardings on other ranks"),
    (computes, "invalid-argument", r"argument \[0\]: expected an argument of the program"),
    (computes_the_result, "invalid-argument", r"result: expected .* compute it in a task"),
    (closes_over, "invalid-argument", r"task closing.*uses a value of the program"),
    (task_in_task, "invalid-argument", r"expected a call in a function under mpmd"),
    (wrong_tree, "sharding", r"task pair.*out_shardings: expected a pytree prefix"),
    (a_spec_that_does_not_divide, "sharding", r"divides dimension 0 of \(3, 2\) into 2"),
    (no_sharding, "sharding", r"out_shardings: expected a NamedSharding"),
    (overlapping_stack, "mesh", r"duplicate MPMD ranks"),
    (stack_of_two_types, "invalid-argument", r"same dtype"),
    (slice_of_others, "mesh", r"group \[2\]; expected ranks of the array, \[0, 1\]"),
    (not_an_axis_alone, "sharding", r"leading PartitionSpec axis"),
]


@pytest.mark.parametrize(("body", "code", "text"), CASES, ids=[c[0].__name__ for c in CASES])
def test_refused(body: Callable[..., Any], code: str, text: str) -> None:
    program = mpmd.mpmd(MESH, in_shardings=(A,))(body)
    with pytest.raises(jaxpp.JaxppError, match=text) as caught:
        program(np.ones((2, 2), np.float32))
    assert caught.value.code == code
    assert len(str(caught.value)) < 600


def test_outside_of_a_program() -> None:
    with pytest.raises(jaxpp.JaxppError, match=r"transfer at .*py:\d+: expected a call in"):
        mpmd.transfer(np.ones(2), out_shardings=A)


def test_keyword_arguments_and_options() -> None:
    program = mpmd.mpmd(MESH, in_shardings=(A,))(identity)
    with pytest.raises(jaxpp.JaxppError, match="found keyword arguments"):
        program(x=np.ones(2, np.float32))
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        mpmd.mpmd(MESH, in_shardings=A, schedule=3)(identity)
    with pytest.raises(jaxpp.JaxppError, match="in_shardings: expected a pytree prefix"):
        mpmd.mpmd(MESH, in_shardings=(A, A))(identity)(np.ones(2, np.float32))
    assert mpmd.mpmd(MESH, in_shardings=A)(identity)(np.ones(2, np.float32)).shape == (2,)
