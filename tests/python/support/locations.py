"""Paths of the project and of the command `jaxpp` that belongs to the tested package."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys

SUPPORT = pathlib.Path(__file__).resolve().parent
ROOT = SUPPORT.parents[2]


def jaxpp_command() -> str:
    beside = pathlib.Path(sys.executable).parent
    found = shutil.which("jaxpp", path=f"{beside}:{os.environ['PATH']}")
    assert found, "no jaxpp command beside the interpreter or on PATH"
    return found


def faster_environment() -> dict[str, str]:
    """An environment for processes that compile without LLVM's optimisation, which would take
    half of their time."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}


def environment(*folders: pathlib.Path, **variables: str) -> dict[str, str]:
    """An environment for processes that import modules from SUPPORT and these folders."""
    path = [str(SUPPORT), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}
