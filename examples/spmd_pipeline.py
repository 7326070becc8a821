"""Compares a pipeline in one SPMD program with one of tasks, and counts the wasted work.

    python examples/spmd_pipeline.py --pp=4 --num-ubatches=8

In one SPMD program, all ranks do the same at any time. The stages are a leading axis of
all weights, divided among the ranks; in each turn, `vmap` applies every stage to its
data, and a shift along that axis passes the result on. Until the first microbatch has
reached the last stage, and after the last one has left the first, stages compute results
that are not used. All forward turns come before all backward ones, so that the kept
activations grow with the number of microbatches, unless stages are rematerialised
(--spmd-remat), which costs one more forward. The pipeline of tasks runs 1F1B on the same
weights: ranks idle instead, and keep one microbatch per stage.

The script trains with both, and without a pipeline, and compares the losses. It counts
the FLOPs of each program, prints them beside the prediction of `jaxpp simulate --spmd`,
and draws both.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from drawing import Svg
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp

LEARNING_RATE = 0.1
COLOURS = {"forward": "#7aa6e8", "backward": "#8fce8f", "again": "#e8c37a", "lost": "#c8c8c8"}


# --- The model and its three steps ------------------------------------------------------


def make_stages(options) -> dict[str, jax.Array]:
    """The weights, [stages, layers of a stage, ...]."""
    d, hidden, lead = options.d_model, options.mlp_dim, (options.pp, options.layers_per_stage)
    up, down = jax.random.split(jax.random.key(0))
    return {
        "up": jax.random.normal(up, (*lead, d, hidden)) / d**0.5,
        "down": jax.random.normal(down, (*lead, hidden, d)) / (hidden * lead[0]) ** 0.5,
    }


def stage_of(params, s: int):
    return jax.tree.map(lambda w: w[s], params)


def apply_stage(p, x):
    """p: the weights of one stage."""
    for up, down in zip(p["up"], p["down"], strict=True):
        scaled = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        x = x + jax.nn.gelu(scaled @ up) @ down
    return x


def loss_of(found, target, microbatches: int):
    return jnp.mean((found - target) ** 2) / microbatches


def update(params, grads):
    return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)


def plain_step(params, xs, targets, *, unroll: bool = False):
    def gradient(x, target):
        def loss_fn(params):
            found = x
            for s in range(len(params["up"])):
                found = apply_stage(stage_of(params, s), found)
            return loss_of(found, target, len(xs))

        return jax.value_and_grad(loss_fn)(params)

    def accumulate(total, microbatch):
        return jax.tree.map(jnp.add, total, gradient(*microbatch)), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(accumulate, zeros, (xs, targets), unroll=unroll)
    return update(params, grads), loss


def spmd_step(params, xs, targets, *, remat: bool, unroll: bool = False):
    stages, microbatches = len(params["up"]), len(xs)
    run = jax.vmap(jax.checkpoint(apply_stage) if remat else apply_stage)

    def loss_fn(params):
        def turn(held, t):
            """held[stage]: the stage's result of the previous turn."""
            entering = xs[jnp.minimum(t, microbatches - 1)]
            held = jnp.roll(held, 1, axis=0).at[0].set(entering)
            held = jax.lax.with_sharding_constraint(run(params, held), P("stage"))
            return held, held[-1]

        held = jnp.zeros((stages, *xs.shape[1:]))
        turns = jnp.arange(microbatches + stages - 1)
        _, leaving = jax.lax.scan(turn, held, turns, unroll=unroll)
        losses = jax.vmap(partial(loss_of, microbatches=microbatches))
        return losses(leaving[stages - 1 :], targets).sum()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return update(params, grads), loss


