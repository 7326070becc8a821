"""What the first call of a step makes: counts that its time depends on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax._src.interpreters import mlir

import jaxpp.api as jaxpp
from equality import make_mesh, modules_of

STAGES, WIDTH, CLASSES = 4, 8, 16


def step(params: Any, xs: jax.Array, labels: jax.Array) -> Any:
    """The gradients of a classifier: the labels index its logits."""

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for w in params["layers"]:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], labels)
        return losses.mean()

    return jaxpp.treduce(
        lambda batch: jax.grad(loss)(params, *batch),
        (xs, labels),
        schedule=jaxpp.Std1F1B(STAGES),
        operation=jaxpp.Add,
    )


def structs() -> tuple[Any, ...]:
    layers = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * (STAGES - 1)
    params = {"layers": layers, "head": jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32)}
    xs = jax.ShapeDtypeStruct((STAGES, 2, WIDTH), jnp.float32)
    return params, xs, jax.ShapeDtypeStruct((STAGES, 2), jnp.int32)


def compiled() -> Any:
    return jaxpp.mpmd_jit_with_loop(step, make_mesh(STAGES)).compile(*structs())


def test_modules_share_an_mlir_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(mlir.JaxIrContext):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    monkeypatch.setattr(mlir, "JaxIrContext", Counted)
    step = compiled()
    assert len(made) <= 2
    assert len(modules_of(step).modules) > 6


@pytest.fixture
def programs_of_jax() -> Iterator[list[str]]:
    """The programs that JAX compiles for its own client."""
    found: list[str] = []

    def listen(event: str, duration: float, **more: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(more.get("fun_name", "?"))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_jax_compiles_nothing(programs_of_jax: list[str]) -> None:
    jax.clear_caches()
    jax.jit(lambda x: x + 1)(1)
    assert len(programs_of_jax) == 1  # the count works
    compiled()
    assert len(programs_of_jax) == 1
