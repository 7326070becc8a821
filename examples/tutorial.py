"""From a training step in plain JAX to an interleaved pipeline, one step after another.

    python examples/tutorial.py
    python examples/tutorial.py --width=256 --seq-len=128 --batch-size=16

A transformer trains under FSDP as one SPMD program, then as a pipeline of as many stages as
ranks, then of as many stages as layers. The script prints the mesh, the arrays and their ranks,
the schedules, the program, and when each rank ran which task. `tools/notebook.py` converts this
script, `tutorial.py`, to the notebook `tutorial.ipynb`.
"""

from __future__ import annotations

import argparse
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
from flax.training import train_state
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api

# %% [markdown]
# ### The numbers
# They are small, so that four CPU devices train in seconds; flags make them larger.

# %%
parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
parser.add_argument("--num-stages", type=int, default=4, help="ranks, a device each")
parser.add_argument("--num-layers", type=int, default=8)
parser.add_argument("--num-mb", type=int, default=4, help="microbatches a step")
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--seq-len", type=int, default=32)
parser.add_argument("--width", type=int, default=64)
parser.add_argument("--num-steps", type=int, default=8)
options, _ = parser.parse_known_args()  # a notebook has arguments of its own

NUM_STAGES, NUM_LAYERS, NUM_MB = options.num_stages, options.num_layers, options.num_mb
SHAPE = (options.batch_size, options.seq_len, options.width)
if NUM_LAYERS % NUM_STAGES or options.batch_size % (NUM_MB * NUM_STAGES):
    parser.error("layers are a multiple of stages, and a microbatch of devices")

jax.config.update("jax_num_cpu_devices", NUM_STAGES)
mesh = jax.sharding.Mesh(np.array(jax.devices())[:NUM_STAGES], ("fsdp",))
print(mesh)

# %% [markdown]
# ### The model
# A block is under `remat` and `jit`, as in a large model. `num_stages` is for the pipeline;
# with one stage this is the plain model, because a mark has no effect outside a pipeline.


# %%
class Block(nn.Module):
    @nn.remat
    @nn.jit
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x + nn.MultiHeadDotProductAttention(num_heads=4)(x))
        hidden = nn.gelu(nn.Dense(4 * x.shape[-1])(x))
        return nn.LayerNorm()(x + nn.Dense(x.shape[-1])(hidden))


class Transformer(nn.Module):
    num_stages: int = 1

    @nn.compact
    def __call__(self, x):
        for i in range(NUM_LAYERS):
            x = Block(name=f"block_{i}")(x)
            if (i + 1) % (NUM_LAYERS // self.num_stages) == 0:
                x = jaxpp.api.pipeline_enter_stage(x)  # a stage ends here
        return x


def init_state(model):
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones(SHAPE))["params"]
    print("Model initialized successfully!")
    return train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adamw(learning_rate=0.001)
    )


def make_batch():
    xs = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    return xs, np.tanh(xs[:, ::-1])


# %% [markdown]
# ### A step in plain JAX
# The batch is cut into microbatches, and a scan over them adds up the gradients.


# %%
def loss_fn(state, params, x, targets):
    x, targets = jax.lax.with_sharding_constraint((x, targets), P("fsdp"))
    return jnp.mean((state.apply_fn({"params": params}, x) - targets) ** 2) / NUM_MB


def by_microbatch(x):
    return x.reshape(NUM_MB, -1, *x.shape[1:])


def scan_step(state, xs, targets):
    grad_fn = jax.value_and_grad(partial(loss_fn, state))

    def scan_fn(carry, microbatch):
        return jax.tree.map(jnp.add, carry, grad_fn(state.params, *microbatch)), ()

    zeros = (0.0, jax.tree.map(jnp.zeros_like, state.params))
    microbatches = (by_microbatch(xs), by_microbatch(targets))
    (loss, grads), _ = jax.lax.scan(scan_fn, zeros, microbatches)
    return state.apply_gradients(grads=grads), loss


def train_with_progress(train_step, inputs):
    """The state, the losses and the milliseconds a step, the first two steps apart."""
    state, xs, targets = inputs
    losses, tokens = [], SHAPE[0] * SHAPE[1]
    last_print = time.perf_counter()
    for i in range(options.num_steps):
        if i == min(2, options.num_steps - 1):
            jax.block_until_ready(state)
            start_time = time.perf_counter()
        state, loss = train_step(state, xs, targets)
        losses.append(loss)
        if i % 2 == 1:
            value, now = float(loss), time.perf_counter()
            rate = 2 * tokens / (now - last_print)
            last_print = now
            print(
                f"Training loss after step {i + 1}: {value} ({rate:.0f} tokens/s)", flush=True
            )
    jax.block_until_ready(state)
    took = time.perf_counter() - start_time
    steps = max(options.num_steps - 2, 1)
    print(f"Final training loss: {float(losses[-1])}")
    print(f"Training took: {took:.2f} seconds")
    return state, [float(x) for x in losses], took / steps * 1e3


# %% [markdown]
# ### FSDP
# Weights, their gradients and Adam's moments are divided among the devices by their first axis,
# and so is the batch.


# %%
def fsdp_specs(state):
    return (
        jax.tree.map(lambda x: P("fsdp") if np.ndim(x) else P(), state),
        P("fsdp"),
        P("fsdp"),
    )


