"""Steps and arrays used by several threads at the same time."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import jaxpp.api as jaxpp
import mistakes as m
from equality import assert_equal, make_mesh

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)
FOUR = jaxpp.Std1F1B(4)


def test_steps_from_two_threads(after_plain_step: Any) -> None:
    """Two threads call each of two steps, also while one of them compiles the step."""
    steps = [
        JIT(m.training_step(TWO), make_mesh(2)),
        JIT(m.training_step(jaxpp.GPipe(2)), make_mesh(2)),
    ]
    failures: list[BaseException] = []

    def work(step: Any) -> None:
        try:
            for _ in range(20):
                assert_equal(step(m.params(), m.batch()), after_plain_step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(step,)) for step in steps * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures


def test_reading_while_another_thread_deletes_or_donates() -> None:
    """Readers get the whole array or an error, never freed memory."""
    ones = np.ones((512, 512), np.float32)
    shift = JIT(lambda x: x + 0, make_mesh(2), donate_argnums=0)
    for take in (lambda x: x.delete(), shift):
        for _ in range(20):
            array = shift(ones)
            seen: list[Any] = []

            def read(array: Any = array, seen: list[Any] = seen) -> None:
                try:
                    for _ in range(20):
                        seen.append(float(np.asarray(array).min()))
                except jaxpp.JaxppError as error:
                    seen.append(error.code)

            thread = threading.Thread(target=read)
            thread.start()
            take(array)
            thread.join(60)
            assert set(seen) <= {1.0, "donated"}
            assert array.is_deleted()


def test_one_array_donated_from_two_threads_is_taken_once() -> None:
    step = JIT(m.training_step(TWO), make_mesh(2), donate_argnums=0)
    ws, _ = step(m.params(), m.batch())
    codes: list[str] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait()
        try:
            step(ws, m.batch())
            codes.append("ok")
        except jaxpp.JaxppError as error:
            codes.append(error.code)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(codes) == ["donated"] * 3 + ["ok"]
