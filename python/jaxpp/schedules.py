"""Schedules: the order in which each rank runs its forward and backward tasks.

The C library builds and checks the built-in schedules. A user-defined schedule is a subclass of
`BaseSchedule` whose `tasks` returns the lists.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import numbers
import operator
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax

from jaxpp import _core
from jaxpp.errors import JaxppError, check_whole, counted, is_count, make_error, shorten

__all__ = [
    "BaseSchedule",
    "BreadthFirst",
    "CsvSchedule",
    "DualPipeV",
    "Eager1F1B",
    "FusedTask",
    "GPipe",
    "Interleaved1F1B",
    "InterleavedBaseSchedule",
    "InterleavedGPipe",
    "InterleavedZeroBubble",
    "KimiK2",
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
    "check_count",
]


class TaskType(enum.Enum):
    """The part of a stage's computation that a task runs."""

    FWD = _core.TASK_FWD
    BWD = _core.TASK_BWD
    BWD_I = _core.TASK_BWD_I  # gradients of the stage's inputs
    BWD_W = _core.TASK_BWD_W  # gradients of the stage's weights

    @property
    def default_latency(self) -> int:
        return 2 if self is TaskType.BWD else 1


@dataclasses.dataclass(frozen=True)
class Task:
    """One stage's forward or backward for one microbatch."""

    stage_id: int
    mubatch_idx: int
    fwd_or_bwd: TaskType
    latency: int | None = None  # None: the default of its kind

    def __post_init__(self) -> None:
        if not isinstance(self.fwd_or_bwd, TaskType):
            raise make_error(
                "schedule",
                f"Task(stage_id={self.stage_id!r}, mubatch_idx={self.mubatch_idx!r}, "
                f"fwd_or_bwd={shorten(self.fwd_or_bwd)}): expected fwd_or_bwd to be "
                "TaskType.FWD, BWD, BWD_I or BWD_W",
                wrong_type=True,
            )
        if self.latency is None:
            object.__setattr__(self, "latency", self.fwd_or_bwd.default_latency)

    @classmethod
    def make(
        cls,
        stage_id: int,
        mubatch_idx: int,
        fwd_or_bwd: TaskType,
        latency: int | None = None,
    ) -> Task:
        """The same expression as `Task(...)`."""
        return cls(stage_id, mubatch_idx, fwd_or_bwd, latency)

    def __str__(self) -> str:
        return f"{self.fwd_or_bwd.name.lower()}_{self.stage_id}__{self.mubatch_idx}"


class FusedTask(tuple[Task, ...]):
    """Tasks that run back to back: `FusedTask([a, b])`."""

    __slots__ = ()

    def __new__(cls, *tasks: Iterable[Task]) -> FusedTask:
        if len(tasks) == 1 and isinstance(tasks[0], Iterable):
            return super().__new__(cls, tasks[0])
        raise make_error(
            "schedule",
            f"FusedTask: expected one list of Tasks, as in FusedTask([a, b]), found "
            f"{', '.join(map(shorten, tasks)) or 'nothing'}",
            wrong_type=True,
        )

    @property
    def latency(self) -> int:
        """The total time of its tasks."""
        return sum(task.latency or 0 for task in self)

    def __str__(self) -> str:
        return f"FusedTask({', '.join(str(task) for task in self)})"

    __repr__ = __str__


Row: TypeAlias = Sequence[Task | FusedTask | None]
# The fields of a _core.ScheduleTask: kind, joins_next, latency, stage, microbatch.
_CoreTask: TypeAlias = tuple[int, bool, int, int, int]
_IDLE: _CoreTask = (_core.TASK_IDLE, False, 0, 0, 0)

# The largest number that the planner can represent; it reports plans that are too large.
_LARGEST = _core.LARGEST_COUNT


def check_count(what: str, value: Any) -> int:
    """Checks for a whole number from 1. Raises JaxppError("schedule") about `what`."""
    return check_whole(what, value, 1, "schedule")


def _other_size(what: str, ranks: int, mpmd_dim: int, instead: str = "") -> JaxppError:
    """The error for a schedule and a mesh that differ in their number of ranks."""
    more = ""
    devices = jax.devices()
    if len(devices) < ranks and devices[0].platform == "cpu":
        more = (
            f'. For {ranks} CPU devices call jax.config.update("jax_num_cpu_devices", {ranks}) '
            f"before JAX is first used; it has {len(devices)} now"
        )
    elif len(devices) < ranks:
        more = (
            f". JAX has {len(devices)} here; pass ranks_per_device= to MpmdMesh to let ranks "
            "share devices"
        )
    return make_error(
        "mesh",
        f"schedule {what} {counted(ranks, 'rank')}, but the mesh has {mpmd_dim} along its "
        f"pipeline axis; give both the same size{instead}{more}",
    )


