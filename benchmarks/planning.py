"""How the time of planning grows: `jaxpp plan` on synthetic training steps of 64 stages
and 1,024 microbatches under 1F1B, from reading the graph to proving the plan.

Two things cost time: ops, once each, and values that a task takes or keeps (weights,
gradients, activations), once per microbatch each. In the first table a stage has 16
weights and rematerialises its activations from its input; the second table has more of
both.

    python benchmarks/planning.py
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

STAGES, MICROBATCHES = 64, 1024
OPS = (125_000, 250_000, 500_000, 1_000_000)
WEIGHTS = 16
MORE_WEIGHTS = (32, 64, 128, 256)  # with a graph of OPS[0] ops


def graph_lines(ops: int, weights: int) -> Iterator[str]:
    """Stages that are chains of layers; in each, the first `weights` layers have a
    weight. If there are more than WEIGHTS, the backwards of these layers keep their
    inputs; other backwards use the stage's input."""
    t = ":f32[8,8]"
    length = (ops - 2 * weights * STAGES) // (2 * STAGES)  # layers per stage
    names = [f"{s}_{k}" for s in range(STAGES) for k in range(weights)]
    yield f'graph "chain" ranks {STAGES}'
    for name in names:
        yield f"arg %w{name} f32[8,8] donated"
    yield f"arg %x f32[{MICROBATCHES},8,8]"
    yield f'loop microbatches {MICROBATCHES} stages {STAGES} schedule "1f1b" index %i {{'
    yield f"%h0_0{t} = slice(%x, %i) cheap"
    for s in range(STAGES):
        for k in range(length):
            weight = f", %w{s}_{k}" if k < weights else ""
            yield f"%h{s}_{k + 1}{t} = layer(%h{s}_{k}{weight}) cost 1024"
        yield f"%h{s + 1}_0{t} = @mark {s} (%h{s}_{length})"
    yield f"%c{STAGES}{t} = loss_t(%h{STAGES}_0) backward"
    for s in reversed(range(STAGES)):
        yield f"%c{s}_{length}{t} = @mark_backward {s} (%c{s + 1}) backward"
        for k in reversed(range(length)):
            taken = f"%h{s}_{k if k < weights > WEIGHTS else 0}, %c{s}_{k + 1}"
            if k < weights:
                yield f"%g{s}_{k}{t} = layer_w({taken}) backward cost 1024"
                taken += f", %w{s}_{k}"
            yield f"%c{s}_{k}{t} = layer_t({taken}) backward cost 1024"
        yield f"%c{s}{t} = pass(%c{s}_0) backward"
    yield "} " + ", ".join(f"%G{name}{t} = add %g{name}" for name in names)
    for name in names:
        yield f"%n{name}{t} = sgd(%w{name}, %G{name})"
        yield f"out %n{name}"


def measure(path: pathlib.Path, ops: int, weights: int) -> str:
    """Seconds and peak MB."""
    with path.open("w") as file:  # small, as the peak counts this process before it is replaced
        file.writelines(f"{line}\n" for line in graph_lines(ops, weights))
    command = str(pathlib.Path(sys.executable).with_name("jaxpp"))
    start = time.perf_counter()
    process = subprocess.Popen([command, "plan", str(path)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{command} plan failed")
    return f"{time.perf_counter() - start:6.2f} s  {usage.ru_maxrss / 1024:6.0f} MB"


def main() -> None:
    print(f"\nPlanning, {STAGES} stages, {MICROBATCHES:,} microbatches")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "chain.jpp"
        for ops in OPS:
            print(f"  {ops:9,} ops  {measure(path, ops, WEIGHTS)}", flush=True)
        print(f"  {OPS[0]:,} ops, by weights and kept activations a stage")
        for weights in MORE_WEIGHTS:
            print(f"  {weights:9,} each {measure(path, OPS[0], weights)}", flush=True)


if __name__ == "__main__":
    main()
