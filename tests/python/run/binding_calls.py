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
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import jaxpp.api as jaxpp  # noqa: E402
from jaxpp import _core  # noqa: E402
from jaxpp.jax_internals.client import serialized_compile_options  # noqa: E402
from jaxpp.run.devices import devices_for  # noqa: E402
from jaxpp.run.lowering import TaskLowerer  # noqa: E402

REFUSALS = (TypeError, ValueError, OverflowError, LookupError, RuntimeError, _core.JaxppError)

HUGE = [2**32, 2**64, 10**40]
NOTHING_BUT_NUMBERS = [None, 1.5, "x", b"x", [], {}, object()]
NO_SEQUENCES = [None, 1, 1.5, object(), _core.OP_CALL]
OTHERS = [None, 1, "x", [], object()]


class Lies(list):
    """A list that is not as long as it says."""

    def __len__(self) -> int:
        return 3


class Raises:
    """Raises on every access."""

    def __len__(self) -> int:
        raise ValueError("no length")

    def __getitem__(self, index: Any) -> Any:
        raise ValueError("no item")

    def __index__(self) -> int:
        raise ValueError("no number")


TRACE = '[{"ph": "X", "name": "fwd_0", "tid": 0, "ts": 0, "dur": 1}]'

# Wrong values for arguments of a kind. What takes anything has none.
WRONG: dict[str, list[Any]] = {
    "number": [-1, *HUGE, *NOTHING_BUT_NUMBERS, Raises()],
    "large number": [-1, 2**64, 10**40, *NOTHING_BUT_NUMBERS, Raises()],
    "float": [None, "x", [], object()],
    "text": [1, 1.5, b"x", [], object()],
    "text, not None": [None, 1, 1.5, b"x", [], object()],
    "numbers": [*NO_SEQUENCES, [None], ["x"], [1.5], [-1], HUGE, Raises(), Lies([1])],
    "numbers or None": [1, 1.5, object(), [None], ["x"], Raises(), Lies([1])],
    "limits": [1, "x", [], [[1], [0]], (), ([1],), (1, None), (None, None), ([1], [0], [0])]
    + [(["x"] * 2, None), ([1] * 2, ["x"] * 2), ([1] * 2, 1), ([1], None), ([1] * 2, [0])]
    + [([-1] * 2, None), (Raises(), None), (Lies([1]), None), ([1] * 2, Lies([0]))],
    "list of numbers": [None, 1, (), {}, [None], ["x"], [1.5], [-1], HUGE, Raises()],
    "type": [None, 1, "x", (), ("float32",), ("float32", None), (1, []), ("float32", ["x"])]
    + [("none", []), ("float32", [10**40]), ("float32", [-1]), ["float32", []]],
    "types": [*NO_SEQUENCES, [None], [("float32", ["x"])], [()], Lies([]), Raises()],
    "object": [*OTHERS],
    "object or None": [1, "x", object()],
    "objects": [*NO_SEQUENCES, [None], [1, 2], [object()], Lies([]), Raises()],
    "objects or None": [*NO_SEQUENCES, [1, 2], [object()], Lies([]), Raises()],
    "no objects": [*NO_SEQUENCES, [None, None]],
    "list": [None, 1, (), {}, [None], [[None]], [[()]], [[], [(1, 2)]], Raises()],
    "texts": [None, 1, "xy", [None], [1], [], ["x", "y"], Raises()],
    "flags": [None, 1, [], [True, False], Raises(), Lies([True])],
    "values": [None, 1, (), {}, [1], [None, None], Raises()],
    "list of bytes": [*NO_SEQUENCES, [None], ["x"], [bytearray(1)], Raises(), Lies([None])],
    "dict": [None, 1, [], {1: 2}, {"x": object()}],
    "bytes": [None, 1, "x", [], object()],
    "path": [1, None, [], "/nowhere/file", "a\0b"],
    "function": [None, 1, []],
    "function or None": [1, [], "x"],
    "capsule": [None, 1, object()],
    "buffer": [None, 1, b"read only", bytearray(1), np.zeros(3, "u1")],
    "anything": [],
}


