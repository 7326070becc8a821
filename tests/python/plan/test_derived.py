"""Scans and conditions derive values from weights for the backward pass, such as casts. A rank
keeps them once for the loop, not once for each microbatch in flight."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import re
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
    COMPILE_FASTER,
    Problem,
    assert_trains_equal,
    make_mesh,
    mesh_of,
    peak_bytes,
    pipelined_step,
)

STAGES, LAYERS, WIDTH, ROWS, MICROBATCHES = 4, 3, 32, 2, 8

Layer = Callable[[Any, Any], Any]


def in_bfloat16(x: Any, p: Any) -> Any:
    narrow = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), (x, p))
    return x + plain(*narrow).astype(x.dtype)


def plain(x: Any, p: Any) -> Any:
    return jnp.tanh(x @ p["up"] + p["b"]) @ p["down"]


def transposed(x: Any, p: Any) -> Any:
    return x + jnp.tanh(x @ p["down"].T) @ p["up"].T


def normalised(x: Any, p: Any) -> Any:
    up, down = (p[n] / jnp.linalg.norm(p[n], axis=0) for n in ("up", "down"))
    return x + jnp.tanh(x @ up) @ down


def scanned(layer: Layer) -> Layer:
    return lambda x, p: jax.lax.scan(lambda h, q: (layer(h, q), None), x, p)[0]


def counted(layer: Layer) -> Layer:
    def body(k: Any, h: Any, p: Any) -> Any:
        return layer(h, jax.tree.map(lambda leaf: leaf[k], p))

    return lambda x, p: jax.lax.fori_loop(0, LAYERS, lambda k, h: body(k, h, p), x)


def nested(layer: Layer) -> Layer:
    def one(x: Any, p: Any) -> Any:
        return scanned(layer)(x, jax.tree.map(lambda leaf: leaf[None], p))

    return scanned(one)


def chosen_by_layer(layer: Layer) -> Layer:
    def body(h: Any, numbered: Any) -> Any:
        return jax.lax.cond(numbered[0] < 2, layer, lambda h, q: h, h, numbered[1])

    return lambda x, p: scanned(body)(x, (jnp.arange(LAYERS), p))


def chosen_by_stage(layer: Layer) -> Layer:
    def stage(x: Any, p: Any) -> Any:
        return jax.lax.cond(p["b"][0, 0] < 99, scanned(layer), lambda x, p: x, x, p)

    return stage


def everything_saved(layer: Layer) -> Layer:
    policy = jax.checkpoint_policies.everything_saveable
    return scanned(jax.checkpoint(layer, policy=policy))


def unrolled(layer: Layer) -> Layer:
    def stage(x: Any, p: Any) -> Any:
        for k in range(LAYERS):
            x = layer(x, jax.tree.map(lambda leaf, k=k: leaf[k], p))
        return x

    return stage


def problem_of(stage: Layer) -> Problem:
    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        for p in params:
            x = mark(stage(x, p))
        return jnp.mean(x**2), ()

    def weights(key: Any) -> Any:
        layers = [models.up_and_down(k, WIDTH, 10) for k in jax.random.split(key, LAYERS)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    params = [weights(key) for key in jax.random.split(jax.random.key(0), STAGES)]
    batch = jax.random.normal(jax.random.key(1), (MICROBATCHES, ROWS, WIDTH))
    return Problem(loss, params, batch, optax.sgd(0.01))


def scaled_by_microbatch(layer: Layer) -> Problem:
    """The scans also take a constant, and scales computed only from the microbatch's number."""
    problem = problem_of(scanned(layer))

    def loss(params: Any, x: Any, i: Any, mark: Any) -> Any:
        scales = jnp.arange(LAYERS) * 0.01 * i.astype(x.dtype)

        def body(carry: Any, q: Any) -> tuple[Any, None]:
            h, offset = carry
            return (layer(h, q[1]) * (1 + q[0]) + offset, offset * 0.5), None

        for p in params:
            x = mark(jax.lax.scan(body, (x, 0.25), (scales, p))[0][0])
        return jnp.mean(x**2), ()

    return dataclasses.replace(problem, loss=loss)


def in_groups(layer: Layer) -> Problem:
    """A scan over groups, with two scans over the layers of a group."""

    def group(x: Any, p: Any) -> Any:
        return jax.checkpoint(scanned(layer))(scanned(layer)(x, p), p)

    problem = problem_of(scanned(group))
    return dataclasses.replace(
        problem, params=jax.tree.map(lambda leaf: leaf[None], problem.params)
    )


