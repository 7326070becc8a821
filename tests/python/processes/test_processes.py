"""Steps over several processes that `jaxpp launch` starts (jobs.py): they train exactly as in
one process, and a failure in one process ends all.

Time limits exist only to make hangs fail.
"""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import jax
import pytest

import jaxpp.api as jaxpp
import jobs
import trainings
import written
from equality import mesh_of
from faults import left_over

pytestmark = pytest.mark.own_devices

LIMIT = 120  # seconds

Lines = collections.defaultdict[int, list[str]]
Launch = Callable[..., tuple[int, Lines, str]]


def run_job(
    command: str,
    folder: pathlib.Path,
    processes: int,
    devices: int,
    job: str,
    *flags: str,
    interrupt: bool = False,
) -> tuple[int, Lines, str]:
    """Runs a job and checks that no process is left. Returns the exit status, the lines of each
    process and the launcher's own output."""
    mark = str(folder)
    script = [sys.executable, "-W", "ignore", jobs.__file__, job, str(devices), mark]
    launcher = subprocess.Popen(
        [command, "launch", "-n", str(processes), *flags, "--", *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "JPP_ADDRESS": "127.0.0.1"},
    )
    before = ""
    if interrupt:  # once a process has reported that it is training
        assert launcher.stdout is not None
        before = launcher.stdout.readline()
        launcher.send_signal(signal.SIGINT)
    try:
        output = before + launcher.communicate(timeout=LIMIT)[0]
    finally:
        launcher.kill()
    assert left_over(mark) == []
    lines, own = Lines(list), ""
    for line in output.splitlines():
        of_process = re.fullmatch(r"\[(\d+)\] (.*)", line)
        if of_process:
            lines[int(of_process[1])].append(of_process[2])
        else:
            own += line + "\n"
    return launcher.returncode, lines, own


@pytest.fixture
def launch(command: str, tmp_path: pathlib.Path) -> Launch:
    return functools.partial(run_job, command, tmp_path)


# Jobs that succeed, by devices per process; one launch of two processes runs them in turn.
TOGETHER = {
    1: [
        "train2",
        "types",
        "by_hand",
        "resharded",
        "saved",
        "left",
        "traced",
        "profiled",
        "idle",
    ],
    2: ["train2", "unequal", "types", "by_hand", "resharded", "saved", "left", "costed"],
}
Together = Callable[[int, str], tuple[pathlib.Path, Lines]]


@pytest.fixture(scope="module")
def together(command: str, tmp_path_factory: pytest.TempPathFactory) -> Together:
    @functools.cache
    def run_all(devices: int) -> tuple[pathlib.Path, dict[str, Lines]]:
        folder = tmp_path_factory.mktemp("together")
        result, said, _ = run_job(command, folder, 2, devices, ",".join(TOGETHER[devices]))
        assert result == 0, said
        found: dict[str, Lines] = {}
        for process, lines in said.items():
            for line in lines:
                word, _, job = line.partition(" ")
                if word == "job":
                    of_job = found.setdefault(job, Lines(list))
                else:
                    of_job[process].append(line)
        assert list(found) == TOGETHER[devices]
        return folder, found

    def run(devices: int, job: str) -> tuple[pathlib.Path, Lines]:
        """The folder with the job's files, and the job's output."""
        folder, found = run_all(devices)
        return folder, found[job]

    return run


def error_of(lines: list[str], kind: str = r"Jaxpp\w*Error") -> str:
    """The message of the only JaxppError, or error of that kind, in a process' output."""
    errors = [line for line in lines if re.match(rf"jaxpp\.{kind}: ", line)]
    assert len(errors) == 1, lines
    return errors[0].partition(": ")[2]


