"""Writes the table and the pictures of docs/schedules.md from the command's output.

    schedule_docs.py JAXPP [ROOT]

The table is between the markers in the page; pictures are docs/schedules/NAME.svg. Both
use the sizes of each schedule's example in the table of src/schedule/builtin/build.c.
"""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

from jaxpp import _core

RANKS = 4
UNEVEN = [1.6, 1, 1, 1, 1, 1, 1, 2.2]  # embedding and head are heavier


def call(command: str, *args: str) -> str:
    done = subprocess.run([command, *args], capture_output=True, text=True, check=True)
    return done.stdout


def example(info: _core.ScheduleInfo) -> list[str]:
    """The schedule and its sizes, as arguments of the command."""
    sizes = zip(("stages", "ranks", "microbatches"), info.example, strict=True)
    return [info.name, *(f"--{what}={count}" for what, count in sizes)]


def messages(command: str, info: _core.ScheduleInfo) -> int:
    """Counts the activations and gradients that ranks send each other in a step."""
    text = call(command, "schedule", "show", *example(info), "--csv", "--comms")
    return len(re.findall(r"\dSEND_[FB]", text))


def row(command: str, info: _core.ScheduleInfo) -> str:
    """A line of the table."""
    figures = []
    for cost in ("1,1,1", "2,3,1"):
        text = call(command, "simulate", *example(info), f"--cost={cost}", "--json")
        figures.append(json.loads(text))
    equal, other = figures
    peaks = equal["peak_microbatches"]
    return (
        f"| [{info.name}](schedules/{info.name}.svg) | {equal['bubble_global']:g} "
        f"| {equal['bubble_span']:g} | {other['bubble_global']:g} "
        f"| {equal['utilisation']:.0%} | {', '.join(f'{p:g}' for p in peaks)} "
        f"| {messages(command, info)} |"
    )


def search_row(command: str, costs: pathlib.Path, microbatches: int) -> str:
    """The schedule that the search finds for uneven stages, next to the best built-in
    schedule."""
    args = [f"--stages={len(UNEVEN)}", f"--ranks={RANKS}", f"--costs={costs}"]
    args += [f"--microbatches={microbatches}", "--seconds=5", "--json"]
    found = json.loads(call(command, "schedule", "search", *args))
    gain = found["built_in_makespan"] / found["makespan"] - 1
    over = found["makespan"] / found["bound"] - 1
    return (
        f"| {microbatches} | {found['built_in']}: {found['built_in_makespan']:.4g} "
        f"| {found['makespan']:.4g} | {gain:.1%} | {over:.1%} |"
    )


def replace(text: str, marker: str, lines: list[str]) -> str:
    """Replaces the lines of the page between <!-- marker --> and <!-- end -->."""
    pattern = rf"(<!-- {marker} -->\n).*?(<!-- end -->)"
    body = "\n".join(lines)
    return re.sub(pattern, lambda m: f"{m[1]}{body}\n{m[2]}", text, flags=re.DOTALL)


def main() -> None:
    """Rewrites the page and its pictures."""
    command = str(pathlib.Path(sys.argv[1]).resolve())
    root = pathlib.Path(sys.argv[2] if len(sys.argv) > 2 else ".") / "docs"
    schedules = _core.Schedule.built_ins()
    table = [
        "| schedule | bubble | inside a rank | bubble, costs 2,3,1 | utilisation "
        "| peak by rank | messages |",
        "|---|---|---|---|---|---|---|",
        *[row(command, info) for info in schedules],
    ]
    for info in schedules:
        picture = root / "schedules" / f"{info.name}.svg"
        call(command, "plot", *example(info), "-o", str(picture))
    costs = root / "schedules" / "uneven.txt"
    costs.write_text(
        "# embedding and head heavier: STAGE F B W\n"
        + "".join(f"{s} {c:g} {c:g} {0.9 * c:g}\n" for s, c in enumerate(UNEVEN))
    )
    search = [
        "| microbatches | best built-in | found | built-in longer by | over the bound |",
        "|---|---|---|---|---|",
        *[search_row(command, costs, m) for m in (4, 8, 16)],
    ]
    page = root / "schedules.md"
    text = replace(page.read_text(), "table", table)
    page.write_text(replace(text, "search", search))


if __name__ == "__main__":
    main()
