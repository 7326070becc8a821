"""Runs every check of the project and prints the counts at the end.

`run_tests.py [NAME...]` runs only the named parts, and without names all but `plain`, whose
tests `asan` runs too.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
BIN = pathlib.Path(sys.executable).parent
COUNTS = re.compile(r"(\d+) subtests passed")
FAILURES = re.compile(
    r"^(?: *\d+/\d+ jaxpp:(\S+) .*(?:FAIL|ERROR|TIMEOUT)|not ok \d+ - (\S+)"
    r"|(?:FAILED|ERROR) (tests/.+))",
    re.M,
)
failures: list[str] = []  # names as the parts report them


def run(*command: str | pathlib.Path, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Runs a command in the root, shows its output, returns exit code and output."""
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", **(env or {})}
    process = subprocess.Popen(
        [str(c) for c in command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    assert process.stdout
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        lines.append(line)
    output = "".join(lines)
    failures.extend(name for match in FAILURES.findall(output) for name in match if name)
    return process.wait(), output


def c_tests(name: str, *options: str) -> tuple[int, int]:
    """Builds with these options and runs the C tests; returns the numbers of passed and
    failed."""
    build = ROOT / f"build-{name}"
    setup = ["meson", "setup", build, "-Dpython=false", *options]
    if build.exists():
        setup.append("--reconfigure")
    for command in (setup, ["meson", "compile", "-C", build]):
        code, output = run(*command) if command is setup else _quiet(*command)
        if code:
            print(output[-4000:])
            return 0, 1
    # Some tests mostly wait until a peer's silence is noticed.
    processes = f"--num-processes={(os.cpu_count() or 1) + 1}"
    code, output = run(
        "meson", "test", "-C", build, "--no-rebuild", processes, "--print-errorlogs"
    )
    bad = [int(n) for n in re.findall(r"^(?:Fail|Timeout):\s+(\d+)", output, re.M)]
    ok = re.search(r"^Ok:\s+(\d+)", output, re.M)
    plain = int(ok.group(1)) if ok else 0
    subtests = [int(n) for n in COUNTS.findall(output)]
    passed = sum(subtests) + plain - len(subtests)
    return passed, sum(bad) or int(code != 0)


def sanitized(by: str) -> list[str]:
    """Options of Meson for a build under these sanitizers. It compiles in half the time with
    -Og that it takes with the default -O2, and its tests run as fast."""
    return [f"-Db_sanitize={by}", "-Db_lundef=false", "-Doptimization=g"]


def _quiet(*command: str | pathlib.Path) -> tuple[int, str]:
    done = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def one(*command: str) -> tuple[int, int]:
    code, _ = run(*command)
    return (0, 1) if code else (1, 0)


def tracked(*patterns: str) -> list[str]:
    """Files of the working tree, with or without git."""
    found = [p for pattern in patterns for p in ROOT.rglob(pattern)]
    hidden = ("build", ".")  # .venv, .git, and the folders of interrupted installations
    parts = [p.relative_to(ROOT) for p in found]
    return sorted(str(p) for p in parts if not p.parts[0].startswith(hidden))


def format_check() -> tuple[int, int]:
    return one("clang-format", "--dry-run", "--Werror", *tracked("*.c", "*.h"))


def ruff_check() -> tuple[int, int]:
    folders = ["python", "tests", "examples", "benchmarks", "tools"]
    return one("ruff", "check", *folders)


def mypy() -> tuple[int, int]:
    """Checks the front with mypy's strict rules, and compares the extension with its
    stub."""
    stub = ("mypy.stubtest", "jaxpp._core", "--mypy-config-file", "pyproject.toml")
    results = [one(sys.executable, "-m", "mypy"), one(sys.executable, "-m", *stub)]
    return sum(passed for passed, _ in results), sum(failed for _, failed in results)


def pytest() -> tuple[int, int]:
    workers = str(max(2, os.cpu_count() or 1))
    # A worker runs all tests of a file, so that they share what its fixtures compute.
    options = ("-q", "-W", "ignore", "-n", workers, "--dist", "loadfile")
    code, output = run(sys.executable, "-m", "pytest", *options, "tests/python")
    passed = re.search(r"(\d+) passed", output)
    failed = sum(int(n) for n in re.findall(r"(\d+) (?:failed|error)", output))
    return int(passed.group(1)) if passed else 0, failed or int(code != 0)


PARTS: dict[str, Callable[[], tuple[int, int]]] = {
    "plain": lambda: c_tests("plain"),
    "asan": lambda: c_tests("asan", *sanitized("address,undefined")),
    "tsan": lambda: c_tests("tsan", *sanitized("thread")),
    "installed": lambda: one(sys.executable, "tools/check_installed.py"),
    "fuzz": lambda: one(sys.executable, "tools/fuzz.py"),
    "clang-format": format_check,
    "clang-tidy": lambda: one(sys.executable, "tools/tidy.py"),
    "ruff": ruff_check,
    "mypy": mypy,
    "pytest": pytest,
}


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in PARTS]:
        print(f"no part {unknown[0]!r}; the parts: {' '.join(PARTS)}", file=sys.stderr)
        return 2
    rows = []
    for name in names or [part for part in PARTS if part != "plain"]:
        print(f"--- {name}", flush=True)
        start = time.monotonic()
        passed, failed = PARTS[name]()
        rows.append((name, passed, failed, time.monotonic() - start))
    print("\npart          passed  failed  seconds")
    for name, passed, failed, seconds in rows:
        print(f"{name:13} {passed:6}  {failed:6}  {seconds:7.0f}")
    if failures:
        print("\nfailed:", *dict.fromkeys(failures), sep="\n  ")
    total_failed = sum(row[2] for row in rows)
    print(f"{sum(row[1] for row in rows)} passed, {total_failed} failed")
    return 1 if total_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
