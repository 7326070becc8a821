"""Random trainings in which several ranks hold copies of weights, norms and optimizer state.

A case depends only on its seed. `python copies.py DEVICES SEED...`, in each process of a job,
prints a line with a hash of each copy's bytes after the last step (test_copies.py).
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxpp.api as jaxpp
import models
from equality import Problem, pipelined_step, usual_specs
from trainings import described, mesh_of_all, say

STEPS = 50
MICROBATCHES = 8

OPTIMIZERS: dict[str, Any] = {
    "sgd": optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(1e-2),
    "clipped adamw": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lion": optax.lion(optax.cosine_decay_schedule(1e-3, 100)),
    "lamb": optax.lamb(1e-2),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "if finite": optax.apply_if_finite(
        optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-2)), 3
    ),
    "every second": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), optax.nadam(1e-2)), 2
    ),
}


@dataclasses.dataclass
class Case:
    """The choices that follow from a seed; printed with a failure."""

    seed: int
    ranks: int
    stages: int
    optimizer: str
    ties: list[tuple[int, int]]  # (earlier, later): the later stage reuses a weight
    schedule: Any

    def problem(self) -> Problem:
        def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
            x = mb["x"]
            for stage, p in enumerate(params):
                x = models.layer(p, x)
                for first, last in self.ties:
                    if last == stage:
                        x = x + jnp.tanh(x @ params[first]["w"].T)
                x = mark(x)
            return models.mse(x, mb["y"]), ()

        params = jax.tree.map(np.asarray, models.weights(self.stages, seed=self.seed))
        batch = models.batch(MICROBATCHES)
        return Problem(loss, params, batch, OPTIMIZERS[self.optimizer])


def make_case(seed: int) -> Case:
    """The case that follows from a seed; consecutive seeds cycle through the optimizers."""
    rng = random.Random(seed)
    ranks = 2 * rng.choice([1, 2])
    stages = ranks * rng.choice([1, 2])
    pairs = [sorted(rng.sample(range(stages), 2)) for _ in range(rng.choice([1, 2]))]
    if stages == ranks:
        schedule: Any = rng.choice([jaxpp.Std1F1B, jaxpp.ZeroBubble])(stages)
    else:
        schedule = rng.choice([jaxpp.Interleaved1F1B, jaxpp.DualPipeV])(stages, ranks)
    optimizer = list(OPTIMIZERS)[seed % len(OPTIMIZERS)]
    return Case(seed, ranks, stages, optimizer, [(a, b) for a, b in pairs], schedule)


def train(case: Case, mesh: Any, steps: int = STEPS) -> Any:
    """Weights, optimizer state and loss after the last step."""
    problem = case.problem()
    options = {}
    if mesh.lowering_mesh().size > 1:
        options["in_specs"] = usual_specs(problem, mesh)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, case.schedule), mesh, donate_argnums=(0, 1), **options
    )
    state = problem.params, jax.tree.map(jnp.asarray, problem.optimizer.init(problem.params))
    for _ in range(steps):
        *state, loss, _ = step(*state, problem.batch)
    return state, loss


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
    jax.distributed.initialize()
    for number in map(int, sys.argv[2:]):
        case = make_case(number)
        mesh = mesh_of_all(case.ranks)
        for line in described(f"{number}: ", train(case, mesh)):
            say(line)