class BaseSchedule:
    """A schedule of `num_stages` stages. Subclasses define `tasks`.

    Built-in schedules of the same class and parameters are equal, so as static arguments they
    share a compiled step. An instance of your own class equals only itself, unless the
    class defines `__eq__` and `__hash__`.
    """

    def __init__(self, num_stages: int) -> None:
        self.num_stages = check_count(f"{type(self).__name__}: num_stages", num_stages)

    def _parameters(self) -> tuple[Any, ...] | None:
        """The parameters that equal objects share; None: an object equals only itself."""
        return None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other) or not type(self).__module__.startswith("jaxpp."):
            return NotImplemented
        assert isinstance(other, BaseSchedule)
        mine = self._parameters()
        return mine is not None and mine == other._parameters()

    def __hash__(self) -> int:
        own = type(self).__module__.startswith("jaxpp.")
        mine = self._parameters() if own else None
        return object.__hash__(self) if mine is None else hash((type(self), mine))

    def tasks(self, n_mubatches: int) -> list[list[Task | FusedTask | None]]:
        """A list per rank of the tasks it runs, in order; None is an idle slot."""
        raise make_error(
            "schedule",
            f"schedule {type(self).__name__}: expected a method tasks(n_mubatches) that "
            "returns a list of Tasks per rank; found none",
        )

    def get_mpmd_idx(self, stage_id: int) -> int:
        """The rank that runs a stage; a helper for `tasks`, whose lists take precedence."""
        return stage_id

    def build_for(self, n_mubatches: int, mpmd_dim: int, num_marks: int) -> _core.Schedule:
        """Like `build`, for a loop whose body has `num_marks` stage marks."""
        del num_marks
        return self.build(n_mubatches, mpmd_dim)

    def build(self, n_mubatches: int, mpmd_dim: int) -> _core.Schedule:
        """The checked schedule for a mesh of `mpmd_dim` ranks. Raises JaxppError."""
        self._check_subclass(n_mubatches)
        rows = self.tasks(n_mubatches)
        name = type(self).__name__
        if not _is_list(rows) or not all(_is_list(row) for row in rows):
            raise make_error(
                "schedule",
                f"schedule {name}: expected tasks({n_mubatches}) to return a list of Tasks "
                f"per rank, found {shorten(rows)}",
                wrong_type=True,
            )
        if len(rows) != mpmd_dim:
            raise _other_size(f"{name} lists tasks for", len(rows), mpmd_dim)
        flat = [_flatten_row(name, rank, row) for rank, row in enumerate(rows)]
        return _core.Schedule.from_rows(name, self.num_stages, mpmd_dim, n_mubatches, flat)

    def _check_subclass(self, n_mubatches: int) -> None:
        """Reports a subclass that does not call `super().__init__` or whose `tasks` takes no
        argument."""
        name = type(self).__name__
        if not is_count(getattr(self, "num_stages", None), 1):
            raise make_error(
                "schedule",
                f"schedule {name}: expected num_stages to be a whole number from 1 to "
                f"{_LARGEST}, found {shorten(getattr(self, 'num_stages', None))}; call "
                "super().__init__(num_stages) in its __init__",
            )
        try:
            inspect.signature(self.tasks).bind(n_mubatches)
        except (TypeError, ValueError):
            raise make_error(
                "schedule",
                f"schedule {name}: tasks({n_mubatches}) cannot be called; expected a method "
                f"`def tasks(self, n_mubatches)`, found {_declared(self.tasks)}",
            ) from None


def _declared(given: Any) -> str:
    """The signature of a method as written, if it can be determined."""
    if not inspect.ismethod(given):
        return shorten(given)
    return f"`def {given.__name__}({', '.join(inspect.signature(given.__func__).parameters)})`"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | Task)


def _flatten_task(where: str, task: Any, joins_next: bool) -> _CoreTask:
    if not isinstance(task, Task):
        raise make_error(
            "schedule",
            f"{where}: expected a Task, a FusedTask of Tasks, or None, found {shorten(task)}",
            wrong_type=True,
        )
    for field in ("stage_id", "mubatch_idx", "latency"):
        found = getattr(task, field, None)
        if not is_count(found, 0):
            raise make_error(
                "schedule",
                f"{where}: {field}={shorten(found)}; expected a whole number from 0 to "
                f"{_LARGEST}",
            )
    kind = getattr(task, "fwd_or_bwd", None)  # a subclass may not have set it
    if not isinstance(kind, TaskType):
        raise make_error(
            "schedule",
            f"{where}: fwd_or_bwd={shorten(kind)}; expected TaskType.FWD, BWD, BWD_I or BWD_W",
        )
    assert task.latency is not None
    latency = min(operator.index(task.latency), _core.LARGEST_LATENCY)
    stage, microbatch = operator.index(task.stage_id), operator.index(task.mubatch_idx)
    return (kind.value, joins_next, latency, stage, microbatch)


