"""Saving the state of a step and resuming from it, in each way listed in docs/checkpoints.md.

A state that a pipeline of two ranks trained is saved and restored in each way. The restored
state must be bitwise equal, and so must the next step, on any number of ranks and without a
pipeline.
"""

from __future__ import annotations

import functools
import os
import pathlib
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.flax
from flax import serialization
from flax.training import checkpoints as flax_checkpoints
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models
from array_placements import WHOLE
from equality import Problem, make_mesh, pipelined_step, plain_step
from jaxpp.api import MpmdArray
from locations import ROOT, environment

DOCS = ROOT / "docs" / "checkpoints.md"
Save = Callable[[pathlib.Path, Any], None]
Restore = Callable[[pathlib.Path, Any], Any]

# --- Ways to save and restore -----------------------------------------------------------


def replace(path: pathlib.Path, write: Callable[[Any], None]) -> None:
    """Replaces the old file by a new one once the new one is complete."""
    new = path.with_name(path.name + ".new")
    with open(new, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def flat(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def restored_flat(found: Any, like: Any) -> Any:
    """The tree with the arrays found by name. numpy's files store bfloat16 as plain bytes."""
    leaves = [np.asarray(found[name]).view(leaf.dtype) for name, leaf in flat(like).items()]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def load_npz(path: pathlib.Path, like: Any) -> Any:
    with np.load(path) as found:
        return restored_flat(found, like)


def save_orbax(path: pathlib.Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree, force=True)


def restore_orbax(path: pathlib.Path, like: Any) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like))


def save_pytree(path: pathlib.Path, tree: Any) -> None:
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(path, tree, force=True)


def restore_pytree(path: pathlib.Path, like: Any) -> Any:
    arguments = ocp.checkpoint_utils.construct_restore_args(like)
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path, item=like, restore_args=arguments)


def save_async(path: pathlib.Path, tree: Any) -> None:
    with ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree), force=True)
        # A step may donate the arrays before the save has finished.
        jax.tree.map(lambda leaf: leaf.delete(), tree)


def save_manager(path: pathlib.Path, tree: Any) -> None:
    with ocp.CheckpointManager(path) as manager:
        manager.save(len(manager.all_steps()), args=ocp.args.StandardSave(tree))


def restore_manager(path: pathlib.Path, like: Any) -> Any:
    with ocp.CheckpointManager(path) as manager:
        structs = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(structs))


def save_flax(path: pathlib.Path, tree: Any) -> None:
    latest = flax_checkpoints.latest_checkpoint(path)
    step = int(latest.rpartition("_")[2]) + 1 if latest else 0
    flax_checkpoints.save_checkpoint(path, tree, step, keep=2)


# The keys are the names in the documentation's table.
WAYS: dict[str, tuple[Save, Restore]] = {
    "`np.savez`": (
        lambda path, tree: replace(path, lambda file: np.savez(file, **flat(tree))),
        load_npz,
    ),
    "`pickle`": (
        lambda path, tree: replace(path, lambda file: pickle.dump(tree, file)),
        lambda path, like: pickle.loads(path.read_bytes()),
    ),
    "`flax.serialization`": (
        lambda path, tree: replace(path, lambda f: f.write(serialization.to_bytes(tree))),
        lambda path, like: serialization.from_bytes(like, path.read_bytes()),
    ),
    "`flax.training.checkpoints`": (
        save_flax,
        lambda path, like: flax_checkpoints.restore_checkpoint(path, like),
    ),
    "safetensors": (
        lambda path, tree: replace(
            path, lambda file: file.write(safetensors.flax.save(flat(tree)))
        ),
        lambda path, like: restored_flat(safetensors.flax.load_file(path), like),
    ),
    "orbax, `StandardCheckpointer`": (save_orbax, restore_orbax),
    "orbax, `PyTreeCheckpointer`": (save_pytree, restore_pytree),
    "orbax, `AsyncCheckpointer`": (save_async, restore_orbax),
    "orbax, `CheckpointManager`": (save_manager, restore_manager),
}


def test_the_documentation_has_these_ways() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| [^|]+\| [^|]+\|$", DOCS.read_text(), re.M)
    assert [row for row in rows if set(row) != {"-"} and row != "with"] == list(WAYS)


# --- Save, restore, resume --------------------------------------------------------------

PROBLEM: Problem = models.mlp([1] * 4, 4)
ENDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "1 rank": lambda: _pipeline(jaxpp.InterleavedGPipe(4, 1), make_mesh(1)),
    "2 ranks": lambda: _pipeline(jaxpp.Interleaved1F1B(4, 2), make_mesh(2)),
    "4 ranks of 2 devices": lambda: _pipeline(jaxpp.Std1F1B(4), make_mesh(4, data=2)),
    "no pipeline": lambda: plain_step(PROBLEM),
}


def _pipeline(schedule: Any, mesh: Any) -> Callable[..., Any]:
    return jaxpp.mpmd_jit_with_loop(pipelined_step(PROBLEM, schedule), mpmd_mesh=mesh)


@functools.cache
def step_of(end: str) -> Callable[..., Any]:
    return ENDS[end]()


def state_of(params: Any, opt_state: Any) -> Any:
    """The state, and the parameters in bfloat16, which not all file formats support."""
    cast = jaxpp.mpmd_jit_with_loop(
        lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree), make_mesh(2)
    )
    return {"params": params, "opt": opt_state, "low": cast(params)}


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    """A state on two ranks, and the same as numpy arrays."""
    params, opt_state = PROBLEM.params, PROBLEM.optimizer.init(PROBLEM.params)
    for _ in range(2):
        params, opt_state, *_ = step_of("2 ranks")(params, opt_state, PROBLEM.batch)
    state = state_of(params, opt_state)
    assert all(type(leaf) is MpmdArray for leaf in jax.tree.leaves(state))
    assert len({leaf.mpmd_idxs for leaf in jax.tree.leaves(params)}) == 2
    return state, jax.tree.map(np.array, state)


