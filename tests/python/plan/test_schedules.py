"""Every built-in schedule trains a model to the same numbers as plain JAX."""

import pytest

import jaxpp.api as jaxpp
import mistakes as m
from equality import assert_trains_equal, mesh_of
from jaxpp import _core, schedules
from models import mlp

BUILT_IN = _core.Schedule.built_ins()
ONE_STAGE = [info for info in BUILT_IN if info.stages_a_rank == 1]
SEVERAL = [info for info in BUILT_IN if info.stages_a_rank != 1]


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_every_schedule_has_its_class(info):
    """Python has a class for every row of the table in src/schedule/builtin/build.c."""
    row, name = f"the row {info.name!r} of src/schedule/builtin/build.c", info.class_name
    found = getattr(schedules, name, None)
    assert found, f"{row}: there is no class {name} in python/jaxpp/schedules.py"
    assert found.core_name == info.name, f"{row}: {name}.core_name is {found.core_name!r}"
    listed = name in schedules.__all__
    assert listed, f"{row}: {name} is not in __all__ of python/jaxpp/schedules.py"
    exported = getattr(jaxpp, name, None) is found and name in jaxpp.__all__
    assert exported, f"{row}: {name} is not in python/jaxpp/api.py"


def test_every_class_has_its_schedule():
    classes = [value for value in vars(schedules).values() if "core_name" in vars_of(value)]
    rows = {info.class_name: info.name for info in BUILT_IN}
    for found in classes:
        name, core_name = found.__name__, found.core_name
        assert rows.get(name) == core_name, f"class {name}: no row in build.c of {core_name!r}"
    assert len(classes) == len(BUILT_IN)


def vars_of(value):
    return vars(value) if isinstance(value, type) else {}


@pytest.mark.parametrize("info", ONE_STAGE, ids=lambda info: info.name)
def test_one_stage_a_rank(info, any_mesh4):
    schedule = getattr(jaxpp, info.class_name)(4)
    assert_trains_equal(mlp([1, 1, 1, 1], 6), schedule, any_mesh4, steps=2)


@pytest.mark.sample(5)
@pytest.mark.parametrize("info", SEVERAL, ids=lambda info: info.name)
@pytest.mark.parametrize("microbatches", [1, 5])
def test_two_stages_a_rank(info, microbatches, any_mesh2):
    schedule = getattr(jaxpp, info.class_name)(4, 2)
    try:
        schedule.build(microbatches, 2)
    except jaxpp.JaxppError as error:
        assert error.code == "microbatch"
        microbatches = 4  # as many as stages
    assert_trains_equal(mlp([1, 2, 1, 1], microbatches), schedule, any_mesh2, steps=2)


def test_lists_are_those_of_the_command():
    rows = jaxpp.ZeroBubbleV(4, 2).tasks(1)
    assert [str(task) for task in rows[0]] == [
        *["fwd_0__0", "fwd_3__0", "bwd_i_3__0", "bwd_w_3__0", "bwd_i_0__0", "bwd_w_0__0"]
    ]


def test_a_file_of_torch_runs(any_mesh2, tmp_path):
    built = jaxpp.InterleavedZeroBubble(4, 2).build(4, 2)
    for communication in (False, True):
        path = tmp_path / "schedule.csv"
        path.write_text(built.csv(communication), newline="")
        assert_trains_equal(mlp([1, 1, 1, 1], 4), jaxpp.CsvSchedule(path), any_mesh2, steps=1)
    with pytest.raises(jaxpp.JaxppError, match="needs 4 microbatches, found 5"):
        jaxpp.CsvSchedule(path).tasks(5)
    path.write_text(built.csv(True).replace("1RECV_F0,", "", 1))
    with pytest.raises(jaxpp.JaxppError, match=r"schedule.csv:2: cell 1, 1F0: expected"):
        jaxpp.CsvSchedule(path)


def test_a_searched_schedule_trains(any_mesh2):
    costs = [(2, 2, 2), (1, 1, 1), (1, 1, 1), (3, 3, 3)]
    schedule = jaxpp.Searched(costs, 2, memory_limit=60, activation_bytes=10, seconds=0.2)
    assert_trains_equal(mlp([2, 1, 1, 3], 4), schedule, any_mesh2, steps=1)


