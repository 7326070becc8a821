"""Compares what a library exports to what the public headers declare with JPP_API.

    check_exports.py LIBRARY INCLUDE...

Both must be the same: a symbol without a declaration is a private helper that programs
could come to depend on, a declaration without a symbol does not link.
"""

import pathlib
import re
import subprocess
import sys

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# The first name before a parenthesis is the function's: attributes come after it.
DECLARATION = re.compile(r"^JPP_API\b[^;(]*?(\w+)\s*\(", re.MULTILINE)


def declared(folders: list[str]) -> dict[str, str]:
    """Function -> header, of all public headers."""
    return {
        name: header.name
        for folder in folders
        for header in sorted(pathlib.Path(folder).rglob("*.h"))
        for name in DECLARATION.findall(COMMENT.sub("", header.read_text()))
    }


def exported(library: str) -> set[str]:
    """The dynamic symbols that the library defines, but for the sanitizers' own."""
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines()}
    return {name for name in names if not name.startswith("__")}


def main() -> int:
    """Exit status 1 when the two sets differ."""
    functions, symbols = declared(sys.argv[2:]), exported(sys.argv[1])
    found = [f"{name}: exported, but no public header declares it" for name in symbols]
    found = sorted(line for line in found if line.split(":")[0] not in functions)
    found += [
        f"{name}: declared in {header}, but not exported"
        for name, header in functions.items()
        if name not in symbols
    ]
    print("\n".join(found) or f"{len(symbols)} functions are exported, all declared")
    return 1 if found or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
