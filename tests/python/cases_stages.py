"""Marks, schedules and meshes that do not fit."""

from __future__ import annotations

from typing import Any

import jaxpp.api as jaxpp
import mistakes as m
from cases import JIT, TWO, case, loop, mesh, train

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
        # No gradients: JAX itself refuses those of a while loop.
        lambda under=under: JIT(
            lambda ws, xs: jaxpp.treduce(lambda x: under(ws, x), xs, TWO, 0, jaxpp.Add), mesh()
        )(m.params(), m.batch()),
        "stage mark at ",
        "mistakes.py:",
        f"under `{primitive}`",
    )
case(
    "A mark of what is no array",
    "invalid-argument",
    m.mark_of_text,
    "mistakes.py:",
    "x['x']",
    "expected an array",
    "found 'text'",
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
    "need 4 stages, found 6",
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
    "expected it to define tasks(n_mubatches)",
)
case(
    "No mesh",
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
case("No JAX mesh", "mesh", lambda: jaxpp.MpmdMesh(None, "stage"), "jax_mesh=None", "expected")
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
user_schedule("names a stage that is not", m.stage_that_is_not, "stage 7", "stages 0 to 1")
user_schedule(
    "counts below zero", m.negative_microbatch, "entry 6", "mubatch_idx=-1; expected a whole"
)
user_schedule("lists text", m.text_for_task, "rank 1, entry 0", "expected a Task", "'fwd_1__0'")
user_schedule("has text for a kind", m.text_for_kind, "fwd_or_bwd='FWD'", "TaskType.FWD")
user_schedule("is no lists", m.no_lists, "expected tasks(3) to give a list", "[None, None]")
user_schedule("is for more ranks", m.three_ranks, "for 3 ranks", "the mesh has 2", code="mesh")
