"""What a controller costs: steps on workers of Ray, beside the same steps on as many processes
that `jaxpp launch` starts, where every process runs the script and nobody controls it.

Both send between ranks the same way and keep two steps in flight. They take turns, and the
best round counts. `a call` is how long the controller is busy with one step, from the call to
its return, when it need not wait for an earlier one: the median of 20.

    python benchmarks/ray_steps.py [--ranks 2 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JPP_ADDRESS", "127.0.0.1")

import jax
import numpy as np

import jaxpp.api as jaxpp
from models import Model

STEPS, CALLS = 30, 20


def models(ranks: int) -> list[Model]:
    return [Model(16, 4, 4, stages=ranks), Model(128, 64, 8, stages=ranks)]


class Training:
    """A step, with what goes into the next one."""

    def __init__(self, model: Model, mesh: Any, **options: Any) -> None:
        self.step = model.pipeline(mesh, **options)
        self.batch = [np.asarray(x) for x in model.batch()]
        self.params = jax.tree.map(np.asarray, model.params())
        self.run(3)

    def run(self, steps: int) -> float:
        """Milliseconds a step."""
        start = time.perf_counter()
        for _ in range(steps):
            self.params, loss = self.step(self.params, *self.batch)
        jax.block_until_ready((self.params, loss))
        return (time.perf_counter() - start) / steps * 1e3

    def call(self) -> float:
        """Milliseconds in which one call returns."""
        times = []
        for _ in range(CALLS):
            start = time.perf_counter()
            self.params, loss = self.step(self.params, *self.batch)
            times.append((time.perf_counter() - start) * 1e3)
        jax.block_until_ready((self.params, loss))
        return statistics.median(times)


# --- Without a controller -----------------------------------------------------------------


def run_process() -> None:
    """One of the processes that `jaxpp launch` has started."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize()
    ranks = jax.process_count()
    found = [min(t.run(STEPS) for _ in range(2)) for t in trainings(ranks, None)]
    if jax.process_index() == 0:
        print("times", json.dumps(found), flush=True)


def trainings(ranks: int, mesh: Any, **options: Any) -> list[Training]:
    return [Training(model, mesh, **options) for model in models(ranks)]


def launched(ranks: int) -> list[float]:
    beside = pathlib.Path(sys.executable).parent
    command = shutil.which("jaxpp", path=f"{beside}:{os.environ['PATH']}")
    assert command, "no jaxpp command beside the interpreter or on PATH"
    script = [sys.executable, "-W", "ignore", __file__, "--process"]
    output = subprocess.run(
        [command, "launch", "-n", str(ranks), "--", *script],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return json.loads(
        next(x for x in output.splitlines() if "times" in x).partition("times")[2]
    )


# --- Both -----------------------------------------------------------------------------------


def compare(ranks: int, rounds: int) -> None:
    mesh = jaxpp.RemoteMpmdMesh(ranks, (1,), ("data",))
    controlled = trainings(ranks, mesh)
    calls = [t.call() for t in trainings(ranks, mesh, steps_in_flight=CALLS)]
    with_ray, without = [], []
    for _ in range(rounds):
        with_ray.append([min(t.run(STEPS) for _ in range(2)) for t in controlled])
        without.append(launched(ranks))
    mesh.shutdown()
    for i, model in enumerate(models(ranks)):
        ours, theirs = (min(row[i] for row in rows) for rows in (with_ray, without))
        print(
            f"| {model.name} | {ours:.1f} ms | {theirs:.1f} ms | {ours - theirs:+.1f} ms "
            f"| {calls[i]:.1f} ms |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--process", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        run_process()
        return
    import ray

    ray.init(num_cpus=max(options.ranks), include_dashboard=False, log_to_driver=False)
    print("| step | on Ray | launched | more | a call |\n|---|---|---|---|---|")
    for ranks in options.ranks:
        compare(ranks, options.rounds)


if __name__ == "__main__":
    main()
