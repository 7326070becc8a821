"""Scripts for several processes, which test_processes.py starts with `jaxpp launch`.

`python jobs.py JOB[,JOB...] DEVICES MARK` has DEVICES in each process; the test finds the
processes by MARK. A job prints what its test looks for. Several jobs run one after the other,
and each prints its name first.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import jaxpp.api as jaxpp
import written
from equality import mesh_of, pipelined_step
from jaxpp import _core
from jaxpp.client import devices, nodes, processes
from jaxpp.placements import Part
from jaxpp.run.arguments import Argument, source_of
from trainings import (
    costs,
    descent,
    local_ranks,
    mesh_of_all,
    problems,
    relaid,
    saved_and_loaded,
    say,
    sums_of_types,
    train,
    train_all,
    two_stages,
    unequal_mesh,
)

# --- Training -----------------------------------------------------------------------------


def train_on(mesh: Any) -> None:
    for line in train_all(mesh):
        say(line)


def unequal(folder: str) -> None:
    mesh = unequal_mesh(jax.devices())
    train_on(mesh)
    own = pathlib.Path(folder, "unequal")
    own.mkdir(exist_ok=True)
    for line in saved_and_loaded(mesh, str(own)):
        say(line)


def saved(folder: str) -> None:
    for line in saved_and_loaded(mesh_of_all(2), folder):
        say(line)


def types() -> None:
    for line in sums_of_types(mesh_of_all(2)):
        say(line)


def resharded() -> None:
    """Moves arrays from a mesh of all processes to ranks and back; all processes hold rows."""
    mesh = mesh_of_all(2)
    width = mesh.unstack[0].size
    sizes = jax.sharding.Mesh(mesh.jax_mesh.devices.reshape(2, width), ("stage", "data"))
    mesh = jaxpp.MpmdMesh(sizes, "stage")
    rows = NamedSharding(mesh.jax_mesh, PartitionSpec(("stage", "data")))
    numbers = np.arange(48).reshape(8, 6) % 5
    host = {name: numbers.astype(name) for name in ("float32", "int8", "bool")}
    big = {
        k: jax.make_array_from_callback((8, 6), rows, x.__getitem__) for k, x in host.items()
    }
    for ranks in ((0,), (1,), (0, 1)):
        where = jaxpp.MpmdSharding(mesh, ranks, PartitionSpec("data"))
        there = jaxpp.spmd_to_mpmd_reshard(mesh, big, where)
        back = jaxpp.mpmd_to_spmd_reshard(mesh, there, rows)
        for name, x in host.items():
            own = [np.asarray(a) for a in there[name]._partially_addressable_arrays.values()]
            assert all((a == x).all() for a in own), (name, ranks)
            assert len(own) == (jax.process_index() in ranks), (name, ranks)
            assert back[name].sharding == rows and back[name].dtype == name
            assert all((s.data == x[s.index]).all() for s in back[name].addressable_shards)
    reshard_stacked(mesh)
    say("resharded")


def reshard_stacked(mesh: jaxpp.MpmdMesh) -> None:
    """Gathers a leaf whose rows are on several ranks, a key, and an array of JAX."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for row in range(2):
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w[row]))
        return jnp.mean(x**2)

    def step(w: jax.Array, xs: jax.Array, key: jax.Array) -> Any:
        grad = jaxpp.treduce(
            lambda x: jax.grad(loss)(w, x), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add
        )
        return w - grad, jax.random.split(key)[0]

    args = (np.eye(4, dtype=np.float32)[None].repeat(2, 0), np.ones((4, 2, 4), np.float32))
    made = jaxpp.mpmd_jit_with_loop(step, mesh)(*args, jax.random.key(3))
    assert len(made[0].mpmd_idxs) == 2
    everywhere = NamedSharding(mesh.jax_mesh, PartitionSpec())
    w, key, ones = jaxpp.mpmd_to_spmd_reshard(mesh, (*made, np.ones(3)), everywhere)
    plain = jax.jit(step)(*args, jax.random.key(3))
    for shard in w.addressable_shards:
        np.testing.assert_allclose(shard.data, plain[0], rtol=1e-5)
    for shard in key.addressable_shards:
        np.testing.assert_array_equal(
            jax.random.key_data(shard.data), jax.random.key_data(plain[1])
        )
    assert ones.sharding == everywhere


