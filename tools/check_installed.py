"""Uses the C library as other projects do: installed by `make install`, found by
pkg-config.

    check_installed.py

It moves the installation to another folder first, which must not matter. There it builds
both programs of examples/c as C and as C++, and compares their output with the same
training in plain Python. It builds a CMake project with the shared and with the static
library. The installation must not contain code of tests and benchmarks. The exit status
is 1, with a line for each error, if anything is wrong.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile

import lammps_jax_pjrt_cpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples" / "c"
PROGRAMS = {
    "plan_and_run": ["plan_and_run.c", "stablehlo.c"],
    "own_schedule": ["own_schedule.c"],
}
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-Wno-missing-field-initializers"]
LANGUAGES = {
    "c": ["gcc", "-std=c11", *WARNINGS],
    "c++": ["g++", "-std=c++20", "-x", "c++", *WARNINGS],
}
ASK = """
#include <jaxpp/version.h>
#include <string.h>
#if !JPP_CHECK_VERSION(0, 1, 0) || JPP_CHECK_VERSION(999, 0, 0)
#error "the version of the header"
#endif
int main(void) {
  return strcmp(jpp_version(), JPP_VERSION) || jpp_version_number() != JPP_VERSION_NUMBER;
}
"""
# Another project finds the library by pkg-config, by the package config, and as a static one.
CMAKE = """
cmake_minimum_required(VERSION 3.16)
project(ask C)
find_package(PkgConfig REQUIRED)
pkg_check_modules(by_pkg REQUIRED IMPORTED_TARGET jaxpp)
find_package(jaxpp @abi@ REQUIRED)
find_package(jaxpp 999 QUIET CONFIG)
if(jaxpp_FOUND)
  message(FATAL_ERROR "version 999 was found")
endif()
add_executable(by_pkg ask.c)
target_link_libraries(by_pkg PkgConfig::by_pkg)
add_executable(by_config ask.c)
target_link_libraries(by_config jaxpp::jaxpp)
add_executable(by_static ask.c)
target_link_libraries(by_static jaxpp::static)
"""
# The fake device, the fake network and the bare loop, by their files and by what they hold.
ONLY_TESTS = re.compile(rb"jpp_fake_|jpp_client_create_fake|nccl-fake|jpp_bare_|JPP_TEST_")
ONLY_TESTS_NAME = re.compile(r"fake|bare|bench")
STEPS, RATE, MICROBATCHES, WIDTH = 20, 0.125, 4, 8


def call(*command: str | pathlib.Path, **environment: str) -> str:
    """Standard output; a command that fails ends the check with what it said."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout


def install(folder: pathlib.Path) -> pathlib.Path:
    """Installs for another folder and returns the root of the installation."""
    venv = pathlib.Path(sys.executable).parent.parent
    call(
        "make",
        "install",
        f"VENV={venv}",
        "PREFIX=/opt/jaxpp",
        f"DESTDIR={folder}/staged",
        "OPTIONS=-Ddefault_library=both -Dwerror=" + str("CI" in os.environ).lower(),
    )
    moved = folder / "moved"
    (folder / "staged/opt/jaxpp").rename(moved)
    return moved


def losses() -> list[float]:
    """The losses that plan_and_run must print: each element is a separate regression."""
    totals = [0.0] * STEPS
    for column in range(WIDTH):
        rows = [(row * WIDTH + column) % 5 for row in range(MICROBATCHES)]
        first = second = 1.0
        for step in range(STEPS):
            errors = [(first * second * 0.25 * i - 0.5 * i, 0.25 * i) for i in rows]
            totals[step] += sum(error * error for error, _ in errors)
            slope = sum(error * x for error, x in errors)
            first, second = first - RATE * slope * second, second - RATE * slope * first
    return totals


def plan_and_run_complaints(program: pathlib.Path, env: dict[str, str]) -> list[str]:
    """1F1B and a schedule with split backwards compute the same losses and report their
    bubbles."""
    found = []
    plugin = lammps_jax_pjrt_cpu.PLUGIN_PATH
    for schedule, bubble in {"1f1b": "3 of 15", "zb-h1": "1 of 13"}.items():
        text = call(program, EXAMPLES / "regression.jpp", schedule, plugin, **env)
        if f"bubble: {bubble}\n" not in text:
            found.append(f"{schedule}: expected a bubble of {bubble}, found\n{text}")
        if len(re.findall(r"^rank \d: peak [1-9]\d* bytes$", text, re.M)) != 2:
            found.append(f"{schedule}: expected the peaks of 2 ranks, found\n{text}")
        printed = [float(x) for x in re.findall(r"^step \d+: loss (\S+)$", text, re.M)]
        pairs = list(zip(printed, losses(), strict=False))
        if len(printed) != STEPS or any(abs(a - b) > 1e-4 for a, b in pairs):
            found.append(f"{schedule}: expected the losses {losses()}, found {printed}")
    return found


