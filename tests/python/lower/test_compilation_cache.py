"""Compiled tasks on disk: another process loads them, and never a damaged or a wrong one."""

import os
import pathlib
import shutil
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpp.api as jaxpp
from equality import mesh_of

STEP = textwrap.dedent("""
    import jax, jax.numpy as jnp
    jax.config.update("jax_num_cpu_devices", 2)
    import jaxpp.api as jaxpp

    mesh = jaxpp.MpmdMesh(jax.make_mesh((2,), ("stage",)), "stage")

    def step(ws, xs):
        def loss(ws, x):
            for w in ws:
                x = jaxpp.mark_stage_end(jnp.tanh(x @ w))
            return (x ** 2).mean()
        grad = lambda x: jax.value_and_grad(loss)(ws, x)
        loss, grads = jaxpp.treduce(grad, xs, jaxpp.Std1F1B(2), operation=jaxpp.Add)
        return jax.tree.map(lambda w, g: w - g, ws, grads), loss

    ws = [jnp.eye(8), jnp.eye(8)]
    trained = jaxpp.mpmd_jit_with_loop(step, mesh)
    ws, loss = trained(ws, jnp.ones((4, 2, 8)))
    print(float(loss), [float(jnp.asarray(w).sum()) for w in ws])
""")


# JAX's default minimum, which conftest.py overrides.
JAX_KEEPS = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1"}


def _run(folder, script=STEP, **environment):
    return _done(folder, script, **environment).stdout


def _done(folder, script, **environment):
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(folder),
            **JAX_KEEPS,
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def _files(folder):
    """JaxPP's files by name, with their inodes, which change when a file is rewritten."""
    return {p.name: p.stat().st_ino for p in pathlib.Path(folder).glob("jaxpp-*")}


def test_another_process_loads_what_the_first_compiled(tmp_path):
    first = _run(tmp_path)
    found = _files(tmp_path)
    assert len(found) >= 4  # two forward and two backward tasks
    assert _run(tmp_path) == first
    assert _files(tmp_path) == found


def test_a_line_added_above_the_step_changes_nothing(tmp_path):
    first = _run(tmp_path)
    found = _files(tmp_path)
    assert _run(tmp_path, "# one more line\n" + STEP) == first
    assert _files(tmp_path) == found


def _on_pairs(ranks):
    """The step with a stage on each of so many ranks of two devices."""
    script = STEP.replace('devices", 2', f'devices", {2 * ranks}')
    script = script.replace(
        'make_mesh((2,), ("stage",))', f'make_mesh(({ranks}, 2), ("stage", "data"))'
    )
    script = script.replace("B(2)", f"B({ranks})")
    return script.replace("[jnp.eye(8), jnp.eye(8)]", f"[jnp.eye(8)] * {ranks}")


def test_ranks_of_several_devices_share_what_is_compiled(tmp_path):
    """The stages between the first and the last are equal. Their ranks load the same files, or
    copy what the first of them compiled."""
    found = {}
    for ranks in (4, 6):
        folder = tmp_path / str(ranks)
        printed = [_run(folder, _on_pairs(ranks)) for _ in range(2)]
        printed.append(_run("", _on_pairs(ranks)))
        assert len(set(printed)) == 1
        found[ranks] = len(_files(folder))
    assert found[6] == found[4] > 0


def test_other_compiler_options_are_other_files(tmp_path):
    _run(tmp_path)
    found = _files(tmp_path)
    options = "compiler_options={'xla_backend_optimization_level': 1}"
    _run(tmp_path, STEP.replace("(step, mesh)", f"(step, mesh, {options})"))
    assert len(_files(tmp_path)) == 2 * len(found)


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "made" / "when needed"))
    yield tmp_path / "made" / "when needed"
    jax.config.update("jax_compilation_cache_dir", before)


XS = np.arange(8, dtype=np.float32).reshape(4, 2)


def _run_here(mesh, between, times=2):
    def step(xs):
        def one(x):
            return jaxpp.mark_stage_end(times * between(jaxpp.mark_stage_end(jnp.sin(x))))

        return jaxpp.treduce(one, xs, jaxpp.GPipe(2), operation=jaxpp.Add)

    return np.asarray(jaxpp.mpmd_jit_with_loop(step, mpmd_mesh=mesh)(XS))


def _double(mesh, between=lambda x: x, times=2):
    ours = _run_here(mesh, between, times)
    np.testing.assert_allclose(ours, times * np.sin(XS).sum(0), rtol=1e-6)


