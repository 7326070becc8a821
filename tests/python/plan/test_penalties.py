"""Norms and penalties of weights: each rank computes those of its own weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import assert_equal, mesh_of

WIDTH, MICROBATCHES, ROWS = 48, 4, 8  # a weight has 9,216 bytes, a microbatch 1,536
OPTIMIZER = optax.adam(1e-2)
Loss = Callable[[Any, Any, Any], Any]


def squares(params: Any) -> Any:
    return sum(jnp.sum(w**2) for w in jax.tree.leaves(params))


def in_halves(params: Any) -> Any:
    return [w.astype(jnp.bfloat16).astype(jnp.float32) for w in params]


# What becomes of the mean loss of a microbatch.
LOSSES: dict[str, Loss] = {
    "alone": lambda loss, params, x: loss,
    "squares": lambda loss, params, x: loss + 0.1 * squares(params),
    "squares of casts": lambda loss, params, x: loss + 0.1 * squares(in_halves(params)),
    "norm": lambda loss, params, x: loss + 0.1 * jnp.sqrt(squares(params)),
    "scaled by the batch": lambda loss, params, x: (
        (loss + 0.1 * squares(params)) * jnp.abs(x).mean()
    ),
    "absolute values": lambda loss, params, x: (
        loss + 0.1 * sum(jnp.abs(w).sum() for w in params)
    ),
}
# What the step returns beside its new state.
METRICS: dict[str, Callable[[Any, Any], Any]] = {
    "norm of the old weights": lambda params, state: jnp.sqrt(squares(params)),
    "norm of the old state": lambda params, state: jnp.sqrt(squares(state[0].mu)),
    "largest weights": lambda params, state: [jnp.abs(w).max() for w in params],
}


def make_step(
    loss: Loss, metric: Any, schedule: Any, layers: int, pipelined: bool, wrap: Any
) -> Any:
    def loss_of(params: Any, x: Any) -> Any:
        y = x
        for k, w in enumerate(params, start=1):
            y = jnp.tanh(y @ w)
            y = jaxpp.mark_stage_end(y) if pipelined and k % layers == 0 else y
        return loss(jnp.mean((y - 0.1) ** 2), params, x)

    def step(params: Any, state: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.value_and_grad(wrap(loss_of))(params, x)

        if pipelined:
            sums = jaxpp.treduce(one, xs, schedule, operation=jaxpp.Add)
        else:
            sums = jax.tree.map(lambda *terms: sum(terms), *[one(x) for x in xs])
        updates, after = OPTIMIZER.update(sums[1], state, params)
        return optax.apply_updates(params, updates), after, sums[0], metric(params, state)

    return step


def check(
    schedule: Any,
    of_rank: dict[str, int],
    loss: Loss,
    metric: Any = lambda *_: (),
    layers: int = 1,
    wrap: Any = lambda function: function,
) -> Any:
    """Trains two steps beside plain JAX, with a weight in each layer of a stage, and returns
    the compiled step. `wrap` is applied to the function of the loss."""
    stages = schedule.num_stages
    keys = jax.random.split(jax.random.key(0), stages * layers + 1)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 7 for k in keys[1:]]
    xs = jax.random.normal(keys[0], (MICROBATCHES, ROWS, WIDTH))
    mesh = mesh_of(getattr(schedule, "mpmd_dim", stages), of_rank)
    specs = (P(), P(), P(None, "data" if of_rank else None))
    step = jaxpp.mpmd_jit_with_loop(
        make_step(loss, metric, schedule, layers, True, wrap), mesh, in_specs=specs
    )
    plain = jax.jit(make_step(loss, metric, schedule, layers, False, wrap))
    ours = theirs = (params, OPTIMIZER.init(params))
    for _ in range(2):
        *ours, total, found = step(*ours, xs)
        *theirs, plain_total, expected = plain(*theirs, xs)
        assert_equal((ours, total, found), (theirs, plain_total, expected), 1e-4)
    return step.compile(params, OPTIMIZER.init(params), xs)


SCHEDULES = [
    jaxpp.Std1F1B(3),
    jaxpp.ZeroBubble(3),
    jaxpp.Interleaved1F1B(4, 2),
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", LOSSES)
def test_weights_of_penalties_are_not_sent(name: str, schedule: Any) -> None:
    compiled = check(schedule, {}, LOSSES[name])
    plain = check(schedule, {}, LOSSES["alone"]) if name != "alone" else compiled
    sent, least = (c.cost_summary().links for c in (compiled, plain))
    extra = sum(link.bytes for link in sent) - sum(link.bytes for link in least)
    assert extra < 100 * MICROBATCHES, compiled.explain()  # scalars


@pytest.mark.parametrize("of_rank", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("name", ["squares", "squares of casts", "norm", "absolute values"])
def test_a_penalty_costs_a_message_and_no_memory(name: str, of_rank: dict[str, int]) -> None:
    compiled, plain = (
        check(SCHEDULES[0], of_rank, LOSSES[n], layers=5).cost_summary()
        for n in (name, "alone")
    )
    for link in compiled.links:
        activations = MICROBATCHES if abs(link.src - link.dst) == 1 else 0
        assert link.messages <= activations + 1
    peaks = zip(compiled.ranks, plain.ranks, strict=True)
    assert all(rank.peak_bytes < least.peak_bytes + 500 for rank, least in peaks)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=lambda wrap: wrap.__name__)
@pytest.mark.parametrize("name", ["squares", "norm"])
def test_gradients_of_a_penalty_are_not_kept(name: str, wrap: Any) -> None:
    text = check(SCHEDULES[0], {}, LOSSES[name], layers=5, wrap=wrap).explain()
    kept = text.partition("computed once, before the loop, and kept")[2].partition("\n\n")[0]
    assert "KiB" not in kept, kept


@pytest.mark.parametrize("name", METRICS)
def test_what_norms_are_taken_of_is_not_sent(name: str) -> None:
    compiled = check(jaxpp.Std1F1B(3), {}, LOSSES["alone"], METRICS[name])
    plain = check(jaxpp.Std1F1B(3), {}, LOSSES["alone"])
    sent, least = (c.cost_summary().links for c in (compiled, plain))
    extra = sum(link.bytes for link in sent) - sum(link.bytes for link in least)
    assert extra < 100, compiled.explain()


def step_with_metrics(aux: Any) -> Any:
    """A sum of losses of all stages, as of mixtures of experts, and metrics made of it."""

    def loss(params: Any, x: Any) -> Any:
        total = 0.0
        for w in params:
            total += jnp.abs(x).mean()
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        total += jnp.mean((x - 0.1) ** 2)
        return total, aux(total)

    def step(params: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.value_and_grad(loss, has_aux=True)(params, x)

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(3), operation=jaxpp.Add)

    params = [jnp.eye(WIDTH)] * 3
    xs = jnp.linspace(-1, 1, MICROBATCHES * ROWS * WIDTH).reshape(MICROBATCHES, ROWS, WIDTH)
    compiled = jaxpp.mpmd_jit_with_loop(step, mesh_of(3, {})).compile(params, xs)
    (total, metrics), _ = compiled(params, xs)
    assert all(float(metric) == float(total) for metric in jax.tree.leaves(metrics))
    return compiled


def test_a_loss_that_is_also_a_metric_is_summed_once() -> None:
    alone = step_with_metrics(lambda loss: ()).cost_summary()
    both = step_with_metrics(lambda loss: {"loss": loss, "again": [loss]}).cost_summary()
    assert [link.messages for link in both.links] == [link.messages for link in alone.links]


def step_with_norms(clips: bool) -> Any:
    """The loop returns the norm of each microbatch's gradients, which it may clip by it."""

    def loss(params: Any, x: Any) -> Any:
        for w in params:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
        return jnp.mean((x - 0.1) ** 2)

    def step(params: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            grads = jax.grad(loss)(params, x)
            norm = jnp.sqrt(sum(jnp.sum(g.real**2 + jnp.square(g.imag)) for g in grads))
            scale = 1 / jnp.maximum(norm, 1e-3) if clips else 1
            return jax.tree.map(lambda g: g * scale, grads), norm

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(3), operation=jaxpp.Add)

    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 7 for k in keys[1:]]
    xs = jax.random.normal(keys[0], (4 * MICROBATCHES, ROWS, WIDTH))
    run = jaxpp.mpmd_jit_with_loop(step, mesh_of(3, {}))
    assert_equal(run(params, xs), jax.jit(step)(params, xs), 1e-4)
    return run.compile(params, xs)


def test_clipping_in_the_loop_warns() -> None:
    with pytest.warns(
        UserWarning, match=r"test_penalties.py:\d+.* MiB move there in every step"
    ):
        compiled = step_with_norms(clips=True)
    assert "rank 0 computes from values of several stages" in compiled.explain()


def test_zeros_of_norms_are_not_kept() -> None:
    assert "computed once, before the loop" not in step_with_norms(clips=False).explain()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_with_penalties_are_reduced_once(name: str) -> None:
    compiled = check(jaxpp.Std1F1B(2), {"data": 2}, LOSSES[name])
    in_loop = [c for c in compiled.cost_summary().collectives if "loop" not in c.task]
    assert all(c.bytes <= 4 * c.times for c in in_loop), in_loop
