"""Runs a script's `main` in each process of a job."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax

from jaxpp.errors import make_error

__all__ = ["distributed_main"]


def _number(name: str, text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise make_error(
        "invalid-argument",
        f"distributed_main: expected {name} to be a whole number, found {text!r}",
    )


def distributed_main(main: Callable[[], Any]) -> Any:
    """Runs `main` in a job of several processes, and leaves the job afterwards.

    With NNODES, NODE_RANK and JAX_COORDINATOR_ADDRESS (host:port) set, these are the number of
    processes, this process and the address of the first one. Otherwise
    `jax.distributed.initialize()` finds the job, as under `jaxpp launch`, Slurm or Open MPI;
    outside a job, `main` runs in this process alone.

    Returns:
      What `main` returns.

    Raises:
      JaxppError: one of the variables is not a number ("invalid-argument").
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    nodes = os.environ.get("NNODES")
    if nodes is not None:
        jax.distributed.initialize(
            address,
            num_processes=_number("NNODES", nodes),
            process_id=_number("NODE_RANK", os.environ.get("NODE_RANK", "")),
        )
    elif address or os.environ.get("SLURM_JOB_ID"):
        jax.distributed.initialize()
    try:
        return main()
    finally:
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()
