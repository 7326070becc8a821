"""Programs written by hand compute what plain JAX does, and are planned like other steps."""

from __future__ import annotations

import json
import pathlib
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import modules_of
from jaxpp.experimental import mpmd
from written import WIDTH, RandomProgram, batch, hand_mesh, layer, on, plain_training, training

MESHES = [(1, False), (2, False), (1, True), (2, True)]


def assert_close(found: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(("data", "explicit"), MESHES)
def test_a_step_trains_as_plain_jax_does(data: int, explicit: bool) -> None:
    step = training(hand_mesh(2, data, explicit), 3)
    ws, xs, ys = batch(3)
    own = plain = ws
    for _ in range(3):
        losses, own = step(own, xs, ys)
        wanted, plain = plain_training(plain, xs, ys)
        assert_close((losses, own), (wanted, plain))
    assert [w.sharding.mesh_ids for w in own] == [(0,), (1,)]


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed: int) -> None:
    data, explicit = MESHES[seed % 4]
    ranks = 1 + seed % 4
    program = RandomProgram(seed, ranks)
    assert_close(program.written(hand_mesh(ranks, data, explicit)), program.plain())


def test_a_rank_runs_its_tasks_in_the_order_of_the_program() -> None:
    lowered = training(hand_mesh(2), 3).lower(*batch(3))
    rank_0, rank_1 = (str(jaxpr) for jaxpr in lowered.local_jaxprs)
    order = [line.split()[1] for line in rank_0.splitlines() if line.startswith("  run")]
    assert order == [
        "fwd0",
        "fwd0.1",
        "fwd0.2",
        "bwd0",
        "bwd0.1",
        "add.2",
        "bwd0.2",
        "add.3",
    ] + ["update"]
    assert rank_0.count("send to 1") == rank_1.count("recv from 0") == 3
    # Each activation is received immediately before its task.
    assert rank_1.index("run fwd1_bwd1 ") < rank_1.index("recv from 0", rank_1.index("send"))


def test_calls_of_a_function_have_one_module() -> None:
    compiled = training(hand_mesh(2), 4).compile(*batch(4))
    # The tasks are fwd0, fwd1_bwd1, bwd0, add and update; the last two run on both ranks.
    assert len(modules_of(compiled).modules) == 5


def test_it_is_one_equation_a_call_in_another_trace() -> None:
    step = training(hand_mesh(2), 1)
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(step)(*batch(1)).eqns]
    assert names == ["task", "transfer", "task", "transfer", "task", "task", "task"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_beside_a_loop(ranks: int) -> None:
    """Tasks and transfers written by hand prepare what a loop takes, and take its results."""
    mesh = hand_mesh(ranks)
    first, last = on(mesh, 0), on(mesh, ranks - 1)

    @mpmd.mpmd(mesh, in_shardings=last)
    def prepared(xs: Any) -> Any:
        scaled = mpmd.task(lambda xs: 2 * xs, out_shardings=last)(xs)
        return mpmd.transfer(scaled, out_shardings=first).done()

    @mpmd.mpmd(mesh, in_shardings=(first, last))
    def difference(w: Any, d: Any) -> Any:
        sent = mpmd.transfer(d, out_shardings=first)
        return mpmd.task(lambda w, d: w - 0.1 * d, out_shardings=first)(w, sent.done())

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jaxpp.mark_stage_end(layer(w, x))
        return jnp.sum(x**2)

    def step(prepare: Any, update: Any, ws: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x),
            prepare(xs),
            jaxpp.Std1F1B(ranks),
            operation=jaxpp.Add,
        )
        return total, update(ws[0], grads[-1])

    rng = np.random.default_rng(0)
    ws = list(rng.normal(size=(ranks, WIDTH, WIDTH)).astype(np.float32))
    xs = rng.normal(size=(6, 2, WIDTH)).astype(np.float32)
    mixed = partial(step, prepared, difference)
    compiled = jaxpp.mpmd_jit_with_loop(mixed, mesh).compile(ws, xs)
    expected = jax.jit(partial(step, lambda xs: 2 * xs, lambda w, d: w - 0.1 * d))(ws, xs)
    assert_close(compiled(ws, xs), expected)
    links = {(link.src, link.dst): link.messages for link in compiled.cost_summary().links}
    assert links[ranks - 1, 0] == (8 if ranks == 2 else 2)  # gradients of activations are 6


