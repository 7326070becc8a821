"""Trains a small GPT-2 data-parallel, as one SPMD program, and as a pipeline; compares both.

    python examples/tiny_gpt2_jaxpp_vs_spmd_dp.py --system=both --pp=2 --dp=1 --tp=4

It uses eight devices by default. Data parallelism divides the whole batch among all of
them; the pipeline has --num-ubatches microbatches, and --dp times --tp devices per stage.
Both train on the same batch, so their losses must be equal except for rounding, which the
script checks.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time

import gpt2
import jax
import numpy as np
import optax
import training

import jaxpp.api as jaxpp

PROFILE_FROM, PROFILE_TO = 10, 20  # steps; the time of the steps after them is averaged


def log_profile(what: str, name: str) -> None:
    print(f"{datetime.datetime.now()}: {what} profile ({name})", flush=True)


def train(name: str, step, options, state, batch) -> np.ndarray:
    """Prints the progress of --train-steps steps and the average time; returns the
    losses."""
    total = options.train_steps
    first = PROFILE_TO if total > PROFILE_TO else 0  # first step of the average
    tokens = training.count_tokens(batch)
    *state, loss = step(*state, batch)
    print(f"[{name} warmup] loss_sum={float(loss):.6f}", flush=True)
    losses = []
    logged, logged_at = 0, time.perf_counter()
    for i in range(total):
        if options.profile and i == PROFILE_FROM:
            log_profile("start", name)
            jax.profiler.start_trace(f"{options.profile_folder}/{name}")
        if i == first:
            jax.block_until_ready(state)
            averaged_from = time.perf_counter()
        *state, loss = step(*state, batch)
        losses.append(loss)
        if options.profile and i + 1 == min(PROFILE_TO, total) and i >= PROFILE_FROM:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()
            log_profile("stop", name)
        if (i + 1) % options.log_every == 0 or i + 1 == total:
            value, now = float(loss), time.perf_counter()
            rate = tokens * (i + 1 - logged) / (now - logged_at)
            logged, logged_at = i + 1, now
            training.print_progress(name, i + 1, total, value, rate)
    jax.block_until_ready(state)
    average = (time.perf_counter() - averaged_from) * 1e3 / (total - first)
    print(f"[{name}] avg step time per step after profiling "
          f"(steps {first}..{total - 1}): {average:.3f} ms", flush=True)  # fmt: skip
    return np.array([float(x) for x in losses])


def run_spmd_dp(options, model, optimizer, devices) -> np.ndarray:
    platform = devices[0].platform.upper()
    print(f"=== SPMD data-parallel (jit) on {len(devices)} {platform}s ===")
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    step = training.plain_step(model, optimizer, mesh, {"batch": "data"})
    params = training.init(model, jax.random.key(0))
    batch = training.make_batch(model, options.global_batch, options.num_ubatches)
    whole = batch.reshape(1, options.global_batch, -1)
    return train("spmd_dp", step, options, (params, optimizer.init(params)), whole)


def run_jaxpp(options, model, optimizer, devices) -> np.ndarray:
    print("=== JaxPP MPMD pipeline ===")
    shape = (options.pp, options.dp, options.tp)
    jax_mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), ("mpmd", "data", "model"))
    mesh = jaxpp.MpmdMesh(jax_mesh, "mpmd")
    schedule = jaxpp.Std1F1B(options.pp)
    step = training.pipelined_step(model, optimizer, mesh, schedule, gpt2.RULES)
    params = training.init(model, jax.random.key(0))
    batch = training.make_batch(model, options.global_batch, options.num_ubatches)
    return train("jaxpp", step, options, (params, optimizer.init(params)), batch)


SYSTEMS = {"spmd_dp": run_spmd_dp, "jaxpp": run_jaxpp}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--system", choices=[*SYSTEMS, "both"], default="both")
    training.add_mesh_arguments(parser)
    training.add_arguments(parser)
    parser.add_argument(
        "--profile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"JAX's profiler from step {PROFILE_FROM} to {PROFILE_TO} (default: yes)",
    )
    parser.add_argument("--profile-folder", default="tiny-gpt2-trace")
    options = parser.parse_args()
    training.check_arguments(parser, options, options.dp, options.tp)
    devices = options.pp * options.dp * options.tp
    if options.system != "jaxpp" and options.global_batch % devices:
        parser.error(
            f"--global-batch={options.global_batch} is not a multiple of the {devices} devices"
        )
    return options


def main() -> None:
    options = parse_arguments()
    count = options.pp * options.dp * options.tp
    jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices()[:count]
    model = training.to_model(gpt2.GPT2, options)
    optimizer = optax.adamw(options.lr)
    names = list(SYSTEMS) if options.system == "both" else [options.system]
    losses = [SYSTEMS[name](options, model, optimizer, devices) for name in names]
    if len(losses) == 2:
        good, apart = training.agree(options.dtype, *losses)
        verdict = "agree" if good else "DIFFER"
        print(f"losses of spmd_dp and jaxpp {verdict}: at most {apart:.1e} apart, "
              f"allowed {training.TOLERANCE[options.dtype]:.0e}")  # fmt: skip
        if not good:
            sys.exit(1)


if __name__ == "__main__":
    main()
