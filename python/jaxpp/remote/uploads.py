"""Shards of arrays as arguments of a call of Ray.

Ray sends an argument of up to 100 KiB with the call, and a larger one through its object
store, by way of two more processes. A training batch is often a little larger, and would wait
for these in each step: so it goes as several small arguments. Much data is the store's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Upload", "pack", "unpack"]

_PIECE_BYTES = 96 * 1024
_MOST_BYTES = 4 * 1024 * 1024  # of a call, that go in pieces


class Upload(NamedTuple):
    """An array's shards on the devices of one rank."""

    number: int  # of the array
    plugin: str | None
    dtype: str
    shards: list[np.ndarray]


def _pieces(shard: np.ndarray) -> list[Any]:
    data = shard.tobytes()
    return [data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES)]


def pack(uploads: Sequence[Upload]) -> list[Any]:
    """Arguments of a call; the first one says what the others are."""
    if not uploads:
        return []
    table: list[tuple[Any, ...]] = []
    found: list[Any] = []
    room = _MOST_BYTES
    for number, plugin, dtype, shards in uploads:
        rows = []
        for shard in shards:
            in_pieces = shard.nbytes <= room
            pieces = _pieces(shard) if in_pieces else [shard]
            room -= shard.nbytes if in_pieces else 0
            rows.append((len(pieces), in_pieces, shard.dtype.str, shard.shape))
            found += pieces
        table.append((number, plugin, dtype, rows))
    return [json.dumps(table).encode(), *found]


def unpack(arguments: Sequence[Any]) -> Iterator[Upload]:
    """What `pack` was given."""
    if not arguments:
        return
    rest = iter(arguments[1:])

    def shard(count: int, in_pieces: bool, dtype: str, shape: Sequence[int]) -> Any:
        pieces = [next(rest) for _ in range(count)]
        if not in_pieces:
            return pieces[0]
        return np.frombuffer(b"".join(pieces), dtype).reshape(shape)

    for number, plugin, dtype, rows in json.loads(arguments[0]):
        yield Upload(number, plugin, dtype, [shard(*row) for row in rows])
