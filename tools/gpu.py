"""Runs the demo, a selection of the tests and the benchmarks with JAX's CUDA plugin; says
so if there is no plugin or no GPU. Ranks share the available GPUs.

`gpu.py [NAME...]` runs only the named parts.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Tests that ask for meshes by number of ranks; a test that needs more devices is skipped.
TESTS = (
    "step/test_step.py",
    "trace/test_marks_and_loops.py",
    "run/test_dumps.py",
    "run/test_threads.py",
    "plan/test_schedules.py",
    "plan/test_carried.py",
    "plan/test_masks.py",
    "plan/test_memory.py",
    "plan/test_packed.py",
    "training/test_training.py",
    "training/test_dtypes.py",
    "training/test_memories.py",
    "training/test_offload.py",
    "trace/test_operations.py",
    "trace/test_stacked.py",
    "trace/test_cross.py",
    "trace/test_guarded.py",
    "trace/test_outside.py",
    "trace/test_recomputation.py",
    "trace/test_refs.py",
    "trace/test_rows.py",
    "trace/test_scans.py",
    "run/test_numbers.py",
    "arrays/test_array.py",
    "arrays/test_array_jax.py",
    "plan/test_auto.py",
    "lower/test_callbacks.py",
    "client/test_lending.py",
    "step/test_like_jit.py",
    "step/test_by_yield.py",
    "step/test_generate.py",
    "libraries/test_optax.py",
)

# These tests are for CPU plugins.
LEFT_OUT = (
    "tests/python/lower/test_callbacks.py::test_a_plugin_without_callbacks_says_so",
    "tests/python/client/test_lending.py::test_a_small_array_is_copied_once",
)

# Losses are compared with plain JAX's, so both must multiply with the same precision.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cuda,cpu",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}

# Some tests compile a task twice and compare bits. XLA must then choose its kernels without
# timing them, because other kernels round differently.
TEST_ENVIRONMENT = {
    "TEST_SHARING": "64",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0",
}


def devices_found() -> str:
    """Describes JAX's GPUs, or the reason why there are none."""
    script = "import jax; print(*jax.devices('cuda'), sep=', ')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
    )
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return ("" if done.returncode == 0 else "none: ") + (lines[-1] if lines else "no answer")


def commands() -> dict[str, tuple[str, ...]]:
    workers = str(max(2, min(8, (os.cpu_count() or 2) // 2)))
    tests = [f"tests/python/{name}" for name in TESTS]
    left_out = [f"--deselect={name}" for name in LEFT_OUT]
    pytest = ("-m", "pytest", "-q", "-W", "ignore")
    return {
        "demo": ("examples/demo.py",),
        "tests": (*pytest, "-n", workers, *left_out, *tests),
        "gpt2": ("benchmarks/gpu.py",),
        "steps": ("benchmarks/steps.py", "--turns", "10"),
    }


def main(names: list[str]) -> int:
    parts = commands()
    if unknown := [name for name in names if name not in parts]:
        print(f"no part {unknown[0]!r}; the parts: {' '.join(parts)}", file=sys.stderr)
        return 2
    found = devices_found()
    print(f"GPUs: {found}", flush=True)
    if found.startswith("none"):
        print("nothing was run: make gpu needs an NVIDIA GPU and pip install 'jax[cuda13]'")
        return 0
    rows = []
    for name in names or parts:
        print(f"--- {name}", flush=True)
        start = time.monotonic()
        more = TEST_ENVIRONMENT if name == "tests" else {}
        environment = {**os.environ, **ENVIRONMENT, **more}
        command = [sys.executable, *parts[name]]
        code = subprocess.run(command, cwd=ROOT, env=environment).returncode
        rows.append((name, code, time.monotonic() - start))
    for name, code, seconds in rows:
        print(f"{name:12} {'ok' if code == 0 else f'exit status {code}':16} {seconds:6.0f} s")
    return int(any(code for _, code, _ in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
