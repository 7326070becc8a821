"""The processes of a job: which ranks each owns, how they check that they agree, and how they
connect.

Every process runs the same script and plans the same steps in the same order. Before the first
step they exchange data through the key-value store of `jax.distributed`; steps send data
directly between processes.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import pathlib
import secrets
import zlib
from collections.abc import Callable

import jax

from jaxpp import _core
from jaxpp.client.identity import StepIdentity
from jaxpp.devices import Devices
from jaxpp.errors import make_error
from jaxpp.jax_internals.client import coordination
from jaxpp.job import own_address
from jaxpp.mesh import MpmdMesh

__all__ = ["Processes", "make_network", "processes_of"]

_TIMEOUT_MS = 5 * 60 * 1000  # limits the wait for all processes to have compiled
_POLL_MS = 500
_PART_BYTES = 1 << 20  # size limit of one value in the store
_numbers = itertools.count()  # of exchanges, in the same order in all processes


def _key_of(process: int, key: str) -> bytes:
    """Waits for the value that a process stores under the key."""
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
                f"process {process} has ended without creating the step that process "
                f"{jax.process_index()} creates; see its own error, or check whether it calls "
                "fewer steps",
            )
    raise make_error(
        "peer",
        f"process {process} did not create the step that process {jax.process_index()} "
        f"creates within {_TIMEOUT_MS / 1000:g} seconds; expected every process to call the "
        "same steps in the same order, with arguments of the same shapes and dtypes",
    )


class Processes:
    """The processes that a mesh spans.

    `rank_process`: for each rank, the process with which this one exchanges values; for a rank
    that spans processes, the one with the same positions among its devices. `places`: the
    positions of this process's devices in a rank that it belongs to. `spans`: whether any rank
    spans processes.
    """

    def __init__(self, part: _core.JobPart) -> None:
        self.rank_process, self.spans = part.rank_process, part.spans
        self.places = tuple(part.places)
        self.me = jax.process_index()
        self.count = jax.process_count()

    def has_rank(self, rank: int) -> bool:
        return self.rank_process[rank] == self.me

    def _exchange(self, key: str, mine: bytes) -> list[bytes]:
        """The values that all processes store under the key."""
        return self._store(key, mine)()

    def _store(self, key: str, mine: bytes) -> Callable[[], list[bytes]]:
        """Stores a value; the function that it returns waits for those of all processes."""
        coordination().key_value_set_bytes(f"{key}/{self.me}", mine)
        return lambda: [_key_of(p, f"{key}/{p}") for p in range(self.count)]

    def share(self, mine: bytes) -> Callable[[], list[bytes]]:
        """Stores a value that belongs to the step just created, and returns a function that
        waits for those of all processes. Every process calls it."""
        return self._store(f"jaxpp/{next(_numbers)}", mine)

    def _token(self, key: str) -> bytes:
        """The secret that authenticates the network's peers; the first process creates it."""
        if self.me == 0:
            coordination().key_value_set_bytes(f"{key}/token", secrets.token_bytes(32))
        return _key_of(0, f"{key}/token")

    def _program(self, key: str, process: int) -> bytes:
        """The packed program of a process, which stores it if it finds a difference."""
        parts = int(_key_of(process, f"{key}/program/{process}"))
        return b"".join(_key_of(process, f"{key}/program/{process}/{i}") for i in range(parts))

    def _publish_program(self, key: str, packed: bytes) -> None:
        """The store limits the size of a value."""
        parts = [packed[i : i + _PART_BYTES] for i in range(0, len(packed), _PART_BYTES)]
        for i, part in enumerate(parts):
            coordination().key_value_set_bytes(f"{key}/program/{self.me}/{i}", part)
        coordination().key_value_set_bytes(f"{key}/program/{self.me}", b"%d" % len(parts))

    def _agree(self, key: str, identity: StepIdentity) -> None:
        """Raises the first difference between the processes' steps, in every process."""
        summaries = self._exchange(f"{key}/plan", identity.summary)
        others = [p for p, found in enumerate(summaries) if found != identity.summary]
        if not others:
            return
        other = others[0]
        facts = summaries[other].decode().partition("\n")[2]
        _core.job_compare_facts(self.me, identity.facts, other, facts)
        self._publish_program(key, zlib.compress(identity.program.encode()))
        program = zlib.decompress(self._program(key, other)).decode()
        _core.job_compare_programs(self.me, identity.program, other, program)

    def connect(self, identity: StepIdentity, devices: Devices) -> _core.Network:
        """The network of the next step, which all processes create in the same order."""
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
    process: int, count: int, address: str, token: bytes, devices: Devices
) -> _core.Network:
    """This process's endpoint of an unconnected network, of the driver in JPP_TRANSPORT."""
    _name_ucx()
    driver = _core.option("JPP_TRANSPORT") or "ucx"
    if driver not in ("ucx", "nccl"):
        raise make_error("invalid-argument", f"JPP_TRANSPORT={driver!r}: expected ucx or nccl")
    if driver == "nccl" and devices.platform != "cuda":
        raise make_error(
            "unsupported",
            f"JPP_TRANSPORT=nccl: expected platform cuda, found {devices.platform}; unset "
            "JPP_TRANSPORT on other platforms",
        )
    device = devices.hardware_id() if driver == "nccl" else 0
    return _core.Network(driver, process, count, address, token, device)


def _name_ucx() -> None:
    """Sets JPP_UCX to the library of the package libucx-cu13 or -cu12, unless it is set."""
    spec = importlib.util.find_spec("libucx")
    for folder in spec.submodule_search_locations or () if spec else ():
        library = pathlib.Path(folder) / "lib" / "libucp.so.0"
        if library.exists():
            os.environ.setdefault("JPP_UCX", str(library))


def processes_of(mesh: MpmdMesh) -> Processes | None:
    """The processes that the mesh spans; None: this process has all of it.

    Raises:
      JaxppError: a rank spans processes in an unsupported way ("unsupported").
    """
    if jax.process_count() == 1:
        return None
    rows = [mesh.devices_of(rank) for rank in range(mesh.mpmd_dim)]
    most = max(map(len, rows))
    devices = [device for row in rows for device in row + row[:1] * (most - len(row))]
    part = _core.job_divide_ranks(
        [device.process_index for device in devices],
        mesh.mpmd_dim,
        jax.process_index(),
        devices[0].platform == "cpu",
        mesh.ranks_per_device > 1,
    )
    if mesh.unequal and part.spans:
        raise make_error(
            "unsupported",
            "MpmdMesh: ranks of unequal meshes; expected each rank's devices in one process",
        )
    return Processes(part)
