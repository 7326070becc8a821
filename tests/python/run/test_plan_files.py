"""Plans saved to a file and run elsewhere: in a process without the model, and in C alone."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lammps_jax_pjrt_cpu
import numpy as np
import pytest

import jaxpp.api as jaxpp
import models
from equality import (
    Problem,
    compiler_options,
    make_mesh,
    mesh_of,
    pipelined_step,
    usual_specs,
)

HERE = pathlib.Path(__file__).parent


def compiled_step(
    problem: Problem, schedule: Any, mesh: Any, **options: Any
) -> tuple[Any, tuple[Any, ...]]:
    if mesh.lowering_mesh().size > 1:
        options["in_specs"] = usual_specs(problem, mesh)
    step = jaxpp.mpmd_jit_with_loop(
        pipelined_step(problem, schedule),
        mesh,
        donate_argnums=(0, 1),
        compiler_options=compiler_options(),
        **options,
    )
    args = (problem.params, problem.optimizer.init(problem.params), problem.batch)
    return step.compile(*args), args


def trained(step: Any, args: tuple[Any, ...], steps: int, states: int = 2) -> Any:
    args = jax.tree.map(lambda leaf: leaf.copy(), args)  # because the state is donated
    for _ in range(steps):
        results = step(*args)
        args = (*results[:states], *args[states:])
    return results


def run_elsewhere(
    plan: pathlib.Path, args: Any, tmp_path: pathlib.Path, steps: int, states: int = 2
) -> list[np.ndarray]:
    """Runs the plan in another process; returns the leaves of the last step's results."""
    leaves = {f"leaf{k}": np.asarray(leaf) for k, leaf in enumerate(jax.tree.leaves(args))}
    np.savez(tmp_path / "arguments.npz", **leaves)
    files = [str(plan), str(tmp_path / "arguments.npz"), str(tmp_path / "results.npz")]
    command = [sys.executable, str(HERE / "run_plan.py"), *files, str(steps), str(states)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "results.npz") as file:
        return [file[f"leaf{k}"] for k in range(len(file.files))]


def assert_same_bits(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


# --- Another process --------------------------------------------------------------------

PROBLEMS: dict[str, tuple[Callable[[], Problem], Any]] = {
    "mlp": (lambda: models.mlp([1, 1], 4), jaxpp.Std1F1B(2)),
    "zero-bubble": (lambda: models.mlp([1, 1], 4), jaxpp.ZeroBubble(2)),
    "interleaved": (lambda: models.mlp([1] * 4, 4), jaxpp.Interleaved1F1B(4, 2)),
    "tied": (lambda: models.transformer(2, 2, 2, tied=True), jaxpp.GPipe(2)),
}


@pytest.mark.sample(2)
@pytest.mark.soak("1-device-tied")
@pytest.mark.parametrize("name", PROBLEMS)
def test_trains_the_same_in_another_process(
    name: str, any_mesh2: Any, tmp_path: pathlib.Path
) -> None:
    make, schedule = PROBLEMS[name]
    step, args = compiled_step(make(), schedule, any_mesh2)
    step.save(tmp_path / "plan")
    here = trained(step, args, 3)
    there = run_elsewhere(tmp_path / "plan", args, tmp_path, 3)
    assert_same_bits(here, there)


# --- The same process -------------------------------------------------------------------


def save_and_load(step: Any, tmp_path: pathlib.Path, **options: Any) -> Any:
    step.save(tmp_path / "plan")
    return jaxpp.load(tmp_path / "plan", **options)


def squares(xs: Any, ws: Any, schedule: Any = None, operation: Any = None) -> Any:
    """A forward-only step of two stages."""

    def one(x: Any) -> Any:
        for w in ws:
            x = jaxpp.mark_stage_end((x * w).astype(x.dtype))
        return x

    schedule = schedule or jaxpp.Std1F1B(2)
    return jaxpp.treduce(one, xs, schedule=schedule, operation=operation or jaxpp.Concat())


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int4", "int8", "bool"]
)
def test_element_types(name: str, mesh2: Any, tmp_path: pathlib.Path) -> None:
    xs = jnp.arange(24).reshape(3, 8).astype(name)
    ws = [jnp.ones(8, name)] * 2
    step = jaxpp.mpmd_jit_with_loop(squares, mesh2).compile(xs, ws)
    assert_same_bits(save_and_load(step, tmp_path)(xs, ws), step(xs, ws))


