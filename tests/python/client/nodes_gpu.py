"""Two processes, each a node, create clients of a PJRT plugin that find each other, and print
the devices that they see: `python3 tests/python/client/nodes_gpu.py`.

On a machine with one GPU, both nodes use it: the clients can find each other, but cannot run
programs over both nodes. `--plugin cpu` shows the error of a plugin without nodes.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

NODES = 2


def say(node: int, text: str) -> None:
    """Writes a line in a single call, because both processes share the output."""
    sys.stdout.write(f"node {node}: {text}\n")
    sys.stdout.flush()


def show_node(node: int, address: str, plugin: str) -> None:
    """Creates the client of one node and prints its devices."""
    import jax

    import jaxpp
    from jaxpp.client.nodes import client_of_node
    from jaxpp.client.plugins import client_options, plugin_path

    path = plugin_path(plugin, plugin)
    jax.distributed.initialize(address, NODES, node, local_device_ids=[0])
    options = client_options(path, 1 if plugin == "cpu" else 0)
    if plugin != "cpu":
        options["visible_devices"] = [0]
    try:
        info = client_of_node(path, options).info()
    except jaxpp.JaxppError as error:
        raise SystemExit(f"node {node}: {error.code}: {error}") from None
    found = [tuple(d) for d in info.global_devices]
    say(node, f"platform {info.platform}, {info.version.splitlines()[0]}")
    say(node, f"its own devices {[tuple(d) for d in info.devices]}")
    say(node, f"those of all nodes {found}")
    if len(found) != NODES or {d[1] for d in found} != set(range(NODES)):
        raise SystemExit(f"node {node}: expected one device of each of {NODES} nodes")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plugin", default="cuda", help="as of mpmd_jit_with_loop: cuda, rocm")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for all of it")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.node is not None:
        show_node(flags.node, flags.address, flags.plugin)
        return 0
    address = f"127.0.0.1:{free_port()}"
    common = [sys.executable, __file__, "--plugin", flags.plugin, "--address", address]
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    processes = [
        subprocess.Popen([*common, "--node", str(node)], env=environment)
        for node in range(NODES)
    ]
    failed = []
    for node, process in enumerate(processes):
        try:
            status = process.wait(flags.timeout)
        except subprocess.TimeoutExpired:
            status = f"no end in {flags.timeout:g} seconds"
        if status != 0:
            failed.append(f"node {node}: {status}")
    for process in processes:
        process.kill()
    print(f"nodes_gpu: FAILED ({'; '.join(failed)})" if failed else "nodes_gpu: ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
