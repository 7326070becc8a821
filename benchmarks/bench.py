"""Step times of two models: the pipeline, a bare C loop that makes the same PJRT calls, and
plain `jax.jit` of the same step. The three take turns, so that a machine whose speed drifts
slows them alike; times are medians, ratios are medians of ratios within a turn.

    python benchmarks/bench.py [--turns N]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JPP_BENCHMARK"] = "1"  # the runtime brings its yardstick along

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp.api as jaxpp


@dataclasses.dataclass(frozen=True)
class Model:
    name: str
    width: int
    sequence: int
    microbatches: int
    layers: int = 8
    stages: int = 4


MODELS = (
    Model("8 layers, d=8, seq 1, 4 stages, 32 microbatches", 8, 1, 32),
    Model("8 layers, d=128, seq 64, 4 stages, 16 microbatches", 128, 64, 16),
)


def init_params(model: Model) -> list[dict[str, Any]]:
    d = model.width
    keys = jax.random.split(jax.random.key(0), model.layers * 2)
    return [
        {
            "up": jax.random.normal(keys[2 * i], (d, 4 * d)) / d**0.5,
            "down": jax.random.normal(keys[2 * i + 1], (4 * d, d)) / (4 * d) ** 0.5,
        }
        for i in range(model.layers)
    ]


def loss_fn(model: Model, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for i, p in enumerate(params):
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
        if (i + 1) % (model.layers // model.stages) == 0:
            x = jaxpp.mark_stage_end(x)
    return jnp.mean((x - y) ** 2)


def update(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)


def pipelined(model: Model, params: Any, xs: jax.Array, ys: jax.Array) -> Any:
    loss, grads = jaxpp.treduce(
        lambda xy: jax.value_and_grad(partial(loss_fn, model))(params, *xy),
        (xs, ys),
        schedule=jaxpp.Std1F1B(model.stages),
        operation=jaxpp.Add,
    )
    return update(params, grads), loss


def plain(model: Model, params: Any, xs: jax.Array, ys: jax.Array) -> Any:
    def one(carry: Any, xy: Any) -> Any:
        found = jax.value_and_grad(partial(loss_fn, model))(params, *xy)
        return jax.tree.map(jnp.add, carry, found), None

    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    (loss, grads), _ = jax.lax.scan(one, zeros, (xs, ys))
    return update(params, grads), loss


class State:
    """A step with the parameters it goes on with."""

    def __init__(self, step: Callable[..., Any], params: Any) -> None:
        self.step = step
        self.params = params

    def time(self, batch: Any) -> float:
        start = time.perf_counter()
        self.params, loss = self.step(self.params, *batch)
        jax.block_until_ready(loss)
        return time.perf_counter() - start


def bare_step(compiled: Any) -> Callable[..., Any]:
    """The same call from Python, with the bare loop in the runtime's place."""
    step = compiled.compiled

    def run(params: Any, *batch: Any) -> Any:
        return step.run_leaves(jax.tree.leaves((params, *batch)), step._runtime.bare_step)

    return run


def measure(model: Model, turns: int) -> None:
    params = init_params(model)
    shape = (model.microbatches, 2, model.sequence, model.width)
    batch = tuple(jax.random.normal(jax.random.key(k), shape) for k in (1, 2))
    mesh = jaxpp.MpmdMesh(
        jax.sharding.Mesh(np.array(jax.devices()[: model.stages]), ("stage",)), "stage"
    )
    start = time.perf_counter()
    compiled = jaxpp.mpmd_jit_with_loop(
        partial(pipelined, model), mpmd_mesh=mesh, donate_argnums=0
    ).compile(params, *batch)
    ours = State(compiled, params)
    ours.time(batch)
    first_ours = time.perf_counter() - start
    start = time.perf_counter()
    jitted = State(
        jax.jit(partial(plain, model), donate_argnums=0), jax.tree.map(jnp.copy, params)
    )
    jitted.time(batch)
    first_plain = time.perf_counter() - start
    bare = State(bare_step(compiled), params)
    bare.time(batch)

    times = np.array([[s.time(batch) for s in (ours, bare, jitted)] for _ in range(turns)])
    instructions = compiled.compiled._runtime.bare_instructions()
    report(model, times, instructions, first_ours, first_plain)


def report(
    model: Model,
    times: np.ndarray,
    instructions: int,
    first_ours: float,
    first_plain: float,
) -> None:
    ours, bare, jitted = np.median(times, axis=0) * 1e3
    against_bare = np.median(times[:, 0] / times[:, 1])
    against_plain = np.median(times[:, 0] / times[:, 2])
    print(f"\n{model.name} ({instructions} runs, sends and deletions a step)")
    print(
        f"  pipeline        {ours:9.3f} ms/step  "
        f"{ours * 1e3 / instructions:7.2f} us/instruction"
    )
    print(
        f"  bare C loop     {bare:9.3f} ms/step  "
        f"{bare * 1e3 / instructions:7.2f} us/instruction"
    )
    print(f"  plain jax.jit   {jitted:9.3f} ms/step")
    print(f"  pipeline / bare C loop    {against_bare:6.2f}")
    print(f"  pipeline / plain jax.jit  {against_plain:6.2f}")
    print(
        f"  call to first result      {first_ours:6.2f} s, plain jax.jit {first_plain:6.2f} s, "
        f"ratio {first_ours / first_plain:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    turns = parser.parse_args().turns
    jax.config.update("jax_num_cpu_devices", 4)
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, medians of {turns} turns")
    for model in MODELS:
        measure(model, turns)


if __name__ == "__main__":
    main()
