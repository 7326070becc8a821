"""Ctrl-C, forks and exits, each in its own process (process_scripts.py).

Time limits exist only to make hangs fail.
"""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys

import pytest

SCRIPTS = pathlib.Path(__file__).with_name("process_scripts.py")
REFUSED = "unsupported this process was forked while its parent used the devices"


def play(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(SCRIPTS), name]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def lines_of(name: str) -> list[str]:
    """The output of a script that must exit with status 0 and an empty stderr."""
    played = play(name)
    assert (played.returncode, played.stderr) == (0, ""), played
    return played.stdout.splitlines()


# --- Signals ----------------------------------------------------------------------------


def test_ctrl_c_leaves_arrays_and_step_usable() -> None:
    assert lines_of("interrupted") == ["interrupted", "weight True", "next True"]


def test_ctrl_c_takes_what_was_donated_and_says_so() -> None:
    interrupted, read, used, after = lines_of("interrupted_with_donation")
    reason = (
        "was donated to a step that failed or was interrupted, and is gone; go back to a "
        "checkpoint, or to a copy made before the step"
    )
    assert interrupted == "interrupted"
    assert read == f"donated the array {reason}"
    assert used == f"donated argument w: expected an array, found one that {reason}"
    assert after == "next True"


def test_ctrl_c_ends_a_program() -> None:
    played = play("interrupted_uncaught")
    assert played.returncode == -signal.SIGINT
    assert played.stderr.endswith("KeyboardInterrupt\n")


def test_handlers_run_during_a_step() -> None:
    assert lines_of("handler_that_returns") == ["seen 1 True"]


def test_a_handler_can_call_the_step_that_its_thread_waits_for() -> None:
    assert lines_of("handler_that_steps") == ["seen [True]"]


def test_ctrl_c_while_waiting_for_a_result_loses_nothing() -> None:
    expected = ["interrupted False", "result True True", "next True"]
    assert lines_of("interrupted_while_waiting") == expected


def test_ctrl_c_while_waiting_for_another_step() -> None:
    assert lines_of("interrupted_in_line") == ["interrupted"]


def test_ctrl_c_in_a_callback() -> None:
    played = play("interrupted_in_a_callback")
    assert (played.returncode, played.stdout) == (0, "interrupted\nnext True\n"), played


def test_callbacks_of_an_interrupted_step_outlive_it() -> None:
    assert lines_of("interrupted_and_forgotten") == ["interrupted", "went on"]


def test_ctrl_c_while_compiling() -> None:
    played = play("interrupted_compile")  # stderr may have exceptions that Python ignored
    assert (played.returncode, played.stdout) == (0, "done True\n"), played


# --- Forks ------------------------------------------------------------------------------


def test_a_forked_child_is_refused_ends_and_the_parent_goes_on() -> None:
    *refused, child, idle_child, parent = lines_of("fork_of_a_user")
    assert len(refused) == 4
    for line in refused:
        assert line.startswith(REFUSED) and 'get_context("spawn")' in line
    assert (child, idle_child, parent) == ("child 7", "child 7", "parent True")


def test_a_fork_in_the_middle_of_a_step() -> None:
    refused, child, parent = lines_of("fork_during_a_step")
    assert refused.startswith(REFUSED)
    assert (child, parent) == ("child 7", "parent True")


def test_children_forked_before_the_first_use_work() -> None:
    assert lines_of("fork_before_any_client") == ["same True"]


def test_a_pool_of_forked_processes_raises_in_the_parent() -> None:
    refused, parent = lines_of("pool_after_use")
    assert refused.startswith(REFUSED)
    assert parent == "parent True"


def test_a_fork_while_memory_is_shared() -> None:
    assert lines_of("fork_with_shared_memory") == ["child 7", "parent 2.0 3.0"]


# --- Exits ------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "name",
    [
        "exit_at_once",
        "exit_after_interruption",
        "exit_beside_daemons",
        "exit_with_shared_memory",
    ],
)
def test_exit_with_work_under_way(name: str) -> None:
    played = play(name)
    assert (played.returncode, played.stdout, played.stderr) == (3, "", "")


def test_exit_waits_for_a_thread_that_is_no_daemon() -> None:
    played = play("exit_with_a_thread")
    assert (played.returncode, played.stdout, played.stderr) == (3, "total True\n", "")


def test_an_exception_at_top_level_beside_running_steps() -> None:
    played = play("error_beside_daemons")
    assert played.returncode == 1
    assert played.stderr.endswith("ValueError: of the user\n")


def test_shared_memory_outlives_its_owners() -> None:
    expected = ["seen [True, True, True]", "again 2.0"]
    assert lines_of("shared_memory_outlives_its_owners") == expected
