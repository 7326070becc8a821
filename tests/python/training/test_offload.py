"""Activations offloaded to pinned host memory: the same bits with less device memory."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import mesh_of

D, SIZE, MICROBATCHES = 32, 64, 8  # an activation has 8 KiB


def weights(layers: int) -> Any:
    keys = jax.random.split(jax.random.key(0), 2)
    return tuple(jax.random.normal(k, (layers, D, D)) / D**0.5 for k in keys)


def batch() -> jax.Array:
    return jax.random.normal(jax.random.key(1), (MICROBATCHES, SIZE, D))


def make_step(
    schedule: Any, stages: int, mesh: Any, remat: bool = False, **options: Any
) -> Any:
    def layer(w: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ w[0]) @ w[1]

    def loss(ws: Any, x: Any) -> Any:
        run = jax.checkpoint(layer) if remat else layer
        return jnp.mean(jaxpp.stages(run, ws, x, stages, scan=False) ** 2)

    def step(ws: Any, xs: Any) -> Any:
        one = jax.value_and_grad(loss)
        return jaxpp.treduce(lambda x: one(ws, x), xs, schedule, operation=jaxpp.Add)

    return jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh, **options)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


@pytest.mark.sample(3)
@pytest.mark.parametrize("remat", [False, True], ids=["kept", "remat"])
@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "axes"),
    [
        (jaxpp.Std1F1B(4), 4, 4, {}),
        (jaxpp.Std1F1B(2), 2, 2, {"data": 2}),
        (jaxpp.GPipe(2), 2, 2, {}),
        (jaxpp.Interleaved1F1B(4, 2), 4, 2, {}),
        (jaxpp.ZeroBubble(4), 4, 4, {}),
        (jaxpp.ZeroBubbleV(4, 2), 4, 2, {}),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "tasks") else str(value),
)
def test_bits_are_equal(
    schedule: Any, stages: int, ranks: int, axes: dict[str, int], remat: bool
) -> None:
    results, hosts, peaks = [], [], []
    for offload in (False, True):
        step = make_step(schedule, stages, mesh_of(ranks, axes), remat, offload=offload)
        compiled = step.compile(weights(stages), batch())
        compiled.set_tracing()
        results.append(bits(compiled(weights(stages), batch())))
        costs = compiled.cost_summary()
        hosts.append([rank.peak_host_bytes for rank in costs.ranks])
        peaks.append([rank.peak_bytes for rank in costs.ranks])
        assert compiled._runtime.trace_peaks() == peaks[-1]
    assert results[0] == results[1]
    assert max(hosts[0]) == 0
    # With two rematerialised stages there is nothing to offload: the stages keep only their
    # inputs, which are the batch and the input of the last stage.
    offloads = not (remat and stages == 2)
    assert (max(hosts[1]) > 0) == offloads
    assert sum(peaks[1]) < sum(peaks[0]) or remat


def test_the_first_rank_keeps_one_microbatch() -> None:
    """Without offloading, rank 0 keeps the activations of as many microbatches as there are
    ranks."""
    peaks = []
    for offload in (False, True):
        step = make_step(jaxpp.Std1F1B(4), 4, mesh_of(4, {}), offload=offload)
        peaks.append(step.lower(weights(4), batch()).cost_summary().ranks[0].peak_bytes)
    assert peaks[0] - peaks[1] == 3 * SIZE * D * 4


def test_a_limit_chooses_it() -> None:
    args, mesh = (weights(4), batch()), mesh_of(4, {}, sharing=1)

    def peak(**options: Any) -> int:
        step = make_step(jaxpp.Std1F1B(4), 4, mesh, **options)
        return step.lower(*args).cost_summary().peak_bytes

    kept, offloaded = peak(), peak(offload=True)
    assert peak(memory_limit=kept) == kept
    assert peak(memory_limit=kept - 1) == offloaded
    for limit, offload in ((kept - 1, False), (offloaded - 1, None)):
        with pytest.raises(jaxpp.JaxppError, match=f"expected at most {limit} bytes"):
            peak(memory_limit=limit, offload=offload)
    with pytest.raises(jaxpp.JaxppError, match=f"expected at most {kept - 1} bytes"):
        peak(memory_limit={"device": kept - 1, "pinned_host": 1000})
    with pytest.raises(jaxpp.JaxppError, match="at most 1000 bytes in pinned_host"):
        peak(memory_limit={"pinned_host": 1000}, offload=True)
    with pytest.raises(jaxpp.JaxppError, match="offload='yes'"):
        peak(offload="yes")


def test_slow_links_are_predicted() -> None:
    """A host link that needs a second for each microbatch's activation bounds the step time."""
    step = make_step(jaxpp.Std1F1B(2), 2, mesh_of(2, {}), offload=True)
    compiled = step.compile(weights(2), batch())
    compiled.set_tracing()
    jax.block_until_ready(compiled(weights(2), batch()))
    slow = compiled.predict(host_bandwidth=SIZE * D * 4 / 1000)
    assert compiled.predict().makespan < 1000 * MICROBATCHES < slow.makespan


def test_saved_and_loaded(tmp_path: pathlib.Path) -> None:
    step = make_step(jaxpp.Std1F1B(4), 4, mesh_of(4, {}), offload=True)
    compiled = step.compile(weights(4), batch())
    compiled.save(tmp_path / "plan")
    loaded = jaxpp.load(tmp_path / "plan")
    assert bits(loaded(weights(4), batch())) == bits(compiled(weights(4), batch()))
    assert str(loaded.cost_summary()) == str(compiled.cost_summary())


def test_auto_offloads_if_no_schedule_fits_otherwise() -> None:
    def auto(**options: Any) -> Any:
        mesh = mesh_of(4, {}, sharing=1)
        return make_step(jaxpp.Auto(seconds=0.1), 5, mesh, **options)

    arguments = weights(5), batch()  # `Auto` has a mark for each stage: four
    with pytest.raises(jaxpp.JaxppError, match="the smallest takes") as raised:
        auto(memory_limit=1, offload=False)(*arguments)
    # Without offloading, only a schedule that runs one microbatch at a time needs no more.
    least = int(str(raised.value).split("smallest takes ")[1].split()[0])
    expected = bits(auto()(*arguments))
    with pytest.raises(jaxpp.JaxppError, match="the smallest takes"):
        auto(memory_limit=least - 1, offload=False)(*arguments)
    step = auto(memory_limit=least)
    compiled = step.compile(*arguments)
    assert bits(compiled(*arguments)) == expected
    ranks = compiled.cost_summary().ranks
    assert max(rank.peak_bytes for rank in ranks) <= least
    assert max(rank.peak_host_bytes for rank in ranks) > 0
