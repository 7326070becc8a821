"""All callables in `jaxpp._core`, with arguments that they accept, and invalid values for each
kind of argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from binding_objects import Step, built_graph, in_loop, value_of, with_output
from jaxpp import _core

HUGE = [2**32, 2**64, 10**40]
NOTHING_BUT_NUMBERS = [None, 1.5, "x", b"x", [], {}, object()]
NO_SEQUENCES = [None, 1, 1.5, object(), _core.OP_CALL]
OTHERS = [None, 1, "x", [], object()]


class Lies(list):
    """A list with a wrong length."""

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

# Invalid values by kind of argument.
WRONG: dict[str, list[Any]] = {
    "number": [-1, *HUGE, *NOTHING_BUT_NUMBERS, Raises()],
    "large number": [-1, 2**64, 10**40, *NOTHING_BUT_NUMBERS, Raises()],
    "float": [None, "x", [], object()],
    "text": [1, 1.5, b"x", [], object()],
    "text, not None": [None, 1, 1.5, b"x", [], object()],
    "memory": [None, 1, b"device", "", "unpinned_host", "device\0", []],
    "numbers": [*NO_SEQUENCES, [None], ["x"], [1.5], [-1], HUGE, Raises(), Lies([1])],
    "numbers or None": [1, 1.5, object(), [None], ["x"], Raises(), Lies([1])],
    "limits": [1, "x", [], [[1], [0]], (), ([1],), (1, None), (None, None), ([1], [0], [0])]
    + [(["x"] * 2, None), ([1] * 2, ["x"] * 2), ([1] * 2, 1), ([1], None), ([1] * 2, [0])]
    + [([-1] * 2, None), (Raises(), None), (Lies([1]), None), ([1] * 2, Lies([0]))],
    "floats": [*NO_SEQUENCES, [None], ["x"], [-1.0, 1.0], [float("nan")] * 2, Raises()],
    "collectives": [None, 1, (), {}, [None], [1], [()], [("x",)], [(0, "t", "k", "a", -1, 1)]]
    + [[(99, "t", "k", "a", 1, 1)], [(0, None, "k", "a", 1, 1)], [[0, "t", "k", "a", 1, 1]]],
    "list of numbers": [None, 1, (), {}, [None], ["x"], [1.5], [-1], HUGE, Raises()],
    "type": [None, 1, "x", (), ("float32",), ("float32", None), (1, []), ("float32", ["x"])]
    + [("none", []), ("float32", [10**40]), ("float32", [-1]), ["float32", []]]
    + [("float32", [2], memory) for memory in (None, 1, "vmem")],
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
    "blocks": [None, 1, "x", [], b"", bytearray(1), np.zeros(3, "u1")],
    "buffer": [None, 1, b"read only", bytearray(1), np.zeros(3, "u1")],
    "anything": [],
}


class Case:
    """A callable with arguments that it accepts, and the kind of each."""

    def __init__(self, name: str, function: Callable[[], Any], *args: tuple[str, Any]) -> None:
        self.name = name
        self.function = function  # returns the callable, a new one if calls consume it
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


class Source:
    """An argument's source: two numbers on the host, or the given DLPack capsules."""

    def __init__(self, capsules: list[Any] | None = None) -> None:
        self._capsules = capsules

    def value(self, part: int) -> Any:
        return part

    def capsules(self, blocks: list[int]) -> list[Any] | None:
        return self._capsules

    def host(self, block: int, dtype: str) -> Any:
        return np.ones(2, "f4")


