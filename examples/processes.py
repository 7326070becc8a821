"""Trains the demo's transformer with one process per rank, and continues after a failure.

    jaxpp launch -n 4 --restarts 1 -- python examples/processes.py --fail-at 7

Each process saves its rank's part of the state with orbax; when one dies, all are
restarted and resume from the last complete checkpoint. `--fail-at` kills one process once
to demonstrate this. A different number of processes can resume from the same folder (`-n
2`). On SIGTERM, for example from a cluster that takes its machines back, all processes
save the same step and end; the same command resumes from there.
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
import orbax.checkpoint as ocp
from demo import init_state, make_batch, pipelined_step

import jaxpp.api as jaxpp
import jaxpp.orbax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("checkpoints"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fail-at", type=int, help="kill process 1 after this step, once")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize()
    jaxpp.orbax.register()
    ranks = jax.process_count()

    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()), ("stage",)), "stage")
    schedule = jaxpp.Std1F1B(ranks)
    step = jaxpp.mpmd_jit_with_loop(
        partial(pipelined_step, schedule=schedule), mpmd_mesh=mesh, donate_argnums=0
    )
    state, batch = init_state(ranks), make_batch()
    keep = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(options.folder.absolute(), options=keep) as manager:
        done = manager.latest_step() or 0
        if done:
            where, _ = step.lower(state, batch).out_info  # each array on its ranks
            state = manager.restore(done, args=ocp.args.StandardRestore(where))
            print(f"goes on after step {done}", flush=True)

        for number in range(done + 1, options.steps + 1):
            state, loss = step(state, batch)
            if loss.is_partially_addressable:
                print(f"step {number:2}  loss {float(loss):.7f}", flush=True)
            manager.save(number, args=ocp.args.StandardSave(state))  # while the next step runs
            if manager.reached_preemption(number):  # in all processes after the same step
                print(f"is to end, and has saved step {number}", flush=True)
                break
            first_run = os.environ.get("JPP_RESTART", "0") == "0"
            if number == options.fail_at and jax.process_index() == 1 and first_run:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
