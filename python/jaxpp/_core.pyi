"""The types of the extension module over JaxPP's C library."""

from collections.abc import Callable as _Callable
from collections.abc import Sequence
from typing import Any, Final, TypeAlias, final

from _typeshed import StrPath, structseq
from typing_extensions import Buffer, CapsuleType

# --- Errors -----------------------------------------------------------------------------

class JaxppError(Exception):
    """Bad input or a failed step. The process can continue.

    Attributes:
      code: the kind of error: "stage-marks", "out-of-memory", ...
    """

    code: str

class JaxppValueError(JaxppError, ValueError):
    """An invalid argument: an array, a schedule, a mesh or an option."""

class JaxppTypeError(JaxppValueError, TypeError):
    """An argument of the wrong type."""

class NanError(JaxppError, FloatingPointError):
    """A task computed a NaN or an infinity under `jax_debug_nans` or `jax_debug_infs`."""

__version__: Final[str]
ERROR_CODES: Final[tuple[str, ...]]

# --- Constants --------------------------------------------------------------------------

OP_CALL: Final[int]
OP_MARK: Final[int]
OP_MARK_BACKWARD: Final[int]
OP_ADD: Final[int]
OP_PLACE: Final[int]
OP_TASK: Final[int]
OP_INIT: Final[int]
OP_ACCUMULATE: Final[int]
OP_SUM: Final[int]
OP_PACK: Final[int]
OP_UNPACK: Final[int]
OP_REPEAT: Final[int]
FLAG_CHEAP: Final[int]
FLAG_BACKWARD: Final[int]
FLAG_EFFECT: Final[int]
FLAG_COPY: Final[int]
FLAG_ZEROS: Final[int]
FLAG_BODY: Final[int]
FLAG_LINEAR: Final[int]
REDUCE_ADD: Final[int]
REDUCE_MAX: Final[int]
REDUCE_CONCAT: Final[int]
REDUCE_CUSTOM: Final[int]
TASK_IDLE: Final[int]
TASK_FWD: Final[int]
TASK_BWD: Final[int]
TASK_BWD_I: Final[int]
TASK_BWD_W: Final[int]
TRIAL_MICROBATCHES: Final[int]
NONE: Final[int]
NO_DEVICE: Final[int]
ANY_RANK: Final[int]
NO_RANK: Final[int]
LARGEST_COUNT: Final[int]
LARGEST_LATENCY: Final[int]
CALLBACK_ATTRIBUTE: Final[str]

# --- Functions --------------------------------------------------------------------------

def device_bytes(dtype: str, elements: int, /) -> int: ...
def make_error(code: str, message: str, wrong_type: bool, /) -> JaxppError: ...
def check_process() -> None: ...
def option(name: str, /) -> str | None: ...
def option_ms(name: str, /) -> int: ...
def misspelt_options() -> str | None: ...
def callback_handler(platform: str, /) -> CapsuleType: ...
def cut_stages(
    costs: Sequence[float],
    makers: Sequence[int],
    bytes: Sequence[int],
    used: Sequence[int],
    users: Sequence[int],
    num_stages: int,
    /,
) -> list[int]: ...
def join_traces(texts: list[str], /) -> str: ...
def draw_traces(texts: list[str], columns: int, color: bool, /) -> str: ...
def profile_plugin() -> CapsuleType: ...
def runtimes_close() -> bool: ...
def callbacks_close() -> None: ...
def stores_close() -> None: ...
def job_divide_ranks(
    owners: Sequence[int],
    num_ranks: int,
    process: int,
    on_cpu: bool,
    shares_devices: bool,
    /,
) -> JobPart: ...
def job_compare_facts(process: int, mine: str, other: int, theirs: str, /) -> None: ...
def job_compare_programs(process: int, mine: str, other: int, theirs: str, /) -> None: ...
def job_join(
    process: int, num_processes: int, address: str, port: int, token: bytes, /
) -> int: ...
def job_check() -> None: ...
def job_has_left(process: int, /) -> bool: ...
def job_note_absent(process: int, text: str, /) -> None: ...
def job_fail(text: str, own: bool, /) -> None: ...
def job_begin_wait(name: str, processes: Sequence[int] | None, /) -> object: ...
def job_leave(wait: bool, /) -> bool: ...
def job_end() -> None: ...
def job_await_end() -> str | None: ...

# --- Records ----------------------------------------------------------------------------

