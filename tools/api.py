"""Writes docs/api.md from docstrings; with --check, says whether it is up to date.

    api.py ROOT [--check]

The names are those of `jaxpp.api`. It reads the sources without importing them, so
signatures appear as written, whatever the versions of Python and JAX. Each module becomes
a chapter, in the order of CHAPTERS.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys

from generated import write_or_check

# The modules that define the names of `jaxpp.api`, in the order of the page.
CHAPTERS = {
    "jaxpp.mesh": "Meshes and shardings",
    "jaxpp.remote.mesh": "Meshes of workers",
    "jaxpp.trace.marks": "Marking stages",
    "jaxpp.trace.layers": "Stages of layers that are alike",
    "jaxpp.trace.auto_stages": "Stages that are found",
    "jaxpp.trace.loop": "The loop over microbatches",
    "jaxpp.operations": "How results of microbatches are combined",
    "jaxpp.step": "Steps",
    "jaxpp.by_yield": "Functions without a loop",
    "jaxpp.experimental.mpmd": "Programs written by hand",
    "jaxpp.trace.program": "Values that are sent by hand",
    "jaxpp.schedules": "Schedules",
    "jaxpp.plan.auto": "A schedule that is found",
    "jaxpp.array": "Arrays",
    "jaxpp.trace.cross": "Values of several ranks",
    "jaxpp.run.loading": "Plans from files",
    "jaxpp.run.reshard": "Between plain JAX and a pipeline",
    "jaxpp.run.times": "Measured times",
    "jaxpp.errors": "Errors",
    "jaxpp.run.compiled": "A compiled step",
    "jaxpp.plan.costs": "What a step costs",
}
# Users do not import these classes: calls of the names return them.
GIVEN = {
    "jaxpp.step": ["MpmdFunction", "TracedStep", "LoweredStep"],
    "jaxpp.experimental.mpmd": ["mpmd", "task", "transfer", "stack", "slice", "LoweredMpmdFun"],
    "jaxpp.trace.program": ["Transfer"],
    "jaxpp.plan.costs": [
        "CostSummary",
        "RankCost",
        "LinkCost",
        "CollectiveCost",
        "MemoryAnalysis",
        "Prediction",
    ],
    "jaxpp.run.loading": ["LoadedStep"],
    "jaxpp.run.compiled": ["CompiledStep"],
}
HEAD = """# The Python API

This page describes every name of `jaxpp.api`, which scripts import with `import jaxpp.api as
jaxpp`, those of `jaxpp.experimental.mpmd`, and the objects that their functions return.
`tools/api.py` writes it from the docstrings and from [api_examples.py](api_examples.py), a
script that runs from top to bottom: each example continues where the one before it ended.
[README](../README.md#a-pipelined-step) has a complete step, and [guide.md](guide.md) ports a
model to it.
"""

Definition = ast.ClassDef | ast.FunctionDef


def public_names(root: pathlib.Path) -> dict[str, list[str]]:
    """The names of `jaxpp.api` by the module that defines them."""
    tree = ast.parse((root / "python/jaxpp/api.py").read_text())
    return {
        node.module: [alias.name for alias in node.names]
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
    }


def definitions(root: pathlib.Path, module: str) -> dict[str, ast.stmt]:
    """What a module defines by name, and what it may have from the extension's stub."""
    source = root / "python" / pathlib.Path(*module.split(".")).with_suffix(".py")
    found: dict[str, ast.stmt] = {}
    for path in (root / "python/jaxpp/_core.pyi", source):
        for node in ast.parse(path.read_text()).body:
            found.update(dict.fromkeys(_names_of(node), node))
    return found


def _names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, Definition):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def _is(node: ast.FunctionDef, *decorators: str) -> bool:
    return any(ast.unparse(d) in decorators for d in node.decorator_list)


def signature(node: ast.FunctionDef, name: str, skip_self: bool) -> str:
    arguments = ast.unparse(node.args)
    if skip_self:
        arguments = re.sub(r"^(self|cls)(, )?", "", arguments)
    gives = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({arguments}){'' if name.isidentifier() and name[0].isupper() else gives}"


def _code(text: str) -> list[str]:
    return ["```python", text, "```", ""]


def _prose(node: Definition) -> list[str]:
    text = ast.get_docstring(node)
    if not text:
        return []
    # Turns the parts of a docstring with a title and an indented body into lists.
    lines = []
    for line in text.splitlines():
        title = re.fullmatch(r"(Args|Returns|Raises|Attributes|Yields):", line)
        entry = re.fullmatch(r"  ([\w*, ]+): (.*)", line)
        if title:
            lines += [f"*{title[1]}*", ""]
        elif entry:
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        else:
            lines.append(line.strip() if line.startswith("  ") else line)
    return [*lines, ""]


