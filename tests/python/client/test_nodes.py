"""Clients that are nodes of a job. The tests use a plugin of their own (nodes_plugin.c), which
looks up the other nodes in the key-value store as XLA's GPU plugin does.

Time limits exist only to make hangs fail.
"""

from __future__ import annotations

import concurrent.futures
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

import nodes_gpu
from jaxpp import JaxppError, _core
from jaxpp.client.plugins import plugin_path

PROGRAM = pathlib.Path(__file__).with_name("nodes_gpu.py")
LIMIT = 120  # seconds


class Store:
    """A key-value store in this process; `get` waits for the key."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.asked: list[tuple[str, int]] = []
        self.changed = threading.Condition()

    def get(self, key: str, timeout_ms: int) -> bytes | None:
        with self.changed:
            self.asked.append((key, timeout_ms))
            self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000)
            return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def client(self, plugin: str, node: int, nodes: int, **options: object) -> _core.Client:
        store = _core.KeyValueStore(self.get, self.put)
        return _core.Client(plugin, options, store, node, nodes)


def test_clients_find_each_other(nodes_plugin: str) -> None:
    store = Store()
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        clients = list(
            pool.map(
                lambda node: store.client(
                    nodes_plugin, node, 3, visible_devices=[*range(node + 1)]
                ),
                range(3),
            )
        )
    ids = [[0, 10, 11, 20, 21, 22], [10, 11, 0, 20, 21, 22], [20, 21, 22, 0, 10, 11]]
    for node, client in enumerate(clients):
        info = client.info()
        assert [d.id for d in info.devices] == ids[node][: node + 1]
        assert [tuple(d) for d in info.global_devices] == [
            (i, i // 10, "stub") for i in ids[node]
        ]
    # Clients also use the store when they are destroyed, so they keep it alive.
    assert not any(key.startswith("bye/") for key in store.values)
    del client, clients
    assert {key for key in store.values if key.startswith("bye/")} == {
        "bye/0",
        "bye/1",
        "bye/2",
    }


def test_a_client_alone_lists_its_devices(nodes_plugin: str) -> None:
    info = _core.Client(nodes_plugin, {"visible_devices": [0, 1, 2]}).info()
    assert [d.id for d in info.devices] == [0, 1, 2]
    assert [tuple(d) for d in info.global_devices] == [(i, 0, "stub") for i in range(3)]


def test_a_key_that_is_not_put(nodes_plugin: str) -> None:
    """The client polls for the key in short waits, up to the plugin's timeout."""
    store = Store()
    with pytest.raises(JaxppError, match="stub/1: no node has put the key in 600 ms") as raised:
        store.client(nodes_plugin, 0, 2, timeout_ms=600)
    assert raised.value.code == "plugin"
    waits = [ms for key, ms in store.asked if key == "stub/1"]
    assert sum(waits) == 600 and max(waits) <= 250


def raises(error: BaseException) -> Callable[..., None]:
    def run(*arguments: object) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("get", "put", "text"),
    [
        (raises(OSError("the host is away")), None, "stub/1: the host is away"),
        (raises(JaxppError("of our own")), None, "stub/1: of our own"),
        (raises(ValueError("\ud800\0")), None, "stub/1: "),
        (lambda key, ms: "text", None, "expected a key-value store that gives bytes or None"),
        (lambda key, ms, more: b"", None, "missing 1 required positional argument"),
        (None, raises(OSError("the disk is full")), "stub/0: the disk is full"),
    ],
)
def test_a_store_that_fails(
    nodes_plugin: str, get: Callable[..., object], put: Callable[..., object], text: str
) -> None:
    store = Store()
    broken = _core.KeyValueStore(get or store.get, put or store.put)  # type: ignore[arg-type]
    with pytest.raises(JaxppError) as raised:
        _core.Client(nodes_plugin, {}, broken, 0, 2)
    assert "cannot make a client" in str(raised.value)
    assert text in str(raised.value)


def test_ctrl_c_in_the_store_is_one(nodes_plugin: str) -> None:
    store = Store()
    interrupted = _core.KeyValueStore(raises(KeyboardInterrupt()), store.put)
    with pytest.raises(KeyboardInterrupt):
        _core.Client(nodes_plugin, {}, interrupted, 0, 2)


def test_functions_are_checked() -> None:
    with pytest.raises(TypeError, match="expected a function, found 3"):
        _core.KeyValueStore(print, 3)  # type: ignore[arg-type]


def test_options_that_are_lists_are_checked(nodes_plugin: str) -> None:
    with pytest.raises(TypeError):
        _core.Client(nodes_plugin, {"visible_devices": [0, "1"]})
    with pytest.raises(OverflowError):
        _core.Client(nodes_plugin, {"visible_devices": [2**64]})


def test_a_plugin_without_nodes_says_so() -> None:
    with pytest.raises(JaxppError, match="programs over the devices of several") as raised:
        Store().client(plugin_path("cpu", "cpu"), 0, 2)
    assert raised.value.code == "unsupported"


def run_program(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)


def test_nodes_over_the_coordination_service(nodes_plugin: str) -> None:
    """JAX's own clients use the same key-value store at the same time."""
    done = run_program("--plugin", nodes_plugin, "--timeout", str(LIMIT))
    assert done.returncode == 0, done
    for node in range(2):
        own, other = (node * 10, node, "stub"), ((1 - node) * 10, 1 - node, "stub")
        assert f"node {node}: those of all nodes {[own, other]}" in done.stdout
    assert done.stdout.endswith("nodes_gpu: ok\n")


ALONE = """
import sys, jax
from jaxpp import JaxppError, _core
from jaxpp.client import nodes
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 1, 0)
for options in {"timeout_ms": 600}, {"act": "try missing"}:
    try:
        _core.Client(sys.argv[1], options, nodes.key_value_store("test/"), 0, 2)
    except JaxppError as error:
        print(str(error).partition("client: ")[2])
"""


def test_keys_that_the_coordination_service_does_not_have(nodes_plugin: str) -> None:
    port = str(nodes_gpu.free_port())
    command = [sys.executable, "-W", "ignore", "-c", ALONE, nodes_plugin, port]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.splitlines() == [
        "stub/1: no node has put the key in 600 ms",
        "no node has put the key yet",
    ], done


EXIT = """
import sys, threading
from jaxpp import _core
from jaxpp.client import nodes
asked = threading.Event()
def get(key, timeout_ms):
    asked.set()
    threading.Event().wait(timeout_ms / 1000)
def make():
    try:
        _core.Client(sys.argv[1], {}, _core.KeyValueStore(get, lambda key, value: None), 0, 2)
    except _core.JaxppError:
        pass  # a print would race with the interpreter's end
threading.Thread(target=make, daemon=True).start()
asked.wait()
"""


def test_the_interpreter_ends_while_a_plugin_waits(nodes_plugin: str) -> None:
    """The plugin waits for a minute, but does not delay the interpreter's exit."""
    command = [sys.executable, "-W", "ignore", "-c", EXIT, nodes_plugin]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")
