"""Every built-in schedule trains a model to the numbers of plain JAX."""

import pytest

import jaxpp.api as jaxpp
from equality import assert_trains_equal
from models import mlp

ONE_STAGE = [jaxpp.ZeroBubbleH2]
LOOPED = [jaxpp.BreadthFirst, jaxpp.InterleavedGPipe, jaxpp.InterleavedZeroBubble]
V_SHAPED = [jaxpp.ZeroBubbleV, jaxpp.VHalf, jaxpp.VMin, jaxpp.V1F1B]


@pytest.mark.parametrize("schedule", ONE_STAGE, ids=lambda s: s.__name__)
def test_one_stage_a_rank(schedule, any_mesh4):
    assert_trains_equal(mlp([1, 1, 1, 1], 6), schedule(4), any_mesh4, steps=2)


@pytest.mark.parametrize("schedule", LOOPED + V_SHAPED, ids=lambda s: s.__name__)
@pytest.mark.parametrize("microbatches", [1, 5])
def test_two_stages_a_rank(schedule, microbatches, any_mesh2):
    problem = mlp([1, 2, 1, 1], microbatches)
    assert_trains_equal(problem, schedule(4, 2), any_mesh2, steps=2)


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
    with pytest.raises(jaxpp.JaxppError, match="is for 4 microbatches, found 5"):
        jaxpp.CsvSchedule(path).tasks(5)
    path.write_text(built.csv(True).replace("1RECV_F0,", "", 1))
    with pytest.raises(jaxpp.JaxppError, match=r"schedule.csv:2: cell 1, 1F0: expected"):
        jaxpp.CsvSchedule(path)


def test_a_searched_schedule_trains(any_mesh2):
    costs = [(2, 2, 2), (1, 1, 1), (1, 1, 1), (3, 3, 3)]
    schedule = jaxpp.Searched(costs, 2, memory_limit=60, activation_bytes=10, seconds=0.2)
    assert_trains_equal(mlp([2, 1, 1, 3], 4), schedule, any_mesh2, steps=1)
