"""The arguments of a step: static arguments, donation and the names of leaves."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxpp import _core
from jaxpp.array import MpmdArray
from jaxpp.errors import (
    check_arrays,
    check_path,
    make_error,
    shorten,
)
from jaxpp.jax_internals.jaxprs import is_ref
from jaxpp.jax_internals.lines import name_after
from jaxpp.mesh import MpmdMesh

__all__ = [
    "Call",
    "Options",
    "Signature",
    "Static",
    "TracedArgument",
    "compiler_options_of",
    "flag_of",
    "fsdp_of",
    "limits_by_memory",
    "memory_limits_of",
    "plugin_of",
    "static_key",
    "steps_in_flight_of",
    "struct_key",
    "struct_of",
]


# The limit in bytes on each device, per rank, and the group of each rank if ranks share devices
# and their memory adds up.
MemoryLimits = tuple[tuple[int, ...], tuple[int, ...] | None]


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of `mpmd_jit_with_loop`, `mpmd_jit_by_yield` or `mpmd_jit_rev`."""

    who: str  # the public function that takes them
    mesh: MpmdMesh
    in_specs: Any
    out_specs: Any
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    compiler_options: dict[str, Any]
    plugin: str | None
    memory_limits: MemoryLimits | None
    steps_in_flight: int  # 0: a call returns when its step is done
    reduce_once: bool = True  # gradients are summed over a rank's devices after the loop
    # Decides when a sharded weight, by its name and type, is gathered: "step", "use" or
    # None.
    fsdp: Callable[[str, Any], str | None] | None = None
    host_limits: MemoryLimits | None = None  # of pinned host memory
    # Activations wait in pinned host memory for their backward. None: if the limits need it.
    offload: bool | None = None
    out_ranks: Any = None  # a pytree prefix of the results: the ranks that must have each
    schedule: Any = None  # of the scans over microbatches; None: there are none
    in_word: str = "in_specs"  # the argument that gave in_specs; or "in_shardings"
    out_word: str = "out_specs"
    written: bool = False  # by hand, with `jaxpp.experimental.mpmd`


@dataclasses.dataclass
class Call:
    """One call's arguments: the static ones, and the leaves of the others."""

    static: Any  # hashable
    leaves: list[Any]
    tree: Any
    args: tuple[Any, ...]  # the tree of the dynamic positional arguments
    kwargs: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Static:
    """A static argument of a call."""

    position: int | None  # None: passed by name
    name: str
    value: Any


