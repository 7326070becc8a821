"""From the first call to its result, each in a fresh process: plain `jax.jit`, the pipeline,
and the pipeline with what an earlier process left in the compilation cache. The three take
turns; times are medians, ratios are medians of ratios within a turn.

    python benchmarks/first_result.py [--turns N]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

import numpy as np

WAYS = ("plain jax.jit", "pipeline", "pipeline, cached")


def run_here(way: str) -> None:
    """Prints the seconds from the call to its result."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from models import Model

    jax.config.update("jax_num_cpu_devices", 4)
    model = Model(128, 64, 4)
    params, batch = jax.block_until_ready((model.params(), model.batch()))
    step = model.plain() if way == WAYS[0] else model.pipeline()
    start = time.perf_counter()
    jax.block_until_ready(step(params, *batch)[1])
    print(time.perf_counter() - start)


def run(way: str, cache: str) -> float:
    environment = dict(os.environ)
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    if way == WAYS[2]:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
    command = [sys.executable, __file__, "--one", way]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_here(args.one)
        return
    with tempfile.TemporaryDirectory() as cache:
        run(WAYS[2], cache)  # fills it
        times = np.array([[run(way, cache) for way in WAYS] for _ in range(args.turns)])
    ratios = np.median(times / times[:, :1], axis=0)
    print("\nFrom the first call to its result (8 layers, d=128, seq 64, 4 microbatches)")
    for way, seconds, ratio in zip(WAYS, np.median(times, axis=0), ratios, strict=True):
        print(f"  {way:17} {seconds:6.2f} s  ratio {ratio:5.2f}")


if __name__ == "__main__":
    main()
