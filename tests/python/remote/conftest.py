"""A Ray cluster and a mesh of two workers, shared by the tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import jaxpp.api as jaxpp
from ray_meshes import ENVIRONMENT, await_end, make, processes_of


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        ray = pytest.importorskip("ray")
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=2**27,
            log_to_driver=False,
        )
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def mesh2(ray_cluster: None) -> Iterator[jaxpp.RemoteMpmdMesh]:
    mesh = make(2, 1)
    yield mesh
    mesh.shutdown()
    await_end(processes_of(mesh))
