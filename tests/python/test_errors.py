"""What bad input gets: one exception with a code, early, in words that help.

Every test here ends with a fresh step that must still work. JPP_UPDATE_DOCS=1 writes
docs/errors.md from the messages; otherwise it must already show them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpp.api as jaxpp
import mistakes as m
from equality import make_mesh
from jaxpp import _core, devices
from jaxpp.errors import make_error

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
DOCS = ROOT / "docs" / "errors.md"

JIT = jaxpp.mpmd_jit_with_loop
TWO = jaxpp.Std1F1B(2)


@dataclasses.dataclass(frozen=True)
class Case:
    """`run` must raise JaxppError(code) with all of `says` in its message."""

    title: str
    code: str
    run: Callable[[], Any]
    says: tuple[str, ...]


CASES: list[Case] = []


def case(title: str, code: str, run: Callable[[], Any], *says: str) -> None:
    CASES.append(Case(title, code, run, says))


def mesh(ranks: int = 2, **axes: int) -> jaxpp.MpmdMesh:
    return make_mesh(ranks, **axes)


def train(schedule: Any, layers: int = 2, loss: Any = m.loss, **options: Any) -> Any:
    mpmd_mesh = options.pop("mpmd_mesh", None) or mesh()
    batch = m.batch(options.pop("microbatches", 3))
    step = JIT(m.training_step(schedule, loss), mpmd_mesh, **options)
    return step(m.params(layers), batch)


def loop(xs: Any, fun: Any = None, **options: Any) -> Any:
    return JIT(lambda: m.forward(xs, fun, **options), mesh())()


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

# --- Microbatches -----------------------------------------------------------------------

case(
    "Microbatch axes that differ",
    "microbatch",
    lambda: loop({"x": m.batch(3), "y": m.batch(4)}),
    "mistakes.py:",
    "same size along axis 0",
    "xs['x'] (3, 2, 4): 3",
    "xs['y'] (4, 2, 4): 4",
)
case(
    "An array without the microbatch axis",
    "microbatch",
    lambda: loop({"x": m.batch(), "y": 1.0}),
    "xs['y'] (): no such axis",
)
case(
    "Microbatch axes that differ in a large tree",
    "microbatch",
    lambda: loop([m.batch(2 + k % 2) for k in range(20)]),
    "xs[0] (2, 2, 4): 2",
    "and 12 more",
)
case("Nothing to cut", "microbatch", lambda: loop(None), "xs=None", "expected at least one")
case("No microbatches", "microbatch", lambda: loop(m.batch()[:0]), "size 0 along axis 0")
case(
    "An axis that is no number",
    "microbatch",
    lambda: loop(m.batch(), axis="batch"),
    "axis='batch'",
    "expected a whole number",
)
for length in (0, -1, 2.5, "4", 2**40):
    case(
        f"A loop of length {length!r}",
        "microbatch",
        lambda length=length: JIT(lambda: m.forward_i(m.batch(), length), mesh())(),
        "mistakes.py:",
        f"length={length!r}",
        "expected a whole number from 1",
    )
case(
    "A length that is traced",
    "microbatch",
    lambda: JIT(m.forward_i, mesh())(m.batch(), 3),
    "mistakes.py:",
    "known when the step is traced",
)
case(
    "A loop in a loop",
    "unsupported",
    lambda: JIT(m.loop_in_loop, mesh())(m.params(), m.batch()),
    "inside the treduce at",
    "mistakes.py:",
)
case(
    "A loop under scan",
    "unsupported",
    lambda: JIT(m.loop_in_scan, mesh())(m.batch()),
    "treduce at ",
    "under `scan` at ",
    "top level",
)
case(
    "The gradient of a loop",
    "unsupported",
    lambda: JIT(m.gradient_of_loop, mesh())(m.params(), m.batch()),
    "mistakes.py:",
    "differentiated; expected jax.grad inside",
)
case(
    "A loop under vmap",
    "unsupported",
    lambda: JIT(m.vmapped_loop, mesh())(m.batch()),
    "mistakes.py:",
    "vmapped; expected jax.vmap inside",
)
case(
    "A custom_vjp around a closure",
    "unsupported",
    lambda: train(TWO, loss=m.closure_in_custom_vjp),
    "closes over a traced value",
    "expected it to be one of the function's arguments",
)

# --- Operations -------------------------------------------------------------------------


def operation(title: str, given: Any, *says: str, fun: Any = None) -> None:
    run = lambda: loop(m.batch(), fun or (lambda x: (x, x)), operation=given)  # noqa: E731
    case(title, "operation", run, "mistakes.py:", *says)


operation(
    "A result tree that does not match `operation`",
    (jaxpp.Add, jaxpp.Add, jaxpp.Max),
    "operation: (Add, Add, Max)",
    "result:    (*, *)",
)
operation("No operation", None, "operation: None", "result:    (*, *)")
operation("An operation by name", "add", "'add' is no operation; expected Add")
operation("An operation without update", m.NoUpdate(), "NoUpdate() is no operation", "update")
operation(
    "An operation that changes its state's dtype",
    m.CountsInIntegers(),
    "result[0]",
    "update(state, value, i) to give a state of int32[2, 4] again, found float32[2, 4]",
)
operation("An operation with two states", m.TwoStates(), "to give one array, found tuple")
operation("Concat along no axis", jaxpp.Concat(9), "expected an axis from -3 to 2, found 9")
operation(
    "The largest of complex numbers",
    jaxpp.Max,
    "Max() can not reduce result, complex64[2, 4]",
    fun=lambda x: x * 1j,
)
operation("The sum of truths", jaxpp.Add, "bool[2, 4]", "expected numbers", fun=lambda x: x > 0)
case(
    "A loop whose function returns text",
    "invalid-argument",
    lambda: loop(m.batch(), lambda x: {"loss": "low"}),
    "mistakes.py:",
    "['loss']: expected an array or a number, found 'low'",
)

# --- Shardings --------------------------------------------------------------------------


def sharded(title: str, *says: str, **options: Any) -> None:
    run = lambda: train(TWO, mpmd_mesh=mesh(2, data=2, model=2), **options)  # noqa: E731
    case(title, "sharding", run, *says)


sharded(
    "A spec that names an unknown axis",
    "in_specs of ws[0]",
    "axis 'modle'",
    "expected axes of the mesh, ('stage', 'data', 'model')",
    in_specs=(P("modle"), P()),
)
sharded(
    "A spec that does not divide",
    "in_specs of xs",
    "expected a size that 2 divides, found 3",
    in_specs=(P(), P("data")),
)
sharded(
    "A spec of too many dimensions",
    "in_specs of xs",
    "has 4 entries; expected at most 3",
    in_specs=(P(), P(None, None, None, "data")),
)
sharded(
    "A spec that names an axis twice",
    "in_specs of ws[0]",
    "'data' 2 times; expected each axis once",
    in_specs=(P("data", "data"), P()),
)
sharded(
    "Specs of another tree than the arguments",
    "in_specs: (P(), P(), P())",
    "arguments: ([*, *], *)",
    in_specs=(P(), P(), P()),
)
sharded(
    "Specs of another tree than the results",
    "out_specs: (P(), P(), P())",
    "results: ([*, *], *)",
    out_specs=(P(), P(), P()),
)
sharded(
    "A result's spec that does not fit",
    "out_specs of result[1]",
    "has 1 entries; expected at most 0",
    out_specs=(P(), P("data")),
)
sharded("Text for a spec", "expected PartitionSpecs", "found 'data'", in_specs=("data", P()))
sharded(
    "A sharding without a spec",
    "expected PartitionSpecs",
    "found SingleDeviceSharding",
    in_shardings=(jax.sharding.SingleDeviceSharding(jax.devices()[0]), None),
)
sharded(
    "A constraint that names an unknown axis",
    "mistakes.py:",
    "modle",
    "('stage', 'data', 'model')",
    loss=m.unknown_axis_in_constraint,
)
case(
    "Specs and shardings",
    "invalid-argument",
    lambda: train(TWO, in_specs=P(), in_shardings=P()),
    "expected in_specs or in_shardings, found both",
)

# --- Arguments --------------------------------------------------------------------------


def step_of(**options: Any) -> Any:
    return JIT(m.training_step(TWO), mesh(), **options)


def donated_again() -> None:
    step = step_of(donate_argnums=0)
    ws, _ = step(m.params(), m.batch())
    step(ws, m.batch())
    step(ws, m.batch())


def deleted() -> None:
    step = step_of()
    ws, _ = step(m.params(), m.batch())
    ws[1].delete()
    step(ws, m.batch())


def deleted_jax_array() -> None:
    ws = m.params()
    ws[1].delete()
    step_of()(ws, m.batch())


def donated_twice() -> None:
    step = step_of(donate_argnums=0)
    (w, _), _ = step(m.params(), m.batch())
    try:
        step([w, w], m.batch())
    finally:
        assert not w.is_deleted()


def donated_and_not() -> None:
    def step(ws: Any, xs: jax.Array, others: Any) -> Any:
        return m.training_step(TWO)(ws, xs), jax.tree.map(jnp.sum, others)

    jitted = JIT(step, mesh(), donate_argnums=0)
    ws, _ = step_of()(m.params(), m.batch())
    try:
        jitted(ws, m.batch(), ws)
    finally:
        assert not any(w.is_deleted() for w in ws)


def read_after_donation() -> None:
    step = step_of(donate_argnums=0)
    ws, _ = step(m.params(), m.batch())
    step(ws, m.batch())
    np.asarray(ws[0])


def state() -> Any:
    return step_of()(m.params(), m.batch())[0]


case(
    "A donated array used again",
    "donated",
    donated_again,
    "argument ws[0]",
    "expected an array, found one that was deleted or donated",
)
case("A deleted array", "donated", deleted, "argument ws[1]", "deleted or donated")
case("A deleted JAX array", "donated", deleted_jax_array, "argument ws[1]", "deleted")
case(
    "One array donated as two arguments",
    "donated",
    donated_twice,
    "arguments ws[0] and ws[1] are the same array",
    "expected a donated array once",
)
case(
    "An array donated and passed beside it",
    "donated",
    donated_and_not,
    "arguments ws[0] and others[0] are the same array, which the first donates",
)
case("Looking at a donated array", "donated", read_after_donation, "deleted or donated")
case(
    "An argument that is no array",
    "invalid-argument",
    lambda: step_of()(m.params(), "text"),
    "argument xs: expected an array or a number, found 'text' of type str",
)
case(
    "A step that returns text",
    "invalid-argument",
    lambda: JIT(lambda xs: {"loss": "low"}, mesh())(m.batch()),
    "the step's result['loss']: expected an array or a number, found 'low'",
)
case(
    "A static argument without a hash",
    "invalid-argument",
    lambda: step_of(static_argnums=0)(m.params(), m.batch()),
    "static argument ws: expected something hashable",
)
case(
    "A number of no argument",
    "invalid-argument",
    lambda: step_of(donate_argnums=2),
    "donate_argnums has 2; expected numbers from 0 to 1 of the arguments (ws, xs)",
)
case(
    "A name of no argument",
    "invalid-argument",
    lambda: step_of(static_argnames="schedule"),
    "static_argnames has 'schedule'; expected names of the arguments (ws, xs)",
)
case(
    "A static argument donated",
    "invalid-argument",
    lambda: step_of(static_argnames="ws", donate_argnums=0),
    "argument ws is both static and donated; expected",
)
case(
    "A plan over its memory limit",
    "out-of-memory",
    lambda: train(jaxpp.GPipe(2), microbatches=8, mpmd_mesh=mesh(2), memory_limit=700),
    "memory limit: rank ",
    "expected at most 700 bytes",
    "(recv of ",
    "weights 64, gradients ",
    "schedule zb-h1 of 2 stages on 2 ranks with 8 microbatches fits",
)
case(
    "A memory limit that no schedule is within",
    "out-of-memory",
    lambda: train(TWO, memory_limit=[2**20, 100]),
    "memory limit: rank 1: expected at most 100 bytes",
    "the smallest limit that one fits is ",
)
case(
    "A memory limit for another number of ranks",
    "invalid-argument",
    lambda: train(TWO, memory_limit=[2**20]),
    "memory_limit=[1048576]",
    "one for each of the 2 ranks",
)
case("No function", "invalid-argument", lambda: JIT(3, mesh()), "fun=3; expected a function")
case(
    "A compiler option that is none",
    "invalid-argument",
    lambda: train(TWO, compiler_options={"xla_unheard_of": True}),
    "xla_unheard_of",
)
case(
    "An array into a pickle",
    "unsupported",
    lambda: pickle.dumps(state()),
    "can not be pickled",
    "np.asarray(x)",
)
case(
    "float() of an array of several elements",
    "invalid-argument",
    lambda: float(state()[0]),
    "float() of an MpmdArray: expected one element, found shape (4, 4)",
)

# --- Numbers ----------------------------------------------------------------------------


def with_flag(flag: str, run: Callable[[], Any]) -> Any:
    jax.config.update(flag, True)
    try:
        return run()
    finally:
        jax.config.update(flag, False)


case(
    "A NaN under jax_debug_nans",
    "nan",
    lambda: with_flag("jax_debug_nans", lambda: train(TWO, loss=m.log_of_negative)),
    "fwd_1 of microbatch 0: expected numbers, found a NaN",
    "mistakes.py:",
)

# --- Memory -----------------------------------------------------------------------------


def too_large_argument() -> None:
    xs = np.broadcast_to(np.float32(0), (m.TOO_MANY,))
    JIT(m.first_of, mesh())(xs)


case(
    "A result that no memory holds",
    "out-of-memory",
    lambda: loop(m.batch(), m.task_too_large),
    "instruction",
    "the plan's values take up to 140737488355",
    "To need less:",
)
case(
    "An argument that no memory holds",
    "out-of-memory",
    too_large_argument,
    "rank 0, argument xs: ",
    "the plan's values take up to",
    "To need less:",
)

# --- Plugins and devices ----------------------------------------------------------------

PLUGINS = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"jaxpp-test-plugins-{os.getpid()}"

OLD_PLUGIN = """
#include <stddef.h>
static const struct {
  size_t size; void *extension;
  size_t version_size; void *version_extension; int major, minor;
} kApi = {sizeof(kApi), 0, sizeof(kApi) - 16, 0, %d, %d};
const void *GetPjrtApi(void) { return &kApi; }
"""


def built_plugin(major: int, minor: int) -> str:
    source = PLUGINS / f"api_{major}_{minor}.c"
    source.write_text(OLD_PLUGIN % (major, minor))
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def text_file() -> str:
    path = PLUGINS / "notes.so"
    path.write_text("not a library")
    return str(path)


def libm() -> str:
    found = [line.split()[-1] for line in open("/proc/self/maps") if "/libm.so" in line]
    return os.path.realpath(found[0]) if found else "libm.so.6"


def with_plugin(path: Callable[[], str]) -> Callable[[], Any]:
    def run() -> Any:
        os.environ["JPP_PLUGIN"] = path()
        try:
            return train(TWO)
        finally:
            del os.environ["JPP_PLUGIN"]

    return run


case(
    "A plugin that is missing",
    "plugin",
    with_plugin(lambda: "/no/such/plugin.so"),
    "plugin /no/such/plugin.so: no such file",
)
case(
    "A plugin by argument that is missing",
    "plugin",
    lambda: train(TWO, plugin="/nowhere.so"),
    "plugin /nowhere.so: no such file",
)
case("A plugin that is a text file", "plugin", with_plugin(text_file), "not a loadable library")
case(
    "A plugin that is a folder",
    "plugin",
    with_plugin(lambda: str(PLUGINS)),
    "not a loadable library",
)
case("A library that is no plugin", "plugin", with_plugin(libm), "exports no GetPjrtApi")
case(
    "A plugin that is too old",
    "plugin",
    with_plugin(lambda: built_plugin(0, 40)),
    "expected PJRT API 0.57 or a later 0.x, found 0.40",
)
case(
    "A plugin of another major version",
    "plugin",
    with_plugin(lambda: built_plugin(1, 0)),
    "expected PJRT API 0.57 or a later 0.x, found 1.0",
)


def too_few_devices() -> None:
    client = _core.Client(devices._default_plugin(), {"cpu_device_count": 2})
    devices.Devices(client, mesh(4))


case(
    "Not enough devices",
    "devices",
    too_few_devices,
    "not enough devices: the mesh expects the devices [0, 1, 2, 3]",
    "found 2 in the plugin (cpu), without [2, 3]",
)

# --- The tests --------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def plugin_folder() -> Iterator[None]:
    PLUGINS.mkdir()
    yield
    shutil.rmtree(PLUGINS)


@pytest.fixture(scope="module")
def expected() -> Any:
    return m.plain_training_step(m.params(), m.batch())


@pytest.fixture(autouse=True)
def goes_on_working(expected: Any) -> Iterator[None]:
    """After each test a step is traced, compiled and run."""
    yield
    ours = JIT(m.training_step(TWO), mesh())(m.params(), m.batch())
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5)


MESSAGES: dict[str, str] = {}  # what was raised, by title


@pytest.mark.parametrize("wrong", CASES, ids=lambda c: c.title.replace(" ", "-"))
def test_error(wrong: Case) -> None:
    with pytest.raises(jaxpp.JaxppError) as caught:
        wrong.run()
    message = str(caught.value)
    MESSAGES[wrong.title] = message
    assert type(caught.value) is (jaxpp.NanError if wrong.code == "nan" else jaxpp.JaxppError)
    assert caught.value.code == wrong.code, message
    for part in wrong.says:
        assert part in message
    assert message.count("\n") < 14
    assert len(message) < 1500


def _stable(message: str) -> str:
    message = message.replace(str(HERE) + os.sep, "").replace(str(PLUGINS), "/path/to")
    message = message.replace(libm(), "/usr/lib/libm.so.6")
    # The loader's own words differ between systems.
    return re.sub(r"(not a loadable library: ).*", r"\1...", message)


def _document() -> str:
    text = [
        "# What bad input gets",
        "",
        "Everything that JaxPP refuses raises `jaxpp.JaxppError`. Its `code` is one of the "
        "headings below; the message names the line of your code or the argument, what was "
        "expected and what was found. Nothing has run by then, and the process goes on "
        "working. What your own function raises while it is traced comes through unchanged.",
        "",
        "This page is written by `tests/python/test_errors.py` (with `JPP_UPDATE_DOCS=1`), "
        "from the steps in `tests/python/mistakes.py`.",
    ]
    for code in sorted({c.code for c in CASES}):
        text += ["", f"## `{code}`"]
        for wrong in CASES:
            if wrong.code == code:
                message = _stable(MESSAGES[wrong.title])
                text += ["", f"**{wrong.title}**", "", "```text", message, "```"]
    return "\n".join(text) + "\n"


def test_docs_show_every_error() -> None:
    if len(MESSAGES) < len(CASES):
        pytest.skip("only some of the errors were raised")
    if os.environ.get("JPP_UPDATE_DOCS"):
        DOCS.parent.mkdir(exist_ok=True)
        DOCS.write_text(_document())
    assert DOCS.read_text() == _document(), "run the tests with JPP_UPDATE_DOCS=1"


def test_titles_are_unique() -> None:
    assert len({c.title for c in CASES}) == len(CASES)


def test_out_of_memory_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: Any) -> Any:
        failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        failed.set_exception(make_error("out-of-memory", "compile: too large."))
        return failed

    with monkeypatch.context() as patched:
        patched.setattr("jaxpp.compiled._Compiler._submit", submit)
        with pytest.raises(jaxpp.JaxppError) as caught:
            train(TWO)
    assert caught.value.code == "out-of-memory"
    assert str(caught.value).startswith("rank 0, task fwd_0: compile: too large; the plan's")


def test_what_the_user_raises_comes_through() -> None:
    def step(xs: jax.Array) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        JIT(step, mesh())(m.batch())


def test_a_wrong_call_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'xs'"):
        step_of()(m.params())


def test_nothing_is_taken_when_a_donation_is_refused() -> None:
    step = step_of(donate_argnums=0)
    good, _ = step(m.params(), m.batch())
    bad, _ = step(m.params(), m.batch())
    bad[1].delete()
    with pytest.raises(jaxpp.JaxppError):
        step([good[0], bad[1]], m.batch())
    assert not good[0].is_deleted()
    step(good, m.batch())
    assert good[0].is_deleted()


def test_a_donated_array_of_other_ranks_is_donated_all_the_same() -> None:
    step = step_of(donate_argnums=0)
    (a, b), _ = step(m.params(), m.batch())
    step([b, a], m.batch())  # each on the other's rank
    assert a.is_deleted() and b.is_deleted()


def test_arrays_of_another_mesh_are_moved() -> None:
    ws = state()
    others = jax.devices()[2:4]
    other = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(others), ("stage",)), "stage")
    for mpmd_mesh in (other, mesh(2, data=2)):
        step = JIT(m.training_step(TWO), mpmd_mesh, donate_argnums=0)
        ws, total = step(ws, m.batch())
    assert ws[0].sharding.mpmd_mesh == mesh(2, data=2)
    expected = m.params()
    for _ in range(3):
        expected, plain_total = m.plain_training_step(expected, m.batch())
    np.testing.assert_allclose(float(total), plain_total, rtol=1e-5)


def test_other_shapes_retrace_and_work() -> None:
    step = step_of()
    for microbatches, size in [(3, 2), (5, 2), (3, 4), (3, 2)]:
        xs = m.batch(microbatches, size)
        _, total = step(m.params(), xs)
        plain = m.plain_training_step(m.params(), xs)[1]
        np.testing.assert_allclose(float(total), plain, rtol=1e-5)
    assert len(step._compiled) == 3


def test_step_without_a_loop_works() -> None:
    """Everything outside loops: tasks on the ranks that hold what they need."""

    def step(ws: Any, xs: jax.Array) -> Any:
        return jax.tree.map(lambda w: 2 * w, ws), jax.value_and_grad(m.loss)(ws, xs[0])

    doubled, (value, grads) = JIT(step, mesh())(m.params(), m.batch())
    plain = jax.value_and_grad(m.unmarked_loss)(m.params(), m.batch()[0])
    np.testing.assert_allclose(doubled[1], 2 * m.params()[1])
    np.testing.assert_allclose(float(value), plain[0], rtol=1e-6)
    np.testing.assert_allclose(grads[0], plain[1][0], rtol=1e-5)


def test_results_that_no_stage_makes() -> None:
    def step(ws: Any, xs: jax.Array) -> Any:
        def one(x: jax.Array) -> Any:
            return jax.value_and_grad(m.loss)(ws, x), jnp.float32(3), x.sum(), ws[0].sum()

        return jaxpp.treduce(one, xs, TWO, operation=jaxpp.Add), xs, jnp.ones(2)

    (_, three, sums, weights), xs, ones = JIT(step, mesh())(m.params(), m.batch())
    assert float(three) == 9.0
    assert float(sums) == float(m.batch().sum())
    np.testing.assert_allclose(float(weights), 3 * float(m.params()[0].sum()), rtol=1e-6)
    np.testing.assert_array_equal(xs, m.batch())
    np.testing.assert_array_equal(ones, np.ones(2))


# --- The command ------------------------------------------------------------------------


def command() -> str:
    built = ROOT / "build" / "src" / "cli" / "jaxpp"
    found = str(built) if built.exists() else shutil.which("jaxpp")
    if not found:
        pytest.skip("no jaxpp command")
    return found


def plan(tmp_path: pathlib.Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "graph.jpp").write_text(text)
    return subprocess.run(
        [command(), "plan", "graph.jpp"], cwd=tmp_path, capture_output=True, text=True
    )


def test_malformed_text_for_plan(tmp_path: pathlib.Path) -> None:
    good = _dumped_graph(tmp_path / "dump")
    assert plan(tmp_path, good).returncode == 0
    lines = good.splitlines()
    at = next(i for i, line in enumerate(lines) if "f32[" in line)
    lines[at] = lines[at].replace("f32[", "f32<", 1)
    result = plan(tmp_path, "\n".join(lines))
    assert result.returncode == 2
    column = lines[at].index("f32<") + 1
    place = re.search(r"graph\.jpp:(\d+):(\d+): ", result.stderr)
    assert place, result.stderr
    assert int(place[1]) == at + 1
    assert column <= int(place[2]) <= column + 4
    assert "expected" in result.stderr and "found" in result.stderr


@pytest.mark.parametrize(
    "text", ["", "grph", "\x00\x01\x02", 'graph "', "graph g {", "{}\n" * 1000]
)
def test_text_that_is_no_graph(tmp_path: pathlib.Path, text: str) -> None:
    result = plan(tmp_path, text)
    assert result.returncode == 2
    assert re.search(r"graph\.jpp:\d+:\d+: ", result.stderr), result.stderr


def test_plan_of_a_missing_file(tmp_path: pathlib.Path) -> None:
    result = subprocess.run(
        [command(), "plan", "no.jpp"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "no.jpp" in result.stderr


def _dumped_graph(folder: pathlib.Path) -> str:
    os.environ["JPP_DUMP"] = str(folder)
    try:
        train(TWO)
    finally:
        del os.environ["JPP_DUMP"]
    return (folder / "graph.jpp").read_text()


def test_import_needs_no_plugin() -> None:
    """A missing plugin is an error of the step that needs it, not of the import."""
    code = "import jaxpp.api, sys; print(sorted(s.name for s in jaxpp.api.TaskType))"
    environment = {**os.environ, "JPP_PLUGIN": "/no/such/plugin.so"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
