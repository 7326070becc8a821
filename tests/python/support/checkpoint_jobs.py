"""Training that resumes from orbax checkpoints, in jobs of several processes, which
test_checkpoints_processes.py starts with `jaxpp launch`.

`python checkpoint_jobs.py JOB DEVICES RANKS FOLDER` has DEVICES in each process and checkpoints
in FOLDER. Tests also import this module to run the same training in one process.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import jaxpp.orbax
import models
from equality import Problem, compiler_options, pipelined_step, usual_specs
from trainings import MICROBATCHES, described, local_ranks, mesh_of_all, say

LAYERS = 4
SAVED = 2  # steps before the checkpoint
STEPS = 4


def problem_of(stages: int) -> Problem:
    """A model with the same weights for any number of stages: some used by one stage, leaves
    with rows for all stages, and a matrix that the first and the last stage share."""

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        x = mb["x"] @ params["tied"]
        for row, of_layer in enumerate(params["layers"]):
            x = models.layer(of_layer, x)
            x = models.layer(jax.tree.map(lambda leaf, row=row: leaf[row], params["rows"]), x)
            if (row + 1) % (LAYERS // stages) == 0 and row + 1 < LAYERS:
                x = mark(x)
        return models.mse(mark(x @ params["tied"].T), mb["y"]), ()

    params = {
        "layers": models.weights(LAYERS),
        "rows": jax.tree.map(lambda *ws: np.stack(ws), *models.weights(LAYERS, seed=2)),
        "tied": models.weights(1, seed=3)[0]["w"],
    }
    # The norm needs the gradients of all ranks. Two ranks have that of the shared matrix.
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    params = jax.tree.map(np.asarray, params)
    return Problem(loss, params, models.batch(MICROBATCHES), clipped)


def step_on(mesh: Any, stages_per_rank: int = 1) -> tuple[Callable[..., Any], Any, Any]:
    """A step, the state before its first call, and the shardings for that state."""
    ranks = mesh.mpmd_dim
    stages = ranks * stages_per_rank
    problem = problem_of(stages)
    interleaved = stages_per_rank > 1
    schedule = jaxpp.Interleaved1F1B(stages, ranks) if interleaved else jaxpp.Std1F1B(ranks)
    options = {"compiler_options": compiler_options()}
    if mesh.lowering_mesh().size > 1:
        options["in_specs"] = usual_specs(problem, mesh)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, schedule), mpmd_mesh=mesh, donate_argnums=(0, 1), **options
    )
    state = problem.params, jax.tree.map(np.asarray, problem.optimizer.init(problem.params))
    shardings, _ = step.compile(*state, problem.batch).in_shardings

    def call(state: Any) -> tuple[Any, Any]:
        params, opt_state, loss, _ = step(*state, problem.batch)
        return (params, opt_state), loss

    return call, state, shardings[:2]


def dropout_on(mesh: Any, stages_per_rank: int = 1) -> tuple[Callable[..., Any], Any, Any]:
    """Like step_on(), for a step with dropout. Its state has a key that all stages use, and
    many keys for each layer, which only the layer's rank holds."""
    stages = mesh.mpmd_dim * stages_per_rank
    batch = models.batch(MICROBATCHES)

    def loss(params: Any, keys: Any, mb: Any) -> Any:
        x = mb["x"] * jax.random.bernoulli(keys["all"], shape=mb["x"].shape)
        for row, of_layer in enumerate(params):
            first, second = keys["layers"][row][:2]
            x = models.layer(of_layer, x * jax.random.bernoulli(first, shape=x.shape))
            x += jax.random.normal(second, x.shape) + jax.random.normal(keys["all"])
            if (row + 1) % (LAYERS // stages) == 0:
                x = jaxpp.mark_stage_end(x)
        return models.mse(x, mb["y"])

    def train_step(params: Any, keys: Any, batch: Any) -> Any:
        def one(mb: Any) -> Any:
            return jax.value_and_grad(loss)(params, keys, mb)

        schedule = jaxpp.Std1F1B(stages)
        total, grads = jaxpp.treduce(one, batch, schedule=schedule, operation=jaxpp.Add)
        params = jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)
        next_key = jnp.vectorize(partial(jax.random.fold_in, data=1))
        return params, jax.tree.map(next_key, keys), total

    step = jaxpp.mpmd_jit_with_loop(
        train_step,
        mpmd_mesh=mesh,
        donate_argnums=(0, 1),
        compiler_options=compiler_options(),
    )
    params = jax.tree.map(np.asarray, models.weights(LAYERS))
    layers = [jax.random.split(jax.random.key(row), 600) for row in range(LAYERS)]
    keys = {"all": jax.random.key(7, impl="rbg"), "layers": layers}
    shardings, _ = step.compile(params, keys, batch).in_shardings

    def call(state: Any) -> tuple[Any, Any]:
        *state, total = step(*state, batch)
        return tuple(state), total

    return call, (params, keys), shardings[:2]


def train(step: Any, state: Any, numbers: range) -> Iterator[tuple[int, Any, list[str]]]:
    """Yields the number of each step, the state after it, and lines with the local losses."""
    for number in numbers:
        state, loss = step(state)
        yield number, state, [f"loss {number} {float(loss).hex()}"] if local_ranks(loss) else []