# --- Training ---------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("processes", "devices", "ranks"),
    [
        (2, 1, 2),
        pytest.param(4, 1, 4, marks=pytest.mark.soak),
        pytest.param(2, 2, 2, marks=pytest.mark.soak),
        (2, 2, 4),
        pytest.param(8, 1, 8, marks=pytest.mark.soak),
    ],
)
def test_trains_as_one_process_does(
    launch: Launch, together: Together, processes: int, devices: int, ranks: int
) -> None:
    """Losses, parameters, state and both copies of tied weights are bitwise equal."""
    if processes == ranks == 2:
        _, lines = together(devices, "train2")
    else:
        result, lines, _ = launch(processes, devices, f"train{ranks}")
        assert result == 0, lines
    width = processes * devices // ranks
    mesh = mesh_of(ranks, {} if width == 1 else {"model": width})
    expected = set(trainings.train_all(mesh))
    assert {line for of_process in lines.values() for line in of_process} == expected
    for rank, process in (0, 0), (ranks - 1, processes - 1):
        assert any(f"tied params[0]['w'] rank {rank} " in line for line in lines[process])


def test_ranks_of_unequal_meshes(together: Together, tmp_path: pathlib.Path) -> None:
    """They train, and a plan that each process saves loads."""
    _, lines = together(2, "unequal")
    mesh = trainings.unequal_mesh(jax.devices()[:4])
    expected = [*trainings.train_all(mesh), *trainings.saved_and_loaded(mesh, str(tmp_path))]
    assert sorted(lines[0] + lines[1]) == sorted(expected)
    assert all(f"params[{rank}]['w'] rank {rank} " in " ".join(lines[rank]) for rank in (0, 1))


@pytest.mark.parametrize("devices", [1, 2])
def test_values_of_every_type_arrive(together: Together, devices: int) -> None:
    """This includes types that are packed on devices but not on the wire."""
    _, lines = together(devices, "types")
    mesh = mesh_of(2, {} if devices == 1 else {"model": devices})
    assert lines[1] == list(trainings.sums_of_types(mesh))
    assert len(lines[1]) == len(trainings.TYPES)


@pytest.mark.parametrize("devices", [1, 2])
def test_arrays_of_a_mesh_of_all_processes(together: Together, devices: int) -> None:
    _, lines = together(devices, "resharded")
    assert [lines[process][-1] for process in (0, 1)] == ["resharded"] * 2  # Gloo prints first


@pytest.mark.parametrize("devices", [1, 2])
def test_programs_written_by_hand(together: Together, devices: int) -> None:
    _, lines = together(devices, "by_hand")
    assert lines[0] and lines[1]
    expected = written.trained(mesh_of(2, {"data": devices}))
    assert sorted(lines[0] + lines[1]) == sorted(expected)


def test_stages_that_lay_values_out_differently(launch: Launch) -> None:
    """Values also change their number of shards: 4 to 2 and 2 to 4."""
    result, lines, _ = launch(2, 4, "relay_out")
    assert result == 0, lines
    expected = list(trainings.relaid(mesh_of(2, {"data": 2, "model": 2})))
    assert sorted(lines[0] + lines[1]) == sorted(expected) and lines[0] and lines[1]
    assert len({line.split()[0] for line in expected}) == len(trainings.RELAID)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_plan_file_of_a_job(together: Together, devices: int, tmp_path: pathlib.Path) -> None:
    """Each process saves the whole step, which can be loaded by a job or by one process."""
    folder, lines = together(devices, "saved")
    mesh = mesh_of(2, {} if devices == 1 else {"model": devices})
    (tmp_path / "alone").mkdir()
    expected = list(trainings.saved_and_loaded(mesh, str(tmp_path / "alone")))
    assert sorted(lines[0] + lines[1]) == sorted(expected) and lines[0] and lines[1]
    _, weights, xs = trainings.two_stages(mesh=mesh)
    for process in range(2):
        step = jaxpp.load(folder / f"step{process}.plan")
        assert list(trainings.described("loaded", step(weights, xs))) == expected


def test_every_process_knows_the_costs_of_all_ranks(together: Together) -> None:
    _, lines = together(2, "costed")
    expected = trainings.costs(mesh_of(2, {"model": 2}))
    assert {"0", "1"} == {line.split()[0] for line in expected if "all-" in line}
    assert lines[0] == lines[1] == expected