@functools.cache
def _next_bits(end: str, contents: tuple[bytes, ...], tree: Any) -> tuple[bytes, ...]:
    return _bits(step_of(end)(*_state(contents, tree), PROBLEM.batch))


def _state(contents: tuple[bytes, ...], tree: Any) -> Any:
    state = jax.tree.unflatten(tree, [pickle.loads(leaf) for leaf in contents])
    return state["params"], state["opt"]


def _bits(tree: Any) -> tuple[bytes, ...]:
    return tuple(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("way", WAYS)
def test_saved_and_restored(way: str, trained: Any, tmp_path: pathlib.Path) -> None:
    state, expected = trained
    save, restore = WAYS[way]
    save(tmp_path / "checkpoint", jax.tree.map(lambda leaf: leaf.copy(), state))
    # Restores to the ranks that held the leaves, and to arrays on one device.
    restored = {
        like is state: restore(tmp_path / "checkpoint", like)
        for like in (state, jax.tree.map(jnp.asarray, expected))
    }
    for found in restored.values():
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        types = [[(x.shape, x.dtype) for x in jax.tree.leaves(t)] for t in (found, expected)]
        assert types[0] == types[1]
        assert _bits(found) == _bits(expected)
    for end in ENDS:
        found = restored[end != "no pipeline"]
        leaves, tree = jax.tree.flatten(expected)
        from_memory = _next_bits(end, tuple(map(pickle.dumps, leaves)), tree)
        on = step_of(end)(found["params"], found["opt"], PROBLEM.batch)
        assert _bits(on) == from_memory, end


@pytest.mark.parametrize("ranks", [1, 4])
def test_orbax_restores_onto_the_ranks_of_another_mesh(
    ranks: int, trained: Any, tmp_path: pathlib.Path
) -> None:
    """Orbax reads each leaf directly onto its rank in another mesh, without a full copy."""
    state, expected = trained
    save_orbax(tmp_path / "checkpoint", state["params"])
    mesh = make_mesh(ranks, data=2)

    def where(path: Any, leaf: Any) -> Any:
        spec = P("data") if leaf.ndim == 2 else P()
        sharding = jaxpp.MpmdSharding(mesh, {path[0].idx % ranks}, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    wanted = jax.tree_util.tree_map_with_path(where, expected["params"])
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "checkpoint", wanted)
    for leaf, struct in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding == struct.sharding
    assert _bits(found) == _bits(expected["params"])
    step = jaxpp.mpmd_jit_with_loop(lambda tree: jax.tree.map(lambda x: x * 2, tree), mesh)
    doubled = jax.tree.map(lambda x: x * 2, expected["params"])
    assert _bits(step(found)) == _bits(doubled)


def test_keys_and_weak_numbers_in_checkpoints(tmp_path: pathlib.Path) -> None:
    key = jax.random.split(jax.random.key(3), 2)
    tree = {"key": WHOLE["replicated"](key), "rate": WHOLE["one rank"](jnp.asarray(0.5))}
    for way in ("`pickle`", "orbax, `StandardCheckpointer`"):
        save, restore = WAYS[way]
        save(tmp_path / "checkpoint", tree)
        found = restore(tmp_path / "checkpoint", tree)
        assert found["key"].dtype == key.dtype and float(found["rate"]) == 0.5
        assert (jax.random.key_data(found["key"]) == jax.random.key_data(key)).all()
        (path,) = tmp_path.iterdir()
        path.rename(tmp_path.parent / f"{tmp_path.name}-{len(way)}")


# --- A save that is interrupted ---------------------------------------------------------

KILLED = [
    "`pickle`",
    "safetensors",
    "`flax.training.checkpoints`",
    "orbax, `CheckpointManager`",
]


def numbers(k: int) -> Any:
    """A state filled with k, large enough that a process spends most of its time saving."""
    full = np.full((512, 512), k, np.float32)
    return {"a": WHOLE["one rank"](full), "b": [WHOLE["replicated"](full)] * 3}


def save_for_ever(way: str, folder: str) -> None:
    """Saves in a loop until the process is killed."""
    for k in range(1_000_000):
        WAYS[way][0](pathlib.Path(folder), numbers(k))
        sys.stdout.write(f"{k}\n")
        sys.stdout.flush()


# Uses a subprocess per case: in orbax, saves in two threads of a process can deadlock.
@pytest.mark.parametrize("way", KILLED)
def test_a_killed_save_leaves_the_last_checkpoint(way: str, tmp_path: pathlib.Path) -> None:
    """Whenever the process is killed, the last complete save or the one after is restored."""
    script = (
        "import sys, jax\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "import test_checkpoints\n"
        "test_checkpoints.save_for_ever(*sys.argv[1:])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, way, str(tmp_path / "checkpoint")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(pathlib.Path(__file__).parent, JAX_PLATFORMS="cpu"),
    )
    assert process.stdout is not None
    complete = -1
    for line in process.stdout:
        complete = int(line)
        if complete == 2:
            process.kill()  # during a save, or just before or after one
            break
    for line in process.communicate()[0].splitlines():
        complete = int(line)
    assert complete >= 2
    found = WAYS[way][1](tmp_path / "checkpoint", numbers(0))
    contents = {float(x) for leaf in jax.tree.leaves(found) for x in np.unique(leaf)}
    assert contents in ({float(complete)}, {float(complete + 1)})
