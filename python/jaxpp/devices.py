"""The devices of a mesh, as its arrays use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax

from jaxpp import _core
from jaxpp.mesh import MpmdMesh

__all__ = ["Devices", "RankOwner"]

_layout_numbers: dict[tuple[Any, ...], int] = {}


class RankOwner(Protocol):
    """The processes that share the ranks of a mesh."""

    rank_process: list[int]

    def has_rank(self, rank: int) -> bool: ...

    def connect(self, identity: Any, devices: Devices) -> _core.Network:
        """The network of the next step; `identity` holds what all processes must agree
        on."""


class Devices:
    """The devices of each rank of a mesh, and the operations that arrays need.

    A rank of another process has no devices here; its indices are 0. The indices of a rank
    with fewer devices than others end with NO_DEVICE.

    Args:
      platform, version: those of the plugin.
      ids: JAX's ids of each rank's devices.
      indices: the client's indices of the same devices.
      processes: the processes that share the ranks; None: this process has all ranks.
    """

    # Whether a step can send an argument from one rank to another that needs it.
    can_move = True
    # The minimum size in bytes of a JAX array whose memory a step uses in place.
    least_borrowed = 0

    def __init__(
        self,
        platform: str,
        version: str,
        ids: list[list[int]],
        indices: list[list[int]],
        processes: RankOwner | None,
    ) -> None:
        self.platform, self.version = platform, version
        self.ids, self.indices, self.processes = ids, indices, processes

    def has_rank(self, rank: int) -> bool:
        """Whether the rank belongs to this process."""
        return self.processes is None or self.processes.has_rank(rank)

    @property
    def per_rank(self) -> int:
        """The number of devices of a rank in one process; if ranks differ, of the largest."""
        return len(self.indices[0])

    @property
    def rank_size(self) -> int:
        """The number of devices of a rank; more than `per_rank` if ranks span processes."""
        return self.per_rank

    @property
    def places(self) -> Sequence[int]:
        """The positions of `indices` among a rank's devices."""
        return range(self.per_rank)

    def of_rank(self, mesh: MpmdMesh, rank: int) -> list[jax.Device]:
        """This process's devices of a rank as JAX devices."""
        known = mesh.devices_of(rank)
        return [known[place] for place in self.places[: self.count(rank)]]

    def count(self, rank: int) -> int:
        """The number of devices of a rank in this process."""
        return self.per_rank - self.indices[rank].count(_core.NO_DEVICE)

    @property
    def layout(self) -> tuple[Any, ...]:
        """Equal for meshes whose ranks consist of the same devices of the same client."""
        raise NotImplementedError

    @property
    def number(self) -> int:
        """The same number for equal layouts."""
        return _layout_numbers.setdefault(self.layout, len(_layout_numbers) + 1)

    def put(
        self,
        ranks: Sequence[int],
        indices: Sequence[int],
        shards: list[Any],
        dtype: str,
        memory: str,
    ) -> Any:
        """Uploads an array's shards, one per device, to a memory of some ranks' devices."""
        raise NotImplementedError

    def take(self, wanted: _core.Wanted, part: Any, source: Any, copies: bool) -> Any:
        """The value of an argument, a `Part`, made from a `Source` (run/arguments.py);
        `copies`: a copy in any case."""
        raise NotImplementedError

    def can_borrow(self, given: jax.Device, wanted: jax.Device) -> bool:
        """Whether memory of one JAX device can be used on another one without a copy."""
        return False

    def lend(self, value: Any, rank: int, index: int, device: jax.Device) -> Any:
        """One shard of a value from `put` in memory that JAX can use on `device`: a flat array
        of bytes on the host, or a JAX array; None if neither is possible."""
        return None

    def flush(self) -> None:
        """Sends uploads that `put` has deferred to the next step."""

    def hardware_id(self) -> int:
        """The compute capability of this process's first device of the mesh."""
        raise NotImplementedError
