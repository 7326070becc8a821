"""Copies of a value stay bitwise equal on all ranks and all devices of a rank, in one process
and in several, and after a checkpoint is restored."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import copies
from copies import OPTIMIZERS, make_case, train
from equality import assert_copies_equal, mesh_of
from locations import jaxpp_command
from random_processes import LIMIT
from trainings import described


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(len(OPTIMIZERS)))
def test_copies_are_equal_after_fifty_steps(seed: int) -> None:
    case = make_case(seed)
    print(case)
    axes = {"data": 2} if seed % 3 == 0 else {}
    assert_copies_equal(train(case, mesh_of(case.ranks, axes)), "")


def test_processes_hold_what_one_process_does() -> None:
    cases = [make_case(seed) for seed in (1002, 1006)]
    for ranks in sorted({case.ranks for case in cases}):
        chosen = [case for case in cases if case.ranks == ranks]
        seeds = [str(case.seed) for case in chosen]
        here = [
            line
            for case in chosen
            for line in described(f"{case.seed}: ", train(case, mesh_of(ranks, {})))
        ]
        child = [sys.executable, "-W", "ignore", copies.__file__, str(ranks // 2), *seeds]
        job = subprocess.run(
            [jaxpp_command(), "launch", "-n", "2", "--", *child],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            env={**os.environ, "JPP_ADDRESS": "127.0.0.1"},
        )
        said = {line.partition("] ")[2] for line in job.stdout.splitlines()}
        assert said == set(here), job.stderr
