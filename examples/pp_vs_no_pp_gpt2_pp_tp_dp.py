"""Trains a small GPT-2 without a pipeline and with pipelines under several schedules.

    python examples/pp_vs_no_pp_gpt2_pp_tp_dp.py --mode both --pp=2 --dp=2 --tp=2

`base` is one SPMD program with tensor and data parallelism, in which the devices of all
ranks are data-parallel; `pp` is a pipeline for each of --schedules; `both` compares its
losses with those of all schedules. It ends with a table of times and losses, and a
picture.
"""

from __future__ import annotations

import argparse
import sys

import gpt2
import jax
import numpy as np
import optax
import training
from drawing import Svg
from rich.console import Console
from rich.table import Table

import jaxpp.api as jaxpp

# Schedules that require several stages per rank get two, so that all train the same
# model.
SCHEDULES = {
    "gpipe": lambda ranks: jaxpp.GPipe(ranks),
    "1f1b": lambda ranks: jaxpp.Std1F1B(ranks),
    "eager-1f1b": lambda ranks: jaxpp.Eager1F1B(ranks),
    "zero-bubble": lambda ranks: jaxpp.ZeroBubble(ranks),
    "interleaved-1f1b": lambda ranks: jaxpp.Interleaved1F1B(2 * ranks, ranks),
    "kimi-k2": lambda ranks: jaxpp.KimiK2(2 * ranks, ranks),
    "dualpipe-v": lambda ranks: jaxpp.DualPipeV(2 * ranks, ranks),
}


def run_base(options, model: training.Model, optimizer):
    shape = (options.pp * options.dp, options.tp)
    devices = np.array(jax.devices()).reshape(shape)
    mesh = jax.sharding.Mesh(devices, ("data", "model"))
    step = training.plain_step(model, optimizer, mesh, gpt2.RULES)
    return training.train("base", step, options, model, optimizer)[1:]


def run_pipeline(name: str, options, model: training.Model, optimizer):
    devices = np.array(jax.devices()).reshape(options.pp, options.dp, options.tp)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data", "model")), "stage")
    schedule = SCHEDULES[name](options.pp)
    step = training.pipelined_step(model, optimizer, mesh, schedule, gpt2.RULES)
    return training.train(name, step, options, model, optimizer)[1:]


def show(options, runs) -> None:
    tokens = options.global_batch * options.seq_len
    table = Table(title=f"{options.pp} x {options.dp} x {options.tp} devices (pp, dp, tp)")
    table.add_column("")
    for heading in ("ms a step", "tokens/s", "last loss"):
        table.add_column(heading, justify="right")
    for name, (losses, ms) in runs.items():
        table.add_row(name, f"{ms:.1f}", f"{tokens / ms * 1e3:.0f}", f"{losses[-1]:.6f}")
    Console().print(table)
    draw(options.picture, table.title, {name: ms for name, (_, ms) in runs.items()})


def draw(path: str, title: str, times: dict[str, float]) -> None:
    """A bar for each run, whose length is the time of a step."""
    height, left, longest = 22, 130, 400
    picture = Svg(left + longest + 90, (len(times) + 2) * height)
    picture.text(left, height - 6, title)
    for i, (name, ms) in enumerate(times.items()):
        top = (i + 1) * height
        length = longest * ms / max(times.values())
        picture.text(left - 8, top + height - 6, name, "end")
        picture.box(left, top + 3, length, height - 6, "#7aa6e8")
        picture.text(left + length + 6, top + height - 6, f"{ms:.1f} ms")
    picture.write(path)
    print(f"{path}: times of a step")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mode", choices=("base", "pp", "both"), default="both")
    parser.add_argument(
        "--schedules",
        nargs="+",
        choices=SCHEDULES,
        default=list(SCHEDULES),
        metavar="SCHEDULE",
        help=f"of {', '.join(SCHEDULES)} (default: all)",
    )
    parser.add_argument("--picture", default="schedules.svg", help="of the times of a step")
    training.add_mesh_arguments(parser)
    training.add_arguments(parser)
    parser.set_defaults(dp=2, tp=2, train_steps=10)
    options = parser.parse_args()
    data_parallel = options.dp if options.mode == "pp" else options.pp * options.dp
    training.check_arguments(parser, options, data_parallel, options.tp)
    two_a_rank = [
        s for s in options.schedules if SCHEDULES[s](options.pp).num_stages > options.pp
    ]
    if options.mode != "base" and two_a_rank and options.layers_per_stage % 2:
        parser.error(
            f"--layers-per-stage={options.layers_per_stage} cannot be halved, as the two"
            f" stages a rank of {two_a_rank[0]} need"
        )
    return options


def main() -> None:
    options = parse_arguments()
    jax.config.update("jax_num_cpu_devices", options.pp * options.dp * options.tp)
    model = training.to_model(gpt2.GPT2, options)
    optimizer = optax.adamw(options.lr)
    runs = {}
    if options.mode != "pp":
        runs["base"] = run_base(options, model, optimizer)
    if options.mode != "base":
        for name in options.schedules:
            runs[name] = run_pipeline(name, options, model, optimizer)
    show(options, runs)

    first, (expected, _) = next(iter(runs.items()))
    for name, (losses, _) in runs.items():
        good, apart = training.agree(options.dtype, losses, expected)
        if not good:
            sys.exit(f"losses of {name} and {first} DIFFER: {apart:.1e} apart")
    if len(runs) > 1:
        print(f"losses of all {len(runs)} runs agree")


if __name__ == "__main__":
    main()
