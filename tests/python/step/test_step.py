"""The ways in which a step is written, called, compiled, dumped and traced."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)
FOUR = jaxpp.Std1F1B(4)


def assert_equal(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a.shape == np.shape(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=1e-7)


def assert_same_as_jax(step: Any, *args: Any, ranks: int = 2, **options: Any) -> Any:
    """The step pipelined and under plain jax.jit, where its loops run in order."""
    ours = JIT(step, make_mesh(ranks), **options)
    copies = jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)
    results = ours(*copies)  # some may be donated
    assert_equal(results, jax.jit(step)(*args))
    return results


@pytest.fixture(scope="module")
def expected() -> Any:
    return m.plain_training_step(m.params(), m.batch())


# --- Ways to make and call one ----------------------------------------------------------


def test_decorators(expected: Any) -> None:
    mesh = make_mesh(2)

    @partial(JIT, mpmd_mesh=mesh)
    def by_partial(ws: Any, xs: jax.Array) -> Any:
        """Its docstring."""
        return m.training_step(TWO)(ws, xs)

    @JIT(mpmd_mesh=mesh, donate_argnums=())
    def with_parentheses(ws: Any, xs: jax.Array) -> Any:
        return m.training_step(TWO)(ws, xs)

    for step in (by_partial, with_parentheses):
        assert_equal(step(m.params(), m.batch()), expected)
    assert by_partial.__doc__ == "Its docstring."
    assert by_partial.__name__ == "by_partial"


def test_partial_and_callable_objects(expected: Any) -> None:
    def step(ws: Any, xs: jax.Array, schedule: Any) -> Any:
        return m.training_step(schedule)(ws, xs)

    class Step:
        def __call__(self, ws: Any, xs: jax.Array) -> Any:
            return step(ws, xs, TWO)

        def method(self, ws: Any, xs: jax.Array) -> Any:
            return step(ws, xs, TWO)

    for fun in (partial(step, schedule=TWO), Step(), Step().method):
        assert_equal(JIT(fun, make_mesh(2))(m.params(), m.batch()), expected)


def test_keyword_arguments(expected: Any) -> None:
    step = JIT(m.training_step(TWO), make_mesh(2))
    assert_equal(step(m.params(), xs=m.batch()), expected)
    assert_equal(step(xs=m.batch(), ws=m.params()), expected)


def test_static_arguments() -> None:
    calls = []

    def step(ws: Any, scale: float, xs: jax.Array, mode: str = "sum") -> Any:
        calls.append((scale, mode))
        total = jaxpp.treduce(lambda x: m.loss(ws, x), xs, TWO, operation=jaxpp.Add)
        return total * scale if mode == "sum" else total * scale / len(xs)

    plain = float(m.plain_training_step(m.params(), m.batch())[1])
    by_number = JIT(step, make_mesh(2), static_argnums=(1, 3))
    by_name = JIT(step, make_mesh(2), static_argnames=("scale", "mode"))
    from_the_end = JIT(step, make_mesh(2), static_argnums=(1, -1))
    ws, xs = m.params(), m.batch()
    for jitted in (by_number, by_name, from_the_end):
        calls.clear()
        assert float(jitted(ws, 2.0, xs)) == pytest.approx(2 * plain)
        assert float(jitted(ws, 3.0, xs, "mean")) == pytest.approx(plain)
        assert float(jitted(ws, 3.0, xs, mode="mean")) == pytest.approx(plain)
        assert float(jitted(ws, 2.0, xs)) == pytest.approx(2 * plain)
        assert set(calls) == {(2.0, "sum"), (3.0, "mean")}
    assert float(by_name(ws, scale=2.0, xs=xs)) == pytest.approx(2 * plain)
    assert float(by_number(ws, scale=2.0, xs=xs)) == pytest.approx(2 * plain)


def test_compile_with_shapes_alone(expected: Any) -> None:
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (m.params(), m.batch())
    )
    function = JIT(m.training_step(TWO), make_mesh(2))
    compiled = function.compile(*shapes)
    assert_equal(compiled(m.params(), m.batch()), expected)
    assert len(function._compiled) == 1
    # A compiled step called with another batch compiles again.
    other = m.plain_training_step(m.params(), m.batch(5))
    assert_equal(compiled(m.params(), m.batch(5)), other)


def test_trace_and_place_compiles_nothing() -> None:
    plan = JIT(m.training_step(TWO), make_mesh(2)).trace_and_place(m.params(), m.batch())
    assert "run" in plan.text.lower()
    names = [task.name for task in plan.staged.tasks()]
    assert {"fwd_0", "bwd_0", "fwd_1", "bwd_1"} <= {n.split(".")[0] for n in names}


def test_text_of_the_whole_program() -> None:
    step = JIT(m.training_step(TWO), make_mesh(2), donate_argnums=0)
    text = str(step.compile(m.params(), m.batch()).closed_jaxpr)
    for part in ("task_name=fwd_0", "task_name=bwd_1", "mpmd_idx=0", "mpmd_idx=1"):
        assert part in text
    assert re.search(r"= transfer\[\s*src_mpmd_idx=0", text)
    assert re.search(r"src_mpmd_idx=1\s+tgt_mpmd_idx=0", re.sub(r"\s+src_sh.*", "", text))
    assert "src_shardings=[NamedSharding(mesh=Mesh('stage': 1" in text
    assert (
        text.count("src_shardings=[")
        == text.count("tgt_shardings=[")
        == text.count("transfer[")
    )
    assert "delete[mpmd_idx=0]" in text
    assert text.count("task_name=fwd_0") == text.count("task_name=bwd_0") == 3
    # The names of the results were given before.
    body, results = text.split("in (")
    made = re.findall(r"(v\d+):", body)
    assert set(re.findall(r"v\d+", results)) <= set(made)


@pytest.mark.parametrize("schedule", [TWO, jaxpp.GPipe(2), jaxpp.ZeroBubble(2)])
def test_the_text_is_a_program(schedule: Any) -> None:
    """Each name is given once, before it is used, and not used after its deletion."""
    step = JIT(m.training_step(schedule), make_mesh(2), donate_argnums=0)
    text = str(step.compile(m.params(), m.batch(5)).closed_jaxpr)
    lines = re.sub(r"\[\n[^\]]*\]", "[]", text).splitlines()
    made: set[str] = set(re.findall(r"(v\d+):", lines[0]))
    deleted: set[str] = set()
    for line in lines[1:-1]:
        results, _, operands = line.partition(" = ") if " = " in line else ("", "", line)
        used = set(re.findall(r"\bv\d+\b(?!:)", operands))
        assert used <= made - deleted, line
        names = re.findall(r"(v\d+):", results)
        assert not made & set(names), line
        made |= set(names)
        if "delete[" in line:
            deleted |= used
    assert set(re.findall(r"v\d+", lines[-1])) <= made - deleted
    assert (
        deleted and text.count("latency=1") and text.count("latency=") == text.count("_info=")
    )


def test_the_text_has_the_latencies_of_the_schedule() -> None:
    microbatches = 3

    def with_latencies(rows: list[list[Any]]) -> list[list[Any]]:
        def latency(task: Any) -> int:
            backward = task.fwd_or_bwd == jaxpp.TaskType.BWD
            return 10 + 100 * backward + 10 * task.stage_id + task.mubatch_idx

        return [
            [jaxpp.Task(t.stage_id, t.mubatch_idx, t.fwd_or_bwd, latency(t)) for t in row]
            for row in rows
        ]

    step = JIT(m.training_step(m.UserSchedule(with_latencies)), make_mesh(2))
    text = str(step.compile(m.params(), m.batch(microbatches)).closed_jaxpr)
    tasks = re.findall(
        r"task_info=\((\d), TaskType.(\w+)\)\s+latency=(\d+)\s.*\s+call_counter=(\d)", text
    )
    assert len(tasks) == 4 * microbatches
    for stage, kind, latency, microbatch in tasks:
        expected = 10 + 100 * (kind == "BWD") + 10 * int(stage) + int(microbatch)
        assert int(latency) == expected


def test_names_that_the_step_shadows() -> None:
    """A step's own parameters may be called as this package's."""

    def step(fun: Any, mpmd_mesh: jax.Array) -> Any:
        return m.training_step(TWO)(fun, mpmd_mesh)

    ours = JIT(step, make_mesh(2))(fun=m.params(), mpmd_mesh=m.batch())
    assert_equal(ours, m.plain_training_step(m.params(), m.batch()))


# --- Arguments and results --------------------------------------------------------------


def test_donating_the_whole_state() -> None:
    step = JIT(m.training_step(TWO), make_mesh(2), donate_argnames="ws")
    ws = m.params()
    plain = m.params()
    for _ in range(4):
        before = ws
        ws, total = step(ws, m.batch())
        plain, plain_total = m.plain_training_step(plain, m.batch())
        if isinstance(before[0], jaxpp.MpmdArray):
            assert all(w.is_deleted() for w in before)
    assert_equal((ws, total), (plain, plain_total))


def test_inputs_that_are_not_donated_stay_usable(expected: Any) -> None:
    step = JIT(m.training_step(TWO), make_mesh(2))
    ws, _ = step(m.params(), m.batch())
    first = step(ws, m.batch())
    second = step(ws, m.batch())
    assert_equal(ws, expected[0])
    np.testing.assert_array_equal(first[1], second[1])


def test_numpy_and_python_numbers() -> None:
    def step(ws: Any, xs: jax.Array, rate: float, count: int, flag: bool, shift: Any) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(m.loss)(ws, x + shift)

        total, grads = jaxpp.treduce(one, xs, TWO, operation=jaxpp.Add)
        ws = jax.tree.map(lambda w, g: w - rate * g, ws, grads)
        return ws, total, count + 1, jnp.logical_not(flag), rate

    ws, xs = jax.tree.map(np.asarray, (m.params(), m.batch()))
    args = (ws, xs, 0.5, 3, True, np.float32(0.25))
    *_, count, flag, rate = assert_same_as_jax(step, *args)
    assert (int(count), bool(flag), float(rate)) == (4, False, 0.5)
    assert count.weak_type and rate.weak_type


def test_arguments_passed_straight_through() -> None:
    def step(ws: Any, xs: jax.Array, other: Any) -> Any:
        return m.training_step(TWO)(ws, xs), ws, other, xs

    for donated in ((), (0, 1, 2)):
        args = (m.params(), m.batch(), {"a": np.arange(3), "b": None})
        results = assert_same_as_jax(step, *args, donate_argnums=donated)
        again = JIT(step, make_mesh(2), donate_argnums=donated)
        (ws, _), _, other, xs = results
        assert_equal(again(ws, xs, other)[2], {"a": np.arange(3), "b": None})


def test_a_result_returned_twice() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        ws, total = m.training_step(TWO)(ws, xs)
        return ws, total, [total, ws[0]], xs, xs

    results = assert_same_as_jax(step, m.params(), m.batch(), donate_argnums=0)
    results[2][1].delete()
    np.asarray(results[0][0])  # each result has its own memory


def test_results_feed_the_next_step_whatever_their_ranks() -> None:
    def swap(ws: Any, xs: jax.Array) -> Any:
        ws, total = m.training_step(TWO)(ws, xs)
        return ws[::-1], total

    step = JIT(swap, make_mesh(2), donate_argnums=0)
    ws, plain = m.params(), m.params()
    for _ in range(3):
        ws, total = step(ws, m.batch())
        plain, plain_total = m.plain_training_step(plain, m.batch())
        plain = plain[::-1]
    assert_equal((ws, total), (plain, plain_total))


def test_unused_arguments() -> None:
    def step(ws: Any, xs: jax.Array, unused: Any) -> Any:
        return m.training_step(TWO)(ws, xs)

    args = (m.params(), m.batch(), [np.ones(3), 5])
    assert_same_as_jax(step, *args)
    assert_same_as_jax(step, *args, donate_argnums=2)


def test_arguments_of_any_pytree() -> None:
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class State:
        ws: Any
        step: Any

    def step(state: State, xs: jax.Array) -> Any:
        ws, total = m.training_step(TWO)(state.ws, xs)
        return State(ws, state.step + 1), total

    state, _ = assert_same_as_jax(step, State(m.params(), jnp.int32(0)), m.batch())
    assert int(state.step) == 1


def test_closed_over_constants() -> None:
    outer_numpy = np.full((4, 4), 0.25, np.float32)
    outer_jax = jnp.linspace(0.0, 1.0, 4)
    inner_numpy = np.arange(4, dtype=np.float32)
    inner_jax = 0.01 * jnp.ones((4, 4))

    def step(ws: Any, xs: jax.Array) -> Any:
        def loss(ws: Any, x: jax.Array) -> jax.Array:
            x = jaxpp.mark_stage_end(jnp.tanh((x + inner_numpy) @ (ws[0] + inner_jax)))
            x = jaxpp.mark_stage_end(jnp.tanh(x @ (ws[1] + inner_jax)))
            return jnp.mean((x - outer_jax) ** 2)

        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(loss)(ws, x)

        total, grads = jaxpp.treduce(one, xs, TWO, operation=jaxpp.Add)
        return jax.tree.map(lambda w, g: w - g @ outer_numpy + outer_jax, ws, grads), total

    assert_same_as_jax(step, m.params(), m.batch())


# --- Marks ------------------------------------------------------------------------------


def layers_loss(layer: Any) -> Any:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws:
            x = layer(w, x)
        return jnp.mean(x**2)

    return loss


def marked_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jaxpp.mark_stage_end(jnp.tanh(x @ w))


LAYERS = {
    "jit, the same function for each stage": jax.jit(marked_layer),
    "jit in jit": jax.jit(jax.jit(marked_layer)),
    "remat": jax.checkpoint(marked_layer),
    "remat of jit": jax.checkpoint(jax.jit(marked_layer)),
    "jit of remat": jax.jit(jax.checkpoint(marked_layer)),
    "vmap over the batch": lambda w, x: jax.vmap(partial(marked_layer, w))(x),
    "a pytree": lambda w, x: jaxpp.mark_stage_end({"x": jnp.tanh(x @ w), "n": 1})["x"],
    "by its old name": lambda w, x: jaxpp.pipeline_enter_stage(jnp.tanh(x @ w), name="s"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_marks_inside(name: str) -> None:
    step = m.training_step(FOUR, layers_loss(LAYERS[name]))
    args = (m.params(4), m.batch(4))
    ours = JIT(step, make_mesh(4))(*args)
    assert_equal(ours, m.plain_training_step(*args))


def test_scripts_that_do_not_mark_the_last_stage() -> None:
    def loss(ws: Any, x: jax.Array) -> jax.Array:
        for w in ws[:-1]:
            x = marked_layer(w, x)
        return jnp.mean(jnp.tanh(x @ ws[-1]) ** 2)

    args = (m.params(4), m.batch(4))
    ours = JIT(m.training_step(FOUR, loss), make_mesh(4))(*args)
    assert_equal(ours, m.plain_training_step(*args))


def test_marks_are_identities_elsewhere() -> None:
    x = jnp.arange(3.0)
    assert_equal(jaxpp.mark_stage_end({"x": x, "n": 2}), {"x": x, "n": np.int32(2)})
    assert jaxpp.mark_stage_end(()) == ()
    np.testing.assert_array_equal(jax.jit(jaxpp.mark_stage_end)(x), x)
    grads = jax.grad(lambda x: jnp.sum(jaxpp.mark_stage_end(x) ** 2))(x)
    np.testing.assert_array_equal(grads, 2 * x)
    np.testing.assert_array_equal(jax.vmap(jaxpp.mark_stage_end)(x), x)
    _, tangent = jax.jvp(jaxpp.mark_stage_end, (x,), (x,))
    np.testing.assert_array_equal(tangent, x)


# --- Loops ------------------------------------------------------------------------------


def test_forward_only_loop() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            for w in ws:
                x = marked_layer(w, x)
            return x, x.max(), m.unmarked_loss(ws[:1], x)

        operation = (jaxpp.Concat(), jaxpp.Max, jaxpp.Add)
        return jaxpp.treduce(one, xs, FOUR, operation=operation)

    assert_same_as_jax(step, m.params(4), m.batch(5), ranks=4)


def test_two_loops_in_a_step() -> None:
    def step(ws: Any, xs: jax.Array, ys: jax.Array) -> Any:
        ws, total = m.training_step(FOUR)(ws, xs)
        again, second = m.training_step(jaxpp.GPipe(4))(ws, xs)
        held_out = jaxpp.treduce(
            lambda y: m.loss(again, y), ys, jaxpp.Std1F1B(4), operation=jaxpp.Add
        )
        return again, total, second, held_out

    assert_same_as_jax(step, m.params(4), m.batch(4), m.batch(3), ranks=4)


def test_work_around_the_loop() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        xs = xs.reshape(4, -1, xs.shape[-1]) / jnp.linalg.norm(xs)
        ws, total = m.training_step(TWO)(ws, xs)
        norm = jnp.sqrt(sum(jnp.sum(w**2) for w in ws))
        return [w / norm for w in ws], jnp.log(total), {"norm": norm}

    assert_same_as_jax(step, m.params(), m.batch(2, 4))


def test_treduce_in_plain_jax() -> None:
    step = m.training_step(TWO)
    args = (m.params(), m.batch())
    plain = m.plain_training_step(*args)
    assert_equal(step(*args), plain)
    assert_equal(jax.jit(step)(*args), plain)


@pytest.mark.parametrize("axis", [1, -2, 2])
def test_other_microbatch_axes(axis: int) -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(m.loss)(ws, x)

        return jaxpp.treduce(one, xs, TWO, axis=axis, operation=jaxpp.Add)

    xs = jnp.moveaxis(m.batch(5), 0, axis)
    total, grads = JIT(step, make_mesh(2))(m.params(), xs)
    new, plain_total = m.plain_training_step(m.params(), m.batch(5))
    plain_grads = [(w - n) / 0.1 for w, n in zip(m.params(), new, strict=True)]
    assert_equal(total, plain_total)
    assert_equal(grads, plain_grads, 1e-4)


def test_treduce_i_with_the_index() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(i: jax.Array) -> Any:
            assert i.dtype == jnp.int32
            loss, grads = jax.value_and_grad(m.loss)(ws, xs[i] * (i + 1))
            return loss, grads, i, i * 2

        operation = (jaxpp.Add, jaxpp.Add, jaxpp.Concat(), jaxpp.Max())
        return jaxpp.treduce_i(one, 3, TWO, operation)

    _, _, index, largest = assert_same_as_jax(step, m.params(), m.batch())
    assert index.tolist() == [0, 1, 2]
    assert int(largest) == 4


class ExponentialAverage:
    """An operation of a user's own: 0.9 of the state and a tenth of what is new."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, jnp.float32)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return jnp.where(i == 0, value, 0.9 * state + 0.1 * value).astype(jnp.float32)