class Case:
    """A callable with arguments that it takes, and the kind of each."""

    def __init__(self, name: str, function: Callable[[], Any], *args: tuple[str, Any]) -> None:
        self.name = name
        self.function = function  # gives the callable, new where a call uses it up
        self.kinds = [kind for kind, _ in args]
        self.args = [value for _, value in args]

    def wrong(self) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
        for at, kind in enumerate(self.kinds):
            for value in WRONG[kind]:
                args = [*self.args[:at], value, *self.args[at + 1 :]]
                yield f"argument {at} is {type(value).__name__}", args, {}
        required = len(self.args) - (self.name == "Graph.text")
        for count in range(required):
            yield f"{count} arguments", self.args[:count], {}
        yield "one argument more", [*self.args, None], {}
        yield "a keyword", self.args, {"x": 1}


def refuses(what: str, call: Callable[[], Any]) -> bool:
    print(what, flush=True)
    try:
        call()
    except REFUSALS:
        return True
    return False


# --- Valid arguments ----------------------------------------------------------------------


def built_graph() -> _core.Graph:
    graph = _core.Graph("g", 1)
    value = graph.add_arg(("float32", [2]), False, "x")
    graph.add_output(value, "y", value)
    graph.finish()
    return graph


def in_loop() -> _core.Graph:
    graph = _core.Graph("g", 1)
    graph.add_arg(("float32", [2]), False, "x")
    graph.begin_loop(1, 1, None, None)
    return graph


def with_output() -> _core.Graph:
    graph = _core.Graph("g", 1)
    graph.add_output(graph.add_arg(("float32", [2]), False, "x"), "x", _core.NONE)
    return graph


class Step:
    """A small step, and what it is made of."""

    def __init__(self) -> None:
        devices = np.array(jax.devices()[:2])
        mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")

        def step(w: Any, xs: Any) -> Any:
            def loss(w: Any, x: Any) -> Any:
                x = jaxpp.mark_stage_end(jnp.tanh(x @ w[0]))
                return jnp.sum(jaxpp.mark_stage_end(x @ w[1]))

            one = lambda x: jax.grad(loss)(w, x)  # noqa: E731
            return jaxpp.treduce(one, xs, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add)

        self.args = ([jnp.ones((2, 2))] * 2, jnp.ones((2, 2, 2)))
        function = jaxpp.mpmd_jit_with_loop(step, mesh)
        self.compiled = function.compile(*self.args).compiled
        self.traced = self.compiled._traced
        self.plan, self.staged = self.traced.plan, self.traced.staged
        self.graph = self.traced.graph.core
        self.schedules = self.traced.schedules
        self.devices = devices_for(mesh, None)
        self.client = self.devices.client
        self.flat_devices = [d for row in self.devices.indices for d in row]
        self.folder = tempfile.mkdtemp()
        self.saved = self.folder + "/saved"
        self.compiled.save(self.saved)
        specs = None
        self.lowerer = TaskLowerer(self.traced.graph, self.staged, mesh, specs, "cpu")

    def executables(self, kept: Any) -> list[Any]:
        options = serialized_compile_options(1, None)
        rows = zip(self.staged.tasks(), self.plan.donations(), strict=True)
        lowered = [self.lowerer.lower(t, row) if t.ops else None for t, row in rows]
        compile_ = self.client.compile
        return [
            None if one is None else compile_(one.code, options, [], kept, b"", b"").executable
            for one in lowered
        ]

    def runtime(self, executables: list[Any]) -> _core.Runtime:
        return _core.Runtime(
            self.client,
            self.plan,
            1,
            self.flat_devices,
            executables,
            True,
            0,
            False,
            None,
            None,
        )

    def values(self) -> list[_core.Value]:
        leaves = jax.tree.leaves(self.args)
        return self.compiled._values_of(leaves) + self.compiled._constants


def plan_measured(step: Step, measure: Callable[[_core.Staged], Any]) -> _core.Plan:
    return _core.Plan(step.graph, step.schedules, None, measure)


def failed_staged(step: Step) -> _core.Staged:
    """A Staged that its planning has shown before it failed."""
    seen: list[_core.Staged] = []
    try:
        plan_measured(step, lambda staged: seen.append(staged) or [1])
    except ValueError:
        pass
    return seen[0]