def _parameters(fun: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names of a function's parameters, and whether it takes further ones."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return [], True
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters], any(p.kind in variadic for p in parameters)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _unhashable_leaf(value: Any) -> tuple[str, Any]:
    """The innermost unhashable part of a value, and the path to it."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, tuple):
        names = getattr(value, "_fields", None)
        parts = [(f".{names[i]}" if names else f"[{i}]", v) for i, v in enumerate(value)]
    elif dataclasses.is_dataclass(value) and type(value).__hash__ is not None:
        parts = [(f".{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    for path, part in parts:
        if not _is_hashable(part):
            rest, leaf = _unhashable_leaf(part)
            return path + rest, leaf
    return "", value


def _how_to_hash(value: Any) -> str:
    if isinstance(value, list):
        return "make it a tuple"
    if isinstance(value, set):
        return "make it a frozenset"
    if isinstance(value, Mapping):
        return "make it a tuple of pairs or a frozen dataclass"
    if isinstance(value, np.ndarray | jax.Array):
        return "make the argument non-static, or make this value a tuple of numbers"
    if dataclasses.is_dataclass(value):
        return "declare its class with @dataclasses.dataclass(frozen=True)"
    return "give its class a __hash__ consistent with its __eq__"


class Signature:
    """The static and donated arguments of a function, and their names."""

    def __init__(self, fun: Callable[..., Any], options: Options) -> None:
        self.who = options.who
        self.names, self.variadic = _parameters(fun)
        self.static_nums = self._numbers(
            "static", options.static_argnums, options.static_argnames
        )
        self.static_names = self._names("static", options.static_argnames, self.static_nums)
        self.donate_nums = self._numbers(
            "donate", options.donate_argnums, options.donate_argnames
        )
        self.donate_names = self._names("donate", options.donate_argnames, self.donate_nums)
        both = [self._name(n) for n in sorted(self.static_nums & self.donate_nums)]
        if both:
            raise make_error(
                "invalid-argument",
                f"{self.who}: argument {both[0]} is both static and donated; expected at most "
                "one, because only arrays can be donated",
            )

    def _numbers(self, kind: str, numbers: Iterable[int], names: Iterable[str]) -> set[int]:
        count = len(self.names)
        for n in numbers:
            if not isinstance(n, int) or not (self.variadic or -count <= n < count):
                raise make_error(
                    "invalid-argument",
                    f"{self.who}: {kind}_argnums has {n!r}; expected numbers from 0 to "
                    f"{count - 1} of the arguments ({', '.join(self.names)})",
                )
        for name in names:
            if not isinstance(name, str) or not (self.variadic or name in self.names):
                raise make_error(
                    "invalid-argument",
                    f"{self.who}: {kind}_argnames has {name!r}; expected names of the "
                    f"arguments ({', '.join(self.names)})",
                )
        named = {self.names.index(n) for n in names if n in self.names}
        return {n + count if n < 0 else n for n in numbers} | named

    def _names(self, kind: str, names: Iterable[str], numbers: set[int]) -> set[str]:
        """The names of positional arguments, which may also be passed by keyword."""
        return {*names, *(self.names[n] for n in numbers if n < len(self.names))}

    def _name(self, position: int) -> str:
        known = position < len(self.names)
        return self.names[position] if known else f"args[{position}]"

    def check(self, call: Call) -> None:
        """Checks that every leaf is an array or a number, and names the one that is not."""
        for key, value in (*call.static[0], *call.static[1]):
            if _is_hashable(value):
                continue
            path, leaf = _unhashable_leaf(value)
            name = (self._name(key) if isinstance(key, int) else key) + path
            raise make_error(
                "invalid-argument",
                f"static argument {name}: expected something hashable, found {shorten(leaf)} "
                f"of type {type(leaf).__name__}; {_how_to_hash(leaf)}",
                wrong_type=True,
            )
        hint = ". List non-array arguments, such as a mode, in static_argnames"
        for name, leaf in zip(self.describe(call)[0], call.leaves, strict=True):
            if not isinstance(leaf, MpmdArray | jax.ShapeDtypeStruct):
                check_arrays(leaf, f"argument {name}", hint)

    def traced(self, call: Call) -> tuple[str, Any] | None:
        """The name and value of the first argument leaf that is a tracer."""
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves):
            return None
        named = zip(self.describe(call)[0], call.leaves, strict=True)
        return next(pair for pair in named if isinstance(pair[1], jax.core.Tracer))

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        static_args = tuple((i, a) for i, a in enumerate(args) if i in self.static_nums)
        static_kwargs = tuple((k, kwargs[k]) for k in sorted(kwargs.keys() & self.static_names))
        dynamic = tuple(a for i, a in enumerate(args) if i not in self.static_nums)
        named = {k: v for k, v in kwargs.items() if k not in self.static_names}
        leaves, tree = jax.tree.flatten((dynamic, named))
        return Call((static_args, static_kwargs), leaves, tree, dynamic, named)

    def _position(self, dynamic_position: int) -> int:
        """The position of a dynamic argument among all arguments."""
        position = 0
        for skipped in sorted(self.static_nums):
            if skipped <= dynamic_position + position:
                position += 1
        return dynamic_position + position

    def describe(self, call: Call) -> tuple[list[str], list[bool]]:
        """The name of each leaf, and whether it is donated."""
        names, donated = [], []
        for path, _ in jax.tree_util.tree_leaves_with_path((call.args, call.kwargs)):
            group, which, rest = path[0].idx, path[1], path[2:]
            if group == 0:
                position = self._position(which.idx)
                head = self._name(position)
                donated.append(position in self.donate_nums)
            else:
                head = which.key
                donated.append(head in self.donate_names)
            names.append(head + jax.tree_util.keystr(rest))
        return names, donated

    def statics(self, call: Call) -> list[Static]:
        """The static arguments of a call."""
        by_position, by_name = call.static
        return [Static(i, self._name(i), value) for i, value in by_position] + [
            Static(None, name, value) for name, value in by_name
        ]

    def merge(
        self, static: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Inserts the static arguments again."""
        merged = list(args)
        for position, value in static[0]:
            merged.insert(position, value)
        return merged, {**kwargs, **dict(static[1])}

    def name_after(self, run: Callable[..., Any], fun: Callable[..., Any], call: Call) -> None:
        """Makes JAX's messages name `fun` when it traces `run` on the leaves of a call."""
        args, kwargs = self.merge(call.static, call.args, call.kwargs)
        nums, names = ([key for key, _ in static] for static in call.static)
        name_after(run, fun, args, kwargs, nums, names)


def limits_by_memory(given: Any, who: str) -> tuple[Any, Any]:
    """The values of memory_limit= for the devices' memory and for pinned host memory."""
    if not isinstance(given, Mapping):
        return given, None
    unknown = sorted(str(name) for name in given if name not in ("device", "pinned_host"))
    if unknown:
        raise make_error(
            "invalid-argument",
            f"{who}: memory_limit={shorten(given)}; expected limits for 'device' and "
            f"'pinned_host', found {unknown[0]!r}",
        )
    return given.get("device"), given.get("pinned_host")


