"""Calls everything in `jaxpp._core` with wrong arguments and checks that each is refused.

A crash ends the process, so test_binding.py runs this file in a separate one. It prints each
call before making it.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from binding_cases import TRACE, Source, cases, given_in  # noqa: E402
from binding_objects import Step, built_graph, failed_staged, in_loop, plan_measured, value_of  # noqa: E402
from jaxpp import _core  # noqa: E402

REFUSALS = (TypeError, ValueError, OverflowError, LookupError, RuntimeError, _core.JaxppError)


def refuses(what: str, call: Callable[[], Any]) -> bool:
    print(what, flush=True)
    try:
        call()
    except REFUSALS:
        return True
    return False


def mixtures(step: Step) -> dict[str, Callable[[], Any]]:
    """Calls with objects that are valid individually, but not in combination."""
    other = _core.Schedule.build("gpipe", 3, 3, 2, False)
    graph, unfinished = built_graph(), _core.Graph("g", 2)
    nowhere = _core.Value.put(step.client, [], 1, [], [], "float32", "device")
    ones = [np.ones(1, "f4")] * 2
    small = [_core.Value.put(step.client, [0, 1], 1, [0, 1], ones, "float32", "device")]
    values, executables = step.values(), step.executables(None)
    no_dims: list[Any] = [None] * len(executables)
    runtime = step.runtime(executables)
    copied = next(t for t, copies in enumerate(step.plan.copies()) if copies)
    copying = [None if t == copied else one for t, one in enumerate(executables)]
    new_runtime = lambda *devices: _core.Runtime(  # noqa: E731
        step.client, step.plan, 1, list(devices), executables, no_dims, True, 0, None, None
    )
    copying_runtime = lambda dims: step.runtime(  # noqa: E731
        copying, [dims if t == copied else None for t in range(len(copying))]
    )
    gone = value_of(step.client)
    gone.delete()
    block = np.array([0, 64])
    wanted = _core.Wanted("x", "float32", 1, 1, [0], [1], 1, block, False, True, 0, "device")
    handlers, capsules = [_core.callback_handler("Host")], [jnp.ones(64).__dlpack__()]
    foreign, part = given_in("foreign", 64), given_in("client", 64)
    return {
        "schedules of other sizes": lambda: _core.Plan(step.graph, [other], None, None),
        "too many schedules": lambda: _core.Plan(step.graph, step.schedules * 2, None, None),
        "an unfinished graph": lambda: _core.Plan(unfinished, [], None, None),
        "a measure that raises": lambda: plan_measured(step, lambda staged: int("x")),
        "a part of a plan that failed": lambda: failed_staged(step).tasks(),
        "the text of an unfinished graph": unfinished.text,
        "a finished graph": lambda: graph.add_output(0, "x", _core.NONE),
        "bytes of too few values": lambda: plan_measured(step, lambda staged: [1]),
        "bytes that are none": lambda: plan_measured(step, lambda staged: "x"),
        "limits of too few ranks": lambda: _core.Plan(
            step.graph, step.schedules, ([1], None), None, False
        ),
        "a search on another graph": lambda: step.plan.search(
            graph, 0, [], [], None, 0.1, False
        ),
        "a search like another schedule": lambda: step.plan.search(
            step.graph, 0, [other], [(1.0, 1.0, 1.0)] * 3, None, 0.1, False
        ),
        "a rank that is not there": lambda: step.plan.explain_memory(2, "m"),
        "an op that is not there": lambda: step.staged.op(10**6),
        "too few devices": lambda: new_runtime(0),
        "a device that is not there": lambda: new_runtime(0, 99),
        "no devices a rank": lambda: _core.Runtime(
            step.client, step.plan, 0, [], executables, no_dims, True, 0, None, None
        ),
        "dims of too few tasks": lambda: step.runtime(executables, no_dims[1:]),
        "dims of too few results": lambda: copying_runtime([2]),
        "shards that do not divide": lambda: copying_runtime([2, 3]),
        "shards without elements": lambda: copying_runtime([2, 0]),
        "no executables": lambda: step.runtime([None] * len(executables)),
        "executables in another order": lambda: step.runtime(executables[::-1] + [None]),
        "a trace before the first step": runtime.trace,
        "a drawing without an end": lambda: _core.draw_traces([TRACE], 2**32 - 1, False),
        "a drawing without a column": lambda: _core.draw_traces([TRACE], 0, False),
        "no trace": lambda: _core.join_traces([]),
        "traces that are none": lambda: _core.join_traces(["{}"]),
        "traces without a clock": lambda: _core.join_traces([TRACE, TRACE]),
        "no step": lambda: runtime.trace_json(0),
        "more steps than are kept": lambda: runtime.trace_json(9),
        "a step of too few values": lambda: runtime.step(values[:-1], False),
        "a step of values of another shape": lambda: runtime.step(small * len(values), True),
        "a step of values on no rank": lambda: runtime.step([nowhere] * len(values), False),
        "a shard that is not there": lambda: values[0].read(0, 1, bytearray(16)),
        "a buffer that is too small": lambda: value_of(step.client).read(0, 0, bytearray(1)),
        "a loan of a shard that is not there": lambda: values[0].lend(0, 1, 1, 0, True),
        "a deleted array": gone.wait,
        "a loan of a deleted array": lambda: gone.lend(0, 0, 1, 0, True),
        "a capsule of something else": lambda: wanted.take(
            step.client, [0], Source(handlers), foreign, None, "float32", False
        ),
        "too few capsules": lambda: wanted.take(
            step.client, [0], Source([]), foreign, None, "float32", False
        ),
        "a block of another shape": lambda: wanted.take(
            step.client, [0], Source(), foreign, None, "float32", True
        ),
        "memory for a device that is not there": lambda: wanted.take(
            step.client, [99], Source(capsules), foreign, None, "float32", False
        ),
        "an argument on a rank without devices": lambda: wanted.take(
            step.client, [], Source(capsules), foreign, None, "float32", False
        ),
        "a part that is no Value": lambda: wanted.take(
            step.client, [0], Source(), part, None, "float32", False
        ),
        "items of another size": lambda: _core.Value.put(
            step.client, [0], 1, [0], [np.ones(2, "f8")], "float32", "device"
        ),
        "code that is none": lambda: step.client.compile(b"none", b"", [], None, b"", b""),
        "kinds of no reduction": lambda: in_loop().end_loop([999], [0], [("float32", [2])]),
        "flags of more bits": lambda: in_loop().add_op(
            0, 256, 0, [], [], 1.0, "f", None, 0, ()
        ),
        "a latency of more bits": lambda: _core.Schedule.from_rows(
            "r", 1, 1, 1, [[(1, False, 2**16, 0, 0)]]
        ),
        "a task of no kind": lambda: _core.Schedule.from_rows(
            "r", 1, 1, 1, [[(257, False, 1, 0, 0)]]
        ),
        "a stage that is not there": lambda: _core.Schedule.from_rows(
            "r", 1, 1, 1, [[(1, False, 1, 7, 0)]]
        ),
    }


def unmade(step: Step) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Attempts to create objects without initialising them."""
    made = [step.graph, step.schedules[0], step.staged, step.plan, step.client]
    made += [step.compiled._runtime, value_of(step.client), _core.Callback(print, [], [])]
    made += [next(filter(None, step.executables(None)))]
    for each in made:
        kind = type(each)
        yield f"{kind.__name__}.__new__", lambda kind=kind: kind.__new__(kind)
        yield f"object.__new__({kind.__name__})", lambda kind=kind: object.__new__(kind)
        yield f"{kind.__name__}.__new__(int)", lambda kind=kind: kind.__new__(int)
        yield f"a subclass of {kind.__name__}", lambda kind=kind: type("Sub", (kind,), {})
        yield f"a copy of {kind.__name__}", lambda each=each: copy.copy(each)
        yield f"a pickle of {kind.__name__}", lambda each=each: pickle.dumps(each)
        yield f"methods of {kind.__name__}", lambda kind=kind: methods_of_another(kind)
    records = {type(r) for r in (step.client.info(), step.plan.summary()[0])}
    for record in records:
        yield f"{record.__name__} of nothing", lambda record=record: record(())
        yield f"{record.__name__} without an argument", record


