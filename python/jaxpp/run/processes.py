"""The processes of a job: whose each rank is, how they agree and how they find each other.

Every process runs the same script and plans the same steps in the same order. What they
tell each other before the first step goes through the key-value store of
`jax.distributed`; what steps send goes from process to process.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pathlib
import secrets
from typing import TYPE_CHECKING

import jax

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals.client import coordination
from jaxpp.job import own_address
from jaxpp.mesh import MpmdMesh

if TYPE_CHECKING:
    from jaxpp.run.devices import LocalDevices
    from jaxpp.run.identity import StepIdentity

__all__ = ["Processes", "make_network", "own_part", "processes_of"]

_TIMEOUT_MS = 5 * 60 * 1000  # for all to have compiled
_POLL_MS = 500
_PART_BYTES = 1 << 20  # of what is put under one key
_numbers = itertools.count()  # of the compiled steps, in all processes alike


def _key_of(process: int, key: str) -> bytes:
    """What a process puts under the key, as soon as it has."""
    store = coordination()
    for _ in range(0, _TIMEOUT_MS, _POLL_MS):
        has_left = _core.job_has_left(process)
        try:
            return bytes(store.blocking_key_value_get_bytes(key, _POLL_MS))
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise make_error("peer", f"waited for process {process}: {error}") from None
        _core.job_check()
        if has_left:
            raise make_error(
                "peer",
                f"process {process} has ended and did not make the step that process "
                f"{jax.process_index()} makes; its own error says why, or it calls fewer steps",
            )
    raise make_error(
        "peer",
        f"process {process} did not make the step that process {jax.process_index()} makes in "
        f"{_TIMEOUT_MS / 1000:g} seconds; expected every process to call the same steps in the "
        "same order",
    )


class Processes:
    """The processes that a mesh spans.

    Args:
      rank_process: of each rank the process that this one exchanges values with; of a rank
        that lies in several, the one with the same places among its devices.
      places: which of a rank's devices lie in this process, where it has any.
      spans: whether a rank lies in several.
    """

    def __init__(self, rank_process: list[int], places: tuple[int, ...], spans: bool) -> None:
        self.rank_process, self.places, self.spans = rank_process, places, spans
        self.me = jax.process_index()
        self.count = jax.process_count()

    def has_rank(self, rank: int) -> bool:
        return self.rank_process[rank] == self.me

    def _exchange(self, key: str, mine: bytes) -> list[bytes]:
        """What each process has put under the key."""
        coordination().key_value_set_bytes(f"{key}/{self.me}", mine)
        return [_key_of(p, f"{key}/{p}") for p in range(self.count)]

    def _token(self, key: str) -> bytes:
        """The secret that the network's peers prove; the first process makes it."""
        if self.me == 0:
            coordination().key_value_set_bytes(f"{key}/token", secrets.token_bytes(32))
        return _key_of(0, f"{key}/token")

    def _program(self, key: str, process: int) -> bytes:
        """The packed program of a process, which puts it there if it finds a difference."""
        parts = int(_key_of(process, f"{key}/program/{process}"))
        return b"".join(_key_of(process, f"{key}/program/{process}/{i}") for i in range(parts))

    def _publish_program(self, key: str, packed: bytes) -> None:
        """The store takes messages of a limited size."""
        parts = [packed[i : i + _PART_BYTES] for i in range(0, len(packed), _PART_BYTES)]
        for i, part in enumerate(parts):
            coordination().key_value_set_bytes(f"{key}/program/{self.me}/{i}", part)
        coordination().key_value_set_bytes(f"{key}/program/{self.me}", b"%d" % len(parts))

    def _agree(self, key: str, identity: StepIdentity) -> None:
        """Raises in every process if their steps differ; says in what."""
        summaries = self._exchange(f"{key}/plan", identity.summary)
        others = [p for p, found in enumerate(summaries) if found != identity.summary]
        if not others:
            return
        other, theirs = others[0], f"process {others[0]}"
        fact = identity.differing_fact(summaries[other])
        if fact is not None:
            name, here, there = fact
            what = f"the {name} is {here} in process {self.me}, and {there} in {theirs}"
        else:
            self._publish_program(key, identity.packed_program())
            where, here, there = identity.differing_line(self._program(key, other))
            at = f"at {where}, " if where else ""
            what = f"{at}process {self.me} has `{here}`, and {theirs} has `{there}`"
        raise make_error(
            "mesh",
            f"process {self.me} and {theirs} do not run the same step: {what}; expected the "
            "same script, versions and arguments in all",
        )

    def connect(self, identity: StepIdentity, devices: LocalDevices) -> _core.Network:
        """The network of the next step that all processes have made alike."""
        key = f"jaxpp/{next(_numbers)}"
        self._agree(key, identity)
        address = own_address()
        network = make_network(self.me, self.count, address, self._token(key), devices)
        for process, found in enumerate(self._exchange(f"{key}/address", network.address())):
            if process != self.me:
                network.connect(process, bytes(found))
        self._exchange(f"{key}/connected", b"1")
        return network


