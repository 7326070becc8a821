"""Compares the symbols that a library exports with the JPP_API declarations of the public
headers.

    check_exports.py LIBRARY INCLUDE...

They must match: a symbol without a declaration is a private helper that programs might
come to use, and a declaration without a symbol does not link. Every symbol has the
version JAXPP_MAJOR.MINOR (from 1.0 on JAXPP_MAJOR), so that the loader can tell libraries
apart.
"""

import pathlib
import re
import subprocess
import sys

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# The first name before a parenthesis is the function's: attributes come after it.
DECLARATION = re.compile(r"^JPP_API\b[^;(]*?(\w+)\s*\(", re.MULTILINE)


def declared(folders: list[str]) -> dict[str, str]:
    """Maps each function to its header, for all public headers."""
    return {
        name: header.name
        for folder in folders
        for header in sorted(pathlib.Path(folder).rglob("*.h"))
        for name in DECLARATION.findall(COMMENT.sub("", header.read_text()))
    }


def exported(library: str) -> dict[str, str]:
    """Maps each dynamic symbol that the library defines to its version."""
    command = ["nm", "--dynamic", "--defined-only", "--format=posix", library]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [line.split()[:2] for line in done.stdout.splitlines()]
    names = [name.partition("@@") for name, kind in rows if kind != "A"]
    return {name: version for name, _, version in names}


def abi_version(folders: list[str]) -> str:
    """Reads version.h: MAJOR.MINOR, from 1.0 on MAJOR."""
    header = next(path for f in folders for path in pathlib.Path(f).rglob("version.h"))
    parts = dict(re.findall(r"#define JPP_VERSION_(MAJOR|MINOR) (\d+)", header.read_text()))
    return parts["MAJOR"] if parts["MAJOR"] != "0" else f"0.{parts['MINOR']}"


def main() -> int:
    """Returns exit status 1 if the two sets differ."""
    functions, symbols = declared(sys.argv[2:]), exported(sys.argv[1])
    found = [f"{name}: exported, but no public header declares it" for name in symbols]
    found = sorted(line for line in found if line.split(":")[0] not in functions)
    found += [
        f"{name}: declared in {header}, but not exported"
        for name, header in functions.items()
        if name not in symbols
    ]
    wanted = f"JAXPP_{abi_version(sys.argv[2:])}"
    found += [
        f"{name}: expected the symbol version {wanted}, found {version or 'none'}"
        for name, version in symbols.items()
        if version != wanted
    ]
    print("\n".join(found) or f"{len(symbols)} functions are exported, all declared")
    return 1 if found or not symbols else 0


if __name__ == "__main__":
    sys.exit(main())
