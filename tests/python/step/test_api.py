"""Names, options and combinations that scripts for JaxPP use and no other file tests."""

from __future__ import annotations

import importlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
import models
from equality import Problem, assert_trains_equal, difference, make_mesh
from jaxpp.core import DistributedSharding
from jaxpp.distributed_utils import distributed_main


@pytest.mark.parametrize("mark", [jaxpp.pipeline_enter_stage, jaxpp.mark_stage_end])
def test_marks_by_either_name(mark: Any, any_mesh2: Any) -> None:
    def loss(ws: Any, x: Any) -> Any:
        for k, w in enumerate(ws):
            x, scale = mark(anchor=(jnp.tanh(x @ w), jnp.float32(k + 1)), name=f"layer_{k}")
        return jnp.mean(x**2) * scale

    def step(ws: Any, xs: Any) -> Any:
        return jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add
        )

    args = (m.params(), m.batch())
    ours = jaxpp.mpmd_jit_with_loop(step, any_mesh2)(*args)
    assert difference(ours, jax.jit(step)(*args)) < 1e-5
    assert jax.vmap(lambda x: mark(x, name="x"))(jnp.arange(3)).tolist() == [0, 1, 2]


def test_operations_bare_and_called() -> None:
    def results(add: Any, largest: Any, concat: Any) -> Any:
        def one(x: Any) -> Any:
            x = jaxpp.mark_stage_end(jaxpp.mark_stage_end(x))
            return x, x, x

        def step(xs: Any) -> Any:
            operation = (add, largest, concat)
            return jaxpp.treduce(one, xs, jaxpp.Std1F1B(2), operation=operation)

        return jaxpp.mpmd_jit_with_loop(step, make_mesh(2))(m.batch())

    bare = results(jaxpp.Add, jaxpp.Max, jaxpp.Concat)
    called = results(jaxpp.Add(), jaxpp.Max(), jaxpp.Concat(axis=0))
    xs = np.asarray(m.batch())
    for found in (bare, called):
        assert difference(found, (xs.sum(0), xs.max(0), xs)) == 0
    turned = results(jaxpp.Add, jaxpp.Max, jaxpp.Concat(axis=1))[2]
    assert difference(turned, np.moveaxis(xs, 0, 1)) == 0


def test_shardings_in_place_of_specs() -> None:
    mesh = make_mesh(2, data=2)
    one = mesh.lowering_mesh()
    rows = NamedSharding(one, P(None, "data"))  # for the batch; other arguments have None
    step = jaxpp.mpmd_jit_with_loop(
        m.training_step(jaxpp.Std1F1B(2)),
        mesh,
        in_shardings=(None, rows),
        out_shardings=([jaxpp.MpmdSharding(mesh, (0,), P("data")), None], None),
    )
    ws, total = step(m.params(), m.batch())
    assert difference((ws, total), m.plain_training_step(m.params(), m.batch())) < 1e-5
    assert ws[0].spec == P("data")
    assert step.compile(m.params(), m.batch())._inputs[2].spec == P(None, "data")