def make_network(
    process: int, count: int, address: str, token: bytes, devices: LocalDevices
) -> _core.Network:
    """This process' end of a network that is not connected yet, of the driver that
    JPP_TRANSPORT names."""
    _name_ucx()
    driver = _core.option("JPP_TRANSPORT") or "ucx"
    if driver == "nccl" and devices.platform != "cuda":
        raise make_error(
            "unsupported",
            "JPP_TRANSPORT=nccl: expected devices of the platform cuda, found "
            f"{devices.platform}; leave it unset for others",
        )
    device = devices.hardware_id() if driver == "nccl" else 0
    return _core.Network(driver, process, count, address, token, device)


def _name_ucx() -> None:
    """JPP_UCX where the library of the package libucx-cu13 or -cu12 is, if nobody set it."""
    spec = importlib.util.find_spec("libucx")
    for folder in spec.submodule_search_locations or () if spec else ():
        library = pathlib.Path(folder) / "lib" / "libucp.so.0"
        if library.exists():
            os.environ.setdefault("JPP_UCX", str(library))


def _check_order(owners: list[list[int]]) -> None:
    """That processes which share ranks execute their tasks in the same order, without which
    each may wait for the other one in a collective.

    The order is fixed within a rank, and among ranks where all transfers stay in a process;
    else it depends on what arrives first.
    """
    if all(len({*row}) == 1 for row in owners):
        return
    for process in sorted({process for row in owners for process in row}):
        ranks = [rank for rank, row in enumerate(owners) if process in row]
        if 1 < len(ranks) < len(owners):
            raise make_error(
                "unsupported",
                f"process {process}: expected devices of one rank or of all {len(owners)}, "
                "where ranks lie in several processes, found devices of the ranks "
                f"{ranks}; make the mesh so that each process has one rank, or all",
            )


def own_part(owners: list[list[int]], me: int) -> tuple[list[int], tuple[int, ...]]:
    """How ranks are parted among processes, seen by one of them.

    A process has the devices at the same places in each of its ranks, so that what goes from
    rank to rank goes from a process to one other: each shard to that at the same place.

    Args:
      owners: of each rank, the process of each of its devices.
      me: a process.

    Returns:
      Of each rank the process whose part is at the places of this one's, and these places.

    Raises:
      JaxppError: ranks are parted differently ("unsupported").
    """
    places: dict[int, tuple[int, ...]] = {}
    parts: list[dict[tuple[int, ...], int]] = []  # of each rank: the process at some places
    for rank, row in enumerate(owners):
        part = {tuple(i for i, p in enumerate(row) if p == one): one for one in sorted({*row})}
        parts.append(part)
        for where, process in part.items():
            if places.setdefault(process, where) != where:
                raise make_error(
                    "unsupported",
                    f"rank {rank}: expected the devices of process {process} at the places "
                    f"{list(places[process])}, as in its other ranks, found them at "
                    f"{list(where)}; make the mesh so that each process has the same places "
                    "in all of its ranks",
                )
    for rank, part in enumerate(parts):
        if part.keys() != parts[0].keys():
            raise make_error(
                "unsupported",
                f"rank {rank}: expected its devices to be parted among processes as those of "
                f"rank 0, the processes {owners[0]}, found the processes {owners[rank]}; make "
                "the mesh so that the places of each process are those of one other in every "
                "rank",
            )
    _check_order(owners)
    mine = places.get(me, next(iter(parts[0])))
    return [part[mine] for part in parts], mine


def _check_span(mesh: MpmdMesh, owners: list[list[int]]) -> None:
    """That ranks may lie in several processes, where one does."""
    rank, row = next((r, row) for r, row in enumerate(owners) if len({*row}) > 1)
    if mesh.devices_of(rank)[0].platform == "cpu":
        raise make_error(
            "unsupported",
            f"rank {rank}: expected its devices in one process, found them in processes "
            f"{sorted({*row})}; make the mesh so that each process has whole ranks",
        )
    if mesh.ranks_per_device > 1:
        raise make_error(
            "unsupported",
            f"rank {rank}: its devices lie in processes {sorted({*row})} and are shared with "
            "other ranks, whose turns each process would choose for itself; expected "
            "ranks_per_device=1, or whole ranks in each process",
        )


def processes_of(mesh: MpmdMesh) -> Processes | None:
    """The processes that the mesh spans; None: this one has all of it.

    Raises:
      JaxppError: a rank lies in several processes in a way that can not be ("unsupported").
    """
    if jax.process_count() == 1:
        return None
    owners = [[d.process_index for d in mesh.devices_of(r)] for r in range(mesh.mpmd_dim)]
    spans = any(len({*row}) > 1 for row in owners)
    if spans:
        _check_span(mesh, owners)
    rank_process, places = own_part(owners, jax.process_index())
    return Processes(rank_process, places, spans)
