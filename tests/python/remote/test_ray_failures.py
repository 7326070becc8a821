"""A mesh of workers that Ray starts reports which worker failed and leaves no process behind.

Time limits exist only to make hangs fail.
"""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import mesh_of
from locations import environment
from ray_meshes import (
    ENVIRONMENT,
    LIMIT,
    await_end,
    batch,
    make,
    processes_of,
    text_of,
    two_stages,
    weights,
)

pytest.importorskip("ray")


def donated_twice(mesh: Any) -> None:
    (first, _), _ = two_stages(mesh)(weights(), batch())
    two_stages(mesh)([first, first], batch())


def donated_before(mesh: Any) -> None:
    step = two_stages(mesh)
    state, _ = step(weights(), batch())
    step(state, batch())
    step(state, batch())


def deleted(mesh: Any) -> None:
    step = two_stages(mesh)
    state, _ = step(weights(), batch())
    state[1].delete()
    step(state, batch())


def nan(mesh: Any) -> None:
    with jax.debug_nans(True):
        two_stages(mesh)([w * np.nan for w in weights()], batch())


@pytest.mark.parametrize("mistake", [donated_twice, donated_before, deleted, nan])
def test_errors_are_those_of_one_process(
    mesh2: jaxpp.RemoteMpmdMesh, mistake: Callable[[Any], None]
) -> None:
    here = mesh_of(2, {})
    assert text_of(lambda: mistake(mesh2)) == text_of(lambda: mistake(here))
    assert np.isfinite(float(two_stages(mesh2)(weights(), batch())[1]))


