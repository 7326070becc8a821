"""Generates text with a transformer whose layers are pipelined, several batches in flight.

    python examples/generate.py --length 24

Each stage keeps the keys and values of its own layers on its own rank. While the last
stage computes the next tokens of one batch, the earlier stages work on the other batches:
the batches are the microbatches of the loop. A prompt is read in one step, whose tokens
share a pass (prefill); then each step adds a token to every batch (decode).
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

import jaxpp.api as jaxpp

STAGES, BATCHES, SIZE, LENGTH = 4, 8, 2, 32  # LENGTH: of a prompt and its continuation
LAYERS, VOCAB, D, HEADS = 8, 64, 32, 4


def init(key: Any) -> Any:
    def layer(key: Any) -> Any:
        shapes = {"qkv": (D, 3 * D), "out": (D, D), "up": (D, 4 * D), "down": (4 * D, D)}
        keys = jax.random.split(key, len(shapes))
        return {
            name: jax.random.normal(key, shape) / shape[0] ** 0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    embed, position, *keys = jax.random.split(key, LAYERS + 2)
    return {
        "embed": jax.random.normal(embed, (VOCAB, D)),
        "position": jax.random.normal(position, (LENGTH, D)),
        "layers": [layer(key) for key in keys],
    }


def empty_cache() -> Any:
    """The keys and values of all batches, of each layer."""
    shape = (BATCHES, SIZE, LENGTH, HEADS, D // HEADS)
    return [{"k": jnp.zeros(shape), "v": jnp.zeros(shape)} for _ in range(LAYERS)]


def attend(p: Any, x: Any, cache: Any, start: Any) -> tuple[Any, Any]:
    """Attention of the tokens from `start` on to all tokens so far; x is [size, new, D]."""
    size, new, _ = x.shape
    q, k, v = jnp.split((x @ p["qkv"]).reshape(size, new, 3 * HEADS, -1), 3, axis=2)
    cache = {
        "k": jax.lax.dynamic_update_slice_in_dim(cache["k"], k, start, 1),
        "v": jax.lax.dynamic_update_slice_in_dim(cache["v"], v, start, 1),
    }
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, cache["k"]) / (D // HEADS) ** 0.5
    seen = jnp.arange(LENGTH) <= start + jnp.arange(new)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, cache["v"]).reshape(size, new, D)
    return x + mixed @ p["out"], cache


def next_tokens(params: Any, cache: Any, tokens: Any, start: Any, mark: Any) -> tuple[Any, Any]:
    """The most likely tokens after `tokens`, [size, new], and the cache with them in it."""
    new = tokens.shape[1]
    position = jax.lax.dynamic_slice_in_dim(params["position"], start, new)
    x, caches = params["embed"][tokens] + position, []
    for i, (p, own) in enumerate(zip(params["layers"], cache, strict=True)):
        x, own = attend(p, x, own, start)
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        caches.append(own)
        if (i + 1) % (LAYERS // STAGES) == 0 and i + 1 < LAYERS:
            x = mark(x)
    return jnp.argmax(x[:, -1] @ params["embed"].T, axis=-1), caches


def step(params: Any, cache: Any, tokens: Any, start: Any) -> tuple[Any, Any]:
    """The next tokens of all batches, [BATCHES, SIZE, 1], and their caches."""

    def one(batch: Any) -> tuple[Any, Any]:
        own, new = batch
        return next_tokens(params, own, new, start, jaxpp.mark_stage_end)

    found, cache = jaxpp.treduce(
        one, (cache, tokens), jaxpp.Std1F1B(STAGES), operation=jaxpp.Concat()
    )
    return found[..., None], cache


def generate(run: Any, params: Any, prompts: Any, length: int = LENGTH) -> Any:
    """The prompts, [BATCHES, SIZE, tokens], continued up to `length` tokens."""
    tokens, cache = run(params, empty_cache(), prompts, 0)
    found = [prompts, tokens]
    for position in range(prompts.shape[-1], length - 1):
        tokens, cache = run(params, cache, tokens, position)
        found.append(tokens)
    return np.concatenate([np.asarray(f) for f in found], axis=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=LENGTH, help=f"of a text, 9 to {LENGTH}")
    length = parser.parse_args().length
    jax.config.update("jax_num_cpu_devices", STAGES)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(jax.devices(), ("stage",)), "stage")
    run = jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh, donate_argnums=1)
    params = init(jax.random.key(0))
    prompts = jax.random.randint(jax.random.key(1), (BATCHES, SIZE, 8), 0, VOCAB)
    text = generate(run, params, prompts, length)
    print(f"{BATCHES} batches of {SIZE} texts through {STAGES} stages; the first one:")
    print(*text[0, 0])


if __name__ == "__main__":
    main()
