"""Eight CPU devices for every test; meshes of ranks."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

import pytest  # noqa: E402

from equality import make_mesh  # noqa: E402


@pytest.fixture(scope="session")
def mesh4():
    return make_mesh(4)


@pytest.fixture(scope="session")
def mesh2():
    return make_mesh(2)


@pytest.fixture(scope="session")
def mesh222():
    return make_mesh(2, data=2, model=2)
