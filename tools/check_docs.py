"""Checks that the names in the documentation exist, and that its links resolve.

    check_docs.py ROOT

Prints a line for each offence, PAGE:LINE first, and exits with status 1 if there is any.
For generated pages it checks only the links, since their names come from the sources.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import re
import sys
from collections.abc import Iterator

GENERATED = ("docs/api.md", "docs/c_api.md", "docs/errors.md")
LINKS_ONLY = (*GENERATED, "CHANGELOG.md")  # a changelog keeps names that are gone
INDEX = "docs/README.md"  # has a link to every page of docs/
SOURCE = (".c", ".h", ".py", ".pyi", ".sh", ".ipynb")  # always a file of the project
USERS_FILES = ("train.py",)  # the reader's own script
TOP = "benchmarks|docs|examples|include|python|scripts|src|tests|tools"

HEADING = re.compile(r"^#+ (.*)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
PATH_IN_CODE = re.compile(rf"(?<![\w./-])(?:{TOP})/[\w./*-]*\w")
MAKE = re.compile(r"^\s*make((?: [a-z][a-z-]*)+)(?![\w=])")
COMMAND = re.compile(r"(?:^|[\s;/])jaxpp ([a-z]+)(?: ([a-z]+))?([^;&|]*)")
IDENTIFIER = re.compile(r"(?<![\w-])(?:jpp|JPP)_\w+(?:\.\.\.)?|\bk[A-Z]\w+")
PYTHON_NAME = re.compile(r"(?<![\w./-])jaxpp((?:\.[A-Za-z]\w*)+)")
# `name` (`file.py`), `name` in `file.py`
NAME_IN_FILE = re.compile(
    r"`([A-Za-z_][\w.]*)(?:\(\))?`\s+(?:\(|in\s+|of\s+)`([\w./]+\.(?:py|[ch]))`"
)


@dataclasses.dataclass
class Block:
    """A paragraph, list item, table row or run of code lines."""

    line: int
    text: str
    is_code: bool

    def names(self) -> list[str]:
        """The texts in backticks, or the lines of code."""
        return (
            self.text.split("\n") if self.is_code else SPAN.findall(" ".join(self.text.split()))
        )


def blocks_of(text: str) -> Iterator[Block]:
    """The page's blocks, in order."""
    lines: list[str] = []
    start, is_code, fenced = 1, False, False
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fence = line.lstrip().startswith("```")
        indented = fenced or line.startswith("    ")
        item = not indented and re.match(r"\s*(?:[-*|]|\d+\.) ?", line)
        if lines and (fence or item or not line.strip() or indented != is_code):
            yield Block(start, "\n".join(lines), is_code)
            lines = []
        if fence:
            fenced = not fenced
        elif line.strip():
            start = start if lines else number
            is_code = indented
            lines.append(line)


def anchors_of(text: str) -> set[str]:
    """The anchors that GitHub creates for the page's headings."""
    found: dict[str, int] = {}
    anchors = set()
    fenced = False
    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        if fenced or not (heading := HEADING.match(line)):
            continue
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        anchors.add(f"{slug}-{count}" if count else slug)
    return anchors