def test_what_a_failed_step_was_given_is_gone(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    step = two_stages(mesh2)
    with jax.debug_nans(True):
        state, _ = step(weights(), batch())
        told = text_of(lambda: step(state, batch() * np.nan))
        assert told.startswith("nan: step 2: rank 0, ")
        assert text_of(lambda: step(weights(), batch())) == told
    assert "was donated to a step that failed" in text_of(lambda: np.asarray(state[0]))


def summing(mesh: Any, look: Callable[[Any], Any]) -> Any:
    """A step whose second stage replaces its input, four numbers, by the result of `look`."""

    def step(xs: Any) -> Any:
        def one(x: Any) -> Any:
            x = jaxpp.mark_stage_end(x * 2)
            jax.debug.print("saw {}", x[0])
            seen = jax.pure_callback(look, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
            return jaxpp.mark_stage_end(seen).sum()

        return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

    return jaxpp.mpmd_jit_with_loop(step, mesh)


def test_callbacks_run_on_the_workers(
    mesh2: jaxpp.RemoteMpmdMesh, tmp_path: pathlib.Path
) -> None:
    seen = tmp_path / "seen"

    def look(x: Any) -> Any:
        with seen.open("a") as file:
            file.write(f"{os.getpid()} {x.tolist()}\n")
        return x + 1

    xs = np.arange(8, dtype=np.float32).reshape(2, 4)
    step = summing(mesh2, look)
    for _ in range(2):
        assert float(step(xs)) == (2 * xs + 1).sum()
    second = processes_of(mesh2)[1]
    assert sorted(seen.read_text().splitlines()) == sorted(
        2 * [f"{second} {(2 * x).tolist()}" for x in xs]
    )


def test_a_step_is_done_while_the_next_ones_are_not(
    mesh2: jaxpp.RemoteMpmdMesh, tmp_path: pathlib.Path
) -> None:
    go_on = tmp_path / "go on"

    def look(x: Any) -> Any:
        end = time.monotonic() + LIMIT
        while x[0] > 2 and not go_on.exists() and time.monotonic() < end:
            time.sleep(0.01)
        return x

    step = summing(mesh2, look)
    zero, one, many = (np.full((2, 4), n, np.float32) for n in (0, 1, 5))
    assert float(step(zero)) == 0
    first, second, third = step(zero), step(one), step(many)
    assert jax.block_until_ready(second).is_ready() and first.is_ready()
    assert not third.is_ready()
    go_on.touch()
    assert float(third) == 80


def test_a_callback_that_raises(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    def look(x: Any) -> Any:
        raise ValueError("no such number")

    step = summing(mesh2, look)
    told = text_of(lambda: float(step(np.ones((2, 4), np.float32))))
    assert "rank 1, " in told
    assert "the callback raised ValueError: no such number (at " in told


def test_a_callback_that_can_not_be_sent(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    lock = threading.Lock()

    def look(x: Any) -> Any:
        with lock:
            return x

    told = text_of(lambda: summing(mesh2, look)(np.ones((2, 4), np.float32)))
    assert told.startswith("unsupported: task fwd_1 calls back into Python")
    assert "cannot be sent to its worker: TypeError: cannot pickle '_thread.lock'" in told


def train_until_failure(mesh: jaxpp.RemoteMpmdMesh, number: int) -> tuple[str, list[Any]]:
    """Sends the signal to the last rank after two steps; returns the text of the error and the
    state at that time."""
    step = two_stages(mesh)
    state: Any = weights()
    for _ in range(2):
        state, loss = step(state, batch())
    saved = [np.asarray(w) for w in state]
    float(loss)
    os.kill(processes_of(mesh)[1], number)

    def go_on() -> None:
        again = state
        for _ in range(4):
            again, loss = step(again, batch())
        float(loss)

    return text_of(go_on), saved


@pytest.mark.parametrize(
    ("number", "how"),
    [
        (signal.SIGKILL, "the worker has died"),
        pytest.param(signal.SIGSTOP, "the worker has not answered", marks=pytest.mark.soak),
    ],
)
def test_a_worker_that_is_gone_ends_the_mesh(
    ray_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    how: str,
) -> None:
    """One error names the worker, no process is left, and a new mesh resumes the training."""
    monkeypatch.setenv("JPP_PEER_TIMEOUT", "5")
    broken = make(2, 1)
    told, saved = train_until_failure(broken, number)
    processes = processes_of(broken)
    name = f"peer: rank 1 (host {os.uname().nodename}, process id {processes[1]}), "
    assert told.startswith(name)
    assert how in told
    assert text_of(lambda: two_stages(broken)(weights(), batch())) == told
    await_end(processes)

    monkeypatch.delenv("JPP_PEER_TIMEOUT")
    mesh = make(2, 1)
    losses = []
    for where in mesh, mesh_of(2, {}):
        step, state = two_stages(where), saved
        for _ in range(2):
            state, loss = step(state, batch())
            losses.append(float(loss))
    assert losses[:2] == losses[2:]
    mesh.shutdown()
    await_end(processes_of(mesh))


def test_arrays_of_a_mesh_that_was_shut_down(ray_cluster: None) -> None:
    mesh = make(2, 1)
    state, loss = two_stages(mesh)(weights(), batch())
    jax.block_until_ready(state)
    mesh.shutdown()
    told = (
        "the workers of this mesh were shut down; create the mesh again and continue from a "
        "checkpoint"
    )
    step = two_stages(mesh_of(2, {}))
    for use in lambda: step(state, batch()), lambda: float(loss):
        with pytest.raises(jaxpp.JaxppError, match=f"^{told}$"):
            use()


def test_workers_end_when_nothing_refers_to_the_mesh(ray_cluster: None) -> None:
    mesh = make(2, 1)
    step, state = two_stages(mesh), weights()
    for _ in range(3):  # the later ones take arrays of the workers
        state, loss = step(state, batch())
    assert np.isfinite(float(loss))
    processes = processes_of(mesh)
    del mesh, step, state, loss
    gc.collect()
    await_end(processes)


ENDLESS = """
import jax, ray
import jaxpp.api as jaxpp
import ray_meshes

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2**27,
         log_to_driver=False)
mesh = ray_meshes.make(2, 1)
step, state = ray_meshes.two_stages(mesh), ray_meshes.weights()
state, loss = step(state, ray_meshes.batch())
float(loss)
print(*ray_meshes.processes_of(mesh), flush=True)
while True:
    state, loss = step(state, ray_meshes.batch())
"""


@pytest.mark.sample(1)
def test_ctrl_c_in_the_controller_leaves_nothing() -> None:
    controller = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(pathlib.Path(__file__).parent, **ENVIRONMENT),
    )
    try:
        assert controller.stdout is not None
        processes = [int(p) for p in controller.stdout.readline().split()]
        assert len(processes) == 2
        controller.send_signal(signal.SIGINT)
        errors = controller.communicate(timeout=LIMIT)[1]
    finally:
        controller.kill()
    assert "KeyboardInterrupt" in errors
    await_end(processes)
