"""Times from the first call to its result, each in a fresh process: for plain `jax.jit`,
for the pipeline, and for the pipeline with the compilation cache that an earlier process
filled; and in the same processes the first call with sequences of another length. The
three take turns; times are medians, ratios are medians of ratios within a turn.

    python benchmarks/first_result.py [--turns N] [MODEL ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from models import Decoder, Model

WAYS = ("plain jax.jit", "pipeline", "pipeline, cached")
MODELS = {
    "mlp": Model(128, 64, 4),
    "decoder-12": Decoder(128, 64, 4, layers=12),
    "decoder-32": Decoder(128, 64, 4, layers=32),
    "decoder-12-data-2": Decoder(128, 64, 4, layers=12, data=2),
}


def time_call(step: object, model: Model) -> tuple[float, float]:
    """Seconds from a call to its result, and the CPU seconds that the process used."""
    params, batch = jax.block_until_ready((model.params(), model.batch()))
    start, cpu_start = time.perf_counter(), time.process_time()
    jax.block_until_ready(step(params, *batch)[1])
    return time.perf_counter() - start, time.process_time() - cpu_start


def run_here(name: str, way: str) -> None:
    """Prints the times of the first call, and of the first call with longer sequences."""
    model = MODELS[name]
    jax.config.update("jax_num_cpu_devices", model.stages * model.data)
    step = model.plain() if way == WAYS[0] else model.pipeline()
    first = time_call(step, model)
    longer = dataclasses.replace(model, sequence=model.sequence + 16)
    print(*first, time_call(step, longer)[0])


def run(name: str, way: str, cache: str) -> list[float]:
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if way == WAYS[2]:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    command = [sys.executable, __file__, "--one", way, name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return [float(word) for word in done.stdout.split()]


def measure(name: str, turns: int) -> None:
    with tempfile.TemporaryDirectory() as cache:
        run(name, WAYS[2], cache)  # fills the cache
        times = np.array([[run(name, way, cache) for way in WAYS] for _ in range(turns)])
    ratios = np.median(times / times[:, :1], axis=0)
    medians = np.median(times, axis=0)
    print(f"\n{name}: {MODELS[name].name}")
    print(f"{'':20}{'first result':>16}{'CPU':>20}{'another length':>20}")
    for way, row, row_ratios in zip(WAYS, medians, ratios, strict=True):
        cells = zip(row, row_ratios, strict=True)
        print(f"  {way:18}", *(f"{s:8.2f} s {ratio:6.2f} x" for s, ratio in cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    args = parser.parse_args()
    if args.one:
        run_here(args.models[0], args.one)
        return
    for name in args.models or MODELS:
        measure(name, args.turns)


if __name__ == "__main__":
    main()