def _with_bases(node: ast.ClassDef, found: dict[str, ast.stmt]) -> list[ast.ClassDef]:
    """A class and its bases in the same module, in Python's order: a base that several of
    them share comes after all of these."""
    above = [found.get(ast.unparse(base)) for base in node.bases]
    paths = [_with_bases(base, found) for base in above if isinstance(base, ast.ClassDef)]
    order = [node, *(base for path in paths for base in path)]
    return [base for k, base in enumerate(order) if base not in order[k + 1 :]]


def _constructor(node: ast.ClassDef, found: dict[str, ast.stmt]) -> ast.FunctionDef | None:
    """The class's `__init__`, or the one that it inherits from a class of the same
    module."""
    for one in _with_bases(node, found):
        for member in one.body:
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                return member
    return None


def _command_name(node: ast.ClassDef) -> list[str]:
    """The command's name for a built-in schedule."""
    for member in node.body:
        if isinstance(member, ast.Assign) and _names_of(member) == ["core_name"]:
            return [f"`jaxpp schedule` calls it `{ast.literal_eval(member.value)}`.", ""]
    return []


def examples(root: pathlib.Path) -> dict[str, list[str]]:
    """The example of each name, from the script that contains all of them."""
    script = (root / "docs/api_examples.py").read_text()
    found: dict[str, list[str]] = {}
    for head, code in re.findall(r"^# %% (.*)\n((?:(?!# %%).*\n?)*)", script, re.M):
        first, *others = head.split()
        found[first] = ["*Example*", "", *_code(code.strip())]
        link = f"*Example*: under [`{first}`](#{first.lower()})."
        found.update({name: [link, ""] for name in others})
    return found


def _class_head(node: ast.ClassDef, found: dict[str, ast.stmt]) -> str:
    if made := _constructor(node, found):
        return signature(made, node.name, skip_self=True)
    fields = [
        f"{ast.unparse(member.target)}: {ast.unparse(member.annotation)}"
        + (f" = {ast.unparse(member.value)}" if member.value else "")
        for member in node.body
        if isinstance(member, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(member.annotation)
    ]
    if fields and any("dataclass" in ast.unparse(d) for d in node.decorator_list):
        return f"{node.name}({', '.join(fields)})"
    bases = ", ".join(map(ast.unparse, node.bases))
    return f"class {node.name}({bases})" if bases else f"class {node.name}"


def _members(node: ast.ClassDef) -> list[str]:
    text = []
    for member in node.body:
        if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
            continue
        if not ast.get_docstring(member):
            continue
        if _is(member, "property", "functools.cached_property"):
            text.append(f"**`.{member.name}`**")
        else:
            shown = signature(member, f".{member.name}", not _is(member, "staticmethod"))
            text.append(f"**`{shown}`**")
        text += ["", *_prose(member)]
    return text


def entry(name: str, found: dict[str, ast.stmt], example: list[str]) -> list[str]:
    node = found[name]
    if isinstance(node, ast.ClassDef):
        head = [*_code(_class_head(node, found)), *_prose(node), *_command_name(node)]
        return [f"### `{name}`", "", *head, *example, *_members(node)]
    if isinstance(node, ast.FunctionDef):
        shown = signature(node, name, skip_self=False)
        return [f"### `{name}`", "", *_code(shown), *_prose(node), *example]
    return [f"### `{name}`", "", *_code(ast.unparse(node)), *example]


def document(root: pathlib.Path) -> str:
    names = public_names(root)
    missing = names.keys() - CHAPTERS.keys()
    if missing:
        sys.exit(f"tools/api.py: CHAPTERS lacks {', '.join(sorted(missing))}")
    shown = examples(root)
    text = [HEAD]
    for module, title in CHAPTERS.items():
        text += [f"## {title}", ""]
        found = definitions(root, module)
        for name in [*names.get(module, []), *GIVEN.get(module, [])]:
            if name not in shown:
                sys.exit(f"docs/api_examples.py has no example of {name}")
            text += entry(name, found, shown[name])
    return re.sub(r"\n{3,}", "\n\n", "\n".join(text)).rstrip() + "\n"


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    return write_or_check(root / "docs" / "api.md", document(root))


if __name__ == "__main__":
    sys.exit(main())
