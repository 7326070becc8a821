"""Sets up eight CPU devices for every test, and fixtures for meshes and the command."""

import collections
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# A shell starts background jobs with SIGINT ignored, and Python and its child processes inherit
# that. Tests send SIGINT, so it must interrupt however the run was started.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests, workers and subprocesses share what they compile, which halves the time of a run. The
# process that starts the workers creates the folder and removes it.
_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="jaxpp-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)

import pytest  # noqa: E402

from equality import make_mesh  # noqa: E402
from locations import ROOT, jaxpp_command  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "soak(on): takes long; only `make soak` runs it, or runs it on that mesh"
    )
    config.addinivalue_line(
        "markers", "sample(n): `make test` runs only n of its cases, always the same ones"
    )
    config.addinivalue_line(
        "markers", "own_devices: each rank has devices of its own, whatever TEST_SHARING says"
    )


def _is_long(item):
    mark = item.get_closest_marker("soak")
    return mark is not None and all(mesh in item.name for mesh in mark.args)


def _without_mesh(item):
    """The item's id without the parameter of `any_mesh1`, `any_mesh2` or `any_mesh4`."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    mesh = next((params[name] for name in params if name.startswith("any_mesh")), "")
    return item.nodeid.replace(mesh, "")


def _without_parameters(item):
    return item.nodeid.partition("[")[0]


def _choose(items, key, count):
    """Yields `count(item)` of the items with an equal key, or all if that is None. The CRC of
    an item's name decides, so that the choice is the same in each run but has no pattern."""
    groups = collections.defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    for group in groups.values():
        group.sort(key=lambda item: zlib.crc32(item.name.encode()))
        yield from group[: count(group[0])]


def _sample_size(item):
    mark = item.get_closest_marker("sample")
    return mark.args[0] if mark else None


def pytest_collection_modifyitems(config, items):
    """Deselects what only `make soak` runs, which sets TEST_AXES: tests marked `soak`, cases
    beyond a `sample`, and all but one mesh of a case that runs on several."""
    if "TEST_AXES" in os.environ:
        return
    short = [item for item in items if not _is_long(item)]
    on_one_mesh = _choose(short, _without_mesh, lambda _: 1)
    chosen = set(_choose(on_one_mesh, _without_parameters, _sample_size))
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    alone = item.get_closest_marker("own_devices") is not None
    sharing = os.environ.pop("TEST_SHARING", None) if alone else None
    try:
        return (yield)
    finally:
        if sharing is not None:
            os.environ["TEST_SHARING"] = sharing


def pytest_unconfigure():
    if _CACHE:
        _CACHE.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Makes captured output valid UTF-8, because workers send it to the main process."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode())
        for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session")
def mesh4():
    return make_mesh(4)


@pytest.fixture(scope="session")
def mesh2():
    return make_mesh(2)


# Tests that train end to end run on ranks of one or of two devices, each case on one of them.
# `make soak`, which sets TEST_AXES, runs each on both, and on ranks of four. To save time,
# `make test` covers ranks of four only with the random models, test_context_mesh.py and
# test_sharded.py.
_AXES = {"1-device": {}, "2-devices": {"data": 2}}
if "TEST_AXES" in os.environ:
    _AXES["4-devices"] = {"data": 2, "model": 2}


def _meshes(ranks: int, request: pytest.FixtureRequest):
    return make_mesh(ranks, **_AXES[request.param])


@pytest.fixture(scope="session", params=["1-device", "2-devices"])
def any_mesh4(request):
    return _meshes(4, request)


@pytest.fixture(scope="session", params=list(_AXES))
def any_mesh2(request):
    return _meshes(2, request)


@pytest.fixture(scope="session", params=list(_AXES))
def any_mesh1(request):
    return _meshes(1, request)


@pytest.fixture(scope="session")
def mesh222():
    return make_mesh(2, data=2, model=2)


@pytest.fixture(scope="session")
def after_plain_step() -> Any:
    """Weights and loss after one step of plain JAX on `mistakes.params()`."""
    import mistakes

    return mistakes.plain_training_step(mistakes.params(), mistakes.batch())


@pytest.fixture(scope="session")
def command() -> str:
    return jaxpp_command()


@pytest.fixture(scope="session")
def nodes_plugin(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plugin whose clients act as nodes; its devices are stubs that run nothing."""
    find = [sys.executable, str(ROOT / "tools/find_headers.py"), "pjrt"]
    include = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    library = tmp_path_factory.mktemp("plugin") / "nodes_plugin.so"
    source = ROOT / "tests/c/device/nodes_plugin.c"
    build = ["cc", "-shared", "-fPIC", "-isystem", include, "-o", str(library), str(source)]
    subprocess.run(build, check=True)
    return str(library)
