"""Faults at any moment of a job of several processes, started in all possible ways.

    python tests/python/support/faults.py --runs 200 [--seed N]

The job is fault_jobs.py, with the default timeouts. All processes must be gone 15 seconds after
the fault, or 25 seconds after it if a process was stopped, which counts as dead after 10. Each
survivor must end with one error that names the victim. The launcher must name the victim too
and exit with its status. No process and no shared memory segment may be left.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from locations import jaxpp_command

JOBS = pathlib.Path(__file__).with_name("fault_jobs.py")
LIMIT = 150  # seconds until a job counts as hanging
GONE = 15
SILENCE = 10
STEPS = 8  # as in fault_jobs.py
MOMENTS = (
    "import",
    "compile",
    "first-step",
    "steady",
    "saving",
    "waiting",
    "between-steps",
    "leaving",
)
STATUS = {"kill": 128 + signal.SIGKILL, "stop": 128 + signal.SIGKILL, "raise": 1, "exit": 3}
FAULTS = (*STATUS, "leave")
ON_LAUNCHER = {
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
    "kill the launcher": signal.SIGKILL,
}
# Environment variables of jobs with one task under Slurm and Open MPI.
AROUND = {
    "slurm": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "1",
    },
    "ompi": {
        "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://192.0.2.1:34911",
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    },
}
WAYS = ("launch", "shell", *AROUND, "plain")
BY_JAX = "JAX distributed service detected fatal errors"


@dataclasses.dataclass(frozen=True)
class Case:
    moment: str
    fault: str
    way: str
    processes: int
    victim: int
    delay: float
    restarts: int = 0

    def is_possible(self) -> bool:
        if self.fault in ON_LAUNCHER:
            return self.way != "plain" and self.moment == "steady"
        if self.moment == "import":  # JAX's initialize() has its own timeouts
            return self.way != "plain" and self.fault not in ("stop", "leave")
        if self.moment in ("waiting", "leaving"):
            return self.fault in ("kill", "stop")
        # Between steps, the other processes may finish without one that has left.
        return self.moment != "between-steps" or self.fault not in ("exit", "leave")


def left_over(mark: str) -> list[str]:
    """The ids of processes that have the mark among their arguments."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = file.read_bytes().split(b"\0")
        except OSError:  # the process has ended meanwhile
            continue
        if mark.encode() in arguments:
            found.append(file.parent.name)
    return found


def shared_memory() -> set[str]:
    return {file.name for file in pathlib.Path("/dev/shm").iterdir()}


def _script(case: Case, mark: str) -> list[str]:
    job = [case.moment, case.fault, str(case.victim), f"{case.delay:.3f}", mark]
    return [sys.executable, "-u", "-W", "ignore", str(JOBS), *job]


def _environment(case: Case) -> dict[str, str]:
    return {**os.environ, "JPP_ADDRESS": "127.0.0.1", **AROUND.get(case.way, {})}


