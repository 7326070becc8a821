"""`Auto` measures the stages, finds a schedule within a memory limit and runs it."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import assert_trains_equal, difference, make_mesh, mesh_of
from jaxpp import _core
from models import mlp, transformer

UNEVEN = [1, 1, 2, 3]  # layers of each stage


@pytest.fixture
def searches(monkeypatch: Any) -> list[int]:
    """A list that gets an entry whenever a search begins."""
    seen: list[int] = []
    search = jaxpp.Auto.limits

    def counted(self: Any, *args: Any) -> Any:
        seen.append(1)
        return search(self, *args)

    monkeypatch.setattr(jaxpp.Auto, "limits", counted)
    return seen


def step_of(schedule: Any, ranks: int = 2, **options: Any) -> Any:
    return jaxpp.mpmd_jit_with_loop(
        m.training_step(schedule), mesh_of(ranks, {}, sharing=1), **options
    )


def peaks_of(schedule: Any, args: Any) -> list[int]:
    return [rank.peak_bytes for rank in step_of(schedule).trace_and_place(*args).plan.summary()]


@pytest.mark.parametrize("microbatches", [1, 6])
def test_an_uneven_model_trains_to_the_same_numbers(microbatches: int, any_mesh2: Any) -> None:
    auto = jaxpp.Auto(seconds=0.1)
    assert_trains_equal(mlp(UNEVEN, microbatches), auto, any_mesh2, steps=2)
    found = auto.found
    assert found is not None
    assert found.schedule.sizes() == (4, 2, microbatches)
    assert len(found.costs) == 4
    # The times of tasks this short may be attributed to their neighbours; only the sum is
    # certain to be positive.
    assert sum(map(sum, found.costs)) > 0
    assert found.bound <= found.makespan * (1 + 1e-9)
    assert found.makespan <= found.built_in_makespan
    text = str(found)
    assert f"4 stages on 2 ranks with {microbatches} microbatches" in text
    assert "stage 3 on rank " in text
    assert "rank 1: peak memory " in text
    devices, cores = any_mesh2.jax_mesh.devices.size, len(os.sched_getaffinity(0))
    assert (f"{devices} devices share {cores} cores" in text) == (devices > cores)


def test_equal_stages_are_measured_together() -> None:
    auto = jaxpp.Auto(seconds=0.1)
    step_of(auto)(m.params(4), m.batch(4))  # first and last stage have different tasks
    found = auto.found
    assert found is not None
    assert found.costs[1] == found.costs[2] and found.spreads[1] == found.spreads[2]
    assert found.costs[0] != found.costs[1]
    assert all(spread >= 0 for stage in found.spreads for spread in stage)
    forward, spread = found.costs[2][0], found.spreads[2][0]
    assert f"forward {forward:.3g} \N{PLUS-MINUS SIGN} {spread:.2g} ms, input" in str(found)


@pytest.mark.soak("1-device")
def test_remat_and_jit(any_mesh4: Any) -> None:
    problem = transformer(stages=4, blocks=4, microbatches=4, remat=True)
    assert_trains_equal(problem, jaxpp.Auto(seconds=0.1), any_mesh4, steps=1)


def test_the_limit_is_kept() -> None:
    args = m.params(4), m.batch(8)
    limit = max(peaks_of(jaxpp.V1F1B(4, 2), args))
    assert max(peaks_of(jaxpp.InterleavedGPipe(4, 2), args)) > limit
    auto = jaxpp.Auto(memory_limit=limit, seconds=0.2)
    ws, loss = step_of(auto)(*args)
    assert auto.found is not None
    assert max(auto.found.peak_bytes) <= limit
    plain_ws, plain_loss = m.plain_training_step(*args)
    assert np.allclose(float(loss), plain_loss, rtol=1e-5)
    for w, plain in zip(ws, plain_ws, strict=True):
        assert np.allclose(np.asarray(w), plain, atol=1e-6)


def test_the_limit_of_the_step_counts_as_well() -> None:
    args = m.params(4), m.batch(8)
    limit = max(peaks_of(jaxpp.V1F1B(4, 2), args))
    auto = jaxpp.Auto(memory_limit=2**30, seconds=0.1)
    step_of(auto, memory_limit=[2**30, limit])(*args)
    assert auto.found is not None
    assert auto.found.peak_bytes[1] <= limit


def test_an_impossible_limit_says_what_would_do() -> None:
    args = m.params(4), m.batch(8)
    with pytest.raises(jaxpp.JaxppError) as caught:
        step_of(jaxpp.Auto(memory_limit=100, seconds=0.1))(*args)
    assert caught.value.code == "out-of-memory"
    text = str(caught.value)
    assert "mistakes.py:" in text
    assert "4 stages on 2 ranks with 8 microbatches that takes at most 100 bytes" in text
    least = int(text.split("smallest takes ")[1].split(" ")[0])
    # Costs are measured again, but that memory suffices whatever they are.
    auto = jaxpp.Auto(memory_limit=least, seconds=0.1)
    step_of(auto)(*args)
    assert auto.found is not None and max(auto.found.peak_bytes) <= least


def test_the_same_shapes_are_searched_once(searches: list[int], monkeypatch: Any) -> None:
    auto = jaxpp.Auto(seconds=0.1)
    step = step_of(auto)
    args = m.params(4), m.batch(4)
    step(*args)
    found = auto.found
    ws, _ = step(*args)
    step(ws, args[1])  # with arrays that a step returned
    assert len(searches) == 1
    assert auto.found is found
    step.trace_and_place(*args)  # traces again, but reuses the search
    assert auto.found is found
    step(args[0], m.batch(6))
    assert auto.found is not found


def test_nothing_is_donated_to_the_trial() -> None:
    step = step_of(jaxpp.Auto(seconds=0.1), donate_argnums=0)
    ws = [jax.device_put(w) for w in m.params(4)]
    new, _ = step(ws, m.batch(4))
    new, loss = step(new, m.batch(4))
    assert np.isfinite(float(loss))


def test_shapes_are_enough() -> None:
    auto = jaxpp.Auto(seconds=0.1)
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (m.params(4), m.batch(4))
    )
    compiled = step_of(auto).compile(*structs)
    assert auto.found is not None
    _, loss = compiled(m.params(4), m.batch(4))
    assert jnp.allclose(float(loss), m.plain_training_step(m.params(4), m.batch(4))[1])


def test_two_loops_and_one_without_a_backward(mesh2: Any) -> None:
    auto = jaxpp.Auto(seconds=0.1)

    def step(ws: Any, xs: jax.Array) -> Any:
        ws, loss = m.training_step(auto)(ws, xs)
        after = jaxpp.treduce(lambda x: m.loss(ws, x), xs, auto, operation=jaxpp.Add)
        return ws, loss, after

    args = m.params(2), m.batch(4)
    ws, loss, after = jaxpp.mpmd_jit_with_loop(step, mesh2)(*args)
    plain_ws, plain_loss = m.plain_training_step(*args)
    assert np.allclose(float(loss), plain_loss)
    assert np.allclose(float(after), sum(m.unmarked_loss(plain_ws, x) for x in args[1]))


def test_outside_of_a_pipeline_microbatches_run_in_order() -> None:
    _, loss = m.training_step(jaxpp.Auto())(m.params(2), m.batch(3))
    assert np.allclose(loss, m.plain_training_step(m.params(2), m.batch(3))[1])


def test_what_is_no_limit_is_refused() -> None:
    with pytest.raises(
        _core.JaxppError, match="Auto: memory_limit='much'; expected a positive whole"
    ):
        step_of(jaxpp.Auto(memory_limit="much"))(m.params(2), m.batch(3))  # type: ignore
    with pytest.raises(_core.JaxppError, match="Auto: seconds=0; expected a number"):
        jaxpp.Auto(seconds=0)
    with pytest.raises(_core.JaxppError, match="use Searched if the costs are known"):
        jaxpp.Auto().tasks(4)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_measured_before_there_are_arrays(impl: str) -> None:
    """The shapes of arrays and PRNG keys suffice to measure a step with dropout."""

    def loss(ws: Any, x: Any, key: Any) -> Any:
        for w in ws:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.9, x.shape))
        return (x**2).mean()

    def step(ws: Any, keys: Any, batch: Any) -> Any:
        def one(args: Any) -> Any:
            return jax.value_and_grad(loss)(ws, *args)

        auto = jaxpp.Auto(seconds=0.1)
        return jaxpp.treduce(one, (batch, keys), schedule=auto, operation=jaxpp.Add)

    args = (m.params(2), jax.random.split(jax.random.key(0, impl=impl), 4), m.batch(4))
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    compiled = jaxpp.mpmd_jit_with_loop(step, make_mesh(2)).compile(*structs)
    found, _ = compiled(*args)
    plain = np.mean([loss(args[0], x, key) for x, key in zip(args[2], args[1], strict=True)])
    assert np.isclose(float(found), 4 * plain, rtol=1e-5)


# --- Stages that are cut together with the schedule ---------------------------------------


def layers_and_head(depth: int) -> tuple[Any, Any, Any]:
    """A loss of layers and a heavy head, its weights and a batch."""

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        layers, head = params
        for w in layers:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((jnp.tanh(x @ head).sum(-1) - y) ** 2)

    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(depth)]
    head = rng.normal(size=(64, 512)).astype(np.float32) / 8
    xs, ys = rng.normal(size=(4, 32, 64)), rng.normal(size=(4, 32))
    return loss, (layers, head), (xs.astype(np.float32), ys.astype(np.float32))


def grads_step(loss: Any, schedule: Any, jit: Any = lambda f: f) -> Any:
    def step(params: Any, batch: Any) -> Any:
        one = jax.value_and_grad(jit(jaxpp.auto_stages(loss)))
        return jaxpp.treduce(lambda mb: one(params, *mb), batch, schedule, operation=jaxpp.Add)

    return step


def plain_grads(loss: Any, params: Any, batch: Any) -> Any:
    each = jax.lax.map(lambda mb: jax.value_and_grad(loss)(params, *mb), batch)
    return jax.tree.map(lambda x: x.sum(0), each)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_cut_placement_and_order_are_chosen_together(ranks: int) -> None:
    loss, params, batch = layers_and_head(8)
    auto = jaxpp.Auto(seconds=0.4)
    step = jaxpp.mpmd_jit_with_loop(grads_step(loss, auto), mesh_of(ranks, {}, sharing=1))
    assert difference(step(params, batch), plain_grads(loss, params, batch)) < 1e-5
    found = auto.found
    assert found is not None and found.by_stages.keys() <= {ranks * k for k in range(1, 5)}
    stages = found.schedule.sizes().stages
    assert stages in found.by_stages and len(found.by_stages) > 1
    assert found.by_stages[stages] <= 1.03 * min(found.by_stages.values())
    assert f"{ranks} stages " in str(found) and "expected before" in str(found)


def test_an_open_number_of_stages_is_that_of_the_ranks() -> None:
    loss, params, batch = layers_and_head(4)
    step = grads_step(loss, jaxpp.Std1F1B(2))
    compiled = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}, sharing=1)).compile(params, batch)
    assert difference(compiled(params, batch), plain_grads(loss, params, batch)) < 1e-5


def test_a_trace_that_jax_keeps_is_cut_once() -> None:
    """A jit around the function returns the marks of the first trace."""
    loss, params, batch = layers_and_head(4)
    auto, kept = jaxpp.Auto(seconds=0.1), []

    def jit(fun: Any) -> Any:
        kept[:] = kept or [jax.jit(fun)]
        return kept[0]

    step = jaxpp.mpmd_jit_with_loop(grads_step(loss, auto, jit), mesh_of(2, {}, sharing=1))
    assert difference(step(params, batch), plain_grads(loss, params, batch)) < 1e-5
    assert auto.found is not None and auto.found.schedule.sizes().stages == 2
    assert auto.found.by_stages == {}
