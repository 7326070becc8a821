"""A mesh whose ranks are processes that Ray has started, anywhere in its cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.client import planning_devices
from jaxpp.mesh import MpmdMesh
from jaxpp.remote.cluster import Cluster
from jaxpp.remote.controller import Workers

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
            f"RemoteMpmdMesh: mesh_shape={shorten(shape)}; expected the sizes of the axes of a "
            "rank's mesh, such as (1, 2)",
        )
    known = [n for n in names if isinstance(n, str)] if isinstance(names, list | tuple) else []
    if len(known) != len(shape) or len(set(known)) != len(known) or len(names) != len(known):
        raise make_error(
            "mesh",
            f"RemoteMpmdMesh: mesh_axis_names={shorten(names)} for mesh_shape="
            f"{shorten(shape)}; expected a name for each of its {len(shape)} axes, each once",
        )
    if _PIPELINE_AXIS in known:
        raise make_error(
            "mesh",
            f"RemoteMpmdMesh: mesh_axis_names={shorten(names)}: {_PIPELINE_AXIS!r} is the axis "
            "that counts the ranks; expected other names",
        )


def _check_options(modules: Any, ray_options: Any, env: Any) -> None:
    if isinstance(modules, str) or not all(isinstance(m, str) for m in modules):
        raise make_error(
            "invalid-argument",
            f"RemoteMpmdMesh: import_modules={shorten(modules)}; expected a list of names of "
            "modules",
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
            f"RemoteMpmdMesh: _env={shorten(env)}; expected a dict from names of environment "
            "variables to their texts",
        )


class RemoteMpmdMesh(MpmdMesh):
    """A mesh of processes that Ray starts, one a rank; this one controls them.

    This process traces and plans steps and owns no accelerator. Each worker opens a plugin
    for its own devices, is sent the plan of a step with its StableHLO once, and then a message
    a step. Arrays stay on the workers until somebody looks at them.

    `ray.init()` says which cluster it is; without it Ray starts or finds one. The workers end
    with the mesh, when it is no longer used, at `shutdown()`, or when one of them has died.

    Args:
      pp: how many ranks.
      mesh_shape: of the devices of a rank.
      mesh_axis_names: the axes of that, which specs name.
      import_modules: what each worker imports before it is used, such as modules that register
        handlers of custom calls.
      event_sync_before_delete: accepted for scripts that have it. Memory is freed in the order
        of what uses it, and nobody waits for that.
      target_config: accepted for scripts that have it. A worker compiles for its own devices.
      ray_options: Ray's options for actors: `num_cpus` (default 1), `num_gpus`, `resources`,
        `memory`, `runtime_env`, `scheduling_strategy`, ... Without a scheduling strategy the
        workers get a placement group of their own. A worker that Ray gives accelerators opens
        its plugin (`plugin=` of a step, or JPP_PLUGIN) for these, others for as many CPU
        devices as `mesh_shape` says.
      _env: environment variables of the workers.

    Raises:
      JaxppError: "mesh" for a shape that is none; "unsupported" if Ray is not installed, or a
        worker has other versions; "devices" if the cluster has not the resources; "peer" and
        "invalid-argument" if a worker does not start or can not import a module.
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
        object.__setattr__(self, "workers", Workers(cluster, pp, per_rank))

    # Two meshes of the same shape are two sets of processes.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def processes(self) -> list[tuple[str, int]]:
        """The host and the process id of each rank's worker."""
        return self.workers.processes

    def shutdown(self) -> None:
        """Ends the workers, and with them all arrays of the mesh."""
        self.workers.shutdown()