def _flatten_row(name: str, rank: int, row: Row) -> list[_CoreTask]:
    flat: list[_CoreTask] = []
    for position, entry in enumerate(row):
        if entry is None:
            flat.append(_IDLE)
            continue
        members = entry if isinstance(entry, tuple) else (entry,)
        for i, task in enumerate(members):
            where = f"schedule {name}: rank {rank}, entry {position}"
            flat.append(_flatten_task(where, task, i + 1 < len(members)))
    return flat


def _unflatten_row(flat: list[_core.ScheduleTask]) -> list[Task | FusedTask | None]:
    row: list[Task | FusedTask | None] = []
    group: list[Task] = []
    for task in flat:
        if task.kind == _core.TASK_IDLE:
            row.append(None)
            continue
        group.append(Task(task.stage, task.microbatch, TaskType(task.kind), task.latency))
        if task.joins_next:
            continue
        row.append(group[0] if len(group) == 1 else FusedTask(group))
        group = []
    return row


class InterleavedBaseSchedule(BaseSchedule):
    """A schedule with several stages per rank. Subclasses define `tasks`."""

    def __init__(self, num_stages: int, mpmd_dim: int) -> None:
        super().__init__(num_stages)
        self.mpmd_dim = check_count(f"{type(self).__name__}: mpmd_dim", mpmd_dim)
        _core.Schedule.check(self._checked_as, self.num_stages, self.mpmd_dim)

    @property
    def _checked_as(self) -> str:
        """The built-in schedule that accepts the same numbers of stages and ranks."""
        return Interleaved1F1B.core_name

    def get_mpmd_idx(self, stage_id: int) -> int:
        """The rank that runs a stage, in round-robin order."""
        return stage_id % self.mpmd_dim


class _BuiltIn(BaseSchedule):
    """A schedule that the C library builds under `core_name`."""

    core_name: str
    fuse_steady_state = False

    @property
    def _ranks(self) -> int:
        return self.num_stages

    def _parameters(self) -> tuple[Any, ...] | None:
        return self.num_stages, self._ranks, self.fuse_steady_state

    def build(self, n_mubatches: int, mpmd_dim: int) -> _core.Schedule:
        """The checked schedule for a mesh of `mpmd_dim` ranks. Raises JaxppError."""
        n_mubatches = check_count(f"{type(self).__name__}: n_mubatches", n_mubatches)
        if mpmd_dim != self._ranks:
            what = f"{type(self).__name__} of {counted(self.num_stages, 'stage')} runs on"
            raise _other_size(what, self._ranks, mpmd_dim, self._several_a_rank(mpmd_dim))
        return _core.Schedule.build(
            self.core_name, self.num_stages, mpmd_dim, n_mubatches, self.fuse_steady_state
        )

    def _several_a_rank(self, mpmd_dim: int) -> str:
        """Suggests a schedule that runs the same stages on fewer ranks."""
        if self._ranks != self.num_stages or mpmd_dim < 2 or self.num_stages % mpmd_dim:
            return ""
        name = {"GPipe": "InterleavedGPipe", "ZeroBubble": "InterleavedZeroBubble"}.get(
            type(self).__name__, "Interleaved1F1B"
        )
        several = self.num_stages // mpmd_dim
        return (
            f", or {name}({self.num_stages}, {mpmd_dim}), which runs {several} stages per rank"
        )

    def tasks(self, n_mubatches: int) -> list[list[Task | FusedTask | None]]:
        """A list per rank of the tasks it runs, in order; None is an idle slot."""
        rows = self.build(n_mubatches, self._ranks).rows()
        return [_unflatten_row(row) for row in rows]

    def get_mpmd_idx(self, stage_id: int) -> int:
        """The rank that runs a stage."""
        rows = self.build(self.num_stages, self._ranks).rows()
        for rank, row in enumerate(rows):
            if any(t.stage == stage_id and t.kind != _core.TASK_IDLE for t in row):
                return rank
        raise make_error(
            "schedule",
            f"{self!r}.get_mpmd_idx: expected a stage below {self.num_stages}, found "
            f"{shorten(stage_id)}",
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_stages})"


