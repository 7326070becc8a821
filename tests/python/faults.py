"""Faults at random moments: jobs of several processes of which one is killed or stopped, or
whose launcher is interrupted, ended or killed.

    python tests/python/faults.py --runs 200 [--seed N]

Each job must end by itself, with a failure; who was hit must be named by all others, or by the
launcher where JAX has ended some at once, as it does without its coordinator in process 0; no
process and no segment of shared memory may be left.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from command import jaxpp_command

JOBS = pathlib.Path(__file__).parent / "jobs.py"
LIMIT = 120
PEER_TIMEOUT = "2"
# SIGTERM to one process is not among them: JAX takes it as the notice of a preemption.
ON_PROCESS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
ON_LAUNCHER = {
    "interrupt the launcher": signal.SIGINT,
    "terminate the launcher": signal.SIGTERM,
    "kill the launcher": signal.SIGKILL,
}
FAULTS = (*ON_PROCESS, *ON_LAUNCHER)


def left_over(mark: str) -> list[str]:
    """The processes that have the mark among their arguments."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile
            continue
        if mark.encode() in arguments:
            found.append(file.parent.name)
    return found


def shared_memory() -> set[str]:
    return {file.name for file in pathlib.Path("/dev/shm").iterdir()}


def start(command: str, processes: int, mark: str) -> subprocess.Popen[str]:
    script = [sys.executable, "-u", "-W", "ignore", str(JOBS), "training_all", "1", mark]
    return subprocess.Popen(
        [command, "launch", "-n", str(processes), "--", *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JPP_ADDRESS": "127.0.0.1", "JPP_PEER_TIMEOUT": PEER_TIMEOUT},
    )


def await_training(launcher: subprocess.Popen[str], processes: int) -> dict[int, int]:
    """The process ids, by number, once all have made a few steps."""
    assert launcher.stdout is not None
    ids: dict[int, int] = {}
    while len(ids) < processes:
        line = launcher.stdout.readline()
        assert line, "the job ended before it trained"
        found = re.fullmatch(r"\[(\d+)\] training as (\d+)\n", line)
        if found:
            ids[int(found[1])] = int(found[2])
    return ids


def hurt(fault: str, launcher: subprocess.Popen[str], victim: int) -> None:
    if fault in ON_LAUNCHER:
        launcher.send_signal(ON_LAUNCHER[fault])
    else:
        os.kill(victim, ON_PROCESS[fault])


def complaints(
    fault: str, victim: int, status: int, output: str, before: set[str]
) -> list[str]:
    found = []
    if status == 0:
        found.append("the launcher says that all is well")
    if fault in ON_PROCESS:
        errors = re.findall(r"^\[\d+\] jaxpp\.Jaxpp\w*Error: (.*)$", output, re.MULTILINE)
        by_jax = victim == 0 and "JAX distributed service detected fatal errors" in output
        told = by_jax and f"jaxpp launch: process {victim} " in output
        if not errors and not told:
            found.append("nobody says what happened")
        found += [
            f"not the culprit, process {victim}: {e}"
            for e in errors
            # One that JAX has ended by then is as gone for its neighbours as process 0.
            if f"process {victim} " not in e and not (told and "connection was lost" in e)
        ]
    segments = shared_memory() - before
    if segments:
        found.append(f"left in /dev/shm: {sorted(segments)}")
    return found


def run(command: str, rng: random.Random) -> tuple[str, list[str]]:
    processes, fault = rng.choice([2, 3, 4]), rng.choice(FAULTS)
    victim, delay = rng.randrange(processes), rng.uniform(0, 0.5)
    what = f"{processes} processes, {fault}, process {victim}, after {delay:.3f} s"
    before = shared_memory()
    with tempfile.TemporaryDirectory() as mark:
        launcher = start(command, processes, mark)
        try:
            ids = await_training(launcher, processes)
            time.sleep(delay)
            hurt(fault, launcher, ids[victim])
            output = launcher.communicate(timeout=LIMIT)[0]
            found = complaints(fault, victim, launcher.returncode, output, before)
        except subprocess.TimeoutExpired:
            found = ["it hangs"]
        finally:
            launcher.kill()
        launcher.wait()
        rest = left_over(mark)
        until = time.monotonic() + 10
        while rest and time.monotonic() < until:  # the kernel may take a moment
            time.sleep(0.1)
            rest = left_over(mark)
        for number in rest:
            os.kill(int(number), signal.SIGKILL)
        if rest:
            found.append(f"left over: {rest}")
    return what, found


Run = Callable[[random.Random], tuple[str, list[str]]]  # what was done, and what is wrong


def main(description: str, run: Run, runs: int) -> int:
    """Runs as often as the command line says, or `runs` times."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    failed = 0
    for i in range(flags.runs):
        what, found = run(random.Random(flags.seed + i))
        print(f"seed {flags.seed + i}: {what}: {'; '.join(found) or 'fine'}", flush=True)
        failed += bool(found)
    print(f"{flags.runs - failed} of {flags.runs} ended as they should")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(__doc__, functools.partial(run, jaxpp_command()), 200))
