"""Scripts of several processes: test_processes.py starts them with `jaxpp launch`.

`python jobs.py JOB DEVICES MARK`, with DEVICES a process; MARK is for the test to find the
processes by. A job prints what its test looks for. Tests also import this module, to train
the same in one process.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpp.api as jaxpp
import models
from equality import mesh_of, pipelined_step, usual_specs
from jaxpp.placements import Placement, physical_array
from jaxpp.run import devices, nodes, processes

STEPS = 3
MICROBATCHES = 4


def say(*words: Any) -> None:
    print(*words, flush=True)


# --- Training -----------------------------------------------------------------------------


def local_ranks(array: Any) -> list[int]:
    """The ranks of this process that have it."""
    mesh, me = array.sharding.mpmd_mesh, jax.process_index()
    return [r for r in array.mpmd_idxs if mesh.devices_of(r)[0].process_index == me]


def described(name: str, tree: Any) -> Iterator[str]:
    """A line with the exact bytes, hashed, of each copy that this process has."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        ranks = local_ranks(array)
        if not ranks:
            continue
        copies = array.to_mpmd_local_array
        for rank, copy in zip(ranks, copies if len(ranks) > 1 else [copies], strict=True):
            digest = hashlib.sha256(np.asarray(physical_array(copy)).tobytes()).hexdigest()[:16]
            yield f"{name}{jax.tree_util.keystr(path)} rank {rank} {digest}"


def tied_mlp(stages: int) -> Any:
    """An MLP whose last stage has the first stage's weights once more."""
    problem = models.mlp([1] * stages, MICROBATCHES)
    of_mlp = problem.loss
    problem.loss = lambda params, *rest: of_mlp([*params, params[0]], *rest)
    problem.params = problem.params[:-1]
    return problem


def cast_mlp(stages: int) -> Any:
    """The same in bfloat16: the shared weights are cast once for both uses, so that their
    gradient is one sum of the loop, and one rank updates them."""
    problem = tied_mlp(stages)
    in_float32 = problem.loss

    def loss(params: Any, *rest: Any) -> Any:
        return in_float32(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), *rest)

    problem.loss = loss
    return problem


def stacked_mlp(stages: int) -> Any:
    """An MLP whose layers are rows of one leaf: each rank has its own."""
    problem = models.mlp([2] * stages, MICROBATCHES)

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"]
        for row in range(2 * stages):
            x = models.layer({name: leaf[row] for name, leaf in params.items()}, x)
            x = mark(x) if row % 2 else x
        return models.mse(x, mb["y"]), ()

    problem.loss = loss
    problem.params = jax.tree.map(lambda *ws: np.stack(ws), *problem.params)
    return problem


def problems(stages: int) -> dict[str, Any]:
    made = {
        "mlp": models.mlp([1] * stages, MICROBATCHES),
        "tied": tied_mlp(stages),
        "stacked": stacked_mlp(stages),
    }
    for problem in made.values():
        problem.optimizer = optax.sgd(0.1)
    made["cast"] = cast_mlp(stages)
    made["cast"].optimizer = optax.sgd(0.1)
    made["clipped"] = models.mlp([1] * stages, MICROBATCHES)
    made["clipped"].optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    return made


def train(name: str, mesh: Any, steps: int = STEPS) -> Iterator[str]:
    """Losses as they come, then parameters and optimizer state."""
    problem = problems(mesh.mpmd_dim)[name]
    options = {}
    if mesh.lowering_mesh().size > 1:
        options["in_specs"] = usual_specs(problem, mesh)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(mesh.mpmd_dim)),
        mpmd_mesh=mesh,
        donate_argnums=(0, 1),
        **options,
    )
    params, state = problem.params, problem.optimizer.init(problem.params)
    for i in range(steps):
        params, state, loss, _ = step(params, state, problem.batch)
        if local_ranks(loss):
            yield f"{name} loss {i} {float(loss).hex()}"
    yield from described(f"{name} params", params)
    yield from described(f"{name} state", state)


def mesh_of_all(ranks: int) -> Any:
    width = len(jax.devices()) // ranks
    return mesh_of(ranks, {} if width == 1 else {"model": width})


def train_all(ranks: int) -> None:
    mesh = mesh_of_all(ranks)
    for name in problems(ranks):
        for line in train(name, mesh):
            say(line)