def test_a_timeline_of_a_job(together: Together, command: str, tmp_path: pathlib.Path) -> None:
    """`jaxpp plot` merges the traces of the processes."""
    folder, _ = together(1, "traced")
    parts = sorted(folder.glob("trace-*.json"))
    joined = tmp_path / "joined.json"
    subprocess.run([command, "plot", *parts, "-o", joined], check=True)
    trainings.check_order(joined.read_text(), steps=1)
    drawn = subprocess.run(
        [command, "plot", *parts], check=True, capture_output=True, text=True
    ).stdout
    assert "rank   0" in drawn and "rank   1" in drawn


def test_idle_steps_cost_little(together: Together) -> None:
    """A step that is not running does not keep the processor from those that are."""
    _, lines = together(1, "idle")
    for process in (0, 1):
        rates = [(name, float(rate)) for name, rate in map(str.split, lines[process])]
        names = collections.Counter(name for name, _ in rates)
        assert set(names) == {"jpp-job", "jpp-issue", "jpp-finish", "jpp-network"}
        assert names["jpp-issue"] >= 3
        assert all(rate < 200 for _, rate in rates), rates


def test_profiles_of_a_job(together: Together) -> None:
    """Processes on the same host write separate files."""
    folder, _ = together(1, "profiled")
    found = sorted(folder.rglob("*.xplane.pb"))
    folders = [file.relative_to(folder).parts[0] for file in found]
    assert folders == ["process-0", "process-1"]


# --- Failures ---------------------------------------------------------------------------


def test_a_killed_process_ends_all(launch: Launch) -> None:
    result, lines, own = launch(2, 1, "killed")
    assert result == 128 + signal.SIGKILL
    ended = re.search(r"process 1 \(pid (\d+)\) was ended by signal 9", own)
    assert ended, own
    error = error_of(lines[0])
    assert (
        f"process 1 at 127.0.0.1 (host {os.uname().nodename}, process id {ended[1]})" in error
    )
    assert "the connection was lost" in error


