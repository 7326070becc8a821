"""Orbax checkpoints in jobs of several processes (checkpoint_jobs.py): each process saves what
its ranks hold, and jobs with any number of processes and ranks can resume, with the same losses
as an uninterrupted training.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import checkpoint_jobs as jobs
from equality import mesh_of
from jaxpp.placements import physical_array
from locations import ROOT
from trainings import described

pytestmark = pytest.mark.own_devices

EXAMPLE = ROOT / "examples" / "processes.py"
LIMIT = 120  # seconds; only to make a hang fail

Launch = Callable[..., set[str]]


@pytest.fixture
def launch(command: str, tmp_path: pathlib.Path) -> Launch:
    def run(job: str, processes: int, devices: int, ranks: int, *flags: str) -> set[str]:
        script = [jobs.__file__, job, str(devices), str(ranks), str(tmp_path / "checkpoints")]
        return output_of([command, "launch", "-n", str(processes), *flags], script)

    return run


def output_of(launch: list[str], script: list[str]) -> set[str]:
    """The lines that the processes of a job print, without the prefix of the process."""
    done = subprocess.run(
        [*launch, "--", sys.executable, "-W", "ignore", *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JPP_ADDRESS": "127.0.0.1"},
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stdout
    return set(re.findall(r"^\[\d\] ((?:loss |state|step |goes |all ).*)", done.stdout, re.M))


def mesh_for(ranks: int, width: int) -> Any:
    return mesh_of(ranks, {} if width == 1 else {"model": width})


@functools.cache
def saved_state() -> Any:
    """The state that two ranks in one process have when the checkpoint is saved."""
    step, state, _ = jobs.step_on(mesh_for(2, 1))
    *_, (_, trained, _) = jobs.train(step, state, range(1, jobs.SAVED + 1))
    return jax.tree.map(np.array, trained)


def goes_on(state: Any, ranks: int, width: int = 1, stages_per_rank: int = 1) -> set[str]:
    """The lines that a training prints when it resumes from `state` after the checkpoint."""
    step, _, _ = jobs.step_on(mesh_for(ranks, width), stages_per_rank)
    steps = list(jobs.train(step, state, range(jobs.SAVED + 1, jobs.STEPS + 1)))
    losses = {line for _, _, lines in steps for line in lines}
    return {*losses, *described("state", steps[-1][1]), f"goes on after {jobs.SAVED}"}


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def restored_here(folder: pathlib.Path) -> Any:
    """The state that orbax restores onto one device of this process, without a pipeline."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, saved_state())
    structs = jobs.structs_of(saved_state(), shardings)
    with ocp.CheckpointManager(folder) as manager:
        return manager.restore(jobs.SAVED, args=ocp.args.StandardRestore(structs))


@pytest.mark.soak
def test_two_processes_save_and_four_go_on(launch: Launch, tmp_path: pathlib.Path) -> None:
    launch("save", 2, 1, 2)
    restored = restored_here(tmp_path / "checkpoints")
    assert bits(restored) == bits(saved_state())
    assert launch("resume", 4, 1, 4) == goes_on(saved_state(), 4)


@pytest.mark.soak
def test_a_resumed_job_goes_on_as_the_straight_one(launch: Launch) -> None:
    """Two of four ranks hold the shared matrix. Gradients are clipped by the global norm."""
    launch("save", 2, 2, 4)
    step, state, _ = jobs.step_on(mesh_for(4, 1))
    steps = list(jobs.train(step, state, range(1, jobs.STEPS + 1)))
    losses = {line for number, _, lines in steps for line in lines if number > jobs.SAVED}
    straight = {*losses, *described("state", steps[-1][1]), f"goes on after {jobs.SAVED}"}
    assert launch("resume", 2, 2, 4) == straight


@pytest.mark.soak
def test_with_the_second_interface(launch: Launch, tmp_path: pathlib.Path) -> None:
    launch("save_v1", 2, 1, 2)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = jobs.structs_of(saved_state(), jax.tree.map(lambda _: device, saved_state()))
    restored = ocp.v1.load(tmp_path / "checkpoints" / str(jobs.SAVED), structs)
    assert bits(restored) == bits(saved_state())
    assert launch("resume_v1", 2, 2, 4) == goes_on(saved_state(), 4)


