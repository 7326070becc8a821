"""GPT-2 on one accelerator: as a pipeline of several ranks that share it, and as plain
`jax.jit` with the same sum of gradients, in bfloat16 with remat. Times are medians.

    JAX_PLATFORMS=cuda python benchmarks/gpu.py [--sizes 124m,350m] [--ranks 1,2,4,8]
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import optax
import training
from gpt2 import GPT2
from jax.sharding import Mesh

import jaxpp.api as jaxpp


@dataclasses.dataclass(frozen=True)
class Remat(GPT2):
    """Recomputes the activations of the layers in the backward pass."""

    def apply_block(self, p: Any, x: Any, place: Any) -> Any:
        return jax.checkpoint(lambda p, x: super(Remat, self).apply_block(p, x, place))(p, x)


# Layers, width and heads of GPT-2; the vocabulary is rounded up to a multiple of 128.
SIZES = {
    "tiny": Remat(8, 64, 4, 256, 512, 64, "float32"),
    "124m": Remat(12, 768, 12, 3072, 50304, 1024, "bfloat16"),
    "350m": Remat(24, 1024, 16, 4096, 50304, 1024, "bfloat16"),
}


def shared_mesh(ranks: int) -> jaxpp.MpmdMesh:
    devices = np.array(jax.devices()[:1])
    return jaxpp.MpmdMesh(Mesh(devices, ("stage",)), "stage", ranks_per_device=ranks)


class Training:
    """A step, and the state for its next call."""

    def __init__(self, step: Callable[..., Any], model: Remat, optimizer: Any) -> None:
        self.step = step
        params = training.init(model, jax.random.key(0))
        self.state = params, optimizer.init(params)

    def time(self, batch: Any) -> tuple[float, float]:
        """Seconds of a step, and its loss."""
        start = time.perf_counter()
        *self.state, loss = self.step(*self.state, batch)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - start, float(loss)


def measure(name: str, ranks: list[int], options: argparse.Namespace) -> None:
    model = SIZES[name]
    optimizer = optax.adamw(1e-4)
    size = options.microbatches * options.sequences
    batch = jax.device_put(training.make_batch(model, size, options.microbatches))
    ways: dict[str, Callable[..., Any]] = {"plain jax.jit": plain_step(model, optimizer)}
    for count in ranks:
        if model.layers % count == 0:
            ways[f"{count} rank{'s' if count > 1 else ''}"] = pipeline(model, optimizer, count)
    print(
        f"\nGPT-2 {name}, {options.microbatches} microbatches of {options.sequences} x "
        f"{model.seq_len} tokens"
    )
    print(f"  {'':14} first result   step   ratio   tokens/s      loss")
    plain: list[float] = []
    for way, step in ways.items():
        state = Training(step, model, optimizer)
        first, loss = state.time(batch)
        state.time(batch)
        times = [state.time(batch)[0] for _ in range(options.turns)]
        plain = plain or times
        median = float(np.median(times))
        ratio = median / float(np.median(plain))
        tokens = size * model.seq_len / median
        print(
            f"  {way:14} {first:9.2f} s {median * 1e3:8.1f} ms {ratio:6.3f} {tokens:10.0f} "
            f"{loss:9.5f}",
            flush=True,
        )
        del state


def plain_step(model: Remat, optimizer: Any) -> Callable[..., Any]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return training.plain_step(model, optimizer, mesh, {})


def pipeline(model: Remat, optimizer: Any, ranks: int) -> Callable[..., Any]:
    schedule = jaxpp.Std1F1B(ranks)
    return training.pipelined_step(model, optimizer, shared_mesh(ranks), schedule, {})


def measure_borders(turns: int) -> None:
    """The cost of JAX reading a step's result, and of a step reading JAX's array."""
    size = 64 << 20
    step = jaxpp.mpmd_jit_with_loop(lambda x: x + 1, shared_mesh(1))
    total = jax.jit(jnp.sum)
    x = jnp.zeros(size // 4, jnp.float32)
    results = [jax.block_until_ready(step(x)) for _ in range(turns + 1)]
    total(results.pop()).block_until_ready()
    times: dict[str, list[float]] = {"JAX takes a result": [], "a step takes an array": []}
    for result in results:
        start = time.perf_counter()
        total(result).block_until_ready()
        times["JAX takes a result"].append(time.perf_counter() - start)
        start = time.perf_counter()
        jax.block_until_ready(step(x))
        times["a step takes an array"].append(time.perf_counter() - start)
    print(f"\n{size >> 20} MiB of float32")
    for what, seconds in times.items():
        print(f"  {what:22} {float(np.median(seconds)) * 1e3:8.2f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="124m,350m")
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="of a microbatch")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args()
    kind = jax.devices()[0].device_kind
    print(f"jax {jax.__version__}, {kind}, medians of {options.turns} steps")
    for size in filter(None, options.sizes.split(",")):
        measure(size, [int(count) for count in options.ranks.split(",")], options)
    measure_borders(options.turns)


if __name__ == "__main__":
    main()
