"""The public names of the package."""

from jaxpp.array import ArrayRef, MpmdArray
from jaxpp.by_yield import mpmd_jit_by_yield, mpmd_jit_rev
from jaxpp.errors import JaxppError, JaxppTypeError, JaxppValueError, NanError
from jaxpp.mesh import MpmdMesh, MpmdSharding
from jaxpp.operations import Add, Concat, Max, Operation
from jaxpp.plan.auto import Auto
from jaxpp.remote.mesh import RemoteMpmdMesh
from jaxpp.run.loading import load
from jaxpp.run.reshard import mpmd_to_spmd_reshard, spmd_to_mpmd_reshard
from jaxpp.run.times import collect_task_times_ms
from jaxpp.schedules import (
    V1F1B,
    BaseSchedule,
    BreadthFirst,
    CsvSchedule,
    DualPipeV,
    Eager1F1B,
    FusedTask,
    GPipe,
    Interleaved1F1B,
    InterleavedBaseSchedule,
    InterleavedGPipe,
    InterleavedZeroBubble,
    KimiK2,
    Searched,
    Std1F1B,
    Task,
    TaskType,
    VHalf,
    VMin,
    ZeroBubble,
    ZeroBubbleH2,
    ZeroBubbleV,
)
from jaxpp.step import mpmd_jit_with_loop
from jaxpp.trace.auto_stages import auto_stages
from jaxpp.trace.cross import cross_mpmd_all_reduce, cross_mpmd_stack, place_with
from jaxpp.trace.layers import stages
from jaxpp.trace.loop import treduce, treduce_i
from jaxpp.trace.marks import mark_stage_end, pipeline_enter_stage

__all__ = [
    "Add",
    "ArrayRef",
    "Auto",
    "BaseSchedule",
    "BreadthFirst",
    "Concat",
    "CsvSchedule",
    "DualPipeV",
    "Eager1F1B",
    "FusedTask",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedBaseSchedule",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "JaxppError",
    "JaxppTypeError",
    "JaxppValueError",
    "KimiK2",
    "Max",
    "MpmdArray",
    "MpmdMesh",
    "MpmdSharding",
    "NanError",
    "Operation",
    "RemoteMpmdMesh",
    "Searched",
    "Std1F1B",
    "Task",
    "TaskType",
    "V1F1B",
    "VHalf",
    "VMin",
    "ZeroBubble",
    "ZeroBubbleH2",
    "ZeroBubbleV",
    "auto_stages",
    "collect_task_times_ms",
    "cross_mpmd_all_reduce",
    "cross_mpmd_stack",
    "load",
    "mark_stage_end",
    "mpmd_jit_by_yield",
    "mpmd_jit_rev",
    "mpmd_jit_with_loop",
    "mpmd_to_spmd_reshard",
    "pipeline_enter_stage",
    "place_with",
    "spmd_to_mpmd_reshard",
    "stages",
    "treduce",
    "treduce_i",
]
