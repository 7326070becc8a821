"""The same mistake in a method, a decorated function, a lambda and a partial.

However the user's function is defined, the message is the same and names the user's own line.
"""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, mesh


def in_a_method(fun: Callable[..., Any]) -> Callable[..., Any]:
    class Model:
        def loss(self, ws: Any, x: Any) -> Any:
            return fun(ws, x)

    return Model().loss


def decorated(fun: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fun)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    return wrapper


def in_a_lambda(fun: Callable[..., Any]) -> Callable[..., Any]:
    return lambda ws, x: fun(ws, x)


def in_a_partial(fun: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(lambda scale, ws, x: fun(ws, scale * x), 1.0)


def of_an_object(fun: Callable[..., Any]) -> Callable[..., Any]:
    class Loss:
        def __call__(self, ws: Any, x: Any) -> Any:
            return fun(ws, x)

    return Loss()


everywhere = pytest.mark.parametrize(
    "put", [in_a_method, decorated, in_a_lambda, in_a_partial, of_an_object, jax.jit]
)


def error_of(run: Callable[[], Any]) -> str:
    with pytest.raises(jaxpp.JaxppError) as caught:
        run()
    return str(caught.value)


def train(put: Callable[..., Any], loss: Callable[..., Any]) -> Any:
    """Trains with the loss, and except for jax.jit the step, wrapped by `put`."""
    step = m.training_step(TWO, put(loss))
    step = step if put is jax.jit else put(step)
    return JIT(step, mesh())(m.params(), m.batch())


@everywhere
def test_marks_whose_results_are_not_used(put: Callable[..., Any]) -> None:
    message = error_of(lambda: train(put, m.marks_not_assigned))
    assert "mistakes.py:" in message and "is not used, so it ends no stage" in message


@everywhere
def test_a_pipeline_that_runs_twice(put: Callable[..., Any]) -> None:
    message = error_of(lambda: train(put, m.siamese))
    assert "runs 2 times per microbatch, called at " in message
    assert message.count("mistakes.py:") == 4  # the loop, the marks and both calls


@everywhere
def test_a_branch_on_data_names_the_users_functions(put: Callable[..., Any]) -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        train(put, m.branch_on_data)
    message = str(caught.value)
    package = str(pathlib.Path(jaxpp.__file__).parent)
    for ours in ("run_body", "flat_fun", "the argument i.", package):
        assert ours not in message


@everywhere
def test_a_step_under_jit(put: Callable[..., Any]) -> None:
    step = JIT(put(m.training_step(TWO)), mesh())
    message = error_of(lambda: jax.jit(step)(m.params(), m.batch()))
    assert "test_surroundings.py:" in message and "found traced values" in message
    assert not step._compiled


@everywhere
def test_shapes_and_jaxprs_of_a_step(put: Callable[..., Any]) -> None:
    step = JIT(put(m.training_step(TWO)), mesh())
    ws, total = jax.eval_shape(step, m.params(), m.batch())
    assert [w.shape for w in ws] == [(4, 4), (4, 4)]
    assert (total.shape, total.dtype) == ((), jnp.float32)
    assert "mpmd_step" in str(jax.make_jaxpr(step)(m.params(), m.batch()))
    assert not step._compiled


@everywhere
def test_without_a_loop(put: Callable[..., Any]) -> None:
    step = jaxpp.mpmd_jit_by_yield(put(m.tower), mesh(), target_num_stages=4)
    message = error_of(lambda: step(m.params(), m.batch()[0]))
    assert "target_num_stages=4" in message
    assert "at None" not in message and "at ?" not in message
    assert "mistakes.py:" in message or "test_surroundings.py:" in message


@everywhere
def test_a_missing_argument_is_pythons_own_error(put: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="missing .* required positional argument") as caught:
        JIT(put(m.training_step(TWO)), mesh())(m.params())
    assert "flat_fun" not in str(caught.value)


@pytest.mark.parametrize("shape", [(8,), (8, 4)])
def test_microbatches_of_single_examples_are_noted(shape: tuple[int, ...]) -> None:
    """If the batch has no axis of microbatches, the error has a note about treduce's axis."""

    def loss(ws: Any, x: jax.Array) -> jax.Array:
        return m.loss(ws, x @ jnp.ones((x.shape[1], 4)))

    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        JIT(m.training_step(TWO, loss), mesh())(m.params(), np.ones(shape, np.float32))
    text = "".join(traceback.format_exception(caught.value))
    assert "along axis=0 into 8 microbatches" in text
    assert "x.reshape(num_microbatches, -1, *x.shape[1:])" in text


def test_arguments_of_jaxs_own_messages_have_their_names() -> None:
    def step(ws: Any, mode: str, batch: dict[str, Any], *, scale: Any) -> Any:
        if mode == "batch" and batch["x"].sum() > 0:
            return 1
        return 2 if scale > 1 else 3

    jitted = JIT(step, mesh(), static_argnums=1)
    for mode, name in (("batch", "batch['x']"), ("scale", "scale")):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            jitted(m.params(), mode, {"x": m.batch()}, scale=2.0)
        assert f"the argument {name}." in str(caught.value)
        assert "function step at " in str(caught.value)


def test_foreign_variables_are_warned_of(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\n\nimport jaxpp\n")
    environment = {**os.environ, "JAXPP_ENABLE_LICM": "1"}
    played = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, check=True
    )
    assert (
        f"{script}:3: UserWarning: the environment has JAXPP_ENABLE_LICM (of another"
        in played.stderr
    )
    assert played.stderr.count("UserWarning") == 1