@pytest.mark.soak
def test_keys_are_saved_as_keys(launch: Launch, tmp_path: pathlib.Path) -> None:
    """Keys held by all ranks and by one rank are restored here and in a job."""
    launch("save_keys", 2, 1, 2)
    step, state, shardings = jobs.dropout_on(mesh_for(2, 1))
    *_, (_, trained, _) = jobs.train(step, state, range(1, jobs.SAVED + 1))
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    structs = jobs.structs_of(state, jax.tree.map(lambda _: device, shardings))
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        restored = manager.restore(jobs.SAVED, args=ocp.args.StandardRestore(structs))
    for found, expected in zip(*map(jax.tree.leaves, (restored, trained)), strict=True):
        assert found.dtype == expected.dtype
        assert np.array_equal(physical_array(found), physical_array(expected))
    step, _, _ = jobs.dropout_on(mesh_for(4, 1))
    steps = list(jobs.train(step, restored, range(jobs.SAVED + 1, jobs.STEPS + 1)))
    lines = launch("resume_keys", 4, 1, 4)
    assert {line for _, _, lines in steps for line in lines} < lines
    assert {*described("state", steps[-1][1])} < lines


def test_a_process_that_is_killed_while_it_saves(launch: Launch) -> None:
    """The others have saved their part of that step, but all resume from the one before."""
    lines = launch("killed", 2, 1, 2, "--restarts", "1")
    step, state, _ = jobs.step_on(mesh_for(2, 1))
    first = {
        line
        for *_, lines in jobs.train(step, state, range(1, jobs.SAVED + 1))
        for line in lines
    }
    assert lines == first | goes_on(saved_state(), 2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("processes", "devices", "ranks"), [(2, 1, 2), (1, 1, 1), (2, 2, 4), (4, 2, 4)]
)
def test_others_go_on(launch: Launch, processes: int, devices: int, ranks: int) -> None:
    launch("save", 2, 1, 2)
    width = processes * devices // ranks
    assert launch("resume", processes, devices, ranks) == goes_on(saved_state(), ranks, width)


@pytest.mark.soak
@pytest.mark.parametrize("job", ["save", "save_interleaved"])
def test_ranks_of_several_devices_and_stages_save(
    launch: Launch, tmp_path: pathlib.Path, job: str
) -> None:
    """One process restores what several saved: shards, or rows that alternate between ranks."""
    devices = 2 if job == "save" else 1
    launch(job, 2, devices, 2)
    restored = restored_here(tmp_path / "checkpoints")
    stages_per_rank = 1 if job == "save" else 2
    step, state, _ = jobs.step_on(mesh_for(2, devices), stages_per_rank)
    *_, (_, trained, _) = jobs.train(step, state, range(1, jobs.SAVED + 1))
    assert bits(restored) == bits(trained)
    again = launch(job.replace("save", "resume"), 2, devices, 2)
    assert again == goes_on(restored, 2, devices, stages_per_rank)


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_ways_of_orbax(launch: Launch, ranks: int) -> None:
    assert launch("ways", 2, 2, ranks) == {"all the same"}


@pytest.mark.soak
def test_a_job_that_is_preempted_goes_on(command: str, tmp_path: pathlib.Path) -> None:
    """After SIGTERM to the launcher or to a single process, all save the same step and exit."""
    script = [str(EXAMPLE), "--folder", str(tmp_path), "--steps=60"]
    launch = [command, "launch", "-n", "2", "--", sys.executable, "-W", "ignore", *script]
    environment = {**os.environ, "JPP_ADDRESS": "127.0.0.1"}
    steps: list[int] = []
    for status in 128 + signal.SIGTERM, 0:
        job = subprocess.Popen(
            launch, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert job.stdout is not None
        lines = [job.stdout.readline()]
        while not re.search(r"\] step +\d+ ", lines[-1]):
            lines.append(job.stdout.readline())
        if status:
            job.send_signal(signal.SIGTERM)
        else:
            first, _ = processes_with(str(tmp_path), "examples/processes.py")
            os.kill(first, signal.SIGTERM)
        output = "".join(lines) + job.communicate(timeout=LIMIT)[0]
        assert job.returncode == status, output
        saved = re.findall(r"^\[\d\] is to end, and has saved step (\d+)$", output, re.M)
        assert len(saved) == 2 and saved[0] == saved[1], output
        steps += [int(number) for number in re.findall(r"\] step +(\d+) ", output)]
        assert steps == list(range(1, int(saved[0]) + 1))  # no step is repeated or missing
    assert int(saved[0]) < 60


def processes_with(*arguments: str) -> list[int]:
    """Ids of the processes, except launchers, whose command lines contain all arguments."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().decode(errors="replace")
            if "launch" not in line and all(argument in line for argument in arguments):
                found.append(int(file.parent.name))
    return found


@pytest.mark.soak
def test_the_example_goes_on_with_the_same_losses(command: str, tmp_path: pathlib.Path) -> None:
    """Steps that ran both before and after the restart print the same line."""
    script = [str(EXAMPLE), "--folder", str(tmp_path), "--fail-at=5"]
    lines = output_of([command, "launch", "-n", "2", "--restarts", "1"], script)
    losses = [line for line in lines if line.startswith("step")]
    assert [int(line.split()[1]) for line in sorted(losses)] == list(range(1, 13))
    assert sum(line.startswith("goes on after step ") for line in lines) == 1
