"""A small GPT-2 in plain JAX, and its training step as a pipeline and without one.

Weights are described by one table: their shapes and the names of their axes. What a name means
on a mesh is said by rules, name to mesh axis, from which the sharding of each weight follows.
`tiny_gpt2_jaxpp_vs_spmd_dp.py`, `named_axes.py` and `pp_vs_no_pp_gpt2_pp_tp_dp.py` train it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpp.api as jaxpp

# Tensor and data parallelism: heads, hidden units and the vocabulary are divided.
RULES = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}

# How far two ways to train may be apart in their losses, as a part of the loss. They round
# otherwise (by 2**-24 and 2**-8), and training makes more of that with each step, the more so
# with Adam, whose steps do not get smaller with the gradients.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    d_model: int
    n_heads: int
    mlp_dim: int
    vocab_size: int
    seq_len: int
    dtype: str = "float32"


def is_weight(entry: Any) -> bool:
    return isinstance(entry, tuple)


def describe_weights(config: Config) -> dict[str, Any]:
    """The tree of weights; a leaf is (shape, names of its axes, initial scale)."""
    d, heads, mlp = config.d_model, config.n_heads, config.mlp_dim
    residual = 0.02 / (2 * config.layers) ** 0.5  # what is added once a layer, as GPT-2 does
    norm = {"scale": ((d,), ("embed",), None), "bias": ((d,), ("embed",), 0.0)}
    block = {
        "norm_1": norm,
        "qkv": ((d, 3, heads, d // heads), ("embed", None, "heads", None), 0.02),
        "out": ((heads, d // heads, d), ("heads", None, "embed"), residual),
        "norm_2": norm,
        "up": ((d, mlp), ("embed", "mlp"), 0.02),
        "up_bias": ((mlp,), ("mlp",), 0.0),
        "down": ((mlp, d), ("mlp", "embed"), residual),
        "down_bias": ((d,), ("embed",), 0.0),
    }
    return {
        "tokens": ((config.vocab_size, d), ("vocab", "embed"), 0.02),  # the head as well
        "positions": ((config.seq_len, d), (None, "embed"), 0.01),
        "blocks": [block] * config.layers,
        "norm": norm,
    }


def init(config: Config, key: jax.Array) -> dict[str, Any]:
    entries, tree = jax.tree.flatten(describe_weights(config), is_leaf=is_weight)

    def make(entry, key):
        shape, _, scale = entry
        return jnp.ones(shape) if scale is None else scale * jax.random.normal(key, shape)

    keys = jax.random.split(key, len(entries))
    return tree.unflatten([make(*pair) for pair in zip(entries, keys, strict=True)])


def to_spec(names: tuple[str | None, ...], rules: Mapping[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(rules.get(name) for name in names))


def weight_specs(config: Config, rules: Mapping[str, Any]) -> Any:
    table = describe_weights(config)
    return jax.tree.map(lambda entry: to_spec(entry[1], rules), table, is_leaf=is_weight)


def normalize(p, x):
    x = x.astype(jnp.float32)
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * p["scale"] + p["bias"]


def attend(p, x):
    q, k, v = jnp.einsum("bld,dthk->tblhk", x, p["qkv"].astype(x.dtype))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jnp.einsum("blhk,hkd->bld", mixed, p["out"].astype(x.dtype))


def apply_mlp(p, x):
    hidden = jax.nn.gelu(x @ p["up"].astype(x.dtype) + p["up_bias"].astype(x.dtype))
    return hidden @ p["down"].astype(x.dtype) + p["down_bias"].astype(x.dtype)


Place = Callable[..., jax.Array]  # (activation, *names of its axes) -> the same, sharded so


def place_nowhere(x: jax.Array, *_names: str | None) -> jax.Array:
    return x


def loss_fn(config: Config, params, tokens, stages: int, place: Place = place_nowhere):
    """The mean loss of the next token; the model is cut into `stages` equal stages."""
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    x = params["tokens"][inputs] + params["positions"]
    x = place(x.astype(config.dtype), "batch", None, None)
    for i, p in enumerate(params["blocks"]):
        x = x + attend(p, normalize(p["norm_1"], x).astype(x.dtype))
        x = x + apply_mlp(p, normalize(p["norm_2"], x).astype(x.dtype))
        x = place(x, "batch", None, None)
        if (i + 1) % (config.layers // stages) == 0 and i + 1 < config.layers:
            x = jaxpp.mark_stage_end(x)
    x = normalize(params["norm"], x).astype(config.dtype)
    logits = (x @ params["tokens"].T.astype(x.dtype)).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return jaxpp.mark_stage_end(loss)


def make_batch(config: Config, global_batch: int, num_ubatches: int) -> np.ndarray:
    """Random tokens [microbatches, sequences, length + 1], which a model can learn by heart."""
    shape = (num_ubatches, global_batch // num_ubatches, config.seq_len + 1)
    rng = np.random.default_rng(0)
    return rng.integers(0, config.vocab_size, shape, dtype=np.int32)


def make_gradient(config: Config, params, num_ubatches: int, stages: int, place: Place):
    """Of one microbatch, so that the sum over all of them is that of the mean."""

    def scaled_loss(params, tokens):
        return loss_fn(config, params, tokens, stages, place) / num_ubatches

    return lambda tokens: jax.value_and_grad(scaled_loss)(params, tokens)


def apply_gradient(optimizer, params, opt_state, grads):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def pipelined_step(config, optimizer, mesh, schedule, rules, place: Place = place_nowhere):
    """(params, opt_state, batch) -> (params, opt_state, loss), a stage on each rank."""

    def step(params, opt_state, batch):
        gradient = make_gradient(config, params, len(batch), schedule.num_stages, place)
        loss, grads = jaxpp.treduce(gradient, batch, schedule, operation=jaxpp.Add)
        return *apply_gradient(optimizer, params, opt_state, grads), loss

    specs = (weight_specs(config, rules), None, to_spec((None, "batch"), rules))
    return jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh, in_specs=specs, donate_argnums=(0, 1))


def plain_step(config, optimizer, mesh: Mesh, rules, place: Place = place_nowhere):
    """The same as one SPMD program over all devices of the mesh."""

    def step(params, opt_state, batch):
        gradient = make_gradient(config, params, len(batch), 1, place)

        def accumulate(carry, tokens):
            return jax.tree.map(jnp.add, carry, gradient(tokens)), None

        zeros = (0.0, jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, batch)
        return *apply_gradient(optimizer, params, opt_state, grads), loss

    weights = jax.tree.map(lambda s: NamedSharding(mesh, s), weight_specs(config, rules))
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, init_shapes(config)),
        weights,
        transform_non_params=lambda _: everywhere,
    )
    batch = NamedSharding(mesh, to_spec((None, "batch"), rules))
    return jax.jit(
        step,
        in_shardings=(weights, state, batch),
        out_shardings=(weights, state, everywhere),
        donate_argnums=(0, 1),
    )


def init_shapes(config: Config):
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def add_mesh_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--dp", type=int, default=1, help="data parallelism inside a rank")
    parser.add_argument("--tp", type=int, default=4, help="tensor parallelism inside a rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that all scripts have: the model, the batch and the training."""
    parser.add_argument("--layers-per-stage", type=int, default=2)
    parser.add_argument("--num-ubatches", type=int, default=4, help="microbatches a step")
    parser.add_argument("--global-batch", type=int, default=32, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=512)
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--n-heads", type=int, default=4)
    parser.add_argument("--mlp-dim", type=int, default=256)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--log-every", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)


