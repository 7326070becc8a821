"""The table of docs/compatibility.md has the tests that are marked as its rows, in order."""

from __future__ import annotations

import re

import libraries
import test_equinox
import test_haiku
import test_hugging_face
import test_linen
import test_nnx
import test_optax
from locations import ROOT

DOCS = ROOT / "docs" / "compatibility.md"
# In the order of the table.
MODULES = (test_linen, test_nnx, test_equinox, test_haiku, test_hugging_face, test_optax)


def test_the_documentation_has_these_rows() -> None:
    row = re.compile(r"^\| ([^|]+?) \|[^|]*\| `(\w+\.py)::(test_\w+)` \|$", re.M)
    marked = [
        (feature, f"{module.__name__}.py", name)
        for module in MODULES
        for name, feature in libraries.rows_of(module).items()
    ]
    assert row.findall(DOCS.read_text()) == marked


def test_each_test_is_a_row() -> None:
    for module in MODULES:
        tests = {name for name in vars(module) if name.startswith("test_")}
        assert tests == set(libraries.rows_of(module))
