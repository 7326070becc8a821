"""A mesh of workers that Ray starts trains exactly as one process does.

Time limits exist only to make hangs fail.
"""

from __future__ import annotations

import importlib
import os
import pathlib
import signal
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import trainings
import written
from equality import mesh_of
from jaxpp.remote.messages import Read, decode_answer, encode
from locations import ROOT
from ray_meshes import LIMIT, await_end, batch, make, processes_of, text_of, two_stages, weights

pytest.importorskip("ray")

SIZES = {"MICROBATCHES": 4, "BATCH": 8, "SEQUENCE": 8, "WIDTH": 16, "LAYERS": 4}  # for the demo

# --- Training -----------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ranks", "width", "problems"),
    [
        pytest.param(2, 1, "tied cast clipped hosted", marks=pytest.mark.soak),
        (4, 1, "mlp tied clipped"),
        (2, 2, "mlp stacked clipped hosted"),
    ],
)
def test_trains_as_one_process_does(
    ray_cluster: None, ranks: int, width: int, problems: str
) -> None:
    """Losses, parameters, state and both copies of tied weights are bitwise equal."""
    mesh = make(ranks, 1, width)
    here = mesh_of(ranks, {"data": 1, "model": width})
    for name in problems.split():
        assert list(trainings.train(name, mesh)) == list(trainings.train(name, here))
    mesh.shutdown()
    await_end(processes_of(mesh))


@pytest.mark.soak
def test_costs_are_those_of_one_process(ray_cluster: None) -> None:
    """The workers report the collectives and the memory of the tasks that they compiled."""

    def costs(mesh: Any) -> tuple[Any, ...]:
        step, *args = trainings.two_stages(mesh=mesh, in_specs=(P("model"), P()))
        compiled = step.compile(*args)
        return compiled.cost_summary(), compiled.explain(), compiled.memory_analysis()

    mesh = make(2, 2)
    found = costs(mesh)
    assert found == costs(mesh_of(2, {"model": 2}))
    assert {(c.rank, c.axes) for c in found[0].collectives} == {(0, "model"), (1, "model")}
    mesh.shutdown()


@pytest.mark.soak
@pytest.mark.own_devices
@pytest.mark.parametrize("width", [1, 2])
def test_programs_written_by_hand(ray_cluster: None, width: int) -> None:
    mesh = make(2, width, 1)
    expected = list(written.trained(mesh_of(2, {"data": width, "model": 1})))
    assert list(written.trained(mesh)) == expected
    mesh.shutdown()


@pytest.mark.soak
def test_prepared_from_shapes_with_activations_on_the_host(
    mesh2: jaxpp.RemoteMpmdMesh,
) -> None:
    results = []
    for mesh in mesh2, mesh_of(2, {}):
        step, ws, xs = trainings.two_stages(mesh=mesh, width=1024, offload=True)
        shapes = jax.eval_shape(lambda ws=ws, xs=xs: (ws, xs))
        peaks = step.prepare(*shapes).cost_summary().ranks
        assert peaks[0].peak_host_bytes > 0
        results.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(step(ws, xs))])
    assert results[0] == results[1]


@pytest.mark.soak
def test_the_demo_trains_as_in_one_process(
    mesh2: jaxpp.RemoteMpmdMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    demo = importlib.import_module("demo")
    for name, size in SIZES.items():
        monkeypatch.setattr(demo, name, size)

    def run(mesh: Any) -> list[bytes]:
        schedule = jaxpp.Std1F1B(2)
        step = jaxpp.mpmd_jit_with_loop(
            partial(demo.pipelined_step, schedule=schedule), mpmd_mesh=mesh, donate_argnums=0
        )
        state, losses = demo.init_state(2), []
        for _ in range(2):
            state, loss = step(state, demo.make_batch())
            losses.append(loss)
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((state, losses))]

    assert run(mesh2) == run(mesh_of(2, {}))


def test_calls_return_before_the_workers_are_done(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    """Two calls return although one worker is stopped and has run neither step."""
    step = two_stages(mesh2)
    state, loss = jax.block_until_ready(step(weights(), batch()))
    stopped = processes_of(mesh2)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        mine = batch()
        state, first = step(state, mine)
        mine[:] = np.nan  # arguments may be overwritten once the call has returned
        _, second = step(state, batch())
        assert not first.is_ready()
        assert not second.is_ready()
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert np.isfinite(float(second))
    assert jax.block_until_ready(first).is_ready()
    assert float(second) != float(first) != float(loss)


def test_a_step_that_waits(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    fun = two_stages(mesh2)._fun
    step = jaxpp.mpmd_jit_with_loop(fun, mesh2, steps_in_flight=0)
    assert step(weights(), batch())[1].is_ready()


def test_saved_and_loaded(mesh2: jaxpp.RemoteMpmdMesh, tmp_path: pathlib.Path) -> None:
    step = two_stages(mesh2).compile(weights(), batch())
    step.save(tmp_path / "plan")
    expected = float(step(weights(), batch())[1])
    for mesh in mesh2, mesh_of(2, {}):
        remote = mesh is mesh2
        loaded = jaxpp.load(tmp_path / "plan", mpmd_mesh=mesh if remote else None)
        assert float(loaded(weights(), batch())[1]) == expected


def test_a_schedule_that_is_found(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    """The workers measure the stages for `Auto`."""

    def step(weights: Any, xs: Any) -> Any:
        def loss(x: Any) -> Any:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
            return jaxpp.mark_stage_end(jnp.tanh(x @ weights[1])).sum()

        return jaxpp.treduce(loss, xs, jaxpp.Auto(), operation=jaxpp.Add)

    found = jaxpp.mpmd_jit_with_loop(step, mesh2)(weights(), batch())
    assert float(found) == float(
        jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}))(weights(), batch())
    )