class KeepLast:
    """Given as a class, without parentheses; does not look at the index."""

    def state(self, n: int, value: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(value.shape, value.dtype)

    def update(self, state: jax.Array, value: jax.Array, i: jax.Array) -> jax.Array:
        return value


def test_operations_of_a_users_own() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(m.loss)(ws, x)
            return loss, grads, loss, x.sum()

        operation = (jaxpp.Add, jaxpp.Add, ExponentialAverage(), KeepLast)
        return jaxpp.treduce(one, xs, TWO, operation=operation)

    _, _, _, last = assert_same_as_jax(step, m.params(), m.batch(4))
    assert float(last) == float(m.batch(4)[-1].sum())


# --- Dumps and traces -------------------------------------------------------------------


def test_a_dump_does_not_follow_links(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a link in the folder leads to may be another user's."""
    theirs, folder = tmp_path / "theirs", tmp_path / "dump"
    theirs.write_text("theirs")
    folder.mkdir()
    (folder / "graph.jpp").symlink_to(theirs)
    monkeypatch.setenv("JPP_DUMP", str(folder))
    JIT(m.training_step(TWO), make_mesh(2)).compile(m.params(), m.batch())
    assert theirs.read_text() == "theirs"
    assert "fwd_0" in (folder / "program.txt").read_text()
    assert (folder / "graph.jpp").read_text().startswith("graph ")


def test_a_step_runs_without_its_flight_recorder(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Where the folder cannot be written to, as on a full disk."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("JPP_FLIGHT", str(tmp_path / "file"))
    jax.block_until_ready(JIT(m.training_step(TWO), make_mesh(2))(m.params(), m.batch()))
    told = capfd.readouterr().err
    assert told.startswith("jaxpp: warning: JPP_FLIGHT: ") and told.count("warning") == 1
    assert told.endswith("Not a directory; nothing is recorded\n")


def test_dump_reads_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("JPP_DUMP", str(tmp_path))
    step = JIT(m.training_step(TWO), make_mesh(2))
    compiled = step.compile(m.params(), m.batch())
    names = {path.name for path in tmp_path.iterdir()}
    assert {"graph.jpp", "partition.txt", "program.txt", "schedule.txt", "check.txt"} <= names
    modules = [path for path in tmp_path.iterdir() if path.suffix == ".mlir"]
    assert modules and all("stablehlo" in path.read_text() for path in modules)
    assert (tmp_path / "program.txt").read_text() == compiled._traced.text
    for part, file in (("partition", "partition.txt"), ("program", "program.txt")):
        printed = subprocess.run(
            [command, "plan", tmp_path / "graph.jpp", "--after", part],
            capture_output=True,
            text=True,
        )
        assert printed.returncode == 0, printed.stderr
        assert printed.stdout == (tmp_path / file).read_text()


def test_trace_of_a_step() -> None:
    step = JIT(m.training_step(FOUR), make_mesh(4), donate_argnums=0)
    compiled = step.compile(m.params(4), m.batch(4))
    with pytest.raises(jaxpp.JaxppError, match="no step has been traced; call set_tracing"):
        compiled.trace_json()
    compiled.set_tracing()
    compiled(m.params(4), m.batch(4))
    events = json.loads(compiled.trace_json())
    events = events["traceEvents"] if isinstance(events, dict) else events
    named = [e["name"] for e in events if e.get("ph") == "X"]
    for stage in range(4):
        assert sum(f"fwd_{stage}" in name for name in named) >= 4
    picture = compiled.draw_trace(columns=60)
    assert all(re.search(rf"^rank +{rank} ", picture, re.M) for rank in range(4)), picture
    assert max(map(len, picture.splitlines())) <= 100
    planned = [rank.peak_bytes for rank in compiled._traced.plan.summary()]
    assert compiled._runtime.trace_peaks() == planned


@pytest.mark.parametrize("ranks,axes", [(4, {}), (2, {"data": 2})])
def test_peaks_are_those_of_the_plan(ranks: int, axes: dict[str, int]) -> None:
    for schedule in (jaxpp.Std1F1B(ranks), jaxpp.GPipe(ranks)):
        step = JIT(m.training_step(schedule), make_mesh(ranks, **axes))
        compiled = step.compile(m.params(ranks), m.batch(6))
        compiled.set_tracing()
        compiled(m.params(ranks), m.batch(6))
        planned = [rank.peak_bytes for rank in compiled._traced.plan.summary()]
        assert compiled._runtime.trace_peaks() == planned


# --- Threads ----------------------------------------------------------------------------


def test_steps_from_two_threads(expected: Any) -> None:
    """Two steps, each called from two threads, one of them compiling meanwhile."""
    steps = [
        JIT(m.training_step(TWO), make_mesh(2)),
        JIT(m.training_step(jaxpp.GPipe(2)), make_mesh(2)),
    ]
    failures: list[BaseException] = []

    def work(step: Any) -> None:
        try:
            for _ in range(20):
                assert_equal(step(m.params(), m.batch()), expected)
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
    """Who reads gets the whole array or an error, never memory that was freed."""
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
