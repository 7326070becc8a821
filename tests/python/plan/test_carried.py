"""How results of a step are matched to arguments of the next step, and that each result is left
where that argument is needed."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
import trainings
from equality import mesh_of, pipelined_step
from jaxpp import _core
from jaxpp.plan.carried import carried
from jaxpp.trace.boxes import Bounds

A, B, C = (jax.ShapeDtypeStruct((n,), np.float32) for n in (2, 3, 4))
HALF = jax.ShapeDtypeStruct((2,), jnp.bfloat16)
STATE = {"w": A, "n": B}
NO = _core.NONE
CUT = Bounds(0, (0, 2, 5, 7))


def found(args: tuple[Any, ...], result: Any, donated: tuple[int, ...] = ()) -> list[int]:
    leaves, tree = jax.tree.flatten((args, {}))
    outs, out_tree = jax.tree.flatten(result)
    gone = [i in donated for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    whole = [None] * len(leaves), [None] * len(outs)
    return carried(tree, out_tree, (leaves, whole[0]), (outs, whole[1]), gone)


@pytest.mark.parametrize(
    ("args", "donated", "result", "expected"),
    [
        ((STATE, C), (0,), (STATE, C), [0, 1, NO]),
        ((STATE, C), (), (STATE, C), [0, 1, NO]),
        ((STATE, C), (), {"loss": C, "params": STATE}, [NO, 0, 1]),
        ((STATE, C), (), STATE, [0, 1]),  # the state is the whole result
        ((A, C), (0,), (A, C), [0, NO]),
        ((A, C), (), (A, C), [NO, NO]),  # arguments that are not donated may be batches
        ((STATE, STATE), (), (STATE, STATE), [0, 1, 2, 3]),
        ((STATE, STATE), (1,), (STATE, A), [2, 3, NO]),  # a donated argument is preferred
        ((STATE,), (0,), ({"w": HALF, "n": B}, {"v": A, "n": B}), [NO] * 4),
        ((), (), (A,), [NO]),
        ((STATE,), (0,), None, []),
    ],
)
def test_state_is_known_by_its_form(
    args: tuple[Any, ...], donated: tuple[int, ...], result: Any, expected: list[int]
) -> None:
    assert found(args, result, donated) == expected


def test_parts_of_a_leaf_go_together() -> None:
    leaves, tree = jax.tree.flatten((({"w": A},), {}))
    outs, out_tree = jax.tree.flatten(({"w": A}, C))
    parts = [A, B, A]
    assert found((STATE,), (STATE,)) == [0, 1]
    arguments, results = (parts, [CUT]), ([*parts, C], [CUT, None])
    assert carried(tree, out_tree, arguments, results, [True] * 3) == [0, 1, 2, NO]
    assert carried(tree, out_tree, arguments, results, [False] * 3) == [0, 1, 2, NO]
    assert len(leaves) == 1 and len(outs) == 2


@pytest.mark.parametrize("name", trainings.problems(3))
def test_a_training_state_lies_where_the_next_step_needs_it(name: str) -> None:
    problem, mesh = trainings.problems(3)[name], mesh_of(3, {})
    step = jaxpp.mpmd_jit_with_loop(pipelined_step(problem, jaxpp.Std1F1B(3)), mpmd_mesh=mesh)
    state = problem.optimizer.init(problem.params)
    compiled = step.compile(problem.params, state, problem.batch)
    given, _, _ = compiled.in_shardings[0]
    left = jax.tree.map(lambda info: info.sharding, compiled.out_info[0])
    at = jax.tree.map(lambda a, b: (set(a.mesh_ids), set(b.mesh_ids)), given, left)
    for needed, found_at in jax.tree.leaves(at, is_leaf=lambda x: isinstance(x, tuple)):
        assert needed <= found_at
