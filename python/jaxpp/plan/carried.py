"""Which result of a step is which argument of the next one.

Training steps return their state as they were given it: what comes out as a tree of the same
structure and types as an argument is taken for that argument of the next step. Such a result is
left on all ranks that need the argument; `jaxpp run` feeds it back where that was donated. A
wrong guess moves some bytes for nothing; no number of a script depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpp import _core
from jaxpp.trace.stacked import Bounds, parts_of_leaves

__all__ = ["carried"]

# The leaves' avals, of which some are cut in parts with an aval each, and where those are cut.
_Leaves = tuple[Sequence[Any], Sequence[Bounds | None]]


def _subtrees(trees: Sequence[Any], leaves: _Leaves) -> list[tuple[Any, list[int]]]:
    """What trees that stand side by side are like, structure and types, and their parts."""
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
    """For each result the number of the argument that the next step gets it as, or NONE.

    Donated arguments come first, each with the first result of its form. Others count if they
    are trees of several arrays: a single one may be a batch.
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
