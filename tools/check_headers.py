"""Compiles each public header by itself, as C and as C++.

Only include/ is on the path: that is all that an installation has.

    check_headers.py ROOT COMPILER [ARGUMENT ...]
"""

import pathlib
import subprocess
import sys

LANGUAGES = {"c": ["-std=gnu17", "-Wstrict-prototypes"], "c++": ["-std=c++17"]}


def check(header: pathlib.Path, include: pathlib.Path, compiler: list[str]) -> list[str]:
    """The complaints of the compiler, one text for each language that has any."""
    complaints = []
    for language, flags in LANGUAGES.items():
        done = subprocess.run(
            [*compiler, "-x", language, *flags, "-fsyntax-only", "-Wall", "-Wextra"]
            + ["-Werror", "-I", str(include), "-"],
            input=f'#include "{header.relative_to(include)}"\n',
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and "cc1plus" not in done.stderr:  # no C++ compiler here
            complaints.append(f"{header.name} as {language}:\n{done.stderr}")
    return complaints


def main() -> int:
    """Exit status 1 when a header does not stand alone."""
    include = pathlib.Path(sys.argv[1]) / "include"
    headers = sorted(include.rglob("*.h"))
    complaints = [c for header in headers for c in check(header, include, sys.argv[2:])]
    print("\n".join(complaints) or f"{len(headers)} headers stand alone")
    return 1 if complaints or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
