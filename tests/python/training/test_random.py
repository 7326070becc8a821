"""Random models, trained as a pipeline and as plain JAX, in one process and in several
(`make random` runs more)."""

from __future__ import annotations

import pytest

from random_models import run_seeds
from random_processes import run_seeds as run_in_processes

_FIRST, _GROUPS, _CASES = 1000, 5, 3  # 15 cases, always the same


@pytest.mark.parametrize(
    "group", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, _GROUPS))]
)
def test_random_models_train_to_the_same_numbers(group: int) -> None:
    first = _FIRST + group * _CASES
    print(f"seeds {first} to {first + _CASES - 1}")
    failed = run_seeds(range(first, first + _CASES))
    assert not failed, "\n".join(f"{case}\n{trace}" for case, trace in failed)


@pytest.mark.soak
def test_random_models_train_to_the_same_bits_in_several_processes() -> None:
    run, wrong = run_in_processes(range(_FIRST, _FIRST + 8))
    assert run >= 4
    assert not wrong, "\n".join(wrong)
