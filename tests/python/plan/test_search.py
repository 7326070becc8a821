"""Schedules that are searched for or read from files: when the search ends, what is refused."""

from __future__ import annotations

import math
import os
import pathlib
import signal
from types import FrameType
from typing import Any

import pytest

import jaxpp.api as jaxpp
from jaxpp.schedules import CsvSchedule, Searched

COSTS = [(1.0, 1.0, 1.0), (2.0, 2.0, 2.0), (1.0, 3.0, 1.0), (2.0, 1.0, 1.0)]


def test_a_signal_handler_ends_a_search() -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            Searched(COSTS, 2, seconds=1e5).build(8, 2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, "2", None])
def test_a_search_has_an_end(seconds: object) -> None:
    with pytest.raises(jaxpp.JaxppError, match="seconds=.*expected a number of at least 0"):
        Searched(COSTS, 2, seconds=seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [{"memory_limit": -1}, {"activation_bytes": 2**64}])
def test_bytes_are_bytes(sizes: dict[str, int]) -> None:
    with pytest.raises(jaxpp.JaxppError, match="expected a number of bytes"):
        Searched(COSTS, 2, **sizes)


@pytest.mark.parametrize("cost", [math.nan, math.inf, -1.0, 1e200, 5e-324])
def test_costs_are_times(cost: float) -> None:
    with pytest.raises(jaxpp.JaxppError, match="(all|numbers of) at least 0"):
        Searched([COSTS[0], (1.0, cost, 1.0)], 2, seconds=0).build(2, 2)


@pytest.mark.parametrize("cost", [(1.0, 2.0), 3, ("a", 1, 1), None, (1, 2, 3, 4)])
def test_costs_are_three_numbers(cost: object) -> None:
    with pytest.raises(jaxpp.JaxppError, match=r"expected a list with \(forward, "):
        Searched([COSTS[0], cost], 2, seconds=0).build(2, 2)  # type: ignore[list-item]


@pytest.mark.parametrize("text", [b"0F0,0B0\r\n", b"\xef\xbb\xbf0F0,0B0"])
def test_csv_files_in_odd_places(tmp_path: pathlib.Path, text: bytes) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.csv"
    with open(path, "wb") as file:
        file.write(text)
    assert CsvSchedule(os.fsdecode(path)).num_stages == 1
    with open(path, "wb") as file:
        file.write(text + b"\xff\xfe\x00,")
    with pytest.raises(jaxpp.JaxppError, match=r"caf\\udce9.csv:\d: .*byte 0xff") as raised:
        CsvSchedule(os.fsdecode(path))
    str(raised.value).encode()


def test_csv_file_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(jaxpp.JaxppError, match="none.csv': No such file.*expected a CSV file"):
        CsvSchedule(tmp_path / "none.csv")
    with pytest.raises(jaxpp.JaxppError, match="Is a directory"):
        CsvSchedule(tmp_path)


def test_activations_are_weighed() -> None:
    even = [(1.0, 1.0, 1.0)] * 8
    limits: dict[str, Any] = {"memory_limit": 40, "activation_bytes": 10, "seconds": 0.1}
    schedule = Searched(even, 8, **limits, host_bandwidth=3.4, input_bytes=1)
    assert schedule.build(32, 8).sizes().microbatches == 32
    found = schedule.found[32]
    kept, offloaded, recomputed = found.makespans
    assert found.activations == "offloaded"
    assert offloaded == found.makespan == 117
    assert kept > offloaded < recomputed
    schedule = Searched(even, 8, **limits, host_bandwidth=1, input_bytes=1)
    schedule.build(32, 8)
    assert schedule.found[32].activations == "recomputed"
    with pytest.raises(jaxpp.JaxppError, match="host_bandwidth=-1; expected a number of at"):
        Searched(even, 8, host_bandwidth=-1)
    with pytest.raises(jaxpp.JaxppError, match="expected at most 10 bytes, found 11"):
        Searched(even, 8, **limits, input_bytes=11).build(32, 8)
