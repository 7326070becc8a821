"""Helpers for tests with Ray: meshes of workers, a step, and waiting for the workers' end."""

from __future__ import annotations

import pathlib
import secrets
import time
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import trainings

LIMIT = 60  # seconds
# If Ray is not given a token, it writes one to the home folder.
ENVIRONMENT = {
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
}


def make(ranks: int, *shape: int, **options: Any) -> jaxpp.RemoteMpmdMesh:
    names = ("data", "model")[-len(shape) :]
    env = {"JPP_ADDRESS": "127.0.0.1", **options.pop("_env", {})}
    return jaxpp.RemoteMpmdMesh(ranks, shape, names, _env=env, **options)


def processes_of(mesh: jaxpp.RemoteMpmdMesh) -> list[int]:
    """The process ids of a mesh's workers."""
    return [process for _, process in mesh.processes]


def await_end(processes: list[int]) -> None:
    end = time.monotonic() + LIMIT
    while left := [p for p in processes if pathlib.Path(f"/proc/{p}").exists()]:
        assert time.monotonic() < end, f"left over: {left}"
        time.sleep(0.05)


def two_stages(mesh: Any) -> Callable[..., Any]:
    def loss(weights: Any, x: Any) -> Any:
        x = jaxpp.mark_stage_end(jnp.tanh(x @ weights[0]))
        return jaxpp.mark_stage_end(jnp.log(x @ weights[1])).sum()

    step = trainings.descent(loss, jaxpp.Std1F1B(2), 1e-3)
    return jaxpp.mpmd_jit_with_loop(step, mesh, donate_argnums=0)


def weights() -> list[np.ndarray]:
    return [np.eye(4, dtype=np.float32)] * 2


def batch() -> np.ndarray:
    return np.ones((8, 2, 4), np.float32)


def text_of(run: Callable[[], Any]) -> str:
    with pytest.raises(jaxpp.JaxppError) as caught:
        run()
    return f"{caught.value.code}: {caught.value}"