class Project:
    """The names of the project: files, make targets, commands, flags, variables, symbols."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        hidden = re.compile(r"build(?:$|-)|dist$|\.(?!ci$|clang|pre-commit)|__pycache__")
        self.files: list[str] = []  # names of folders end in a slash
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if not hidden.match(name))
            here = pathlib.Path(folder).relative_to(root)
            self.files += [f"{here / name}/" for name in folders]
            self.files += [str(here / name) for name in sorted(files) if not hidden.match(name)]
        self.makefile = set(re.findall(r"^([a-z-]+):", self.text("Makefile"), re.M))
        main = self.text("src/cli/main.c")
        self.commands = set(re.findall(r"^    \{\"([a-z ]+)\", \"", main, re.M))
        self.flags = {
            *re.findall(r"\"(--?[a-z-]+)\"", self.text("src/cli/options.c")),
            "--help",
        }
        options = self.text("src/base/option.c")
        self.variables = set(re.findall(r"\{\"(\w+)\",", options))
        self.variables |= set(re.findall(r"=\s*\{\"(\w+)\",", options))
        tests = [f for f in self.files if re.match(r"tests/.*\.(c|h|py)$", f)]
        reads = r"(?:test_variable|environ\.get)\(\"(JPP_\w+)\"|\"(JPP_\w+)\" in os\.environ"
        for pair in re.findall(reads, "".join(map(self.text, tests))):
            self.variables |= {*pair} - {""}
        sources = [f for f in self.files if re.match(r"(src|include|tests/c)/.*\.(c|h|in)$", f)]
        self.symbols = set(
            re.findall(r"\b(?:jpp_|JPP_|k[A-Z])\w+", "\n".join(map(self.text, sources)))
        )

    def text(self, path: str) -> str:
        return (self.root / path).read_text(errors="replace")

    def places(self, name: str, page: str) -> list[str]:
        """The files and folders that a name can mean on a page in this folder."""
        pattern = re.escape(name.rstrip("/")).replace(r"\*", "[^/]*")
        whole = re.compile(rf"(?:.*/)?{pattern}/?")
        found = [f for f in self.files if whole.fullmatch(f)]
        folder = page.rpartition("/")[0]
        nearest = [f for f in found if f.rstrip("/") in (name.rstrip("/"), f"{folder}/{name}")]
        return nearest or found

    def python_names(self, module: str) -> set[str]:
        """The names that a module of the package defines or imports."""
        base = self.root / "python" / "jaxpp" / module.replace(".", "/")
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, (ast.ImportFrom, ast.Import)):
                names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
            elif isinstance(node, ast.Assign):
                names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        return names

    def has_python_name(self, parts: list[str]) -> bool:
        """True if jaxpp.A.B is a name of the API, or of a module of the package."""
        if parts[0] in self.python_names("api") | self.python_names(""):
            return True
        if not self.places(f"python/jaxpp/{parts[0]}.py", "") and not self.places(
            f"python/jaxpp/{parts[0]}/", ""
        ):
            return False
        module = f"python/jaxpp/{'/'.join(parts)}.py"
        names = self.python_names(parts[0])
        return len(parts) == 1 or parts[1] in names or bool(self.places(module, ""))


def wrong_path(project: Project, page: str, block: Block, name: str) -> str | None:
    """The message for a name that looks like a file or folder but is not one."""
    file, _, test = name.partition("::")
    file = re.sub(r":\d+$", "", file)
    known = file.startswith(tuple(f"{top}/" for top in TOP.split("|")))
    if not PATH.fullmatch(file) or file in USERS_FILES:
        return None
    if not (known or file.endswith(SOURCE) or (file.endswith("/") and len(file) > 1)):
        return None
    if file.endswith(SOURCE) and file.startswith("*"):
        return None
    places = project.places(file, page)
    if not places:
        return f"no file or folder {file}"
    if test and not any(f"def {test}(" in project.text(place) for place in places):
        return f"no test {test} in {file}"
    if "/" not in file and len(places) > 1 and "*" not in file:
        folders = [place.rpartition("/")[0] for place in places]
        if not any(
            re.search(rf"`(?:{folder}|{folder.split('/')[-1]})[/`]", block.text)
            for folder in folders
        ):
            return f"{file} may be {' or '.join(places)}; write its folder"
    return None


def wrong_command(project: Project, text: str) -> Iterator[str]:
    """Yields commands and flags of jaxpp that do not exist."""
    for first, second, rest in COMMAND.findall(text):
        name = f"{first} {second}" if f"{first} {second}" in project.commands else first
        if name not in project.commands:
            yield f"no command jaxpp {name}"
            continue
        own = rest.split(" -- ")[0]
        for flag in re.findall(r"(?<=\s)--[a-z-]+", own):
            if flag not in project.flags:
                yield f"no flag {flag} of jaxpp {name}"


def wrong_names(project: Project, page: str, block: Block) -> Iterator[str]:
    """Yields names in the block that do not exist."""
    for name in block.names():
        if block.is_code:
            for path in PATH_IN_CODE.findall(name):
                if not project.places(path, page):
                    yield f"no file or folder {path}"
        elif wrong := wrong_path(project, page, block, name):
            yield wrong
        for targets in MAKE.findall(name):
            for target in targets.split():
                if target not in project.makefile:
                    yield f"no target make {target}"
        yield from wrong_command(project, name)
        for symbol in IDENTIFIER.findall(name):
            prefix = symbol.rstrip(".")
            is_set = re.search(rf"\b{prefix}=", name) is not None
            known = project.variables if is_set else project.variables | project.symbols
            if symbol.endswith(("_", "...")):
                known = {s for s in known if s.startswith(prefix)} and {prefix}
            if prefix not in known:
                yield f"no {'variable' if is_set else 'symbol'} {prefix}"
        for dotted in PYTHON_NAME.findall(name):
            if dotted not in (".h", ".pc") and not project.has_python_name(
                dotted[1:].split(".")
            ):
                yield f"no name jaxpp{dotted}"
    for symbol, file in [] if block.is_code else NAME_IN_FILE.findall(block.text):
        word = re.compile(rf"\b{symbol.split('.')[-1]}\b")
        places = [p for p in project.places(file, page) if not p.endswith("/")]
        if places and not any(word.search(project.text(place)) for place in places):
            yield f"no {symbol} in {file}"


def wrong_links(project: Project, page: str, whole: str, block: Block) -> Iterator[str]:
    """Yields links of the block that lead nowhere; `whole` is the page's text."""
    for target in LINK.findall(re.sub(r"`[^`]*`", "", block.text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (project.root / page).parent / path
        if not to.exists():
            yield f"the link to {target}: no such file"
        elif anchor and anchor not in anchors_of(to.read_text() if path else whole):
            yield f"the link to {target}: no such heading"


def wrong_in(project: Project, page: str, text: str) -> Iterator[str]:
    """Yields what is wrong in a page with this text, PAGE:LINE first."""
    for block in blocks_of(text):
        wrong = [] if block.is_code else list(wrong_links(project, page, text, block))
        if page not in LINKS_ONLY:
            wrong += wrong_names(project, page, block)
        yield from (f"{page}:{block.line}: {what}" for what in wrong)


def offences(root: pathlib.Path) -> Iterator[str]:
    """Yields what is wrong in all pages."""
    project = Project(root)
    pages = [file for file in project.files if file.endswith(".md")]
    for page in pages:
        yield from wrong_in(project, page, project.text(page))
    linked = re.findall(r"\]\((\w+\.md)", project.text(INDEX))
    for page in pages:
        if page.startswith("docs/") and page not in (
            INDEX,
            *(f"docs/{name}" for name in linked),
        ):
            yield f"{INDEX}:1: no link to {page}"


def main() -> int:
    """Returns exit status 1 if a page names something that does not exist."""
    found = list(offences(pathlib.Path(sys.argv[1])))
    print("\n".join(found) or "the documentation names what exists")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
