"""Which plugin a step uses, and how its client shares the device's memory with JAX's client."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types

import pytest

from jaxpp.client import plugins

PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.fixture
def installed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty plugin at the path where pip installs that of jax[cuda13]."""
    path = tmp_path / "jax_plugins" / "xla_cuda13" / "xla_cuda_plugin.so"
    path.parent.mkdir(parents=True)
    path.with_name("__init__.py").touch()
    path.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    monkeypatch.delenv("JPP_PLUGIN", raising=False)
    return path


def test_a_plugin_by_the_name_of_its_platform(
    installed: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugins.plugin_path("cuda", "cpu") == str(installed)
    assert plugins.plugin_path(None, "cuda") == str(installed)
    assert plugins.plugin_path("/other.so", "cuda") == "/other.so"
    monkeypatch.setenv("JPP_PLUGIN", "cuda")
    assert plugins.plugin_path(None, "cpu") == str(installed)
    assert plugins.plugin_path("cpu", "cuda").endswith("cpu_plugin.so")


def test_a_device_has_the_plugin_of_its_platform() -> None:
    def device(platform: str, version: str) -> types.SimpleNamespace:
        client = types.SimpleNamespace(platform_version=version)
        return types.SimpleNamespace(platform=platform, client=client)

    named = {("cpu", "cpu"): "cpu", ("gpu", "cuda 13000"): "cuda", ("gpu", "rocm 6"): "rocm"}
    for args, name in named.items():
        assert plugins.platform_of(device(*args)) == name


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({PREALLOCATE: "false"}, {"preallocate": False}),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.4"}, {"memory_fraction": 0.4}),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, {"allocator": "platform"}),
    ],
)
def test_a_gpu_client_is_made_as_the_variables_of_jax_say(
    variables: dict[str, str], expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PREALLOCATE, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = plugins.client_options("/x/xla_cuda_plugin.so", 0)
    assert {name: options[name] for name in expected} == expected


def test_a_cpu_client_has_as_many_devices_as_the_mesh_needs() -> None:
    assert plugins.client_options("/x/cpu_plugin.so", 4) == {"cpu_device_count": 4}
    assert plugins.client_options("/x/cpu_plugin.so", 0) == {}
    alone = plugins.client_options("/x/cpu_plugin.so", 4, alone=True)
    assert alone == {"cpu_device_count": 4, "asynchronous": False}
    assert plugins.client_options("/x/xla_rocm_plugin.so", 0, alone=True) == (
        plugins.client_options("/x/xla_rocm_plugin.so", 0)
    )


@pytest.mark.parametrize(
    "script, environment, expected",
    [
        ("import jaxpp", {}, "false"),
        ("import jax; jax.devices(); import jaxpp", {}, "None"),
        ("import jaxpp", {PREALLOCATE: "true"}, "true"),
    ],
)
def test_importing_the_library_asks_jax_to_leave_memory(
    script: str, environment: dict[str, str], expected: str
) -> None:
    script += f"; import os; print(os.environ.get({PREALLOCATE!r}))"
    inherited = {name: value for name, value in os.environ.items() if name != PREALLOCATE}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected
