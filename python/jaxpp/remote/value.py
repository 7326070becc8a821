"""An array on workers, identified by a number, with the interface of `_core.Value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxpp.errors import DELETED, make_error

if TYPE_CHECKING:
    from jaxpp.remote.controller import Message, Workers

__all__ = ["RemoteValue"]

_LOST = (
    "was donated to a step that failed or was interrupted, and is gone; go back "
    "to a checkpoint, or to a copy made before the step"
)


class RemoteValue:
    """An array on some ranks, uploaded or promised by a step."""

    __slots__ = (
        "__weakref__",
        "_deleted",
        "_origin",
        "_taker",
        "_workers",
        "maker",
        "number",
        "ranks",
    )

    def __init__(
        self, workers: Workers, number: int, ranks: Sequence[int], maker: Message | None
    ) -> None:
        self._workers, self.number, self.ranks = workers, number, ranks
        self.maker = maker  # the message that creates it; None: the next one
        self._deleted = False
        self._taker: Message | None = None  # of the step that it was donated to
        self._origin: RemoteValue | None = None

    def __del__(self) -> None:
        if not self._deleted:
            self._workers.dropped.append(self.number)

    # --- Donation ---

    def stands_for(self, origin: RemoteValue) -> None:
        """Makes the donation of this array also donate `origin`, which it is a copy of."""
        self._origin = origin

    @property
    def root(self) -> RemoteValue:
        return self if self._origin is None else self._origin.root

    def donate(self, taker: Message) -> None:
        """Marks the array as donated to a step, which deletes it on the workers."""
        if self._origin is not None:
            self._origin.delete()
            self._origin._taker = taker
        self._deleted, self._taker = True, taker

    def delete(self) -> None:
        """Frees the device memory as soon as no step needs it; does not wait."""
        if not self._deleted:
            self._deleted = True
            self._workers.delete(self.number)

    @property
    def deleted(self) -> bool:
        return self._deleted

    @property
    def fate(self) -> str:
        """Why a deleted array cannot be used, for error messages."""
        return _LOST if self._taker is not None and self._taker.failed else DELETED

    def _refuse_deleted(self) -> None:
        if self._deleted:
            raise make_error("donated", f"the array {self.fate}")

    # --- Contents ---

    def wait(self) -> None:
        """Blocks until the contents are computed."""
        self._refuse_deleted()
        self._workers.message_of(self).wait()

    def is_ready(self) -> bool:
        """Whether wait() would return at once."""
        self._refuse_deleted()
        return self._workers.message_of(self).is_done()

    def read(self, rank: int, device: int, buffer: Any) -> None:
        """Waits, and copies a shard into a writable buffer of bytes."""
        self._refuse_deleted()
        view = memoryview(buffer)
        view[:] = memoryview(self._workers.read(self, rank, device, view.nbytes))