def given_in(home: str, size: int) -> _core.Given:
    """A description of an array whose only block every device can read."""
    place, block = np.array([0, _core.ANY_RANK, 0, 1]), np.array([0, size])
    return _core.Given(home, "float32", 1, home == "client", 8, 1, place, block)


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
    block = np.array([0, 2])
    wanted = _core.Wanted("x", "float32", 1, 1, [0], [1], 1, block, False, True, 0, "device")
    given = given_in("host", 2)
    token = b"a token of the tests"
    network = _core.Network("ucx", 0, 2, "127.0.0.1", token, 0)
    other = _core.Network("ucx", 1, 2, "127.0.0.1", token, 0)
    new_network = lambda: _core.Network("ucx", 0, 2, "127.0.0.1", token, 0)  # noqa: E731
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
            ("number", 0),
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
        Case("Graph.give_arg", lambda: with_output().give_arg, ("numbers", [0])),
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
        Case(
            "Graph.set_partial", lambda: step.graph.set_partial, ("number", 0), ("numbers", [])
        ),
        Case("Graph.set_sharded", lambda: step.graph.set_sharded),
        Case("Schedule.csv", lambda: schedule.csv, ("anything", 0)),
        Case("Schedule.sizes", lambda: schedule.sizes),
        Case("Schedule.rows", lambda: schedule.rows),
        Case("Schedule.text", lambda: schedule.text),
        Case("Schedule.stage_ranks", lambda: schedule.stage_ranks),
        Case("Staged.tasks", lambda: step.staged.tasks),
        Case("Staged.op", lambda: step.staged.op, ("number", 0)),
        Case("Staged.repeats", lambda: step.staged.repeats, ("number", 0)),
        Case("Staged.args", lambda: step.staged.args),
        Case("Staged.outputs", lambda: step.staged.outputs),
        Case("Staged.origins", lambda: step.staged.origins),
        Case("Staged.packed", lambda: step.staged.packed),
        Case("Staged.accumulators", lambda: step.staged.accumulators),
        Case("Staged.notes", lambda: step.staged.notes),
        Case("Staged.text", lambda: step.staged.text),
        Case(
            "Plan",
            lambda: _core.Plan,
            ("object", step.graph),
            ("objects", step.schedules),
            ("limits", None),
            ("function or None", None),
            ("anything", False),
        ),
        Case(
            "Plan.partition",
            lambda: _core.Plan.partition,
            ("object", step.graph),
            ("objects", step.schedules),
        ),
        Case("Plan.explain", lambda: step.plan.explain, ("collectives", [])),
        Case("Plan.staged", lambda: step.plan.staged),
        Case("Plan.proof", lambda: step.plan.proof),
        Case("Plan.donations", lambda: step.plan.donations),
        Case("Plan.copies", lambda: step.plan.copies),
        Case("Plan.summary", lambda: step.plan.summary),
        Case("Plan.costs", lambda: step.plan.costs, ("collectives", [])),
        Case(
            "Plan.search",
            lambda: step.plan.search,
            ("object", step.graph),
            ("number", 0),
            ("objects", step.schedules),
            ("list", costs),
            ("anything", None),
            ("float", 0.01),
            ("anything", False),
        ),
        Case(
            "Plan.explain_memory",
            lambda: step.plan.explain_memory,
            ("number", 0),
            ("text, not None", "m"),
        ),
        Case(
            "Plan.predict",
            lambda: step.plan.predict,
            ("objects", [step.trace]),
            ("numbers", [0, 1]),
            *[("number", 0)] * 2,
            ("float", 0.0),
            ("number", 0),
            *[("float", 0.0)] * 4,
            *[("number", 0)] * 2,
        ),
        Case(
            "Plan.save",
            lambda: step.plan.save,
            ("path", step.folder + "/plan"),
            ("text, not None", "cpu"),
            ("number", 1),
            ("numbers", [0, 1]),
            ("texts", ("data",)),
            ("numbers", [1]),
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
        Case("Plan.check_host_limit", lambda: step.plan.check_host_limit, ("limits", None)),
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
        Case("Client.warm_up", lambda: step.client.warm_up),
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
            ("memory", "pinned_host"),
        ),
        Case(
            "Wanted",
            lambda: _core.Wanted,
            ("text, not None", "x"),
            ("text, not None", "float32"),
            number,
            ("large number", 1),
            ("numbers", [0]),
            ("numbers", [1]),
            ("number", 1),
            ("blocks", np.array([0, 2])),
            ("anything", False),
            ("anything", True),
            ("large number", 0),
            ("memory", "device"),
        ),
        Case(
            "Given",
            lambda: _core.Given,
            ("text, not None", "host"),
            ("text, not None", "float32"),
            number,
            ("large number", 1),
            ("large number", 8),
            ("number", 1),
            ("blocks", np.array([0, 0, 0, 1])),
            ("blocks", np.array([0, 2])),
        ),
        Case(
            "Wanted.decide",
            lambda: wanted.decide,
            ("object", given),
            ("text", None),
            ("anything", False),
        ),
        Case(
            "Wanted.take",
            lambda: wanted.take,
            ("object", step.client),
            ("numbers", [0]),
            ("anything", Source()),
            ("object", given),
            ("text", None),
            ("text, not None", "float32"),
            ("anything", False),
        ),
        Case(
            "Wanted.gather",
            lambda: wanted.gather,
            ("number", 0),
            ("list", [np.ones(2, "f4")]),
            ("blocks", np.array([0, 2])),
            ("buffer", bytearray(8)),
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
            ("anything", None),
            ("object or None", None),
        ),
        Case(
            "Runtime.step",
            lambda: runtime.step,
            ("objects", step.values()),
            ("anything", False),
        ),
        Case(
            "Runtime.collectives",
            lambda: runtime.collectives,
            ("texts", ("stage",)),
            ("numbers", [1]),
        ),
        Case("Runtime.memory", lambda: runtime.memory, ("number", 0)),
        Case("Runtime.wait", lambda: runtime.wait, ("large number", 1)),
        Case("Runtime.num_steps", lambda: runtime.num_steps),
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
        Case(
            "cut_stages",
            lambda: _core.cut_stages,
            ("floats", [1.0, 2.0]),
            ("numbers", [0]),
            ("numbers", [8]),
            ("numbers", [0]),
            ("numbers", [1]),
            ("number", 2),
        ),
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
            ("text, not None", "ucx"),
            ("number", 0),
            ("number", 2),
            ("text, not None", "127.0.0.1"),
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
        Case(
            "job_divide_ranks",
            lambda: _core.job_divide_ranks,
            ("numbers", [0, 1]),
            ("number", 2),
            ("number", 0),
            ("anything", False),
            ("anything", False),
        ),
        Case(
            "job_compare_facts",
            lambda: _core.job_compare_facts,
            ("number", 0),
            ("text, not None", "a\tb"),
            ("number", 1),
            ("text, not None", "a\tb"),
        ),
        Case(
            "job_compare_programs",
            lambda: _core.job_compare_programs,
            ("number", 0),
            ("text, not None", "a\tb"),
            ("number", 1),
            ("text, not None", "a\tb"),
        ),
        Case("job_leave", lambda: _core.job_leave, ("anything", False)),
        Case("job_end", lambda: _core.job_end),
        Case("job_await_end", lambda: _core.job_await_end),
    ]