def test_a_damaged_file_is_compiled_again(mesh2, cache):
    _double(mesh2)
    names = set(_files(cache))
    for name in names:
        (cache / name).write_bytes(b"JPPCODE3 and then nothing of use")
    _double(mesh2)
    assert set(_files(cache)) == names
    assert all((cache / name).stat().st_size > 1000 for name in names)


def test_a_file_copied_over_another_is_compiled_again(mesh2, cache):
    """The copied file is valid, but belongs to another task."""
    _double(mesh2, times=2)
    of_two = set(_files(cache))
    _double(mesh2, times=3)
    (three,) = set(_files(cache)) - of_two
    shutil.rmtree(cache)
    _double(mesh2, times=3)
    (two,) = of_two - set(_files(cache))
    _double(mesh2, times=2)
    shutil.copyfile(cache / two, cache / three)
    _double(mesh2, times=3)
    assert (cache / three).read_bytes() != (cache / two).read_bytes()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)])
def test_what_is_no_regular_file_is_not_read(mesh2, cache, make):
    _double(mesh2)
    for name in _files(cache):
        (cache / name).unlink()
        make(cache / name)
    _double(mesh2)


FULL = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
"""


def test_a_full_disk_is_one_warning(tmp_path):
    """A limit of 1000 bytes per file stands in for a full disk."""
    cache, dump = tmp_path / "cache", tmp_path / "dump"
    warn = "import warnings; warnings.simplefilter('always')\n"
    done = _done(cache, FULL + warn + STEP, JPP_DUMP=str(dump))
    assert done.stdout == _run(tmp_path / "other")
    warned = [line for line in done.stderr.splitlines() if "UserWarning: " in line]
    assert len(warned) == 2, done.stderr
    assert "cannot write compiled tasks" in warned[0]
    assert "JPP_DUMP" in warned[1] and "File too large" in warned[1]
    assert not _files(cache)  # no partial file is left either


def test_a_task_with_a_callback_is_not_kept(mesh2, cache):
    """Its code contains an address that is valid only in this process."""
    seen = []

    def between(x):
        jax.debug.callback(lambda x: seen.append(x), x)
        return x

    _double(mesh2)
    plain = set(_files(cache))
    _double(mesh2, between)
    assert len(seen) == 4
    assert set(_files(cache)) == plain


@pytest.mark.parametrize("fed", [True, False])
def test_a_task_whose_collectives_have_no_order_is_not_kept(cache, fed):
    """The devices would run a loaded task's collectives inside and outside the loop in
    different orders. If the loop takes the result of the one outside, the order is fixed."""
    mesh = mesh_of(2, {"data": 2})

    def sums(x):
        total = jax.lax.psum(jnp.cos(x), "data")

        def body(c, _):
            return jnp.tanh(jax.lax.psum(jnp.sin(c), "data") + x), None

        return jax.lax.scan(body, x + total if fed else x, None, length=3)[0] * total

    spec = jax.P("data")
    mapped = jax.shard_map(sums, mesh=mesh.lowering_mesh(), in_specs=spec, out_specs=spec)
    expected = sum(2 * np.asarray(mapped(jnp.sin(x))) for x in XS)
    for _ in range(2):
        np.testing.assert_allclose(_run_here(mesh, mapped), expected, rtol=1e-5)
        assert len(_files(cache)) == 1 + fed  # the task before it, and it


def test_switched_off(mesh2, cache):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        _double(mesh2)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not cache.exists()


def test_a_folder_that_can_not_be_made_is_only_a_warning(mesh2, cache, caplog):
    cache.parent.write_text("a file stands in the way")
    _double(mesh2)
    assert "the cache is disabled" in caplog.text


# Also trains with longer sequences, whose tasks go to another folder.
LONGER = STEP + textwrap.dedent("""
    import os
    jax.config.update("jax_compilation_cache_dir", os.environ["OTHER_FOLDER"])
    ws, loss = trained(ws, jnp.ones((4, 6, 8)))
    print(float(loss))
""")


def test_other_shapes_share_the_tasks_that_they_do_not_change(tmp_path):
    """The zeros before the loop and the update after it are compiled once."""
    first, other = tmp_path / "first", tmp_path / "other"
    _run(first, LONGER, OTHER_FOLDER=str(other))
    assert 0 < len(_files(other)) < len(_files(first))
    assert not _files(other).keys() & _files(first).keys()
