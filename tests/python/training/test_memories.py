"""Values in pinned host memory: steps compute the same results with them, keep them off the
devices between tasks, and report the memory of each value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
import trainings
from equality import Problem, assert_close, mesh_of, pipelined_step, plain_step, usual_specs
from trainings import described, with_state_on_host

STEPS = 4
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def on_host(mesh: Any) -> NamedSharding:
    return NamedSharding(mesh.lowering_mesh(), P(), memory_kind="pinned_host")


def kinds_of(tree: Any) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def copied(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.copy(), tree)


def adam(problem: Problem) -> Problem:
    problem.optimizer = optax.adam(1e-2)
    return problem


def in_bfloat16() -> Problem:
    problem = adam(models.mlp([1, 1], 4))
    problem.params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), problem.params)
    return problem


PROBLEMS: dict[str, tuple[int, dict[str, int], Callable[[], Problem]]] = {
    "two ranks": (2, {}, lambda: adam(models.mlp([1, 1], 4))),
    "four ranks": (4, {}, lambda: adam(models.mlp([1] * 4, 5))),
    "tied": (2, {}, lambda: adam(trainings.tied_mlp(2))),
    "stacked": (2, {}, lambda: adam(trainings.stacked_mlp(2))),
    "bfloat16": (2, {}, in_bfloat16),
    "data": (2, {"data": 2}, lambda: adam(models.mlp([1, 1], 4))),
    "model": (2, {"model": 2}, lambda: adam(models.mlp([1, 1], 4))),
    "data and model": (2, {"data": 2, "model": 2}, lambda: adam(models.transformer(2, 2, 4))),
}


def train(step: Any, problem: Problem, state: Any) -> Any:
    params, batch = copied(problem.params), problem.batch
    losses = []
    for _ in range(STEPS):
        params, state, loss, _ = step(params, state, batch)
        losses.append(loss)
    return params, state, losses


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "donates", [True, pytest.param(False, marks=pytest.mark.soak)], ids=["donated", "kept"]
)
@pytest.mark.parametrize("name", PROBLEMS)
def test_optimizer_state_lives_on_the_host(name: str, donates: bool) -> None:
    """Each way to ask for it gives the same bits as state on the devices, and the numbers of
    plain JAX within the tolerance."""
    ranks, axes, make = PROBLEMS[name]
    problem, mesh = make(), mesh_of(ranks, axes, sharing=1)
    options: dict[str, Any] = {"donate_argnums": (0, 1)} if donates else {}
    if axes:
        options["in_specs"] = usual_specs(problem, mesh)
    step = pipelined_step(problem, jaxpp.Std1F1B(ranks))
    new_state = problem.optimizer.init(problem.params)
    ours = jaxpp.mpmd_jit_with_loop(step, mesh, **options)
    expected = train(ours, problem, copied(new_state))
    assert kinds_of(expected) == {"device"}
    plain = train(plain_step(problem), problem, copied(new_state))
    tolerance = 2e-2 if name == "bfloat16" else 1e-4
    assert_close(expected[:2], plain[:2], tolerance, "parameters and state")
    ways = {
        "the step": (with_state_on_host(step), copied(new_state), {}),
        "out_specs": (step, copied(new_state), {"out_shardings": (None, on_host(mesh))}),
        "the arguments": (step, jax.device_put(new_state, on_host(mesh)), {}),
    }
    if axes:  # on_host() replicates, but this state is sharded like the weights
        del ways["out_specs"], ways["the arguments"]
    for way, (run, state, more) in ways.items():
        if "out_shardings" in more:
            more = {"out_shardings": (*more["out_shardings"], None, None)}
        hosted = jaxpp.mpmd_jit_with_loop(run, mesh, **options, **more)
        params, state, losses = train(hosted, problem, state)
        assert kinds_of(state) == {"pinned_host"}, way
        assert kinds_of((params, losses)) == {"device"}, way
        found = list(described("", (params, state, losses)))
        assert found == list(described("", expected)), way


@pytest.mark.parametrize("name", ["two ranks", "stacked", "data"])
def test_a_tree_that_is_put_somewhere_stays_on_its_ranks(name: str) -> None:
    ranks, axes, make = PROBLEMS[name]
    problem, mesh = make(), mesh_of(ranks, axes)
    step = pipelined_step(problem, jaxpp.Std1F1B(ranks))
    on_devices = NamedSharding(mesh.lowering_mesh(), P())

    def putting(params: Any, state: Any, batch: Any) -> Any:
        params, state, *others = step(params, jax.device_put(state, on_devices), batch)
        return jax.device_put(params, on_devices), jax.device_put(state, on_host(mesh)), *others

    state = problem.optimizer.init(problem.params)
    expected = train(jaxpp.mpmd_jit_with_loop(step, mesh), problem, copied(state))
    found = train(jaxpp.mpmd_jit_with_loop(putting, mesh), problem, copied(state))
    assert kinds_of(found[1]) == {"pinned_host"}
    for a, b in zip(jax.tree.leaves(found[:2]), jax.tree.leaves(expected[:2]), strict=True):
        assert a.mpmd_idxs == b.mpmd_idxs
    assert_close(found, expected, 1e-6, "parameters, state and losses")


def bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def heavy_mlp() -> Problem:
    """Two ranks with two weights of 1 MiB each; gradients are clipped by the norm of all."""
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(key, (512, 512)) / 512**0.5 for key in keys]

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for k, w in enumerate(params):
            x = jnp.tanh(x @ w)
            x = mark(x) if k % 2 else x
        return models.mse(x, mb["y"]), ()

    x, y = (jax.random.normal(key, (2, 4, 512)) for key in keys[:2])
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    return Problem(loss, params, {"x": x, "y": y}, optimizer)


@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=["1-device", "2-devices"])
def test_an_update_moves_its_state_in_parts(axes: dict[str, int]) -> None:
    """The state of one weight is on the devices at a time, and the step trains as one whose
    state stays there."""
    problem, mesh = heavy_mlp(), mesh_of(2, axes)
    step, mib = pipelined_step(problem, jaxpp.Std1F1B(2)), 1 << 20
    state = problem.optimizer.init(problem.params)
    args = (copied(problem.params), jax.device_put(state, on_host(mesh)), problem.batch)
    hosted = jaxpp.mpmd_jit_with_loop(step, mesh, donate_argnums=(0, 1))
    for rank in hosted.lower(*args).cost_summary().ranks:
        # Weights, gradients, and two moments of one weight; all moments are 4 MiB.
        assert 6 * mib <= rank.peak_bytes < 6.1 * mib
        assert 4 * mib <= rank.peak_host_bytes < 4.1 * mib
    device = jaxpp.mpmd_jit_with_loop(step, mesh, donate_argnums=(0, 1))
    expected = train(device, problem, copied(state))
    found = train(hosted, problem, args[1])
    assert kinds_of(found[1]) == {"pinned_host"}
    assert_close(found, expected, 1e-4, "parameters, state and losses")


def wide_mlp() -> Problem:
    """An MLP whose activations are larger than its weights."""
    problem = adam(models.mlp([1, 1], 4))
    problem.batch = models.batch(4, size=256)
    return problem


def test_the_peak_is_lower_by_the_state() -> None:
    problem, mesh = wide_mlp(), mesh_of(2, {}, sharing=1)
    state = problem.optimizer.init(problem.params)
    step = pipelined_step(problem, jaxpp.Std1F1B(2))
    args = (problem.params, state, problem.batch)
    donating = {"donate_argnums": (0, 1)}
    plain = jaxpp.mpmd_jit_with_loop(step, mesh, **donating).lower(*args).cost_summary()
    shardings = (None, on_host(mesh), None)
    hosted = jaxpp.mpmd_jit_with_loop(step, mesh, in_shardings=shardings, **donating)
    costs = hosted.lower(*args).cost_summary()
    moments = [bytes_of(state[0].mu[k]) + bytes_of(state[0].nu[k]) for k in (0, 1)]
    count = state[0].count.nbytes
    for rank in range(2):
        lower = plain.ranks[rank].peak_bytes - costs.ranks[rank].peak_bytes
        assert lower == moments[rank] + count
        assert plain.ranks[rank].peak_host_bytes == 0
        assert costs.ranks[rank].peak_host_bytes == moments[rank] + count
    assert "pinned_host" in str(costs) and "pinned_host" not in str(plain)
    summary = hosted.trace_and_place(*args).plan.summary()
    assert [row.peak_host_bytes for row in summary] == [r.peak_host_bytes for r in costs.ranks]


def test_each_memory_has_a_limit() -> None:
    problem, mesh = wide_mlp(), mesh_of(2, {}, sharing=1)
    state = jax.device_put(problem.optimizer.init(problem.params), on_host(mesh))
    args = (problem.params, state, problem.batch)

    def plan(limits: Any) -> Any:
        step = pipelined_step(problem, jaxpp.Std1F1B(2))
        options: dict[str, Any] = {"donate_argnums": (0, 1), "memory_limit": limits}
        return jaxpp.mpmd_jit_with_loop(step, mesh, **options).trace_and_place(*args)

    ranks = plan(None).cost_summary().ranks
    device, host = (
        max(getattr(r, n) for r in ranks) for n in ("peak_bytes", "peak_host_bytes")
    )
    plan({"device": device, "pinned_host": host})
    plan({"pinned_host": [r.peak_host_bytes for r in ranks]})
    with pytest.raises(jaxpp.JaxppError, match="bytes on each device, found a peak") as caught:
        plan({"device": device - 1, "pinned_host": host})
    assert caught.value.code == "out-of-memory"
    with pytest.raises(
        jaxpp.JaxppError, match=f"at most {host - 1} bytes in pinned_host .* {host}, 1 over"
    ) as caught:
        plan({"device": device, "pinned_host": host - 1})
    assert caught.value.code == "out-of-memory"
    with pytest.raises(jaxpp.JaxppError, match="for 'device' and 'pinned_host', found 'vmem'"):
        plan({"vmem": 1})


def test_ranks_on_one_device_share_its_limit() -> None:
    problem, mesh = adam(models.mlp([1, 1], 4)), mesh_of(2, {}, sharing=2)
    state = jax.device_put(problem.optimizer.init(problem.params), on_host(mesh))

    def plan(limits: Any) -> Any:
        step = pipelined_step(problem, jaxpp.Std1F1B(2))
        ours = jaxpp.mpmd_jit_with_loop(step, mesh, memory_limit=limits)
        return ours.trace_and_place(problem.params, state, problem.batch)

    host = sum(r.peak_host_bytes for r in plan(None).cost_summary().ranks)
    plan({"pinned_host": host})
    with pytest.raises(jaxpp.JaxppError, match="rank 0 and others on its devices"):
        plan({"pinned_host": host - 1})


def test_traced_peaks_are_the_plans() -> None:
    problem, mesh = wide_mlp(), mesh_of(2, {}, sharing=1)
    state = jax.device_put(problem.optimizer.init(problem.params), on_host(mesh))
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(2)), mesh, donate_argnums=(0, 1)
    )
    compiled = step.compile(problem.params, state, problem.batch)
    compiled.set_tracing()
    compiled(copied(problem.params), state, problem.batch)
    peaks = [rank.peak_bytes for rank in compiled.cost_summary().ranks]
    assert compiled._runtime.trace_peaks() == peaks
    costs, memory = compiled.cost_summary(), compiled.memory_analysis()
    assert memory.host_peak_memory_in_bytes in [r.peak_host_bytes for r in costs.ranks]
    assert memory.host_argument_size_in_bytes == memory.host_output_size_in_bytes
    assert memory.host_alias_size_in_bytes == memory.host_argument_size_in_bytes > 0


# --- Arguments and results ----------------------------------------------------------------


def scaled(ws: Any, state: Any) -> Any:
    """A step without a loop: weights times state, and the unchanged state."""
    return {"new": jax.tree.map(lambda w, s: w * s, ws, state)}, state


def test_prefixes_and_what_they_do_not_name() -> None:
    mesh = mesh_of(2, {}, sharing=1)
    ws, state = [jnp.ones(4), jnp.full(4, 2.0)], [jnp.full(4, 3.0), jnp.full(4, 5.0)]
    host, device = on_host(mesh), on_host(mesh).with_memory_kind("device")
    step = jaxpp.mpmd_jit_with_loop(
        scaled,
        mesh,
        in_shardings=(None, [host, P()]),
        out_shardings=({"new": [None, host]}, None),
    )
    new, kept = step(ws, state)
    assert [x.sharding.memory_kind for x in new["new"]] == ["device", "pinned_host"]
    assert [x.sharding.memory_kind for x in kept] == ["pinned_host", "device"]
    assert [x.tolist() for x in new["new"]] == [[3.0] * 4, [10.0] * 4]
    assert kept[0].tolist() == [3.0] * 4
    compiled = step.compile(ws, state)
    kinds = [s.memory_kind for s in jax.tree.leaves(compiled.in_shardings)]
    assert kinds == ["device", "device", "pinned_host", "device"]
    kinds = [s.memory_kind for s in jax.tree.leaves(compiled.out_shardings)]
    assert kinds == ["device", "pinned_host", "pinned_host", "device"]
    assert compiled.out_info[1][0].sharding.memory_kind == "pinned_host"
    moved = jaxpp.mpmd_jit_with_loop(
        scaled, mesh, in_shardings=(None, [host, P()]), out_shardings=(None, [device, host])
    )
    _, kept = moved(ws, state)
    assert [x.sharding.memory_kind for x in kept] == ["device", "pinned_host"]


def test_a_result_is_a_result_of_its_memory() -> None:
    """Conversions to numpy and JAX arrays, shards, shardings and copies keep the memory."""
    mesh = mesh_of(2, {"data": 2}, sharing=1)
    sharding = jaxpp.MpmdSharding(mesh, (0, 1), P("data"), memory_kind="pinned_host")
    double = jaxpp.mpmd_jit_with_loop(lambda x: 2 * x, mesh, out_shardings=sharding)
    x = np.arange(8, dtype=np.float32)
    y = double(x)
    assert y.sharding == sharding and y.sharding.memory_kind == "pinned_host"
    make, state = sharding.__reduce__()
    assert make(*state) == sharding
    assert sharding.with_memory_kind("device") != sharding
    assert sharding.with_memory_kind("device").mesh_ids == (0, 1)
    np.testing.assert_array_equal(np.asarray(y), 2 * x)
    for array in (y.first_mpmd_replica, *y.to_mpmd_local_array):
        assert array.sharding.memory_kind == "pinned_host"
        np.testing.assert_array_equal(array, 2 * x)
    assert {s.data.sharding.memory_kind for s in y.addressable_shards} == {"pinned_host"}
    assert jax.device_put(x, sharding).sharding.memory_kind == "pinned_host"
    assert jax.device_put(y, sharding).sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(jnp.sin(y), jnp.sin(2 * x))
    copy = y.copy()
    assert copy.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(copy, y)


@pytest.mark.parametrize(
    "given", ["numpy", "jax", "jax on the host", "ours", "ours on the host"]
)
@pytest.mark.parametrize("wanted", ["device", "pinned_host"])
def test_any_argument_becomes_one_of_its_memory(given: str, wanted: str) -> None:
    mesh = mesh_of(2, {}, sharing=1)
    x = np.arange(1 << 15, dtype=np.float32)  # JAX arrays of 64 KiB or more are borrowed

    def make(kind: str) -> Any:
        out = jaxpp.MpmdSharding(mesh, (1,), P(), memory_kind=kind)
        return jaxpp.mpmd_jit_with_loop(lambda x: x + 0, mesh, out_shardings=out)(x)

    def argument() -> Any:
        return {
            "numpy": lambda: x,
            "jax": lambda: jnp.asarray(x),
            "jax on the host": lambda: jax.device_put(x, on_host(mesh)),
            "ours": lambda: make("device"),
            "ours on the host": lambda: make("pinned_host"),
        }[given]()

    kind = on_host(mesh).with_memory_kind(wanted)
    for donates in (False, True):
        step = jaxpp.mpmd_jit_with_loop(
            lambda x: (x + 1, x.sum()),
            mesh,
            in_shardings=kind,
            donate_argnums=(0,) if donates else (),
        )
        for _ in range(2):
            value = argument()
            new, total = step(value)
            np.testing.assert_array_equal(np.asarray(new), x + 1)
            assert float(total) == x.sum()
            assert new.sharding.memory_kind == (wanted if donates else "device")
            if donates and isinstance(value, jaxpp.MpmdArray):
                assert value.is_deleted()
            elif not donates:
                np.testing.assert_array_equal(np.asarray(value), x)
        assert len(step._compiled) == 1


def test_state_in_another_memory_is_another_step() -> None:
    """As with jax.jit, a new memory kind compiles a new step, unless in_shardings name one."""
    mesh = mesh_of(2, {}, sharing=1)
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, mesh, donate_argnums=(0,))
    assert step(jnp.zeros(4)).sharding.memory_kind == "device"
    hosted = step(jax.device_put(jnp.zeros(4), on_host(mesh)))
    assert hosted.sharding.memory_kind == "pinned_host"
    assert step(hosted).sharding.memory_kind == "pinned_host"
    assert len(step._compiled) == 2
    named = jaxpp.mpmd_jit_with_loop(
        lambda x: x + 1, mesh, donate_argnums=(0,), in_shardings=on_host(mesh)
    )
    assert named(named(jnp.zeros(4))).tolist() == [2.0] * 4
    assert len(named._compiled) == 1


def test_types_stand_for_arrays_of_their_memory() -> None:
    mesh = mesh_of(2, {}, sharing=1)
    struct = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=on_host(mesh))
    step = jaxpp.mpmd_jit_with_loop(lambda x: x * 2, mesh, donate_argnums=(0,))
    compiled = step.compile(struct)
    assert compiled.out_shardings.memory_kind == "pinned_host"
    state = jax.device_put(jnp.ones(4), compiled.in_shardings[0][0])
    assert state.sharding.memory_kind == "pinned_host"
    assert step(state).tolist() == [2.0] * 4
    assert len(step._compiled) == 1


def test_keys_and_small_types() -> None:
    mesh = mesh_of(2, {}, sharing=1)
    given = {
        "key": jax.random.key(3),
        "flag": jnp.asarray([True, False]),
        "half": jnp.ones(3, jnp.bfloat16),
        "empty": jnp.ones((0, 3)),
    }
    step = jaxpp.mpmd_jit_with_loop(lambda t: t, mesh, out_shardings=on_host(mesh))
    found = step(given)
    assert kinds_of(found) == {"pinned_host"}
    again = step(found)
    for name, leaf in given.items():
        for result in (found[name], again[name]):
            assert result.dtype == leaf.dtype
            data = jax.random.key_data if name == "key" else np.asarray
            np.testing.assert_array_equal(data(result.first_mpmd_replica), data(leaf))


def test_saved_and_loaded(tmp_path: Any) -> None:
    problem, mesh = adam(models.mlp([1, 1], 4)), mesh_of(2, {}, sharing=1)
    state = jax.device_put(problem.optimizer.init(problem.params), on_host(mesh))
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(2)), mesh)
    args = (problem.params, state, problem.batch)
    expected = step(*args)
    compiled = step.compile(*args)
    compiled.save(tmp_path / "step.plan")
    loaded = jaxpp.load(tmp_path / "step.plan")
    assert jax.tree.leaves(loaded.in_shardings) == jax.tree.leaves(compiled.in_shardings)
    found = loaded(*args)
    assert kinds_of(found[1]) == {"pinned_host"}
    assert list(described("", found)) == list(described("", expected))


def test_constants_on_the_host() -> None:
    mesh = mesh_of(2, {}, sharing=1)
    table = jax.device_put(jnp.arange(4.0), on_host(mesh))
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + jax.device_put(table, DEVICE), mesh)
    assert step(jnp.ones(4)).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert "in device" in step.trace_and_place(jnp.ones(4)).text


# --- Within the step ----------------------------------------------------------------------


def test_a_gradient_is_moved_after_the_loop() -> None:
    mesh = mesh_of(2, {}, sharing=1)
    step, weights, xs = trainings.two_stages(mesh=mesh)

    def with_gradients(ws: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            return jax.value_and_grad(loss)(ws, x)

        total, grads = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        grads = jax.device_put(grads, HOST)
        back = jax.device_put(grads, DEVICE)
        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, back), total, grads

    def loss(ws: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ ws[0]))
        return jaxpp.mark_stage_end(jnp.tanh(x @ ws[1])).sum()

    new, total, grads = jaxpp.mpmd_jit_with_loop(with_gradients, mesh)(weights, xs)
    expected, expected_total = step(weights, xs)
    assert kinds_of(grads) == {"pinned_host"} and kinds_of(new) == {"device"}
    assert float(total) == float(expected_total)
    assert list(described("", new)) == list(described("", expected))
    for w, g, n in zip(weights, grads, new, strict=True):
        np.testing.assert_allclose(np.asarray(n), w - 0.1 * np.asarray(g), rtol=1e-6)


def offloading(names: list[str]) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("schedule", [jaxpp.Std1F1B, jaxpp.GPipe, jaxpp.ZeroBubble])
@pytest.mark.parametrize("axes", [{}, {"data": 2}], ids=str)
@pytest.mark.parametrize("scanned", [False, True])
def test_activations_wait_for_their_backward_on_the_host(
    schedule: Any, axes: Any, scanned: bool
) -> None:
    mesh = mesh_of(2, axes, sharing=1)

    def make(policy: Any) -> Any:
        def layer(w: Any, x: Any) -> Any:
            y = checkpoint_name(jnp.tanh(x @ w), "y")
            return jnp.sin(y) * y

        run = jax.checkpoint(layer, policy=policy)

        def loss(ws: Any, x: Any) -> Any:
            for pair in ws:
                if scanned:
                    x, _ = jax.lax.scan(lambda x, w: (run(w, x), None), x, jnp.stack(pair))
                else:
                    x = run(pair[1], run(pair[0], x))
                x = jaxpp.mark_stage_end(x)
            return jnp.mean(x**2)

        specs = (P(), P(None, "data")) if axes else None
        step = trainings.descent(loss, schedule(2))
        return jaxpp.mpmd_jit_with_loop(step, mesh, in_specs=specs)

    ws = [
        [jax.random.normal(k, (8, 8)) for k in jax.random.split(key)]
        for key in jax.random.split(jax.random.key(0))
    ]
    xs = jax.random.normal(jax.random.key(1), (4, 64, 8))
    saving = make(jax.checkpoint_policies.save_only_these_names("y"))
    moving = make(offloading(["y"]))
    a, b = (ws, 0.0), (ws, 0.0)
    for _ in range(3):
        a, b = saving(a[0], xs), moving(b[0], xs)
    assert list(described("", b)) == list(described("", a))
    before, after = (s.lower(ws, xs).cost_summary().ranks for s in (saving, moving))
    # The last stage has only one microbatch in flight, so only rank 0 saves memory for sure.
    assert after[0].peak_bytes < before[0].peak_bytes
    for rank in range(2):
        assert after[rank].peak_bytes <= before[rank].peak_bytes
        assert after[rank].peak_host_bytes > 0 == before[rank].peak_host_bytes


def test_a_scan_outside_the_loop_moves_its_rows() -> None:
    """Its operands come from the host, its results go there, and one state stays there."""
    host = jax.memory.Space.Host

    def step(ws: Any, xs: Any, scan: Any) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jaxpp.mark_stage_end(jnp.sum(jaxpp.mark_stage_end(x @ w) ** 2))

        one = lambda x: jax.value_and_grad(loss)(ws[0], x)  # noqa: E731
        total, grads = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

        def body(state: Any, row: Any) -> Any:
            there = jax.device_put(state, jax.memory.Space.Device) + row
            return jax.device_put(there, host), (jax.device_put(row * 2, host), row + 1)

        return total, scan(body, jax.device_put(grads[0], host), grads)

    ws, xs = [np.eye(4, dtype=np.float32)], np.ones((4, 2, 4), np.float32)
    run = jaxpp.mpmd_jit_with_loop(lambda ws, xs: step(ws, xs, jax.lax.scan), mesh_of(2, {}))
    total, (state, (rows, others)) = run(ws, xs)
    kinds = [x.sharding.memory_kind for x in (state, rows, others)]
    assert kinds == ["pinned_host", "pinned_host", "device"]
    grads = np.asarray(others) - 1
    np.testing.assert_allclose(np.asarray(rows), 2 * grads, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(state), grads[0] + grads.sum(0), rtol=1e-6)
    assert float(total) > 0 and np.abs(grads).max() > 0


def test_a_branch_chooses_between_values_on_the_host() -> None:
    def step(w: Any, state: Any, xs: Any, marked: bool) -> Any:
        def loss(w: Any, x: Any) -> Any:
            return jaxpp.mark_stage_end(jnp.sum(jaxpp.mark_stage_end(x @ w) ** 2))

        one = lambda x: jax.value_and_grad(loss)(w, x)  # noqa: E731
        total, grad = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        update = lambda s: jax.device_put(jax.device_put(s, DEVICE) * 2 + grad, HOST)  # noqa: E731
        skip = (lambda s: jax.device_put(s, HOST)) if marked else (lambda s: s)
        return jax.lax.cond(total > 0, update, skip, state)

    mesh = mesh_of(2, {})
    w, xs = jnp.eye(4), jnp.ones((4, 2, 4))
    state = jax.device_put(jnp.ones((4, 4)), on_host(mesh))
    run = jaxpp.mpmd_jit_with_loop(step, mesh, static_argnums=3)
    chosen = run(w, state, xs, True)
    assert chosen.sharding.memory_kind == "pinned_host"
    np.testing.assert_allclose(
        np.asarray(chosen), jax.jit(step, static_argnums=3)(w, np.ones((4, 4)), xs, True)
    )
    with pytest.raises(TypeError, match="cond branches") as caught:
        run(w, state, xs, False)
    assert any("Space.Host" in note for note in caught.value.__notes__)


# --- Checkpoints --------------------------------------------------------------------------


def test_checkpoints_keep_memories(tmp_path: Any) -> None:
    """Orbax saves arrays in both memories and restores each to the memory it was in."""
    mesh = mesh_of(2, {"data": 2}, sharing=1)
    host = jaxpp.MpmdSharding(mesh, (0, 1), P("data"), memory_kind="pinned_host")
    step = jaxpp.mpmd_jit_with_loop(
        lambda tree: {"m": tree["m"] * 2, "w": tree["w"] + 1},
        mesh,
        out_shardings={"m": host, "w": None},
        donate_argnums=0,
    )
    x = np.arange(8, dtype=np.float32)
    tree = step({"m": x, "w": x})
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", tree)
        checkpointer.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, tree)
        restored = checkpointer.restore(tmp_path / "state", like)
    assert [restored[n].sharding.memory_kind for n in "mw"] == ["pinned_host", "device"]
    again, expected = step(restored), step(tree)
    assert again["m"].sharding == expected["m"].sharding == host
    assert list(described("", again)) == list(described("", expected))
