"""Step times of two models: the pipeline, a bare C loop that makes the same PJRT calls, and
plain `jax.jit` of the same step. The three take turns, so that a machine whose speed drifts
slows them alike; times are medians, ratios are medians of ratios within a turn. Then the
time of a loop that prepares batches meanwhile, with all cores in the step's reach and, in a
process of its own, with one; and of a call whose step has nothing to run.

    python benchmarks/steps.py [--turns N]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JPP_BENCHMARK"] = "1"  # the runtime brings its yardstick along

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp.api as jaxpp
from models import Model

MODELS = (Model(8, 1, 32), Model(128, 64, 16))


class State:
    """A step with the parameters it goes on with."""

    def __init__(self, step: Callable[..., Any], params: Any) -> None:
        self.step = step
        self.params = params

    def time(self, batch: Any) -> float:
        start = time.perf_counter()
        self.params, loss = self.step(self.params, *batch)
        jax.block_until_ready((self.params, loss))
        return time.perf_counter() - start


def bare_step(compiled: Any) -> Callable[..., Any]:
    """The same call from Python, with the bare loop in the runtime's place."""
    step = compiled.compiled

    def run(params: Any, *batch: Any) -> Any:
        return step.run_leaves(jax.tree.leaves((params, *batch)), step._runtime.bare_step)

    return run


def measure(model: Model, turns: int) -> None:
    params, batch = model.params(), model.batch()
    compiled = model.pipeline().compile(params, *batch)
    ways = (
        State(compiled, params),
        State(bare_step(compiled), jax.tree.map(jnp.copy, params)),
        State(model.plain(), jax.tree.map(jnp.copy, params)),
    )
    for way in ways:
        way.time(batch)
    times = np.array([[way.time(batch) for way in ways] for _ in range(turns)])
    report(model, times, compiled.compiled._runtime.bare_instructions())


def report(model: Model, times: np.ndarray, instructions: int) -> None:
    ours, bare, plain = np.median(times, axis=0) * 1e3
    against_bare = np.median(times[:, 0] / times[:, 1])
    against_plain = np.median(times[:, 0] / times[:, 2])
    print(f"\n{model.name} ({instructions} runs, sends and deletions a step)")
    for name, ms in (("pipeline", ours), ("bare C loop", bare)):
        print(f"  {name:15} {ms:9.3f} ms/step  {ms * 1e3 / instructions:7.2f} us/instruction")
    print(f"  {'plain jax.jit':15} {plain:9.3f} ms/step")
    print(f"  pipeline / bare C loop    {against_bare:6.2f}")
    print(f"  pipeline / plain jax.jit  {against_plain:6.2f}", flush=True)


def prepare(pieces: int) -> float:
    """Makes a batch in numpy; how long it took."""
    generator = np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(pieces):
        generator.standard_normal(1 << 12)
    return time.perf_counter() - start


def measure_overlap(model: Model, turns: int) -> None:
    """A loop that prepares a batch for as long as a step takes, while the step before runs."""
    params, batch = model.params(), model.batch()
    state = State(model.pipeline().compile(params, *batch), params)
    state.time(batch)
    step = float(np.median([state.time(batch) for _ in range(turns)]))
    pieces = max(1, round(step / prepare(1000) * 1000))
    work = float(np.median([prepare(pieces) for _ in range(turns)]))
    start = time.perf_counter()
    for _ in range(turns):
        prepare(pieces)
        state.params, loss = state.step(state.params, *batch)
    jax.block_until_ready((state.params, loss))
    together = (time.perf_counter() - start) / turns
    pool = "" if "NPROC" not in os.environ else f", {os.environ['NPROC']} thread a pool"
    print(f"\n{model.name}{pool}: preparing a batch for as long as a step takes", flush=True)
    step_ms, work_ms, both_ms = step * 1e3, work * 1e3, together * 1e3
    print(f"  step {step_ms:.3f} ms, batch {work_ms:.3f} ms, both {both_ms:.3f} ms")
    print(f"  both / the longer one     {together / max(step, work):6.2f}", flush=True)


def measure_overlap_on_one_core(turns: int) -> None:
    """The same of a step that computes in one thread: on one device, in a pool of one."""
    command = [sys.executable, __file__, f"--turns={turns}", "--one-core"]
    subprocess.run(command, check=True, env=os.environ | {"NPROC": "1"})


def measure_idle(turns: int) -> None:
    """A step whose tasks are empty: what a call costs before anything runs."""
    calls = 100
    step = jaxpp.mpmd_jit_with_loop(lambda x: x, mpmd_mesh=MODELS[0].mesh(), donate_argnums=0)
    x = step(jnp.ones(4))
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        for _ in range(calls):
            x = step(x)
        times.append((time.perf_counter() - start) / calls)
    print(f"\nA call of a step with nothing to run: {np.median(times) * 1e6:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--one-core", action="store_true", help=argparse.SUPPRESS)  # a child
    options = parser.parse_args()
    turns = options.turns
    if options.one_core:
        measure_overlap(dataclasses.replace(MODELS[1], stages=1), turns)
        return
    jax.config.update("jax_num_cpu_devices", 4)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, medians of {turns} turns")
    for model in MODELS:
        measure(model, turns)
        measure_overlap(model, turns)
    measure_overlap_on_one_core(turns)
    measure_idle(turns)


if __name__ == "__main__":
    main()