def methods_of_another(kind: type) -> None:
    """Checks that every method refuses a self of another type; raises TypeError if all do."""
    methods = [m for m in vars(kind).values() if hasattr(m, "__objclass__") and callable(m)]
    for method in methods:
        try:
            method(object())
        except TypeError:
            continue
        raise AssertionError(f"{method} takes any self")
    raise TypeError


def functions() -> set[str]:
    """The names of all callables in the extension except errors and records."""
    found = set()
    for name, value in vars(_core).items():
        if name.startswith("_") or not callable(value):
            continue
        if not isinstance(value, type):
            found.add(name)
        elif not issubclass(value, tuple | Exception):
            if name not in ("Schedule", "Executable", "Staged", "Value"):  # cannot be called
                found.add(name)
            found |= {
                f"{name}.{m}"
                for m, f in vars(value).items()
                if not m.startswith("_") and (callable(f) or isinstance(f, staticmethod))
            }
    return found


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    step = Step()
    known = cases(step)
    assert {case.name for case in known} == functions(), functions() ^ {c.name for c in known}
    calls = [*mixtures(step).items(), *unmade(step)]
    for case in known:
        for what, args, kwargs in case.wrong():
            call = functools.partial(lambda c, a, k: c.function()(*a, **k), case, args, kwargs)
            calls.append((f"{case.name}: {what}", call))
    taken = [what for what, call in calls if not refuses(what, call)]
    assert not taken, "\n".join(["taken:", *taken])
    print("all refused")


if __name__ == "__main__":
    sys.exit(main())
