"""Meshes on Ray that cannot be made: wrong arguments, and workers that fail to start."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import jaxpp.api as jaxpp
from jaxpp.remote import cluster
from jaxpp.remote.connections import Connection, connect
from ray_meshes import LIMIT, batch, make, text_of, two_stages, weights

pytest.importorskip("ray")

MESHES: dict[str, tuple[Callable[[], Any], str]] = {
    "no rank": (lambda: make(0, 1), "mesh: RemoteMpmdMesh: pp=0; expected a number of ranks"),
    "no number of ranks": (lambda: make(True, 1), "mesh: RemoteMpmdMesh: pp=True; expected"),
    "no sizes": (
        lambda: jaxpp.RemoteMpmdMesh(2, (0,), ("data",)),
        "mesh: RemoteMpmdMesh: mesh_shape=(0,); expected the axis sizes of one rank's mesh",
    ),
    "names and sizes": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1, 2), ("data",)),
        "mesh: RemoteMpmdMesh: mesh_axis_names=('data',) for mesh_shape=(1, 2); expected",
    ),
    "a name twice": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1, 2), ("data", "data")),
        "mesh: RemoteMpmdMesh: mesh_axis_names=('data', 'data') for",
    ),
    "the pipeline's name": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1,), ("mpmd",)),
        "mesh: RemoteMpmdMesh: mesh_axis_names=('mpmd',): 'mpmd' is reserved",
    ),
    "modules": (
        lambda: make(2, 1, import_modules="numpy"),
        "invalid-argument: RemoteMpmdMesh: import_modules='numpy'; expected a list",
    ),
    "options": (
        lambda: make(2, 1, ray_options=[1]),
        "invalid-argument: RemoteMpmdMesh: ray_options=[1]; expected a dict",
    ),
    "environment": (
        lambda: jaxpp.RemoteMpmdMesh(2, (1,), ("data",), _env={"A": 1}),
        "invalid-argument: RemoteMpmdMesh: _env={'A': 1}; expected a dict",
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_refused_before_ray_is_asked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "Cluster", None)
    mesh, expected = MESHES[name]
    assert text_of(mesh).startswith(expected)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    told = text_of(lambda: make(2, 1))
    assert told == (
        'unsupported: RemoteMpmdMesh: Ray is not installed; pip install "jaxpp-c[ray]"'
    )


def test_jaxpp_does_not_import_ray() -> None:
    code = "import sys, jaxpp; assert jaxpp.RemoteMpmdMesh and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=LIMIT)


def test_a_cluster_without_the_resources(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = text_of(lambda: make(2, 1, ray_options={"num_gpus": 1}))
    assert told.startswith(
        "devices: RemoteMpmdMesh: expected a Ray cluster with resources for 2 workers of "
        "{'CPU': 1.0, 'GPU': 1.0} each, found resources for 0 (nodes: {'CPU': 8.0, 'GPU': 0})"
    )
    monkeypatch.setattr(cluster, "_PLACE_SECONDS", 1)
    mesh = make(1, 1, ray_options={"num_cpus": 5})
    told = text_of(lambda: make(1, 1, ray_options={"num_cpus": 8}))
    assert "within 1 s because other processes use them; free: {'CPU': " in told
    mesh.shutdown()


def test_a_module_that_a_worker_does_not_have(ray_cluster: None) -> None:
    told = text_of(lambda: make(1, 1, import_modules=["json", "no_such_module"]))
    assert told == (
        "invalid-argument: RemoteMpmdMesh: the worker of rank 0: import_modules: "
        "no_such_module: ModuleNotFoundError: No module named 'no_such_module'"
    )


def test_a_worker_that_raises_as_it_imports(ray_cluster: None, tmp_path: pathlib.Path) -> None:
    (tmp_path / "raising_module.py").write_text("raise ValueError('of the user')\n")
    options = {
        "import_modules": ["raising_module"],
        "_env": {"PYTHONPATH": path_with(tmp_path)},
    }
    told = text_of(lambda: make(1, 1, **options))
    assert told.endswith("import_modules: raising_module: ValueError: of the user")


def path_with(folder: pathlib.Path) -> str:
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_a_worker_with_another_version(ray_cluster: None, tmp_path: pathlib.Path) -> None:
    package = pathlib.Path(jaxpp.__file__).parent
    (tmp_path / "jaxpp").mkdir()
    for entry in package.iterdir():
        if entry.name not in ("__init__.py", "__pycache__"):
            (tmp_path / "jaxpp" / entry.name).symlink_to(entry)
    changed = (package / "__init__.py").read_text() + "\n__version__ = '0.0.1'\n"
    (tmp_path / "jaxpp" / "__init__.py").write_text(changed)
    told = text_of(lambda: make(1, 1, _env={"PYTHONPATH": path_with(tmp_path)}))
    assert "the worker of rank 0 (host " in told
    assert " has jaxpp 0.0.1; expected " in told


def test_a_worker_that_can_not_be_reached(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(host: str, port: int, token: bytes) -> Connection:
        return connect(host, port, token[:-1])

    monkeypatch.setattr(cluster, "connect", refused)
    told = text_of(lambda: make(1, 1))
    assert told.startswith(
        "peer: RemoteMpmdMesh: the controller cannot connect to rank 0 (host "
    )
    assert "the listener does not know the token" in told


def test_a_worker_whose_plugin_is_missing(mesh2: jaxpp.RemoteMpmdMesh) -> None:
    step = jaxpp.mpmd_jit_with_loop(two_stages(mesh2)._fun, mesh2, plugin="/no/plugin.so")
    told = text_of(lambda: step(weights(), batch()))
    assert told.startswith("plugin: rank 0 (host ")
    assert "/no/plugin.so" in told