def value_of(client: _core.Client) -> _core.Value:
    return _core.Value.put(client, [0], 1, [0], [np.ones(2, "f4")], "float32")


def cases(step: Step) -> list[Case]:
    row = [_core.ScheduleTask((_core.TASK_FWD, False, 0, 0, 0))]
    schedule = step.schedules[0]
    costs = [(1.0, 1.0, 1.0)] * 2
    executables = step.executables(None)
    runtime = step.runtime(executables)
    runtime.set_tracing(True)
    runtime.step(step.values(), False)
    code = next(
        step.lowerer.lower(t, r).code
        for t, r in zip(step.staged.tasks(), step.plan.donations(), strict=True)
        if t.ops
    )
    value, number = value_of(step.client), ("number", 1)
    params = _core.Params(["x"], [True])
    token = b"a token of the tests"
    network = _core.Network("fake", 0, 2, "binding", token, 0)
    other = _core.Network("fake", 1, 2, "other", token, 0)
    new_network = lambda: _core.Network("fake", 0, 2, "binding", token, 0)  # noqa: E731
    new = lambda: _core.Graph("g", 1)  # noqa: E731
    return [
        Case("Graph", lambda: _core.Graph, ("text", "g"), number),
        Case(
            "Graph.add_arg",
            lambda: new().add_arg,
            ("type", ("float32", [2])),
            ("anything", 0),
            ("text", "x"),
        ),
        Case(
            "Graph.add_op",
            lambda: in_loop().add_op,
            ("number", 0),
            ("number", 0),
            ("number", 0),
            ("numbers", [0]),
            ("types", [("float32", [2])]),
            ("float", 1.0),
            ("text", "f"),
            ("text", "w"),
        ),
        Case(
            "Graph.begin_loop",
            lambda: new().begin_loop,
            number,
            number,
            ("text", "s"),
            ("text", "w"),
        ),
        Case(
            "Graph.end_loop",
            lambda: in_loop().end_loop,
            ("numbers", [0]),
            ("numbers", [0]),
            ("types", [("float32", [2])]),
        ),
        Case("Graph.add_output", lambda: in_loop().add_output, number, ("text", "x")),
        Case("Graph.leave_output", lambda: with_output().leave_output, ("numbers", [0])),
        Case("Graph.finish", lambda: new().finish),
        Case("Graph.text", lambda: built_graph().text, ("numbers or None", [8])),
        Case(
            "Schedule.build",
            lambda: _core.Schedule.build,
            ("text, not None", "1f1b"),
            ("number", 2),
            ("number", 2),
            ("number", 4),
            ("anything", 0),
        ),
        Case(
            "Schedule.check",
            lambda: _core.Schedule.check,
            ("text, not None", "1f1b"),
            ("number", 2),
            ("number", 2),
        ),
        Case("Schedule.built_ins", lambda: _core.Schedule.built_ins),
        Case(
            "Schedule.placeholders",
            lambda: _core.Schedule.placeholders,
            ("object", step.graph),
            ("number", 2),
            ("objects or None", [None]),
        ),
        Case(
            "Schedule.one_pass",
            lambda: _core.Schedule.one_pass,
            ("number", 2),
            ("number", 2),
            ("number", 4),
            ("anything", 0),
        ),
        Case(
            "Schedule.from_rows",
            lambda: _core.Schedule.from_rows,
            ("text, not None", "r"),
            number,
            number,
            number,
            ("list", [row]),
        ),
        Case(
            "Schedule.from_csv",
            lambda: _core.Schedule.from_csv,
            ("text, not None", "f"),
            ("text, not None", "0F0,0B0\n"),
        ),
        Case(
            "Schedule.search",
            lambda: _core.Schedule.search,
            ("number", 2),
            ("number", 2),
            ("number", 2),
            ("list", costs),
            ("float", 0.0),
            ("large number", 0),
            ("large number", 1),
            ("float", 0.01),
        ),
        Case("Schedule.csv", lambda: schedule.csv, ("anything", 0)),
        Case("Schedule.sizes", lambda: schedule.sizes),
        Case("Schedule.rows", lambda: schedule.rows),
        Case("Schedule.text", lambda: schedule.text),
        Case("Schedule.stage_ranks", lambda: schedule.stage_ranks),
        Case("Staged.tasks", lambda: step.staged.tasks),
        Case("Staged.op", lambda: step.staged.op, ("number", 0)),
        Case("Staged.args", lambda: step.staged.args),
        Case("Staged.outputs", lambda: step.staged.outputs),
        Case("Staged.origins", lambda: step.staged.origins),
        Case("Staged.notes", lambda: step.staged.notes),
        Case("Staged.text", lambda: step.staged.text),
        Case(
            "Plan",
            lambda: _core.Plan,
            ("object", step.graph),
            ("objects", step.schedules),
            ("limits", None),
            ("function or None", None),
        ),
        Case("Plan.staged", lambda: step.plan.staged),
        Case("Plan.proof", lambda: step.plan.proof),
        Case("Plan.donations", lambda: step.plan.donations),
        Case("Plan.summary", lambda: step.plan.summary),
        Case("Plan.totals", lambda: step.plan.totals),
        Case("Plan.channels", lambda: step.plan.channels),
        Case(
            "Plan.search",
            lambda: step.plan.search,
            ("object", step.graph),
            ("number", 0),
            ("objects", step.schedules),
            ("list", costs),
            ("anything", None),
            ("float", 0.01),
        ),
        Case(
            "Plan.explain_memory",
            lambda: step.plan.explain_memory,
            ("number", 0),
            ("text, not None", "m"),
        ),
        Case(
            "Plan.save",
            lambda: step.plan.save,
            ("path", step.folder + "/plan"),
            ("text, not None", "cpu"),
            ("number", 1),
            ("numbers", [0, 1]),
            ("number", 1),
            ("bytes", b""),
            ("list of bytes", [b"code"]),
            ("numbers", [0 if task.ops else _core.NONE for task in step.staged.tasks()]),
            ("numbers or None", None),
            ("list of bytes", []),
            ("bytes", b""),
        ),
        Case("PlanFile", lambda: _core.PlanFile, ("path", step.saved)),
        Case("PlanFile.plan", lambda: _core.PlanFile(step.saved).plan),
        Case("PlanFile.contents", lambda: _core.PlanFile(step.saved).contents),
        Case("Plan.hashes", lambda: step.plan.hashes),
        Case(
            "Plan.steps_in_flight",
            lambda: step.plan.steps_in_flight,
            ("limits", ([10**9] * 2, [0, 0])),
            ("number", 2),
        ),
        Case("Plan.program_text", lambda: step.plan.program_text, ("function", str)),
        Case("Plan.text", lambda: step.plan.text),
        Case("Client", lambda: _core.Client, ("path", "/nowhere"), ("dict", {})),
        Case("KeyValueStore", lambda: _core.KeyValueStore, *[("function", print)] * 2),
        Case("Client.info", lambda: step.client.info),
        Case(
            "Client.compile",
            lambda: step.client.compile,
            ("bytes", code),
            ("bytes", b""),
            ("numbers", []),
            ("anything", None),
            ("bytes", b""),
            ("bytes", b""),
        ),
        Case(
            "Client.register_custom_call",
            lambda: step.client.register_custom_call,
            ("text, not None", "binding"),
            ("text, not None", "Host"),
            ("capsule", _core.callback_handler("Host")),
            ("number", 0),
        ),
        Case(
            "Value.put",
            lambda: _core.Value.put,
            ("object", step.client),
            ("numbers", [0]),
            ("number", 1),
            ("numbers", [0]),
            ("list", [np.ones(2, "f4")]),
            ("text, not None", "float32"),
        ),
        Case(
            "Value.borrow",
            lambda: _core.Value.borrow,
            ("object", step.client),
            ("numbers", [0]),
            ("number", 1),
            ("numbers", [0]),
            ("list", [jnp.ones(64).__dlpack__()]),
            ("text, not None", "float32"),
        ),
        Case("Value.set_origin", lambda: value.set_origin, ("object", value)),
        Case(
            "Value.read",
            lambda: value.read,
            ("number", 0),
            ("number", 0),
            ("buffer", bytearray(8)),
        ),
        Case(
            "Value.lend",
            lambda: value.lend,
            *[("number", n) for n in (0, 0, 1, 0)],
            ("anything", True),
        ),
        Case("Value.elsewhere", lambda: _core.Value.elsewhere),
        Case("Params", lambda: _core.Params, ("texts", ["x"]), ("flags", [True])),
        Case("Params.claim", lambda: params.claim, ("values", [_core.Value.elsewhere()])),
        Case("Params.lose", lambda: params.lose, ("values", [_core.Value.elsewhere()])),
        Case("Value.delete", lambda: value_of(step.client).delete),
        Case("Value.wait", lambda: value.wait),
        Case("Value.is_ready", lambda: value.is_ready),
        Case(
            "Runtime",
            lambda: _core.Runtime,
            ("object", step.client),
            ("object", step.plan),
            number,
            ("numbers", step.flat_devices),
            ("no objects", executables),
            ("anything", True),
            ("number", 0),
            ("anything", False),
            ("anything", None),
            ("object or None", None),
        ),
        Case(
            "Runtime.step",
            lambda: runtime.step,
            ("objects", step.values()),
            ("anything", False),
        ),
        Case("Runtime.wait", lambda: runtime.wait, ("large number", 1)),
        Case("Runtime.num_steps", lambda: runtime.num_steps),
        Case("Runtime.bare_step", lambda: runtime.bare_step, ("objects", [])),
        Case("Runtime.bare_instructions", lambda: runtime.bare_instructions),
        Case(
            "Runtime.set_checks", lambda: runtime.set_checks, ("anything", 0), ("anything", 0)
        ),
        Case("Runtime.set_tracing", lambda: runtime.set_tracing, ("anything", True)),
        Case("Runtime.trace", lambda: runtime.trace),
        Case("Runtime.measure", lambda: runtime.measure, ("objects", step.values())),
        Case("Runtime.trace_json", lambda: runtime.trace_json, ("number", 1)),
        Case("Runtime.trace_peaks", lambda: runtime.trace_peaks),
        Case(
            "Callback",
            lambda: _core.Callback,
            ("function", print),
            ("list of numbers", [4]),
            ("list of numbers", [4]),
        ),
        Case("Callback.address", lambda: _core.Callback(print, [], []).address),
        Case(
            "device_bytes",
            lambda: _core.device_bytes,
            ("text, not None", "int4"),
            ("large number", 3),
        ),
        Case("check_process", lambda: _core.check_process),
        Case(
            "make_error",
            lambda: _core.make_error,
            ("text, not None", "mesh"),
            ("text, not None", "what was found"),
            ("anything", False),
        ),
        Case("option", lambda: _core.option, ("text, not None", "JPP_LOG")),
        Case("option_ms", lambda: _core.option_ms, ("text, not None", "JPP_PEER_TIMEOUT")),
        Case("misspelt_options", lambda: _core.misspelt_options),
        Case("callback_handler", lambda: _core.callback_handler, ("text, not None", "Host")),
        Case("profile_plugin", lambda: _core.profile_plugin),
        Case("join_traces", lambda: _core.join_traces, ("objects", [TRACE])),
        Case(
            "draw_traces",
            lambda: _core.draw_traces,
            ("objects", [TRACE]),
            ("number", 80),
            ("anything", 0),
        ),
        Case(
            "Network",
            lambda: _core.Network,
            ("text, not None", "fake"),
            ("number", 0),
            ("number", 2),
            ("text, not None", "a"),
            ("bytes", token),
            ("number", 0),
        ),
        Case("Network.address", lambda: network.address),
        Case(
            "Network.connect",
            lambda: new_network().connect,
            ("number", 1),
            ("bytes", other.address()),
        ),
        Case("runtimes_close", lambda: _core.runtimes_close),
        Case("callbacks_close", lambda: _core.callbacks_close),
        Case("stores_close", lambda: _core.stores_close),
        Case(
            "job_join",
            lambda: _core.job_join,
            ("number", 0),
            ("number", 1),
            ("text, not None", "127.0.0.1"),
            ("number", 0),
            ("bytes", token),
        ),
        Case("job_check", lambda: _core.job_check),
        Case("job_has_left", lambda: _core.job_has_left, ("number", 1)),
        Case(
            "job_note_absent",
            lambda: _core.job_note_absent,
            ("number", 1),
            ("text, not None", "why"),
        ),
        Case("job_fail", lambda: _core.job_fail, ("text, not None", "why"), ("anything", True)),
        Case(
            "job_begin_wait",
            lambda: _core.job_begin_wait,
            ("text, not None", "barrier"),
            ("anything", None),
        ),
        Case("job_leave", lambda: _core.job_leave, ("anything", False)),
        Case("job_end", lambda: _core.job_end),
        Case("job_await_end", lambda: _core.job_await_end),
    ]


