"""Runs steps in processes that `jaxpp launch` starts, where every process runs the script
and there is no controller: the reference for the benchmarks of several processes."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JPP_ADDRESS", "127.0.0.1")

import jax
import numpy as np

import jaxpp.api as jaxpp
from models import Model

STEPS, CALLS = 30, 20


class Training:
    """A step of a model, and the state for its next call."""

    def __init__(self, model: Model, mesh: Any = None, **options: Any) -> None:
        self.step = model.pipeline(mesh, **options)
        self.batch = [np.asarray(x) for x in model.batch()]
        self.params = jax.tree.map(np.asarray, model.params())
        self.run(3)

    def run(self, steps: int) -> float:
        """Milliseconds per step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.params, loss = self.step(self.params, *self.batch)
        jax.block_until_ready((self.params, loss))
        return (time.perf_counter() - start) / steps * 1e3

    def call(self) -> float:
        """Milliseconds until one call returns."""
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            self.params, loss = self.step(self.params, *self.batch)
            times.append((time.perf_counter() - start) * 1e3)
        jax.block_until_ready((self.params, loss))
        return statistics.median(times)


class Relay:
    """A step whose tasks add 1 to a number, so that messages take nearly all of its time."""

    @staticmethod
    def turns(stages: int, microbatches: int) -> int:
        """The number of times in a step, one after the other, that a rank receives, runs
        and sends."""
        return microbatches + stages - 1

    def __init__(self, stages: int, microbatches: int) -> None:
        def pass_on(x: jax.Array) -> jax.Array:
            for _ in range(stages):
                x = jaxpp.mark_stage_end(x + 1)
            return x

        def step(xs: jax.Array) -> jax.Array:
            schedule = jaxpp.GPipe(stages)
            return jaxpp.treduce(pass_on, xs, schedule=schedule, operation=jaxpp.Add)

        self.xs = np.zeros(microbatches, np.float32)
        mesh = Model(1, 1, 1, stages=stages).mesh()
        self.step = jaxpp.mpmd_jit_with_loop(step, mesh)
        self.run(3)

    def run(self, steps: int) -> float:
        """Milliseconds per step, if each step waits for the previous one."""
        start = time.perf_counter()
        for _ in range(steps):
            jax.block_until_ready(self.step(self.xs))
        return (time.perf_counter() - start) / steps * 1e3


def run_here(devices: int, makers: list[Callable[[], Any]]) -> None:
    """Times the steps of these makers, in a process that `launched` has started."""
    jax.config.update("jax_num_cpu_devices", devices)
    jax.distributed.initialize()
    found = [min(each.run(STEPS) for _ in range(2)) for each in (make() for make in makers)]
    # Every process prints its times; the one that waits for the last rank takes longest.
    print("times", json.dumps(found), flush=True)


def launched(processes: int, script: str, *flags: str) -> list[float]:
    """Milliseconds per step of the slowest process."""
    beside = pathlib.Path(sys.executable).parent
    command = shutil.which("jaxpp", path=f"{beside}:{os.environ['PATH']}")
    assert command, "no jaxpp command beside the interpreter or on PATH"
    child = [sys.executable, "-W", "ignore", script, *flags]
    output = subprocess.run(
        [command, "launch", "-n", str(processes), "--", *child],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = [x.partition("times")[2] for x in output.splitlines() if "times" in x]
    assert len(rows) == processes, output
    return [max(each) for each in zip(*map(json.loads, rows), strict=True)]