NAMES = {
    "api": """
        Add BaseSchedule Concat DualPipeV Eager1F1B FusedTask GPipe Interleaved1F1B KimiK2 Max
        MpmdArray MpmdMesh MpmdSharding Std1F1B Task ZeroBubble collect_task_times_ms
        cross_mpmd_all_reduce cross_mpmd_stack mark_stage_end mpmd_jit_by_yield mpmd_jit_rev
        mpmd_jit_with_loop mpmd_to_spmd_reshard pipeline_enter_stage place_with
        spmd_to_mpmd_reshard treduce treduce_i
    """,
    "core": "DistributedSharding mpmd_jit_by_yield mpmd_jit_rev mpmd_jit_with_loop",
    "arrayref": "ArrayRef",
    "distributed_utils": "distributed_main",
    "experimental.mpmd": "MpmdMesh mpmd slice stack task transfer",
    "training": "Add Concat Max Op treduce treduce_i",
    "types": "MpmdIdx MpmdSharding PyTree TaskType",
    "pipelining": "mark_stage_end pipeline_enter_stage",
    "mesh": "MpmdMesh",
    "array": "MpmdArray",
    "schedules": """
        BaseSchedule DualPipeV Eager1F1B FusedTask GPipe Interleaved1F1B InterleavedBaseSchedule
        KimiK2 Std1F1B Task TaskType ZeroBubble
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_names(module: str) -> None:
    found = importlib.import_module(f"jaxpp.{module}")
    whole = importlib.import_module("jaxpp")
    for name in NAMES[module].split():
        assert name in found.__all__
        assert getattr(whole, name, getattr(found, name)) is getattr(found, name)
    assert isinstance(whole.__version__, str)


def test_the_mesh_of_workers_is_also_in_mesh() -> None:
    from jaxpp.mesh import RemoteMpmdMesh

    assert RemoteMpmdMesh is jaxpp.RemoteMpmdMesh
    with pytest.raises(ImportError, match="NoSuchMesh"):
        from jaxpp.mesh import NoSuchMesh  # noqa: F401


def test_use_pgle_is_taken() -> None:
    for jit, fun in (
        (jaxpp.mpmd_jit_with_loop, m.training_step(jaxpp.Std1F1B(2))),
        (jaxpp.mpmd_jit_by_yield, m.loss),
    ):
        step = jit(fun, mpmd_mesh=make_mesh(2), use_pgle=True)
        step.trace_and_place(m.params(), m.batch())


def test_reshard_consumes_what_is_donated() -> None:
    mesh = make_mesh(2)
    sharding = jaxpp.MpmdSharding(mesh, {1}, P())
    host = np.arange(8.0)
    for donate in (False, True):
        array = jnp.asarray(host)
        moved = jaxpp.spmd_to_mpmd_reshard(mesh, [array], sharding, donate=donate)
        assert array.is_deleted() == donate
        np.testing.assert_array_equal(np.asarray(moved[0]), host)


def test_reshard_takes_the_older_name_of_a_sharding() -> None:
    mesh = make_mesh(2)
    where = DistributedSharding({1}, NamedSharding(mesh.unstack[1], P()))
    (there,) = jaxpp.spmd_to_mpmd_reshard(mesh, [np.arange(3.0)], [where])
    assert there.mpmd_idxs == (1,) and mesh.as_mpmd_mesh is mesh


def test_compiler_options_of_a_lowered_step() -> None:
    lowered = jaxpp.mpmd_jit_with_loop(m.training_step(jaxpp.Std1F1B(2)), make_mesh(2)).lower(
        m.params(), m.batch()
    )
    options = {"xla_backend_optimization_level": 0}
    found = lowered.compile(compiler_options=options)(m.params(), m.batch())
    assert difference(found, m.plain_training_step(m.params(), m.batch())) < 1e-5
    with pytest.raises(jaxpp.JaxppError, match="compile: compiler_options has the name 3"):
        lowered.compile(compiler_options={3: 1})
    with pytest.raises(jaxpp.JaxppError, match="no_such_option"):
        lowered.compile({"no_such_option": 1})


def test_a_job_of_one_process() -> None:
    assert distributed_main(lambda: 3) == 3


def test_reshard_takes_a_threshold() -> None:
    mesh = make_mesh(2, data=2)
    array = np.arange(8.0, dtype=np.float32)
    sharding = jaxpp.MpmdSharding(mesh, (1,), P("data"))
    for threshold in (None, 1, 1 << 30):
        there = jaxpp.spmd_to_mpmd_reshard(mesh, array, sharding, threshold=threshold)
        assert there.mpmd_idxs == (1,)
        np.testing.assert_array_equal(np.asarray(there), array)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(2 * x.shape[-1])(h)))


class Stack(nn.Module):
    """Blocks under remat and jit, nested as Flax users do it, with a mark after each block."""

    stages: int

    @nn.compact
    def __call__(self, x: Any, mark: Any) -> Any:
        for k in range(self.stages):
            x = mark(nn.jit(nn.remat(Block))(name=f"block_{k}")(x))
        return x


@pytest.mark.parametrize(
    "schedule", [jaxpp.ZeroBubble(2), jaxpp.DualPipeV(4, 2)], ids=lambda s: type(s).__name__
)
def test_flax_blocks_under_jit_and_remat(schedule: Any, mesh2: Any) -> None:
    model = Stack(schedule.num_stages)
    params = model.init(models.key(0), jnp.zeros((1, models.D)), lambda x: x)

    def loss(params: Any, mb: Any, i: Any, mark: Any) -> Any:
        return models.mse(model.apply(params, mb["x"], mark), mb["y"]), ()

    problem = Problem(loss, params, models.batch(6), optimizer=optax.sgd(1e-1))
    assert_trains_equal(problem, schedule, mesh2)


def test_the_same_shapes_are_traced_once() -> None:
    traced = []

    def step(ws: Any, xs: Any) -> Any:
        traced.append(xs.shape)
        return m.training_step(jaxpp.Std1F1B(2))(ws, xs)

    ours = jaxpp.mpmd_jit_with_loop(step, make_mesh(2))
    ws, xs = m.params(), m.batch()
    for _ in range(3):
        ws, _ = ours(ws, xs)  # takes JAX arrays, then MpmdArrays
    ours(ws, np.asarray(xs))
    assert traced == [xs.shape]
    ours(ws, m.batch(4))
    ours(ws, m.batch(4))
    assert traced == [xs.shape, m.batch(4).shape]
