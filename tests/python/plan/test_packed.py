"""Small stages sum small gradients in one array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpp.api as jaxpp
from equality import (
    Problem,
    assert_close,
    assert_trains_equal,
    make_mesh,
    mesh_of,
    no_mark,
    pipelined_step,
)

WIDTH, STAGES, MICROBATCHES = 8, 3, 16


def layer(p: Any, x: jax.Array) -> jax.Array:
    x = x + jnp.tanh(x @ p["w"].T + p["b"]) * p["scale"]
    return x + p["half"].astype(x.dtype).mean() + p["empty"].sum()


def problem(tied: bool = False, large: bool = False, half: Any = jnp.bfloat16) -> Problem:
    """Weights of several ranks and dtypes; `tied`: the last stage uses the first one's, too;
    `large`: one that is not small; `half`: the dtype of one of them."""
    rng = np.random.default_rng(0)

    def weights() -> Any:
        return {
            "w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32),
            "b": jnp.asarray(rng.normal(size=WIDTH), jnp.float32),
            "scale": jnp.asarray(rng.normal(), jnp.float32),
            "half": jnp.asarray(rng.normal(size=(3, 2)), half),
            "empty": jnp.zeros((2, 0)),
        }

    params = {"layers": [weights() for _ in range(STAGES)]}
    if large:
        params["table"] = jnp.asarray(rng.normal(size=(1024, WIDTH)), jnp.float32)

    def loss(params: Any, x: jax.Array, i: Any, mark: Any) -> Any:
        if large:
            x = x + params["table"][jnp.arange(x.shape[0]) * 7 + i]
        for p in params["layers"]:
            x = mark(layer(p, x))
        if tied:
            x = jnp.tanh(x @ params["layers"][0]["w"])
        return jnp.mean(x**2), {"largest": x.max(), "mean": x.mean()}

    batch = jnp.asarray(rng.normal(size=(MICROBATCHES, 2, WIDTH)), jnp.float32)
    operations = {"largest": jaxpp.Max(), "mean": jaxpp.Add()}
    return Problem(loss, params, batch, optax.sgd(0.01), operations)


def reduce_aux(aux: Any) -> Any:
    return {"largest": aux["largest"].max(0), "mean": aux["mean"].sum(0)}


def plan_text(of: Problem, mesh: Any, schedule: Any) -> str:
    state = (of.params, of.optimizer.init(of.params))
    made = jaxpp.mpmd_jit_with_loop(pipelined_step(of, schedule), mesh)
    return made.trace_and_place(*state, of.batch).plan.staged().text()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "schedule",
    [jaxpp.Std1F1B(STAGES), jaxpp.ZeroBubble(STAGES), jaxpp.GPipe(STAGES)],
    ids=lambda schedule: type(schedule).__name__,
)
def test_training_with_packed_sums_equals_plain_jax(schedule: Any, tied: bool) -> None:
    mesh = make_mesh(STAGES)
    # On several devices, sums of bfloat16 are made in another order and round differently.
    half = jnp.bfloat16 if mesh.lowering_mesh().size == 1 else jnp.float32
    assert_trains_equal(problem(tied, half=half), schedule, mesh, reduce_aux=reduce_aux)


def test_each_backward_has_one_sum_for_each_dtype() -> None:
    text = plan_text(problem(), mesh_of(STAGES, {}, sharing=1), jaxpp.Std1F1B(STAGES))
    sums = [line for line in text.splitlines() if line.startswith("accumulator")]
    # Of float32, and of the only bfloat16 weight; on the last rank also the largest value.
    assert len(sums) == 2 * STAGES + 1
    assert text.count("@pack(") == STAGES


def test_a_large_sum_stays_alone() -> None:
    mesh = mesh_of(STAGES, {}, sharing=1)
    found = [
        plan_text(problem(large=large), mesh, jaxpp.Std1F1B(STAGES)).count("\naccumulator")
        for large in (False, True)
    ]
    assert found[1] == found[0] + 1


def test_shards_are_not_packed() -> None:
    of = problem()
    assert "@pack(" not in plan_text(of, mesh_of(STAGES, {"data": 2}), jaxpp.Std1F1B(STAGES))


def test_sums_that_the_step_returns_are_unpacked() -> None:
    of = problem()

    def gradients(params: Any, batch: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.grad(lambda p: of.loss(p, x, 0, jaxpp.mark_stage_end)[0])(params)

        return jaxpp.treduce(one, batch, jaxpp.Std1F1B(STAGES), operation=jaxpp.Add())

    def plain(params: Any, batch: Any) -> Any:
        of_one = jax.grad(lambda p, x: of.loss(p, x, 0, no_mark)[0])
        return jax.tree.map(
            lambda *terms: sum(terms[1:], terms[0]), *[of_one(params, x) for x in batch]
        )

    ours = jaxpp.mpmd_jit_with_loop(gradients, make_mesh(STAGES))(of.params, of.batch)
    expected = plain(of.params, of.batch)
    types = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (ours, expected))
    assert types[0] == types[1]
    assert_close(ours, expected, 1e-2, "sums")  # bfloat16 is rounded in each addition


def test_a_nan_is_found_in_its_own_sum() -> None:
    def step(params: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            def loss(params: Any) -> Any:
                x1 = jaxpp.mark_stage_end(x * params["a"] + params["root"])
                root = jnp.sqrt(params["c"] * 0)  # an infinite derivative times 0
                return jaxpp.mark_stage_end((x1 * params["b"]).sum() + root[1])

            return jax.grad(loss)(params)

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add())

    params = {name: np.ones(3, np.float32) for name in ("a", "root", "b", "c")}
    compiled = jaxpp.mpmd_jit_with_loop(step, make_mesh(2))
    with jax.debug_nans(True), pytest.raises(jaxpp.NanError) as caught:
        compiled(params, np.ones((MICROBATCHES, 3), np.float32))
    assert "found a NaN: element 0 of 3 of " in str(caught.value)
