"""The context of a call: the context mesh and JAX's settings."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from jax._src import config, pjit
from jax._src import core as jax_core
from jax._src import mesh as mesh_lib
from jax._src import shard_map as shard_map_internals
from jax.sharding import AbstractMesh, Mesh, NamedSharding

__all__ = [
    "context_mesh",
    "enter_mesh",
    "is_of_a_closed_trace",
    "is_tracing",
    "settings_key",
]

# --- The context mesh -------------------------------------------------------------------

# Where JAX keeps the context mesh: jax._src.config in JAX 0.10.2, jax._src.mesh in 0.11.2.
_contexts = mesh_lib if hasattr(mesh_lib, "abstract_mesh_context_manager") else config

# While a step is traced: the whole mesh and the rank's mesh that replaces it.
_meant: contextvars.ContextVar[tuple[Mesh, Mesh] | None] = contextvars.ContextVar(
    "meant", default=None
)


# JAX 0.10.2, 0.11.2: abstract_mesh_context_manager and device_context, states of one thread
# with swap_local and set_local.
@contextlib.contextmanager
def context_mesh(mesh: Mesh | None, whole: Mesh | None = None) -> Iterator[None]:
    """Sets the context mesh to the abstract mesh of `mesh`, or to none, and overrides
    `jax.set_mesh`.

    `jax.set_mesh` also places new arrays on all its devices and rejects arrays on others. A
    function traced in this context that refers to `whole` gets `mesh`.
    """
    abstract = mesh_lib.empty_abstract_mesh if mesh is None else mesh.abstract_mesh
    abstract_before = _contexts.abstract_mesh_context_manager.swap_local(abstract)
    devices_before = _contexts.device_context.swap_local(mesh_lib.empty_concrete_mesh)
    token = _meant.set(None if mesh is None or whole is None else (whole, mesh))
    try:
        yield
    finally:
        _meant.reset(token)
        _contexts.device_context.set_local(devices_before)
        _contexts.abstract_mesh_context_manager.set_local(abstract_before)


# JAX 0.10.2, 0.11.2: config.disallow_mesh_context_manager.
def enter_mesh(mesh: Mesh) -> None:
    """Enters `with mesh:`, even if JAX's settings forbid it. This context only names axes; its
    replacement, `jax.set_mesh`, would place every new array on all devices and reject arrays of
    one rank.
    """
    with config.disallow_mesh_context_manager(False), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()


def _meant_mesh(mesh: Any) -> Any:
    meant = _meant.get()
    if meant is None or not isinstance(mesh, Mesh | AbstractMesh):
        return mesh
    whole, rank = meant
    same_axes = set(mesh.axis_names) <= set(whole.axis_names)
    return rank if same_axes and mesh.abstract_mesh != rank.abstract_mesh else mesh


def _meant_sharding(sharding: Any) -> Any:
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = _meant_mesh(sharding.mesh)
    return sharding if mesh is sharding.mesh else sharding.update(mesh=mesh)


def _replace_argument(
    module: Any, name: str, position: int, replace: Callable[[Any], Any]
) -> None:
    """Patches `module.name` to replace the mesh in the argument at `position`."""
    function = getattr(module, name)

    @functools.wraps(function)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if _meant.get() is None:
            return function(*args, **kwargs)
        args = (*args[:position], replace(args[position]), *args[position + 1 :])
        return function(*args, **kwargs)

    setattr(module, name, replaced)


# JAX 0.10.2, 0.11.2: where shard_map, with_sharding_constraint, jit and reshard read their
# arguments.
_replace_argument(shard_map_internals, "_shmap_checks", 0, _meant_mesh)
_replace_argument(pjit, "_create_sharding_for_array", 1, _meant_sharding)
_replace_argument(pjit, "canonicalize_sharding", 0, _meant_sharding)


# --- JAX's settings ---------------------------------------------------------------------


# JAX 0.10.2, 0.11.2: config.trace_context, config.default_prng_impl, and `context_mesh`'s
# states.
def settings_key() -> Any:
    """A key that changes whenever JAX would trace and lower a function differently.

    It is the key that `jax.jit` uses, without the context mesh: a step has its own mesh.
    """
    mesh = config.mesh_context_manager.swap_local(())
    no_mesh = mesh_lib.empty_abstract_mesh
    abstract_mesh = _contexts.abstract_mesh_context_manager.swap_local(no_mesh)
    try:
        return config.trace_context(), config.default_prng_impl.value
    finally:
        config.mesh_context_manager.set_local(mesh)
        _contexts.abstract_mesh_context_manager.set_local(abstract_mesh)


# JAX 0.10.2, 0.11.2: core.trace_state_clean.
def is_tracing() -> bool:
    """Whether the running code is being traced, differentiated or vmapped."""
    return not jax_core.trace_state_clean()


# JAX 0.10.2, 0.11.2: the `_trace` of a tracer and its is_valid.
def is_of_a_closed_trace(value: Any) -> bool:
    """Whether the value is a tracer of a finished trace, which JAX refuses to use."""
    return isinstance(value, jax_core.Tracer) and not value._trace.is_valid()
