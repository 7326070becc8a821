"""The accuracy of `predict()`: steps of three models on two and four ranks under three
schedules, in one process and in a process per rank.

All steps are measured alternately, so that a machine whose speed drifts slows them alike.
Each is predicted twice: from a trial of two microbatches, which does not run the step's
other microbatches, and from a trace of the step itself. A trial is short, so in each turn
it runs several times. Times are medians, and errors are medians of the errors within a
turn.

    python benchmarks/predictions.py [--turns N]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JPP_ADDRESS", "127.0.0.1")
sys.path.append(str(pathlib.Path(__file__).parent.parent / "examples"))

import demo
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import models

TRIAL = 2  # microbatches
TRIALS = 6  # in a turn
SCHEDULES = ("1F1B", "interleaved", "zero bubble")


def make_schedule(name: str, ranks: int) -> tuple[Any, int]:
    """The schedule and its number of stages."""
    if name == "interleaved":
        return jaxpp.Interleaved1F1B(num_stages=2 * ranks, mpmd_dim=ranks), 2 * ranks
    return (jaxpp.Std1F1B if name == "1F1B" else jaxpp.ZeroBubble)(ranks), ranks


def demo_step(schedule: Any, stages: int) -> tuple[Any, Any, Any]:
    """The demo's step with state that contains no functions, so that a plan file can hold
    it."""
    state = demo.init_state(stages)

    def step(arrays: Any, xs: Any, ys: Any) -> Any:
        params, opt_state = arrays
        before = state.replace(params=params, opt_state=opt_state)
        after, loss = demo.pipelined_step(before, (xs, ys), schedule)
        return (after.params, after.opt_state), loss

    return step, (state.params, state.opt_state), demo.make_batch()


def wide_step(schedule: Any, stages: int) -> tuple[Any, Any, Any]:
    model = models.Model(128, 64, 16, stages=stages)
    return partial(models.train, model, schedule), model.params(), model.batch()


def cut(batch: Any) -> list[Any]:
    return [x[:TRIAL] for x in batch]


@dataclasses.dataclass
class Case:
    """A measured step, and its trial."""

    name: str
    step: Any
    trial: Any
    state: Any
    trial_state: Any
    batch: Any
    times: list[float] = dataclasses.field(default_factory=list)
    by_trial: list[float] = dataclasses.field(default_factory=list)
    by_itself: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> float:
        """Milliseconds per step."""
        start = time.perf_counter()
        self.state, loss = self.step(self.state, *self.batch)
        jax.block_until_ready((self.state, loss))
        return (time.perf_counter() - start) * 1e3

    def trace(self) -> str:
        self.step.set_tracing(True)
        self.run()
        trace = self.step.trace_json()
        self.step.set_tracing(False)
        return str(trace)

    def trace_trial(self) -> str:
        self.trial_state, loss = self.trial(self.trial_state, *cut(self.batch))
        jax.block_until_ready((self.trial_state, loss))
        return str(self.trial.trace_json())

    def take_turn(self) -> tuple[list[str], list[str]]:
        """Measures the step, and traces the trials and the step. Returns these two lists of
        traces. Each runs once before it is measured, because other steps ran before."""
        self.run()
        before, trace = self.run(), self.trace()
        trials = [self.trace_trial() for _ in range(1 + TRIALS)]
        self.run()
        self.times.append((before + self.run()) / 2)
        return trials[1:], [trace]


def make_case(label: str, make: Any, name: str, ranks: int, data: int = 1) -> Case:
    schedule, stages = make_schedule(name, ranks)
    function, state, batch = make(schedule, stages)
    devices = np.array(jax.devices()[: ranks * data]).reshape(ranks, data)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data")), "stage")
    specs = (P(), P(None, "data"), P(None, "data"))
    jit = partial(jaxpp.mpmd_jit_with_loop, function, mpmd_mesh=mesh, in_specs=specs)
    batch = [np.asarray(x) for x in batch]
    state = jax.tree.map(np.asarray, state)
    # A step ends before the next one is called.
    step = jit(donate_argnums=0, steps_in_flight=1).compile(state, *batch)
    trial = jit(donate_argnums=0, steps_in_flight=1).compile(state, *cut(batch))
    trial.set_tracing()
    case = Case(f"{label}, {ranks} ranks, {name}", step, trial, state, state, batch)
    case.run()
    case.trace_trial()
    return case


def cases_here() -> Iterator[Case]:
    for name in SCHEDULES:
        for ranks in (2, 4):
            yield make_case("demo", demo_step, name, ranks)
            yield make_case("d=128", wide_step, name, ranks)
        yield make_case("d=128, data 2", wide_step, name, 2, data=2)


def cases_in_processes(ranks: int) -> Iterator[Case]:
    for name in SCHEDULES:
        yield make_case("demo", demo_step, name, ranks)
        yield make_case("d=128", wide_step, name, ranks)


def print_case(case: Case) -> None:
    low, measured, high = np.percentile(case.times, (25, 50, 75))
    row = f"{case.name:36} {measured:8.1f} ({low:5.1f} to {high:5.1f})"
    for predicted in (case.by_trial, case.by_itself):
        error = statistics.median(p / m for p, m in zip(predicted, case.times, strict=True)) - 1
        row += f" {statistics.median(predicted):8.1f} {error:+6.1%}"
    print(row, flush=True)


# --- A process per rank -----------------------------------------------------------------


def run_child(ranks: int, turns: int, folder: pathlib.Path) -> None:
    """Runs in one of the processes: leaves times and traces in the folder."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize()
    process = jax.process_index()
    cases = list(cases_in_processes(ranks))
    for number, case in enumerate(cases):
        # Every process saves a file; one of them is read.
        case.step.save(folder / f"{number}-{process}.plan")
    for turn in range(turns):
        for number, case in enumerate(cases):
            for what, traces in zip(("trial", "step"), case.take_turn(), strict=True):
                for i, trace in enumerate(traces):
                    name = f"{number}-{turn}-{what}-{i}-{process}.json"
                    (folder / name).write_text(trace)
    if process == 0:
        found = [(case.name, case.times) for case in cases]
        (folder / "times.json").write_text(json.dumps(found))


