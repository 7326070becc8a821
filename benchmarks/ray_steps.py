"""The cost of a controller: compares steps on Ray workers with the same steps on the same
number of processes that `jaxpp launch` starts without a controller.

Both send between ranks in the same way and keep two steps in flight. They alternate, and
the best round counts. `a call` is the time for which one step occupies the controller,
from the call to its return, if it does not have to wait for an earlier step: the median
of 20.

    python benchmarks/ray_steps.py [--ranks 2 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
from functools import partial
from typing import Any

from launched import CALLS, STEPS, Training, launched, run_here

import jaxpp.api as jaxpp
from models import Model


def models(ranks: int) -> list[Model]:
    return [Model(16, 4, 4, stages=ranks), Model(128, 64, 8, stages=ranks)]


def trainings(ranks: int, mesh: Any, **options: Any) -> list[Training]:
    return [Training(model, mesh, **options) for model in models(ranks)]


def compare(ranks: int, rounds: int) -> None:
    mesh = jaxpp.RemoteMpmdMesh(ranks, (1,), ("data",))
    controlled = trainings(ranks, mesh)
    calls = [t.call() for t in trainings(ranks, mesh, steps_in_flight=CALLS)]
    with_ray, without = [], []
    for _ in range(rounds):
        with_ray.append([min(t.run(STEPS) for _ in range(2)) for t in controlled])
        without.append(launched(ranks, __file__, f"--process={ranks}"))
    mesh.shutdown()
    for i, model in enumerate(models(ranks)):
        ours, theirs = (min(row[i] for row in rows) for rows in (with_ray, without))
        print(
            f"| {model.name} | {ours:.1f} ms | {theirs:.1f} ms | {ours - theirs:+.1f} ms "
            f"| {calls[i]:.1f} ms |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        run_here(1, [partial(Training, model) for model in models(options.process)])
        return
    import ray

    ray.init(
        num_cpus=max(options.ranks),
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"worker_niceness": os.nice(0)},  # as for the launched processes
    )
    print("| step | on Ray | launched | more | a call |\n|---|---|---|---|---|")
    for ranks in options.ranks:
        compare(ranks, options.rounds)


if __name__ == "__main__":
    main()
