"""Runs the fuzz targets of tests/fuzz: briefly with a fixed seed, or for longer.

`fuzz.py [--seconds N] [TARGET...]`. Without --seconds each target makes a fixed number of
runs, the same ones every time. With it, a target keeps its corpus in build-fuzz/corpus,
where the next run continues. Inputs that crash a target are kept in build-fuzz/crashes.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build-fuzz"
BIN = pathlib.Path(sys.executable).parent

# A target's first inputs, and a number of runs that takes a few seconds.
GOLDEN = "tests/golden"
TARGETS: dict[str, tuple[list[str], int]] = {
    "graph": ([f"{GOLDEN}/graphs/*.jpp"], 10000),
    "csv": ([f"{GOLDEN}/schedule/csv/*"], 10000),
    "costs": (["docs/schedules/*.txt", f"{GOLDEN}/runtime/*.json"], 10000),
    "drift": ([f"{GOLDEN}/runtime/*.json"], 10000),
    "planfile": ([], 5000),  # makes its first input itself
    "transport": ([], 10000),
}


def build() -> None:
    """Exits, after the output, if clang or its runtime is missing."""
    environment = {**os.environ, "CC": "clang", "PATH": f"{BIN}:{os.environ['PATH']}"}
    setup = ["meson", "setup", str(BUILD), "-Dpython=false", "-Dtests=false", "-Dfuzz=true"]
    setup += [
        "-Db_sanitize=address,undefined",
        "-Db_lundef=false",
        "-Doptimization=1",
    ]
    if BUILD.exists():
        setup.append("--reconfigure")
    for command in (setup, ["meson", "compile", "-C", str(BUILD)]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            print(done.stdout[-4000:], done.stderr[-4000:])
            sys.exit("fuzz: could not be built; needs clang and libclang-rt-dev")


def copy_seeds(target: str, folder: pathlib.Path) -> None:
    for pattern in TARGETS[target][0]:
        for path in ROOT.glob(pattern):
            shutil.copy(path, folder / path.name)


def run(target: str, seconds: int | None) -> bool:
    crashes, corpus = BUILD / "crashes", BUILD / "corpus" / target
    crashes.mkdir(exist_ok=True)
    corpus.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        seeds, learned = pathlib.Path(temporary) / "seeds", pathlib.Path(temporary) / "new"
        seeds.mkdir()
        learned.mkdir()
        copy_seeds(target, seeds)
        limits = [f"-runs={TARGETS[target][1]}", "-seed=1"]
        if seconds is not None:
            limits, learned = [f"-max_total_time={seconds}"], corpus
        flags = ["-timeout=20", "-rss_limit_mb=2048", "-print_final_stats=1", "-verbosity=0"]
        flags.append(f"-artifact_prefix={crashes}/{target}-")
        program = BUILD / "tests" / "fuzz" / f"fuzz_{target}"
        command = [str(program), *limits, *flags, str(learned), str(seeds)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        print(done.stderr[-8000:])
    count = [line.split()[-1] for line in done.stderr.splitlines() if "executed_units" in line]
    outcome = "FAILED" if done.returncode else "ok"
    print(f"fuzz {target}: {outcome}, {count[0] if count else '?'} runs", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--seconds", type=int, help="each target, instead of a few runs")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - TARGETS.keys()
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}")
    build()
    outcomes = [run(t, arguments.seconds) for t in arguments.targets or TARGETS]
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