@final
class StagedTask(
    structseq[Any],
    tuple[str, int, int, int | None, int | None, list[int], list[int], list[int], int],
):
    __match_args__: Final = (
        "name",
        "kind",
        "rank",
        "loop",
        "stage",
        "ops",
        "inputs",
        "outputs",
        "repeats",
    )
    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def loop(self) -> int | None: ...
    @property
    def stage(self) -> int | None: ...
    @property
    def ops(self) -> list[int]: ...
    @property
    def inputs(self) -> list[int]: ...
    @property
    def outputs(self) -> list[int]: ...
    @property
    def repeats(self) -> int: ...

@final
class StagedOp(structseq[Any], tuple[int, int, int | None, list[int], int, int]):
    __match_args__: Final = ("kind", "attr", "loop", "inputs", "first_output", "num_outputs")
    @property
    def kind(self) -> int: ...
    @property
    def attr(self) -> int: ...
    @property
    def loop(self) -> int | None: ...
    @property
    def inputs(self) -> list[int]: ...
    @property
    def first_output(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...

@final
class PlacedValue(structseq[Any], tuple[int, list[int], str]):
    __match_args__: Final = ("value", "ranks", "memory")
    @property
    def value(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def memory(self) -> str: ...

@final
class RankSummary(structseq[Any], tuple[int, int, int, int]):
    __match_args__: Final = (
        "instructions",
        "peak_bytes",
        "reserved_bytes",
        "peak_host_bytes",
    )
    @property
    def instructions(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def peak_host_bytes(self) -> int: ...

@final
class SearchResult(
    structseq[Any],
    tuple[
        Schedule,
        str,
        float,
        float,
        str | None,
        float,
        int,
        str,
        tuple[float, float, float],
        bool,
    ],
):
    __match_args__: Final = (
        "schedule",
        "name",
        "makespan",
        "bound",
        "built_in",
        "built_in_makespan",
        "tried",
        "activations",
        "makespans",
        "offloads",
    )
    @property
    def activations(self) -> str: ...
    @property
    def makespans(self) -> tuple[float, float, float]: ...
    @property
    def offloads(self) -> bool: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def name(self) -> str: ...
    @property
    def makespan(self) -> float: ...
    @property
    def bound(self) -> float: ...
    @property
    def built_in(self) -> str | None: ...
    @property
    def built_in_makespan(self) -> float: ...
    @property
    def tried(self) -> int: ...

@final
class DeviceInfo(structseq[Any], tuple[int, str, int]):
    __match_args__: Final = ("id", "kind", "hardware_id")
    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def hardware_id(self) -> int: ...

@final
class GlobalDevice(structseq[Any], tuple[int, int, str]):
    __match_args__: Final = ("id", "node", "kind")
    @property
    def id(self) -> int: ...
    @property
    def node(self) -> int: ...
    @property
    def kind(self) -> str: ...

@final
class ClientInfo(structseq[Any], tuple[str, str, list[DeviceInfo], list[GlobalDevice]]):
    __match_args__: Final = ("platform", "version", "devices", "global_devices")
    @property
    def platform(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def devices(self) -> list[DeviceInfo]: ...
    @property
    def global_devices(self) -> list[GlobalDevice]: ...

@final
class Compiled(structseq[Any], tuple[Executable, bool]):
    __match_args__: Final = ("executable", "written")
    @property
    def executable(self) -> Executable: ...
    @property
    def written(self) -> bool: ...

@final
class PlanFileContents(
    structseq[Any],
    tuple[
        str,
        str,
        int,
        list[int],
        bytes,
        list[bytes],
        list[int | None],
        list[list[int] | None],
        list[bytes],
        bytes,
    ],
):
    __match_args__: Final = (
        "maker",
        "platform",
        "devices_per_rank",
        "device_ids",
        "compile_options",
        "modules",
        "task_modules",
        "shard_dims",
        "constants",
        "front",
    )
    @property
    def maker(self) -> str: ...
    @property
    def platform(self) -> str: ...
    @property
    def devices_per_rank(self) -> int: ...
    @property
    def device_ids(self) -> list[int]: ...
    @property
    def compile_options(self) -> bytes: ...
    @property
    def modules(self) -> list[bytes]: ...
    @property
    def task_modules(self) -> list[int | None]: ...
    @property
    def shard_dims(self) -> list[list[int] | None]: ...
    @property
    def constants(self) -> list[bytes]: ...
    @property
    def front(self) -> bytes: ...

@final
class ScheduleInfo(structseq[Any], tuple[str, str, str, str, int, bool, ScheduleSizes]):
    __match_args__: Final = (
        "name",
        "class_name",
        "help",
        "paper",
        "stages_a_rank",
        "can_fuse",
        "example",
    )
    @property
    def name(self) -> str: ...
    @property
    def class_name(self) -> str: ...
    @property
    def help(self) -> str: ...
    @property
    def paper(self) -> str: ...
    @property
    def stages_a_rank(self) -> int: ...
    @property
    def can_fuse(self) -> bool: ...
    @property
    def example(self) -> ScheduleSizes: ...

@final
class ScheduleSizes(structseq[Any], tuple[int, int, int]):
    __match_args__: Final = ("stages", "ranks", "microbatches")
    @property
    def stages(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def microbatches(self) -> int: ...

@final
class ScheduleTask(structseq[Any], tuple[int, bool, int, int, int]):
    __match_args__: Final = ("kind", "joins_next", "latency", "stage", "microbatch")
    @property
    def kind(self) -> int: ...
    @property
    def joins_next(self) -> bool: ...
    @property
    def latency(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def microbatch(self) -> int: ...

@final
class StageCosts(structseq[Any], tuple[float, float, float, float, float, float]):
    __match_args__: Final = (
        "forward",
        "backward",
        "weight",
        "forward_spread",
        "backward_spread",
        "weight_spread",
    )
    @property
    def forward(self) -> float: ...
    @property
    def backward(self) -> float: ...
    @property
    def weight(self) -> float: ...
    @property
    def forward_spread(self) -> float: ...
    @property
    def backward_spread(self) -> float: ...
    @property
    def weight_spread(self) -> float: ...

@final
class Decision(structseq[Any], tuple[str, int, list[int], list[int]]):
    __match_args__: Final = ("action", "part", "ranks", "blocks")
    @property
    def action(self) -> str: ...
    @property
    def part(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def blocks(self) -> list[int]: ...

@final
class JobPart(structseq[Any], tuple[list[int], list[int], bool]):
    __match_args__: Final = ("rank_process", "places", "spans")
    @property
    def rank_process(self) -> list[int]: ...
    @property
    def places(self) -> list[int]: ...
    @property
    def spans(self) -> bool: ...

@final
class TaskRun(structseq[Any], tuple[int, str, int, int, int, int]):
    __match_args__: Final = ("rank", "task", "microbatch", "issued", "start", "end")
    @property
    def rank(self) -> int: ...
    @property
    def task(self) -> str: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def issued(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...

# --- Types ------------------------------------------------------------------------------

# An element type, a shape and, unless it is "device", a memory.
_Type = tuple[str, Sequence[int]] | tuple[str, Sequence[int], str]
# Forward, input gradient, weight gradient.
_Costs = tuple[float, float, float]
# As ScheduleTask: kind, joins_next, latency, stage, microbatch.
_Task = tuple[int, bool, int, int, int]

# A rank, its task, the kind, the axes, how often and how many bytes.
_Collectives = list[tuple[int, str, str, str, int, int]]
_PlanCosts = tuple[
    list[tuple[int, float, int, int]],
    list[tuple[int, int, int, int]],
    _Collectives,
    str,
]

@final
class Graph:
    def __new__(cls, name: str | None, ranks: int, /) -> Graph: ...
    def add_arg(self, type: _Type, donated: bool, name: str | None, /) -> int: ...
    def add_op(
        self,
        kind: int,
        flags: int,
        attr: int,
        inputs: Sequence[int],
        types: Sequence[_Type],
        cost: float,
        name: str | None,
        where: str | None,
        code: int,
        ranks: Sequence[int],
        /,
    ) -> int: ...
    def begin_loop(
        self, microbatches: int, stages: int, schedule: str | None, where: str | None, /
    ) -> int: ...
    def end_loop(
        self, reduces: Sequence[int], values: Sequence[int], types: Sequence[_Type], /
    ) -> int: ...
    def add_output(self, value: int, name: str | None, next: int, /) -> None: ...
    def give_arg(self, ranks: Sequence[int], /) -> None: ...
    def leave_output(self, ranks: Sequence[int], /) -> None: ...
    def finish(self, /) -> None: ...
    def set_partial(self, loop: int, results: Sequence[int], /) -> None: ...
    def set_sharded(self, /) -> None: ...
    def text(self, device_bytes: Sequence[int] | None = None, /) -> str: ...

@final
class Schedule:
    @staticmethod
    def build(
        name: str, stages: int, ranks: int, microbatches: int, fuse_steady_state: bool, /
    ) -> Schedule: ...
    @staticmethod
    def check(name: str, stages: int, ranks: int, /) -> None: ...
    @staticmethod
    def built_ins() -> list[ScheduleInfo]: ...
    @staticmethod
    def placeholders(
        graph: Graph, ranks: int, schedules: Sequence[Schedule | None], /
    ) -> list[Schedule]: ...
    @staticmethod
    def one_pass(
        stages: int, ranks: int, microbatches: int, split_backward: bool, /
    ) -> Schedule: ...
    @staticmethod
    def from_rows(
        name: str, stages: int, ranks: int, microbatches: int, rows: list[list[_Task]], /
    ) -> Schedule: ...
    @staticmethod
    def from_csv(file: str, text: str, /) -> Schedule: ...
    @staticmethod
    def search(
        stages: int,
        ranks: int,
        microbatches: int,
        costs: list[_Costs],
        latency: float,
        memory_limit: int,
        activation_bytes: int,
        seconds: float,
        input_bytes: int,
        host_bandwidth: float,
        /,
    ) -> SearchResult: ...
    def csv(self, communication: bool, /) -> str: ...
    def sizes(self, /) -> ScheduleSizes: ...
    def rows(self, /) -> list[list[ScheduleTask]]: ...
    def text(self, /) -> str: ...
    def stage_ranks(self, /) -> list[int]: ...

@final
class Staged:
    def tasks(self, /) -> list[StagedTask]: ...
    def op(self, id: int, /) -> StagedOp: ...
    def repeats(self, task: int, /) -> tuple[list[int], list[tuple[int, int, int]]]: ...
    def args(self, /) -> list[PlacedValue]: ...
    def outputs(self, /) -> list[PlacedValue]: ...
    def origins(self, /) -> list[int]: ...
    def packed(self, /) -> dict[int, int]: ...
    def accumulators(self, /) -> list[tuple[int, int, bool, list[int]]]: ...
    def notes(self, /) -> list[str]: ...
    def text(self, /) -> str: ...

# Bytes on each device, per rank; the group of each rank's devices, or None.
_Limits: TypeAlias = tuple[Sequence[int], Sequence[int] | None]

@final
class Plan:
    def __new__(
        cls,
        graph: Graph,
        schedules: Sequence[Schedule],
        memory_limits: _Limits | None,
        measure: _Callable[[Staged], Sequence[int] | None] | None,
        offload: bool | None,
        /,
    ) -> Plan: ...
    @staticmethod
    def partition(graph: Graph, schedules: Sequence[Schedule], /) -> Staged: ...
    def staged(self, /) -> Staged: ...
    def proof(self, /) -> str: ...
    def donations(self, /) -> list[list[int | None]]: ...
    def copies(self, /) -> list[list[tuple[int | None, bool]] | None]: ...
    def summary(self, /) -> list[RankSummary]: ...
    def costs(self, collectives: _Collectives, /) -> _PlanCosts: ...
    def search(
        self,
        graph: Graph,
        loop: int,
        schedules: Sequence[Schedule],
        costs: Sequence[_Costs],
        memory_limits: _Limits | None,
        seconds: float,
        offload: bool | None,
        /,
    ) -> SearchResult: ...
    def predict(
        self,
        traces: list[str],
        rank_devices: Sequence[int],
        devices_per_rank: int,
        cores: int,
        threads: float,
        processes: int,
        call: float,
        latency: float,
        bandwidth: float,
        host_bandwidth: float,
        steps: int,
        steps_in_flight: int,
        /,
    ) -> tuple[float, float, float, list[float], str, str]: ...
    def save(
        self,
        path: StrPath,
        platform: str,
        devices_per_rank: int,
        device_ids: Sequence[int],
        axis_names: tuple[str, ...],
        axis_sizes: Sequence[int],
        steps_in_flight: int,
        compile_options: Buffer,
        modules: Sequence[bytes],
        task_modules: Sequence[int],
        shard_dims: Sequence[Sequence[int] | None],
        layouts: Sequence[int] | None,
        constants: Sequence[bytes],
        front: Buffer,
        /,
    ) -> None: ...
    def explain(self, collectives: _Collectives, /) -> str: ...
    def explain_memory(self, rank: int, message: str, /) -> str: ...
    def hashes(self, /) -> dict[str, int]: ...
    def check_host_limit(self, limits: _Limits | None, /) -> None: ...
    def steps_in_flight(self, memory_limits: _Limits | None, wanted: int, /) -> int: ...
    def program_text(self, sharding_of: _Callable[[int], str], /) -> str: ...
    def text(self, /) -> str: ...

@final
class PlanFile:
    def __new__(cls, path: StrPath, /) -> PlanFile: ...
    def plan(self, /) -> Plan: ...
    def contents(self, /) -> PlanFileContents: ...

@final
class KeyValueStore:
    def __new__(
        cls, get: _Callable[[str, int], bytes | None], put: _Callable[[str, bytes], object], /
    ) -> KeyValueStore: ...

@final
class Client:
    def __new__(
        cls,
        plugin: StrPath,
        options: dict[str, Any],
        store: KeyValueStore = ...,
        node_id: int = ...,
        num_nodes: int = ...,
        /,
    ) -> Client: ...
    def info(self, /) -> ClientInfo: ...
    def compile(
        self,
        code: Buffer,
        options: Buffer,
        devices: Sequence[int],
        kept: object,
        folder: bytes,
        identity: Buffer,
        compiled: Executable = ...,
        /,
    ) -> Compiled: ...
    def warm_up(self, /) -> None: ...
    def register_custom_call(
        self, name: str, platform: str, handler: CapsuleType, traits: int, /
    ) -> None: ...

@final
class Executable: ...

@final
class Value:
    @staticmethod
    def put(
        client: Client,
        ranks: Sequence[int],
        devices_per_rank: int,
        devices: Sequence[int],
        shards: list[Any],
        dtype: str,
        memory: str,
        /,
    ) -> Value: ...
    @staticmethod
    def elsewhere() -> Value: ...
    def set_origin(self, origin: Value, /) -> None: ...
    def read(self, rank: int, device: int, buffer: Any, /) -> None: ...
    def lend(
        self, rank: int, device: int, device_type: int, device_id: int, flat: bool, /
    ) -> CapsuleType | None: ...
    def delete(self, /) -> None: ...
    def wait(self, /) -> None: ...
    def is_ready(self, /) -> bool: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def deleted(self) -> bool: ...
    @property
    def deletion_reason(self) -> str: ...

@final
class Wanted:
    def __new__(
        cls,
        name: str,
        dtype: str,
        ndim: int,
        devices: int,
        ranks: Sequence[int],
        is_local: Sequence[bool],
        devices_per_rank: int,
        blocks: Any,
        donated: bool,
        can_move: bool,
        least_borrowed: int,
        memory: str,
        /,
    ) -> Wanted: ...
    def decide(
        self, given: Given, deletion_reason: str | None, copies: bool, /
    ) -> Decision: ...
    def take(
        self,
        client: Client,
        devices: Sequence[int],
        source: Any,
        given: Given,
        deletion_reason: str | None,
        dtype: str,
        copies: bool,
        /,
    ) -> Value: ...
    def gather(self, device: int, arrays: list[Any], bounds: Any, buffer: Any, /) -> None: ...
    @property
    def shape(self) -> list[int]: ...

@final
class Given:
    def __new__(
        cls,
        home: str,
        dtype: str,
        ndim: int,
        devices: int,
        bytes: int,
        num_blocks: int,
        places: Any,
        bounds: Any,
        /,
    ) -> Given: ...

@final
class Params:
    def __new__(cls, names: Sequence[str], donated: Sequence[bool], /) -> Params: ...
    def claim(self, values: list[Value | None], /) -> None: ...
    def lose(self, values: list[Value | None], /) -> None: ...

@final
class Network:
    def __new__(
        cls,
        driver: str,
        process: int,
        num_processes: int,
        address: str,
        token: bytes,
        device: int,
        /,
    ) -> Network: ...
    def address(self, /) -> bytes: ...
    def connect(self, process: int, address: bytes, /) -> None: ...

@final
class Runtime:
    def __new__(
        cls,
        client: Client,
        plan: Plan,
        devices_per_rank: int,
        devices: Sequence[int],
        executables: Sequence[Executable | None],
        shard_dims: Sequence[Sequence[int] | None],
        portable: bool,
        steps_in_flight: int,
        processes: Sequence[int] | None,
        network: Network | None,
        /,
    ) -> Runtime: ...
    def step(self, values: list[Value], waits: bool, /) -> list[Value]: ...
    def collectives(self, names: tuple[str, ...], sizes: Sequence[int], /) -> _Collectives: ...
    def memory(self, rank: int, /) -> list[int]: ...
    def wait(self, count: int, /) -> None: ...
    def num_steps(self, /) -> int: ...
    def set_checks(self, nans: bool, infs: bool, /) -> None: ...
    def set_tracing(self, enabled: bool, /) -> None: ...
    def trace(self, /) -> list[TaskRun]: ...
    def measure(self, values: list[Value], /) -> list[list[StageCosts]]: ...
    def trace_json(self, steps: int, /) -> str: ...
    def trace_peaks(self, /) -> list[int]: ...

@final
class Callback:
    def __new__(
        cls, function: _Callable[..., Any], operands: list[int], results: list[int], /
    ) -> Callback: ...
    def address(self, /) -> int: ...