def by_hand() -> None:
    for line in written.trained(mesh_of(2, {"data": len(jax.devices()) // 2})):
        say(line)


def relay_out() -> None:
    for line in relaid(mesh_of(2, {"data": 2, "model": 2})):
        say(line)


def costed() -> None:
    for line in costs(mesh_of_all(2)):
        say(line)


def traced(folder: str) -> None:
    """Each process writes its trace of the second step."""
    step, weights, xs = two_stages()
    compiled = step.compile(weights, xs)
    compiled(weights, xs)
    compiled.set_tracing()
    compiled(weights, xs)
    path = pathlib.Path(folder, f"trace-{jax.process_index()}.json")
    path.write_text(compiled.trace_json())


def profiled(folder: str) -> None:
    """All processes write profiles to one folder at the same time."""
    step, weights, xs = two_stages()
    jax.block_until_ready(step(weights, xs))
    with jax.profiler.trace(folder):
        jax.block_until_ready(step(weights, xs))


def idle() -> None:
    """How often the library's threads wake up while no step runs, in a second, by name."""
    steps = [two_stages() for _ in range(3)]
    for step, weights, xs in steps:
        jax.block_until_ready(step(weights, xs))
    before, start = wake_ups(), time.monotonic()
    time.sleep(1)
    after, seconds = wake_ups(), time.monotonic() - start
    for thread, (name, count) in after.items():
        say(name, (count - before[thread][1]) / seconds)


def wake_ups() -> dict[str, tuple[str, int]]:
    """The name of each thread of the library, and how often it has gone to sleep."""
    found = {}
    for thread in pathlib.Path("/proc/self/task").iterdir():
        try:
            status = (thread / "status").read_text()
        except OSError:  # a thread of JAX that has ended
            continue
        fields = dict(re.findall(r"^(\w+):\s*(.*)$", status, re.M))
        if fields["Name"].startswith("jpp-"):
            found[thread.name] = fields["Name"], int(fields["voluntary_ctxt_switches"])
    return found


def left() -> None:
    """A step creates the weights on the ranks that use them; all processes get the loss."""
    mesh = mesh_of_all(2)
    everywhere = jaxpp.MpmdSharding(mesh, range(2), PartitionSpec())
    step, _, xs = two_stages(out_shardings=(None, everywhere))

    def init(key: Any) -> Any:
        return [jax.random.normal(k, (4, 4)) for k in jax.random.split(key)]

    key = jax.random.key(0)
    where = step.compile(jax.eval_shape(init, key), xs).compiled.in_shardings[0][0]
    weights = jaxpp.mpmd_jit_with_loop(init, mesh, out_shardings=where)(key)
    say("made on", *(w.mpmd_idxs for w in weights), *(w.is_fully_addressable for w in weights))
    for _ in range(3):
        weights, total = step(weights, xs)
        say("loss", float(total))


# --- Failures -----------------------------------------------------------------------------


def on_the_way(then: Callable[[], None]) -> None:
    """Trains forever; the last process calls `then` after a few steps."""
    step, weights, xs = two_stages()
    i = 0
    while True:
        weights, _ = step(weights, xs)
        i += 1
        if i == 5:
            say("training")
            if jax.process_index() == jax.process_count() - 1:
                then()


def killed() -> None:
    on_the_way(lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped_of_three() -> None:
    """Stops the last process, which has the losses."""
    for _ in train("mlp", mesh_of_all(3), steps=10000):
        os.kill(os.getpid(), signal.SIGSTOP)


def busy() -> None:
    """The last process makes the others wait for longer than the timeout for dead peers."""
    step, weights, xs = two_stages()
    for i in range(4):
        weights, total = step(weights, xs)
        if i == 1 and jax.process_index() == 1:
            time.sleep(2.5)
    if local_ranks(total):
        say("trained", float(total))


def delayed(seconds: float | None, last: int) -> Any:
    """Trains `last` steps. A task of the middle rank blocks in a callback once, forever if
    `seconds` is None."""
    calls = itertools.count()

    def look(_: Any) -> None:
        if next(calls) == 40:  # in the sixth step
            threading.Event().wait(seconds)

    def loss(weights: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
        x = jnp.tanh(x @ weights[1])
        jax.debug.callback(look, x[0, 0])
        x = jaxpp.mark_stage_end(x)
        return jaxpp.mark_stage_end(jnp.tanh(x @ weights[2])).sum()

    step = jaxpp.mpmd_jit_with_loop(descent(loss, jaxpp.Std1F1B(3)), mesh_of_all(3))
    weights, xs = [np.eye(4, dtype=np.float32)] * 3, np.ones((8, 2, 4), np.float32)
    for _ in range(last):
        weights, total = step(weights, xs)
        if local_ranks(total):
            float(total)
    return total


def hanging() -> None:
    delayed(None, 100)


def slow_task() -> None:
    total = delayed(3, 10)
    if local_ranks(total):
        say("trained", float(total))


def raising() -> None:
    def fail() -> None:
        raise ValueError("of the user")

    on_the_way(fail)


def training() -> None:
    on_the_way(lambda: None)


def training_all() -> None:
    """Trains forever, with a rank per process; prints a line after a few steps."""
    name, ranks = "mlp", jax.process_count()
    problem, mesh = problems(ranks)[name], mesh_of_all(ranks)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(ranks)), mpmd_mesh=mesh, donate_argnums=(0, 1)
    )
    params, state = problem.params, problem.optimizer.init(problem.params)
    for i in itertools.count():
        params, state, _, _ = step(params, state, problem.batch)
        if i == 3:
            say("training as", os.getpid())


def raising_late() -> None:
    """A task of process 0 fails, which the others report before process 0 does."""
    jax.config.update("jax_debug_nans", True)
    step, weights, xs = two_stages()
    try:
        step(weights, xs * np.nan)
    except FloatingPointError:
        time.sleep(2 if jax.process_index() == 0 else 0)
        raise


def raising_early() -> None:
    """Process 1 raises before its first step, while the others wait for it."""
    step, weights, xs = two_stages()
    if jax.process_index() == 1:
        raise ValueError("of the user")
    step(weights, xs)


def killed_once() -> None:
    """Is killed in the first run, and completes the training when it is restarted."""
    if os.environ["JPP_RESTART"] == "0":
        killed()
    for line in train("mlp", mesh_of_all(2)):
        say(line)


def other_shape() -> None:
    step, weights, xs = two_stages(width=4 + jax.process_index())
    step(weights, xs)


def other_schedule() -> None:
    schedule = [jaxpp.Std1F1B, jaxpp.GPipe][jax.process_index()](2)
    step, weights, xs = two_stages(schedule)
    step(weights, xs)


def differing(rate: float = 0.1, captured: float = 1.0, **options: Any) -> None:
    """Runs a step that contains a literal number and closes over an array."""
    scale = np.full(4, captured, np.float32)

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w) * scale)
        return jnp.mean(x)

    step = jaxpp.mpmd_jit_with_loop(
        descent(loss, jaxpp.Std1F1B(2), rate), mesh_of_all(2), **options
    )
    step([np.eye(4, dtype=np.float32)] * 2, np.ones((4, 2, 4), np.float32))


def other_number() -> None:
    differing(rate=[0.1, 0.2][jax.process_index()])


def other_constant() -> None:
    differing(captured=[1.0, 2.0][jax.process_index()])


def other_donation() -> None:
    differing(donate_argnums=[(), 0][jax.process_index()])


def other_options() -> None:
    flag = "xla_cpu_enable_fast_math"
    differing(compiler_options={flag: [True, False][jax.process_index()]})


def missing_step() -> None:
    """Only the first process creates the step."""
    step, weights, xs = two_stages()
    if jax.process_index() == 0:
        step(weights, xs)


def late_step() -> None:
    """The first process waits only a second for the other, which is busy for longer."""
    processes._TIMEOUT_MS = 1000
    if jax.process_index() == 1:
        time.sleep(8)
        return
    step, weights, xs = two_stages()
    step(weights, xs)


def moved_argument() -> None:
    """Passes each rank's result as the argument of the other rank."""
    step, weights, xs = two_stages()
    (first, second), _ = step(weights, xs)
    step([second, first], xs)


def alternating_rows() -> None:
    """Follows the error's advice for layers in one array whose stages alternate."""
    mesh = mesh_of_all(2)

    def loss(weights: Any, x: Any) -> Any:
        return jnp.sum(jaxpp.stages(lambda w, x: jnp.tanh(x @ w), weights, x, 4))

    step = jaxpp.mpmd_jit_with_loop(descent(loss, jaxpp.Interleaved1F1B(4, 2)), mesh)
    weights, xs = np.ones((4, 4, 4), np.float32), np.ones((4, 2, 4), np.float32)
    own = step.compile(weights, xs).in_shardings[0][0]
    copies = jaxpp.MpmdSharding(mesh, range(2), PartitionSpec())
    for where in own, copies:
        array = jax.make_array_from_callback(weights.shape, where, lambda at: weights[at])
        try:
            say("trained", jax.block_until_ready(step(array, xs))[0].shape)
        except jaxpp.JaxppError as error:
            say("told", error)


def spread_rank() -> None:
    step, weights, xs = two_stages()
    step(weights, xs)


def nodes_of_a_rank() -> None:
    """Prints how a process sees ranks that span processes. The plugin can only list devices."""
    mesh = mesh_of(2, {"data": 2})
    owners = [d.process_index for rank in range(2) for d in mesh.devices_of(rank)]
    me = jax.process_index()
    parts = processes.Processes(_core.job_divide_ranks(owners, 2, me, False, False))
    client = nodes.client_of_node(os.environ["NODES_PLUGIN"], {"visible_devices": [0]})
    there = devices.NodeDevices(client, mesh, parts)
    numbers = [there.assignment(rank) for rank in range(2)]
    say("processes", parts.rank_process, "places", list(there.places))
    say("ids", there.ids, "numbers", numbers, "here", there.indices)
    say(
        "sizes",
        there.per_rank,
        there.rank_size,
        there.of_rank(mesh, me // 2) == mesh.jax_mesh.local_devices,
    )
    by_data = NamedSharding(mesh.unstack[me // 2], PartitionSpec("data"))
    mine = jnp.full((2, 6), float(me))
    spread = jax.make_array_from_single_device_arrays((4, 6), by_data, [mine])
    for spec in PartitionSpec("data"), PartitionSpec(None, "data"), PartitionSpec():
        aval = jax.ShapeDtypeStruct((4, 6), jnp.float32)
        placed = Part(there, mesh, aval, [0, 1], spec, "device")
        index = [[(s.start, s.stop) for s in part] for part in placed.slices]
        say("spec", spec, placed.local_ranks, index, placed.shard_shape)
        argument, source = Argument(placed, "x", donated=True), source_of(spread, there, mesh)
        try:
            blocks = argument._wanted.decide(source.given, None, False).blocks
            say("shards", [source.host(block, "float32").tolist() for block in blocks])
        except jaxpp.JaxppError:
            say("shards", [])
        try:
            placed._check_whole(0)
        except jaxpp.JaxppError as error:
            say(error)
    other = nodes.client_of_node(os.environ["NODES_PLUGIN"], {"visible_devices": [0, 1]})
    devices.NodeDevices(other, mesh, parts)


def no_copy() -> None:
    step, weights, xs = two_stages()
    weights, _ = step(weights, xs)
    first, second = (tuple(w.mpmd_idxs) for w in weights)
    say("ranks", first, second)
    here, there = weights if jax.process_index() == 0 else weights[::-1]
    assert here.is_fully_addressable and not there.is_partially_addressable
    assert [shard.data is None for shard in there.global_shards] == [True]
    assert len(here.addressable_shards) == 1 and there.addressable_shards == []
    assert str(here).startswith("[[") and str(there) == f"{there}" == repr(there)
    try:
        np.asarray(there)
    except jaxpp.JaxppError as error:
        assert "which holds no copy" in str(error)
    jax.jit(jnp.sum)(there)


def put_from_a_device() -> None:
    """JAX 0.10.2 cannot list the shards of this array; other versions may."""
    step, weights, xs = two_stages()
    everywhere = NamedSharding(mesh_of_all(2).jax_mesh, PartitionSpec())
    try:
        weights, _ = step(weights, jax.device_put(jnp.asarray(xs), everywhere))
        say("taken")
    except jaxpp.JaxppError as error:
        say(error)
    jax.block_until_ready(step([np.eye(4, dtype=np.float32)] * 2, xs))
    say("went on")


JOBS: dict[str, Callable[[], None]] = {
    "train2": lambda: train_on(mesh_of_all(2)),
    "train4": lambda: train_on(mesh_of_all(4)),
    "train8": lambda: train_on(mesh_of_all(8)),
    "saved": lambda: saved(sys.argv[3]),
    "unequal": lambda: unequal(sys.argv[3]),
    "traced": lambda: traced(sys.argv[3]),
    "profiled": lambda: profiled(sys.argv[3]),
    **{
        job.__name__: job
        for job in (
            types,
            by_hand,
            resharded,
            relay_out,
            killed,
            stopped_of_three,
            busy,
            hanging,
            slow_task,
            raising,
            raising_late,
            raising_early,
            training,
            training_all,
            killed_once,
            other_shape,
            other_number,
            other_constant,
            other_donation,
            other_options,
            other_schedule,
            missing_step,
            late_step,
            spread_rank,
            nodes_of_a_rank,
            moved_argument,
            alternating_rows,
            no_copy,
            left,
            idle,
            costed,
            put_from_a_device,
        )
    },
}

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    jax.distributed.initialize()
    names = sys.argv[1].split(",")
    for name in names:
        if len(names) > 1:
            say("job", name)
        JOBS[name]()
