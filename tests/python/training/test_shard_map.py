"""Stages that the user maps over the devices of a rank: JAX writes their collectives, and those
that sum a weight's gradient over devices run once, after the loop."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from equality import (
    SUMS,
    Problem,
    assert_trains_equal,
    loop_tasks,
    mesh_of,
    peak_bytes,
    pipelined_step,
    products,
)

WIDTH, LENGTH, ROWS, MICROBATCHES = 8, 4, 4, 4
DATA, BOTH = {"data": 2}, {"data": 2, "model": 2}

ROWS_OVER_DATA = P("data")
WEIGHTS = {"up": P(), "b": P(), "down": P(), "scale": P()}
CUT_WEIGHTS = {
    "up": P(None, "model"),
    "b": P("model"),
    "down": P("model", None),
    "scale": P(),
}


def weights(layers: int) -> list[dict[str, jax.Array]]:
    def layer(key: jax.Array) -> dict[str, jax.Array]:
        return {**models.up_and_down(key, WIDTH, 3), "scale": jnp.ones(WIDTH)}

    return [layer(key) for key in jax.random.split(jax.random.key(0), layers)]


def layer(x: jax.Array, p: Any) -> jax.Array:
    return x * p["scale"] + jnp.tanh(x @ p["up"] + p["b"]) @ p["down"]


def mapped(body: Any, weight_specs: Any = None, **options: Any) -> Any:
    """`body` on each device, with its rows of the batch."""
    specs = (ROWS_OVER_DATA, weight_specs or WEIGHTS)
    return jax.shard_map(body, in_specs=specs, out_specs=ROWS_OVER_DATA, **options)


# --- Stages: functions of the rows and the weights of two layers ----------------------------


def twice(x: Any, ps: Any, each: Any = layer) -> Any:
    for p in ps:
        x = each(x, p)
    return x


def a_map_each(x: Any, ps: Any) -> Any:
    return twice(x, ps, mapped(layer))


def one_map(x: Any, ps: Any) -> Any:
    return mapped(twice, [WEIGHTS] * 2)(x, ps)


def unchecked(x: Any, ps: Any) -> Any:
    return mapped(twice, [WEIGHTS] * 2, check_vma=False)(x, ps)


def checkpointed(x: Any, ps: Any) -> Any:
    return twice(x, ps, jax.checkpoint(mapped(layer)))


def checkpoint_in_a_map(x: Any, ps: Any) -> Any:
    return twice(x, ps, mapped(jax.checkpoint(layer)))


def call_in_a_map(x: Any, ps: Any) -> Any:
    return twice(x, ps, mapped(jax.jit(layer)))


def map_in_a_call(x: Any, ps: Any) -> Any:
    return twice(x, ps, jax.jit(mapped(layer)))


def _stacked(ps: Any) -> Any:
    return jax.tree.map(lambda *rows: jnp.stack(rows), *ps)


def _scan(x: Any, stack: Any, each: Any) -> Any:
    return jax.lax.scan(lambda h, p: (each(h, p), None), x, stack)[0]


def map_in_a_scan(x: Any, ps: Any) -> Any:
    return _scan(x, _stacked(ps), mapped(layer))


def scan_in_a_map(x: Any, ps: Any) -> Any:
    return mapped(lambda x, stack: _scan(x, stack, layer))(x, _stacked(ps))


def scan_with_one_weight(x: Any, ps: Any) -> Any:
    """Sums the gradients of three uses in the map."""
    first, second = ps
    body = lambda x, p: jax.lax.fori_loop(0, 3, lambda i, h: layer(h, p), x)  # noqa: E731
    return mapped(layer)(mapped(body)(x, first), second)


def in_bfloat16(x: Any, ps: Any) -> Any:
    def body(x: Any, p: Any) -> Any:
        half = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        return layer(x.astype(jnp.bfloat16), half).astype(jnp.float32)

    return twice(x, ps, mapped(body))


def derived_weights(x: Any, ps: Any) -> Any:
    """Gradients are transposed, added and scaled after the sum over devices."""

    def body(x: Any, p: Any) -> Any:
        up = 0.5 * p["up"] + p["down"].T
        return layer(x, {**p, "up": up, "b": jnp.concatenate([p["b"][WIDTH:], p["scale"]])})

    return twice(x, ps, mapped(body))


def also_outside(x: Any, ps: Any) -> Any:
    """A weight is used in a map and outside of it."""
    first, second = ps
    return layer(mapped(layer)(x, first), {**second, "up": first["up"] + second["up"]})


def one_of_two_in_a_map(x: Any, ps: Any) -> Any:
    return layer(mapped(layer)(x, ps[0]), ps[1])


def only_data_mapped(x: Any, ps: Any) -> Any:
    """Shardy shards the other axis."""
    return twice(x, ps, mapped(layer, axis_names={"data"}))


def rows_in_a_map(x: Any, ps: Any) -> Any:
    """Adds rows of the sum."""
    at = jnp.array([3, 1, 3, 0, 7, 5, 5, 2])
    return twice(x, ps, mapped(lambda x, p: layer(x, {**p, "up": p["up"][at]})))


def attention_in_a_ring(x: Any, ps: Any) -> Any:
    """Each device has some rows of keys and values, which go around."""

    def body(x: Any, p: Any) -> Any:
        devices = jax.lax.axis_size("data")
        around = [(k, (k + 1) % devices) for k in range(devices)]
        query, value = x @ p["up"], jnp.tanh(x @ p["down"].T)

        def turn(carry: Any, _: Any) -> Any:
            value, total = carry
            scores = jnp.tanh(jnp.einsum("bsf,ctf->bsct", query, value))
            total += jnp.einsum("bsct,ctf->bsf", scores, value) / 64
            return (jax.lax.ppermute(value, "data", around), total), None

        (_, total), _ = jax.lax.scan(turn, (value, jnp.zeros_like(value)), length=devices)
        return x * p["scale"] + (total + p["b"]) @ p["down"]

    return twice(x, ps, mapped(body))


ONCE: tuple[Callable[..., Any], ...] = (
    a_map_each,
    one_map,
    unchecked,
    checkpointed,
    checkpoint_in_a_map,
    call_in_a_map,
    map_in_a_call,
    map_in_a_scan,
    scan_in_a_map,
    scan_with_one_weight,
    in_bfloat16,
    derived_weights,
    also_outside,
    one_of_two_in_a_map,
    only_data_mapped,
    rows_in_a_map,
    attention_in_a_ring,
)


def cut_by_model(x: Any, ps: Any) -> Any:
    """Megatron's: each device has some columns, then rows."""

    def body(x: Any, p: Any) -> Any:
        part = jnp.tanh(x @ p["up"] + p["b"]) @ p["down"]
        return x * p["scale"] + jax.lax.psum(part, "model")

    return twice(x, ps, mapped(body, CUT_WEIGHTS))