def command() -> str:
    beside = pathlib.Path(sys.executable).parent
    found = shutil.which("jaxpp", path=f"{beside}:{os.environ['PATH']}")
    assert found, "no jaxpp command beside the interpreter or on PATH"
    return found


def predict_file(plan: pathlib.Path, ranks: int, traces: Iterable[pathlib.Path]) -> float:
    """In a job, a process begins a step when its own part of the previous step is done,
    so the time from step to step is measured."""
    flags = ["-n", str(ranks), "--steps=4", "--json"]
    run = subprocess.run(
        [command(), "predict", plan, *traces, *flags],
        check=True,
        capture_output=True,
        text=True,
    )
    return float(json.loads(run.stdout)["period"])


def measure_processes(ranks: int, turns: int) -> None:
    print(f"\n{ranks} processes")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        flags = [f"--processes={ranks}", f"--turns={turns}", f"--folder={folder}"]
        child = [sys.executable, "-W", "ignore", __file__, *flags]
        launch = [command(), "launch", "-n", str(ranks), "--", *child]
        subprocess.run(launch, check=True, stdout=subprocess.DEVNULL)
        found = json.loads((folder / "times.json").read_text())
        for number, (label, times) in enumerate(found):
            plan = folder / f"{number}-0.plan"
            case = Case(label, None, None, None, None, None, times)
            for turn in range(turns):
                for what, predicted in (("trial", case.by_trial), ("step", case.by_itself)):
                    traces = folder.glob(f"{number}-{turn}-{what}-*.json")
                    predicted.append(predict_file(plan, ranks, traces))
            print_case(case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)  # for a child process
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.processes:
        run_child(options.processes, options.turns, options.folder)
        return
    jax.config.update("jax_num_cpu_devices", 4)
    print(f"{len(os.sched_getaffinity(0))} cores, medians of {options.turns} turns, ms a step")
    print(f"{'':36} {'measured (quartiles)':>24} {'from a trial':>15} {'from the step':>15}")
    cases = list(cases_here())
    for _ in range(options.turns):
        for case in cases:
            trials, own = case.take_turn()
            case.by_trial.append(case.step.predict(trials).makespan)
            case.by_itself.append(case.step.predict(own).makespan)
    for case in cases:
        print_case(case)
    del cases
    measure_processes(4, options.turns)


if __name__ == "__main__":
    main()
