"""Code that the scripts for language models share: the steps, the flags and the
comparison.

A model is a `Model`: a table of its weights, with the names of their axes, and its loss.
Rules, from name to mesh axis, say what a name means on a mesh, and determine the sharding
of each weight. `gpt2.py` and `decoder.py` have the models.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpp.api as jaxpp

# The relative difference of the losses that two ways to train may have. They round
# differently (by 2**-24 and 2**-8), and training amplifies this with each step,
# especially with Adam, whose steps do not shrink with the gradients.
TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}

Place = Callable[
    ..., jax.Array
]  # (activation, *names of its axes) -> the activation with that sharding


def place_nowhere(x: jax.Array, *_names: str | None) -> jax.Array:
    return x


@dataclasses.dataclass(frozen=True)
class Model:
    """The sizes of a model, and its description.

    A tree, "x" below, passes between its layers: an activation, or several values.
    """

    layers: int
    d_model: int
    n_heads: int
    mlp_dim: int
    vocab_size: int
    seq_len: int
    dtype: str = "float32"

    def describe_weights(self) -> dict[str, Any]:
        """The tree of weights; a leaf is (shape, names of its axes, initial scale or None for
        ones). "blocks" is a list with the weights of each layer."""
        raise NotImplementedError

    def embed(self, params, tokens, place: Place) -> Any:
        """Tokens to the x of the first layer."""
        raise NotImplementedError

    def apply_block(self, p, x, place: Place) -> Any:
        """The x after a layer with weights p."""
        raise NotImplementedError

    def head(self, params, x) -> tuple[jax.Array, Any]:
        """Logits, and the term that is added to the loss."""
        raise NotImplementedError

    def loss(self, params, tokens, stages: int, place: Place) -> jax.Array:
        """The mean loss of the next token; the model is divided into `stages` equal
        stages."""
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        x = self.embed(params, inputs, place)
        for i, p in enumerate(params["blocks"]):
            x = self.apply_block(p, x, place)
            if (i + 1) % (self.layers // stages) == 0 and i + 1 < self.layers:
                x = jaxpp.mark_stage_end(x)
        logits, more = self.head(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return jaxpp.mark_stage_end(loss + more)


def is_weight(entry: Any) -> bool:
    return isinstance(entry, tuple)


def init(model: Model, key: jax.Array) -> dict[str, Any]:
    entries, tree = jax.tree.flatten(model.describe_weights(), is_leaf=is_weight)

    def make(entry, key):
        shape, _, scale = entry
        return jnp.ones(shape) if scale is None else scale * jax.random.normal(key, shape)

    keys = jax.random.split(key, len(entries))
    return tree.unflatten([make(*pair) for pair in zip(entries, keys, strict=True)])


def to_spec(names: tuple[str | None, ...], rules: Mapping[str, Any]) -> PartitionSpec:
    return PartitionSpec(*(rules.get(name) for name in names))


def weight_specs(model: Model, rules: Mapping[str, Any]) -> Any:
    table = model.describe_weights()
    return jax.tree.map(lambda entry: to_spec(entry[1], rules), table, is_leaf=is_weight)


def make_batch(model: Model, global_batch: int, num_ubatches: int) -> np.ndarray:
    """Random tokens [microbatches, sequences, length + 1], which a model can memorise."""
    shape = (num_ubatches, global_batch // num_ubatches, model.seq_len + 1)
    rng = np.random.default_rng(0)
    return rng.integers(0, model.vocab_size, shape, dtype=np.int32)


def make_gradient(model: Model, params, num_ubatches: int, stages: int, place: Place):
    """The gradient of one microbatch, scaled so that the sum over all microbatches is the
    gradient of the mean."""

    def scaled_loss(params, tokens):
        return model.loss(params, tokens, stages, place) / num_ubatches

    return lambda tokens: jax.value_and_grad(scaled_loss)(params, tokens)


def apply_gradient(optimizer, params, opt_state, grads):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def pipelined_step(model, optimizer, mesh, schedule, rules, place: Place = place_nowhere):
    """(params, opt_state, batch) -> (params, opt_state, loss), with a stage on each rank."""

    def step(params, opt_state, batch):
        gradient = make_gradient(model, params, len(batch), schedule.num_stages, place)
        loss, grads = jaxpp.treduce(gradient, batch, schedule, operation=jaxpp.Add)
        return *apply_gradient(optimizer, params, opt_state, grads), loss

    specs = (weight_specs(model, rules), None, to_spec((None, "batch"), rules))
    return jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh, in_specs=specs, donate_argnums=(0, 1))


def plain_step(model, optimizer, mesh: Mesh, rules, place: Place = place_nowhere):
    """The same as one SPMD program on all devices of the mesh."""

    def step(params, opt_state, batch):
        gradient = make_gradient(model, params, len(batch), 1, place)

        def accumulate(carry, tokens):
            return jax.tree.map(jnp.add, carry, gradient(tokens)), None

        zeros = (0.0, jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zeros, batch)
        return *apply_gradient(optimizer, params, opt_state, grads), loss

    weights = jax.tree.map(lambda s: NamedSharding(mesh, s), weight_specs(model, rules))
    everywhere = NamedSharding(mesh, PartitionSpec())
    state = optax.tree.map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, init_shapes(model)),
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


def init_shapes(model: Model):
    return jax.eval_shape(lambda: init(model, jax.random.key(0)))


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


def check_multiple(parser, options, flag: str, factor: int, meaning: str) -> None:
    """Ends the script with a message if the flag's number is not a multiple of `factor`."""
    number = getattr(options, flag.replace("-", "_"))
    if number % factor:
        parser.error(f"--{flag}={number} is not a multiple of {factor}, {meaning}")