def test_constants_and_keys(mesh2: Any, tmp_path: pathlib.Path) -> None:
    offset, words = jnp.linspace(0, 1, 8), jnp.arange(8).astype("int4")
    closed = jax.random.key(7, impl="rbg")

    def step(w: Any, key: Any, xs: Any) -> Any:
        def one(x: Any) -> Any:
            x = jaxpp.mark_stage_end(x * w + offset + words.astype(x.dtype))
            x = x + jax.random.normal(key, x.shape) + jax.random.normal(closed, x.shape)
            return jnp.sum(jaxpp.mark_stage_end(x))

        total = jaxpp.treduce(one, xs, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add)
        return w * total, jax.random.fold_in(key, 1)

    args = (jnp.ones(8), jax.random.key(3), jnp.ones((3, 2, 8)))
    here = jaxpp.mpmd_jit_with_loop(step, mesh2).compile(*args)
    loaded = save_and_load(here, tmp_path)
    for _ in range(2):
        (a, key), (b, key_b) = here(*args), loaded(*args)
        assert_same_bits(a, b)
        assert key_b.dtype == key.dtype == args[1].dtype
        data = [jax.random.key_data(k.first_mpmd_replica) for k in (key, key_b)]
        assert_same_bits(*data)
        args = (a, key, args[2])