def structs_of(state: Any, shardings: Any) -> Any:
    """Structs with the step's shardings, from which orbax restores the state."""

    def of_leaf(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(of_leaf, state, shardings)


def copies_on_all_ranks(shardings: Any) -> Any:
    """Shardings that replicate all leaves whose rows are divided over the ranks."""

    def of_leaf(sharding: Any) -> Any:
        mesh = sharding.mpmd_mesh
        is_parted = mesh.mpmd_axis_name in sharding.spec
        return jaxpp.MpmdSharding(mesh, range(mesh.mpmd_dim), P()) if is_parted else sharding

    return jax.tree.map(of_leaf, shardings)


def run(
    ranks: int, folder: str, last: int, stages_per_rank: int = 1, make: Any = step_on
) -> None:
    """Trains up to the step `last`, from the latest checkpoint if there is one."""
    step, state, shardings = make(mesh_of_all(ranks), stages_per_rank)
    if stages_per_rank > 1:
        shardings = copies_on_all_ranks(shardings)
    with ocp.CheckpointManager(folder) as manager:
        done = manager.latest_step() or 0
        if done:
            structs = structs_of(state, shardings)
            state = manager.restore(done, args=ocp.args.StandardRestore(structs))
            say("goes on after", done)
        for number, trained, lines in train(step, state, range(done + 1, last + 1)):
            for line in lines:
                say(line)
            manager.save(number, args=ocp.args.StandardSave(trained))
    for line in described("state", trained):
        say(line)


# --- A process that dies while it saves ---------------------------------------------------


class KillsItself:
    """A future for which orbax waits during a save; kills the process once process 0 has
    saved its part."""

    def __init__(self, folder: str) -> None:
        self._folder = pathlib.Path(folder)

    def result(self, timeout: float | None = None) -> None:
        while not any(self._folder.rglob(f"{SAVED + 1}.*/**/ocdbt.process_0/manifest.ocdbt")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def killed(ranks: int, folder: str) -> None:
    """Process 1 dies once, in the save after `SAVED`, when process 0 has written its part."""
    handler = ocp.type_handlers.get_type_handler(jax.Array)
    serialize, saves = handler.serialize, itertools.count(1)

    async def serialize_and_die(*args: Any) -> Any:
        futures = await serialize(*args)
        return [*futures, KillsItself(folder)] if next(saves) == SAVED + 1 else futures

    if jax.process_index() == 1 and os.environ["JPP_RESTART"] == "0":
        handler.serialize = serialize_and_die
    run(ranks, folder, STEPS)


# --- The ways of orbax --------------------------------------------------------------------


def on_other_ranks(shardings: Any) -> Any:
    """Shardings with the order of the ranks reversed."""

    def of_leaf(sharding: Any) -> Any:
        mesh = sharding.mpmd_mesh
        ranks = [mesh.mpmd_dim - 1 - rank for rank in sharding.mesh_ids]
        return jaxpp.MpmdSharding(mesh, ranks, P())

    return jax.tree.map(of_leaf, shardings)


def ways(ranks: int, folder: str) -> None:
    """Saves and restores the state in each way, also a state that was itself restored."""
    step, state, shardings = step_on(mesh_of_all(ranks))
    *_, (_, trained, _) = train(step, state, range(1, SAVED + 1))
    structs = structs_of(state, shardings)
    at = pathlib.Path(folder)
    with ocp.StandardCheckpointer() as standard:
        standard.save(at / "standard", trained)
        standard.wait_until_finished()
        restored = standard.restore(at / "standard", structs)
        standard.save(at / "again", restored)
        standard.wait_until_finished()
        restored = standard.restore(at / "again", structs)
    with ocp.PyTreeCheckpointer() as pytree:
        pytree.save(at / "pytree", restored)
        arguments = ocp.checkpoint_utils.construct_restore_args(structs)
        restored = pytree.restore(at / "pytree", item=structs, restore_args=arguments)
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(at / "async", args=ocp.args.StandardSave(trained))
        expected = list(described("state", step(trained)[0]))  # donates what is being saved
    with ocp.StandardCheckpointer() as standard:
        for tree in restored, standard.restore(at / "async", structs):
            assert list(described("state", step(tree)[0])) == expected
        elsewhere = standard.restore(at / "again", structs_of(state, on_other_ranks(shardings)))
    try:
        step(elsewhere)
        raise AssertionError("a step took what other processes have")
    except jaxpp.JaxppError as error:
        assert "expected this process to hold the part that its ranks need" in str(error)
    say("all the same")


def run_v1(ranks: int, folder: str, last: int) -> None:
    """Like run(), with orbax's second interface, as MaxText uses it."""
    step, state, shardings = step_on(mesh_of_all(ranks))
    v1 = ocp.v1
    with v1.training.Checkpointer(folder) as checkpointer:
        done = checkpointer.latest.step if checkpointer.latest else 0
        if done:
            state = checkpointer.load(done, structs_of(state, shardings))
            say("goes on after", done)
        for number, trained, lines in train(step, state, range(done + 1, last + 1)):
            for line in lines:
                say(line)
            checkpointer.save(number, trained)
    for line in described("state", trained):
        say(line)


JOBS: dict[str, Callable[[int, str], None]] = {
    "save": lambda ranks, folder: run(ranks, folder, SAVED),
    "resume": lambda ranks, folder: run(ranks, folder, STEPS),
    "save_keys": lambda ranks, folder: run(ranks, folder, SAVED, 1, dropout_on),
    "resume_keys": lambda ranks, folder: run(ranks, folder, STEPS, 1, dropout_on),
    "save_interleaved": lambda ranks, folder: run(ranks, folder, SAVED, 2),
    "resume_interleaved": lambda ranks, folder: run(ranks, folder, STEPS, 2),
    "save_v1": lambda ranks, folder: run_v1(ranks, folder, SAVED),
    "resume_v1": lambda ranks, folder: run_v1(ranks, folder, STEPS),
    "killed": killed,
    "ways": ways,
}

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[2]))
    jax.distributed.initialize()
    jaxpp.orbax.register()
    JOBS[sys.argv[1]](int(sys.argv[3]), sys.argv[4])
