"""A training in which one process, the victim, injects a fault into itself at a given moment.
faults.py and test_faults.py start it.

    python fault_jobs.py MOMENT FAULT VICTIM DELAY FOLDER [ADDRESS COUNT PROCESS]

Without the last three arguments, their values come from the launcher. The victim prints the
time of the fault in seconds since 1970.
"""

# ruff: noqa: E402  # the moment "import" precedes the imports

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MOMENT, FAULT, VICTIM, DELAY, FOLDER = sys.argv[1:6]
ME = int(sys.argv[8] if sys.argv[8:] else os.environ["JPP_PROCESS_ID"])
AGAIN = os.environ.get("JPP_RESTART", "0") != "0"
SAVE_AT = 3
STEPS = 8


def say(*words: Any) -> None:
    print(*words, flush=True)


def _hit() -> None:
    if FAULT == "raise":
        raise ValueError("of the user")
    if FAULT in ("exit", "leave"):
        sys.exit(3 if FAULT == "exit" else 0)
    if FAULT in ("kill", "stop"):
        late = f"sleep {DELAY}; kill -{FAULT.upper()} {os.getpid()}"
        subprocess.Popen(["sh", "-c", late], start_new_session=True)


def at(moment: str) -> None:
    """Injects the fault if this is its moment; signals follow after the delay."""
    if moment != MOMENT or AGAIN:
        return
    say("at", moment, "as", os.getpid())
    if ME == int(VICTIM):
        signals = FAULT in ("kill", "stop")
        say("hit", time.time() + float(DELAY) * signals)
        _hit()


at("import")

import jax

import jaxpp.api as jaxpp

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
if sys.argv[6:]:
    jax.distributed.initialize(sys.argv[6], int(sys.argv[7]), ME)
else:
    jax.distributed.initialize()

import numpy as np
import optax
import orbax.checkpoint as ocp

import jaxpp.orbax
import models
from equality import mesh_of, pipelined_step


class Slow:
    """A slow part of a save, for which orbax waits in the background."""

    def result(self, timeout: float | None = None) -> None:
        if FAULT in ("kill", "stop", "none"):
            at("saving")
            at("waiting")
        time.sleep(3)


def save_slowly() -> None:
    handler = ocp.type_handlers.get_type_handler(jax.Array)
    serialize = handler.serialize

    async def serialize_slowly(*args: Any) -> Any:
        return [*await serialize(*args), Slow()]

    handler.serialize = serialize_slowly


def step_and_state() -> tuple[Callable[..., Any], Any, Any]:
    ranks = jax.process_count()
    problem = models.mlp([1] * ranks, 4)
    problem.optimizer = optax.sgd(0.1)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, jaxpp.Std1F1B(ranks)),
        mpmd_mesh=mesh_of(ranks, {}),
        donate_argnums=(0, 1),
    )
    state = problem.params, problem.optimizer.init(problem.params)
    return step, jax.tree.map(np.asarray, state), problem.batch


def main() -> None:
    jaxpp.orbax.register()
    step, (params, opt_state), batch = step_and_state()
    at("compile")
    step.compile(params, opt_state, batch)
    at("first-step")
    with ocp.CheckpointManager(FOLDER) as manager:
        saving = MOMENT in ("saving", "waiting") and not AGAIN
        if saving:
            save_slowly()
        for number in range(1, STEPS + 1):
            params, opt_state, _, _ = step(params, opt_state, batch)
            say("step", number, time.time())
            if number == 4:
                at("steady")
            if number == SAVE_AT and saving:
                manager.save(number, args=ocp.args.StandardSave((params, opt_state)))
                if MOMENT == "waiting":
                    manager.wait_until_finished()
                elif FAULT not in ("kill", "stop", "none"):
                    at("saving")
            if number == 5:
                at("between-steps")
                time.sleep(30 if MOMENT == "between-steps" and not AGAIN else 0)
            if MOMENT in ("steady", "saving") and not AGAIN:
                time.sleep(0.2)
    jax.block_until_ready(params)


atexit.register(at, "leaving")
main()
