"""Trains the demo's transformer on Ray workers, and continues after a failure.

    python examples/ray_train.py --fail-at 7

The script controls the workers, one per rank, and saves the whole state after each step.
When a worker dies, it creates the mesh again and resumes from the last saved step.
`--fail-at` kills one worker once to demonstrate this. Ray runs on this machine, or in the
cluster that RAY_ADDRESS names.
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
import ray
from demo import init_state, make_batch, pipelined_step

import jaxpp.api as jaxpp

RANKS, STEPS = 4, 12


def file_of(folder: pathlib.Path, step: int) -> pathlib.Path:
    return folder / f"step-{step:04}.npz"


def save(folder: pathlib.Path, step: int, leaves) -> None:
    """Fetches the leaves and writes them; an incomplete file never replaces the old one."""
    path = file_of(folder, step)
    unfinished = path.with_suffix(".tmp.npz")
    np.savez(unfinished, **{str(i): np.asarray(leaf) for i, leaf in enumerate(leaves)})
    unfinished.rename(path)


def last_step(folder: pathlib.Path) -> int:
    """The last step that was saved; 0: none."""
    return next((s for s in range(STEPS, 0, -1) if file_of(folder, s).exists()), 0)


def train(folder: pathlib.Path, fail_at: int | None) -> None:
    mesh = jaxpp.RemoteMpmdMesh(RANKS, (1,), ("data",))  # the only line that is specific to Ray
    schedule = jaxpp.Std1F1B(RANKS)
    step = jaxpp.mpmd_jit_with_loop(
        partial(pipelined_step, schedule=schedule), mpmd_mesh=mesh, donate_argnums=0
    )
    state, batch = init_state(RANKS), make_batch()
    leaves, tree = jax.tree.flatten(state)
    done = last_step(folder)
    if done:
        with np.load(file_of(folder, done)) as saved:
            state = tree.unflatten(saved[str(i)] for i in range(len(leaves)))
        print(f"goes on after step {done}", flush=True)
    for number in range(done + 1, STEPS + 1):
        state, loss = step(state, batch)
        print(f"step {number:2}  loss {float(loss):.7f}", flush=True)
        save(folder, number, jax.tree.leaves(state))
        if number == fail_at:
            _, process = mesh.processes[1]  # the worker runs on this machine
            os.kill(process, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoints"))
    parser.add_argument("--fail-at", type=int, help="kill a worker after this step, once")
    options = parser.parse_args()
    options.folder.mkdir(exist_ok=True)
    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
    try:
        train(options.folder, options.fail_at)
    except jaxpp.JaxppError as error:
        if error.code != "peer":
            raise
        print(error, flush=True)
        train(options.folder, None)


if __name__ == "__main__":
    main()