def test_what_lower_tells() -> None:
    mesh = hand_mesh(3)

    @mpmd.mpmd(mesh, in_shardings=(on(mesh, 0), on(mesh, 1)))
    def program(a: Any, unused: Any) -> Any:
        return mpmd.transfer(a, out_shardings=on(mesh, 2)).done()

    x, y = np.ones((2, 3), np.float32), np.zeros(4, np.float32)
    lowered = program.lower(x, y)
    assert isinstance(lowered, mpmd.LoweredMpmdFun) and lowered.mpmd_mesh is mesh
    assert [s.mesh_ids for s in lowered.in_shardings] == [(0,), (1,)]
    assert lowered.out_shardings.mesh_ids == (2,)
    assert lowered.out_shape.shape == (2, 3)
    assert lowered.used_inputs == (True, True)  # this process has all ranks
    indices = [j.global_invar_indices for j in lowered.local_jaxprs]
    assert indices == [(0,), (1,), ()]
    assert_close(lowered(x, y), x)
    assert_close(lowered.eval_local(x, y), x)
    with pytest.raises(jaxpp.JaxppError, match="expected the 2 argument leaves"):
        lowered.eval_local(x)


@pytest.mark.parametrize(("data", "explicit"), MESHES)
def test_values_of_several_ranks(data: int, explicit: bool) -> None:
    mesh = hand_mesh(4, data, explicit)
    parted = on(mesh, [1, 2], "stage")

    @mpmd.mpmd(mesh, in_shardings=(on(mesh, 0, "stage"), parted))
    def program(a: Any, b: Any) -> Any:
        whole = mpmd.stack(b, a)  # ordered by rank, not by argument
        total = mpmd.task(
            lambda x: (x.sum(0), 2 * x), out_shardings=(on(mesh, [0, 1, 2]), P("stage"))
        )(whole)
        moved = mpmd.transfer(b, out_shardings=on(mesh, [0, 3], "stage")).done()
        return (
            whole,
            total,
            mpmd.slice(total[0], [[0, 1], 2]),
            mpmd.slice(whole, [0, [1, 2]]),
            moved,
        )

    a = np.arange(8, dtype=np.float32).reshape(1, 8)
    b = np.arange(16, dtype=np.float32).reshape(2, 8) ** 2
    whole, (total, double), (left, right), (first, rest), moved = program(a, b)
    stacked = np.concatenate([a, b])
    assert_close(
        (whole, total, double, left, right, first, rest, moved),
        (stacked, stacked.sum(0), 2 * stacked, stacked.sum(0), stacked.sum(0), a, b, b),
    )
    lowered = program.lower(a, b)
    assert [j.global_invar_indices for j in lowered.local_jaxprs] == [(0,), (1,), (1,), ()]
    assert lowered.used_inputs == (True, True)
    assert_close(lowered.eval_local(a, b)[0], stacked)
    assert left.sharding.mesh_ids == (0, 1) and right.sharding.mesh_ids == (2,)
    assert moved.sharding.mesh_ids == (0, 3) and moved.sharding.spec[0] == "stage"
    # The next step takes the results of this one without conversion.
    assert_close(program(first, rest)[0], stacked)


def test_the_constants_and_effects_of_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    mesh, table = hand_mesh(2), jnp.arange(6.0).reshape(2, 3)

    def look(x: Any) -> Any:
        jax.debug.print("saw {x}", x=x.sum())
        return x + table

    @mpmd.mpmd(mesh, in_shardings=(on(mesh, 1),))
    def program(x: Any) -> Any:
        mpmd.task(look, name="unused", out_shardings=P())(x)
        zeros = mpmd.task(lambda: jnp.zeros(3), mesh=mesh.unstack[1], out_shardings=P())()
        return mpmd.task(lambda x, z, n: x * n + z + table, out_shardings=P())(x, zeros, 3)

    x = np.ones((2, 3), np.float32)
    found = np.asarray(program(x))
    assert_close(found, 3 * x + np.asarray(table))
    jax.effects_barrier()
    assert "saw 6.0" in capfd.readouterr().out


def test_it_is_saved_traced_and_bounded(tmp_path: pathlib.Path) -> None:
    mesh, given = hand_mesh(2), batch(2)
    compiled = training(mesh, 2).compile(*given)
    path = tmp_path / "plan.jpp"
    compiled.save(path)
    assert_close(jaxpp.load(path)(*given), plain_training(*given))
    compiled.set_tracing()
    compiled(*given)
    names = {e["name"] for e in json.loads(compiled.trace_json())["traceEvents"]}
    assert {"fwd0", "fwd0.1", "fwd1_bwd1", "bwd0.1", "update.1"} <= names
    peak = max(rank.peak_bytes for rank in compiled.cost_summary().ranks)
    training(mesh, 2, memory_limit=peak).compile(*given)
    with pytest.raises(jaxpp.JaxppError, match="memory"):
        training(mesh, 2, memory_limit=peak - 1).compile(*given)