def _run_launched(command: str, case: Case, mark: str) -> tuple[int, str, float]:
    """Returns the exit status, the output and the time at which all processes were gone."""
    script = _script(case, mark)
    if case.way == "shell":
        script = ["sh", "-c", '"$@"; exit $?', "sh", *script]
    flags = ["-n", str(case.processes), "--restarts", str(case.restarts)]
    if not case.restarts:
        flags = flags[:2]
    if case.fault in ON_LAUNCHER:
        flags += ["--grace", "5"]
    launcher = subprocess.Popen(
        [command, "launch", *flags, "--", *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=_environment(case),
    )
    assert launcher.stdout is not None
    output = ""
    try:
        if case.fault in ON_LAUNCHER:
            while f"[{case.victim}] at steady" not in output:
                line = launcher.stdout.readline()
                assert line, output
                output += line
            time.sleep(case.delay)
            output += f"hit {time.time()}\n"
            launcher.send_signal(ON_LAUNCHER[case.fault])
        output += launcher.communicate(timeout=LIMIT)[0]
    finally:
        launcher.kill()
        launcher.wait()
    while (
        left_over(mark) and case.fault == "kill the launcher"
    ):  # the launcher's guard process needs a moment to kill the others
        time.sleep(0.05)
        if time.time() - _hit_at(output) > GONE:
            break
    return launcher.returncode, output, time.time()


def _run_plain(case: Case, mark: str) -> tuple[list[int], str, float]:
    """Runs processes without a launcher. A stopped process is killed once the others are
    gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        files = [pathlib.Path(folder, str(i)) for i in range(case.processes)]
        started = [
            subprocess.Popen(
                [*_script(case, mark), address, str(case.processes), str(i)],
                stdout=file.open("w"),
                stderr=subprocess.STDOUT,
                env=_environment(case),
            )
            for i, file in enumerate(files)
        ]
        try:
            for i, process in enumerate(started):
                if case.fault != "stop" or i != case.victim:
                    process.wait(LIMIT)
            gone = time.time()
        finally:
            for process in started:
                process.kill()
                process.wait()
        output = ""
        for i, file in enumerate(files):
            output += "".join(f"[{i}] {line}\n" for line in file.read_text().splitlines())
    return [process.returncode for process in started], output, gone


def _hit_at(output: str) -> float:
    hit = re.search(r"^(?:\[\d+\] )?hit (\S+)$", output, re.MULTILINE)
    return float(hit[1]) if hit else 0


def _is_named(case: Case, output: str) -> list[str]:
    """Checks that the survivors' errors name the victim; returns the complaints."""
    found = []
    for i in range(case.processes):
        if i == case.victim:
            continue
        lines = re.findall(rf"^\[{i}\] (.*)$", output, re.MULTILINE)
        errors = [x for x in lines if re.match(r"jaxpp\.Jaxpp\w*Error: |jaxpp: error: ", x)]
        by_jax = case.victim == 0 and any(BY_JAX in x for x in lines)
        ended_well = f"[{i}] step {STEPS} " in output and not errors  # before the fault
        if len(errors) != 1 and not by_jax and not ended_well:
            found.append(f"process {i} has {len(errors)} errors: {errors}")
        found += [
            f"process {i} does not name process {case.victim}: {x}"
            for x in errors
            if f"process {case.victim} " not in x
        ]
    return found


def complaints(case: Case, status: int | list[int], output: str, took: float) -> list[str]:
    found = []
    if took > GONE + SILENCE * (case.fault == "stop"):
        found.append(f"gone after {took:.1f} s")
    if case.fault in ON_LAUNCHER:
        number = ON_LAUNCHER[case.fault]
        if status != (-number if number == signal.SIGKILL else 128 + number):
            found.append(f"the launcher's status is {status}")
        return found
    if isinstance(status, list):
        done = [f"[{i}] step {STEPS} " in output for i in range(case.processes)]
        wrong = [i for i, s in enumerate(status) if s == 0 and not done[i] and i != case.victim]
        if wrong:
            found.append(f"the statuses are {status}")
        return found + _is_named(case, output)
    named = re.findall(r"^jaxpp launch: process (\d+)", output, re.MULTILINE)
    if named != [str(case.victim)]:
        found.append(f"the launcher names {named}")
    expected = STATUS.get(case.fault, status or -1)
    if status != (0 if case.restarts else expected):
        found.append(f"the launcher's status is {status}")
    if case.restarts:
        return found
    return found + (_is_named(case, output) if case.moment != "import" else [])


def restart_time(output: str) -> float:
    """The seconds from the fault to the first step after the restart."""
    _, _, again = output.partition("starting all processes again")
    first = re.search(r"step \d+ (\S+)$", again, re.MULTILINE)
    return float(first[1]) - _hit_at(output) if first else LIMIT


def run_case(command: str, case: Case) -> tuple[list[str], float]:
    """Returns the complaints, and the seconds from the fault until all processes were gone."""
    before = shared_memory()
    took = 0.0
    with tempfile.TemporaryDirectory() as mark:
        status: int | list[int]
        try:
            if case.way == "plain":
                status, output, gone = _run_plain(case, mark)
            else:
                status, output, gone = _run_launched(command, case, mark)
            took = restart_time(output) if case.restarts else gone - _hit_at(output)
            found = complaints(case, status, output, took - GONE * (case.restarts > 0))
            if case.moment == "leaving" and status in (0, [0] * case.processes):
                found, took = [], 0.0  # the victim had already left
            if found:
                print(output, file=sys.stderr)
        except subprocess.TimeoutExpired:
            found = ["it hangs"]
        rest = left_over(mark)
        until = time.monotonic() + 10
        while rest and time.monotonic() < until:  # the kernel may need a moment
            time.sleep(0.1)
            rest = left_over(mark)
        for number in rest:
            os.kill(int(number), signal.SIGKILL)
        if rest:
            found.append(f"left over: {rest}")
    # Segments may belong to jobs of other tests that run at the same time.
    while (segments := shared_memory() - before) and time.monotonic() < until + 50:
        time.sleep(0.1)
    if segments:
        found.append(f"left in /dev/shm: {sorted(segments)}")
    return found, took


def random_case(rng: random.Random) -> Case:
    while True:
        processes = rng.choice([2, 3, 4])
        fault = rng.choice([*FAULTS, *FAULTS, *ON_LAUNCHER])
        case = Case(
            moment="steady" if fault in ON_LAUNCHER else rng.choice(MOMENTS),
            fault=fault,
            way=rng.choice(WAYS),
            processes=processes,
            victim=rng.randrange(processes),
            delay=rng.uniform(0, 0.5),
        )
        if not case.is_possible():
            continue
        restarts = case.way != "plain" and fault in STATUS and rng.random() < 0.2
        return dataclasses.replace(case, restarts=1) if restarts else case


def run(command: str, rng: random.Random) -> tuple[str, list[str]]:
    case = random_case(rng)
    found, took = run_case(command, case)
    again = ", again in its first step" if case.restarts else ""
    what = (
        f"{case.way}, {case.processes} processes, {case.fault} process {case.victim}, "
        f"{case.moment} + {case.delay:.3f} s{again}, {took:.1f} s"
    )
    return what, found


Run = Callable[[random.Random], tuple[str, list[str]]]  # a description, and complaints


def main(description: str, run: Run, runs: int) -> int:
    """Calls `run` as often as --runs says, `runs` times by default."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--runs", type=int, default=runs)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    # In the background of a shell, processes begin with SIGINT ignored, and pass that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    for i in range(flags.runs):
        what, found = run(random.Random(flags.seed + i))
        print(f"seed {flags.seed + i}: {what}: {'; '.join(found) or 'fine'}", flush=True)
        failed += bool(found)
    print(f"{flags.runs - failed} of {flags.runs} ended as they should")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(__doc__, functools.partial(run, jaxpp_command()), 200))
