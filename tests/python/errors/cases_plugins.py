"""Plugins and devices."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

from cases import TWO, case, train
from jaxpp import _core
from jaxpp.client import devices, plugins

# --- Plugins and devices ----------------------------------------------------------------

PLUGINS = pathlib.Path(os.environ.get("TMPDIR", "/tmp")) / f"jaxpp-test-plugins-{os.getpid()}"

OLD_PLUGIN = """
#include <stddef.h>
static const struct {
  size_t size; void *extension;
  size_t version_size; void *version_extension; int major, minor;
} kApi = {sizeof(kApi), 0, sizeof(kApi) - 16, 0, %d, %d};
const void *GetPjrtApi(void) { return &kApi; }
"""


def built_plugin(major: int, minor: int) -> str:
    source = PLUGINS / f"api_{major}_{minor}.c"
    source.write_text(OLD_PLUGIN % (major, minor))
    library = source.with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def text_file() -> str:
    path = PLUGINS / "notes.so"
    path.write_text("not a library")
    return str(path)


def libm() -> str:
    found = [line.split()[-1] for line in open("/proc/self/maps") if "/libm.so" in line]
    return os.path.realpath(found[0]) if found else "libm.so.6"


def with_environment(run: Callable[[], Any], **variables: Callable[[], str]) -> Any:
    def run_so() -> Any:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update({name: value() for name, value in variables.items()})
        try:
            return run()
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value

    return run_so


def with_plugin(path: Callable[[], str]) -> Callable[[], Any]:
    return with_environment(lambda: train(TWO), JPP_PLUGIN=path)


case(
    "A plugin that is missing",
    "plugin",
    with_plugin(lambda: "/no/such/plugin.so"),
    "plugin /no/such/plugin.so: no such file",
)
case(
    "A plugin by argument that is missing",
    "plugin",
    lambda: train(TWO, plugin="/nowhere.so"),
    "plugin /nowhere.so: no such file",
)
case(
    "A plugin by name that is not installed",
    "plugin",
    lambda: train(TWO, plugin="rocm"),
    "no PJRT plugin for 'rocm': expected the path of a plugin, or one installed for JAX",
)
case(
    "GPU memory preallocated twice",
    "devices",
    with_environment(
        lambda: plugins.client_options("/opt/xla_cuda_plugin.so", 0),
        XLA_PYTHON_CLIENT_PREALLOCATE=lambda: "true",
    ),
    "XLA_PYTHON_CLIENT_PREALLOCATE=true: JAX's own client preallocates 75% of each device's "
    "memory",
    "set XLA_PYTHON_CLIENT_PREALLOCATE=false",
)
case(
    "A plugin that is a number",
    "invalid-argument",
    lambda: train(TWO, plugin=3),
    "plugin=3; expected the path of a PJRT plugin",
)
case(
    "A plugin with a NUL in its name",
    "invalid-argument",
    lambda: train(TWO, plugin="/a\0b"),
    "expected the path of a PJRT plugin",
)
case(
    "A plugin whose name is not UTF-8",
    "plugin",
    with_plugin(lambda: os.fsdecode(b"/no/such/\xff.so")),
    r"plugin /no/such/\xff.so: no such file",
)
case("A plugin that is a text file", "plugin", with_plugin(text_file), "not a loadable library")
case(
    "A plugin that is a folder",
    "plugin",
    with_plugin(lambda: str(PLUGINS)),
    "not a loadable library",
)
case("A library that is not a plugin", "plugin", with_plugin(libm), "exports no GetPjrtApi")
case(
    "A plugin that is too old",
    "plugin",
    with_plugin(lambda: built_plugin(0, 40)),
    "expected PJRT API 0.57 or a later 0.x, found 0.40",
)
case(
    "A plugin of another major version",
    "plugin",
    with_plugin(lambda: built_plugin(1, 0)),
    "expected PJRT API 0.57 or a later 0.x, found 1.0",
)


def too_few_devices() -> None:
    plugin = plugins.plugin_path("cpu", "cpu")
    client = _core.Client(plugin, {"cpu_device_count": 2})
    devices.LocalDevices(client, [[0], [1], [2], [3]], None)


case(
    "Not enough devices",
    "devices",
    too_few_devices,
    "not enough devices: the mesh expects the devices [0, 1, 2, 3]",
    "found 2 in the plugin (cpu), without [2, 3]",
)
