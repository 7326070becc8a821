"""Checks what a compiler does not: who may include whom, and who may call what.

    check_layers.py ROOT

Prints a line for each offence, FILE:LINE first, and exits with status 1 if there is any.
"""

import pathlib
import re
import sys

# The way of the data: each layer may include those before it.
ORDER = ["base", "task", "schedule", "graph", "partition", "program", "check", "plan", "advise"]
PLANNER = [*ORDER, "simulate", "search", "predict"]


def before(layer: str) -> list[str]:
    return ORDER[: ORDER.index(layer)]


# What each layer may include besides itself. A layer is a folder of src/ and the public
# headers that are named like it.
ALLOWED = {
    **{layer: before(layer) for layer in ORDER},
    # Beside the way: a schedule's time, and a better one.
    "simulate": ["base", "task", "schedule"],
    "search": ["base", "task", "schedule", "simulate"],
    # When a plan's tasks run.
    "predict": before("check"),
    "plan": [*before("plan"), "search"],
    "advise": [*before("advise"), "simulate", "search"],
    "device": ["base"],
    "array": ["base", "device"],
    "transport": ["base"],
    "job": ["base"],
    "flight": ["base"],
    "runtime": [*before("plan"), "device", "array", "transport", "job", "flight"],
    # A plan that travels, and the step that it becomes.
    "planfile": [*before("plan"), "plan", "device", "array", "runtime"],
    # Steps in JAX's profiles.
    "profile": [*before("plan"), "device", "array", "runtime"],
    # Read by none but those outside.
    "view": [*PLANNER, "device", "array", "transport", "runtime"],
}
# Who stands outside sees the public headers and its own folder, as anybody's program does.
OUTSIDE = ["cli", "python", "examples"]
# jansson is no part of the public headers, and the command prints JSON.
EXCEPTIONS = {("cli", "base/json.h")}
LAYERS = [*ALLOWED, *OUTSIDE]
BASE_HEADERS = [
    *["alloc", "dtype", "export", "file", "log", "memory", "option", "status", "str", "version"]
]
# Includes every public header and belongs to no layer: the sources do not use it.
UMBRELLA = "jaxpp"
# Calls that only src/base may make: it is the one door to memory and the environment.
BASE_CALLS = (
    "malloc calloc realloc free strdup strndup asprintf vasprintf sprintf vsprintf "
    "strcpy strcat atoi atol getenv abort"
).split()

# A function of a header, at the beginning of its declaration.
DECLARED = re.compile(r"^[A-Za-z_][\w *]*?[ *](jpp_\w+)\((?!\*)")
INCLUDE = re.compile(r'#\s*include\s*["<]([^">]+)[">]')
CALL = re.compile(r"(?<![\w.>])(" + "|".join(BASE_CALLS) + r")\s*\(")
# Comments and texts, which keep their line breaks when they are blanked.
BLANKED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def layer_of_header(stem: str) -> str | None:
    """`schedule_csv` belongs to schedule; None for no layer's header."""
    if stem in BASE_HEADERS:
        return "base"
    return next((name for name in ALLOWED if stem.split("_")[0] == name), None)


def layer_of_include(target: str) -> str | None:
    """The layer of an include path of this project; None for the system's."""
    parts = pathlib.PurePath(target).parts
    if parts[0] == "jaxpp":
        return layer_of_header(pathlib.PurePath(target).stem)
    known = len(parts) > 1 and parts[0] in LAYERS
    return parts[0] if known else None


def may_include(layer: str, target: str) -> bool:
    """Whether a file of the layer may include this path."""
    included = layer_of_include(target)
    if included in (None, layer):
        return True
    if layer in OUTSIDE:
        return target.startswith("jaxpp/") or (layer, target) in EXCEPTIONS
    return included in ALLOWED[layer]


def includes_offend(layer: str, text: str) -> list[tuple[int, str]]:
    """(line, message) of each include that the layer may not have."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line.strip())
        if match and not may_include(layer, match[1]):
            found.append((number, f"{layer} may not include {match[1]}"))
    return found


def calls_offend(layer: str, text: str) -> list[tuple[int, str]]:
    """(line, message) of each call that belongs to src/base."""
    if layer in ("base", "examples"):
        return []
    bare = BLANKED.sub(lambda m: "\n" * m[0].count("\n"), text)
    return [
        (bare.count("\n", 0, m.start()) + 1, f"{m[1]}() is for src/base only")
        for m in CALL.finditer(bare)
    ]


def names_offend(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
    """(line, message) of each function whose name does not say whether it is public."""
    if path.suffix != ".h":
        return []
    public = "include" in path.parts
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        for name in DECLARED.findall(line):
            if name.startswith("jpp__") == public:
                found.append((number, f"{name}() begins with jpp__, or is public: not both"))
    return found


def offences(path: pathlib.Path, layer: str | None) -> list[tuple[int, str]]:
    """Everything that is wrong with one file."""
    if layer is None:
        return [(1, f"belongs to no layer; expected one of {', '.join(LAYERS)}")]
    text = path.read_text()
    found = includes_offend(layer, text) + calls_offend(layer, text)
    return found if layer in OUTSIDE else found + names_offend(path, text)


def main() -> int:
    """Exit status 1 when a rule is broken."""
    root = pathlib.Path(sys.argv[1])
    public = (root / "include/jaxpp").glob("*.h")
    files = {p: layer_of_header(p.stem) for p in public if p.stem != UMBRELLA}
    for path in (root / "src").rglob("*.[ch]"):
        layer = path.relative_to(root / "src").parts[0]
        files[path] = layer if layer in LAYERS else None
    files |= dict.fromkeys((root / "examples").rglob("*.[ch]"), "examples")
    found = [
        f"{path.relative_to(root)}:{line}: {message}"
        for path in sorted(files)
        for line, message in offences(path, files[path])
    ]
    print("\n".join(found) or f"{len(files)} files keep to their layers")
    return 1 if found or not files else 0


if __name__ == "__main__":
    sys.exit(main())
