"""A mesh of workers that Ray starts: it trains exactly as one process does, says which worker
failed, and leaves no process behind.

Time limits are there only so that a hang fails.
"""

from __future__ import annotations

import gc
import importlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import jobs
from equality import mesh_of
from jaxpp.remote import cluster
from jaxpp.remote.connections import Connection, connect
from jaxpp.remote.messages import Read, decode_answer, encode
from locations import ROOT, environment

ray = pytest.importorskip("ray")

LIMIT = 60  # seconds
SIZES = {"MICROBATCHES": 4, "BATCH": 8, "SEQUENCE": 8, "WIDTH": 16, "LAYERS": 4}  # of the demo
# Ray writes a token to the home folder if it is given none.
ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}


def make(ranks: int, *shape: int, **options: Any) -> jaxpp.RemoteMpmdMesh:
    names = ("data", "model")[-len(shape) :]
    env = {"JPP_ADDRESS": "127.0.0.1", **options.pop("_env", {})}
    return jaxpp.RemoteMpmdMesh(ranks, shape, names, _env=env, **options)


def processes_of(mesh: jaxpp.RemoteMpmdMesh) -> list[int]:
    """The process ids of a mesh's workers."""
    return [process for _, process in mesh.processes]


def await_end(processes: list[int]) -> None:
    end = time.monotonic() + LIMIT
    while left := [p for p in processes if pathlib.Path(f"/proc/{p}").exists()]:
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=2**27,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def mesh2(ray_cluster: None) -> Iterator[jaxpp.RemoteMpmdMesh]:
    mesh = make(2, 1)
    yield mesh
    mesh.shutdown()
    await_end(processes_of(mesh))


def two_stages(mesh: Any) -> Callable[..., Any]:
    def loss(weights: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jaxpp.mark_stage_end(jnp.log(x @ weights[1])).sum()

    def step(weights: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            jaxpp.Std1F1B(2),
            operation=jaxpp.Add,
        )
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), total

    return jaxpp.mpmd_jit_with_loop(step, mesh, donate_argnums=0)


def weights() -> list[np.ndarray]:
    return [np.eye(4, dtype=np.float32)] * 2


def batch() -> np.ndarray:
    return np.ones((8, 2, 4), np.float32)


def text_of(run: Callable[[], Any]) -> str:
    with pytest.raises(jaxpp.JaxppError) as caught:
        run()
    return f"{caught.value.code}: {caught.value}"


# --- Training -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "width", "problems"),
    [(2, 1, "tied cast clipped"), (4, 1, "mlp tied clipped"), (2, 2, "mlp stacked clipped")],
)
def test_trains_as_one_process_does(
    ray_cluster: None, ranks: int, width: int, problems: str
) -> None:
    """Losses, parameters and state bit for bit, of tied weights both copies."""
    mesh = make(ranks, 1, width)
    here = mesh_of(ranks, {"data": 1, "model": width})
    for name in problems.split():
        assert list(jobs.train(name, mesh)) == list(jobs.train(name, here))
    mesh.shutdown()
    await_end(processes_of(mesh))


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
    """Two steps, of which a worker that is stopped does nothing yet."""
    step = two_stages(mesh2)
    state, loss = jax.block_until_ready(step(weights(), batch()))
    stopped = processes_of(mesh2)[1]
    os.kill(stopped, signal.SIGSTOP)
    try:
        mine = batch()
        state, first = step(state, mine)
        mine[:] = np.nan  # what a call has taken is the caller's again
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
    """Workers measure the stages."""

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