def mpmd_step(params, xs, targets, *, schedule):
    def loss_fn(params, x, target):
        for s in range(schedule.num_stages):
            x = apply_stage(stage_of(params, s), x)
            if s + 1 < schedule.num_stages:
                x = jaxpp.mark_stage_end(x)
        return jaxpp.mark_stage_end(loss_of(x, target, len(xs)))

    loss, grads = jaxpp.treduce(
        lambda microbatch: jax.value_and_grad(loss_fn)(params, *microbatch),
        (xs, targets),
        schedule=schedule,
        operation=jaxpp.Add,
    )
    return update(params, grads), loss


# --- Training and counting --------------------------------------------------------------


def train(name: str, step, options, params, xs, targets) -> np.ndarray:
    """Returns the losses of all steps; also prints the CPU seconds of all ranks together."""
    tokens, losses, seconds = xs.shape[0] * xs.shape[1] * xs.shape[2], [], []
    for i in range(options.train_steps):
        start, busy = time.perf_counter(), time.process_time()
        params, loss = step(params, xs, targets)
        jax.block_until_ready(params)
        losses.append(float(loss))
        seconds.append(time.process_time() - busy)
        rate = tokens / (time.perf_counter() - start)
        if (i + 1) % options.log_every == 0 or i + 1 == options.train_steps:
            print(f"[{name} {i + 1:04}/{options.train_steps:04}] loss={losses[-1]:.6f} "
                  f"tokens/s={rate:.0f}", flush=True)  # fmt: skip
    print(f"[{name}] median {np.median(seconds[1:] or seconds) * 1e3:.1f} ms of processor time")
    return np.array(losses)


def count_flops(step, *arguments) -> float:
    """FLOPs as XLA counts them, with unrolled loops, because XLA counts only one turn of
    a loop."""
    return jax.jit(partial(step, unroll=True)).lower(*arguments).cost_analysis()["flops"]


