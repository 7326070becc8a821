"""Writes docs/c_api.md from the public headers; with --check, says whether it is up to date.

    c_api.py ROOT [--check]

A header becomes a chapter: its opening comment, then each declaration with the comment above
it, in the header's order. Headers come in the order in which jaxpp.h includes them.
"""

from __future__ import annotations

import pathlib
import re
import sys

from generated import write_or_check

RULER = re.compile(r"^// ?(?:-|=){3}[-=]* ?(.*?) ?[-=]*(?:===//)?$")
ATTRIBUTES = re.compile(r"\bJPP_API |\s+JPP_MUST_USE|\s+JPP_PRINTF\([^)]*\)")
NAME = re.compile(r"(?<![\w`])((?:jpp|JPP)_\w+(?:\(\))?)")
PLACEHOLDER = re.compile(r'"?@\w+@"?')  # what a build fills in
BULLET = re.compile(r"^\s*(?:- |\d+\. )")


def header_order(umbrella: str) -> list[str]:
    return re.findall(r'^#include "jaxpp/(\w+\.h)"', umbrella, re.M)


def prose(comment: list[str]) -> str:
    """A comment as Markdown: paragraphs and lists; indented lines are shown verbatim."""
    text = "\n".join(re.sub(r"^// ?", "", line).rstrip() for line in comment)
    paragraphs = []
    for paragraph in re.split(r"\n{2,}", text.strip("\n")):
        if paragraph.startswith("  ") and not BULLET.match(paragraph):
            paragraphs.append(f"```text\n{paragraph}\n```")
        else:
            paragraphs.append(NAME.sub(r"`\1`", paragraph))
    return "\n\n".join(paragraphs)


def body_of(text: str) -> list[str]:
    """The lines between the include guard, without includes and C++ guards."""
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("#define JAXPP_")) + 1
    last = max(i for i, line in enumerate(lines) if line.startswith("#endif"))
    return [line for line in lines[first:last] if not line.startswith("#include")]


def declarations(lines: list[str]) -> list[tuple[list[str], list[str]]]:
    """Splits lines into pairs (comment, code): a comment begins a pair, and so does code
    after an empty line."""
    found: list[tuple[list[str], list[str]]] = [([], [])]
    depth = 0
    for line in lines:
        comment, code = found[-1]
        if depth == 0 and (not line or (line.startswith("//") and code)):
            found.append(([], []))
            comment, code = found[-1]
        if depth == 0 and line.startswith("//"):
            comment.append(line)
        elif line:
            code.append(line)
        depth += line.count("{") - line.count("}")
    return [pair for pair in found if pair != ([], [])]


def chapter(name: str, text: str) -> str:
    opening = text.split("#ifndef", 1)[0].strip().split("\n")
    parts = [f"## `{name}`", prose(opening)]
    for comment, code in declarations(body_of(text)):
        ruler = RULER.match(comment[0]) if comment else None
        if ruler:
            parts.append(f"### {ruler[1]}")
            comment = comment[1:]
        if code:
            shown = ATTRIBUTES.sub("", "\n".join(code))
            parts.append(f"```c\n{shown}\n```")
        if comment:
            parts.append(prose(comment))
    return "\n\n".join(part for part in parts if part)


def document(include: pathlib.Path) -> str:
    umbrella = (include / "jaxpp.h").read_text()
    texts = {}
    for name in header_order(umbrella):
        written = include / name
        texts[name] = (written if written.exists() else include / f"{name}.in").read_text()
        texts[name] = PLACEHOLDER.sub("...", texts[name])
    start = (
        "# The C library\n\n"
        "`tools/c_api.py` makes this page from the headers in `include/jaxpp`. "
        "`#include <jaxpp/jaxpp.h>` includes all of them. "
        "[examples/c](../examples/c/README.md) shows how to build a program with the library."
    )
    return "\n\n".join([start, *(chapter(*item) for item in texts.items())]) + "\n"


def main() -> int:
    root = pathlib.Path(sys.argv[1])
    return write_or_check(root / "docs" / "c_api.md", document(root / "include" / "jaxpp"))


if __name__ == "__main__":
    sys.exit(main())
