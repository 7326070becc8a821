"""One GPT-2 with named axes, on meshes of four shapes.

    python examples/named_axes.py --train-steps=10

The model names the axes of its weights and activations (`describe_weights()` of gpt2.py), and
one table of rules maps names to mesh axes. Neither changes between runs: the shape of the
mesh alone makes a run tensor-parallel, data-parallel, FSDP or a mixture. All runs are
pipelines of --pp stages with four devices each; their losses are equal except for
rounding.
"""

from __future__ import annotations

import argparse
import sys

import gpt2
import jax
import numpy as np
import optax
import training

import jaxpp.api as jaxpp

# Name of an axis of the model -> axes of the mesh. Weights have no axis "batch" and activations
# no axis "embed", so "fsdp" divides weights by their width and activations by sequences.
RULES = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
}
AXES = ("data", "fsdp", "model")
SHAPES = {"TP": (1, 1, 4), "DP": (4, 1, 1), "FSDP": (1, 4, 1), "FSDP + TP": (1, 2, 2)}
DEVICES_A_RANK = 4


def place(x: jax.Array, *names: str | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, training.to_spec(names, RULES))


def show_weights(model: training.Model, params) -> None:
    """Prints two weights of the first block: their axes, and the part on each device."""
    table = model.describe_weights()["blocks"][0]
    for name in ("qkv", "up"):
        shape, names, _ = table[name]
        part = params["blocks"][0][name].sharding.shard_shape(shape)
        print(f"  {name} {names}: {shape}, on a device {part}")


def train(name: str, shape, options, model: training.Model) -> np.ndarray:
    ranks = np.array(jax.devices()).reshape(options.pp, *shape)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(ranks, ("stage", *AXES)), "stage")
    print(f"=== {name}: {dict(zip(AXES, shape, strict=True))} ===")
    optimizer = optax.adamw(options.lr)
    schedule = jaxpp.Std1F1B(options.pp)
    step = training.pipelined_step(model, optimizer, mesh, schedule, RULES, place)
    params, losses, _ = training.train(name, step, options, model, optimizer)
    show_weights(model, params)
    return losses


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    training.add_arguments(parser)
    options = parser.parse_args()
    training.check_arguments(parser, options, DEVICES_A_RANK, DEVICES_A_RANK)
    return options


def main() -> None:
    options = parse_arguments()
    jax.config.update("jax_num_cpu_devices", options.pp * DEVICES_A_RANK)
    model = training.to_model(gpt2.GPT2, options)
    runs = {name: train(name, shape, options, model) for name, shape in SHAPES.items()}

    print("step" + "".join(f"{name:>14}" for name in runs))
    for i, losses in enumerate(zip(*runs.values(), strict=True)):
        print(f"{i + 1:4}" + "".join(f"{loss:14.7f}" for loss in losses))
    results = [training.agree(options.dtype, losses, runs["TP"]) for losses in runs.values()]
    apart = max(distance for _, distance in results)
    if not all(good for good, _ in results):
        sys.exit(f"losses DIFFER: up to {apart:.1e}")
    print(f"all losses agree: at most {apart:.1e} apart")


if __name__ == "__main__":
    main()