class Std1F1B(_BuiltIn):
    """One forward, one backward (PipeDream-Flush, arXiv 2006.09503); stage = rank."""

    core_name = "1f1b"


class Eager1F1B(_BuiltIn):
    """1F1B with more forwards in its warmup (arXiv 2211.05322); stage = rank."""

    core_name = "eager-1f1b"


class GPipe(_BuiltIn):
    """All forwards, then all backwards (arXiv 1811.06965); stage = rank."""

    core_name = "gpipe"


class ZeroBubble(_BuiltIn):
    """ZB-H1 (arXiv 2401.10241): weight gradients fill the bubbles; stage = rank."""

    core_name = "zb-h1"


class ZeroBubbleH2(_BuiltIn):
    """ZB-H2 (arXiv 2401.10241): no bubble inside a rank, twice the memory."""

    core_name = "zb-h2"


class _OnRanks(_BuiltIn, InterleavedBaseSchedule):
    @property
    def _checked_as(self) -> str:
        return self.core_name

    @property
    def _ranks(self) -> int:
        return self.mpmd_dim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_stages}, {self.mpmd_dim})"


class Interleaved1F1B(_OnRanks):
    """Several stages per rank, stage s on rank s mod `mpmd_dim` (arXiv 2104.04473)."""

    core_name = "interleaved-1f1b"

    def __init__(self, num_stages: int, mpmd_dim: int, fuse_steady_state: bool = False) -> None:
        super().__init__(num_stages, mpmd_dim)
        self.fuse_steady_state = fuse_steady_state


class InterleavedGPipe(_OnRanks):
    """All forwards, then all backwards, with several stages per rank."""

    core_name = "interleaved-gpipe"


class KimiK2(_OnRanks):
    """Interleaved 1F1B with one more warmup forward (arXiv 2507.20534)."""

    core_name = "kimi-k2"


class DualPipeV(_OnRanks):
    """DualPipe folded to a V: rank r runs stages r and 2 * `mpmd_dim` - 1 - r."""

    core_name = "dualpipe-v"


class BreadthFirst(_OnRanks):
    """LoopedBFS (arXiv 2211.05953): each stage runs all microbatches in a row."""

    core_name = "breadth-first"


class InterleavedZeroBubble(_OnRanks):
    """Interleaved 1F1B whose weight gradients fill the bubbles (arXiv 2401.10241)."""

    core_name = "interleaved-zb"


class ZeroBubbleV(_OnRanks):
    """ZB-V (arXiv 2401.10241): two stages per rank in a V, with 1F1B's memory."""

    core_name = "zb-v"


class VHalf(_OnRanks):
    """V-Half (arXiv 2405.15362): two stages per rank in a V, half of 1F1B's memory."""

    core_name = "v-half"


class VMin(_OnRanks):
    """V-Min (arXiv 2405.15362): two stages per rank in a V, a third of 1F1B's memory."""

    core_name = "v-min"


class V1F1B(_OnRanks):
    """1F1B with two stages per rank in a V (arXiv 2405.15362), unsplit backwards."""

    core_name = "v-1f1b"


def _check_size(name: str, what: str, expected: int, found: int) -> None:
    if expected == found:
        return
    if what == "ranks":
        raise _other_size(f"{name} is for", expected, found)
    raise make_error("microbatch", f"schedule {name} needs {expected} {what}, found {found}")


def _read_text(path: Any) -> tuple[str, str]:
    """A file's name for messages, and its text."""
    try:
        name = os.fsdecode(path)
    except TypeError:
        raise make_error(
            "schedule",
            f"CsvSchedule: path={shorten(path)}; expected the path of a CSV file",
            wrong_type=True,
        ) from None
    try:
        # Skip the byte order mark that Windows writes.
        return name, pathlib.Path(name).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise make_error(
            "schedule",
            f"{name}:{line}: expected a CSV file in UTF-8, found the byte "
            f"0x{error.object[error.start]:02x}",
        ) from None
    except (OSError, ValueError) as error:  # ValueError: the name contains a NUL
        problem = getattr(error, "strerror", None) or error
        raise make_error(
            "schedule", f"CsvSchedule: cannot read {name!r}: {problem}; expected a CSV file"
        ) from None