def saved_and_loaded(mesh: Any, folder: str) -> Iterator[str]:
    """What a step gives that was saved by this process, and loaded by it."""
    step, weights, xs = two_stages(mesh=mesh)
    path = os.path.join(folder, f"step{jax.process_index()}.plan")
    step.compile(weights, xs).save(path)
    yield from described("loaded", jaxpp.load(path, mpmd_mesh=mesh)(weights, xs))


def saved(folder: str) -> None:
    for line in saved_and_loaded(mesh_of_all(2), folder):
        say(line)


TYPES = (
    "bool int2 int4 int8 int32 uint2 uint4 uint16 "
    "float8_e4m3fn bfloat16 float16 float32 complex64"
).split()


def sum_by_way_of(dtype: Any, xs: Any) -> Any:
    """The second stage gets numbers of that type from the first."""

    def one(x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.floor(x).astype(dtype))
        return jaxpp.mark_stage_end(jnp.real(x.astype(jnp.complex64)).sum())

    return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)


def sums_of_types(mesh: Any) -> Iterator[str]:
    """Of odd sizes."""
    xs = np.random.default_rng(0).uniform(0, 3, (MICROBATCHES, 3, 5)).astype(np.float32)
    for name in TYPES:
        total = functools.partial(sum_by_way_of, jnp.dtype(name))
        result = jaxpp.mpmd_jit_with_loop(total, mpmd_mesh=mesh)(xs)
        if local_ranks(result):
            yield f"{name} {float(result)}"


def types() -> None:
    for line in sums_of_types(mesh_of_all(2)):
        say(line)


P = PartitionSpec
# How stage 0 lays its result over the four devices of a rank, and how stage 1 wants it.
RELAID = (
    (P(("data", "model")), P("data")),  # 4 shards to 2
    (P("data"), P(("data", "model"))),  # 2 to 4
    (P("data", "model"), P("model", "data")),
    (P(None, "model"), P("data")),
    (P(), P(None, ("model", "data"))),
    (P(("model", "data")), P()),
)


def relaid(mesh: Any) -> Iterator[str]:
    """Losses and gradients where the stages lay values out differently."""
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=(8, 8)).astype(np.float32) for _ in range(2)]
    xs = rng.normal(size=(MICROBATCHES, 8, 8)).astype(np.float32)
    for number, (made, wanted) in enumerate(RELAID):

        def loss(ws: Any, x: Any, made: P = made, wanted: P = wanted) -> Any:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ ws[0]), made)
            x = jax.lax.with_sharding_constraint(jaxpp.mark_stage_end(x), wanted)
            return jaxpp.mark_stage_end(jnp.tanh(x @ ws[1])).sum()

        def step(ws: Any, xs: Any, loss: Any = loss) -> Any:
            one = functools.partial(jax.value_and_grad(loss), ws)
            return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)

        yield from described(
            f"relaid{number} ", jaxpp.mpmd_jit_with_loop(step, mesh)(weights, xs)
        )


def relay_out() -> None:
    for line in relaid(mesh_of(2, {"data": 2, "model": 2})):
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
    """All processes into one folder, at the same time."""
    step, weights, xs = two_stages()
    jax.block_until_ready(step(weights, xs))
    with jax.profiler.trace(folder):
        jax.block_until_ready(step(weights, xs))


def check_order(trace: str, steps: int) -> None:
    """That in a trace of two_stages() on one host no task begins before those that made what
    it takes have ended."""
    runs = [event for event in json.loads(trace)["traceEvents"] if event["ph"] == "X"]
    for microbatch in range(8):
        found = [
            [run for run in runs if run["name"] == f"{task}__{microbatch}"]
            for task in ("fwd_0", "fwd_1", "bwd_1", "bwd_0")
        ]
        for step in range(steps):
            in_order = [sorted(of_task, key=lambda run: run["ts"])[step] for of_task in found]
            for first, second in itertools.pairwise(in_order):
                assert first["ts"] + first["dur"] <= second["ts"], (first, second)
        assert [len(of_task) for of_task in found] == [steps] * 4


# --- Failures -----------------------------------------------------------------------------


