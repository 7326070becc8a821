"""Writes pages that tools generate or, with --check, compares them with the files."""

from __future__ import annotations

import difflib
import pathlib
import sys


def write_or_check(page: pathlib.Path, made: str) -> int:
    """Returns exit status 1 if --check finds a text other than `made`."""
    if "--check" not in sys.argv:
        page.write_text(made)
        return 0
    shown = page.read_text() if page.exists() else ""
    changes = list(difflib.unified_diff(shown.split("\n"), made.split("\n"), lineterm="", n=0))
    print("\n".join(changes[:40]) or f"{page.name} is up to date")
    if changes:
        print(f"{sys.argv[0]} {sys.argv[1]} writes it")
    return 1 if changes else 0
