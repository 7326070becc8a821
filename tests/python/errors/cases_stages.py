"""Marks, schedules and meshes that do not fit."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, case, loop, mesh, train, warned


def devices_mesh(numbers: list[list[int]]) -> jax.sharding.Mesh:
    """A mesh with a row of devices for each rank, given by number."""
    devices = np.array(jax.devices())[np.array(numbers)]
    return jax.sharding.Mesh(devices, ("stage", "data"))


# --- Marks ------------------------------------------------------------------------------

case(
    "Fewer marks than stages",
    "stage-marks",
    lambda: train(jaxpp.Std1F1B(4), mpmd_mesh=mesh(4)),
    "mistakes.py:",
    "expected 4 stage marks",
    "found 2:",
)
case(
    "More marks than stages",
    "stage-marks",
    lambda: train(TWO, layers=14),
    "expected 2 stage marks",
    "found 14",
    "and 4 more",
)
case(
    "No marks",
    "stage-marks",
    lambda: train(jaxpp.Std1F1B(4), loss=m.unmarked_loss, mpmd_mesh=mesh(4)),
    "mistakes.py:",
    "expected 4",
    "found 0",
)
for under in (m.mark_in_scan, m.mark_in_while, m.mark_in_cond):
    primitive = under.__name__.split("_")[-1]
    case(
        f"A mark under {primitive}",
        "stage-marks",
        # Without gradients, because JAX cannot differentiate a while loop.
        lambda under=under: JIT(
            lambda ws, xs: jaxpp.treduce(lambda x: under(ws, x), xs, TWO, 0, jaxpp.Add), mesh()
        )(m.params(), m.batch()),
        "stage mark at ",
        "mistakes.py:",
        f"inside `{primitive}`",
    )
case(
    "A value used on both sides of a mark in jax.checkpoint",
    "stage-marks",
    lambda: train(TWO, loss=m.used_around_a_mark_in_checkpoint),
    "stage mark at ",
    "mistakes.py:",
    "is inside jax.checkpoint",
    "through the mark",
)
case(
    "A mark on a value that is not an array",
    "invalid-argument",
    m.mark_of_text,
    "mistakes.py:",
    "anchor['x']",
    "expected an array",
    "found 'text'",
)

case(
    "A mark whose name is not text",
    "stage-marks",
    lambda: jaxpp.mark_stage_end(m.batch(), name=["first"]),
    "name=['first']; expected text",
)
case(
    "A mark under shard_map",
    "stage-marks",
    lambda: train(TWO, loss=m.mark_under_shard_map),
    "mistakes.py:",
    "inside `shard_map`",
    "outside of it",
)
case(
    "Marks whose results are not used",
    "stage-marks",
    lambda: train(TWO, loss=m.marks_not_assigned),
    "mistakes.py:",
    "(and of 1 more) is not used",
    "expected `x = mark_stage_end(x)`",
)
case(
    "A mark whose result is not used",
    "stage-marks",
    lambda: train(TWO, loss=m.one_mark_not_assigned),
    "the result of the stage mark at ",
    "is not used",
)
case(
    "A pipeline that runs twice",
    "stage-marks",
    lambda: train(TWO, loss=m.siamese),
    "expected 2 stage marks, found 4",
    "runs 2 times per microbatch, called at ",
    " and ",
    "jnp.concatenate",
)
case(
    "A pipeline that runs twice from one line",
    "stage-marks",
    lambda: train(TWO, loss=m.siamese_in_a_comprehension),
    "runs 2 times per microbatch, called at ",
    "jnp.concatenate",
)
case(
    "A pipeline that runs twice, jitted",
    "stage-marks",
    lambda: train(TWO, loss=jax.jit(m.siamese)),
    "runs 2 times per microbatch, called at ",
)
case(
    "A pipeline that runs on its own result",
    "stage-marks",
    lambda: train(TWO, loss=m.twice_one_after_the_other),
    "runs 2 times per microbatch, called at ",
    "Interleaved1F1B(4, num_ranks)",
)
warned(
    "Marks without a loop",
    lambda: JIT(m.marks_without_loop, mesh())(m.params(), m.batch()),
    "is outside treduce, and the step has no treduce",
    "mpmd_jit_by_yield",
)

# --- Pipelines without a loop -----------------------------------------------------------


def by_yield(title: str, run: Any, *says: str, code: str = "stage-marks") -> None:
    case(f"Without a loop: {title}", code, run, *says)


BY_YIELD = jaxpp.mpmd_jit_by_yield

by_yield(
    "fewer marks than stages",
    lambda: BY_YIELD(m.tower, mesh(), target_num_stages=4)(m.params(), m.batch()[0]),
    "mistakes.py:",
    "target_num_stages=4, so expected 4 stage marks",
    "found 2",
)
by_yield(
    "no marks",
    lambda: BY_YIELD(m.unmarked_loss, mesh())(m.params(), m.batch()[0]),
    "mistakes.py:",
    "no stage marks",
)
by_yield(
    "marks whose results are not used",
    lambda: BY_YIELD(m.marks_not_assigned, mesh())(m.params(), m.batch()[0]),
    "mistakes.py:",
    "is not used",
)
by_yield(
    "target_num_stages of 0",
    lambda: BY_YIELD(m.tower, mesh(), target_num_stages=0),
    "mpmd_jit_by_yield: target_num_stages=0; expected a whole number from 1",
    code="schedule",
)
by_yield(
    "a loop inside",
    lambda: BY_YIELD(m.forward, mesh())(m.batch()),
    "mistakes.py:",
    "inside the mpmd_jit_by_yield of the function at ",
    code="unsupported",
)
by_yield(
    "no function",
    lambda: BY_YIELD(3, mesh()),
    "fun=3; expected a function",
    code="invalid-argument",
)
by_yield(
    "a result that is text",
    lambda: BY_YIELD(lambda x: "text", mesh())(m.batch()),
    "cases_stages.py:",
    "found 'text' of type str",
    code="invalid-argument",
)


def by_results(title: str, out_refs: Any, *says: str, **options: Any) -> None:
    def run() -> Any:
        return jaxpp.mpmd_jit_rev(m.params, mesh(), out_refs=out_refs, **options)()

    case(f"Split by results: {title}", "sharding", run, *says)


ON_1 = jaxpp.MpmdSharding(mesh(), {1}, P())
by_results("a rank that is no set", 1, "out_refs of result[0]: expected a set of ranks below 2")
by_results("no such rank", {2}, "expected a set of ranks below 2, found {2}")
by_results("no rank", set(), "expected a set of ranks below 2, found set()")
by_results("ranks for other results", [{0}] * 3, "out_refs: expected a pytree prefix")
by_results(
    "a sharding on other ranks",
    {0},
    "out_refs of result[0]: expected the ranks of its out_shardings, (1,), found (0,)",
    out_shardings=ON_1,
)

# --- Schedules and meshes ---------------------------------------------------------------

case(
    "Schedule and mesh of different size",
    "mesh",
    lambda: train(TWO, mpmd_mesh=mesh(4)),
    "mistakes.py:",
    "runs on 2 ranks",
    "the mesh has 4",
)
case(
    "An interleaved schedule for another mesh",
    "mesh",
    lambda: train(jaxpp.Interleaved1F1B(4, 4), layers=4),
    "runs on 4 ranks",
    "the mesh has 2",
)
case(
    "Stages that the ranks do not divide",
    "mesh",
    lambda: train(jaxpp.Interleaved1F1B(3, 2), layers=3),
    "3 stages cannot be divided over the 2 ranks",
)
case(
    "DualPipeV with another number of stages",
    "mesh",
    lambda: train(jaxpp.DualPipeV(6, 2), layers=6),
    "expected 4 stages, found 6",
)
case(
    "Too few microbatches for the schedule",
    "microbatch",
    lambda: train(jaxpp.DualPipeV(4, 2), layers=4),
    "at least as many microbatches as stages (4), found 3",
)
case(
    "A schedule by name",
    "schedule",
    lambda: loop(m.batch(), schedule="1f1b"),
    "mistakes.py:",
    "schedule='1f1b'",
    "expected an object",
)
case(
    "A schedule's class for a schedule",
    "schedule",
    lambda: loop(m.batch(), schedule=jaxpp.Std1F1B),
    "schedule=Std1F1B",
    "expected an object",
)
case(
    "A schedule of no stages",
    "schedule",
    lambda: jaxpp.Std1F1B(0),
    "Std1F1B: num_stages=0",
    "expected a whole number from 1",
)
case(
    "A schedule of no microbatches",
    "schedule",
    lambda: TWO.tasks(0),
    "n_mubatches=0",
    "expected a whole number from 1",
)
case(
    "A schedule without tasks",
    "schedule",
    lambda: train(jaxpp.BaseSchedule(2)),
    "mistakes.py:",
    "expected a method tasks(n_mubatches)",
)
case(
    "A user's schedule whose tasks takes no argument",
    "schedule",
    lambda: train(m.NoArgument(2)),
    "mistakes.py:",
    "expected a method `def tasks(self, n_mubatches)`, found `def tasks(self)`",
)
case(
    "A user's schedule without stages",
    "schedule",
    lambda: train(m.NoStages()),
    "mistakes.py:",
    "call super().__init__(num_stages)",
)
case(
    "Tasks fused without a list",
    "schedule",
    lambda: jaxpp.FusedTask(m.Task(0, 0, m.F), m.Task(0, 0, m.B)),
    "FusedTask([a, b])",
)
case(
    "A schedule from a missing file",
    "schedule",
    lambda: jaxpp.CsvSchedule("/no/such.csv"),
    "cannot read '/no/such.csv': No such file or directory",
)
case(
    "A schedule from a path of None",
    "schedule",
    lambda: jaxpp.CsvSchedule(None),
    "path=None; expected the path of a CSV file",
)
case(
    "A search without costs",
    "schedule",
    lambda: jaxpp.Searched([(1, 2)], 2),
    "costs=[(1, 2)]; expected a list with (forward, input gradient, weight gradient)",
)
case(
    "A schedule of one stage per rank for fewer ranks",
    "mesh",
    lambda: train(jaxpp.Std1F1B(4), layers=4),
    "runs on 4 ranks, but the mesh has 2",
    "or Interleaved1F1B(4, 2), which runs 2 stages per rank",
)
case(
    "More ranks than there are devices",
    "mesh",
    lambda: train(jaxpp.Std1F1B(16), mpmd_mesh=mesh(1)),
    "the mesh has 1",
    'jax.config.update("jax_num_cpu_devices", 16)',
    "it has 8 now",
)
case(
    "A mesh of None",
    "mesh",
    lambda: JIT(m.training_step(TWO)),
    "mpmd_mesh=None",
    "expected an MpmdMesh",
)
case(
    "A JAX mesh for an MpmdMesh",
    "mesh",
    lambda: JIT(m.training_step(TWO), mesh().jax_mesh),
    "mpmd_mesh=Mesh(",
    "expected an MpmdMesh",
)
case(
    "An axis that the mesh does not have",
    "mesh",
    lambda: jaxpp.MpmdMesh(mesh().jax_mesh, "pipe"),
    "mpmd_axis_name='pipe'",
    "expected one of ('stage',)",
)
case(
    "ranks_per_device of 0",
    "mesh",
    lambda: jaxpp.MpmdMesh(mesh().jax_mesh, "stage", ranks_per_device=0),
    "ranks_per_device=0; expected a whole number above 0",
)
case(
    "A rank with one device twice",
    "mesh",
    lambda: jaxpp.MpmdMesh(devices_mesh([[0, 0]]), "stage"),
    "rank 0 names a device more than once",
    "ranks_per_device=",
)
case(
    "Ranks that share some of their devices",
    "mesh",
    lambda: jaxpp.MpmdMesh(devices_mesh([[0, 1], [1, 2]]), "stage"),
    "ranks 0 and 1 share device",
    "expected the same group or disjoint groups",
)
case(
    "A JAX mesh of None",
    "mesh",
    lambda: jaxpp.MpmdMesh(None, "stage"),
    "jax_mesh=None",
    "expected",
)
case(
    "Ranks that the mesh does not have",
    "mesh",
    lambda: mesh().mpmd_submesh([2]),
    "idxs=[2]",
    "expected ranks from 0 to 1",
)


def user_schedule(title: str, edit: Any, *says: str, code: str = "schedule") -> None:
    run = lambda: train(m.UserSchedule(edit))  # noqa: E731
    case(f"A user's schedule {title}", code, run, "mistakes.py:", *says)


user_schedule("misses a task", m.drop_last, "bwd_1__2 is missing from rank 1")
user_schedule("repeats a task", m.repeat_first, "fwd_1__0 is listed twice", "entries 0 and 6")
user_schedule(
    "lists a task before what it needs",
    m.backward_first,
    "deadlocks",
    "bwd_1__2 (entry 0) before fwd_1__2 (entry 3)",
)
user_schedule(
    "deadlocks",
    m.wait_in_a_circle,
    "2 ranks wait for each other",
    "rank 0 stops at bwd_0__0",
    "rank 1 stops at fwd_1__1",
    "to break this cycle",
)
user_schedule(
    "lists a task on another rank",
    m.task_on_wrong_rank,
    "list of rank 1",
    "stage 1 is on rank 0",
)
user_schedule("names a missing stage", m.stage_that_is_not, "stage 7", "stages 0 to 1")
user_schedule(
    "has a negative microbatch",
    m.negative_microbatch,
    "entry 6",
    "mubatch_idx=-1; expected a whole",
)
user_schedule("lists a task without fields", m.task_without_fields, "entry 0", "stage_id=None")
user_schedule("lists text", m.text_for_task, "rank 1, entry 0", "expected a Task", "'fwd_1__0'")
user_schedule("has text for a kind", m.text_for_kind, "fwd_or_bwd='FWD'", "TaskType.FWD")
user_schedule(
    "returns no lists", m.no_lists, "expected tasks(3) to return a list", "[None, None]"
)
user_schedule("is for more ranks", m.three_ranks, "for 3 ranks", "the mesh has 2", code="mesh")

# --- A function called twice ------------------------------------------------------------

case(
    "A loss computed apart from its gradient",
    "stage-marks",
    lambda: JIT(m.loss_and_gradient_apart, mesh())(m.params(), m.batch()),
    "runs 2 times per microbatch",
    "mistakes.py:",
    "jax.value_and_grad(fun)(params, x)` runs it once for both",
)
case(
    "One stage and more marks",
    "stage-marks",
    lambda: train(jaxpp.Std1F1B(1), layers=3, mpmd_mesh=mesh(1)),
    "has 1 stage, so expected 1 stage mark",
    "or give the schedule 3 stages",
)

# --- Valid, but probably unintended -----------------------------------------------------

warned(
    "A mesh axis that nothing uses",
    lambda: JIT(m.wide_step, mesh(2, data=2))(m.params(), m.batch()),
    "no argument, weight or constraint is sharded along the mesh axis 'data'",
    "the 2 devices along it compute the same",
)
warned(
    "A large leaf that each device holds whole",
    lambda: JIT(m.wide_step, mesh(2, data=2), in_specs=([P("data"), None], P(None, "data")))(
        m.wide_params(), m.wide_batch()
    ),
    "each of the 2 devices of a rank holds a full copy of ws[1] (4.0 MiB)",
    "other leaves of ws are sharded",
)
warned(
    "A large constant",
    lambda: JIT(m.step_with_a_constant, mesh())(m.wide_params(), m.wide_batch()),
    "closes over a constant of 4.0 MiB, float32[1024, 1024], used at",
)
