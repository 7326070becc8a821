"""Activations stay sharded over the devices of a rank: a task gathers no more than `jax.jit` of
the same function does when only the shardings of its arguments are given."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpp.api as jaxpp
import random_models
from equality import COMPILE_FASTER, mesh_of
from jaxpp.lower.lowering import TaskLowerer
from jaxpp.plan.planned import Traced
from random_models import Case, make_case
from trainings import descent

_GATHER = re.compile(r"= \w+\[([\d,]*)\]\S* all-gather(?:-start)?\(")


def gathered(function: Any, structs: list[Any], ins: list[Any], outs: list[Any] | None) -> int:
    """The elements that the compiled function's all-gathers produce; loops count once."""
    options = {} if outs is None else {"out_shardings": outs}
    jitted = jax.jit(function, keep_unused=True, in_shardings=tuple(ins), **options)
    text = jitted.lower(*structs).compile(COMPILE_FASTER).as_text()
    shapes = [found[1] for found in _GATHER.finditer(text)]
    return sum(math.prod(int(n) for n in shape.split(",") if n) for shape in shapes)


def check_tasks(traced: Traced) -> int:
    """Compares the loop's tasks with plain jit; returns the number of tasks."""
    lowerer = TaskLowerer(traced.graph, traced.staged, traced.mesh, traced.specs, "cpu")
    mesh = traced.mesh.unstack[0]
    count = 0
    for task in traced.staged.tasks():
        if task.loop is None or not task.ops:
            continue
        ins, outs = (
            [NamedSharding(mesh, traced.specs.of(v)) for v in values]
            for values in (task.inputs, task.outputs)
        )
        avals = [lowerer.avals[v] for v in task.inputs]
        structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        function = lowerer._task_function(task)
        with jax.set_mesh(mesh):
            ours = gathered(function, structs, ins, outs)
            plain = gathered(function, structs, ins, None)
        assert ours <= plain, f"{task.name} gathers {ours} elements, plain jit {plain}"
        count += 1
    return count


def cases(axes: dict[str, int]) -> Iterator[Case]:
    """Models for two ranks with these axes that constrain no activations or results."""
    for seed in itertools.count():
        case = make_case(seed)
        given = {"constraints", "explicit axes", "left"} & set(case.options)
        if case.ranks == 2 and case.axes == axes and not given:
            yield case


def specs_of(case: Case) -> Any:
    """Shards the batch over "data" and matrices over "model" if there is one. No weight is
    sharded over "data": it would be gathered before use."""

    def of_weight(leaf: Any) -> PartitionSpec:
        tensor_parallel = "model" in case.axes and np.ndim(leaf) > 1
        return PartitionSpec(
            *[None] * (np.ndim(leaf) - 1), "model" if tensor_parallel else None
        )

    weights = jax.tree.map(of_weight, case.params)
    return weights, None, PartitionSpec(None, "data"), None


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=["2x2", "2x(2,2)"])
def test_random_models_gather_no_activation(axes: dict[str, int], number: int) -> None:
    case = next(itertools.islice(cases(axes), number, None))
    print(case)
    mesh = mesh_of(case.ranks, axes)
    step = random_models.pipelined(case, mesh, specs_of(case))
    state = case.params, case.state()
    assert check_tasks(step.trace_and_place(*state, case.batch, case.extra))


def gated_layer(x: Any, p: Any) -> tuple[Any, None]:
    norm = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
    return x + (jax.nn.silu(norm @ p["gate"]) * (norm @ p["up"])) @ p["down"], None


@pytest.mark.sample(1)
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 2}], ids=["2x2", "2x(2,2)"])
def test_a_scan_over_gated_layers_keeps_its_residuals_sharded(axes: dict[str, int]) -> None:
    """Only weight gradients use these residuals, in a scan that follows an embedding."""
    mesh = mesh_of(2, axes)
    layers, vocabulary, width, hidden = 3, 32, 16, 64
    keys = iter(jax.random.split(jax.random.key(0), 20))

    def stack(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), (layers, *shape)) / 4

    def stage() -> dict[str, jax.Array]:
        names = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return {"scale": stack(width), **{name: stack(*dims) for name, dims in names.items()}}

    params = {"table": stack(vocabulary, width)[0], "stages": [stage(), stage()]}

    def loss(params: Any, tokens: Any) -> Any:
        x = params["table"][tokens]
        for of_stage in params["stages"]:
            x = jaxpp.mark_stage_end(jax.lax.scan(gated_layer, x, of_stage)[0])
        return jnp.mean(x**2)

    specs = PartitionSpec(), PartitionSpec(None, "data")
    step = jaxpp.mpmd_jit_with_loop(descent(loss, jaxpp.Std1F1B(2)), mesh, in_specs=specs)
    traced = step.trace_and_place(params, np.zeros((4, 8, 12), np.int32))
    check_tasks(traced)
    for task in traced.staged.tasks():
        for value in task.outputs:
            aval = traced.graph.avals.get(traced.staged.origins()[value])
            if aval is not None and aval.shape[:3] == (layers, 8, 12):
                assert traced.specs.of(value) == PartitionSpec(None, "data"), task.name
