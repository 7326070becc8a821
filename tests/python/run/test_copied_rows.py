"""Tasks that only copy have no module; the runtime copies, to the bit as XLA does."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
from equality import Problem, assert_trains_equal, mesh_of
from jaxpp.lower.compiling import CompiledTasks, Compiler

MICROBATCHES = 4
DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64"]


def bits(array: Any) -> np.ndarray:
    """The bytes of an array, with one NaN for all."""
    array = np.asarray(array)
    if array.dtype.kind in "fcV":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def tasks_with_module(step: Any, *args: Any) -> list[str]:
    plan = step.compile(*args).compiled._traced.plan
    tasks = zip(plan.staged().tasks(), plan.copies(), strict=True)
    return [task.name for task, copies in tasks if task.ops and copies is None]


def assert_copies(fun: Callable[..., Any], *args: Any) -> None:
    """The step has no module, and its results are those of plain JAX."""
    step = jaxpp.mpmd_jit_with_loop(fun, mesh_of(2, {}))
    assert tasks_with_module(step, *args) == []
    ours, theirs = step(*args), jax.jit(fun)(*args)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(bits(a), bits(b))


def random_chain(rng: np.random.Generator) -> Callable[[jax.Array], jax.Array]:
    """A function of up to six ops. Each takes consecutive elements of its operand."""
    numbers = rng.integers(0, 1 << 30, size=8).tolist()

    def chain(x: jax.Array) -> jax.Array:
        may_cast = True
        for number in numbers[: 1 + numbers[-1] % 6]:
            kind, number = number % 6, number // 6
            rows = x.shape[0] if x.ndim else 1
            start = number % rows
            if kind == 0 and x.ndim:
                x = x[start : start + 1 + number // rows % (rows - start)]
            elif kind == 1 and x.ndim:
                x = x[start]
            elif kind == 2:
                x = x.reshape(-1)
            elif kind == 3:
                x = x[None]
            elif kind == 4 and may_cast and x.dtype in (jnp.float32, jnp.bfloat16):
                wide = x.dtype == jnp.bfloat16
                x, may_cast = x.astype(jnp.float32 if wide else jnp.bfloat16), False
            else:
                x = jnp.copy(x)
        return x.reshape(1, -1)

    return chain


def random_array(rng: np.random.Generator, dtype: str) -> jax.Array:
    shape = rng.integers(1, 6, size=rng.integers(1, 4))
    if dtype == "bool":
        return jnp.asarray(rng.integers(0, 2, size=shape), bool)
    size = int(np.prod(shape)) * jnp.dtype(dtype).itemsize
    raw = rng.integers(0, 256, size=size).astype(np.uint8)
    return jnp.asarray(raw.view(jnp.dtype(dtype)).reshape(shape))


@pytest.mark.parametrize("seed", range(12))
def test_random_chains_of_copies(seed: int) -> None:
    rng = np.random.default_rng(seed)
    arrays = [random_array(rng, DTYPES[k]) for k in rng.integers(0, len(DTYPES), size=4)]
    chains = [random_chain(rng) for _ in arrays]
    assert_copies(lambda *xs: [f(x) for f, x in zip(chains, xs, strict=True)], *arrays)


# --- Ranks of several devices ---------------------------------------------------------------


@pytest.fixture
def compiled_tasks(monkeypatch: pytest.MonkeyPatch) -> list[CompiledTasks]:
    """What is compiled from now on, by plan."""
    compiled: list[CompiledTasks] = []
    compile_all = Compiler.compile_all

    def keep(compiler: Compiler) -> CompiledTasks:
        compiled.append(compile_all(compiler))
        return compiled[-1]

    monkeypatch.setattr(Compiler, "compile_all", keep)
    return compiled


def has_modules(compiled: CompiledTasks) -> bool:
    return any(executable is not None for executable in compiled.executables)


def random_spec(rng: np.random.Generator, shape: tuple[int, ...], axes: dict[str, int]) -> P:
    parts: list[Any] = [None] * len(shape)
    for axis in rng.permutation(sorted(axes)).tolist():
        at = int(rng.integers(0, len(shape) + 1))
        if at < len(shape):
            wider = (*(parts[at] or ()), axis)
            if shape[at] % math.prod(axes[a] for a in wider) == 0:
                parts[at] = wider
    return P(*parts)


MESHES = [{"data": 2}, {"data": 2, "model": 2}, {"data": 1, "model": 4}]


@pytest.mark.parametrize("axes", MESHES, ids=lambda axes: "x".join(map(str, axes.values())))
@pytest.mark.parametrize("seed", range(8))
def test_random_shards(seed: int, axes: dict[str, int]) -> None:
    """Arrays and results have any shardings: some the runtime can copy, others not."""
    rng = np.random.default_rng(1000 + seed)
    arrays, takes = [], []
    for _ in range(4):
        shape = tuple(rng.choice([2, 4, 6, 8], size=rng.integers(1, 4)).tolist())
        x = rng.integers(0, 100, size=shape)
        arrays.append(jnp.asarray(x, rng.choice(["float32", "bfloat16", "int8"])))
        start, stop = sorted(rng.choice(shape[0] + 1, size=2, replace=False).tolist())
        takes.append(
            [
                lambda x, start=start: x[start],
                lambda x, start=start, stop=stop: x[start:stop],
                lambda x: x.astype(jnp.float32),
                lambda x: x.reshape(-1)[2:4],
                lambda x: x.reshape(-1)[: 2 * x.shape[-1]].reshape(2, -1),
                jnp.copy,
            ][rng.integers(0, 6)]
        )
    fun = lambda *xs: [f(x) for f, x in zip(takes, xs, strict=True)]  # noqa: E731
    expected = jax.jit(fun)(*arrays)
    in_specs = tuple(random_spec(rng, x.shape, axes) for x in arrays)
    out_specs = [random_spec(rng, y.shape, axes) for y in expected]
    step = jaxpp.mpmd_jit_with_loop(
        fun, mesh_of(1, axes), in_specs=in_specs, out_specs=out_specs
    )
    for ours, theirs in zip(step(*arrays), expected, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), bits(theirs[shard.index]))


@pytest.mark.parametrize(
    ("fun", "spec", "out_spec", "copied"),
    [
        (lambda x: x[2], P(None, "data"), P("data"), True),
        (lambda x: x[2:4], P(None, "data"), P(None, "data"), True),
        (lambda x: x[2], P(None, ("data", "model")), P(("data", "model")), True),
        (lambda x: x.astype(jnp.bfloat16), P("data", "model"), P("data", "model"), True),
        (lambda x: x.reshape(-1)[8:16], P(), P(), True),
        # Devices lack elements of their shards of the results.
        (lambda x: x[2], P(None, "data"), P(), False),
        (lambda x: x[2], P(None, ("data", "model")), P(("model", "data")), False),
        (lambda x: x[2:4], P("data"), P(), False),
        (lambda x: x[0:4], P("data"), P("data"), False),
        # Eight elements, but not one row.
        (lambda x: x.reshape(-1)[4:12], P(None, "data"), P("data"), False),
    ],
)
def test_which_shards_the_runtime_copies(
    compiled_tasks: list[CompiledTasks],
    tmp_path: pathlib.Path,
    fun: Any,
    spec: P,
    out_spec: P,
    copied: bool,
) -> None:
    x = jnp.arange(48.0).reshape(6, 8)
    mesh = mesh_of(1, {"data": 2, "model": 2})
    step = jaxpp.mpmd_jit_with_loop(fun, mesh, in_specs=(spec,), out_specs=out_spec)
    step.compile(x).save(tmp_path / "step.plan")
    for run in (step, jaxpp.load(tmp_path / "step.plan")):
        for shard in run(x).addressable_shards:
            np.testing.assert_array_equal(bits(shard.data), bits(fun(x)[shard.index]))
    assert [has_modules(compiled) for compiled in compiled_tasks] == [not copied] * 2


def test_casts_round_as_xla_does() -> None:
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38, 1.00390625, 1.01171875]
    raw = rng.integers(0, 1 << 32, size=1 << 16, dtype=np.uint32).view(np.float32)
    wide = jnp.asarray(np.concatenate([np.float32(special), raw]))
    assert_copies(lambda x: x.astype(jnp.bfloat16), wide)
    assert_copies(lambda x: x.astype(jnp.float32), wide.astype(jnp.bfloat16))


def test_what_the_runtime_does_not_copy() -> None:
    x = jnp.arange(24.0).reshape(6, 4)
    others: list[Callable[[jax.Array], jax.Array]] = [
        lambda x: x[:, 1:],
        lambda x: x[::2],
        lambda x: x.T,
        lambda x: jnp.broadcast_to(x, (2, 6, 4)),
        lambda x: x.astype(jnp.float16),
        lambda x: x.astype(jnp.int32),
        lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
        lambda x: x[1:2] + 1,
    ]
    step = jaxpp.mpmd_jit_with_loop(lambda x: [f(x) for f in others], mesh_of(2, {}))
    for fun in others:
        one = jaxpp.mpmd_jit_with_loop(fun, mesh_of(2, {}))
        assert tasks_with_module(one, x) != []
    for ours, fun in zip(step(x), others, strict=True):
        np.testing.assert_array_equal(bits(ours), bits(jax.jit(fun)(x)))


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int8", "uint8", "int16"])
def test_a_row_that_an_argument_names(dtype: str) -> None:
    x = jnp.arange(24.0).reshape(6, 4)
    fun = functools.partial(jax.lax.dynamic_index_in_dim, axis=0)
    step = jaxpp.mpmd_jit_with_loop(fun, mesh_of(2, {}))
    for row in (0, 4, 100, *([-2] if dtype.startswith("int") else [])):
        index = jnp.asarray(row, dtype)
        assert tasks_with_module(step, x, index) != []
        np.testing.assert_array_equal(step(x, index), fun(x, index))


def loss(params: Any, batch: Any, i: Any, mark: Any) -> Any:
    """The first stage only takes the microbatch."""
    x, scale = mark((batch["x"], batch["scale"]))
    x = mark(jnp.tanh(x.astype(jnp.float32) @ params[0]) * scale[:, None])
    return jnp.mean((x @ params[1]) ** 2), ()


def problem(dtype: Any = jnp.float32) -> Problem:
    rng = np.random.default_rng(1)
    params = [jnp.asarray(rng.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(2)]
    batch = {
        "x": jnp.asarray(rng.normal(size=(MICROBATCHES, 3, 8)), dtype),
        "scale": jnp.asarray(rng.normal(size=(MICROBATCHES, 3)), jnp.float32),
    }
    return Problem(loss, params, batch)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    "schedule", [jaxpp.Std1F1B(3), jaxpp.ZeroBubble(3)], ids=["1f1b", "zb"]
)
def test_a_stage_that_takes_rows(schedule: Any, dtype: Any) -> None:
    mesh = mesh_of(3, {})
    assert_trains_equal(problem(dtype=dtype), schedule, mesh)


def make_step(mesh: Any, axis: int = 0, **options: Any) -> Any:
    def train(params: Any, batch: Any) -> Any:
        def run(mb: Any) -> Any:
            def scalar(params: Any) -> Any:
                return loss(params, mb, None, jaxpp.mark_stage_end)[0]

            return jax.value_and_grad(scalar)(params)

        return jaxpp.treduce(run, batch, jaxpp.Std1F1B(3), axis, operation=jaxpp.Add)

    return jaxpp.mpmd_jit_with_loop(train, mesh, **options)


def plain(params: Any, batch: Any) -> Any:
    grad = jax.value_and_grad(lambda p, mb: loss(p, mb, None, lambda x: x)[0])
    found = jax.vmap(grad, in_axes=(None, 0))(params, batch)
    return jax.tree.map(lambda x: x.sum(0), found)


def assert_same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_rows_along_another_axis_are_not_consecutive() -> None:
    given = problem()
    batch = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), given.batch)
    first, other = make_step(mesh_of(3, {})), make_step(mesh_of(3, {}), axis=1)
    assert "fwd_0" not in tasks_with_module(first, given.params, given.batch)
    assert "fwd_0" in tasks_with_module(other, given.params, batch)
    assert_same(other(given.params, batch), plain(given.params, given.batch))


@pytest.mark.parametrize("kind", ["numpy", "jax", "unfinished", "donated", "of a step"])
def test_arguments_of_every_kind(kind: str) -> None:
    given, mesh = problem(), mesh_of(3, {})
    step = make_step(mesh, **({"donate_argnums": 1} if kind == "donated" else {}))
    expected = plain(given.params, given.batch)
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, x: (x * 3) / 3, x))
    double = jaxpp.mpmd_jit_with_loop(lambda b: jax.tree.map(lambda x: x * 1, b), mesh)
    for _ in range(3):
        batch: Any = {
            "numpy": lambda: jax.tree.map(np.asarray, given.batch),
            "jax": lambda: given.batch,
            "unfinished": lambda: jax.tree.map(slow, given.batch),
            "donated": lambda: jax.tree.map(jnp.copy, given.batch),
            "of a step": lambda: double(given.batch),
        }[kind]()
        assert_same(step(given.params, batch), expected)


def test_results_of_steps_in_flight_are_copied_when_they_are_ready() -> None:
    """Weights that an update makes are cast before the next loop."""
    mesh = mesh_of(2, {})

    def train(params: Any, x: jax.Array) -> Any:
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), params)

        def run(mb: jax.Array) -> Any:
            def scalar(low: Any) -> Any:
                y = jaxpp.mark_stage_end(jnp.tanh(mb.astype(jnp.bfloat16) @ low[0]))
                return jnp.mean(jaxpp.mark_stage_end(y @ low[1]).astype(jnp.float32) ** 2)

            return jax.value_and_grad(scalar)(low)

        loss, grads = jaxpp.treduce(run, x, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        new = jax.tree.map(lambda w, g: w - 0.1 * g.astype(w.dtype), params, grads)
        return new, loss

    step = jaxpp.mpmd_jit_with_loop(train, mesh, donate_argnums=0)
    again = jaxpp.mpmd_jit_with_loop(train, mesh)
    rng = np.random.default_rng(2)
    params = [jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(MICROBATCHES, 3, 16)), jnp.float32)
    names = tasks_with_module(again, params, x)
    assert not any(name.startswith("before_loop") for name in names), names
    flying, waiting = jax.tree.map(jnp.copy, params), params
    for _ in range(6):
        flying, loss = step(flying, x)
        waiting, expected = jax.block_until_ready(again(waiting, x))
    assert float(loss) == float(expected)
    assert_same(flying, waiting)
