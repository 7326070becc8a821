"""A small GPT-2 in plain JAX.

`tiny_gpt2_jaxpp_vs_spmd_dp.py`, `named_axes.py` and `pp_vs_no_pp_gpt2_pp_tp_dp.py` train it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from training import Model, Place

# Tensor and data parallelism: heads, hidden units and the vocabulary are divided.
RULES = {"batch": "data", "heads": "model", "mlp": "model", "vocab": "model"}


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


@dataclasses.dataclass(frozen=True)
class GPT2(Model):
    def describe_weights(self) -> dict[str, Any]:
        d, heads, mlp = self.d_model, self.n_heads, self.mlp_dim
        residual = (
            0.02 / (2 * self.layers) ** 0.5
        )  # standard deviation of the layers that add to the residual, as in GPT-2
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
            "tokens": (
                (self.vocab_size, d),
                ("vocab", "embed"),
                0.02,
            ),  # also the weights of the head
            "positions": ((self.seq_len, d), (None, "embed"), 0.01),
            "blocks": [block] * self.layers,
            "norm": norm,
        }

    def embed(self, params, tokens, place: Place):
        x = params["tokens"][tokens] + params["positions"]
        return place(x.astype(self.dtype), "batch", None, None)

    def apply_block(self, p, x, place: Place):
        x = x + attend(p, normalize(p["norm_1"], x).astype(x.dtype))
        x = x + apply_mlp(p, normalize(p["norm_2"], x).astype(x.dtype))
        return place(x, "batch", None, None)

    def head(self, params, x):
        x = normalize(params["norm"], x).astype(self.dtype)
        return (x @ params["tokens"].T.astype(x.dtype)).astype(jnp.float32), 0.0
