"""Trainings of small models, with their results as lines of text: each process of a job prints
the lines of its ranks (jobs.py), and a test computes the same lines in one process.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

import jaxpp.api as jaxpp
import models
from equality import compiler_options, mesh_of, pipelined_step, usual_specs
from jaxpp.placements import physical_array

STEPS = 3
MICROBATCHES = 4


def say(*words: Any) -> None:
    print(*words, flush=True)


def local_ranks(array: Any) -> list[int]:
    """The ranks of this process that hold the array."""
    mesh, me = array.sharding.mpmd_mesh, jax.process_index()
    return [r for r in array.mpmd_idxs if mesh.devices_of(r)[0].process_index == me]


def described(name: str, tree: Any) -> Iterator[str]:
    """A line with a hash of the exact bytes for each copy that this process holds."""
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        ranks = local_ranks(array)
        if not ranks:
            continue
        copies = array.to_mpmd_local_array
        for rank, copy in zip(ranks, copies if len(ranks) > 1 else [copies], strict=True):
            digest = hashlib.sha256(np.asarray(physical_array(copy)).tobytes()).hexdigest()[:16]
            yield f"{name}{jax.tree_util.keystr(path)} rank {rank} {digest}"


def tied_mlp(stages: int) -> Any:
    """An MLP whose last stage reuses the first stage's weights."""
    problem = models.mlp([1] * stages, MICROBATCHES)
    of_mlp = problem.loss
    problem.loss = lambda params, *rest: of_mlp([*params, params[0]], *rest)
    problem.params = problem.params[:-1]
    return problem


def cast_mlp(stages: int) -> Any:
    """tied_mlp() in bfloat16: the shared weights are cast once for both uses, so their gradient
    is a single sum of the loop and one rank updates them."""
    problem = tied_mlp(stages)
    in_float32 = problem.loss

    def loss(params: Any, *rest: Any) -> Any:
        return in_float32(jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), *rest)

    problem.loss = loss
    return problem


def stacked_mlp(stages: int) -> Any:
    """An MLP whose layers are rows of one leaf; each rank holds its own rows."""
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
    made["hosted"] = models.mlp([1] * stages, MICROBATCHES)
    made["hosted"].optimizer = optax.adam(0.1)
    made["clipped"] = models.mlp([1] * stages, MICROBATCHES)
    made["clipped"].optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    return made


def with_state_on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that copies the optimizer's state from host memory and back."""

    def moving(params: Any, state: Any, batch: Any) -> Any:
        state = jax.device_put(state, jax.memory.Space.Device)
        params, state, *rest = step(params, state, batch)
        return params, jax.device_put(state, jax.memory.Space.Host), *rest

    return moving


def train(name: str, mesh: Any, steps: int = STEPS) -> Iterator[str]:
    """Yields each loss, then parameters and optimizer state. The state of the problem "hosted"
    is in pinned host memory."""
    problem = problems(mesh.mpmd_dim)[name]
    options = {}
    if mesh.lowering_mesh().size > 1:
        options["in_specs"] = usual_specs(problem, mesh)
    run = pipelined_step(problem, jaxpp.Std1F1B(mesh.mpmd_dim))
    step = jaxpp.mpmd_jit_with_loop(
        with_state_on_host(run) if name == "hosted" else run,
        mpmd_mesh=mesh,
        donate_argnums=(0, 1),
        compiler_options=compiler_options(),
        **options,
    )
    params, state = problem.params, problem.optimizer.init(problem.params)
    for i in range(steps):
        params, state, loss, _ = step(params, state, problem.batch)
        if local_ranks(loss):
            yield f"{name} loss {i} {float(loss).hex()}"
    yield from described(f"{name} params", params)
    yield from described(f"{name} state", state)
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        kind = array.sharding.memory_kind
        assert kind == ("pinned_host" if name == "hosted" else "device"), (path, kind)


def mesh_of_all(ranks: int) -> Any:
    width = len(jax.devices()) // ranks
    return mesh_of(ranks, {} if width == 1 else {"model": width})


