"""Trains layers of BERT as a pipeline and checks the result against plain JAX.

    python examples/basic.py --dtype=float32 --pp=2 --num_ubatches=4 --train_steps=5

Both train from the same weights on the same microbatches. Losses, predictions and weights are
then compared; the script ends with SUCCESS ! or with exit status 1.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp.api as jaxpp

# The two steps differ only in the order of sums inside a kernel: XLA fuses the operations
# of a stage differently from those of the whole model. Each rounding is half a unit of
# the dtype's precision (2**-24, 2**-11, 2**-8), and a few tens of them accumulate through
# the layers and steps. Weights, sums of gradients and the loss are always float32.
TOLERANCE = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}

# Gradients of a mean are about 1 / (number of its elements); values below 6e-8 become 0
# in float16.
LOSS_SCALE = {"float32": 1.0, "float16": 256.0, "bfloat16": 1.0}


class BertLayer(nn.Module):
    """Attention and an MLP, each added to its input and then normalized."""

    heads: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x + attention)
        hidden = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(x))
        return nn.LayerNorm(dtype=self.dtype)(x + nn.Dense(width, dtype=self.dtype)(hidden))


class ManualStagesModel(nn.Module):
    layers: int
    heads: int
    pipeline_parallelism: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, hidden_states):
        layers_per_stage = self.layers // self.pipeline_parallelism
        for i in range(self.layers):
            layer = BertLayer(self.heads, self.dtype, name=f"bert_layer_{i}")
            hidden_states = layer(hidden_states)
            if (i + 1) % layers_per_stage == 0:
                hidden_states = jaxpp.pipeline_enter_stage(hidden_states)
        return hidden_states


def make_steps(options, model, optimizer, mesh):
    """The pipelined step and the plain one: (opt_state, params, batch) to the next
    opt_state and params, the losses by microbatch and the predictions."""
    scale = LOSS_SCALE[options.dtype]

    def loss_fn(params, microbatch):
        prediction = model.apply(params, microbatch).astype(jnp.float32)
        loss = jnp.mean((prediction - microbatch) ** 2) / options.num_ubatches
        return loss * scale, prediction

    def gradient(params):
        return partial(jax.value_and_grad(loss_fn, has_aux=True), params)

    def update(opt_state, params, scaled_losses, scaled_grads):
        losses, grads = jax.tree.map(lambda x: x / scale, (scaled_losses, scaled_grads))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return opt_state, optax.apply_updates(params, updates), losses

    @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh)
    def pp_train_step(opt_state, params, batch):
        (losses, predictions), grads = jaxpp.treduce(
            gradient(params), batch, schedule=jaxpp.Std1F1B(mesh.mpmd_dim)
        )
        return *update(opt_state, params, losses, grads), predictions

    @jax.jit
    def train_step(opt_state, params, batch):
        def accumulate(grads, microbatch):
            results, more = gradient(params)(microbatch)
            return jax.tree.map(jnp.add, grads, more), results

        zeros = jax.tree.map(jnp.zeros_like, params)
        grads, (losses, predictions) = jax.lax.scan(accumulate, zeros, batch)
        return *update(opt_state, params, losses, grads), predictions

    return pp_train_step, train_step


def train(label, step, options, opt_state, params, batch):
    """Weights, losses of all steps and the last predictions, as NumPy arrays."""
    tokens = batch.shape[0] * batch.shape[1] * batch.shape[2]
    history = []
    for i in range(options.train_steps):
        start = time.perf_counter()
        opt_state, params, losses, predictions = step(opt_state, params, batch)
        history.append(float(jnp.sum(losses)))
        rate = tokens / (time.perf_counter() - start)
        print(f"[{label} {i + 1:04}/{options.train_steps:04}] "
              f"loss={history[-1]:.6f} tokens/s={rate:.0f}", flush=True)  # fmt: skip
    return jax.tree.map(np.asarray, (params, history, predictions))


def validate(what, actual, expected, tolerance) -> bool:
    """Whether each leaf differs by at most `tolerance` times the norm of the whole tree.

    Not the norm of the leaf: the gradient of a key bias is 0 except for rounding, because
    softmax ignores it.
    """
    norm = float(optax.global_norm(expected))
    differences = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / norm, actual, expected)
    worst = max(jax.tree.leaves(differences))
    good = bool(worst <= tolerance)  # false for NaN
    print(f"{what} differ by {worst:.1e}, allowed are {tolerance:.0e}")
    print(f"[*] `{what}` Validation ... {'PASS' if good else 'FAIL'} !")
    return good


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32", help="of the layers")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages, a device each")
    parser.add_argument("--num_ubatches", type=int, default=4, help="microbatches a step")
    parser.add_argument("--train_steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--seq_len", type=int, default=32)
    parser.add_argument("--ubatch_size", type=int, default=2, help="sequences a microbatch")
    options = parser.parse_args()
    if options.layers % options.pp:
        parser.error(f"--layers={options.layers} is not a multiple of --pp={options.pp}")
    return options


def main() -> None:
    options = parse_arguments()
    jax.config.update("jax_num_cpu_devices", options.pp)
    devices = np.array(jax.devices()[: options.pp]).reshape(options.pp, 1, 1)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("mpmd", "data", "model")), "mpmd")
    print(mesh.lowering_mesh().shape)

    dtype = jnp.dtype(options.dtype)
    model = ManualStagesModel(options.layers, options.heads, options.pp, dtype)
    shape = (options.num_ubatches, options.ubatch_size, options.seq_len, options.hidden_size)
    batch = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    start = jax.jit(model.init)(jax.random.key(0), batch[0])
    # Not Adam, which makes a full step of a gradient that is only rounding noise.
    optimizer = optax.sgd(0.1, momentum=0.9)
    steps = make_steps(options, model, optimizer, mesh)

    runs = [
        train(label, step, options, optimizer.init(start), start, batch)
        for label, step in zip(("jaxpp", "jax"), steps, strict=True)
    ]
    (params, losses, predictions), (plain_params, plain_losses, plain_predictions) = runs
    # Compare how training changed the weights: the weights alone would pass without
    # training.
    change, plain_change = (
        jax.tree.map(lambda new, old: new - np.asarray(old), trained, start)
        for trained in (params, plain_params)
    )
    tolerance = TOLERANCE[options.dtype]
    good = [
        validate("Losses", np.array(losses), np.array(plain_losses), tolerance),
        validate("Predictions", predictions, plain_predictions, tolerance),
        validate("Params", change, plain_change, tolerance),
    ]
    if not all(good):
        sys.exit("FAILURE !")
    print("SUCCESS !")


if __name__ == "__main__":
    main()
