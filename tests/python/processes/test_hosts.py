"""Processes on several hosts, simulated by network namespaces that a virtual cable connects.

The tests can slow the cable down and cut it. They create and delete the namespaces, which needs
root and the commands ip and tc; they are skipped where one of these is missing.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import jobs
import trainings
from equality import mesh_of
from locations import jaxpp_command

pytestmark = pytest.mark.own_devices

LIMIT = 120
PORT = 17799


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclasses.dataclass
class Hosts:
    """Two hosts, each with an address and one end of the cable."""

    names: list[str]
    addresses: list[str]

    def slow_down(self) -> None:
        for name in self.names:
            delay = f"tc -n {name} qdisc add dev {name} root netem delay 1ms loss 0.5%"
            done = subprocess.run(delay.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"a slow cable: {done.stderr.strip()}")

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", self.names[0], "down")

    def start(self, job: str, mark: str, **environment: str) -> list[subprocess.Popen[str]]:
        """Starts a launcher with one process on each host. UCX must use TCP: otherwise it would
        notice that the hosts are the same machine and use shared memory."""
        started = []
        for node, name in enumerate(self.names):
            launch = [jaxpp_command(), "launch", "-n", "1", "--nodes", "2", "--node", str(node)]
            launch += ["--coordinator", f"{self.addresses[0]}:{PORT}", "--"]
            script = [sys.executable, "-W", "ignore", jobs.__file__, job, "1", mark]
            variables = {**os.environ, "UCX_TLS": "tcp,self", **environment}
            started.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, *launch, *script],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=variables,
                )
            )
        return started


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root and the package iproute2")
    number = os.getpid() % 65536
    names = [f"jpp{number}a", f"jpp{number}b"]
    net = f"10.{200 + number % 50}.{number // 256}"
    found = Hosts(names, [f"{net}.1", f"{net}.2"])
    try:
        _ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces: {error.stderr.strip()}")
    try:
        _ip("netns", "add", names[1])
        cable = ["link", "add", names[0], "netns", names[0], "type", "veth"]
        _ip(*cable, "peer", "name", names[1], "netns", names[1])
        for name, address in zip(names, found.addresses, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", name, "up")
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """The outputs of the processes, which have ended or been killed when this returns."""
    until = time.monotonic() + LIMIT
    try:
        found = [p.communicate(timeout=max(1, until - time.monotonic()))[0] for p in processes]
        return [re.sub(r"^\[\d\] ", "", text, flags=re.M) for text in found]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("slow", [pytest.param(False, marks=pytest.mark.soak), True])
def test_trains_over_the_network_as_one_process_does(
    hosts: Hosts, tmp_path: pathlib.Path, slow: bool
) -> None:
    if slow:
        hosts.slow_down()
    found = outputs(hosts.start("train2", str(tmp_path)))
    expected = set(trainings.train("clipped", mesh_of(2, {})))
    assert expected <= set("\n".join(found).splitlines())


def test_a_cut_cable_ends_the_step_on_both_hosts(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    processes = hosts.start("training", str(tmp_path), JPP_PEER_TIMEOUT="2")
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("] training\n")
    hosts.cut()
    found = outputs(processes)
    for me, text in enumerate(found):
        other = 1 - me
        errors = [line for line in text.splitlines() if "JaxppError: step " in line]
        assert len(errors) == 1, text
        (error,) = errors
        assert f"process {other} at {hosts.addresses[other]} (host " in error
        assert "it has sent nothing for 2 s" in error or "connection was lost" in error
        assert f"jaxpp launch: process {other}, on another node, failed first" in text
        assert processes[me].returncode == 1