def check_arguments(parser: argparse.ArgumentParser, options, dp: int, tp: int) -> None:
    """Ends the script with a line if the numbers do not go together."""

    def check(flag: str, factor: int, meaning: str) -> None:
        number = getattr(options, flag.replace("-", "_"))
        if number % factor:
            parser.error(f"--{flag}={number} is not a multiple of {factor}, {meaning}")

    check("global-batch", options.num_ubatches * dp, "microbatches times data parallelism")
    for flag in ("n-heads", "mlp-dim", "vocab-size"):
        check(flag, tp, "the tensor parallelism")
    check("d-model", options.n_heads, "the number of heads")


def to_config(options: argparse.Namespace, layers: int) -> Config:
    same = [f.name for f in dataclasses.fields(Config) if f.name != "layers"]
    return Config(layers=layers, **{name: getattr(options, name) for name in same})


def print_progress(name: str, done: int, total: int, loss: float, tokens_per_s: float) -> None:
    print(f"[{name} {done:04}/{total:04}] loss_sum={loss:.6f} tokens/s={tokens_per_s:.0f}",
          flush=True)  # fmt: skip


def count_tokens(batch: np.ndarray) -> int:
    """Those that are predicted in a step."""
    return batch.shape[0] * batch.shape[1] * (batch.shape[2] - 1)


def train(name: str, step, options, config: Config, optimizer):
    """Weights, losses, median milliseconds a step (but for the first two, which compile)."""
    params = init(config, jax.random.key(0))
    state = (params, optimizer.init(params))
    batch = make_batch(config, options.global_batch, options.num_ubatches)
    losses, times = [], []
    for i in range(options.train_steps):
        start = time.perf_counter()
        *state, loss = step(*state, batch)
        losses.append(float(loss))
        times.append(time.perf_counter() - start)
        if (i + 1) % options.log_every == 0 or i + 1 == options.train_steps:
            rate = count_tokens(batch) / times[-1]
            print_progress(name, i + 1, options.train_steps, losses[-1], rate)
    return state[0], np.array(losses), float(np.median(times[2:] or times)) * 1e3


def agree(dtype: str, losses: np.ndarray, others: np.ndarray) -> tuple[bool, float]:
    """Whether two lists of losses are the same but for rounding, and how far they are apart."""
    apart = float(np.max(np.abs(losses - others) / np.abs(others)))
    return bool(apart <= TOLERANCE[dtype]), apart
