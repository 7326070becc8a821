"""Every built-in schedule trains a model to the numbers of plain JAX."""

import pytest

import jaxpp.api as jaxpp
from equality import assert_trains_equal
from models import mlp

ONE_STAGE = [jaxpp.ZeroBubbleH2]
LOOPED = [jaxpp.BreadthFirst, jaxpp.InterleavedGPipe, jaxpp.InterleavedZeroBubble]
V_SHAPED = [jaxpp.ZeroBubbleV, jaxpp.VHalf, jaxpp.VMin, jaxpp.V1F1B]


@pytest.mark.parametrize("schedule", ONE_STAGE, ids=lambda s: s.__name__)
def test_one_stage_a_rank(schedule, mesh4):
    assert_trains_equal(mlp([1, 1, 1, 1], 6), schedule(4), mesh4, steps=2)


@pytest.mark.parametrize("schedule", LOOPED + V_SHAPED, ids=lambda s: s.__name__)
@pytest.mark.parametrize("microbatches", [1, 5])
def test_two_stages_a_rank(schedule, microbatches, mesh2):
    problem = mlp([1, 2, 1, 1], microbatches)
    assert_trains_equal(problem, schedule(4, 2), mesh2, steps=2)


def test_lists_are_those_of_the_command():
    rows = jaxpp.ZeroBubbleV(4, 2).tasks(1)
    assert [str(task) for task in rows[0]] == [
        *["fwd_0__0", "fwd_3__0", "bwd_i_3__0", "bwd_w_3__0", "bwd_i_0__0", "bwd_w_0__0"]
    ]