def along_second_axis(layer: Layer) -> Problem:
    """Matrices stacked along axis 1, as Flax and MaxText stack them."""

    def swapped(p: Any) -> Any:
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, leaf.ndim - 2), p)

    problem = problem_of(lambda x, p: scanned(layer)(x, swapped(p)))
    return dataclasses.replace(problem, params=swapped(problem.params))


def by_reshape(layer: Layer) -> Problem:
    """The stage reshapes its stacked weights into groups of layers, and scans over groups."""

    def grouped(p: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.reshape(1, *leaf.shape), p)

    return problem_of(lambda x, p: scanned(scanned(layer))(x, grouped(p)))


CASES = [(scanned, layer) for layer in (in_bfloat16, transposed, normalised)]
CASES += [(form, in_bfloat16) for form in (counted, nested, chosen_by_layer)]
CASES += [(form, transposed) for form in (chosen_by_stage, everything_saved)]
FSDP_SPECS = (
    [{"up": P(None, "data"), "b": P(), "down": P(None, "data")}] * STAGES,
    None,
    P(None, "data"),
)
SCHEDULES = [jaxpp.Std1F1B(STAGES), jaxpp.ZeroBubble(STAGES)]


def peaks_of(problem: Problem, schedule: Any, **options: Any) -> list[int]:
    mesh = mesh_of(STAGES, {"data": 2} if options else {})
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, schedule), mesh, **options)
    return peak_bytes(step, problem)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("form", "layer"), CASES, ids=lambda function: function.__name__)
def test_what_is_derived_from_weights_is_kept_once(
    form: Any, layer: Layer, schedule: Any
) -> None:
    problem = problem_of(form(layer))
    peaks = peaks_of(problem, schedule)
    # The first rank keeps 4 microbatches, the last one a single one.
    one_copy = LAYERS * 2 * WIDTH * 2 * WIDTH * (2 if layer is in_bfloat16 else 4)
    assert peaks[0] - peaks[-1] < one_copy / 2, peaks


@pytest.mark.parametrize(("form", "layer"), CASES, ids=lambda function: function.__name__)
def test_it_trains_as_plain_jax(form: Any, layer: Layer) -> None:
    problem = problem_of(form(layer))
    tolerance = 1e-3 if layer is in_bfloat16 else 1e-5
    assert_trains_equal(problem, SCHEDULES[1], make_mesh(STAGES), tolerance=tolerance)