def test_leaves_by_parts(mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(ws: Any, xs: Any) -> Any:
        def loss(ws: Any, x: Any) -> Any:
            for k in range(4):
                x = jnp.tanh(x @ ws[k])
                x = jaxpp.mark_stage_end(x) if k % 2 else x
            return jnp.mean(x**2)

        one = functools.partial(jax.value_and_grad(loss), ws)
        total, grads = jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        return ws - 0.1 * grads, total

    args = (jax.random.normal(models.key(0), (4, 8, 8)), jnp.ones((3, 2, 8)))
    here = jaxpp.mpmd_jit_with_loop(step, mesh2, donate_argnums=0).compile(*args)
    loaded = save_and_load(here, tmp_path)
    assert_same_bits(trained(loaded, args, 3, 1), trained(here, args, 3, 1))


def test_two_loops(mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(ws: Any, xs: Any) -> Any:
        return squares(squares(xs, ws, jaxpp.GPipe(2)), ws)

    args = ([jnp.full(8, 1.5)] * 2, jnp.ones((3, 8)))
    here = jaxpp.mpmd_jit_with_loop(step, mesh2).compile(*args)
    assert_same_bits(save_and_load(here, tmp_path)(*args), here(*args))


@pytest.mark.parametrize("axes", [{"data": 2}, {"model": 2}])
def test_many_small_microbatches(axes: dict[str, int], tmp_path: pathlib.Path) -> None:
    """Their sums would be joined on ranks of one device."""
    here, args = compiled_step(models.mlp([1, 1], 16), jaxpp.GPipe(2), make_mesh(2, **axes))
    assert_same_bits(trained(save_and_load(here, tmp_path), args, 2), trained(here, args, 2))


def test_without_a_loop(mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(x: Any) -> Any:
        return jaxpp.mark_stage_end(jnp.sin(jaxpp.mark_stage_end(jnp.cos(x))))

    here = jaxpp.mpmd_jit_by_yield(step, mesh2).compile(jnp.ones(4))
    assert_same_bits(save_and_load(here, tmp_path)(jnp.ones(4)), here(jnp.ones(4)))


def test_lapack_runs_where_jaxlib_is(command: str, mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(xs: Any) -> Any:
        def one(x: Any) -> Any:
            q, _ = jnp.linalg.qr(jaxpp.mark_stage_end(x + 1))
            return jaxpp.mark_stage_end(q)

        return jaxpp.treduce(one, xs, schedule=jaxpp.Std1F1B(2), operation=jaxpp.Add)

    xs = jax.random.normal(models.key(0), (3, 4, 4))
    here = jaxpp.mpmd_jit_with_loop(step, mesh2).compile(xs)
    assert_same_bits(save_and_load(here, tmp_path)(xs), here(xs))
    plugin = ("--plugin", str(lammps_jax_pjrt_cpu.PLUGIN_PATH))
    done = run_command(command, str(tmp_path / "plan"), *plugin)
    assert done.returncode == 2
    assert "No FFI handler registered for lapack_sgeqrf_ffi" in done.stderr
    assert "load the plan in Python (jaxpp.load)" in done.stderr


def test_donated_arguments_are_gone(mesh2: Any, tmp_path: pathlib.Path) -> None:
    step, args = compiled_step(models.mlp([1, 1], 2), jaxpp.Std1F1B(2), mesh2)
    loaded = save_and_load(step, tmp_path)
    params, state, *_ = loaded(*args)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(args[:2]))
    loaded(params, state, args[2])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    with pytest.raises(jaxpp.JaxppError, match="donated") as caught:
        loaded(params, state, args[2])
    assert caught.value.code == "donated"


def test_a_loaded_step_can_be_saved_and_looked_at(
    any_mesh2: Any, tmp_path: pathlib.Path
) -> None:
    step, args = compiled_step(models.mlp([1, 1], 2), jaxpp.Std1F1B(2), any_mesh2)
    loaded = save_and_load(step, tmp_path)
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "plan").read_bytes()
    assert str(loaded.closed_jaxpr) == str(step.closed_jaxpr)
    assert loaded.explain() == step.explain()
    loaded.set_tracing()
    loaded(*args)
    assert "fwd_0" in loaded.trace_json()


# --- Meshes -----------------------------------------------------------------------------


def test_other_devices(tmp_path: pathlib.Path) -> None:
    problem = models.mlp([1, 1], 2)
    step, args = compiled_step(problem, jaxpp.Std1F1B(2), mesh_of(2, {"data": 2}))
    devices = np.array(jax.devices()[4:][::-1]).reshape(2, 2)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage", "data")), "stage")
    loaded = save_and_load(step, tmp_path, mpmd_mesh=mesh)
    copies = jax.tree.map(jnp.copy, args)  # because some arguments are donated
    here, there = step(*copies), loaded(*args)
    assert_same_bits(here, there)
    assert jax.tree.leaves(there)[0].sharding.mpmd_mesh == mesh


def test_the_mesh_is_made_as_it_was(tmp_path: pathlib.Path) -> None:
    devices = np.array(jax.devices()[:4][::-1]).reshape(2, 2)
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("data", "stage")), "stage")
    step, args = compiled_step(models.mlp([1, 1], 2), jaxpp.Std1F1B(2), mesh)
    loaded = save_and_load(step, tmp_path)
    assert jax.tree.leaves(loaded(*args))[0].sharding.mpmd_mesh == mesh


# --- Arguments --------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["w", "ms"])


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["pair"], meta_fields=["rate", "names"]
)
@dataclasses.dataclass
class State:
    pair: Pair
    rate: float
    names: tuple[str, ...]


