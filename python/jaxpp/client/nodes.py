"""A plugin's client as one of several nodes, where a node is a process of the job. It knows the
devices of all nodes and compiles programs over them.

Such clients exchange data through the key-value store of `jax.distributed`, under keys that
differ from those of JAX's client.
"""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals.client import coordination

__all__ = ["client_of_node", "key_value_store", "numbers_of"]

_numbers = itertools.count()  # counts such clients, in the same order in all processes


def _close() -> None:
    """At interpreter exit: only steps in flight may still use the store."""
    _core.runtimes_close()
    _core.stores_close()


atexit.register(_close)


def key_value_store(prefix: str) -> _core.KeyValueStore:
    """The coordination service's key-value store, limited to keys with `prefix`."""
    store = coordination()

    def get(key: str, timeout_ms: int) -> bytes | None:
        name = prefix + key
        if timeout_ms == 0:
            return _or_none(lambda: store.key_value_try_get_bytes(name), "NOT_FOUND")
        return _or_none(
            lambda: store.blocking_key_value_get_bytes(name, timeout_ms), "DEADLINE_EXCEEDED"
        )

    def put(key: str, value: bytes) -> None:
        store.key_value_set_bytes(prefix + key, value)

    return _core.KeyValueStore(get, put)


def _or_none(ask: Callable[[], bytes], missing: str) -> bytes | None:
    """The service's answer, or None for a missing key."""
    try:
        return bytes(ask())
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(missing):
            return None
        raise make_error("peer", f"jax.distributed's key-value store: {error}") from None


def client_of_node(plugin: str, options: dict[str, Any]) -> _core.Client:
    """This process's client; waits until all other processes create theirs.

    Raises:
      JaxppError: the plugin does not support several nodes ("unsupported"), or another process
        did not create its client ("plugin").
    """
    store = key_value_store(f"jaxpp/client/{next(_numbers)}/")
    return _core.Client(plugin, options, store, jax.process_index(), jax.process_count())


def numbers_of(client: _core.Client, devices: Iterable[jax.Device]) -> dict[jax.Device, int]:
    """The index that a client of `client_of_node` gives to each JAX device.

    Both clients have the same devices in each process, in the same order.

    Raises:
      JaxppError: the two clients' devices differ ("devices").
    """
    mine: dict[int, list[tuple[int, int]]] = {}
    for number, device in enumerate(client.info().global_devices):
        mine.setdefault(device.node, []).append((device.id, number))
    of_jax: dict[int, list[jax.Device]] = {}
    for known in devices:
        of_jax.setdefault(known.process_index, []).append(known)
    counts = [{p: len(row) for p, row in sorted(d.items())} for d in (of_jax, mine)]
    if counts[0] != counts[1]:
        raise make_error(
            "devices",
            f"expected a client with JAX's devices, {counts[0]} by process, found "
            f"{counts[1]}; make the same devices visible to both in every process",
        )
    return {
        known: number
        for process, row in of_jax.items()
        for known, (_, number) in zip(
            sorted(row, key=lambda d: d.id), sorted(mine[process]), strict=True
        )
    }
