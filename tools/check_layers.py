"""Checks rules that a compiler does not: which layer may include which, and which calls
it may make.

    check_layers.py ROOT

Prints a line for each offence, FILE:LINE first, and exits with status 1 if there is any.
"""

import pathlib
import re
import sys

# The path of the data: each layer may include those before it.
ORDER = ["base", "task", "schedule", "graph", "partition", "program", "check", "plan", "advise"]
PLANNER = [*ORDER, "simulate", "search", "predict"]


def before(layer: str) -> list[str]:
    return ORDER[: ORDER.index(layer)]


# The layers that each layer may include besides itself. A layer is a folder of src/ with
# the public headers of the same name.
ALLOWED = {
    **{layer: before(layer) for layer in ORDER},
    # Not on that path: timing a schedule, and searching for a better one.
    "simulate": ["base", "task", "schedule"],
    "search": ["base", "task", "schedule", "simulate"],
    # Predicts when a plan's tasks run.
    "predict": before("check"),
    "plan": [*before("plan"), "search"],
    "advise": [*before("advise"), "simulate", "search"],
    "device": ["base"],
    "array": ["base", "device"],
    "transport": ["base"],
    "job": ["base"],
    "flight": ["base"],
    "runtime": [*before("plan"), "device", "array", "transport", "job", "flight"],
    # Saved plans, and steps made from them.
    "planfile": [*before("plan"), "plan", "device", "array", "runtime"],
    # Steps in the profiles of JAX.
    "profile": [*before("plan"), "device", "array", "runtime"],
    # Only code outside the library includes it.
    "view": [*PLANNER, "device", "array", "transport", "runtime"],
}
# Code outside the library sees the public headers and its folder, as any user's program
# does.
OUTSIDE = ["cli", "python", "examples"]
# Public headers do not include jansson, and the command prints JSON.
EXCEPTIONS = {("cli", "base/json.h")}
LAYERS = [*ALLOWED, *OUTSIDE]
BASE_HEADERS = [
    *["alloc", "dtype", "export", "file", "log", "memory", "option", "status", "str", "version"]
]
# Includes every public header and belongs to no layer: the sources do not use it.
UMBRELLA = "jaxpp"
# Only src/base may call these: it alone accesses memory and the environment.
BASE_CALLS = (
    "malloc calloc realloc free strdup strndup asprintf vasprintf sprintf vsprintf "
    "strcpy strcat atoi atol getenv abort"
).split()

# A function declaration in a header.
DECLARED = re.compile(r"^[A-Za-z_][\w *]*?[ *](jpp_\w+)\((?!\*)")
INCLUDE = re.compile(r'#\s*include\s*["<]([^">]+)[">]')
CALL = re.compile(r"(?<![\w.>])(" + "|".join(BASE_CALLS) + r")\s*\(")
# Comments and string literals; blanking them keeps their line breaks.
BLANKED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)


def layer_of_header(stem: str) -> str | None:
    """`schedule_csv` belongs to schedule; None if the header belongs to no layer."""
    if stem in BASE_HEADERS:
        return "base"
    return next((name for name in ALLOWED if stem.split("_")[0] == name), None)


def layer_of_include(target: str) -> str | None:
    """The layer of an include path of this project; None for system headers."""
    parts = pathlib.PurePath(target).parts
    if parts[0] == "jaxpp":
        return layer_of_header(pathlib.PurePath(target).stem)
    known = len(parts) > 1 and parts[0] in LAYERS
    return parts[0] if known else None


def may_include(layer: str, target: str) -> bool:
    """True if a file of the layer may include this path."""
    included = layer_of_include(target)
    if included in (None, layer):
        return True
    if layer in OUTSIDE:
        return target.startswith("jaxpp/") or (layer, target) in EXCEPTIONS
    return included in ALLOWED[layer]


def includes_offend(layer: str, text: str) -> list[tuple[int, str]]:
    """(line, message) of each include that the layer must not have."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line.strip())
        if match and not may_include(layer, match[1]):
            found.append((number, f"{layer} may not include {match[1]}"))
    return found


def calls_offend(layer: str, text: str) -> list[tuple[int, str]]:
    """(line, message) of each call that only src/base may make."""
    if layer in ("base", "examples"):
        return []
    bare = BLANKED.sub(lambda m: "\n" * m[0].count("\n"), text)
    return [
        (bare.count("\n", 0, m.start()) + 1, f"{m[1]}() is for src/base only")
        for m in CALL.finditer(bare)
    ]


def names_offend(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
    """(line, message) of each function whose name does not show whether it is public."""
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
    """Returns exit status 1 if a rule is broken."""
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
