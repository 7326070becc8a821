"""Trains a small transformer as a pipeline, beside plain JAX.

Eight blocks (multi-head attention and MLP, each under remat and jit), adamw, four CPU
devices: first four stages, then eight stages on the same four devices. Prints the losses
of plain JAX and of the pipeline, draws when each rank ran what, and writes
demo-trace.json for https://ui.perfetto.dev.
"""

from __future__ import annotations

import os
import pathlib
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import jaxpp.api as jaxpp

RANKS, LAYERS, MICROBATCHES, STEPS = 4, 8, 8, 12
BATCH, SEQUENCE, WIDTH = 32, 64, 128


class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x))
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


class Transformer(nn.Module):
    stages: int

    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = Block(name=f"block_{i}")(x)
            if (i + 1) % (LAYERS // self.stages) == 0:
                x = jaxpp.mark_stage_end(x)  # the only change to the model
        return x


def init_state(stages: int) -> TrainState:
    model = Transformer(stages)
    params = model.init(jax.random.key(0), jnp.ones((1, SEQUENCE, WIDTH)))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))


def make_batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(BATCH, SEQUENCE, WIDTH)).astype(np.float32)
    targets = np.tanh(xs @ rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5)
    shape = (MICROBATCHES, -1, SEQUENCE, WIDTH)
    return xs.reshape(shape), targets.reshape(shape)


def microbatch_gradient(state: TrainState):
    def loss_fn(params, x, target):
        return jnp.mean((state.apply_fn({"params": params}, x) - target) ** 2) / MICROBATCHES

    return lambda microbatch: jax.value_and_grad(loss_fn)(state.params, *microbatch)


def pipelined_step(state, batch, schedule):
    loss, grads = jaxpp.treduce(
        microbatch_gradient(state), batch, schedule=schedule, operation=jaxpp.Add
    )
    return state.apply_gradients(grads=grads), loss


@partial(jax.jit, donate_argnums=0)
def plain_step(state, batch):
    gradient = microbatch_gradient(state)

    def accumulate(carry, microbatch):
        return jax.tree.map(jnp.add, carry, gradient(microbatch)), None

    zeros = (0.0, jax.tree.map(jnp.zeros_like, state.params))
    (loss, grads), _ = jax.lax.scan(accumulate, zeros, batch)
    return state.apply_gradients(grads=grads), loss


def train(console: Console, label: str, step, state, batch):
    """The state, the losses and the median step time in milliseconds."""
    columns = (TextColumn(f"{label:24}"), BarColumn(), TextColumn("{task.description}"))
    losses, times = [], []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=STEPS)
        for _ in range(STEPS):
            start = time.perf_counter()
            state, loss = step(state, batch)
            losses.append(float(loss))
            times.append((time.perf_counter() - start) * 1e3)
            text = f"loss {losses[-1]:.5f}  step {times[-1]:6.1f} ms"
            progress.update(task, advance=1, description=text)
    return state, losses, float(np.median(times[2:]))


def pipeline(console: Console, stages: int, mesh, batch):
    schedule = jaxpp.Interleaved1F1B(num_stages=stages, mpmd_dim=RANKS)
    step = jaxpp.mpmd_jit_with_loop(
        partial(pipelined_step, schedule=schedule), mpmd_mesh=mesh, donate_argnums=0
    )
    state = init_state(stages)
    compiled = step.compile(state, batch)
    label = f"{stages} stages on {RANKS} ranks"
    state, losses, median = train(console, label, compiled, state, batch)
    compiled.set_tracing()
    compiled(state, batch)
    return compiled, losses, median


def show_timeline(console: Console, stages: int, compiled) -> str:
    console.print(f"\nWhen each rank ran what, {stages} stages, one step:")
    width = max(60, min(console.width, 120))
    print(compiled.draw_trace(width, color=console.is_terminal))
    return compiled.trace_json()


def main() -> None:
    jax.config.update("jax_num_cpu_devices", RANKS)
    console = Console()
    devices = np.array(jax.devices()[:RANKS])  # with fewer, ranks share them
    mesh = jaxpp.MpmdMesh(
        jax.sharding.Mesh(devices, ("stage",)),
        "stage",
        ranks_per_device=RANKS // len(devices),
    )
    batch = make_batch()
    runs = {stages: pipeline(console, stages, mesh, batch) for stages in (4, 8)}
    _, plain, plain_ms = train(console, "plain jax.jit", plain_step, init_state(4), batch)

    table = Table(title="loss by step")
    for heading in ("step", "plain JAX", "4 stages", "8 stages"):
        table.add_column(heading, justify="right")
    for i, loss in enumerate(plain):
        table.add_row(str(i), f"{loss:.7f}", *(f"{r[1][i]:.7f}" for r in runs.values()))
    medians = [f"{ms:.1f} ms" for ms in (plain_ms, runs[4][2], runs[8][2])]
    table.add_row("median", *medians, style="bold")
    console.print(table)

    for stages, (compiled, _, _) in runs.items():
        trace = show_timeline(console, stages, compiled)
    path = pathlib.Path("demo-trace.json")
    path.write_text(trace)
    console.print(f"\nThe last of these is in {path}: open it at https://ui.perfetto.dev")


if __name__ == "__main__":
    main()