print("Num microbatches: ", NUM_MB)
state = init_state(Transformer())
inputs = (state, *make_batch())
in_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), fsdp_specs(state))
out_shardings = (in_shardings[0], NamedSharding(mesh, P()))
with jax.set_mesh(mesh):
    compiled = (
        jax.jit(scan_step, in_shardings=in_shardings, out_shardings=out_shardings)
        .lower(*inputs)
        .compile()
    )
runs = {"FSDP": train_with_progress(compiled, jax.device_put(inputs, in_shardings))}

# %% [markdown]
# ### The pipelined step
# `treduce` takes the place of the scan. Its arguments are the schedule, and the operation that
# reduces the results of the microbatches.


# %%
def train_step(state, xs, targets, schedule):
    grad_fn = jax.value_and_grad(partial(loss_fn, state))
    loss, grads = jaxpp.api.treduce(
        lambda microbatch: grad_fn(state.params, *microbatch),
        (by_microbatch(xs), by_microbatch(targets)),
        schedule=schedule,
        operation=jaxpp.api.Add,
    )
    return state.apply_gradients(grads=grads), loss


# %% [markdown]
# ### The mesh
# One axis indexes the ranks of the pipeline; the other axes form the mesh of each rank.

# %%
devices = np.array(jax.devices())[:NUM_STAGES].reshape(NUM_STAGES, -1)
mpmd_mesh = jaxpp.api.MpmdMesh(jax.sharding.Mesh(devices, ("stage", "fsdp")), "stage")
print(mpmd_mesh)
for rank_mesh in mpmd_mesh.unstack:
    print(rank_mesh)


# %%
def compile_pipeline(num_stages):
    """The compiled step and its arguments."""
    state = init_state(Transformer(num_stages))
    inputs = (state, *make_batch())
    in_specs = fsdp_specs(state)
    schedule = jaxpp.api.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_STAGES)
    step = jaxpp.api.mpmd_jit_with_loop(
        partial(train_step, schedule=schedule),
        in_specs=in_specs,
        out_specs=(in_specs[0], P()),
        mpmd_mesh=mpmd_mesh,
    )
    return step.compile(*inputs), inputs


pp_train_step, pp_inputs = compile_pipeline(NUM_STAGES)
runs["pipeline"] = train_with_progress(pp_train_step, pp_inputs)

# %% [markdown]
# ### The arrays
# Weights are only on the rank of their stage. All ranks need the step count.


# %%
def show_arrays(state):
    for i in range(NUM_LAYERS):
        print(f"layer_{i}", repr(state.params[f"block_{i}"]["Dense_0"]["kernel"]))
    print(repr(state.step))
    copies = state.step._partially_addressable_arrays
    print(copies)
    print([copy.sharding.mesh.devices for copy in copies.values()])


show_arrays(runs["pipeline"][0])


# %% [markdown]
# ### Schedules
# A schedule is a list of tasks for each rank. The last rank runs each forward and its backward
# as one task.


# %%
def show_tasks(num_stages, rank):
    schedule = jaxpp.api.Interleaved1F1B(num_stages=num_stages, mpmd_dim=NUM_STAGES)
    print(f"rank {rank}:", [str(task) for task in schedule.tasks(NUM_MB)[rank]])


show_tasks(NUM_STAGES, NUM_STAGES // 2)
show_tasks(NUM_STAGES, NUM_STAGES - 1)

# %% [markdown]
# ### The program
# The program lists what each rank runs, with all transfers and deletions; this part begins with
# the first forward.

# %%
lines = str(pp_train_step.closed_jaxpr).splitlines()
first = next(i for i, line in enumerate(lines) if "task_name=fwd_0" in line)
print("\n".join(line[:120] for line in lines[max(0, first - 10) : first + 20]))

# %% [markdown]
# ### The interleaved pipeline
# With one stage per layer, each rank has several stages that are not neighbours. Its first task
# starts earlier, and it idles less.

# %%
show_tasks(NUM_LAYERS, 0)
show_tasks(NUM_LAYERS, NUM_STAGES - 1)
interleaved_step, interleaved_inputs = compile_pipeline(NUM_LAYERS)
runs["interleaved"] = train_with_progress(interleaved_step, interleaved_inputs)
show_arrays(runs["interleaved"][0])


# %% [markdown]
# ### Profile
# The profile shows when each rank ran which task. The file is for https://ui.perfetto.dev.


# %%
def profile(label, compiled, inputs):
    compiled.set_tracing()
    jax.block_until_ready(compiled(*inputs))
    compiled.set_tracing(False)
    path = pathlib.Path(f"tutorial-trace-{label}.json")
    path.write_text(compiled.trace_json())
    print(f"\n{label}, written to {path}:")
    print(compiled.draw_trace())


profile("pipeline", pp_train_step, pp_inputs)
profile("interleaved", interleaved_step, interleaved_inputs)

# %% [markdown]
# ### The comparison
# The losses are equal except for rounding. If all devices share the cores of one machine, the
# times say little about accelerators.

# %%
print(f"\n{'step':>11}" + "".join(f"{label:>14}" for label in runs))
for i in range(options.num_steps):
    print(f"{i + 1:11}" + "".join(f"{losses[i]:14.7f}" for _, losses, _ in runs.values()))
print(f"{'ms a step':>11}" + "".join(f"{ms:14.1f}" for _, _, ms in runs.values()))
expected = runs["FSDP"][1]
for label, (_, losses, _) in runs.items():
    np.testing.assert_allclose(losses, expected, rtol=1e-4, err_msg=label)
print("All losses agree.")
