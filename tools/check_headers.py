"""Compiles each public header by itself, as C and as C++.

Only the folders of public headers are on the include path, as in an installation.

    check_headers.py INCLUDE GENERATED COMPILER [ARGUMENT ...]

INCLUDE holds the headers of the source tree, GENERATED the headers that a build makes.
"""

import pathlib
import subprocess
import sys

LANGUAGES = {"c": ["-std=c11", "-Wstrict-prototypes"], "c++": ["-std=c++17"]}


def check(header: str, paths: list[str], compiler: list[str]) -> list[str]:
    """The compiler's errors, one text for each language that has any."""
    complaints = []
    for language, flags in LANGUAGES.items():
        done = subprocess.run(
            [*compiler, "-x", language, *flags, "-fsyntax-only", "-Wall", "-Wextra"]
            + ["-pedantic", "-Werror", *(f"-I{path}" for path in paths), "-"],
            input=f'#include "{header}"\nint not_empty;\n',
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode and "cc1plus" not in done.stderr:  # no C++ compiler here
            complaints.append(f"{header} as {language}:\n{done.stderr}")
    return complaints


def main() -> int:
    """Returns exit status 1 if a header does not compile by itself."""
    paths, compiler = sys.argv[1:3], sys.argv[3:]
    headers = sorted(
        str(header.relative_to(path))
        for path in paths
        for header in pathlib.Path(path).rglob("*.h")
    )
    complaints = [c for header in headers for c in check(header, paths, compiler)]
    print("\n".join(complaints) or f"{len(headers)} headers stand alone")
    return 1 if complaints or not headers else 0


if __name__ == "__main__":
    sys.exit(main())