def memory_limits_of(given: Any, mesh: MpmdMesh, who: str) -> MemoryLimits | None:
    """Converts memory_limit= for the planner; None: no limit. A number applies to all ranks
    that share a device together, a list to each rank."""
    if given is None:
        return None
    ranks = mesh.mpmd_dim
    each = isinstance(given, Sequence)
    limits = tuple(given) if each else (given,) * ranks
    whole = all(isinstance(n, int | np.integer) and 0 < n < 2**63 for n in limits)
    if whole and len(limits) == ranks:
        shared = mesh.ranks_per_device > 1 and not each
        return tuple(map(int, limits)), mesh.group_numbers if shared else None
    raise make_error(
        "invalid-argument",
        f"{who}: memory_limit={shorten(given)}; expected a positive whole number of bytes, or "
        f"a list with one for each of the {ranks} ranks",
    )


def steps_in_flight_of(given: Any, who: str) -> int:
    """The value of steps_in_flight=, or of the environment variable."""
    name = "steps_in_flight"
    if given is None:
        name, given = "JPP_STEPS_IN_FLIGHT", _core.option("JPP_STEPS_IN_FLIGHT") or "2"
        given = int(given) if given.isdecimal() else given
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and 0 <= given <= 64:
        return int(given)
    raise make_error(
        "invalid-argument",
        f"{who}: {name}={shorten(given)}; expected the number of steps in flight, from 0 (a "
        "call waits for its step) to 64",
    )


def flag_of(given: Any, name: str, who: str) -> bool:
    """The value of an option that must be True or False."""
    if isinstance(given, bool | np.bool_):
        return bool(given)
    raise make_error(
        "invalid-argument",
        f"{who}: {name}={shorten(given)}; expected True or False",
        wrong_type=True,
    )


def fsdp_of(given: Any, who: str) -> Callable[[str, Any], str | None] | None:
    """Converts fsdp= to a rule that checks what the user's rule returns; None: not given."""
    if given is None:
        return None

    def rule(name: str, struct: Any) -> str | None:
        when = given(name, struct) if callable(given) else given
        if when in ("step", "use", None):
            return None if when is None else str(when)
        of = f" of {name}" if callable(given) else ""
        raise make_error(
            "invalid-argument",
            f'{who}: fsdp{of}={shorten(when)}; expected "step", "use" or None, or a function '
            "of a weight's name and type that returns one of these",
        )

    if not callable(given):
        rule("", None)
    return rule


def static_key(value: Any) -> Any:
    """A key for static arguments that also compares types: 1, 1.0 and True differ."""
    if isinstance(value, tuple):
        return (type(value), *map(static_key, value))
    # Compares floats by their bits: 0.0 == -0.0, and a NaN does not equal itself.
    return (float, value.hex()) if type(value) is float else (type(value), value)


def plugin_of(given: Any, who: str) -> str | None:
    """Converts plugin= to the path of a file; None: not given."""
    if given is None:
        return None
    return check_path(f"{who}: plugin", given, "the path of a PJRT plugin, a .so file")


def compiler_options_of(given: Any, who: str) -> dict[str, Any]:
    """Checks and copies compiler_options=."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise make_error(
            "invalid-argument",
            f"{who}: compiler_options={shorten(given)}; expected a dict from XLA option names "
            "to values",
            wrong_type=True,
        )
    for name, value in given.items():
        if not isinstance(name, str) or not name.isprintable():
            raise make_error(
                "invalid-argument",
                f"{who}: compiler_options has the name {shorten(name)}; expected text, the "
                'name of an option of XLA such as "xla_backend_optimization_level"',
            )
        if not isinstance(value, str | bool | int | float | np.bool_ | np.number):
            raise make_error(
                "invalid-argument",
                f"{who}: compiler_options[{name!r}]={shorten(value)}; expected text, True, "
                "False or a number",
                wrong_type=True,
            )
    return {k: v.item() if isinstance(v, np.generic) else v for k, v in given.items()}


def struct_of(leaf: Any) -> jax.ShapeDtypeStruct:
    """The abstract value of an argument's leaf."""
    if isinstance(leaf, MpmdArray | jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    if is_ref(leaf):
        raise TypeError("a jax.Ref")  # Signature.check() names it
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


class TracedArgument(Exception):
    """An argument is a JAX tracer."""


def struct_key(leaf: Any) -> tuple[Any, ...]:
    """The shape, dtype and weak type of a leaf, and its memory unless that is device
    memory."""
    if type(leaf) is MpmdArray:
        return leaf._placement.key
    if isinstance(leaf, jax.core.Tracer):
        raise TracedArgument
    struct = struct_of(leaf)
    key = (tuple(struct.shape), struct.dtype, struct.weak_type)
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return (*key, kind) if kind == "pinned_host" else key
