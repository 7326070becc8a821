"""A selection of the faults of faults.py: a job ends within seconds and names the process that
failed, whatever its processes are doing and however it was started."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

from faults import Case, run_case

CASES = [
    Case("compile", "kill", "shell", 2, 1, 0.1),
    Case("saving", "exit", "ompi", 2, 1, 0),
    Case("steady", "leave", "launch", 2, 0, 0),
    Case("saving", "kill", "launch", 3, 1, 0.2),
    Case("between-steps", "raise", "slurm", 2, 1, 0),
    Case("steady", "kill the launcher", "shell", 2, 0, 0.1),
]
LONGER = [
    Case("first-step", "leave", "plain", 2, 0, 0),
    Case("saving", "stop", "plain", 3, 0, 0.2),
    Case("waiting", "kill", "plain", 3, 2, 0.2),
    Case("between-steps", "kill", "plain", 2, 1, 0.2),
    Case("leaving", "stop", "launch", 2, 1, 0),
    Case("saving", "stop", "launch", 2, 1, 0.2, restarts=1),
]
STOPS_ONE = 'test $JPP_PROCESS_ID = 0 || sh -c "kill -STOP \\$\\$"; exit 0'


def name_of(case: Case) -> str:
    return f"{case.moment}-{case.fault}-{case.way}"


@pytest.mark.sample(1)
@pytest.mark.own_devices
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_a_fault_ends_its_job(command: str, case: Case) -> None:
    found, _ = run_case(command, case)
    assert found == []


@pytest.mark.soak
@pytest.mark.own_devices
@pytest.mark.parametrize("case", LONGER, ids=name_of)
def test_a_fault_that_takes_longer_to_notice_ends_its_job(command: str, case: Case) -> None:
    found, _ = run_case(command, case)
    assert found == []


def test_a_process_that_is_stopped_alone(command: str) -> None:
    done = subprocess.run(
        [command, "launch", "-n", "2", "--", "sh", "-c", STOPS_ONE],
        capture_output=True,
        text=True,
        env={**os.environ, "JPP_PEER_TIMEOUT": "0.1"},
        timeout=60,
    )
    assert done.returncode == 128 + signal.SIGKILL
    found = r"process 1 \(pid \d+\) was stopped \(SIGSTOP\) and did not continue"
    assert re.search(found, done.stderr), done.stderr


WITHOUT_INITIALIZE = """
import jax, numpy as np
import jaxpp.api as jaxpp
jax.config.update("jax_platforms", "cpu")
jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("stage",)), "stage")
"""
BEFORE_THE_IMPORT = """
import jax
jax.config.update("jax_platforms", "cpu")
jax.distributed.initialize()
import jaxpp.api
print("is", jax.process_index(), "of", jax.process_count())
"""


def launched(command: str, script: str, tmp_path: pathlib.Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [command, "launch", "-n", "2", "--", sys.executable, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "SLURM_JOB_ID": "1", "JPP_ADDRESS": "127.0.0.1"},
        timeout=120,
        check=True,
    )
    return done.stdout + done.stderr


def test_processes_without_initialize(command: str, tmp_path: pathlib.Path) -> None:
    output = launched(command, WITHOUT_INITIALIZE, tmp_path)
    warning = r"\[\d\] .*script.py:5: UserWarning: jaxpp launch started 2 processes"
    assert len(re.findall(warning, output)) == 2, output


def test_initialize_before_the_import(command: str, tmp_path: pathlib.Path) -> None:
    output = launched(command, BEFORE_THE_IMPORT, tmp_path)
    assert sorted(re.findall(r"is \d of 2", output)) == ["is 0 of 2", "is 1 of 2"]
