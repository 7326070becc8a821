"""An array on workers, identified by a number, with the interface of `_core.Value`."""

from __future__ import annotations

from typing import Any

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.remote.controller import Message, Numbered, Workers

__all__ = ["RemoteValue"]


class RemoteValue(Numbered):
    """An array on some ranks, uploaded or promised by a step."""

    __slots__ = ("_workers", "origin", "state")

    def __init__(self, workers: Workers, number: int, maker: Message | None) -> None:
        super().__init__(number, maker)
        self._workers = workers
        self.state = _core.Value.elsewhere()
        self.origin: RemoteValue | None = None  # the array of which this is a copy

    def __del__(self) -> None:
        if not self.deleted:
            self._workers.dropped.append(self.number)

    # --- Donation ---

    def set_origin(self, origin: RemoteValue) -> None:
        """Makes this a copy of `origin`: donating the copy donates both."""
        self.origin = origin
        self.state.set_origin(origin.state)

    def delete(self) -> None:
        """Frees the device memory as soon as no step needs it; does not wait."""
        if not self.deleted:
            self.state.delete()
            self._workers.delete(self.number)

    @property
    def deleted(self) -> bool:
        return self.state.deleted

    @property
    def deletion_reason(self) -> str:
        """Why a deleted array cannot be used, for error messages."""
        return self.state.deletion_reason

    def _refuse_deleted(self) -> None:
        if self.deleted:
            raise make_error("donated", f"the array {self.deletion_reason}")

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