def unequal_mesh(devices: Sequence[jax.Device]) -> Any:
    """Two ranks: one of the first of these four devices, one of the last two."""
    groups = (devices[:1], devices[2:])
    return jaxpp.MpmdMesh([Mesh(np.array(own), ("model",)) for own in groups], "stage")


def train_all(mesh: Any) -> Iterator[str]:
    for name in problems(mesh.mpmd_dim):
        yield from train(name, mesh)


def descent(loss: Callable[..., Any], schedule: Any, rate: float = 0.1) -> Callable[..., Any]:
    """A step of gradient descent on the sum of `loss(weights, x)` over the microbatches."""

    def step(weights: Any, xs: Any) -> Any:
        total, grads = jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(weights, x),
            xs,
            schedule,
            operation=jaxpp.Add,
        )
        return jax.tree.map(lambda w, g: w - rate * g, weights, grads), total

    return step


def two_stages(
    schedule: Any = None, width: int = 4, mesh: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """A step, its weights and its batch."""

    def loss(weights: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jaxpp.mark_stage_end(jnp.tanh(x @ weights[1])).sum()

    step = descent(loss, schedule or jaxpp.Std1F1B(2))
    weights = [np.eye(width, dtype=np.float32)] * 2
    xs = np.ones((8, 2, width), np.float32)
    return jaxpp.mpmd_jit_with_loop(step, mesh or mesh_of_all(2), **options), weights, xs


def costs(mesh: Any) -> list[str]:
    """The costs of a step whose weights are cut over the devices of a rank, line by line."""
    step, weights, xs = two_stages(
        mesh=mesh, in_specs=(PartitionSpec("model"), PartitionSpec())
    )
    return str(step.compile(weights, xs).cost_summary()).splitlines()


def saved_and_loaded(mesh: Any, folder: str) -> Iterator[str]:
    """The results of a step that this process saved and loaded."""
    step, weights, xs = two_stages(mesh=mesh)
    path = os.path.join(folder, f"step{jax.process_index()}.plan")
    step.compile(weights, xs).save(path)
    yield from described("loaded", jaxpp.load(path, mpmd_mesh=mesh)(weights, xs))


TYPES = (
    "bool int2 int4 int8 int32 uint2 uint4 uint16 "
    "float8_e4m3fn bfloat16 float16 float32 complex64"
).split()


def sum_by_way_of(dtype: Any, xs: Any) -> Any:
    """The sum of xs; the first stage sends them to the second as numbers of this type."""

    def one(x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.floor(x).astype(dtype))
        return jaxpp.mark_stage_end(jnp.real(x.astype(jnp.complex64)).sum())

    return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)


def sums_of_types(mesh: Any) -> Iterator[str]:
    """Sends values of every type and of odd sizes, and yields their sums."""
    xs = np.random.default_rng(0).uniform(0, 3, (MICROBATCHES, 3, 5)).astype(np.float32)
    for name in TYPES:
        total = functools.partial(sum_by_way_of, jnp.dtype(name))
        result = jaxpp.mpmd_jit_with_loop(total, mpmd_mesh=mesh)(xs)
        if local_ranks(result):
            yield f"{name} {float(result)}"


P = PartitionSpec
# How stage 0 shards its result over the four devices of a rank, and how stage 1 wants it.
RELAID = (
    (P(("data", "model")), P("data")),  # 4 shards to 2 shards
    (P("data"), P(("data", "model"))),  # 2 shards to 4 shards
    (P("data", "model"), P("model", "data")),
    (P(None, "model"), P("data")),
    (P(), P(None, ("model", "data"))),
    (P(("model", "data")), P()),
)


def relaid(mesh: Any) -> Iterator[str]:
    """Losses and gradients of two stages that shard the same value differently."""
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


def check_order(trace: str, steps: int) -> None:
    """Asserts that in a trace of two_stages() on one host no task begins before the tasks that
    produce its inputs have ended."""
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
