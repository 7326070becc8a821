"""Runs a saved plan in a process without the model, for test_plan_files.py.

    run_plan.py PLAN ARGUMENTS RESULTS STEPS STATES

ARGUMENTS is a .npz with the leaves of the arguments, in order. The first STATES results become
the first arguments of the next step. The leaves of the last results are written to RESULTS.
"""

from __future__ import annotations

import sys

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402

import jaxpp.api as jaxpp  # noqa: E402


def main(plan: str, arguments: str, results: str, steps: str, states: str) -> None:
    step = jaxpp.load(plan)
    with np.load(arguments) as file:
        leaves = [file[f"leaf{k}"] for k in range(len(file.files))]
    args, kwargs = jax.tree.unflatten(step.structure, leaves)
    for _ in range(int(steps)):
        found = step(*args, **kwargs)
        args = (*found[: int(states)], *args[int(states) :])
    made = {f"leaf{k}": np.asarray(leaf) for k, leaf in enumerate(jax.tree.leaves(found))}
    np.savez(results, **made)
    assert not {"models", "equality"} & sys.modules.keys()


if __name__ == "__main__":
    main(*sys.argv[1:])
