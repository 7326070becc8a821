"""Small models for the equality tests, each with the feature that its test is about."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equality import Problem

D = 16


def key(seed: int) -> Any:
    return jax.random.key(seed)


def weights(count: int, d: int = D, seed: int = 0) -> list[Any]:
    return [
        {"w": jax.random.normal(k, (d, d)) / np.sqrt(d), "b": jnp.zeros(d)}
        for k in jax.random.split(key(seed), count)
    ]


def up_and_down(key: Any, width: int, divisor: float) -> dict[str, jax.Array]:
    """The weights of a layer with a bias between two products."""
    keys = jax.random.split(key, 3)
    return {
        "up": jax.random.normal(keys[0], (width, 2 * width)) / divisor,
        "b": jax.random.normal(keys[1], (2 * width,)) / divisor,
        "down": jax.random.normal(keys[2], (2 * width, width)) / divisor,
    }


def batch(microbatches: int, size: int = 4, d: int = D, seed: int = 1) -> Any:
    kx, ky = jax.random.split(key(seed))
    shape = (microbatches, size, d)
    return {"x": jax.random.normal(kx, shape), "y": jax.random.normal(ky, shape)}


def layer(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["w"] + p["b"])


def mse(x: Any, y: Any) -> Any:
    return jnp.mean((x - y) ** 2)


def mlp(layers_per_stage: list[int], microbatches: int) -> Problem:
    def loss(params, mb, i, mark):
        x, at = mb["x"], 0
        for count in layers_per_stage:
            for p in params[at : at + count]:
                x = layer(p, x)
            at += count
            x = mark(x)
        return mse(x, mb["y"]), ()

    return Problem(loss, weights(sum(layers_per_stage)), batch(microbatches))


def attention_block(p: Any, x: Any, heads: int = 2) -> Any:
    b, t, d = x.shape
    q, k, v = ((x @ p[n]).reshape(b, t, heads, d // heads).transpose(0, 2, 1, 3) for n in "qkv")
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d // heads)
    mask = jnp.tril(jnp.ones((t, t), bool))
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    x = x + (probs @ v).transpose(0, 2, 1, 3).reshape(b, t, d) @ p["o"]
    h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]
    return x + jax.nn.gelu(h @ p["up"]) @ p["down"]


def block_params(k: Any, d: int = D) -> Any:
    ks = dict(zip("qkvoud", jax.random.split(k, 6), strict=True))
    dense = {n: jax.random.normal(ks[n], (d, d)) / np.sqrt(d) for n in "qkvo"}
    up = jax.random.normal(ks["u"], (d, 2 * d)) / np.sqrt(d)
    down = jax.random.normal(ks["d"], (2 * d, d)) / np.sqrt(2 * d)
    return {**dense, "up": up, "down": down, "scale": jnp.ones(d)}


def token_batch(microbatches: int, vocab: int = 32, size: int = 2, t: int = 8) -> Any:
    tokens = jax.random.randint(key(3), (microbatches, size, t + 1), 0, vocab)
    return {"tokens": tokens}


def cross_entropy(logits: Any, labels: Any) -> Any:
    logp = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logp, labels[..., None], -1))


def transformer(
    stages: int, blocks: int, microbatches: int, remat: bool = False, tied: bool = False
) -> Problem:
    run = jax.checkpoint(jax.jit(attention_block)) if remat else attention_block
    ks = jax.random.split(key(0), blocks + 2)
    vocab = 32
    params = {
        "embed": jax.random.normal(ks[0], (vocab, D)) * 0.3,
        "blocks": [block_params(k) for k in ks[1:-1]],
    }
    if not tied:
        params["head"] = jax.random.normal(ks[-1], (D, vocab)) * 0.3

    def loss(params, mb, i, mark):
        tokens = mb["tokens"]
        x = params["embed"][tokens[:, :-1]]
        for k, p in enumerate(params["blocks"]):
            x = run(p, x)
            if (k + 1) % (blocks // stages) == 0 and k + 1 < blocks:
                x = mark(x)
        head = params["embed"].T if tied else params["head"]
        logits = mark(x @ head)
        return cross_entropy(logits, tokens[:, 1:]), ()

    return Problem(loss, params, token_batch(microbatches, vocab))
