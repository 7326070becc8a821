"""Faults at random moments in meshes on Ray.

A worker is killed or stopped while the controller compiles, connects or trains:

    python tests/python/support/ray_faults.py --runs 50 [--seed N]

Within 30 seconds the controller must get one error that names the worker, and no worker may be
left. All meshes are made in the same process.
"""

from __future__ import annotations

import os
import pathlib
import random
import secrets
import signal
import sys
import threading
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray

import faults
import jaxpp.api as jaxpp
import trainings

LIMIT = 30
ON_PROCESS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def lives(process: int) -> bool:
    try:
        stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def train_until_failure(mesh: Any) -> str:
    """Starts a training of several minutes; returns the text of the error that ends it."""
    try:
        for _ in trainings.train("mlp", mesh, steps=100_000):
            pass
    except jaxpp.JaxppError as error:
        return f"{error.code}: {error}"
    return "no error"


def run(rng: random.Random) -> tuple[str, list[str]]:
    ranks, fault = rng.choice([2, 3, 4]), rng.choice([*ON_PROCESS])
    victim = rng.randrange(ranks)
    delay = rng.uniform(0, rng.choice([0.3, 5]))
    what = f"{ranks} workers, {fault}, rank {victim}, after {delay:.3f} s"
    mesh = jaxpp.RemoteMpmdMesh(ranks, (1,), ("data",), _env={"JPP_ADDRESS": "127.0.0.1"})
    processes = [process for _, process in mesh.processes]
    hit = threading.Timer(delay, os.kill, (processes[victim], ON_PROCESS[fault]))
    start = time.monotonic()
    hit.start()
    told = train_until_failure(mesh)
    took = time.monotonic() - start - delay
    hit.join()
    found = []
    if not told.startswith(f"peer: rank {victim} (host "):
        found.append(f"not the culprit: {told}")
    if took > LIMIT:
        found.append(f"it took {took:.0f} s")
    while (rest := [p for p in processes if lives(p)]) and took < LIMIT:
        time.sleep(0.1)
        took = time.monotonic() - start - delay
    for process in rest:
        os.kill(process, signal.SIGKILL)
    if rest:
        found.append(f"left over: {rest}")
    return what, found


if __name__ == "__main__":
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    sys.exit(faults.main(__doc__, run, 50))
