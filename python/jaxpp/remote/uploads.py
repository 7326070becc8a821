"""Shards sent to a worker: a table in the head of a frame, followed by the arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Upload", "pack", "unpack"]


class Upload(NamedTuple):
    """An array's shards on the devices of one rank."""

    number: int  # id of the array
    plugin: str | None
    dtype: str
    shards: list[np.ndarray]


def pack(uploads: Sequence[Upload]) -> tuple[list[tuple[Any, ...]], list[np.ndarray]]:
    """The table of the uploads, and all their shards."""
    table = [(u.number, u.plugin, u.dtype, len(u.shards)) for u in uploads]
    return table, [shard for u in uploads for shard in u.shards]


def unpack(table: Iterable[Sequence[Any]], shards: Iterable[np.ndarray]) -> Iterator[Upload]:
    """The inverse of `pack`."""
    rest = iter(shards)
    for number, plugin, dtype, count in table:
        yield Upload(number, plugin, dtype, [next(rest) for _ in range(count)])