def test_numbers_that_can_not_be_are_refused_at_once():
    for make in (
        lambda: jaxpp.Std1F1B(-1),
        lambda: jaxpp.Interleaved1F1B(4, 0),
        lambda: jaxpp.Interleaved1F1B(num_stages=2, mpmd_dim=3),
        lambda: jaxpp.DualPipeV(6, 2),
        lambda: jaxpp.InterleavedBaseSchedule(3, 2),
    ):
        with pytest.raises(ValueError, match=r"expected|cannot be divided"):
            make()
    with pytest.raises(TypeError):
        jaxpp.GPipe("4")


@pytest.mark.parametrize("info", BUILT_IN, ids=lambda info: info.name)
def test_a_stage_is_on_the_rank_whose_list_has_it(info):
    stages = 4
    sizes = (stages,) if info.stages_a_rank == 1 else (stages, 2)
    schedule = getattr(jaxpp, info.class_name)(*sizes)
    for rank, row in enumerate(schedule.tasks(stages)):
        for entry in filter(None, row):
            for task in entry if isinstance(entry, jaxpp.FusedTask) else (entry,):
                assert schedule.get_mpmd_idx(task.stage_id) == rank
    with pytest.raises(jaxpp.JaxppError, match="expected a stage below 4, found 4"):
        schedule.get_mpmd_idx(4)


def test_tasks_as_scripts_make_them():
    forward = jaxpp.Task.make(0, 1, jaxpp.TaskType.FWD)
    backward = jaxpp.Task.make(0, 1, jaxpp.TaskType.BWD)
    assert forward == jaxpp.Task(0, 1, jaxpp.TaskType.FWD)
    assert jaxpp.FusedTask((forward, backward)).latency == 1 + 2


class InTurn(jaxpp.InterleavedBaseSchedule):
    """GPipe, as a user would write it with the methods of the base class."""

    def tasks(self, n_mubatches):
        rows = [[] for _ in range(self.mpmd_dim)]
        stages = range(self.num_stages)
        for kind, order in ((jaxpp.TaskType.FWD, stages), (jaxpp.TaskType.BWD, stages[::-1])):
            for stage in order:
                row = rows[self.get_mpmd_idx(stage)]
                row += [jaxpp.Task.make(stage, i, kind) for i in range(n_mubatches)]
        return rows


def test_a_schedule_of_ones_own_with_several_stages_a_rank(any_mesh2):
    assert_trains_equal(mlp([1, 1, 1, 1], 3), InTurn(4, 2), any_mesh2, steps=1)


class Own(jaxpp.Interleaved1F1B):
    """A user's subclass of a built-in schedule, with parameters of its own."""


def test_schedules_of_the_same_parameters_are_equal(tmp_path):
    csv = tmp_path / "schedule.csv"
    csv.write_text("0F0,0B0\n")
    costs = [(1.0, 1.0, 1.0)] * 2
    made = [
        lambda: jaxpp.Std1F1B(2),
        lambda: jaxpp.Std1F1B(4),
        lambda: jaxpp.GPipe(2),
        lambda: jaxpp.Interleaved1F1B(4, 2),
        lambda: jaxpp.Interleaved1F1B(4, 2, fuse_steady_state=True),
        lambda: jaxpp.InterleavedGPipe(4, 2),
        lambda: jaxpp.CsvSchedule(csv),
        lambda: jaxpp.Searched(costs, 2),
        lambda: jaxpp.Searched(costs, 2, seconds=1.0),
    ]
    first, second = [make() for make in made], [make() for make in made]
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            assert (a == b) == (i == j) and (a != b) == (i != j)
    assert list(map(hash, first)) == list(map(hash, second))
    assert len({*first, *second}) == len(made)
    for make in (lambda: Own(4, 2), jaxpp.Auto):
        a = make()
        assert a == a and a != make() and len({a, make(), a}) == 2
    assert jaxpp.Std1F1B(2) != 2


def test_an_equal_schedule_as_a_static_argument_compiles_nothing():
    traces = []

    def step(ws, xs, schedule):
        traces.append(schedule)
        return m.training_step(schedule)(ws, xs)

    jitted = jaxpp.mpmd_jit_with_loop(step, mesh_of(2, {}), static_argnames="schedule")
    for schedule in (jaxpp.Std1F1B(2), jaxpp.Std1F1B(2), jaxpp.GPipe(2), jaxpp.GPipe(2)):
        jitted(m.params(), m.batch(), schedule=schedule)
    assert traces == [jaxpp.Std1F1B(2), jaxpp.GPipe(2)]
