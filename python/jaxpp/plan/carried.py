"""Matches the results of a step to the arguments of the next one.

Training steps return their updated state: a result tree with the same structure and types as an
argument is assumed to be that argument of the next step. Such a result is kept on all ranks
that need the argument, and `jaxpp run` feeds it back if the argument was donated. A wrong guess
costs unnecessary transfers but never changes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpp import _core
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.stacked import parts_of_leaves

__all__ = ["carried"]

# The avals of the leaves, one per part for leaves that are cut, and the cuts.
_Leaves = tuple[Sequence[Any], Sequence[Bounds | None]]


def _subtrees(trees: Sequence[Any], leaves: _Leaves) -> list[tuple[Any, list[int]]]:
    """The structure, types and parts of sibling trees, for comparison."""
    avals, bounds = leaves
    parts = parts_of_leaves(bounds)
    found, first = [], 0
    for tree in trees:
        own = parts[first : first + tree.num_leaves]
        first += tree.num_leaves
        types = [[(avals[n].shape, avals[n].dtype) for n in leaf] for leaf in own]
        found.append(((tree, types), [n for leaf in own for n in leaf]))
    return found


def carried(
    tree: Any, out_tree: Any, arguments: _Leaves, results: _Leaves, donated: Sequence[bool]
) -> list[int]:
    """For each result the number of the argument that it becomes in the next step, or NONE.

    Donated arguments are matched first, each with the first result of the same structure
    and types. Other arguments are matched only if they have several arrays: a single
    array may be a batch.
    """
    avals, _ = results
    found = [_core.NONE] * len(avals)
    args, kwargs = tree.children()
    candidates = _subtrees(out_tree.children(), results) + _subtrees([out_tree], results)
    given = _subtrees([*args.children(), *kwargs.children()], arguments)
    gone = [row for row in given if all(donated[n] for n in row[1])]
    kept = [row for row in given if not all(donated[n] for n in row[1]) and len(row[1]) > 1]
    for like, numbers in gone + kept:
        for out_like, outputs in candidates:
            if out_like == like and all(found[n] == _core.NONE for n in outputs):
                for output, argument in zip(outputs, numbers, strict=True):
                    found[output] = argument
                break
    return found
