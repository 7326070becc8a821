"""What users of JaxPP write and where it hurt them elsewhere, row by row.

ROWS says in our words what must work and which tests show it; a row without a test fails, as
does a test that is no longer there. Below are the tests that no other file has.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
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

HERE = pathlib.Path(__file__).parent

# Row -> "file::test", without the "test_" of either.
ROWS: dict[str, list[str]] = {
    # --- Names ---
    "each name where scripts import it from": ["api_table::names"],
    "use_pgle is taken": ["api_table::use_pgle_is_taken"],
    "a mark ends a stage; both of its names; the last stage marked or not": [
        "step::marks_inside",
        "step::scripts_that_do_not_mark_the_last_stage",
        "api_table::marks_by_either_name",
    ],
    "outside a loop a mark is the identity, under vmap and grad too": [
        "step::marks_are_identities_elsewhere",
    ],
    "treduce: microbatches along any axis, results reduced leaf by leaf": [
        "step::other_microbatch_axes",
        "step::treduce_in_plain_jax",
        "equal::auxiliary_outputs_under_concat_and_max",
    ],
    "treduce_i: the microbatch by its number": ["step::treduce_i_with_the_index"],
    "operations: bare or called, and a user's own": [
        "api_table::operations_bare_and_called",
        "step::operations_of_a_users_own",
    ],
    "mpmd_jit_with_loop: as decorator and call; compile, trace_and_place; the text": [
        "step::decorators",
        "step::compile_with_shapes_alone",
        "step::trace_and_place_compiles_nothing",
        "step::text_of_the_whole_program",
    ],
    "mpmd_jit_with_loop: static, donated and keyword arguments, compiler options": [
        "step::static_arguments",
        "step::keyword_arguments",
        "step::donating_the_whole_state",
        "training::compiler_options_reach_every_task",
    ],
    "mpmd_jit_with_loop: specs or shardings as prefixes, or inferred": [
        "sharded::parameters_sharded_fsdp_style",
        "sharded::shardings_are_inferred",
        "api_table::shardings_in_place_of_specs",
    ],
    "mpmd_jit_by_yield: a pipeline without a loop": [
        "by_yield::forward_of_any_number_of_stages",
        "by_yield::decorator_and_target_num_stages",
    ],
    "MpmdMesh: its views, a context": ["array::mesh", "array::mesh_is_a_context"],
    "MpmdSharding: where an array lives": ["array::mpmd_sharding"],
    "MpmdArray: attributes, views, printing, deleting, waiting": [
        "array::attributes",
        "array::as_jax_arrays",
        "array::printing",
        "array::deleting",
        "array::waiting",
    ],
    "MpmdArray: JAX's functions, optimizers and libraries of checkpoints take it": [
        "array_jax::functions_of_floats",
        "array_jax::functions_of_keys",
        "checkpoints::saved_and_restored",
    ],
    "MpmdArray: made by hand, copied, pickled, its shards": [
        "array_made::an_array_of_jax_arrays",
        "array_made::copies_lie_the_same_and_live_on",
        "array_made::pickled_by_value",
        "array_made::shards_put_together_are_the_array",
    ],
    "pytrees move between one big mesh and the ranks": [
        "cross::reshard_there_and_back",
        "api_table::reshard_takes_a_threshold",
        "api_table::reshard_consumes_what_is_donated",
    ],
    "sums and stacks over ranks, values pinned beside others": [
        "cross::all_reduce_leaves_the_sum_on_every_rank",
        "cross::stack_is_on_every_rank",
        "cross::place_with_a_weight_of_another_stage",
    ],
    "times of tasks in milliseconds": ["by_yield::collect_task_times"],
    "every schedule: its lists, its tasks' names, its training; a user's own": [
        "array::printed_listings",
        "array::tasks",
        "array::a_schedules_lists_are_a_schedule",
        "schedules::one_stage_a_rank",
        "schedules::two_stages_a_rank",
        "equal::user_defined_schedule",
    ],
    "arguments are any pytree of arrays and numbers; results go into the next step": [
        "step::arguments_of_any_pytree",
        "step::numpy_and_python_numbers",
        "step::results_feed_the_next_step_whatever_their_ranks",
        "step::work_around_the_loop",
    ],
    # --- Where users were hurt ---
    "zero-bubble and DualPipeV on blocks under jit and checkpoint": [
        "equal::transformer_under_remat_and_jit",
        "api_table::flax_blocks_under_jit_and_remat",
    ],
    "clipping by the global norm, norms and stacks over stages' gradients": [
        "equal::global_norm_clipping",
        "cross::a_norm_over_a_stack_of_stages",
    ],
    "results that no stage makes, arguments passed through": [
        "errors::results_that_no_stage_makes",
        "step::arguments_passed_straight_through",
    ],
    "marks under checkpoint and jit count; under a scan over layers an error says how": [
        "step::marks_inside",
        "equal::scan_over_layers_inside_a_stage",
        "errors::error",
    ],
    "schedule, mesh and marks of different size: an error with both numbers": [
        "errors::error",
    ],
    "another shape or microbatch count traces again, the same never": [
        "errors::other_shapes_retrace_and_work",
        "api_table::the_same_shapes_are_traced_once",
    ],
    "a donated Python number; arrays as numbers and as numpy's": [
        "equal::donated_state_with_a_python_int_in_it",
        "array::as_python_numbers",
        "array::as_numpy",
    ],
    "a loop without a backward pass, two loops in a step": [
        "step::forward_only_loop",
        "step::two_loops_in_a_step",
    ],
    "interleaved with any microbatch count, zero-bubble with one stage": [
        "equal::eight_stages_on_four_ranks",
        "equal::one_stage",
    ],
    "a step that cannot go on ends with an error, and so does Ctrl-C": [
        "process::ctrl_c_leaves_arrays_and_step_usable",
        "numbers::the_message_has_task_microbatch_rank_and_line",
    ],
}


def functions_in(name: str) -> set[str]:
    tree = ast.parse((HERE / f"test_{name}.py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_its_tests(row: str) -> None:
    assert ROWS[row]
    for name in ROWS[row]:
        file, test = name.split("::")
        assert f"test_{test}" in functions_in(file), name


# --- Rows that nothing else shows -------------------------------------------------------


@pytest.mark.parametrize("mark", [jaxpp.pipeline_enter_stage, jaxpp.mark_stage_end])
def test_marks_by_either_name(mark: Any) -> None:
    def loss(ws: Any, x: Any) -> Any:
        for k, w in enumerate(ws):
            x, scale = mark(anchor=(jnp.tanh(x @ w), jnp.float32(k + 1)), name=f"layer_{k}")
        return jnp.mean(x**2) * scale

    def step(ws: Any, xs: Any) -> Any:
        return jaxpp.treduce(
            lambda x: jax.value_and_grad(loss)(ws, x), xs, jaxpp.Std1F1B(2), operation=jaxpp.Add
        )

    args = (m.params(), m.batch())
    ours = jaxpp.mpmd_jit_with_loop(step, make_mesh(2))(*args)
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
    rows = NamedSharding(one, P(None, "data"))  # of the batch: a prefix, as the rest is None
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
        cross_mpmd_all_reduce cross_mpmd_stack mark_stage_end mpmd_jit_by_yield
        mpmd_jit_with_loop mpmd_to_spmd_reshard pipeline_enter_stage place_with
        spmd_to_mpmd_reshard treduce treduce_i
    """,
    "core": "mpmd_jit_by_yield mpmd_jit_with_loop",
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
    """Blocks under remat and jit, as flax users nest them, a mark after each."""

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
        ws, _ = ours(ws, xs)  # jax arrays, then MpmdArrays
    ours(ws, np.asarray(xs))
    assert traced == [xs.shape]
    ours(ws, m.batch(4))
    ours(ws, m.batch(4))
    assert traced == [xs.shape, m.batch(4).shape]