def experts(x: Any, ps: Any) -> Any:
    """Each device along data has an expert, to which all devices send rows."""

    def body(x: Any, p: Any) -> Any:
        devices = jax.lax.axis_size("data")
        sent = x.reshape(devices, -1, *x.shape[1:])
        sent = jax.lax.all_to_all(sent, "data", 0, 0)
        made = jnp.tanh(sent @ p["up"] + p["b"]) @ p["down"]
        return x * p["scale"] + jax.lax.all_to_all(made, "data", 0, 0).reshape(x.shape)

    own = {"up": P(None, "data"), "b": P("data"), "down": P("data"), "scale": P()}
    return twice(x, ps, mapped(body, own))


# --- Stages whose sums stay in the loop -----------------------------------------------------


def only_model_mapped(x: Any, ps: Any) -> Any:
    specs = (P(), WEIGHTS)
    return twice(
        x, ps, jax.shard_map(layer, in_specs=specs, out_specs=P(), axis_names={"model"})
    )


def gathered_weights(x: Any, ps: Any) -> Any:
    def body(x: Any, p: Any) -> Any:
        return layer(x, {**p, "up": jax.lax.all_gather(p["up"], "data", tiled=True)})

    return twice(x, ps, mapped(body, {**WEIGHTS, "up": P("data")}))


