"""The processes of a mesh as Ray actors. All calls to Ray are in this module.

Ray is imported when the first such mesh is made.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import queue
import secrets
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxpp.errors import make_error
from jaxpp.remote.connections import Connection, Connections, connect
from jaxpp.remote.messages import Failure
from jaxpp.remote.ray_monitor import (
    RayMonitor,
    ask_gcs,
    ask_raylet,
    is_listening,
    raylet_socket,
)
from jaxpp.remote.worker import Identity, Worker, versions

__all__ = ["RAYLET", "Cluster"]

_GROUPS = {"questions": 8}  # threads of a worker

_MOST_CONNECTING = 32  # workers that start at a time

_KILL_SECONDS = 5  # time limit for Ray to accept the actors
_GCS = "Ray's control service (GCS)"
RAYLET = "the raylet of the controller's host"
_START_SECONDS = 300  # time limit for processes to start and to import JAX
_PLACE_SECONDS = 60  # time limit for occupied resources to become free


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise make_error(
            "unsupported",
            'RemoteMpmdMesh: Ray is not installed; pip install "jaxpp-c[ray]"',
        ) from None
    return ray


# --- Resources --------------------------------------------------------------------------


def _needs(options: Mapping[str, Any]) -> dict[str, float]:
    """The resources of one worker."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus")}
    named["memory"] = options.get("memory")
    named.update(options.get("resources") or {})
    return {name: float(amount) for name, amount in named.items() if amount}


def _count_that_fit(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> float:
    """The number of workers that fit on idle nodes."""
    if not needs:
        return math.inf
    return sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in needs.items())
        for node in nodes
    )


def _place(ray: Any, count: int, needs: dict[str, float]) -> Any:
    """A placement group with resources for all workers."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = _count_that_fit(needs, nodes)
    if fit < count:
        found = "; ".join(str({n: node.get(n, 0) for n in needs}) for node in nodes)
        raise make_error(
            "devices",
            f"RemoteMpmdMesh: expected a Ray cluster with resources for {count} workers of "
            f"{needs} each, found resources for {fit} (nodes: {found}); start more nodes, use "
            "fewer ranks, or set the resources of a worker in ray_options",
        )
    group = ray.util.placement_group([needs] * count, strategy="PACK") if needs else None
    if group is None or group.wait(_PLACE_SECONDS):
        return group
    ray.util.remove_placement_group(group)
    free = {name: ray.available_resources().get(name, 0) for name in needs}
    raise make_error(
        "devices",
        f"RemoteMpmdMesh: {count} workers of {needs} each did not get their resources within "
        f"{_PLACE_SECONDS} s because other processes use them; free: {free}. Release them: a "
        "mesh keeps its workers until shutdown()",
    )


# --- Workers ----------------------------------------------------------------------------


def _kill_all(ray: Any, actors: list[Any], group: Any) -> None:
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    if group is not None:
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(group)


def _end_all(
    ray: Any, actors: list[Any], group: Any, opened: list[Connections | RayMonitor]
) -> None:
    for one in opened:
        one.end()
    if not ray.is_initialized():
        return  # Ray has already ended them
    # Do not wait: workers also end without their controller, and Ray may never answer.
    killing = threading.Thread(target=_kill_all, args=(ray, actors, group), daemon=True)
    killing.start()
    killing.join(_KILL_SECONDS)


def _reason(error: BaseException) -> str:
    """Ray's reason for the death of an actor, without its advice."""
    text = str(getattr(error, "cause", None) or error)
    for before in "The actor is dead because ", "Worker exit detail: ":
        text = text.partition(before)[2] or text
    text = text.partition(" Some common causes")[0].strip().rstrip(".")
    return text if len(text) <= 600 else text[:600] + "..."


