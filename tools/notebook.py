"""Writes examples/tutorial.ipynb from tutorial.py; with --check, says whether it is up to date.

    notebook.py ROOT [--check]

A cell begins with `# %%`, one of text with `# %% [markdown]`; the script's docstring is the
first one. The notebook has no outputs, so that it depends on nothing else.
"""

from __future__ import annotations

import ast
import json
import pathlib
import re
import sys
from typing import Any

from generated import write_or_check

TITLE = "# From a training step to a pipeline\n\n"


def to_cell(index: int, markdown: bool, source: str) -> dict[str, Any]:
    cell = {
        "cell_type": "markdown" if markdown else "code",
        "id": f"cell-{index}",
        "metadata": {},
        "source": source.splitlines(keepends=True),
    }
    return cell if markdown else {**cell, "execution_count": None, "outputs": []}


def document(script: str) -> str:
    docstring = ast.get_docstring(ast.parse(script), clean=False) or ""
    script = script.replace(f'"""{docstring}"""', "", 1)
    sources = [(True, TITLE + docstring.strip())]
    for part in re.split(r"^(?=# %%)", script, flags=re.MULTILINE):
        head = part.partition("\n")[0]
        body = part.removeprefix(head) if head.startswith("# %%") else part
        if head.startswith("# %% [markdown]"):
            sources.append((True, re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            sources.append((False, body.strip()))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": [to_cell(i, *source) for i, source in enumerate(sources) if source[1]],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    examples = pathlib.Path(sys.argv[1]) / "examples"
    return write_or_check(
        examples / "tutorial.ipynb", document((examples / "tutorial.py").read_text())
    )


if __name__ == "__main__":
    sys.exit(main())
