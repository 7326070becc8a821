"""The processes of a mesh, as actors of Ray; all that is asked of Ray stands here.

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
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpp.errors import make_error
from jaxpp.remote.lines import Line, Lines, connect
from jaxpp.remote.watch import Watch, ask_gcs, ask_raylet, is_listening, raylet_socket
from jaxpp.remote.worker import Failure, Identity, Worker, versions

__all__ = ["RAYLET", "Cluster"]

_GROUPS = {"questions": 8}  # threads of a worker

_MOST_CONNECTING = 32  # workers at a time

_KILL_SECONDS = 5  # for Ray to take the orders
_GCS = "Ray's control service (the GCS)"
RAYLET = "the raylet of the controller's host"
_START_SECONDS = 300  # for processes to start and to import JAX
_PLACE_SECONDS = 60  # for resources that are in use to become free


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
    """What one worker takes of a node."""
    named = {"CPU": options["num_cpus"], "GPU": options.get("num_gpus")}
    named["memory"] = options.get("memory")
    named.update(options.get("resources") or {})
    return {name: float(amount) for name, amount in named.items() if amount}


def _count_that_fit(needs: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> float:
    """How many workers the nodes hold when nothing else runs there."""
    if not needs:
        return math.inf
    return sum(
        min(int(node.get(name, 0) / amount + 1e-9) for name, amount in needs.items())
        for node in nodes
    )


def _place(ray: Any, count: int, needs: dict[str, float]) -> Any:
    """A placement group with room for all workers."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fit = _count_that_fit(needs, nodes)
    if fit < count:
        found = "; ".join(str({n: node.get(n, 0) for n in needs}) for node in nodes)
        raise make_error(
            "devices",
            f"RemoteMpmdMesh: expected a Ray cluster with room for {count} workers that take "
            f"{needs} each, found room for {fit} (nodes: {found}); start more nodes, use "
            "fewer ranks, or say in ray_options what a worker takes",
        )
    group = ray.util.placement_group([needs] * count, strategy="PACK") if needs else None
    if group is None or group.wait(_PLACE_SECONDS):
        return group
    ray.util.remove_placement_group(group)
    free = {name: ray.available_resources().get(name, 0) for name in needs}
    raise make_error(
        "devices",
        f"RemoteMpmdMesh: {count} workers that take {needs} each did not get these in "
        f"{_PLACE_SECONDS} s, for they are in use; free are {free}. End what uses them: a mesh "
        "keeps its workers until shutdown()",
    )


# --- Workers ----------------------------------------------------------------------------


def _kill_all(ray: Any, actors: list[Any], group: Any) -> None:
    for actor in actors:
        with contextlib.suppress(Exception):
            ray.kill(actor)
    if group is not None:
        with contextlib.suppress(Exception):
            ray.util.remove_placement_group(group)


def _end_all(ray: Any, actors: list[Any], group: Any, opened: list[Lines | Watch]) -> None:
    for one in opened:
        one.end()
    if not ray.is_initialized():
        return  # which has ended them
    # Workers end without their controller, too; Ray may never answer.
    killing = threading.Thread(target=_kill_all, args=(ray, actors, group), daemon=True)
    killing.start()
    killing.join(_KILL_SECONDS)


def _reason(error: BaseException) -> str:
    """What Ray says of a death, without its advice."""
    text = str(getattr(error, "cause", None) or error)
    for before in "The actor is dead because ", "Worker exit detail: ":
        text = text.partition(before)[2] or text
    text = text.partition(" Some common causes")[0].strip().rstrip(".")
    return text if len(text) <= 600 else text[:600] + "..."


class Cluster:
    """A worker for each rank.

    Args:
      ranks, per_rank: how many workers, and how many devices each has.
      import_modules: what each of them imports first.
      options: Ray's for actors.
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
        opened: list[Lines | Watch] = []
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
            self.lines = Lines(list(ends))
            opened.append(self.lines)
            self._raylet = raylet_socket(ray)
            hosts = {identity.line[0] for identity in self.identities}
            # Without a reference to this object, with which the workers end.
            self._watch = Watch(
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
                f"RemoteMpmdMesh: the workers of the ranks {late} have not started in "
                f"{_START_SECONDS} s; `ray status` and the logs of Ray say what they wait for",
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
                    f"RemoteMpmdMesh: the worker of rank {rank} (host {found.host}, process id "
                    f"{found.process}) has {name} {found.versions[name]}; expected {version}, "
                    "which the controller has",
                )
        return found

    def _connect(self, token: bytes, rank: int) -> Line:
        host, port = self.identities[rank].line
        try:
            return connect(host, port, token)
        except OSError as error:
            raise make_error(
                "peer",
                f"RemoteMpmdMesh: the controller can not connect to {self.name(rank)} at "
                f"{host}:{port}: {error}; expected a host on which all ports of the workers' "
                "hosts can be reached",
            ) from None

    def trouble(self) -> str | None:
        """What is wrong with Ray itself, as far as that is known."""
        return self._watch.trouble()

    def has_raylet(self) -> bool:
        """Whether the raylet of this host is still there: without it all workers die."""
        return is_listening(self._raylet)

    def name(self, rank: int) -> str:
        identity = self.identities[rank]
        return f"rank {rank} (host {identity.host}, process id {identity.process})"

    def end(self) -> None:
        """Ends all processes; they are not waited for."""
        self._end()

    # --- Calls, which give references to what will come ---

    def ask(self, rank: int, method: str, *arguments: Any) -> Any:
        found = getattr(self._actors[rank], method)
        return found.options(concurrency_group="questions").remote(*arguments)

    def ping(self, rank: int) -> Any:
        return self._actors[rank].ping.remote()

    def pickle(self, found: Any) -> bytes:
        """As Ray sends objects: functions of the script by what they are, others by name."""
        pickled: bytes = self._ray.cloudpickle.dumps(found)
        return pickled

    def share(self, data: bytes) -> Any:
        """For a call's arguments: it is sent to each host once.

        Raises:
          JaxppError: Ray does not take it ("peer").
        """
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def put() -> None:
            try:
                answer.put(self._ray.put(data))
            except Exception as error:
                answer.put(error)

        threading.Thread(target=put, daemon=True).start()  # which may never come back
        while True:
            with contextlib.suppress(queue.Empty):
                found = answer.get(timeout=1)
                if isinstance(found, Exception):
                    raise make_error("peer", f"Ray does not take a plan: {found}") from None
                return found
            if (trouble := self.trouble()) is not None:
                raise make_error("peer", trouble)

    # --- What has come ---

    def get(self, asked: list[Any], seconds: float) -> list[Any] | BaseException | None:
        """All replies; None if one takes longer; the error if one will never come."""
        try:
            return self._ray.get(asked, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            return None
        except self._ray.exceptions.RayError as error:
            return error

    def missing(self, asked: list[Any], seconds: float) -> list[int]:
        """Which have not come after this time."""
        _, late = self._ray.wait(asked, num_returns=len(asked), timeout=seconds)
        return [i for i, reply in enumerate(asked) if reply in late]

    def death(self, reply: Any) -> str | None:
        """Why a reply will never come, as far as that is known."""
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