def test_a_task_that_hangs_is_named_by_all(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All name the rank that hangs, not a rank that waits for it."""
    monkeypatch.setenv("JPP_STEP_TIMEOUT", "3")
    monkeypatch.setenv("JPP_PEER_TIMEOUT", "5")
    result, lines, own = launch(3, 1, "hanging")
    assert result == 128 + signal.SIGKILL
    assert own.startswith("jaxpp launch: process 1 ")
    for process in 0, 2:
        error = error_of(lines[process])
        assert "(the longest of JPP_STEP_TIMEOUT, 3 s; a step, " in error
        task = (
            r"rank 1, which has reached instruction \d+, fwd_1 of microbatch \d \(process 1 at "
        )
        assert re.search(task, error), error


@pytest.mark.soak
def test_a_long_task_is_no_silence(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU plugin runs the task in the issuing thread, but heartbeats continue."""
    monkeypatch.setenv("JPP_PEER_TIMEOUT", "1")
    result, lines, _ = launch(3, 1, "slow_task")
    assert result == 0, lines
    assert [line.partition(" ")[0] for line in lines[2]] == ["trained"]


def test_nccl_is_for_cuda(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPP_TRANSPORT", "nccl")
    result, lines, _ = launch(2, 1, "training")
    assert result == 1
    for process in range(2):
        assert error_of(lines[process]).startswith(
            "JPP_TRANSPORT=nccl: expected platform cuda, found cpu"
        )


def test_an_unknown_transport(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPP_TRANSPORT", "tcp")
    result, lines, _ = launch(2, 1, "training")
    assert result == 1
    assert error_of(lines[0]) == "JPP_TRANSPORT='tcp': expected ucx or nccl"


@pytest.mark.soak
def test_a_stopped_process_ends_all(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, command: str
) -> None:
    flight = tmp_path / "flight"
    monkeypatch.setenv("JPP_PEER_TIMEOUT", "1.5")
    monkeypatch.setenv("JPP_FLIGHT", str(flight))
    result, lines, own = launch(3, 1, "stopped_of_three")
    assert result == 128 + signal.SIGKILL, own
    assert re.match(r"jaxpp launch: process 2 \(pid \d+\) was stopped \(SIGSTOP\)", own)
    error = error_of(lines[1])
    assert "process 2 at 127.0.0.1 (host " in error
    assert "it has sent nothing for 1.5 s: it was stopped" in error
    assert "process 2 at 127.0.0.1 (host " in error_of(lines[0])  # receives nothing from it
    told = subprocess.run(
        [command, "flight", str(flight)], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"rank 0 waits for rank 1, that for rank 2, which .*, silent: it ", told)


@pytest.mark.soak
def test_a_busy_process_is_not_taken_for_dead(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPP_PEER_TIMEOUT", "1")
    result, lines, own = launch(2, 1, "busy")
    assert result == 0, (lines, own)
    assert any(line.startswith("trained ") for of in lines.values() for line in of)


def test_an_exception_in_one_process_ends_all(launch: Launch) -> None:
    result, lines, own = launch(2, 1, "raising")
    assert result == 1, own
    assert "ValueError: of the user" in lines[1]
    assert "process 1 at 127.0.0.1" in error_of(lines[0])


def test_the_launcher_names_the_process_whose_task_failed(launch: Launch) -> None:
    result, lines, own = launch(2, 1, "raising_late")
    assert result == 1, lines
    assert own.startswith("jaxpp launch: process 0 (pid ")
    assert "from rank 0: process 0 at 127.0.0.1 (host " in error_of(lines[1], "NanError")


def test_an_exception_before_the_first_step_ends_all(launch: Launch) -> None:
    result, lines, own = launch(2, 1, "raising_early")
    assert result == 1, own
    assert "ValueError: of the user" in lines[1]
    failed = r"process 1 at 127.0.0.1 \(host .*\) has failed: ValueError: of the user"
    assert re.fullmatch(failed, error_of(lines[0]))


def test_ctrl_c_ends_all(launch: Launch) -> None:
    result, lines, own = launch(2, 1, "training", interrupt=True)
    assert (result, own) == (128 + signal.SIGINT, "")
    assert any(line == "KeyboardInterrupt" for of in lines.values() for line in of), lines


def test_restart_after_a_failure(launch: Launch) -> None:
    result, lines, own = launch(2, 1, "killed_once", "--restarts", "1")
    assert result == 0, lines
    assert own.endswith("starting all processes again (1 of 1)\n")
    assert "jaxpp.JaxppError" in " ".join(lines[0])  # from the first run
    expected = set(trainings.train("mlp", mesh_of(2, {})))
    assert expected <= {*lines[0], *lines[1]}


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("job", "differs"),
    [
        ("other_shape", ("the argument weights[0] is float32[{}", "4,4]", "5,5]")),
        ("other_number", ("has `{}", "mul 0.1:f32[] ", "mul 0.2:f32[] ")),
        ("other_constant", ("constant 0 that the step closes over", "", "")),
        ("other_donation", ("the list of donated arguments is {}", "none", "weights[0]")),
        (
            "other_options",
            ("the compiler_options is {{'xla_cpu_enable_fast_math': {}", "True", "False"),
        ),
        ("other_schedule", ("the schedule is {}: 2 stages", "1f1b", "gpipe")),
    ],
)
def test_steps_that_differ(launch: Launch, job: str, differs: tuple[str, ...]) -> None:
    result, lines, _ = launch(2, 1, job)
    assert result == 1
    text, *values = differs
    for me, other in (0, 1), (1, 0):
        error = error_of(lines[me])
        assert f"process {me} and process {other} do not run the same step" in error
        assert text.format(values[me]) in error
        assert values[other] in error
        assert job != "other_number" or re.search(
            r"at \S+/trainings.py:\d+:\d+, process", error
        )


def test_a_step_that_the_others_do_not_make(launch: Launch) -> None:
    result, lines, _ = launch(2, 1, "missing_step")
    assert result == 1
    assert error_of(lines[0]).startswith("process 1 has ended without creating the step")


@pytest.mark.soak
def test_a_process_that_is_late(launch: Launch) -> None:
    result, lines, _ = launch(2, 1, "late_step")
    assert result == 1
    assert error_of(lines[0]).startswith(
        "process 1 did not create the step that process 0 creates"
    )


def test_a_rank_in_two_processes(launch: Launch) -> None:
    result, lines, _ = launch(4, 1, "spread_rank")
    assert result == 1
    for process in range(4):
        assert (
            "rank 0: expected its devices in one process, found them in processes [0, 1]"
            in (error_of(lines[process]))
        )


def test_what_the_processes_of_a_rank_know(
    launch: Launch, nodes_plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes have one device each, on two ranks; each numbers its own device first."""
    monkeypatch.setenv("NODES_PLUGIN", nodes_plugin)
    result, lines, _ = launch(4, 1, "nodes_of_a_rank")
    assert result == 1
    numbers = [[[0, 1], [2, 3]], [[1, 0], [2, 3]], [[1, 2], [0, 3]], [[1, 2], [3, 0]]]
    for me in range(4):
        rank, place = divmod(me, 2)
        here = [[0], [0]]
        said = "\n".join(lines[me])
        assert f"processes {[place, 2 + place]} places {[place]}" in said
        assert f"ids [[0, 10], [20, 30]] numbers {numbers[me]} here {here}" in said
        assert "sizes 1 2 True" in said
        rows, columns = [(2 * place, 2 * place + 2)], [(3 * place, 3 * place + 3)]
        assert f"{(rank,)} [{[*rows, (None, None)]}] (2, 6)" in said
        assert f"{(rank,)} [{[(None, None), *columns]}] (4, 3)" in said
        assert f"{(rank,)} [[(None, None), (None, None)]] (4, 6)" in said
        assert f"(2, 6)\nshards {[[[float(me)] * 6] * 2]}" in said
        assert said.count("shards []") == 2
        assert said.count(f"in process {me}, which holds 12 of its 24 elements") == 2
        assert error_of(lines[me]).startswith("expected a client with JAX's devices, {0: 1,")


def test_an_argument_that_is_elsewhere(launch: Launch) -> None:
    result, lines, _ = launch(2, 1, "moved_argument")
    assert result == 1
    for process in range(2):
        assert error_of(lines[process]).startswith(
            f"argument weights[{process}]: expected an array on rank {process}, or on another "
            "rank of this process"
        )


def test_rows_of_stages_that_alternate_between_ranks(launch: Launch) -> None:
    result, lines, _ = launch(2, 1, "alternating_rows")
    assert result == 0, lines
    for *_, told, last in lines.values():
        assert told.startswith("told argument weights: expected this process to hold the part")
        assert "if its rows belong to stages that alternate between the ranks, with" in told
        assert told.endswith("MpmdSharding(mesh, range(mesh.mpmd_dim), PartitionSpec())")
        assert last == "trained (4, 4, 4)"


def test_an_array_that_jax_can_not_take_apart(launch: Launch) -> None:
    result, lines, _ = launch(2, 1, "put_from_a_device")
    assert result == 0
    for *_, told, last in lines.values():
        assert last == "went on"
        assert told == "taken" or (
            "expected an array whose shards JAX can list, found one of shape (8, 2, 4)" in told
            and told.endswith(
                "Pass the same numpy array to jax.device_put in every process to make one"
            )
        )


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_results_are_left_where_they_are_wanted(together: Together, devices: int) -> None:
    _, lines = together(devices, "left")
    assert lines[0][0] == "made on (0,) (1,) True False"
    assert lines[1][0] == "made on (0,) (1,) False True"
    assert len(lines[0]) == 4 and lines[0][1:] == lines[1][1:]


def test_a_result_that_is_elsewhere(launch: Launch) -> None:
    result, lines, _ = launch(2, 1, "no_copy")
    assert result == 1
    for me, other in (0, 1), (1, 0):
        assert lines[me][0] == "ranks (0,) (1,)"
        error = error_of(lines[me])
        assert error.startswith(
            f"an MpmdArray of rank {other} is read in process {me}, which holds no copy"
        )
        assert "x.is_partially_addressable" in error and "out_shardings=" in error