class CsvSchedule(BaseSchedule):
    """A schedule in a CSV file in the format of torch.distributed.pipelining.

    The file determines sizes and placement. It is checked when it is read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path, self._text = _read_text(path)
        self._schedule = _core.Schedule.from_csv(self.path, self._text)
        sizes = self._schedule.sizes()
        self.mpmd_dim, self.n_mubatches = sizes.ranks, sizes.microbatches
        super().__init__(sizes.stages)

    def _parameters(self) -> tuple[Any, ...] | None:
        return self.path, self._text

    def build(self, n_mubatches: int, mpmd_dim: int) -> _core.Schedule:
        _check_size(self.path, "ranks", self.mpmd_dim, mpmd_dim)
        _check_size(self.path, "microbatches", self.n_mubatches, n_mubatches)
        return self._schedule

    def tasks(self, n_mubatches: int) -> list[list[Task | FusedTask | None]]:
        rows = self.build(n_mubatches, self.mpmd_dim).rows()
        return [_unflatten_row(row) for row in rows]


def _is_time(given: Any) -> bool:
    time: Any = given if isinstance(given, numbers.Real) else -1
    return bool(0 <= time < 1e30)


def _check_costs(given: Any) -> list[tuple[float, float, float]]:
    """Checks the three costs of each stage."""
    try:
        rows = [tuple(row) for row in given]
    except TypeError:
        rows = []
    if not rows or not all(len(row) == 3 and all(map(_is_time, row)) for row in rows):
        raise make_error(
            "schedule",
            f"Searched: costs={shorten(given)}; expected a list with (forward, input "
            "gradient, weight gradient) per stage, all at least 0",
        )
    return [(float(f), float(i), float(w)) for f, i, w in rows]


class Searched(BaseSchedule):
    """The best schedule that a search of `seconds` finds for stages of unequal cost.

    What it finds depends on the speed of the machine. The processes of a job search separately,
    and refuse to run different schedules: there, search once with `jaxpp schedule search` and
    pass the file to `CsvSchedule`.

    Args:
      costs: (forward, input gradient, weight gradient) of each stage for one microbatch.
      memory_limit: bytes of activations that a rank may keep; 0: no limit.
      activation_bytes: the activations of one stage and microbatch.
      latency: the delay between a task's end and its use on another rank, in the unit of costs.
      seconds: the time limit of the search. Ctrl-C ends it.
      host_bandwidth: bytes per unit of the costs that a rank moves to the host, and back; ranks
        over the limit can then offload their activations. 0: they do not.
      input_bytes: of the activations, a stage's input; ranks over the limit can then keep only
        that and recompute the others. 0: they do not.

    Attributes:
      found: by the number of microbatches, what a search found: its `activations` are "kept",
        "offloaded" (pass `offload=True` to the step) or "recomputed" (`jax.checkpoint`), and
        its `makespans` are those of the three.
    """

    def __init__(
        self,
        costs: Sequence[tuple[float, float, float]],
        mpmd_dim: int,
        *,
        memory_limit: int = 0,
        activation_bytes: int = 1,
        latency: float = 0.0,
        seconds: float = 2.0,
        host_bandwidth: float = 0.0,
        input_bytes: int = 0,
    ) -> None:
        self._costs = _check_costs(costs)
        super().__init__(len(self._costs))
        self.mpmd_dim = check_count("Searched: mpmd_dim", mpmd_dim)
        counts = {
            "memory_limit": memory_limit,
            "activation_bytes": activation_bytes,
            "input_bytes": input_bytes,
        }
        for name, given in counts.items():
            if not isinstance(given, int) or not 0 <= given < 2**63:
                raise make_error(
                    "schedule",
                    f"Searched: {name}={shorten(given)}; expected a number of bytes",
                )
        measures = {"latency": latency, "seconds": seconds, "host_bandwidth": host_bandwidth}
        for name, time in measures.items():
            if not _is_time(time):
                raise make_error(
                    "schedule",
                    f"Searched: {name}={shorten(time)}; expected a number of at least 0",
                )
        limits = (memory_limit, activation_bytes, seconds, input_bytes)
        self._options = (latency, *limits, host_bandwidth)
        self.found: dict[int, _core.SearchResult] = {}

    def _parameters(self) -> tuple[Any, ...] | None:
        return tuple(self._costs), self.mpmd_dim, self._options

    def build(self, n_mubatches: int, mpmd_dim: int) -> _core.Schedule:
        _check_size("Searched", "ranks", self.mpmd_dim, mpmd_dim)
        if n_mubatches not in self.found:
            self.found[n_mubatches] = _core.Schedule.search(
                self.num_stages, mpmd_dim, n_mubatches, self._costs, *self._options
            )
        return self.found[n_mubatches].schedule

    def tasks(self, n_mubatches: int) -> list[list[Task | FusedTask | None]]:
        rows = self.build(n_mubatches, self.mpmd_dim).rows()
        return [_unflatten_row(row) for row in rows]
