"""Checkpoints of orbax's in jobs of several processes (checkpoint_jobs.py): each process saves
what its ranks have, and any number of processes and ranks goes on from that, with the losses of
a training that was not interrupted.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import checkpoint_jobs as jobs
from equality import mesh_of

SCRIPT = pathlib.Path(jobs.__file__)
LIMIT = 120  # seconds, so that a hang fails

Launch = Callable[..., tuple[int, set[str], str]]


@pytest.fixture
def launch(command: str, tmp_path: pathlib.Path) -> Launch:
    def run(job: str, processes: int, devices: int, ranks: int, *flags: str) -> Any:
        """Exit status, what the processes said, all of the output."""
        script = [str(SCRIPT), job, str(devices), str(ranks), str(tmp_path / "checkpoints")]
        done = subprocess.run(
            [command, "launch", "-n", str(processes), *flags]
            + ["--", sys.executable, "-W", "ignore", *script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "JPP_ADDRESS": "127.0.0.1"},
            timeout=LIMIT,
        )
        return done.returncode, set(re.findall(r"^\[\d\] (.*)", done.stdout, re.M)), done.stdout

    return run


@functools.cache
def saved_state() -> Any:
    """What two ranks have trained before the checkpoint, in one process."""
    *_, (_, state, _) = jobs.train(*_step_on(2, 1), range(1, jobs.SAVED + 1))
    return jax.tree.map(np.asarray, state)


def _step_on(ranks: int, width: int) -> tuple[Any, Any]:
    step, state, _ = jobs.step_on(mesh_of(ranks, {} if width == 1 else {"model": width}))
    return step, state


@functools.cache
def lines_after_saved(ranks: int, width: int) -> set[str]:
    """The losses and the last state of a training that goes on from memory."""
    step, _ = _step_on(ranks, width)
    trained = list(jobs.train(step, saved_state(), range(jobs.SAVED + 1, jobs.STEPS + 1)))
    losses = {line for _, _, lines in trained for line in lines}
    return losses | {jobs.digest_of(trained[-1][1])}
