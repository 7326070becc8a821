"""A mesh whose ranks are processes that Ray starts anywhere in its cluster."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.client import planning_devices
from jaxpp.mesh import MpmdMesh
from jaxpp.remote.cluster import Cluster
from jaxpp.remote.controller import Workers
from jaxpp.remote.runtime import RemoteDevices

__all__ = ["RemoteMpmdMesh"]

_PIPELINE_AXIS = "mpmd"


def _check_shape(pp: Any, shape: Any, names: Any) -> None:
    def is_count(n: Any) -> bool:
        whole = isinstance(n, int | np.integer) and not isinstance(n, bool)
        return whole and bool(n >= 1)

    if not is_count(pp):
        raise make_error(
            "mesh", f"RemoteMpmdMesh: pp={shorten(pp)}; expected a number of ranks, at least 1"
        )
    if not isinstance(shape, Sequence) or not all(map(is_count, shape)):
        raise make_error(
            "mesh",
            f"RemoteMpmdMesh: mesh_shape={shorten(shape)}; expected the axis sizes of one "
            "rank's mesh, such as (1, 2)",
        )
    known = [n for n in names if isinstance(n, str)] if isinstance(names, list | tuple) else []
    if len(known) != len(shape) or len(set(known)) != len(known) or len(names) != len(known):
        raise make_error(
            "mesh",
            f"RemoteMpmdMesh: mesh_axis_names={shorten(names)} for "
            f"mesh_shape={shorten(shape)}; expected {len(shape)} distinct names, one per axis",
        )
    if _PIPELINE_AXIS in known:
        raise make_error(
            "mesh",
            f"RemoteMpmdMesh: mesh_axis_names={shorten(names)}: {_PIPELINE_AXIS!r} is "
            "reserved for the pipeline axis; expected other names",
        )


def _check_options(modules: Any, ray_options: Any, env: Any) -> None:
    if isinstance(modules, str) or not all(isinstance(m, str) for m in modules):
        raise make_error(
            "invalid-argument",
            f"RemoteMpmdMesh: import_modules={shorten(modules)}; expected a list of module "
            "names",
        )
    if not isinstance(ray_options, Mapping):
        raise make_error(
            "invalid-argument",
            f"RemoteMpmdMesh: ray_options={shorten(ray_options)}; expected a dict of Ray's "
            'options for actors, such as {"num_gpus": 2}',
        )
    if not isinstance(env, Mapping) or not all(
        isinstance(text, str) for pair in env.items() for text in pair
    ):
        raise make_error(
            "invalid-argument",
            f"RemoteMpmdMesh: _env={shorten(env)}; expected a dict from environment variable "
            "names to strings",
        )


class RemoteMpmdMesh(MpmdMesh):
    """A mesh whose ranks are processes that Ray starts; this process controls them.

    This process traces and plans steps and uses no accelerator. Each worker opens a plugin for
    its own devices, receives a step's plan and StableHLO once, and then one message per step.
    Arrays stay on the workers until they are read.

    `ray.init()` selects the cluster; without it Ray finds or starts one. The workers end when
    the mesh is garbage collected, at `shutdown()`, or when one of them has died.

    Args:
      pp: the number of ranks.
      mesh_shape: the shape of one rank's devices.
      mesh_axis_names: the names of its axes, which specs use.
      import_modules: modules that each worker imports first, such as those that register
        custom-call handlers.
      event_sync_before_delete: accepted for compatibility and ignored. Memory is freed after
        its last use, without a wait.
      target_config: accepted for compatibility and ignored. A worker compiles for its own
        devices.
      ray_options: Ray's options for actors: `num_cpus` (default 1), `num_gpus`, `resources`,
        `memory`, `runtime_env`, `scheduling_strategy`, ... Without a scheduling strategy the
        workers get a placement group of their own. A worker with accelerators from Ray opens
        its plugin (`plugin=` of a step, or JPP_PLUGIN) for them; any other uses as many CPU
        devices as `mesh_shape` needs.
      _env: environment variables of the workers.

    Raises:
      JaxppError: "mesh" for an invalid shape; "unsupported" if Ray is not installed or a
        worker has other versions; "devices" if the cluster lacks the resources; "peer" and
        "invalid-argument" if a worker does not start or cannot import a module.
    """

    def __init__(
        self,
        pp: int,
        mesh_shape: Sequence[int],
        mesh_axis_names: Sequence[str],
        *,
        import_modules: Sequence[str] = (),
        event_sync_before_delete: bool | None = None,
        target_config: Any = None,
        ray_options: Mapping[str, Any] | None = None,
        _env: Mapping[str, str] | None = None,
    ) -> None:
        del event_sync_before_delete, target_config
        _check_shape(pp, mesh_shape, mesh_axis_names)
        modules, options, env = import_modules or (), ray_options or {}, _env or {}
        _check_options(modules, options, env)
        per_rank = math.prod(mesh_shape)
        cluster = Cluster(pp, per_rank, modules, options, env)
        devices = np.array(planning_devices(pp * per_rank), dtype=object)
        mesh = Mesh(devices.reshape(pp, *mesh_shape), (_PIPELINE_AXIS, *mesh_axis_names))
        super().__init__(mesh, _PIPELINE_AXIS)
        object.__setattr__(self, "workers", Workers(cluster, pp, per_rank, RemoteDevices))

    # Meshes of the same shape are not equal: each has its own processes.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def processes(self) -> list[tuple[str, int]]:
        """The host and process id of each rank's worker."""
        return self.workers.processes

    def start_trace(self, profiler_trace_path: str | os.PathLike[str]) -> None:
        """Begins a profile of each worker with `jax.profiler`. Rank r writes it to the folder
        `process-r` below this path, on its own host."""
        self.workers.start_trace(os.path.abspath(profiler_trace_path))

    def stop_trace(self) -> None:
        """Ends the profiles that `start_trace` began, and writes them."""
        self.workers.stop_trace()

    def shutdown(self) -> None:
        """Ends the workers and deletes all arrays of the mesh."""
        self.workers.shutdown()