def with_a_gradient_of_its_own(x: Any, ps: Any) -> Any:
    """Each device adds a whole value to the sum."""
    decayed = jax.custom_vjp(lambda w: w)
    decayed.defvjp(lambda w: (w, w), lambda w, g: (g + 0.1 * w,))
    return twice(x, ps, mapped(lambda x, p: layer(x, {**p, "up": decayed(p["up"])})))


def used_in_the_loop(x: Any, ps: Any) -> Any:
    """The map itself needs the sum."""
    clipped = jax.custom_vjp(lambda w: w)
    clipped.defvjp(lambda w: (w, None), lambda _, g: (g / (1 + jnp.abs(g).max()),))
    return twice(x, ps, mapped(lambda x, p: layer(x, {**p, "up": clipped(p["up"])})))


IN_LOOP = {
    only_model_mapped: "a shard_map adds it up along axes that it does not map",
    gathered_weights: "a shard_map scatters it over devices",
    with_a_gradient_of_its_own: "a shard_map adds it to another value",
    used_in_the_loop: "the step also uses it in the loop",
}


# --- Tests --------------------------------------------------------------------------------


def problem_of(stage: Any, stages: int) -> Problem:
    ps = weights(2 * stages)

    def loss(p: Any, x: Any, i: Any, mark: Any) -> Any:
        for s in range(stages):
            x = mark(stage(x, p[2 * s : 2 * s + 2]))
        return jnp.mean(x**2), ()

    shape = (MICROBATCHES, ROWS, LENGTH, WIDTH)
    batch = jax.random.normal(jax.random.key(9), shape)
    return Problem(loss, ps, batch, optax.sgd(0.01, momentum=0.9))


def train(stage: Any, axes: dict[str, int], schedule: Any) -> Any:
    problem = problem_of(stage, schedule.num_stages)
    step = assert_trains_equal(
        problem,
        schedule,
        mesh_of(2, axes),
        tolerance=1e-2 if stage is in_bfloat16 else 1e-5,
        in_specs=(P(), P(), P(None, "data")),
    )
    return step.compile(problem.params, problem.optimizer.init(problem.params), problem.batch)


@pytest.mark.sample(12)
@pytest.mark.parametrize("axes", [DATA, BOTH], ids=str)
@pytest.mark.parametrize("stage", ONCE, ids=lambda stage: stage.__name__)
def test_sums_over_devices_run_once(stage, axes):
    found = train(stage, axes, jaxpp.Std1F1B(2)).cost_summary().collectives
    assert loop_tasks(found, "data", *SUMS) == []


KEPT = {cut_by_model: ("model", "all-reduce"), experts: ("data", "all-to-all")}


@pytest.mark.parametrize("stage", KEPT, ids=lambda stage: stage.__name__)
def test_other_collectives_of_a_map_stay_in_the_loop(stage):
    found = train(stage, BOTH, jaxpp.Interleaved1F1B(4, 2)).cost_summary().collectives
    assert loop_tasks(found, "data", *SUMS) == []
    assert loop_tasks(found, *KEPT[stage])


@pytest.mark.parametrize("stage", IN_LOOP, ids=lambda stage: stage.__name__)
def test_explain_says_why_a_sum_stays_in_the_loop(stage):
    compiled = train(stage, BOTH, jaxpp.Std1F1B(2))
    assert loop_tasks(compiled.cost_summary().collectives, "data", *SUMS)
    lines = [line for line in compiled.explain().splitlines() if IN_LOOP[stage] in line]
    assert lines
    assert all("test_shard_map.py:" in line for line in lines)


