"""Models that `auto_stages` and `stages` cut train as plain JAX does, in balanced stages."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxpp.api as jaxpp
import models
from equality import Problem, assert_trains_equal, mesh_of, no_mark, pipelined_step
from jaxpp.trace.work import work


def cut_by_itself(loss: Callable[..., Any], stages: int) -> Callable[..., Any]:
    """The loss of a `Problem`, with marks placed by `auto_stages`."""

    def cut(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        del mark
        return jaxpp.auto_stages(lambda p, mb: (loss(p, mb), ()), stages)(params, mb)

    return cut


def cut_after(loss: Callable[..., Any], ends: tuple[int, ...]) -> Callable[..., Any]:
    """The loss of a `Problem`, with marks after the layers in `ends`."""

    def cut(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        return loss(params, mb, lambda x, k: mark(x) if k in ends else x), ()

    return cut


# --- Random models ----------------------------------------------------------------------


def random_model(seed: int) -> tuple[Callable[..., Any], Any, Any]:
    """A loss, its parameters and a batch: layers of different widths, branches, skip
    connections, scans, jits and checkpoints, and a head that may be heavy."""
    rng = random.Random(seed)
    keys = iter(jax.random.split(jax.random.key(seed), 400))

    def weight(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[-2])

    kinds = [
        rng.choice(["dense", "branches", "skip", "scan", "jit", "checkpoint"])
        for _ in range(rng.randrange(5, 10))
    ]
    width = models.D
    params: list[Any] = []
    for kind in kinds:
        inner = width * rng.choice([1, 2, 4])
        rows = (rng.randrange(2, 6),) if kind == "scan" else ()
        params.append((weight(*rows, width, inner), weight(*rows, inner, width)))
    head = weight(width, width * rng.choice([1, 4, 16]))

    def block(p: Any, x: Any) -> Any:
        return jnp.tanh(x @ p[0]) @ p[1] * 0.5

    def apply(kind: str, p: Any, x: Any, first: Any) -> Any:
        match kind:
            case "branches":
                return jnp.sin(x @ p[0]) @ p[1] + jax.nn.relu(x) * 0.5
            case "skip":
                return x + block(p, x) + first
            case "scan":
                return jax.lax.scan(lambda x, p: (x + block(p, x), x.sum()), x, p)[0]
            case "jit":
                return jax.jit(block)(p, x)
            case "checkpoint":
                return jax.checkpoint(block)(p, x)
        return x + block(p, x)

    def loss(params: Any, mb: Any, after: Callable[..., Any] = lambda x, k: x) -> Any:
        layers, head = params
        x = first = jnp.tanh(mb["x"])
        for k, (kind, p) in enumerate(zip(kinds, layers, strict=True)):
            x = after(apply(kind, p, x, first), k)
        return jnp.mean((x @ head).sum(-1) ** 2) * 1e-3 + models.mse(x, mb["y"])

    return loss, (params, head), models.batch(4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_random_models(seed: int) -> None:
    stages = 2 + seed % 3
    loss, params, batch = random_model(seed)
    problem = Problem(cut_by_itself(loss, stages), params, batch)
    mesh = mesh_of(stages, {})
    # XLA rounds plain JAX's step differently with the options that compile it faster.
    assert_trains_equal(problem, jaxpp.Std1F1B(stages), mesh, steps=2, compiler_options=None)


def costs_of(problem: Problem, stages: int) -> Any:
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(stages)), mpmd_mesh=mesh_of(stages, {})
    )
    state = problem.params, problem.optimizer.init(problem.params)
    return step.lower(*state, problem.batch).cost_summary()


def heaviest_stage(loss: Callable[..., Any], params: Any, batch: Any) -> float:
    """The work of the stage that has the most. The equations are in the order of the stages."""
    microbatch = jax.tree.map(lambda x: x[0], batch)
    works = [0.0]
    marked = functools.partial(loss, i=0, mark=jaxpp.mark_stage_end)
    for eqn in jax.make_jaxpr(marked)(params, microbatch).eqns:
        if eqn.primitive.name == "stage_mark":
            works.append(0.0)
        works[-1] += work(eqn)
    return max(works)


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_no_cut_between_layers_is_lighter(seed: int) -> None:
    loss, params, batch = random_model(seed)
    found = heaviest_stage(cut_by_itself(loss, 3), params, batch)
    by_hand = [
        heaviest_stage(cut_after(loss, ends), params, batch)
        for ends in itertools.combinations(range(len(params[0])), 2)
    ]
    assert found <= 1.03 * min(by_hand)


def test_reading_memory_is_work() -> None:
    """A product of one row takes as long as reading its weight. An embedding reads its rows,
    and a sum what it adds up, for operations that are few."""
    x, w = jnp.ones((1, 256)), jnp.ones((256, 256))

    def work_of(fun: Callable[..., Any], *args: Any) -> float:
        return sum(work(eqn) for eqn in jax.make_jaxpr(fun)(*args).eqns)

    product = work_of(lambda x, w: x @ w, x, w)
    assert product == pytest.approx(10 * w.nbytes, rel=0.01) and product > 4 * 2 * w.size
    assert work_of(lambda x, w: jnp.tanh(x) + x, x, w) == 2 * x.size
    assert work_of(lambda w: w.sum(), w) == pytest.approx(10 * w.nbytes, rel=0.01)
    rows = jnp.zeros((8,), int)
    taken = work_of(lambda w, rows: jnp.take(w, rows, 0, mode="clip"), w, rows)
    assert 10 * 2 * 8 * 1024 <= taken < 10 * 3 * 8 * 1024
    big = jnp.ones((4096, 4096))
    assert work_of(lambda a, b: a @ b, big, big) == 2.0 * 4096**3


# --- Functions that can be cut ----------------------------------------------------------


def test_a_transformer() -> None:
    """Stages are cut between blocks, where a single activation is passed on."""
    problem = models.transformer(1, 6, 4)
    loss = problem.loss
    problem.loss = lambda p, mb, i, mark: jaxpp.auto_stages(
        lambda p, mb: loss(p, mb, i, no_mark), 3
    )(p, mb)
    assert_trains_equal(problem, jaxpp.Std1F1B(3), mesh_of(3, {}))
    activation = 2 * 8 * models.D * 4
    assert {link.bytes // link.messages for link in costs_of(problem, 3).links} == {activation}


def test_a_function_of_other_things_than_arrays() -> None:
    """Keyword arguments, None, text and numbers reach the function unchanged."""

    @functools.partial(jaxpp.auto_stages, num_stages=2)
    def fun(p: Any, x: Any, *, mode: str, power: int, extra: Any = None) -> Any:
        assert mode == "fast" and power == 2 and extra is None
        return {"sum": ((jnp.tanh(x @ p) @ p) ** power).sum(), "none": None}

    p, x = jnp.eye(4), jnp.ones((2, 4))
    found = fun(p, x, mode="fast", power=2)
    assert found["none"] is None
    np.testing.assert_allclose(found["sum"], ((jnp.tanh(x @ p) @ p) ** 2).sum(), rtol=1e-6)


def test_what_a_later_operation_of_an_earlier_stage_uses() -> None:
    """The second branch is cheap and short: it runs in the first stage, behind nothing of the
    first branch, and both use the same cast weight."""

    def fun(ws: Any, x: Any, y: Any) -> Any:
        w = ws[0].astype(jnp.float32)
        for other in ws[1:]:
            x = jnp.tanh(x @ other)
        return (x @ w).sum() + jnp.sin(y @ w).sum()

    key = jax.random.key(0)
    ws = [jax.random.normal(key, (8, 8), jnp.bfloat16)] * 5
    x, y = jnp.ones((4, 8)), jnp.ones((1, 8))
    for stages in range(1, 6):
        found = jax.grad(jaxpp.auto_stages(fun, stages), (0, 1, 2))(ws, x, y)
        for a, b in zip(
            *map(jax.tree.leaves, (found, jax.grad(fun, (0, 1, 2))(ws, x, y))), strict=True
        ):
            np.testing.assert_allclose(
                a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-5, atol=1e-6
            )


def test_a_function_of_one_argument() -> None:
    def fun(x: Any) -> Any:
        return jnp.tanh(jnp.sin(jnp.cos(x)) * 2).sum()

    jaxpr = jax.make_jaxpr(jaxpp.auto_stages(fun, 3))(jnp.ones(4))
    assert sum(eqn.primitive.name == "stage_mark" for eqn in jaxpr.eqns) == 3


def test_what_cannot_be_cut() -> None:
    x = jnp.ones((2, 4))
    with pytest.raises(jaxpp.JaxppError, match="test_auto_stages.py:.* 2 ops cannot be cut"):
        jaxpp.auto_stages(lambda x, y: jnp.sin(x * y), 5)(x, x)
    with pytest.raises(jaxpp.JaxppError, match="it has stage marks"):
        jaxpp.auto_stages(lambda x: jaxpp.mark_stage_end(x * 2), 2)(x)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(jaxpp.JaxppError, match="expected a whole number, at least 1"):
            jaxpp.auto_stages(jnp.sin, wrong)  # type: ignore[arg-type]


# --- `stages` with identical layers -----------------------------------------------------


def layers_problem(
    stacked: bool, num_stages: int | list[int], layers: int, scan: bool = True
) -> Problem:
    listed = models.weights(layers)
    params = jax.tree.map(lambda *rows: jnp.stack(rows), *listed) if stacked else listed

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        del mark
        x = jaxpp.stages(models.layer, params["layers"], mb["x"], num_stages, scan=scan)
        return models.mse(models.layer(params["head"], x), mb["y"]), ()

    return Problem(loss, {"layers": params, "head": models.weights(1)[0]}, models.batch(4))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("stacked", "num_stages", "scan"),
    [
        (False, 3, True),
        (False, [1, 4, 2], True),
        (True, 3, True),
        (True, [4, 1, 2], True),
        (True, 3, False),
    ],
)
def test_layers(stacked: bool, num_stages: Any, scan: bool) -> None:
    problem = layers_problem(stacked, num_stages, 7, scan)
    assert_trains_equal(problem, jaxpp.Std1F1B(3), mesh_of(3, {}))


def test_interleaved_layers() -> None:
    problem = layers_problem(True, 4, 8)
    assert_trains_equal(problem, jaxpp.Interleaved1F1B(4, 2), mesh_of(2, {"model": 2}))


def test_layers_of_flax() -> None:
    """Lists and stacks of nnx modules, and stacked parameters of a linen layer."""
    x = jnp.ones((2, 8))
    listed = [nnx.Linear(8, 8, rngs=nnx.Rngs(k)) for k in range(4)]
    expected = x
    for module in listed:
        expected = module(expected)
    found = jaxpp.stages(lambda module, x: module(x), listed, x, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *listed)
    found = jaxpp.stages(lambda module, x: module(x), stacked, x, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    layer = nn.Dense(8)
    params = jax.vmap(lambda k: layer.init(k, x))(jax.random.split(jax.random.key(0), 4))
    found = jaxpp.stages(layer.apply, params, x, [1, 3])
    for row in range(4):
        x = layer.apply(jax.tree.map(lambda p, r=row: p[r], params), x)
    np.testing.assert_allclose(found, x, rtol=1e-6)


def test_layers_that_do_not_fit() -> None:
    params, x = models.weights(3), jnp.ones((2, models.D))
    for wrong in (0, 4, [1, 1], [3, 0], 1.5, True, [], "3"):
        with pytest.raises(jaxpp.JaxppError, match=r"test_auto_stages.py:\d+: num_stages="):
            jaxpp.stages(models.layer, params, x, wrong)  # type: ignore[arg-type]
    with pytest.raises(jaxpp.JaxppError, match="params: expected arrays with one layer"):
        jaxpp.stages(models.layer, {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}, x, 2)
