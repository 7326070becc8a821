"""Trains the demo's transformer with a process for each rank, and goes on after a failure.

    jaxpp launch -n 4 --restarts 1 -- python examples/processes.py --fail-at 7

Each process saves what its rank has of the state; when one dies, all are started again and
take up the last step that all of them have saved. `--fail-at` kills one process once, to show
it.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from demo import init_state, make_batch, pipelined_step

import jaxpp.api as jaxpp

STEPS = 12


def file_of(folder: pathlib.Path, step: int, process: int) -> pathlib.Path:
    return folder / f"step-{step:04}-process-{process}.npz"


def save(folder: pathlib.Path, step: int, leaves) -> None:
    """Writes the leaves of which this process has a copy; never half of them."""
    path = file_of(folder, step, jax.process_index())
    there = {
        str(i): np.asarray(leaf)
        for i, leaf in enumerate(leaves)
        if leaf.is_partially_addressable
    }
    unfinished = path.with_suffix(".tmp.npz")
    np.savez(unfinished, **there)
    unfinished.rename(path)


def last_step(folder: pathlib.Path) -> int:
    """The last step that all processes have saved; 0: none."""
    processes = range(jax.process_count())
    steps = range(STEPS, 0, -1)
    complete = (s for s in steps if all(file_of(folder, s, p).exists() for p in processes))
    return next(complete, 0)


def restore(folder: pathlib.Path, step: int, leaves) -> list:
    """Leaves of which this process has no copy stay as they are: nobody reads them here."""
    with np.load(file_of(folder, step, jax.process_index())) as saved:
        return [saved[str(i)] if str(i) in saved else leaf for i, leaf in enumerate(leaves)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoints"))
    parser.add_argument("--fail-at", type=int, help="kill process 1 after this step, once")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize()
    ranks = jax.process_count()
    options.folder.mkdir(exist_ok=True)

    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()), ("stage",)), "stage")
    schedule = jaxpp.Std1F1B(ranks)
    step = jaxpp.mpmd_jit_with_loop(
        partial(pipelined_step, schedule=schedule), mpmd_mesh=mesh, donate_argnums=0
    )
    state, batch = init_state(ranks), make_batch()
    leaves, tree = jax.tree.flatten(state)
    done = last_step(options.folder)
    if done:
        state = tree.unflatten(restore(options.folder, done, leaves))
        print(f"goes on after step {done}", flush=True)

    for number in range(done + 1, STEPS + 1):
        state, loss = step(state, batch)
        if loss.is_partially_addressable:
            print(f"step {number:2}  loss {float(loss):.7f}", flush=True)
        save(options.folder, number, jax.tree.leaves(state))
        first_run = os.environ.get("JPP_RESTART", "0") == "0"
        if number == options.fail_at and jax.process_index() == 1 and first_run:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
