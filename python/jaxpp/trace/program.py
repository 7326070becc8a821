"""Traces a program written by hand: records where its values are, and whether they were
sent or donated."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp.errors import (
    check_arrays,
    check_prefix,
    definition_line,
    here,
    make_error,
    shorten,
)
from jaxpp.jax_internals.jaxprs import without_constants
from jaxpp.mesh import MpmdMesh
from jaxpp.trace.memories import is_move, run_in_device_memory
from jaxpp.trace.written import Place, parts_p, place_of, place_on, task_p, transfer_p, whole_p

__all__ = ["Program", "TaskOptions", "Transfer", "current_program"]


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """The options of `task`."""

    out_shardings: Any
    name: str | None
    in_shardings: Any
    mesh: Mesh | None
    donate_argnums: Any


class Transfer:
    """Arrays that are being sent to other ranks."""

    def __init__(
        self,
        program: Program,
        arrays: Any,
        where: str,
        arrived: Sequence[tuple[Any, Any, Place]],
    ) -> None:
        self._program, self._arrays, self._arrived = program, arrays, arrived
        self.where = where
        self._done: str | None = None

    def done(self) -> Any:
        """The arrays on their new ranks. Call it once."""
        if self._done is not None:
            raise make_error(
                "invalid-argument",
                f"done() at {here()}: the transfer at {self.where} was completed at "
                f"{self._done}; expected one call of done(), which may only be called once",
            )
        self._done = here()
        self._program.complete(self, self._arrived)
        return self._arrays


@dataclasses.dataclass
class _Known:
    """A value of the program."""

    tracer: Any
    place: Place
    parts: tuple[Any, ...]  # the tracer itself, unless the value is divided over ranks
    sent: str | None = None  # the lines that sent it
    donated: str | None = None  # and donated it


_current: contextvars.ContextVar[Program | None] = contextvars.ContextVar(
    "jaxpp_program", default=None
)


class Program:
    """The trace of one program: where its values are, and whether they were sent or
    donated.

    `fun` runs with arguments placed by `in_shardings`, a pytree prefix of them.
    """

    def __init__(self, mesh: MpmdMesh, fun: Callable[..., Any], in_shardings: Any) -> None:
        self.mesh = mesh
        self.who = f"mpmd of the function at {definition_line(fun)}"
        self._fun, self._in_shardings = fun, in_shardings
        self._known: dict[int, _Known] = {}
        self._open: list[Transfer] = []
        self._traced: dict[Any, tuple[ClosedJaxpr, list[Any], Any]] = {}  # functions of tasks
        self._kept: list[Any] = []  # objects whose identity the keys of `_traced` contain
        types = mesh.lowering_mesh().axis_types
        self._explicit = any(t is AxisType.Explicit for t in types)

    def run(self, *args: Any) -> Any:
        """Traces the program and returns its result."""
        what = f"{self.who}: in_shardings"
        shardings = check_prefix(what, self._in_shardings, args, "the arrays")
        for leaf, sharding in zip(jax.tree.leaves(args), shardings, strict=True):
            place = place_of(sharding, self.mesh, what)
            self._add(leaf, place, self._parts_of(leaf, place, what))
        token = _current.set(self)
        try:
            result = self._fun(*args)
        finally:
            _current.reset(token)
        if self._open:
            raise make_error(
                "invalid-argument",
                f"the transfer at {self._open[0].where} is never completed; expected one call "
                "of done() on what transfer returned, which gives the arrays",
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(result):
            self._find(leaf, f"result{jax.tree_util.keystr(path)}")
        return result

    # --- Values ---

    def _add(self, tracer: Any, place: Place, parts: Sequence[Any] = ()) -> Any:
        self._known[id(tracer)] = _Known(tracer, place, tuple(parts) or (tracer,))
        return tracer

    def _add_parts(self, parts: Sequence[Any], place: Place) -> Any:
        whole = whole_p.bind(*parts) if place.parted else parts[0]
        return self._add(whole, place, parts)

    def _parts_of(self, leaf: Any, place: Place, what: str) -> Sequence[Any]:
        if not place.parted:
            return ()
        n, shape = len(place.ranks), tuple(leaf.shape)
        if not shape or shape[0] % n:
            raise make_error(
                "sharding",
                f"{what}: shape {shape} is divided over the ranks {list(place.ranks)}; "
                f"expected a multiple of {n} rows",
            )
        return parts_p.bind(leaf, n=n)

    def _find(self, leaf: Any, what: str) -> _Known:
        known = self._known.get(id(leaf))
        if known is None:
            found = shorten(leaf)
            if isinstance(leaf, jax.core.Tracer):
                found = f"{leaf.aval.str_short()}, which the program computes itself"
            raise make_error(
                "invalid-argument",
                f"{here()}: {what}: expected an argument of the program, or what a task or "
                f"a transfer returned, found {found}; compute it in a task",
            )
        if known.donated is not None:
            raise make_error(
                "donated",
                f"{here()}: {what} was donated to the task at {known.donated}, which may "
                "overwrite it; use what that task returned, or do not donate it",
            )
        return known

    # --- Tasks ---

    def add_task(
        self, fun: Callable[..., Any], args: tuple[Any, ...], given: TaskOptions
    ) -> Any:
        where = here()
        name = given.name or getattr(fun, "__name__", "task")
        what = f"task {name} at {where}"
        named = [
            (f"argument {jax.tree_util.keystr(path)}", leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(args)
        ]
        # Arrays and numbers that are not values of the program are compiled in.
        known = [
            None
            if not isinstance(leaf, jax.core.Tracer)
            else self._find(leaf, f"task {name}: {text}")
            for text, leaf in named
        ]
        check_arrays(
            [leaf for (_, leaf), k in zip(named, known, strict=True) if k is None], what
        )
        ranks = self._ranks_of_task(what, named, known, given)
        specs = [k.place.spec if k else PartitionSpec() for k in known]
        jaxpr, consts, out_tree = self._trace(what, fun, args, specs)
        places = self._out_places(what, given.out_shardings, out_tree, ranks)
        self._donate(what, where, args, known, given.donate_argnums)
        parts = [k.parts if k else (leaf,) for (_, leaf), k in zip(named, known, strict=True)]
        operands = [part for own in parts for part in own]
        counts = [len(own) for own in parts]
        outs = iter(
            task_p.bind(
                *consts,
                *operands,
                jaxpr=self._over_parts(what, jaxpr, len(consts), counts, places),
                name=name,
                ranks=ranks,
                out_places=tuple(part for place in places for part in place.of_parts()),
            )
        )
        own = [[next(outs) for _ in place.of_parts()] for place in places]
        return out_tree.unflatten(map(self._add_parts, own, places))

    def _over_parts(
        self,
        what: str,
        jaxpr: ClosedJaxpr,
        num_consts: int,
        counts: list[int],
        places: Sequence[Place],
    ) -> ClosedJaxpr:
        """The task's jaxpr, from the parts of its arguments to the parts of its results."""
        if max(counts, default=1) == 1 and not any(place.parted for place in places):
            return jaxpr
        key = (id(jaxpr), tuple(counts), tuple(places))
        if key in self._traced:
            return self._traced[key][0]
        counts = [1] * num_consts + counts

        def part(aval: Any, count: int) -> list[Any]:
            own = (
                aval
                if count == 1
                else aval.update(shape=(aval.shape[0] // count, *aval.shape[1:]))
            )
            return [own] * count

        def on_parts(*values: Any) -> list[Any]:
            given = iter(values)
            groups = [[next(given) for _ in range(count)] for count in counts]
            whole = [g[0] if len(g) == 1 else jax.numpy.concatenate(g) for g in groups]
            outs: list[Any] = []
            for out, place in zip(jaxpr_as_fun(jaxpr)(*whole), places, strict=True):
                n = len(place.of_parts())
                if n > 1 and (not out.shape or out.shape[0] % n):
                    raise make_error(
                        "sharding",
                        f"{what}: out_shardings: shape {tuple(out.shape)} is divided "
                        f"over the ranks {list(place.ranks)}; expected a multiple of "
                        f"{n} rows",
                    )
                outs += [out] if n == 1 else jax.numpy.split(out, n)
            return outs

        parts = [p for a, n in zip(jaxpr.in_avals, counts, strict=True) for p in part(a, n)]
        with self.mesh.tracing_context():
            made = jax.make_jaxpr(on_parts)(*parts)
        self._traced[key] = made, [], None
        return made

    def _ranks_of_task(
        self,
        what: str,
        named: Sequence[tuple[str, Any]],
        known: Sequence[_Known | None],
        given: TaskOptions,
    ) -> tuple[int, ...]:
        """The ranks of its arguments, mesh and shardings, which must agree."""
        found = [(text, k.place.ranks) for (text, _), k in zip(named, known, strict=True) if k]
        if given.mesh is not None:
            sharding = NamedSharding(given.mesh, PartitionSpec())
            found.append(("mesh", place_of(sharding, self.mesh, f"{what}: mesh").ranks))
        for text, tree in (
            ("in_shardings", given.in_shardings),
            ("out_shardings", given.out_shardings),
        ):
            leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
            found += [
                (text, place_of(leaf, self.mesh, f"{what}: {text}").ranks)
                for leaf in leaves
                if not isinstance(leaf, PartitionSpec)
            ]
        if not found:
            raise make_error(
                "mesh",
                f"{what}: nothing says where it runs; expected arguments of the program, "
                "mesh=, or NamedShardings as out_shardings",
            )
        (first, ranks), *others = found
        for text, other in others:
            if other != ranks:
                raise make_error(
                    "mesh",
                    f"{what}: {first} is on {Place(ranks, PartitionSpec())} and {text} on "
                    f"{Place(other, PartitionSpec())}; expected all on the same ranks: "
                    "transfer the argument first",
                )
        return ranks

    def _trace(
        self, what: str, fun: Callable[..., Any], args: tuple[Any, ...], specs: list[Any]
    ) -> tuple[ClosedJaxpr, list[Any], Any]:
        """The task's jaxpr, its constants, which become leading arguments, and the tree
        of its results. Calls of the same function with the same types share them."""
        leaves, tree = jax.tree.flatten(args)
        mesh = self.mesh.lowering_mesh()

        def struct(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            aval = jax.typeof(leaf)
            sharding = NamedSharding(mesh, spec) if self._explicit else None
            return jax.ShapeDtypeStruct(
                aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
            )

        structs = list(map(struct, leaves, specs))
        types = tuple((s.shape, s.dtype, s.weak_type) for s in structs)
        key = (id(fun), tree, types, tuple(specs))
        if key in self._traced:
            return self._traced[key]
        out_trees = []

        def flat(*values: Any) -> list[Any]:
            token = _current.set(None)
            try:
                result = fun(*tree.unflatten(values))
            finally:
                _current.reset(token)
            check_arrays(result, f"{what}: its result")
            outs, out_tree = jax.tree.flatten(result)
            out_trees.append(out_tree)
            return outs

        with self.mesh.tracing_context():
            closed = jax.make_jaxpr(flat)(*structs)
            if any(map(is_move, closed.eqns)):
                closed = jax.make_jaxpr(functools.partial(run_in_device_memory, closed))(
                    *structs
                )
        if any(isinstance(const, jax.core.Tracer) for const in closed.consts):
            raise make_error(
                "invalid-argument",
                f"{what}: its function uses a value of the program that is not among its "
                "arguments; pass it as an argument",
            )
        self._kept.append(fun)
        jaxpr = ClosedJaxpr(without_constants(closed.jaxpr), ())
        self._traced[key] = jaxpr, closed.consts, out_trees[-1]
        return self._traced[key]

    def _out_places(
        self, what: str, shardings: Any, out_tree: Any, ranks: tuple[int, ...]
    ) -> list[Place]:
        numbered = out_tree.unflatten(range(out_tree.num_leaves))
        places = []
        for given in check_prefix(f"{what}: out_shardings", shardings, numbered, "the arrays"):
            if isinstance(given, PartitionSpec):
                places.append(place_on(ranks, given, self.mesh, f"{what}: out_shardings"))
            else:
                places.append(place_of(given, self.mesh, f"{what}: out_shardings"))
        return places

    def _donate(
        self,
        what: str,
        where: str,
        args: tuple[Any, ...],
        known: Sequence[_Known | None],
        donate_argnums: Any,
    ) -> None:
        if donate_argnums is None:
            return
        numbers = [donate_argnums] if isinstance(donate_argnums, int) else list(donate_argnums)
        wrong = [
            n for n in numbers if not isinstance(n, int) or not -len(args) <= n < len(args)
        ]
        if wrong:
            raise make_error(
                "invalid-argument",
                f"{what}: donate_argnums has {wrong[0]!r}; expected numbers from 0 to "
                f"{len(args) - 1}",
            )
        at = iter(known)
        donated = {n % len(args) for n in numbers}
        for number, arg in enumerate(args):
            for _ in jax.tree.leaves(arg):
                value = next(at)
                if value is None or number not in donated:
                    continue
                if value.sent is not None:
                    raise make_error(
                        "donated",
                        f"{what}: argument {number} was sent by the transfer at {value.sent}, "
                        "which may still read it; expected a donated argument that no "
                        "transfer sends. Leave it out of donate_argnums: the plan reuses its "
                        "memory once it is sent",
                    )
                value.donated = where

    # --- Transfers ---

    def add_transfer(self, tree: Any, out_shardings: Any) -> Transfer:
        where = here()
        what = f"transfer at {where}"
        named = [
            (f"array {jax.tree_util.keystr(path)}", leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        ]
        known = [self._find(leaf, f"transfer: {text}") for text, leaf in named]

        shardings = check_prefix(f"{what}: out_shardings", out_shardings, tree, "the arrays")
        places = [place_of(s, self.mesh, f"{what}: out_shardings") for s in shardings]
        for (text, _), source, place in zip(named, known, places, strict=True):
            if set(source.place.ranks) == set(place.ranks):
                raise make_error(
                    "mesh",
                    f"{what}: {text} is on {source.place} already; expected out_shardings on "
                    "other ranks",
                )
            source.sent = source.sent or where
        arrays = [
            self._move(what, source, place) for source, place in zip(known, places, strict=True)
        ]
        made = jax.tree.unflatten(jax.tree.structure(tree), [whole for whole, _ in arrays])
        transfer = Transfer(
            self, made, where, [(*own, p) for own, p in zip(arrays, places, strict=True)]
        )
        self._open.append(transfer)
        return transfer

    def _move(self, what: str, source: _Known, place: Place) -> tuple[Any, list[Any]]:
        """The value, and its parts, on other ranks."""
        if source.place.parted != place.parted or len(source.parts) != len(place.of_parts()):
            raise make_error(
                "unsupported",
                f"{what}: from {source.place} to {place}: expected both or neither to "
                "be divided over ranks, over the same number of them; a task can "
                "join the parts",
            )
        pairs = list(zip(source.parts, source.place.of_parts(), place.of_parts(), strict=True))
        outs = transfer_p.bind(
            *source.parts,
            out_places=tuple(place.of_parts()),
            reshards=tuple(self._resharding(what, *pair) for pair in pairs),
        )
        return (whole_p.bind(*outs) if place.parted else outs[0]), outs

    def _resharding(
        self, what: str, part: Any, source: Place, place: Place
    ) -> dict[str, Any] | None:
        if (source.spec, source.memory) == (place.spec, place.memory):
            return None

        def reshard(x: Any) -> Any:
            return jax.sharding.reshard(x, place.spec) if self._explicit else x

        jaxpr, _, _ = self._trace(what, reshard, (part,), [source.spec])
        ranks, places = place.ranks, (place,)
        return {"jaxpr": jaxpr, "name": "reshard", "ranks": ranks, "out_places": places}

    def complete(self, transfer: Transfer, arrived: Sequence[tuple[Any, Any, Place]]) -> None:
        """Makes the arrays of a completed transfer values of the program."""
        self._open.remove(transfer)
        for whole, parts, place in arrived:
            self._add(whole, place, parts)

    # --- Values of several ranks ---

    def stack(self, arrays: Sequence[Any]) -> Any:
        what = f"stack at {here()}"
        known = [self._find(a, f"stack: array {k}") for k, a in enumerate(arrays)]
        parts = [
            (own, part)
            for k in known
            for own, part in zip(k.place.of_parts(), k.parts, strict=True)
        ]
        ranks = sorted(rank for own, _ in parts for rank in own.ranks)
        if not parts or len(set(ranks)) < len(ranks):
            raise make_error(
                "mesh",
                f"{what}: arrays on the ranks {ranks}; expected at least one array, and no "
                "duplicate MPMD ranks",
            )
        for own, part in parts:
            self._check_alike(what, own, part, *parts[0])
        parts.sort(key=lambda pair: pair[0].ranks)
        place = dataclasses.replace(parts[0][0], ranks=tuple(ranks), parted=len(parts) > 1)
        return self._add_parts([part for _, part in parts], place)

    def _check_alike(self, what: str, own: Place, part: Any, place: Place, first: Any) -> None:
        """Checks that an array of a stack matches the first one."""
        if len(own.ranks) > 1:
            raise make_error(
                "sharding",
                f"{what}: an array is a copy on each of the ranks {list(own.ranks)}; "
                "expected arrays of one rank, or divided over their ranks "
                f"(P({self.mesh.mpmd_axis_name!r}))",
            )
        a, b = part.aval, first.aval
        if not a.shape or (a.shape, a.dtype, own.spec) != (b.shape, b.dtype, place.spec):
            raise make_error(
                "invalid-argument",
                f"{what}: rank {own.ranks[0]} has {a.str_short()}, sharded as {own.spec}, rank "
                f"{place.ranks[0]} {b.str_short()} as {place.spec}; expected the same shape, "
                "of at least one dimension, the same dtype and spec on each rank",
            )

    def slice(self, array: Any, groups: Sequence[Any]) -> list[Any]:
        value = self._find(array, "slice: the array")
        what = f"slice at {here()}"
        chosen = [[g] if isinstance(g, int) else list(g) for g in groups]
        own = value.place.ranks
        for group in chosen:
            if not group or any(r not in own for r in group):
                raise make_error(
                    "mesh",
                    f"{what}: group {group}; expected ranks of the array, {list(own)}",
                )
        return [self._slice(what, value, tuple(sorted(group))) for group in chosen]

    def _slice(self, what: str, value: _Known, ranks: tuple[int, ...]) -> Any:
        place = dataclasses.replace(value.place, ranks=ranks, parted=False)
        if not value.place.parted:
            (out,) = transfer_p.bind(value.tracer, out_places=(place,), reshards=(None,))
            return self._add(out, place)
        at = value.place.ranks.index
        place = dataclasses.replace(place, parted=len(ranks) > 1)
        return self._add_parts([value.parts[at(rank)] for rank in ranks], place)


def current_program(name: str) -> Program:
    program = _current.get()
    if program is None:
        raise make_error(
            "invalid-argument",
            f"{name} at {here()}: expected a call in a function under mpmd(...), outside of "
            "its tasks",
        )
    return program
