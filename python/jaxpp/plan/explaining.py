"""Facts about a step that only its trace knows, for the page that explains it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxpp.jax_internals.lines import is_user_file
from jaxpp.jax_internals.sums import Blocked
from jaxpp.plan.sharding import Partial
from jaxpp.trace.front import FrontLoop
from jaxpp.trace.gather import Gather

__all__ = ["notes_of"]

_PLACE = re.compile(r'"([^"]+)":(\d+)')


def _line_of(location: Any) -> str:
    """The user's line in an MLIR location, after " at ", or nothing."""
    for name, number in _PLACE.findall(str(location)):
        if is_user_file(name):
            return f" at {name}:{number}"
    return ""


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _sums(loops: Sequence[FrontLoop], sums: Sequence[Sequence[Partial]]) -> Iterator[str]:
    how: dict[str, list[str]] = {}
    for loop, results in zip(loops, sums, strict=False):
        for name, axes in zip(loop.names, results, strict=True):
            if axes is None:
                text = "none, because it is zero"
            elif isinstance(axes, Blocked):
                text = f"in every microbatch, if at all: {axes.reason}{_line_of(axes.location)}"
            else:
                text = f"over {', '.join(sorted(axes))}, once after the loop"
            how.setdefault(text, []).append(name)
    if how:
        yield "sums of the loop's results over the devices of a rank:"
    for text, names in how.items():
        yield f"  {text}: {_listed(list(dict.fromkeys(names)))}"


def _gathers(gathers: Mapping[int, Gather], names: Sequence[str]) -> Iterator[str]:
    for once, when in ((True, "once a step, before the loop"), (False, "at each use")):
        gathered = [names[v] for v, gather in gathers.items() if gather.once is once]
        if gathered:
            yield f"weights gathered {when}: {_listed(gathered)}"


def notes_of(
    loops: Sequence[FrontLoop],
    sums: Sequence[Sequence[Partial]],
    gathers: Mapping[int, Gather],
    names: Sequence[str],
) -> list[str]:
    """Paragraphs about the sums and gathers of a rank's devices.

    Args:
      loops: the step's loops.
      sums: for each result of a loop, the axes over which it is partial, None if it is zero,
        or the reason why it is not partial.
      gathers: by argument.
      names: the names of the arguments.
    """
    paragraphs = ("\n".join(_sums(loops, sums)), "\n".join(_gathers(gathers, names)))
    return [text for text in paragraphs if text]