def simulate(name: str, options, *flags: str) -> dict:
    command = shutil.which("jaxpp", path=pathlib.Path(sys.executable).parent) or "jaxpp"
    sizes = [f"--{what}={options.pp}" for what in ("stages", "ranks")]
    sizes.append(f"--microbatches={options.num_ubatches}")
    done = subprocess.run(
        [command, "simulate", name, *sizes, *flags], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def report(options, params, xs, targets) -> float:
    """Prints what each program computes; returns how far the wasted work differs from the
    simulation."""
    useful = count_flops(plain_step, params, xs, targets)
    kept = count_flops(partial(spmd_step, remat=False), params, xs, targets)
    again = count_flops(partial(spmd_step, remat=True), params, xs, targets)
    said = simulate("gpipe", options, "--spmd", "--json")
    lost = said["spmd"]["lost"], 1 - useful / kept
    rematerialised = said["spmd_rematerialised"]["rematerialised"], 1 - kept / again
    print(f"\nFLOPs of a step: {useful:.4g} without a pipeline, {kept:.4g} as one SPMD "
          f"program, {again:.4g} with remat")  # fmt: skip
    print(f"{'part of the SPMD program':36} {'simulated':>10} {'counted':>8}")
    print(f"{'for nobody':36} {lost[0]:10.1%} {lost[1]:8.1%}")
    print(f"{'computed again, under --spmd-remat':36} "
          f"{rematerialised[0]:10.1%} {rematerialised[1]:8.1%}")  # fmt: skip
    print("(the last product of a stage need not be computed again, which is not simulated)")
    return abs(lost[1] - lost[0])


# --- The picture ------------------------------------------------------------------------


def spmd_tasks(options, expected):
    """(rank, begin, length, kind, label), in the simulation's units of time."""
    ranks, microbatches, turns = options.pp, options.num_ubatches, expected["turns"]
    forward, backward = expected["forward_turn"], expected["backward_turn"]
    remat = forward if options.spmd_remat else 0
    for rank in range(ranks):
        for turn in range(turns):
            k = turn - rank
            used = 0 <= k < microbatches
            label = str(k) if used else "Z"
            yield rank, turn * forward, forward, "forward" if used else "lost", label
            begin = turns * forward + (turns - 1 - turn) * backward
            if remat:
                yield rank, begin, remat, "again" if used else "lost", label
            kind = "backward" if used else "lost"
            yield rank, begin + remat, backward - remat, kind, label


def mpmd_tasks(options):
    for event in simulate("1f1b", options, "--trace")["traceEvents"]:
        if event["ph"] == "X":
            label = str(event["args"]["microbatch"])
            unit = 1000  # there, a unit of time is a millisecond
            span = (event["ts"] / unit, event["dur"] / unit)
            yield event["tid"], *span, event["cat"], label


def draw(options) -> None:
    said = simulate("gpipe", options, "--spmd", "--json")
    expected = said["spmd_rematerialised" if options.spmd_remat else "spmd"]
    lost = f"{expected['lost']:.1%} of each rank's work is for nobody (gray)"
    panels = {
        f"One SPMD program: {lost}": list(spmd_tasks(options, expected)),
        "Tasks under 1F1B: ranks idle (white), and keep less": list(mpmd_tasks(options)),
    }
    unit, height, left = 14, 22, 60
    longest = max(begin + length for tasks in panels.values() for _, begin, length, *_ in tasks)
    panel_height = (options.pp + 2) * height
    picture = Svg(left + longest * unit + 10, len(panels) * panel_height)
    for i, (title, tasks) in enumerate(panels.items()):
        top = i * panel_height
        picture.text(left, top + height - 6, title)
        for rank in range(options.pp):
            picture.text(6, top + (rank + 2) * height - 6, f"rank {rank}")
        for rank, begin, length, kind, label in tasks:
            y = top + (rank + 1) * height
            x, width = left + begin * unit, length * unit
            picture.box(x, y, width, height, COLOURS[kind], label)
    picture.write(options.picture)
    print(f"{options.picture}: both pipelines, times as `jaxpp simulate` has them")


# --- The script -------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=4, help="stages, a rank of one device each")
    parser.add_argument("--layers-per-stage", type=int, default=2)
    parser.add_argument("--num-ubatches", type=int, default=8, help="microbatches a step")
    parser.add_argument("--ubatch-size", type=int, default=4, help="sequences a microbatch")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--mlp-dim", type=int, default=256)
    parser.add_argument("--spmd-remat", action="store_true", help="rematerialise SPMD stages")
    parser.add_argument("--train-steps", type=int, default=10)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--picture", default="spmd-pipeline.svg")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    jax.config.update("jax_num_cpu_devices", options.pp)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[: options.pp]), ("stage",))
    params = make_stages(options)
    shape = (options.num_ubatches, options.ubatch_size, options.seq_len, options.d_model)
    xs = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    targets = np.tanh(xs[..., ::-1])

    over_stages, everywhere = NamedSharding(mesh, P("stage")), NamedSharding(mesh, P())
    spmd = jax.jit(
        partial(spmd_step, remat=options.spmd_remat),
        in_shardings=(over_stages, everywhere, everywhere),
        out_shardings=(over_stages, everywhere),
    )
    mpmd = jaxpp.mpmd_jit_with_loop(
        partial(mpmd_step, schedule=jaxpp.Std1F1B(options.pp)),
        mpmd_mesh=jaxpp.MpmdMesh(mesh, "stage"),
    )
    expected = train("plain", jax.jit(plain_step), options, params, xs, targets)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(params, over_stages)
        losses = {"spmd": train("spmd", spmd, options, sharded, xs, targets)}
        distance = report(options, params, xs, targets)
    losses["mpmd"] = train("mpmd", mpmd, options, params, xs, targets)
    draw(options)
    for name, found in losses.items():
        np.testing.assert_allclose(found, expected, rtol=1e-4, err_msg=name)
    print("losses of spmd and mpmd agree with those of plain JAX")
    if distance > 0.03:
        sys.exit(f"what is lost DIFFERS by {distance:.1%} from the simulation")


if __name__ == "__main__":
    main()
