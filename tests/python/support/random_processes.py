"""Random models in several processes, with `jaxpp launch` or Ray, against a single process.

All results must be bitwise equal. A case depends only on its seed, so a failure can be
reproduced:

    python tests/python/support/random_processes.py --cases 100 [--ray]
    python tests/python/support/random_processes.py --first 1234 --cases 1 [--ray]
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import secrets
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

import jaxpp.api as jaxpp
import trainings
from equality import mesh_of
from locations import jaxpp_command
from random_models import Case, make_case, train

LIMIT = 600  # seconds; only to make a hang fail
# A process that crashes prints the stacks of its Python threads.
_ENVIRONMENT = {"JPP_ADDRESS": "127.0.0.1", "PYTHONFAULTHANDLER": "1"}
_OF_DEVICES = {"explicit axes", "arrays on the mesh", "context mesh"}


def digests(case: Case, mesh: Any) -> Iterator[str]:
    """A line for each leaf of each step, with a hash of the bytes that this process holds."""
    for n, found in enumerate(train(case, mesh)):
        yield from trainings.described(f"{case.seed} step {n} ", found)


def _mesh_here(case: Case) -> Any:
    return mesh_of(case.ranks, case.axes, sharing=1)


def say_digests(seeds: Sequence[int]) -> None:
    """Prints the digests of these cases in a process of a job."""
    jax.distributed.initialize()
    for seed in seeds:
        case = make_case(seed)
        assert case.devices == len(jax.devices()), "a process without ranks"
        for line in digests(case, _mesh_here(case)):
            trainings.say(line)


def _groups(seeds: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """Groups the seeds by the number of processes and of devices per process. Models whose
    ranks cannot be divided over several processes are left out."""
    found = collections.defaultdict(list)
    for seed in seeds:
        case = make_case(seed)
        counts = [n for n in (2, 3, 4) if case.ranks % n == 0]
        if counts:
            count = random.Random(seed).choice(counts)
            found[count, case.devices // count].append(seed)
    return found


def _job(processes: int, devices: int, seeds: Sequence[int]) -> tuple[set[str], str]:
    """Runs the cases in a job; returns the lines of all processes, and their stderr."""
    child = [sys.executable, "-W", "ignore", __file__, "--process", *map(str, seeds)]
    job = subprocess.run(
        [jaxpp_command(), "launch", "-n", str(processes), "--", *child],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **_ENVIRONMENT, "TEST_DEVICES": str(devices)},
    )
    return {line.partition("] ")[2] for line in job.stdout.splitlines()}, job.stderr


def _difference(seed: int, said: set[str]) -> str | None:
    """The first difference between a job's lines and this process' lines of a case, or None."""
    case = make_case(seed)
    here = set(digests(case, _mesh_here(case)))
    there = {line for line in said if line.startswith(f"{seed} ")}
    if here == there:
        return None
    first = min(here ^ there)
    return f"{first}: only in {'one process' if first in here else 'several'}"


def run_seeds_on_ray(seeds: Sequence[int]) -> tuple[int, list[str]]:
    """Like run_seeds(), with Ray workers and a controller that has no devices of the mesh."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    run, wrong = 0, []
    for seed in seeds:
        case = make_case(seed)
        if _OF_DEVICES & set(case.options):
            continue
        shape, names = tuple(case.axes.values()) or (1,), tuple(case.axes) or ("data",)
        mesh = jaxpp.RemoteMpmdMesh(case.ranks, shape, names, _env=_ENVIRONMENT)
        try:
            difference = _difference(seed, set(digests(case, mesh)))
        except Exception:
            difference = traceback.format_exc()
        mesh.shutdown()
        run += 1
        if difference is not None:
            wrong.append(f"{case}\n{difference}")
    return run, wrong


def run_seeds(seeds: Sequence[int]) -> tuple[int, list[str]]:
    """Returns the number of cases that were run, and the failures."""
    run, wrong = 0, []
    for (processes, devices), group in _groups(seeds).items():
        said, errors = _job(processes, devices, group)
        for seed in group:
            try:
                difference = _difference(seed, said)
            except Exception:
                difference = traceback.format_exc()
            run += 1
            if difference is not None:
                case = make_case(seed)
                wrong.append(f"{processes} processes, {case}\n{difference}\n{errors}")
    return run, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=30, help="how many")
    parser.add_argument("--first", type=int, help="the first seed; by default by the time")
    parser.add_argument("--ray", action="store_true", help="in workers of Ray")
    parser.add_argument("--process", type=int, nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        say_digests(options.process)
        return 0
    first = int(time.time()) % 10**6 * 1000 if options.first is None else options.first
    print(f"seeds {first} to {first + options.cases - 1}", flush=True)
    run_all = run_seeds_on_ray if options.ray else run_seeds
    run, wrong = run_all(range(first, first + options.cases))
    print(*wrong, sep="\n")
    print(f"{run - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