def two_stages(
    schedule: Any = None, width: int = 4, mesh: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """A step, its weights and its batch."""

    def loss(weights: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jaxpp.mark_stage_end(jnp.tanh(x @ weights[1])).sum()

    def step(weights: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule or jaxpp.Std1F1B(2),
            operation=jaxpp.Add,
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), total

    weights = [np.eye(width, dtype=np.float32)] * 2
    xs = np.ones((8, 2, width), np.float32)
    return jaxpp.mpmd_jit_with_loop(step, mesh or mesh_of_all(2), **options), weights, xs


def left() -> None:
    """Weights that a step makes where they belong, and a loss that all processes have."""
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


def on_the_way(then: Callable[[], None]) -> None:
    """Trains without end; the last process does `then` after a few steps."""
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
    """The last process, which has the losses."""
    for _ in train("mlp", mesh_of_all(3), steps=10000):
        os.kill(os.getpid(), signal.SIGSTOP)


def busy() -> None:
    """The last process lets the others wait for longer than a silent one may be silent."""
    step, weights, xs = two_stages()
    for i in range(4):
        weights, total = step(weights, xs)
        if i == 1 and jax.process_index() == 1:
            time.sleep(2.5)
    if local_ranks(total):
        say("trained", float(total))


def delayed(seconds: float | None, last: int) -> Any:
    """Trains `last` steps. A task of the middle rank waits in a callback once, for ever if
    `seconds` is None."""
    calls = itertools.count()

    def look(_: Any) -> None:
        if next(calls) == 40:  # of the sixth step
            threading.Event().wait(seconds)

    def loss(weights: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
        x = jnp.tanh(x @ weights[1])
        jax.debug.callback(look, x[0, 0])
        x = jaxpp.mark_stage_end(x)
        return jaxpp.mark_stage_end(jnp.tanh(x @ weights[2])).sum()

    def train(weights: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            jaxpp.Std1F1B(3),
            operation=jaxpp.Add,
        )
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), total

    step = jaxpp.mpmd_jit_with_loop(train, mesh_of_all(3))
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
    """As many ranks as processes; says when it is on the way."""
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


def raising_early() -> None:
    """Before its first step, for which the others wait."""
    step, weights, xs = two_stages()
    if jax.process_index() == 1:
        raise ValueError("of the user")
    step(weights, xs)


def killed_once() -> None:
    """Trains to its end when it is started again."""
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
    """A step with a number written in it and an array that it closes over."""
    scale = np.full(4, captured, np.float32)

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jaxpp.mark_stage_end(jnp.tanh(x @ w) * scale)
        return jnp.mean(x)

    def train(weights: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            jaxpp.Std1F1B(2),
            operation=jaxpp.Add,
        )
        return jax.tree.map(lambda w, g: w - rate * g, weights, grads), total

    step = jaxpp.mpmd_jit_with_loop(train, mesh_of_all(2), **options)
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
    """The first process makes a step that the other does not."""
    step, weights, xs = two_stages()
    if jax.process_index() == 0:
        step(weights, xs)


def late_step() -> None:
    """The first process waits for the other, which is busy, for a second only."""
    processes._TIMEOUT_MS = 1000
    if jax.process_index() == 1:
        time.sleep(8)
        return
    step, weights, xs = two_stages()
    step(weights, xs)


def moved_argument() -> None:
    """A result of one rank as the argument that another rank takes."""
    step, weights, xs = two_stages()
    (first, second), _ = step(weights, xs)
    step([second, first], xs)


def spread_rank() -> None:
    step, weights, xs = two_stages()
    step(weights, xs)


def nodes_of_a_rank() -> None:
    """What a process knows of ranks in several ones; the plugin has devices alone."""
    mesh = mesh_of(2, {"data": 2})
    owners = [[d.process_index for d in mesh.devices_of(rank)] for rank in range(2)]
    me = jax.process_index()
    parts = processes.Processes(*processes.own_part(owners, me), spans=True)
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
        placed = Placement(there, mesh, aval, [0, 1], spec)
        index = [[(s.start, s.stop) for s in part] for part in placed.slices]
        say("spec", spec, placed.local_ranks, index, placed.shard_shape)
        say("shards", [part.tolist() for part in placed.shards_of(spread)])
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
    """What JAX 0.10.2 cannot take apart, other versions may."""
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
    "train2": lambda: train_all(2),
    "train4": lambda: train_all(4),
    "train8": lambda: train_all(8),
    "saved": lambda: saved(sys.argv[3]),
    "traced": lambda: traced(sys.argv[3]),
    "profiled": lambda: profiled(sys.argv[3]),
    **{
        job.__name__: job
        for job in (
            types,
            relay_out,
            killed,
            stopped_of_three,
            busy,
            hanging,
            slow_task,
            raising,
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
            no_copy,
            left,
            put_from_a_device,
        )
    },
}

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    jax.distributed.initialize()
    JOBS[sys.argv[1]]()