def test_an_array_is_deleted_while_others_read_it(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    """They get what it was, or an error; the mesh goes on."""
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
    number = array._memory.number
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


def test_a_timeline_of_all_workers(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    """Their steps on one axis: no microbatch is used before it is made."""
    step = two_stages(mesh2).compile(weights(), batch())
    assert text_of(step.trace_json).startswith("invalid-argument: rank 0 ")
    step.set_tracing()
    state, _ = step(weights(), batch())
    step(state, batch())
    jobs.check_order(step.trace_json(2), steps=2)
    picture = step.draw_trace(60)
    assert "rank   0" in picture and "rank   1" in picture
    step(weights(), batch())  # what could not be answered has ended nothing


# --- Failures -----------------------------------------------------------------------------


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
    """A step whose second stage calls `look` with four numbers, which gives others."""

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
    """Sends the signal to the last rank after two steps; the error, and the state of then."""
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
    [(signal.SIGKILL, "the worker has died"), (signal.SIGSTOP, "the worker has not answered")],
)
def test_a_worker_that_is_gone_ends_the_mesh(
    ray_cluster: None,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    how: str,
) -> None:
    """One error names it, no process is left, and a new mesh goes on with the same losses."""
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


def test_workers_end_when_nothing_refers_to_the_mesh(ray_cluster: None) -> None:
    mesh = make(2, 1)
    state, loss = two_stages(mesh)(weights(), batch())
    assert np.isfinite(float(loss))
    processes = processes_of(mesh)
    del mesh, state, loss
    gc.collect()
    await_end(processes)


ENDLESS = """
import jax, ray
import jaxpp.api as jaxpp
import test_ray

ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=2**27,
         log_to_driver=False)
mesh = test_ray.make(2, 1)
step, state = test_ray.two_stages(mesh), test_ray.weights()
state, loss = step(state, test_ray.batch())
float(loss)
print(*test_ray.processes_of(mesh), flush=True)
while True:
    state, loss = step(state, test_ray.batch())
"""


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


# --- Bad input ----------------------------------------------------------------------------

MESHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no rank": (lambda: make(0, 1), "mesh: RemoteMpmdMesh: pp=0; expected a number of ranks"),
    "no number of ranks": (lambda: make(True, 1), "mesh: RemoteMpmdMesh: pp=True; expected"),
    "no sizes": (
        lambda: jaxpp.RemoteMpmdMesh(2, (0,), ("data",)),
        "mesh: RemoteMpmdMesh: mesh_shape=(0,); expected the axis sizes of one rank's mesh",
    ),
    "names and sizes": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1, 2), ("data",)),
        "mesh: RemoteMpmdMesh: mesh_axis_names=('data',) for mesh_shape=(1, 2); expected",
    ),
    "a name twice": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1, 2), ("data", "data")),
        "mesh: RemoteMpmdMesh: mesh_axis_names=('data', 'data') for",
    ),
    "the pipeline's name": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1,), ("mpmd",)),
        "mesh: RemoteMpmdMesh: mesh_axis_names=('mpmd',): 'mpmd' is reserved",
    ),
    "modules": (
        lambda: make(2, 1, import_modules="numpy"),
        "invalid-argument: RemoteMpmdMesh: import_modules='numpy'; expected a list",
    ),
    "options": (
        lambda: make(2, 1, ray_options=[1]),
        "invalid-argument: RemoteMpmdMesh: ray_options=[1]; expected a dict",
    ),
    "environment": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1,), ("data",), _env={"A": 1}),
        "invalid-argument: RemoteMpmdMesh: _env={'A': 1}; expected a dict",
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_refused_before_ray_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "Cluster", None)
    mesh, expected = MESHES[name]
    assert text_of(mesh).startswith(expected)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    told = text_of(lambda: make(2, 1))
    assert told == (
        'unsupported: RemoteMpmdMesh: Ray is not installed; pip install "jaxpp-c[ray]"'
    )


def test_jaxpp_does_not_import_ray() -> None:
    code = "import sys, jaxpp; assert jaxpp.RemoteMpmdMesh and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=LIMIT)


def test_a_cluster_without_the_resources(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = text_of(lambda: make(2, 1, ray_options={"num_gpus": 1}))
    assert told.startswith(
        "devices: RemoteMpmdMesh: expected a Ray cluster with resources for 2 workers of "
        "{'CPU': 1.0, 'GPU': 1.0} each, found resources for 0 (nodes: {'CPU': 8.0, 'GPU': 0})"
    )
    monkeypatch.setattr(cluster, "_PLACE_SECONDS", 1)
    mesh = make(1, 1, ray_options={"num_cpus": 5})
    told = text_of(lambda: make(1, 1, ray_options={"num_cpus": 8}))
    assert "within 1 s because other processes use them; free: {'CPU': " in told
    mesh.shutdown()


def test_a_module_that_a_worker_does_not_have(ray_cluster: None) -> None:
    told = text_of(lambda: make(1, 1, import_modules=["json", "no_such_module"]))
    assert told == (
        "invalid-argument: RemoteMpmdMesh: the worker of rank 0: import_modules: "
        "no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_worker_that_raises_as_it_imports(ray_cluster: None, tmp_path: pathlib.Path) -> None:
    (tmp_path / "raising_module.py").write_text("raise ValueError('of the user')\n")
    options = {
        "import_modules": ["raising_module"],
        "_env": {"PYTHONPATH": path_with(tmp_path)},
    }
    told = text_of(lambda: make(1, 1, **options))
    assert told.endswith("import_modules: raising_module: ValueError: of the user")


def path_with(folder: pathlib.Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_a_worker_with_another_version(ray_cluster: None, tmp_path: pathlib.Path) -> None:
    package = pathlib.Path(jaxpp.__file__).parent
    (tmp_path / "jaxpp").mkdir()
    for entry in package.iterdir():
        if entry.name not in ("__init__.py", "__pycache__"):
            (tmp_path / "jaxpp" / entry.name).symlink_to(entry)
    changed = (package / "__init__.py").read_text() + "\n__version__ = '0.0.1'\n"
    (tmp_path / "jaxpp" / "__init__.py").write_text(changed)
    told = text_of(lambda: make(1, 1, _env={"PYTHONPATH": path_with(tmp_path)}))
    assert "the worker of rank 0 (host " in told
    assert " has jaxpp 0.0.1; expected " in told


def test_a_worker_that_can_not_be_reached(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(host: str, port: int, token: bytes) -> Connection:
        return connect(host, port, token[:-1])

    monkeypatch.setattr(cluster, "connect", refused)
    told = text_of(lambda: make(1, 1))
    assert told.startswith(
        "peer: RemoteMpmdMesh: the controller cannot connect to rank 0 (host "
    )
    assert "the listener does not know the token" in told


def test_a_worker_whose_plugin_is_missing(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    step = jaxpp.mpmd_jit_with_loop(two_stages(mesh2)._fun, mesh2, plugin="/no/plugin.so")
    told = text_of(lambda: step(weights(), batch()))
    assert told.startswith("plugin: rank 0 (host ")
    assert "/no/plugin.so" in told