def test_small_values_are_kept_for_each_microbatch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A scan of its own would take long to compile."""

    def scaled(x: Any, p: Any) -> Any:
        rows = jnp.tile(x, (64, 1)) * p["b"][None, :WIDTH]
        return (rows + jnp.tanh(rows @ p["up"]) @ p["down"])[:ROWS]

    problem = problem_of(scanned(scaled))
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    assert_trains_equal(problem, SCHEDULES[0], mesh_of(STAGES, {}), steps=1)
    assert "stablehlo.while" in (tmp_path / "fwd_1.mlir").read_text()
    before = [path.read_text() for path in tmp_path.glob("before_loop*.mlir")]
    assert not any("stablehlo.while" in text for text in before)


@pytest.mark.parametrize("remat", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("fsdp", ["use", "step"])
def test_weights_that_a_scan_casts_are_gathered_after_the_cast(
    fsdp: str, remat: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    problem = problem_of(scanned(jax.checkpoint(in_bfloat16) if remat else in_bfloat16))
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    assert_trains_equal(
        problem,
        SCHEDULES[0],
        mesh_of(STAGES, {"data": 2}),
        tolerance=1e-3,
        in_specs=FSDP_SPECS,
        fsdp=fsdp,
        # Otherwise, XLA leaves out some casts to bfloat16.
        compiler_options={**COMPILE_FASTER, "xla_allow_excess_precision": False},
    )
    gather = re.compile(r"sharding_constraint \S+ <@mesh, \[{}(?:, {})*\]> : tensor<\S+x(\w+)>")
    tasks = ["fwd_1", "bwd_1"] if fsdp == "use" else ["before_loop_0_1"]
    texts = [(tmp_path / f"{task}.mlir").read_text() for task in tasks]
    assert [gather.findall(text) for text in texts] == [["bf16", "bf16"]] * len(tasks)


@pytest.mark.parametrize("layer", [in_bfloat16, transposed], ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("fsdp", ["use", "step"])
def test_gathered_weights(layer: Layer, fsdp: str) -> None:
    """A scan keeps as little as unrolled layers, apart from a few copied activations."""
    options = {"in_specs": FSDP_SPECS, "fsdp": fsdp}

    def peak(form: Any) -> int:
        return max(peaks_of(problem_of(form(layer)), SCHEDULES[0], **options))

    gathered = LAYERS * 2 * WIDTH * 2 * WIDTH * 2
    assert peak(scanned) < peak(unrolled) + gathered / 2


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(
    "problem",
    [
        problem_of(unrolled(plain)),
        problem_of(scanned(plain)),
        problem_of(scanned(jax.checkpoint(plain))),
        problem_of(chosen_by_layer(plain)),
        scaled_by_microbatch(plain),
        in_groups(plain),
        along_second_axis(plain),
        by_reshape(plain),
    ],
    ids=[
        "unrolled",
        "scan",
        "checkpoint",
        "condition",
        "microbatch",
        "groups",
        "axis",
        "reshape",
    ],
)
def test_a_task_gathers_the_weights_of_one_layer_at_a_time(
    problem: Problem, schedule: Any
) -> None:
    def spec(leaf: jax.Array) -> P:
        """Shards the inputs of matrices, and no biases."""
        if leaf.ndim == 2 or leaf.shape[:2] == (1, LAYERS) and leaf.ndim == 3:
            return P()
        return P(*(None if size in (1, LAYERS) else "data" for size in leaf.shape[:-1]))

    specs = jax.tree.map(spec, problem.params), None, P(None, "data")
    mesh = mesh_of(STAGES, {"data": 2})
    step = assert_trains_equal(problem, schedule, mesh, in_specs=specs, fsdp="use")
    state = problem.params, problem.optimizer.init(problem.params)
    compiled = step.compile(*state, problem.batch)
    gathers = [c for c in compiled.cost_summary().collectives if c.kind == "all-gather"]
    in_loop = {c.task.split("_")[0]: c.bytes / c.times for c in gathers}
    of_a_layer = WIDTH * 2 * WIDTH * 4
    assert in_loop == {"fwd": of_a_layer, "bwd": of_a_layer}


PENALTIES: dict[str, Callable[[Any], Any]] = {
    "none": lambda params: 0.0,
    "squares": lambda params: sum(jnp.sum(w**2) for w in jax.tree.leaves(params)),
    "norm": optax.global_norm,
    "in bfloat16": lambda params: optax.global_norm(optax.tree.cast(params, "bfloat16")),
    "absolute": lambda params: sum(jnp.sum(jnp.abs(-2 * w)) for w in jax.tree.leaves(params)),
}


def bytes_gathered(penalty: str, layers: Any, schedule: Any) -> dict[str, int]:
    """What a step gathers in the tasks of each kind, with a penalty on all weights."""
    problem = problem_of(layers(plain))

    def loss(params: Any, *rest: Any) -> Any:
        value, aux = problem.loss(params, *rest)
        return value + 1e-4 * PENALTIES[penalty](params).astype(value.dtype), aux

    specs = jax.tree.map(lambda leaf: P(None, "data"), problem.params), None, P(None, "data")
    penalised = dataclasses.replace(problem, loss=loss if penalty != "none" else problem.loss)
    mesh = mesh_of(STAGES, {"data": 2})
    tolerance = 1e-2 if penalty == "in bfloat16" else 1e-5
    step = assert_trains_equal(
        penalised, schedule, mesh, in_specs=specs, fsdp="use", tolerance=tolerance
    )
    state = problem.params, problem.optimizer.init(problem.params)
    found = collections.Counter[str]()
    for c in step.compile(*state, problem.batch).cost_summary().collectives:
        if c.kind == "all-gather":
            found[c.task.split("_")[0]] += c.bytes
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("layers", [unrolled, scanned], ids=lambda layers: layers.__name__)
@pytest.mark.parametrize("penalty", [name for name in PENALTIES if name != "none"])
def test_a_penalty_gathers_nothing(penalty: str, layers: Any, schedule: Any) -> None:
    found = bytes_gathered(penalty, layers, schedule)
    assert found == bytes_gathered("none", layers, schedule) and found["fwd"] > 0


@pytest.mark.parametrize("fsdp", ["use", "step"])
def test_a_callback_takes_a_gathered_weight(fsdp: str) -> None:
    problem, shapes = problem_of(scanned(plain)), set[tuple[int, ...]]()

    def loss(params: Any, *rest: Any) -> Any:
        jax.debug.callback(lambda up: shapes.add(up.shape), params[0]["up"])
        return problem.loss(params, *rest)

    seen = dataclasses.replace(problem, loss=loss)
    mesh = mesh_of(STAGES, {"data": 2})
    assert_trains_equal(seen, SCHEDULES[0], mesh, steps=1, in_specs=FSDP_SPECS, fsdp=fsdp)
    assert shapes == {problem.params[0]["up"].shape}
