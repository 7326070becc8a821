"""Step times of two models: the pipeline against plain `jax.jit` of the same step; and, in a C
program, the runtime against a bare loop that makes the same PJRT calls. The two ways of a
pair alternate, so that a machine whose speed drifts slows both alike; times are medians,
and ratios are medians of the ratios within a turn. It then times a loop that prepares
batches while steps run, with all cores available to the step and, in a separate process,
with one core; a step with data parallelism, whose gradients are reduced once, or in every
microbatch; a call whose step has nothing to run; a token of a text that passes through four
stages; and, in C, a step of 64 stages and 512 microbatches.

    python benchmarks/steps.py [--turns N] [--bench-plan PROGRAM]

`make bench` builds PROGRAM from benchmarks/plan_steps.c.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))

import generate
import jax
import jax.numpy as jnp
import lammps_jax_pjrt_cpu
import numpy as np

import jaxpp.api as jaxpp
from models import Model

MODELS = (Model(8, 1, 32), Model(128, 64, 16))
DEEP = Model(8, 1, 512, layers=64, stages=64)


class State:
    """A step, and the parameters for its next call."""

    def __init__(self, step: Callable[..., Any], params: Any) -> None:
        self.step = step
        self.params = params

    def time(self, batch: Any) -> float:
        start = time.perf_counter()
        self.params, loss = self.step(self.params, *batch)
        jax.block_until_ready((self.params, loss))
        return time.perf_counter() - start


def compare(ways: dict[str, State], batch: Any, turns: int) -> None:
    """Prints the times of two ways and their ratio."""
    for way in ways.values():
        way.time(batch)
    times = np.array([[way.time(batch) for way in ways.values()] for _ in range(turns)])
    for name, ms in zip(ways, np.median(times, axis=0) * 1e3, strict=True):
        print(f"  {name:20} {ms:9.3f} ms/step")
    ratio = np.median(times[:, 0] / times[:, 1])
    print(f"  {' / '.join(ways)}  {ratio:6.2f}", flush=True)


def measure(model: Model, turns: int, program: str | None) -> None:
    params, batch = model.params(), model.batch()
    compiled = model.pipeline().compile(params, *batch)
    print(f"\n{model.name}")
    ways = {
        "pipeline": State(compiled, params),
        "plain jax.jit": State(model.plain(), jax.tree.map(jnp.copy, params)),
    }
    compare(ways, batch, turns)
    if program:
        measure_bare(compiled, turns, program)


def measure_reductions(turns: int) -> None:
    """Two ranks of two devices, each with half of every microbatch."""
    model = dataclasses.replace(MODELS[1], stages=2, data=2)
    params, batch = model.params(), model.batch()

    def state(reduce_once: bool) -> State:
        step = model.pipeline(reduce_once=reduce_once)
        return State(step, jax.tree.map(jnp.copy, params))

    print(f"\n{model.name}: gradients are reduced")
    compare({"once a step": state(True), "once a microbatch": state(False)}, batch, turns)


def measure_bare(compiled: Any, turns: int, program: str) -> None:
    """The same step from C: with the runtime, and with the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / "step.plan")
        compiled.save(path)
        command = [program, path, lammps_jax_pjrt_cpu.PLUGIN_PATH, str(turns)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    first, *rows = done.stdout.splitlines()
    times = np.array([[float(us) for us in row.split()] for row in rows])
    calls = int(first)
    print(f"  from C, {calls} runs, sends and deletions a step")
    for name, us in zip(("runtime", "bare loop"), np.median(times, axis=0), strict=True):
        print(f"  {name:15} {us / 1e3:9.3f} ms/step  {us / calls:7.2f} us/instruction")
    print(
        f"  runtime / bare loop       {np.median(times[:, 0] / times[:, 1]):6.2f}", flush=True
    )


def prepare(pieces: int) -> float:
    """Prepares a batch in numpy; returns how long that took."""
    generator = np.random.default_rng(0)
    start = time.perf_counter()
    for _ in range(pieces):
        generator.standard_normal(1 << 12)
    return time.perf_counter() - start


def measure_overlap(model: Model, turns: int) -> None:
    """A loop that prepares a batch for as long as a step takes, while the previous step
    runs. It begins and ends with a step in flight."""
    params, batch = model.params(), model.batch()
    state = State(model.pipeline().compile(params, *batch), params)
    state.time(batch)
    step = float(np.median([state.time(batch) for _ in range(turns)]))
    pieces = max(1, round(step / prepare(1000) * 1000))
    work = float(np.median([prepare(pieces) for _ in range(turns)]))
    state.params, loss = state.step(state.params, *batch)
    start = time.perf_counter()
    for _ in range(turns):
        prepare(pieces)
        jax.block_until_ready((state.params, loss))
        state.params, loss = state.step(state.params, *batch)
    together = (time.perf_counter() - start) / turns
    jax.block_until_ready((state.params, loss))
    pool = "" if "NPROC" not in os.environ else f", {os.environ['NPROC']} thread a pool"
    print(f"\n{model.name}{pool}: preparing a batch for as long as a step takes", flush=True)
    step_ms, work_ms, both_ms = step * 1e3, work * 1e3, together * 1e3
    print(f"  step {step_ms:.3f} ms, batch {work_ms:.3f} ms, both {both_ms:.3f} ms")
    print(f"  both / the longer one     {together / max(step, work):6.2f}", flush=True)


def measure_overlap_on_one_core(turns: int) -> None:
    """The same for a step that computes in one thread: on one device, with a pool of one
    thread."""
    command = [sys.executable, __file__, f"--turns={turns}", "--one-core"]
    subprocess.run(command, check=True, env=os.environ | {"NPROC": "1"})


def measure_idle(turns: int) -> None:
    """A step whose tasks are empty: the cost of a call before anything runs."""
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


def measure_token(turns: int) -> None:
    """The next token of two texts in one batch, with a cache of 4096 tokens."""
    generate.BATCHES, generate.LENGTH = 1, 4096

    def plain(params: Any, cache: Any, tokens: Any, start: Any) -> Any:
        own = jax.tree.map(lambda c: c[0], cache)
        found, own = generate.next_tokens(params, own, tokens[0], start, lambda x: x)
        return found[None, :, None], jax.tree.map(lambda c: c[None], own)

    mesh = Model(8, 1, 1).mesh()
    runs = (
        jaxpp.mpmd_jit_with_loop(generate.step, mpmd_mesh=mesh, donate_argnums=1),
        jax.jit(plain, donate_argnums=1),
    )
    params = generate.init(jax.random.key(0))
    start = jnp.zeros((1, generate.SIZE, 1), jnp.int32)
    found = [(start, generate.empty_cache()) for _ in runs]
    times = np.empty((turns + 1, 2))
    for turn in range(turns + 1):
        for k, run in enumerate(runs):
            begin = time.perf_counter()
            tokens, cache = found[k]
            found[k] = jax.block_until_ready(run(params, cache, tokens, turn))
            times[turn, k] = time.perf_counter() - begin
    pipeline_ms, plain_ms = np.median(times[1:], axis=0) * 1e3
    ratio = np.median(times[1:, 0] / times[1:, 1])
    print(f"\nA token through 4 stages: {pipeline_ms:.2f} ms, plain jax.jit {plain_ms:.2f} ms")
    print(f"  pipeline / plain jax.jit  {ratio:6.2f}", flush=True)


def measure_deep(program: str) -> None:
    params, batch = DEEP.params(), DEEP.batch()
    print(f"\n{DEEP.name}, on 4 devices", flush=True)
    measure_bare(DEEP.pipeline().compile(params, *batch), 3, program)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--bench-plan", metavar="PROGRAM")
    parser.add_argument(
        "--one-core", action="store_true", help=argparse.SUPPRESS
    )  # set for a child process
    options = parser.parse_args()
    turns = options.turns
    if options.one_core:
        measure_overlap(dataclasses.replace(MODELS[1], stages=1), turns)
        return
    jax.config.update("jax_num_cpu_devices", 4)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, medians of {turns} turns")
    for model in MODELS:
        measure(model, turns, options.bench_plan)
        measure_overlap(model, turns)
    measure_reductions(turns)
    measure_overlap_on_one_core(turns)
    measure_idle(turns)
    measure_token(turns)
    if options.bench_plan:
        measure_deep(options.bench_plan)


if __name__ == "__main__":
    main()