def test_arguments_are_freed_if_they_are_donated() -> None:
    mesh, w = hand_mesh(2), np.ones((8, 8), np.float32)

    def program(w: Any) -> Any:
        return mpmd.task(lambda w: w - 1, out_shardings=P())(w)

    def peak(**options: Any) -> int:
        step = mpmd.mpmd(mesh, in_shardings=(on(mesh, 1),), **options)(program)
        return step.compile(w).cost_summary().ranks[1].peak_bytes

    assert peak() == 2 * w.nbytes and peak(donate_argnums=0) == w.nbytes
    step = mpmd.mpmd(mesh, in_shardings=(on(mesh, 1),), donate_argnums=0)(program)
    first = step(w)
    step(first)
    assert first.is_deleted()


def test_ranks_that_share_devices_are_named_by_mpmd_shardings() -> None:
    devices = np.array(jax.devices()[:1]).reshape(1)
    mesh = mpmd.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage", ranks_per_device=2)
    a, b = (jaxpp.MpmdSharding(mesh, [rank], P()) for rank in (0, 1))

    @mpmd.mpmd(mesh, in_shardings=(a,))
    def program(x: Any) -> Any:
        x = mpmd.task(lambda x: x + 1, out_shardings=a)(x)
        return mpmd.task(lambda x: 2 * x, out_shardings=b)(
            mpmd.transfer(x, out_shardings=b).done()
        )

    found = program(np.ones(3, np.float32))
    assert found.sharding.mesh_ids == (1,)
    assert_close(found, np.full(3, 4))


def test_a_partial_sum_stays_partial_until_it_is_resharded() -> None:
    mesh = hand_mesh(1, data=2, explicit=True)
    reduced = jax.sharding.PartitionSpec(reduced={"data"})
    rows = on(mesh, 0, "data")
    partial = jax.sharding.NamedSharding(mesh.unstack[0], P(unreduced={"data"}))

    @mpmd.mpmd(
        mesh,
        in_shardings=(
            jax.sharding.NamedSharding(mesh.unstack[0], reduced),
            [rows, rows, rows],
        ),
    )
    def program(w: Any, xs: Any) -> Any:
        def grad(w: Any, x: Any) -> Any:
            return jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)

        grads = [mpmd.task(grad, name="grad", out_shardings=partial)(w, x) for x in xs]
        add = mpmd.task(jnp.add, name="add", out_shardings=partial)
        total = add(add(grads[0], grads[1]), grads[2])
        return mpmd.task(lambda g: jax.reshard(g, P()), name="reduce", out_shardings=P())(total)

    w, xs, _ = batch(3)
    compiled = program.compile(w[0], xs)
    found = compiled.cost_summary().collectives
    assert [(c.task, c.kind, c.times) for c in found] == [("reduce", "all-reduce", 1)]
    wanted = sum(jax.grad(lambda w, x=x: jnp.sum((x @ w) ** 2))(w[0]) for x in xs)
    assert_close(compiled(w[0], xs), wanted)


@pytest.mark.parametrize(("data", "explicit"), MESHES)
def test_values_in_pinned_host_memory(data: int, explicit: bool) -> None:
    """Tasks move values between memories; arguments, results and transfers use host memory."""
    mesh = hand_mesh(2, data, explicit)
    rows, other = on(mesh, 0, "data"), on(mesh, 1, "data")
    host, other_host = (s.with_memory_kind("pinned_host") for s in (rows, other))

    @mpmd.mpmd(mesh, in_shardings=(rows, host))
    def program(x: Any, state: Any) -> Any:
        @mpmd.task(out_shardings=(rows, host))
        def forward(x: Any, state: Any) -> Any:
            y = x + jax.device_put(state, rows)
            return 2 * y, jax.device_put(y, host)

        y, kept = forward(x, state)
        sent = mpmd.transfer(y, out_shardings=other_host).done()
        onward = mpmd.task(lambda s: s + 1, name="onward", out_shardings=other_host)(sent)
        back = mpmd.task(lambda k: jax.device_put(k, rows) * 3, out_shardings=rows)(kept)
        return kept, onward, back, mpmd.transfer(state, out_shardings=other).done()

    x, state = (np.arange(8, dtype=np.float32).reshape(4, 2) + k for k in (0, 5))
    compiled = program.compile(x, state)
    found = compiled(x, state)
    y = x + state
    assert_close(found, (y, 2 * y + 1, 3 * y, state))
    kinds = [leaf.sharding.memory_kind for leaf in found]
    assert kinds == ["pinned_host", "pinned_host", "device", "device"]
    assert_close(compiled(x, found[0])[0], x + y)  # takes a result in host memory directly
    peaks = [rank.peak_host_bytes for rank in compiled.cost_summary().ranks]
    assert peaks[0] >= 2 * state.nbytes // data and peaks[1] > 0