def test_pytrees_of_all_kinds(mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(state: State, xs: Any, *, more: Any) -> Any:
        total = squares(xs, [state.pair.w, state.pair.ms["b"][0]])
        made = collections.OrderedDict(total=total, none=None, more=more["x"] + state.rate)
        return State(Pair(total[0], state.pair.ms), state.rate, state.names), [made, ()]

    state = State(Pair(jnp.ones(8), {"b": (jnp.full(8, 2.0),), "a": None}), 0.5, ("a", "b"))
    args, kwargs = (state, jnp.ones((3, 8))), {"more": {"x": jnp.float32(1), "y": 2.0}}
    here = jaxpp.mpmd_jit_with_loop(step, mesh2).compile(*args, **kwargs)
    loaded = save_and_load(here, tmp_path)
    a, b = here(*args, **kwargs), loaded(*args, **kwargs)
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert_same_bits(a, b)
    assert isinstance(b[0], State) and b[0].names == ("a", "b")


def test_static_arguments(mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(mode: str, xs: Any, rate: float = 1.0) -> Any:
        return squares(xs * rate if mode == "fast" else xs, [2.0, 3.0])

    xs = jnp.ones((3, 8))
    here = jaxpp.mpmd_jit_with_loop(step, mesh2, static_argnums=0, static_argnames="rate")
    compiled = here.compile("fast", xs, rate=0.5)
    loaded = save_and_load(compiled, tmp_path)
    for args, kwargs in (((xs,), {}), (("fast", xs), {}), (("fast", xs), {"rate": 0.5})):
        assert_same_bits(loaded(*args, **kwargs), compiled("fast", xs, rate=0.5))
    for args, kwargs in ((("slow", xs), {}), (("fast", xs), {"rate": 1.0})):
        with pytest.raises(jaxpp.JaxppError, match="static argument (mode|rate) of the step"):
            loaded(*args, **kwargs)


def test_static_arguments_that_have_no_form(mesh2: Any, tmp_path: pathlib.Path) -> None:
    def step(fun: Any, xs: Any) -> Any:
        return squares(fun(xs), [2.0, 3.0])

    xs = jnp.ones((3, 8))
    compiled = jaxpp.mpmd_jit_with_loop(step, mesh2, static_argnums=0).compile(jnp.sin, xs)
    loaded = save_and_load(compiled, tmp_path)
    assert_same_bits(loaded(xs), compiled(jnp.sin, xs))
    with pytest.raises(jaxpp.JaxppError, match="compiled in and cannot be compared"):
        loaded(jnp.sin, xs)


# --- C alone ----------------------------------------------------------------------------


def run_command(
    command: str, *words: str, of: str = "run", **env: str
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "JPP_PLUGIN"} | env
    return subprocess.run(
        [command, of, *words], capture_output=True, text=True, env=environment
    )


@pytest.fixture
def plan(any_mesh2: Any, tmp_path: pathlib.Path) -> str:
    step, _ = compiled_step(models.mlp([1, 1], 4), jaxpp.Std1F1B(2), any_mesh2)
    step.save(tmp_path / "plan")
    return str(tmp_path / "plan")


def test_the_command_shows_the_costs(command: str, tmp_path: pathlib.Path) -> None:
    mesh, problem = mesh_of(2, {"data": 2, "model": 2}), models.mlp([1, 1], 4)
    step, _ = compiled_step(problem, jaxpp.Std1F1B(2), mesh)
    step.save(tmp_path / "plan")
    words = (str(tmp_path / "plan"), "--plugin", str(lammps_jax_pjrt_cpu.PLUGIN_PATH))
    costs = step.cost_summary()
    assert costs.collectives
    rows = [dataclasses.asdict(row) for row in costs.collectives]
    for of in ("run", "plan"):
        assert str(costs) in run_command(command, *words, of=of).stdout
        found = json.loads(run_command(command, *words, "--json", of=of).stdout)
        assert found["collectives"] == rows


def test_the_command_shows_a_saved_plan(
    command: str, plan: str, tmp_path: pathlib.Path
) -> None:
    """Its parts need no plugin, and flags that would change the plan are refused."""
    for part in ("graph", "schedule", "partition", "program", "check"):
        done = run_command(command, plan, "--after", part, of="plan")
        assert done.returncode == 0 and done.stdout, done.stderr
    (tmp_path / "graph.jpp").write_text(
        run_command(command, plan, "--after=graph", of="plan").stdout
    )
    graph = json.loads(
        run_command(
            command, str(tmp_path / "graph.jpp"), "--json", "--after=graph", of="plan"
        ).stdout
    )
    assert graph == json.loads(
        run_command(command, plan, "--json", "--after=graph", of="plan").stdout
    )
    for flag in ("--ranks=2", "--stages=2", "--slots=3", "--schedule=gpipe", "--fuse"):
        done = run_command(command, plan, flag, of="plan")
        assert done.returncode == 2
        assert f"{flag.split('=')[0]} changes a plan" in done.stderr
    words = (plan, "--memory-limit=100", "--after=check")
    done = run_command(command, *words, of="plan")
    assert done.returncode == 1 and "expected at most 100 bytes" in done.stderr


def test_the_command_trains(command: str, plan: str) -> None:
    plugin = ("--plugin", str(lammps_jax_pjrt_cpu.PLUGIN_PATH))
    losses = []
    for steps in ("1", "20"):
        done = run_command(command, plan, *plugin, "--steps", steps, "--seed", "3", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["ranks"] == 2 and found["steps"] == int(steps)
        assert all(peak > 0 for peak in found["peak_bytes"])
        losses += [row["value"] for row in found["results"] if row["name"] == "result[2]"]
    assert losses[1] < losses[0]  # 20 steps train further: each takes the last one's results
    text = run_command(command, plan, *plugin, "--steps", "2").stdout
    assert "result[2]: f32[] = " in text and "peak bytes" in text


def test_the_command_computes_what_python_does(
    command: str, mesh2: Any, tmp_path: pathlib.Path
) -> None:
    problem = models.mlp([1, 1], 4)
    step, args = compiled_step(problem, jaxpp.Std1F1B(2), mesh2)
    step.save(tmp_path / "plan")
    zeros = jax.tree.map(jnp.zeros_like, args)
    zeros[2]["y"] = zeros[2]["y"] + 0
    expected = trained(step, zeros, 4)[2]
    path = str(lammps_jax_pjrt_cpu.PLUGIN_PATH)
    done = run_command(command, str(tmp_path / "plan"), "--steps=4", "--json", JPP_PLUGIN=path)
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row["value"] for row in json.loads(done.stdout)["results"]}
    assert found["result[2]"] == float(expected)


def test_the_command_finds_the_plugin_beside_it(
    command: str, plan: str, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "lib" / "python3.11" / "site-packages" / "lammps_jax_pjrt_cpu"
    folder.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    copy = shutil.copy(command, tmp_path / "bin" / "jaxpp")
    none = run_command(str(copy), plan)
    assert none.returncode == 2 and "no PJRT plugin: neither --plugin nor" in none.stderr
    (folder / "pjrt_c_api_cpu_plugin.so").symlink_to(lammps_jax_pjrt_cpu.PLUGIN_PATH)
    done = run_command(str(copy), plan, "--steps", "1")
    assert done.returncode == 0, done.stderr


def test_the_command_refuses_what_is_no_plan(command: str, plan: str) -> None:
    whole = pathlib.Path(plan).read_bytes()
    pathlib.Path(plan).write_bytes(whole[:-1])
    done = run_command(command, plan)
    assert done.returncode == 2 and "damaged or cut off" in done.stderr
    done = run_command(command, "/nowhere")
    assert done.returncode == 2 and "No such file" in done.stderr


def test_ids_of_devices_that_are_not_there(tmp_path: pathlib.Path) -> None:
    """A plan for a mesh on the last devices runs in a process with fewer devices."""
    devices = np.array(jax.devices()[6:])
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(devices, ("stage",)), "stage")
    step, args = compiled_step(models.mlp([1, 1], 2), jaxpp.Std1F1B(2), mesh)
    step.save(tmp_path / "plan")
    code = (
        "import jax; jax.config.update('jax_num_cpu_devices', 2); import jaxpp.api as j;"
        f"s = j.load({str(tmp_path / 'plan')!r});"
        "print(s.compiled._mesh.jax_mesh.devices)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "id=0" in done.stdout and "id=1" in done.stdout, done.stderr
