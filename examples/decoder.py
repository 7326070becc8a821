"""A Llama-style decoder in plain JAX: dense, with a sliding window, or with experts.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama; `window`
selects Mistral's attention and `experts` Mixtral's layers. `llama.py`, `mistral.py`,
`mixtral.py` and `moe.py` train it.

Each token goes to the two experts that its router scores highest. With routing "top2", an
expert has a fixed number of places, set by `capacity`, and drops the tokens beyond them:
all shapes are then fixed, and XLA derives communication from the shardings. "dropless"
drops no tokens: they are sorted by expert and multiplied by `jax.lax.ragged_dot`, whose
groups can have any size; `jax.shard_map` determines which device has which expert.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import training
from jax.sharding import PartitionSpec as P
from training import Model, Place

# Axes of a rank's mesh -> the flags with their sizes, and what they divide.
DATA_AND_TENSOR = {"data": "dp", "model": "tp"}
DATA_AND_TENSOR_RULES = {
    "batch": "data",
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
}
EXPERT = {"expert": "ep"}
EXPERT_RULES = {"batch": "expert", "expert": "expert"}
FLAGS = {"dp": "data parallelism", "tp": "tensor parallelism", "ep": "expert parallelism"}

CHOICES = 2  # experts per token
BALANCE = 0.01  # the weight of the routers' loss, as in Mixtral and Switch Transformers


def normalize(scale, x):
    """RMSNorm, which subtracts no mean and adds no bias."""
    full = x.astype(jnp.float32)
    full = full * jax.lax.rsqrt(jnp.mean(full * full, -1, keepdims=True) + 1e-5)
    return (full * scale).astype(x.dtype)


def rotate(x, base: float):
    """Rotates each pair of features of x[batch, position, head, feature] by its position."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


# --- Experts ----------------------------------------------------------------------------


def route(router, x):
    """The experts of each token of x[..., d], their weights, and the loss that balances
    the load: it is smallest when all experts get the same number of tokens and the same
    probability."""
    probabilities = jax.nn.softmax((x @ router.astype(x.dtype)).astype(jnp.float32))
    weights, chosen = jax.lax.top_k(probabilities, CHOICES)
    weights = weights / weights.sum(-1, keepdims=True)
    experts = router.shape[-1]
    over_tokens = tuple(range(x.ndim - 1))
    load = jax.nn.one_hot(chosen, experts).sum(-2).mean(over_tokens) / CHOICES
    balance = experts * jnp.sum(load * probabilities.mean(over_tokens))
    return weights, chosen, BALANCE * balance


def apply_with_capacity(p, x, weights, chosen, places: int, place: Place):
    """Applies the experts to x[tokens, d]; each takes at most `places` tokens."""
    experts = p["up"].shape[0]
    # All first choices precede all second ones, so second choices are dropped first.
    wanted = jax.nn.one_hot(chosen.T, experts, dtype=jnp.int32)  # [choice, token, expert]
    by_choice = wanted.reshape(-1, experts)
    position = (jnp.cumsum(by_choice, 0) - by_choice).reshape(wanted.shape)
    taken = jax.nn.one_hot(position, places) * wanted[..., None]  # no place beyond the last
    combine = jnp.einsum("cteq,tc->teq", taken, weights)
    inputs = jnp.einsum("cteq,td->eqd", taken.astype(x.dtype), x)
    inputs = place(inputs, "expert", None, None)
    hidden = swiglu(
        jnp.einsum("eqd,edm->eqm", inputs, p["gate"].astype(x.dtype)),
        jnp.einsum("eqd,edm->eqm", inputs, p["up"].astype(x.dtype)),
    )
    outputs = jnp.einsum("eqm,emd->eqd", hidden, p["down"].astype(x.dtype))
    return jnp.einsum("teq,eqd->td", combine.astype(x.dtype), outputs)


def apply_dropless(axis: str, p, x, weights, chosen):
    """Runs on each device along the mesh's `axis`, which has a part of the experts and of
    the tokens.

    It gathers all tokens, computes those of its experts, and each device gets the sums of
    its own tokens back.
    """
    x, weights, chosen = (jax.lax.all_gather(v, axis, tiled=True) for v in (x, weights, chosen))
    own = p["up"].shape[0]  # number of its experts
    local = chosen.reshape(-1) - own * jax.lax.axis_index(axis)
    local = jnp.where(
        (local >= 0) & (local < own), local, own
    )  # tokens of other experts come last
    order = jnp.argsort(local)
    sizes = jnp.bincount(local, length=own + 1)[:own].astype(jnp.int32)
    token = order // CHOICES
    rows = x[token]
    hidden = swiglu(
        jax.lax.ragged_dot(rows, p["gate"].astype(x.dtype), sizes),
        jax.lax.ragged_dot(rows, p["up"].astype(x.dtype), sizes),
    )
    rows = jax.lax.ragged_dot(hidden, p["down"].astype(x.dtype), sizes)
    mine = jnp.arange(len(rows)) < sizes.sum()
    rows = jnp.where(mine[:, None], rows * weights.reshape(-1)[order, None].astype(x.dtype), 0)
    total = jnp.zeros_like(x).at[token].add(rows)
    return jax.lax.psum_scatter(total, axis, tiled=True)


