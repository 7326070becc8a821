"""`memory_limit=`: how much memory a step needs on each rank, and plans that need too much."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh, mesh_of

MICROBATCHES = 8


def step_of(schedule: Any, ranks: int = 4, **options: Any) -> Any:
    return jaxpp.mpmd_jit_with_loop(
        m.training_step(schedule), mesh_of(ranks, {}, sharing=1), **options
    )


def arguments(layers: int = 4) -> tuple[Any, Any]:
    return m.params(layers), m.batch(MICROBATCHES)


def refusal(step: Any) -> str:
    with pytest.raises(jaxpp.JaxppError) as caught:
        step(*arguments())
    assert caught.value.code == "out-of-memory"
    return str(caught.value)


def peaks_of(step: Any) -> list[int]:
    return [rank.peak_bytes for rank in step.trace_and_place(*arguments()).plan.summary()]


def test_a_plan_at_its_limit_runs_and_a_byte_less_is_refused() -> None:
    peaks = peaks_of(step_of(jaxpp.GPipe(4)))
    ws, loss = step_of(jaxpp.GPipe(4), memory_limit=max(peaks))(*arguments())
    plain_ws, plain_loss = m.plain_training_step(*arguments())
    assert jnp.allclose(float(loss), plain_loss)
    for w, plain in zip(ws, plain_ws, strict=True):
        assert jnp.allclose(jnp.asarray(w), plain, atol=1e-6)
    text = refusal(step_of(jaxpp.GPipe(4), memory_limit=max(peaks) - 1))
    assert f"expected at most {max(peaks) - 1} bytes" in text
    assert f"found a peak of {max(peaks)}, 1 over" in text


def test_limits_are_of_each_rank() -> None:
    peaks = peaks_of(step_of(jaxpp.GPipe(4)))
    step_of(jaxpp.GPipe(4), memory_limit=peaks).trace_and_place(*arguments())
    peaks[2] -= 1
    assert "memory limit: rank 2:" in refusal(step_of(jaxpp.GPipe(4), memory_limit=peaks))


def test_the_schedule_that_is_named_fits() -> None:
    limit = max(peaks_of(step_of(jaxpp.ZeroBubble(4))))
    text = refusal(step_of(jaxpp.GPipe(4), memory_limit=limit))
    assert "schedule zb-h1 of 4 stages on 4 ranks with 8 microbatches fits" in text
    step_of(jaxpp.ZeroBubble(4), memory_limit=limit)(*arguments())


def test_the_limit_that_is_named_is_enough() -> None:
    text = refusal(step_of(jaxpp.GPipe(4), memory_limit=1))
    found = re.search(r"smallest limit that one fits is (\d+) bytes, with 1f1b", text)
    assert found
    step_of(jaxpp.Std1F1B(4), memory_limit=int(found[1])).trace_and_place(*arguments())


def test_nothing_is_compiled_for_a_plan_that_does_not_fit(monkeypatch: Any) -> None:
    def compile_none(*_: Any) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr("jaxpp.step.CompiledStep", compile_none)
    refusal(step_of(jaxpp.GPipe(4), memory_limit=1))


def test_sharded_ranks_count_the_bytes_of_one_device() -> None:
    def fitting(model: int) -> int:
        mesh = mesh_of(2, {"model": model}, sharing=1)
        spec = jax.sharding.PartitionSpec(None, "model")
        step = jaxpp.mpmd_jit_with_loop(
            m.training_step(jaxpp.Std1F1B(2)), mesh, in_specs=([spec] * 2, None)
        )
        traced = step.trace_and_place(*arguments(2))
        return max(rank.peak_bytes for rank in traced.plan.summary())

    assert fitting(2) < fitting(1)


def test_by_yield_takes_a_limit() -> None:
    def forward(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return x

    args, mesh = (m.params(2), m.batch()[0]), mesh_of(2, {}, sharing=1)
    jaxpp.mpmd_jit_by_yield(forward, mesh, memory_limit=2**20)(*args)
    with pytest.raises(jaxpp.JaxppError, match="memory limit: rank "):
        jaxpp.mpmd_jit_by_yield(forward, mesh, memory_limit=10)(*args)


@pytest.mark.parametrize("axes", [{}, {"data": 2}, {"data": 2, "model": 2}], ids=str)
def test_the_command_says_what_the_run_proved(
    axes: dict[str, int], command: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command proves the same from the dump, also when values are sharded over devices."""
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    mesh = mesh_of(2, axes, sharing=1)
    whole = P("data") if axes else P()
    options = {"in_specs": (P(None, "model" if "model" in axes else None), P(None, *whole))}
    step = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2)), mesh, **options)
    compiled = step.compile(m.params(2), m.batch(MICROBATCHES))
    done = subprocess.run(
        [command, "plan", tmp_path / "graph.jpp", "--after", "check"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (tmp_path / "check.txt").read_text()
    peaks = [rank.peak_bytes for rank in compiled._traced.plan.summary()]
    assert all(f"{peak} bytes" in done.stdout for peak in peaks)


# --- Values kept for the loop -------------------------------------------------------------


def unrolled(weights: jax.Array, x: jax.Array) -> jax.Array:
    for k in range(len(weights)):
        x = jnp.tanh(x @ weights[k])
    return x


def scanned(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def cast(weights: jax.Array, x: jax.Array) -> jax.Array:
    return scanned(weights.astype(jnp.bfloat16), x)


def rounded(weights: jax.Array, x: jax.Array) -> jax.Array:
    return scanned(weights + jax.lax.stop_gradient(jnp.round(weights) - weights), x)


def lines_before_the_loop(layers: Any, dtype: Any) -> list[tuple[str, str, str]]:
    """The rank, size and op of each value that `explain()` lists. Rank 0 has the rows 0 and 1
    of the weights, rank 1 the rows 2 and 3."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        x = jaxpp.mark_stage_end(layers(weights[:2], x))
        return jnp.mean(layers(weights[2:], x).astype(jnp.float32) ** 2)

    def step(weights: jax.Array, batch: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.grad(loss)(weights, x)

        return jaxpp.treduce(one, batch, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add())

    lowered = jaxpp.mpmd_jit_with_loop(step, make_mesh(2)).lower(
        jnp.zeros((4, 64, 64)), jnp.zeros((4, 8, 64), dtype)
    )
    return re.findall(r"^ +(\d) +(\S+ KiB)  (\w+) at .*\.py:\d+$", lowered.explain(), re.M)


@pytest.mark.parametrize(
    "layers, dtype, expected",
    [
        (unrolled, jnp.float32, ("32.0 KiB", "slice")),
        (scanned, jnp.float32, None),
        (cast, jnp.bfloat16, ("16.0 KiB", "convert_element_type")),
        (rounded, jnp.float32, ("32.0 KiB", "add")),
    ],
)
def test_explain_lists_what_is_kept_for_the_loop(
    layers: Any, dtype: Any, expected: tuple[str, str] | None
) -> None:
    lines = [(rank, *expected) for rank in "01"] if expected else []
    assert lines_before_the_loop(layers, dtype) == lines


@pytest.mark.parametrize("schedule", [jaxpp.Std1F1B(2), jaxpp.ZeroBubble(2)])
def test_a_cast_that_is_rematerialised_is_kept_once(schedule: Any) -> None:
    def layer(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w.astype(jnp.bfloat16).T)

    def kept_by(layer: Any) -> list[str]:
        def loss(ws: Any, x: Any) -> Any:
            for w in ws:
                x = jaxpp.mark_stage_end(layer(w, x.astype(jnp.bfloat16)))
            return jnp.mean(x.astype(jnp.float32) ** 2)

        def step(ws: Any, xs: Any) -> Any:
            return jaxpp.treduce(
                lambda x: jax.value_and_grad(loss)(ws, x), xs, schedule, operation=jaxpp.Add
            )

        ws = [jnp.eye(64), 2 * jnp.eye(64)]
        run = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}, sharing=1))
        text = run.compile(ws, jnp.ones((4, 2, 64))).explain()
        lines = text.partition("computed once, before the loop")[2].splitlines()
        return [line.split(" at ")[0] for line in lines[1:3]]

    kept = kept_by(layer)
    assert all("8.0 KiB" in line for line in kept), kept
    assert kept_by(jax.checkpoint(layer)) == kept


def test_a_reshape_that_tasks_and_ops_outside_repeat() -> None:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w.reshape(8, 8)) + x @ jnp.sin(w.reshape(8, 8))
            x = jaxpp.mark_stage_end(x)
        return jnp.mean(x**2)

    def step(ws: Any, xs: Any) -> Any:
        return jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x),
            xs,
            jaxpp.Std1F1B(2),
            operation=jaxpp.Add,
        )

    ws, xs = [jnp.ones(64) / 8, jnp.ones(64) / 9], jnp.ones((4, 2, 8))
    found = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}, sharing=1))(ws, xs)
    for a, b in zip(
        jax.tree.leaves(found), jax.tree.leaves(jax.jit(step)(ws, xs)), strict=True
    ):
        assert jnp.allclose(jnp.asarray(a), b, rtol=1e-5)