def check_arguments(parser: argparse.ArgumentParser, options, dp: int, tp: int) -> None:
    """Ends the script with a message if the numbers are inconsistent."""
    check = partial(check_multiple, parser, options)
    check("global-batch", options.num_ubatches * dp, "microbatches times data parallelism")
    for flag in ("n-heads", "mlp-dim", "vocab-size"):
        check(flag, tp, "the tensor parallelism")
    check("d-model", options.n_heads, "the number of heads")


def to_model(kind: type[Model], options: argparse.Namespace) -> Model:
    """A model of this kind, with the layers and sizes of the flags."""
    same = [f.name for f in dataclasses.fields(kind) if hasattr(options, f.name)]
    given = {name: getattr(options, name) for name in same}
    return kind(layers=options.pp * options.layers_per_stage, **given)


def print_progress(name: str, done: int, total: int, loss: float, tokens_per_s: float) -> None:
    print(f"[{name} {done:04}/{total:04}] loss_sum={loss:.6f} tokens/s={tokens_per_s:.0f}",
          flush=True)  # fmt: skip


def count_tokens(batch: np.ndarray) -> int:
    """The number of tokens that a step predicts."""
    return batch.shape[0] * batch.shape[1] * (batch.shape[2] - 1)


def train(name: str, step, options, model: Model, optimizer):
    """Weights, losses, median milliseconds per step (without the first two, which
    compile)."""
    params = init(model, jax.random.key(0))
    state = (params, optimizer.init(params))
    batch = make_batch(model, options.global_batch, options.num_ubatches)
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
    """Whether two lists of losses are equal except for rounding, and their largest
    difference."""
    apart = float(np.max(np.abs(losses - others) / np.abs(others)))
    return bool(apart <= TOLERANCE[dtype]), apart


def compare(options, model: Model, rules, axes: dict[str, int]) -> None:
    """Trains the model as a pipeline whose ranks have a mesh of these axes, and without a
    pipeline on the mesh of one rank. Ends the script with an error if the losses differ.
    """
    shape = (options.pp, *axes.values())
    jax.config.update("jax_num_cpu_devices", int(np.prod(shape)))
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    mesh = jaxpp.MpmdMesh(Mesh(devices, ("stage", *axes)), "stage")
    optimizer = optax.adamw(options.lr)

    def place(x, *names):
        return jax.lax.with_sharding_constraint(x, to_spec(names, rules))

    schedule = jaxpp.Std1F1B(options.pp)
    pipelined = pipelined_step(model, optimizer, mesh, schedule, rules, place)
    _, losses, _ = train("pipeline", pipelined, options, model, optimizer)
    rank = mesh.lowering_mesh()
    plain = plain_step(model, optimizer, rank, rules, place)

    def plain_on_rank(*args):
        with jax.set_mesh(rank):  # for constraints and shard_map
            return plain(*args)

    _, expected, _ = train("plain", plain_on_rank, options, model, optimizer)
    good, apart = agree(options.dtype, losses, expected)
    verdict = "agree" if good else "DIFFER"
    print(f"losses of pipeline and plain {verdict}: at most {apart:.1e} apart, "
          f"allowed {TOLERANCE[options.dtype]:.0e}")  # fmt: skip
    if not good:
        sys.exit(1)