# --- Arrays -------------------------------------------------------------------------------


def test_arrays_are_handles(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    (first, second), loss = two_stages(mesh2)(weights(), batch())
    assert isinstance(loss, jaxpp.ArrayRef)
    assert (first.mpmd_idxs, second.mpmd_idxs) == ((0,), (1,))
    assert first.shape == (4, 4)
    assert isinstance(second.first_mpmd_replica, jax.Array)
    first.delete()
    assert first.is_deleted()
    with pytest.raises(jaxpp.JaxppError, match="was deleted or donated"):
        np.asarray(first)


def test_arrays_are_put_on_several_ranks(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    mine = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    sharding = jaxpp.MpmdSharding(mesh2, (0, 1), P())
    (array,) = jaxpp.spmd_to_mpmd_reshard(mesh2, [mine], [sharding])
    expected, mine[:] = mine.copy(), 0
    copies = array.to_mpmd_local_array
    assert len(copies) == 2
    for copy in copies:
        np.testing.assert_array_equal(copy, expected)


def test_an_argument_that_is_on_another_rank_is_moved(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    def run(mesh: Any) -> list[bytes]:
        step = two_stages(mesh)
        (first, second), _ = step(weights(), batch())
        state, loss = step([second, first], batch())
        assert first.is_deleted()
        return [np.asarray(leaf).tobytes() for leaf in (*state, loss)]

    assert run(mesh2) == run(mesh_of(2, {}))


def test_arrays_move_between_workers_and_this_process(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    remote, local = two_stages(mesh2), two_stages(mesh_of(2, {}))
    there, _ = remote(weights(), batch())
    here, _ = local(weights(), batch())
    expected, loss = local(here, batch())
    here, _ = local(weights(), batch())
    for step, state in ((local, there), (remote, here)):
        found, same = step(state, batch())
        assert float(same) == float(loss)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        assert all(w.is_deleted() for w in state)


def test_an_array_is_deleted_while_others_read_it(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    """Readers get the contents or an error, and the mesh remains usable."""
    sharding = jaxpp.MpmdSharding(mesh2, (0, 1), P())
    arrays = jaxpp.spmd_to_mpmd_reshard(mesh2, [np.full(3, i) for i in range(60)], sharding)
    seen: list[Any] = []

    def read_all() -> None:
        for i, array in enumerate(arrays):
            try:
                seen.append(np.asarray(array).tolist() == [i] * 3)
            except jaxpp.JaxppError as error:
                seen.append(error)

    threads = [threading.Thread(target=read_all) for _ in range(3)]
    for thread in threads:
        thread.start()
    for array in reversed(arrays):
        array.delete()
        mesh2.workers.flush()
    for thread in threads:
        thread.join()
    errors = [found for found in seen if isinstance(found, Exception)]
    assert all(found is True or found in errors for found in seen) and len(seen) == 180
    assert all(error.code == "donated" for error in errors), errors
    assert np.isfinite(float(two_stages(mesh2)(weights(), batch())[1]))


def test_arrays_without_a_holder_are_freed_with_the_next_message(
    mesh2: jaxpp.RemoteMpmdMesh,
) -> None:
    sharding = jaxpp.MpmdSharding(mesh2, (0,), P())
    (array,) = jaxpp.spmd_to_mpmd_reshard(mesh2, [np.ones(3)], [sharding])
    assert np.asarray(array).sum() == array._value.sum() == 3
    number = array._values[0].number
    workers = mesh2.workers
    del array
    float(two_stages(mesh2)(weights(), batch())[1])
    lines = workers._cluster.connections
    asked = lines.send({0: (encode(Read(number, 0, 24)), [])})
    assert lines.wait(asked, LIMIT)
    failure = decode_answer(asked.found[0][0]).failure
    assert failure is not None and failure.code == "donated"


def test_task_times(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    step = two_stages(mesh2).compile(weights(), batch())
    with jaxpp.collect_task_times_ms() as times:
        step(weights(), batch())
    assert [len(times[name]) for name in ("fwd_0", "bwd_0", "fwd_1", "bwd_1")] == [8] * 4


def test_profiles_of_all_workers(mesh2: jaxpp.RemoteMpmdMesh, tmp_path: pathlib.Path) -> None:
    step = two_stages(mesh2).compile(weights(), batch())
    with pytest.raises(jaxpp.JaxppError, match=r"rank 0.*stop_trace: .*No profile"):
        mesh2.stop_trace()
    mesh2.start_trace(tmp_path)
    jax.block_until_ready(step(weights(), batch()))
    mesh2.stop_trace()
    for rank in range(2):
        (found,) = (tmp_path / f"process-{rank}").rglob("*.xplane.pb")
        assert b"fwd_%d" % rank in found.read_bytes()


def test_a_timeline_of_all_workers(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    """The steps of all workers share a time axis: tasks begin after their inputs are ready."""
    step = two_stages(mesh2).compile(weights(), batch())
    assert text_of(step.trace_json).startswith("invalid-argument: rank 0 ")
    step.set_tracing()
    state, _ = step(weights(), batch())
    step(state, batch())
    trainings.check_order(step.trace_json(2), steps=2)
    picture = step.draw_trace(60)
    assert "rank   0" in picture and "rank   1" in picture
    step(weights(), batch())  # the failed trace_json() has not broken the mesh