# --- The model --------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Decoder(Model):
    n_kv_heads: int = 2  # each serves n_heads / n_kv_heads heads
    rope_base: float = 10000.0
    window: int | None = None  # positions that a token sees, including itself; None: all
    experts: int = 0  # per layer; 0: a dense layer
    routing: str = "top2"
    capacity: float = 1.25  # places per expert, relative to an even share
    expert_axis: str = "expert"  # mesh axis for dropless routing

    def describe_weights(self) -> dict[str, Any]:
        d, heads, kv, mlp = self.d_model, self.n_heads, self.n_kv_heads, self.mlp_dim
        residual = 0.02 / (2 * self.layers) ** 0.5
        ones = ((d,), ("embed",), None)
        wide, axes = (d, mlp), ("embed", "mlp")
        narrow, axes_back = (mlp, d), ("mlp", "embed")
        router = {}
        if self.experts:
            wide, axes = (self.experts, *wide), ("expert", *axes)
            narrow, axes_back = (self.experts, *narrow), ("expert", *axes_back)
            router = {"router": ((d, self.experts), ("embed", None), 0.02)}
        block = {
            "attention_norm": ones,
            "q": ((d, heads, d // heads), ("embed", "heads", None), 0.02),
            "k": ((d, kv, d // heads), ("embed", "heads", None), 0.02),
            "v": ((d, kv, d // heads), ("embed", "heads", None), 0.02),
            "out": ((heads, d // heads, d), ("heads", None, "embed"), residual),
            "mlp_norm": ones,
            "gate": (wide, axes, 0.02),
            "up": (wide, axes, 0.02),
            "down": (narrow, axes_back, residual),
            **router,
        }
        return {
            "tokens": ((self.vocab_size, d), ("vocab", "embed"), 0.02),
            "blocks": [block] * self.layers,
            "norm": ones,
            "head": ((d, self.vocab_size), ("embed", "vocab"), 0.02),
        }

    def embed(self, params, tokens, place: Place):
        """The activation, and the sum of the routers' losses."""
        x = params["tokens"].astype(self.dtype)[tokens]
        return place(x, "batch", None, None), jnp.float32(0) if self.experts else None

    def apply_block(self, p, x, place: Place):
        x, losses = x
        x = x + self._attend(p, normalize(p["attention_norm"], x))
        h = normalize(p["mlp_norm"], x)
        if self.experts:
            h, loss = self._apply_experts(p, h, place)
            losses = losses + loss
        else:
            h = swiglu(h @ p["gate"].astype(x.dtype), h @ p["up"].astype(x.dtype))
            h = h @ p["down"].astype(x.dtype)
        return place(x + h, "batch", None, None), losses

    def head(self, params, x):
        x, losses = x
        x = normalize(params["norm"], x)
        logits = (x @ params["head"].astype(x.dtype)).astype(jnp.float32)
        return logits, 0.0 if losses is None else losses / self.layers

    def _attend(self, p, x):
        q, k, v = (jnp.einsum("bld,dhk->blhk", x, p[name].astype(x.dtype)) for name in "qkv")
        q, k = rotate(q, self.rope_base), rotate(k, self.rope_base)
        window = None if self.window is None else (self.window - 1, 0)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)
        return jnp.einsum("blhk,hkd->bld", mixed, p["out"].astype(x.dtype))

    def _apply_experts(self, p, x, place: Place):
        weights, chosen, loss = route(p["router"], x)
        flat = [v.reshape(-1, v.shape[-1]) for v in (x, weights, chosen)]
        own = {name: p[name] for name in ("gate", "up", "down")}
        if self.routing == "top2":
            share = CHOICES * len(flat[0]) / self.experts
            places = math.ceil(self.capacity * share)
            y = apply_with_capacity(own, *flat, places, place)
        else:
            by_device = P(self.expert_axis)
            y = jax.shard_map(
                partial(apply_dropless, self.expert_axis),
                in_specs=by_device,
                out_specs=by_device,
            )(own, *flat)
        return y.reshape(x.shape), loss


# --- The scripts ------------------------------------------------------------------------


def main(
    description: str,
    axes: dict[str, str] = DATA_AND_TENSOR,
    rules: dict[str, str] = DATA_AND_TENSOR_RULES,
    add_flags: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> None:
    """A whole script: its flags, named after the fields of `Decoder`, and the training."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    for flag in axes.values():
        parser.add_argument(f"--{flag}", type=int, default=2, help=f"{FLAGS[flag]} in a rank")
    training.add_arguments(parser)
    parser.add_argument("--n-kv-heads", type=int, default=2, help="of keys and values")
    add_flags(parser)
    parser.set_defaults(mlp_dim=128, train_steps=20)
    options = parser.parse_args()
    sizes = {axis: getattr(options, flag) for axis, flag in axes.items()}
    tensor = sizes.get("model", 1)
    batch = sizes[rules["batch"]]
    training.check_arguments(parser, options, batch, tensor)
    training.check_multiple(parser, options, "n-heads", options.n_kv_heads, "the --n-kv-heads")
    training.check_multiple(parser, options, "n-kv-heads", tensor, "the tensor parallelism")
    if rules.get("expert"):
        parts = sizes[rules["expert"]]
        training.check_multiple(parser, options, "experts", parts, "the expert parallelism")
    training.compare(options, training.to_model(Decoder, options), rules, sizes)
