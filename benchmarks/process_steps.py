"""The cost of running ranks as processes: alternates steps of one process, whose devices
are the ranks, with steps of one process per rank. It then measures the time from rank to
rank: for a step with nearly empty tasks, the time of each turn in which a rank receives,
runs a task and sends.

Times are the best of the rounds, and ratios the medians of the ratios within a round.

    python benchmarks/process_steps.py [--processes 4] [--rounds 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
from functools import partial

from launched import Relay, Training, launched, run_here

from models import Model

MICROBATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)  # for a child process
    options = parser.parse_args()
    ranks = options.processes
    model = Model(128, 64, MICROBATCHES, stages=ranks)
    if options.devices:
        relay = partial(Relay, ranks, MICROBATCHES)
        run_here(options.devices, [partial(Training, model), relay])
        return
    flag = f"--processes={ranks}"
    rounds = [
        (
            launched(1, __file__, flag, f"--devices={ranks}"),
            launched(ranks, __file__, flag, "--devices=1"),
        )
        for _ in range(options.rounds)
    ]
    print(f"{os.cpu_count()} cores, {ranks} ranks, {options.rounds} rounds")
    turns = Relay.turns(ranks, MICROBATCHES)
    for i, (name, unit) in enumerate(((model.name, 1.0), ("empty tasks", turns / 1e3))):
        one = min(alone[i] for alone, _ in rounds) / unit
        many = min(apart[i] for _, apart in rounds) / unit
        ratio = statistics.median(apart[i] / alone[i] for alone, apart in rounds)
        what = "ms a step" if unit == 1.0 else "us a turn"
        print(f"\n{name}")
        print(f"  one process    {one:8.2f} {what}")
        print(f"  {ranks} processes    {many:8.2f} {what}")
        print(f"  the ratio      {ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
