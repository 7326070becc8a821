"""The package's folders are layers: no module imports from a higher layer."""

import ast
import graphlib
import pathlib

import jaxpp.api

ROOT = pathlib.Path(jaxpp.api.__file__).parent
FOLDERS = ["trace", "plan", "lower", "client", "run", "remote"]
# Modules outside the folders: those that all folders use, and those that users call.
FIRST = {
    "array",
    "devices",
    "errors",
    "garbage",
    "job",
    "mesh",
    "operations",
    "placements",
    "progress",
    "schedules",
}
INTERNALS = "jax_internals"
LAST = {
    "__init__",
    "api",
    "arrayref",
    "by_yield",
    "core",
    "distributed_utils",
    "orbax",
    "pipelining",
    "step",
    "training",
    "types",
}


def place(module: str) -> int:
    """The number of the layer of "jaxpp.folder.name" or "jaxpp.name"."""
    _, head, *_ = module.split(".")
    if head in (INTERNALS, "_core"):  # below all other layers
        return -1
    return FOLDERS.index(head) + 1 if head in FOLDERS else (len(FOLDERS) + 1) * (head in LAST)


def imports(path: pathlib.Path) -> set[str]:
    """The names that a module imports from the package, including under TYPE_CHECKING."""
    found = set()
    top = ast.parse(path.read_text()).body
    guarded = [node for test in top if isinstance(test, ast.If) for node in test.body]
    for node in [*top, *guarded]:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name for name in found if name.startswith("jaxpp.")}


def modules() -> dict[str, pathlib.Path]:
    folders = [INTERNALS, *FOLDERS]
    paths = [*ROOT.glob("*.py"), *(p for f in folders for p in (ROOT / f).glob("*.py"))]
    return {".".join(("jaxpp", *p.relative_to(ROOT).with_suffix("").parts)): p for p in paths}


def test_every_module_has_its_place():
    flat = {name.split(".")[1] for name in modules() if name.count(".") == 1}
    assert flat == FIRST | LAST
    assert len(modules()) > len(flat) + 15


def test_no_module_imports_a_later_one():
    wrong = [
        f"{name} imports {used}"
        for name, path in modules().items()
        for used in imports(path)
        if place(used) > place(name)
    ]
    assert not wrong


def test_no_modules_import_each_other():
    names = modules()
    graph = {
        name: {used for one in imports(path) for used in (one, one.rpartition(".")[0])}
        & {*names}
        for name, path in names.items()
    }
    try:
        order = [*graphlib.TopologicalSorter(graph).static_order()]
    except graphlib.CycleError as error:
        raise AssertionError(f"a circle of imports: {error.args[1]}") from None
    assert len(order) == len(names)


def test_jax_internals_are_used_in_one_folder_alone():
    inside = [
        name
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom | ast.Import)
        for used in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
        if used.startswith(("jax._src", "jaxlib"))
    ]
    assert inside and {name.split(".")[1] for name in inside} == {INTERNALS}
