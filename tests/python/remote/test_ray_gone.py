"""Ray itself is stopped or killed while a mesh trains, which one error reports in 30 seconds.

Each case runs this file as a script, with a Ray cluster of its own.
"""

from __future__ import annotations

import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time

import pytest

from locations import environment

LIMIT = 30  # seconds from the fault to the error
SERVERS = {"GCS": "gcs_server", "raylet": "raylet/raylet"}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("server", "fault"),
    [
        ("raylet", "SIGKILL"),
        ("raylet", "SIGSTOP"),
        ("GCS", "SIGKILL"),
        ("GCS", "SIGSTOP"),
    ],
)
def test_the_error_names_what_is_gone(server: str, fault: str) -> None:
    pytest.importorskip("ray")
    variables = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, server, fault],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment(**variables),
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("after ")]
    assert len(told) == 1, done.stdout + done.stderr
    _, seconds, error = told[0].split(" ", 2)
    assert float(seconds) < LIMIT
    assert server in error and ("killed" in error or "has not answered" in error)


def children(name: str) -> list[int]:
    """The child processes of this process whose command contains the name."""
    found = []
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            command = (folder / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == os.getpid() and name in command.split("\0")[0]:
            found.append(int(folder.name))
    return found


def train_until_failure(server: str, fault: str) -> None:
    import ray

    import jaxpp.api as jaxpp
    import trainings

    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    mesh = jaxpp.RemoteMpmdMesh(2, (1,), ("data",), _env={"JPP_ADDRESS": "127.0.0.1"})
    (victim,) = children(SERVERS[server])
    others = [process for name in SERVERS.values() for process in children(name)]
    hit_at = []

    def hit() -> None:
        hit_at.append(time.monotonic())
        os.kill(victim, getattr(signal, fault))

    try:
        for line in trainings.train("mlp", mesh, steps=10**7):
            if line.startswith("mlp loss 3 "):
                threading.Thread(target=hit).start()
    except jaxpp.JaxppError as error:
        print("after", time.monotonic() - hit_at[0], error, flush=True)
    # Ray's shutdown would wait for the process that is gone.
    for process in others:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    os._exit(0)


if __name__ == "__main__":
    train_until_failure(*sys.argv[1:])