# For each stage, the products of its input gradients and of its weight gradients. A scan, and
# calls of one function, have those of one layer.
WAITING = {
    a_map_each: (4, 4),
    one_map: (4, 4),
    unchecked: (4, 4),
    checkpointed: (6, 4),
    checkpoint_in_a_map: (6, 4),
    call_in_a_map: (4, 4),
    map_in_a_scan: (2, 2),
    scan_in_a_map: (2, 2),
    only_data_mapped: (4, 4),
    cut_by_model: (4, 4),
    experts: (4, 4),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("stage", WAITING, ids=lambda stage: stage.__name__)
def test_weight_gradients_of_a_map_can_wait(stage, tmp_path, monkeypatch):
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    found = train(stage, BOTH, jaxpp.ZeroBubble(2)).cost_summary().collectives
    assert loop_tasks(found, "data", *SUMS) == []
    assert (products(tmp_path, "bwd_i_1"), products(tmp_path, "bwd_w_1")) == WAITING[stage]


def _branched(x: Any, p: Any) -> Any:
    """A map of it gives input gradients and weight gradients together."""
    return jax.lax.cond(jnp.abs(x).sum() > 0, layer, lambda x, p: 2 * layer(x, p), x, p)


def branched_of_halves(x: Any, ps: Any) -> Any:
    return twice(x, jax.tree.map(lambda w: w / 2, ps), mapped(_branched))


def branched_of_products(x: Any, ps: Any) -> Any:
    return twice(
        x, [{**p, "down": p["down"] @ p["up"] @ p["down"]} for p in ps], mapped(_branched)
    )


def test_gradients_that_cannot_wait_are_added_up_where_they_are_made():
    compiled = train(branched_of_halves, DATA, jaxpp.ZeroBubble(2))
    assert "gives input gradients and weight gradients together" in compiled.explain()
    assert loop_tasks(compiled.cost_summary().collectives, "data", *SUMS) == []


def test_explain_says_what_tasks_pass_to_each_other():
    """The products of weights have weight gradients of their own, which wait."""
    compiled = train(branched_of_products, DATA, jaxpp.ZeroBubble(2))
    lines = [line for line in compiled.explain().splitlines() if "passes it to another" in line]
    assert len(lines) == 1
    assert "test_shard_map.py:" in lines[0]
    assert "result[1][2]['down'], result[1][3]['down']" in lines[0]


def peaks_of(stage: Any) -> list[int]:
    problem = problem_of(stage, 4)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(4)),
        mesh_of(4, DATA),
        in_specs=(P(), P(), P(None, "data")),
    )
    return peak_bytes(step, problem)


@pytest.mark.parametrize(
    "stage",
    [a_map_each, one_map, unchecked, checkpointed, derived_weights, in_bfloat16],
    ids=lambda stage: stage.__name__,
)
def test_a_map_keeps_no_weights_for_its_backward(stage, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 64)  # more weights than activations
    found, without_maps = peaks_of(stage), peaks_of(twice)
    assert all(f <= w for f, w in zip(found, without_maps, strict=True)), (found, without_maps)


def test_a_map_with_effects_runs_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Its weights stay among its results: an op for them would print, too."""

    def printing(x: Any, p: Any) -> Any:
        jax.debug.print("seen")
        return layer(x, p)

    train(lambda x, ps: twice(x, ps, mapped(printing)), DATA, jaxpp.Std1F1B(2))
    steps, layers, devices = 3, 4, 2
    expected = steps * MICROBATCHES * layers * devices
    assert capfd.readouterr().out.count("seen") == 2 * expected  # plain JAX prints, too


def test_a_map_is_one_map_where_nothing_waits(tmp_path, monkeypatch):
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    train(one_map, BOTH, jaxpp.Std1F1B(2))
    # One for the weights, which computes nothing.
    assert (tmp_path / "bwd_1.mlir").read_text().count("sdy.manual_computation") == 2
    assert products(tmp_path, "bwd_1") == 8


def test_nothing_but_products_waits_in_a_map(tmp_path, monkeypatch):
    """The rest of a map without products is a part of the input gradients."""

    def scaled(x: Any, ps: Any) -> Any:
        return twice(x, ps, mapped(lambda x, p: x * p["scale"]))

    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    compiled = train(scaled, DATA, jaxpp.ZeroBubble(2))
    assert loop_tasks(compiled.cost_summary().collectives, "data", *SUMS) == []
    assert "sdy.manual_computation" in (tmp_path / "bwd_i_1.mlir").read_text()
    waiting = tmp_path / "bwd_w_1.mlir"
    assert not waiting.exists() or "sdy.manual_computation" not in waiting.read_text()