# --- What is refused beside single arguments ----------------------------------------------


def mixtures(step: Step) -> dict[str, Callable[[], Any]]:
    """Objects that are right each for itself, but not together."""
    other = _core.Schedule.build("gpipe", 3, 3, 2, False)
    graph, unfinished = built_graph(), _core.Graph("g", 2)
    nowhere = _core.Value.put(step.client, [], 1, [], [], "float32")
    small = [_core.Value.put(step.client, [0, 1], 1, [0, 1], [np.ones(1, "f4")] * 2, "float32")]
    values, executables = step.values(), step.executables(None)
    runtime = step.runtime(executables)
    new_runtime = lambda *devices: _core.Runtime(  # noqa: E731
        step.client, step.plan, 1, list(devices), executables, True, 0, False, None, None
    )
    gone = value_of(step.client)
    gone.delete()
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
        "limits of too few ranks": lambda: _core.Plan(step.graph, step.schedules, [1], None),
        "a search on another graph": lambda: step.plan.search(graph, 0, [], [], None, 0.1),
        "a search like another schedule": lambda: step.plan.search(
            step.graph, 0, [other], [(1.0, 1.0, 1.0)] * 3, None, 0.1
        ),
        "a rank that is not there": lambda: step.plan.explain_memory(2, "m"),
        "an op that is not there": lambda: step.staged.op(10**6),
        "too few devices": lambda: new_runtime(0),
        "a device that is not there": lambda: new_runtime(0, 99),
        "no devices a rank": lambda: _core.Runtime(
            step.client, step.plan, 0, [], executables, True, 0, False, None, None
        ),
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
        "a bare step without a bare loop": lambda: runtime.bare_step(values),
        "a shard that is not there": lambda: values[0].read(0, 1, bytearray(16)),
        "a buffer that is too small": lambda: value_of(step.client).read(0, 0, bytearray(1)),
        "a loan of a shard that is not there": lambda: values[0].lend(0, 1, 1, 0, True),
        "a deleted array": gone.wait,
        "a loan of a deleted array": lambda: gone.lend(0, 0, 1, 0, True),
        "a capsule of something else": lambda: _core.Value.borrow(
            step.client, [0], 1, [0], [_core.callback_handler("Host")], "float32"
        ),
        "memory for a device that is not there": lambda: _core.Value.borrow(
            step.client, [0], 1, [99], [jnp.ones(64).__dlpack__()], "float32"
        ),
        "items of another size": lambda: _core.Value.put(
            step.client, [0], 1, [0], [np.ones(2, "f8")], "float32"
        ),
        "code that is none": lambda: step.client.compile(b"none", b"", [], None, b"", b""),
        "kinds of no reduction": lambda: in_loop().end_loop([999], [0], [("float32", [2])]),
        "flags of more bits": lambda: in_loop().add_op(0, 256, 0, [], [], 1.0, "f", None),
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
    """Objects that nobody has filled in."""
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
    """Every method refuses a self of another type; raises the last one's refusal."""
    methods = [m for m in vars(kind).values() if hasattr(m, "__objclass__") and callable(m)]
    for method in methods:
        try:
            method(object())
        except TypeError:
            continue
        raise AssertionError(f"{method} takes any self")
    raise TypeError


def functions() -> set[str]:
    """All that can be called in the extension but errors and records."""
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