class Cluster:
    """A worker for each rank.

    Args:
      ranks, per_rank: the number of workers, and of devices per worker.
      import_modules: modules that each worker imports first.
      options: Ray's options for actors.
      env: environment variables of the workers.
    """

    def __init__(
        self,
        ranks: int,
        per_rank: int,
        import_modules: Sequence[str],
        options: Mapping[str, Any],
        env: Mapping[str, str],
    ) -> None:
        ray = self._ray = _import_ray()
        if not ray.is_initialized():
            ray.init()
        options = {"num_cpus": 1, **options}
        runtime_env = dict(options.get("runtime_env") or {})
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **env}
        options["runtime_env"] = runtime_env
        group = None
        if "scheduling_strategy" not in options:
            group = _place(ray, ranks, _needs(options))
        self._actors: list[Any] = []
        opened: list[Connections | RayMonitor] = []
        self._end = weakref.finalize(self, _end_all, ray, self._actors, group, opened)
        strategies = ray.util.scheduling_strategies
        actor = ray.remote(concurrency_groups=_GROUPS)(Worker)
        for rank in range(ranks):
            if group is not None:
                options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=rank
                )
            self._actors.append(actor.options(**options).remote(rank, ranks, per_rank))
        token = secrets.token_bytes(32)
        try:
            self.identities = self._begin(import_modules, token)
            with concurrent.futures.ThreadPoolExecutor(_MOST_CONNECTING) as pool:
                ends = pool.map(functools.partial(self._connect, token), range(ranks))
            self.connections = Connections(list(ends))
            opened.append(self.connections)
            self._raylet = raylet_socket(ray)
            hosts = {identity.address[0] for identity in self.identities}
            # The finalizer must not refer to this object, whose collection ends the workers.
            self._watch = RayMonitor(
                {
                    _GCS: functools.partial(ask_gcs, ray, hosts),
                    RAYLET: functools.partial(ask_raylet, ray, self._raylet, RAYLET),
                }
            )
            opened.append(self._watch)
        except BaseException:
            self.end()
            raise

    def _begin(self, import_modules: Sequence[str], token: bytes) -> list[Identity]:
        asked = [actor.begin.remote(list(import_modules), token) for actor in self._actors]
        late = self.missing(asked, _START_SECONDS)
        if late:
            raise make_error(
                "peer",
                f"RemoteMpmdMesh: the workers of the ranks {late} have not started within "
                f"{_START_SECONDS} s; see `ray status` and Ray's logs for the reason",
            )
        return [self._check(rank, reply) for rank, reply in enumerate(asked)]

    def _check(self, rank: int, reply: Any) -> Identity:
        try:
            found: Identity | Failure = self._ray.get(reply)
        except self._ray.exceptions.RayError as error:
            raise make_error(
                "peer",
                f"RemoteMpmdMesh: the worker of rank {rank} did not start: {_reason(error)}",
            ) from None
        if isinstance(found, Failure):
            raise make_error(
                found.code, f"RemoteMpmdMesh: the worker of rank {rank}: {found.text}"
            )
        for name, version in versions().items():
            if found.versions[name] != version:
                raise make_error(
                    "unsupported",
                    f"RemoteMpmdMesh: the worker of rank {rank} (host {found.host}, process "
                    f"id {found.process}) has {name} {found.versions[name]}; expected "
                    f"{version}, the controller's version",
                )
        return found

    def _connect(self, token: bytes, rank: int) -> Connection:
        host, port = self.identities[rank].address
        try:
            return connect(host, port, token)
        except OSError as error:
            raise make_error(
                "peer",
                f"RemoteMpmdMesh: the controller cannot connect to {self.name(rank)} at "
                f"{host}:{port}: {error}; expected a controller host that can reach all ports "
                "of the workers' hosts",
            ) from None

    def problem(self) -> str | None:
        """The failure of Ray itself, if one is known."""
        return self._watch.problem()

    def has_raylet(self) -> bool:
        """Whether the raylet of this host still runs; without it all workers die."""
        return is_listening(self._raylet)

    def name(self, rank: int) -> str:
        identity = self.identities[rank]
        return f"rank {rank} (host {identity.host}, process id {identity.process})"

    def end(self) -> None:
        """Ends all processes without waiting for them."""
        self._end()

    # --- Calls, which return references to results ---

    def ask(self, rank: int, method: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a method of `Worker`."""
        found = getattr(self._actors[rank], method.__name__)
        return found.options(concurrency_group="questions").remote(*arguments)

    def ping(self, rank: int) -> Any:
        return self._actors[rank].ping.remote()

    def pickle(self, found: Any) -> bytes:
        """Pickles like Ray: functions of the script by value, others by name."""
        pickled: bytes = self._ray.cloudpickle.dumps(found)
        return pickled

    def share(self, data: bytes) -> Any:
        """Stores an object for use as an argument; Ray sends it to each host once.

        Raises:
          JaxppError: Ray does not accept it ("peer").
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def put() -> None:
            try:
                answer.put(self._ray.put(data))
            except Exception as error:
                answer.put(error)

        threading.Thread(target=put, daemon=True).start()  # which may never return
        while True:
            with contextlib.suppress(queue.Empty):
                found = answer.get(timeout=1)
                if isinstance(found, Exception):
                    raise make_error("peer", f"Ray does not take a plan: {found}") from None
                return found
            if (problem := self.problem()) is not None:
                raise make_error("peer", problem)

    # --- Results ---

    def get(self, asked: list[Any], seconds: float) -> list[Any] | BaseException | None:
        """All replies; None after the timeout; the error if one will never arrive."""
        try:
            return self._ray.get(asked, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return error

    def missing(self, asked: list[Any], seconds: float) -> list[int]:
        """The replies that have not arrived after the timeout."""
        _, late = self._ray.wait(asked, num_returns=len(asked), timeout=seconds)
        return [i for i, reply in enumerate(asked) if reply in late]

    def death_reason(self, reply: Any) -> str | None:
        """The reason why a reply will never arrive, if it is known."""
        errors = self._ray.exceptions
        try:
            self._ray.get(reply, timeout=0)
        except errors.GetTimeoutError:
            return None
        except errors.RayActorError as error:
            return f"the worker has died ({_reason(error)})"
        except errors.RayError as error:
            cause = getattr(error, "cause", None) or error
            return f"the worker raised {type(cause).__name__}: {cause}"
        return None