def own_schedule_complaints(program: pathlib.Path, env: dict[str, str]) -> list[str]:
    """The callback's rows equal the built-in 1F1B, and rows that cannot run are refused."""
    text = call(program, "3", "4", **env)
    picture = ["012....aa3bb.cc.dd", ".01..aa2bb3cc.dd..", "..0aa1bb2cc3dd...."]
    rows = re.findall(r"^rank +\d  (\S+)$", text, re.M)
    found = [] if rows == picture else [f"expected the rows {picture}, found\n{text}"]
    refused = subprocess.run(
        [str(program), "0", "4"], env={**os.environ, **env}, capture_output=True, text=True
    )
    if refused.returncode != 1 or "needs at least 1 stage" not in refused.stderr:
        found.append(f"no stage: expected a refusal, found {refused}")
    return found


def other_version_complaints(
    folder: pathlib.Path, root: pathlib.Path, flags: list[str], version: str
) -> list[str]:
    """The loader refuses a program that was linked with another minor version: by the
    file's name, or by its symbols if a file of another version has that name."""
    major, minor, _ = version.split(".")
    abi = f"0.{minor}" if major == "0" else major
    wanted = f"libjaxpp.so.{abi}"
    soname = re.search(r"SONAME.*\[(.*)\]", call("readelf", "-d", root / "lib/libjaxpp.so"))
    if not soname or soname[1] != wanted:
        return [f"expected the soname {wanted}, found {soname and soname[1]}"]
    (folder / "ask.c").write_text(ASK)
    call("gcc", folder / "ask.c", *flags, "-o", folder / "ask")
    call(folder / "ask", LD_LIBRARY_PATH=str(root / "lib"))
    (folder / "other.c").write_text("const char* jpp_version(void) { return 0; }\n")
    (folder / "other.map").write_text("JAXPP_999 { global: jpp_*; };\n")
    found = []
    for name, said in {"libjaxpp.so.999": wanted, wanted: f"`JAXPP_{abi}' not found"}.items():
        other = folder / f"with-{name}"
        other.mkdir()
        options = ["-shared", f"-Wl,-soname,{name},--version-script={folder}/other.map"]
        call("gcc", *options, folder / "other.c", "-o", other / name)
        done = subprocess.run(
            [folder / "ask"],
            env={**os.environ, "LD_LIBRARY_PATH": str(other)},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0 or said not in done.stderr:
            found.append(f"with only {name}: expected the loader to refuse, found {done}")
    return found


def cmake_complaints(
    folder: pathlib.Path, root: pathlib.Path, search: dict[str, str], version: str
) -> list[str]:
    """Programs of a CMake project run; the static one needs no library of this project."""
    place = folder / "cmake"
    place.mkdir()
    (place / "ask.c").write_text(ASK)
    (place / "CMakeLists.txt").write_text(CMAKE.replace("@abi@", version.rpartition(".")[0]))
    call("cmake", "-S", place, "-B", place / "build", f"-DCMAKE_PREFIX_PATH={root}", **search)
    call("cmake", "--build", place / "build")
    found = []
    for name in ("by_pkg", "by_config", "by_static"):
        program = place / "build" / name
        call(program)
        needed = "libjaxpp" in call("readelf", "-d", program)
        if needed == (name == "by_static"):
            found.append(f"CMake, {name}: needs the shared library: {needed}")
    return found


def only_tests_complaints(root: pathlib.Path) -> list[str]:
    """Finds files that only tests and benchmarks use, and files that contain such code."""
    files = [path for path in root.rglob("*") if path.is_file()]
    return [
        f"{path.relative_to(root)} is for tests and benchmarks only"
        for path in files
        if ONLY_TESTS_NAME.search(path.name) or ONLY_TESTS.search(path.read_bytes())
    ]


CHECKS = {"plan_and_run": plan_and_run_complaints, "own_schedule": own_schedule_complaints}


def complaints(folder: pathlib.Path) -> list[str]:
    """Makes an installation in `folder` and returns everything that is wrong with it."""
    root = install(folder)
    env = {"LD_LIBRARY_PATH": str(root / "lib")}
    found = []
    search = {"PKG_CONFIG_PATH": str(root / "lib/pkgconfig")}
    flags = call("pkg-config", "--cflags", "--libs", "jaxpp", **search).split()
    version = call("pkg-config", "--modversion", "jaxpp", **search).strip()
    said = call(root / "bin/jaxpp", "--version").split()
    if said != ["jaxpp", version]:
        found.append(f"expected the command to be jaxpp {version}, found {said}")
    found += only_tests_complaints(root)
    found += other_version_complaints(folder, root, flags, version)
    found += cmake_complaints(folder, root, search, version)
    for language, compiler in LANGUAGES.items():
        for name, sources in PROGRAMS.items():
            program = folder / f"{name}-{language}"
            paths = [EXAMPLES / source for source in sources]
            call(*compiler, *paths, "-x", "none", *flags, "-o", program)
            found += [f"{name} as {language}: {c}" for c in CHECKS[name](program, env)]
    return found


def main() -> int:
    """Returns exit status 1 if anything is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        found = complaints(pathlib.Path(folder))
    print("\n".join(found) or f"{len(PROGRAMS)} programs work as {' and as '.join(LANGUAGES)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
