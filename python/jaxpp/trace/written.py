"""Programs written by hand, as equations: tasks on ranks, and transfers between ranks."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxpp.errors import check_arrays, definition_line, here, make_error, shorten, tree_text
from jaxpp.jax_internals.arrays import broadcast_prefix
from jaxpp.jax_internals.jaxprs import without_constants
from jaxpp.jax_internals.lines import user_line
from jaxpp.mesh import MpmdMesh, MpmdSharding

__all__ = [
    "Place",
    "Program",
    "Transfer",
    "place_of",
    "places_of_results",
    "task",
    "task_p",
    "transfer",
    "transfer_p",
]

# Its parameters: the `jaxpr`, `name` and `ranks` of the task, and the `out_places` of its
# results.
task_p = Primitive("task")
task_p.multiple_results = True
# Its results are its operands. Its parameters: their `out_places`, and the `reshards`: for each
# of them None, or the parameters of a task that shards it differently.
transfer_p = Primitive("transfer")
transfer_p.multiple_results = True


def _task_types(*avals: Any, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    types = [jax.core.ShapedArray(a.shape, a.dtype) for a in jaxpr.out_avals]
    return types, jaxpr.effects


task_p.def_effectful_abstract_eval(_task_types)
transfer_p.def_abstract_eval(lambda *avals, **_: list(avals))


# --- Where values are ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """The ranks that hold a value, ascending, each of them sharded by `spec`."""

    ranks: tuple[int, ...]
    spec: PartitionSpec

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks}"


def _ranks_of_mesh(mesh: Any, mpmd_mesh: MpmdMesh) -> tuple[int, ...] | None:
    """The ranks whose devices, one rank's after the other, a mesh consists of."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != mpmd_mesh.jax_mesh.axis_names:
        return None
    axis, ranks = mpmd_mesh.mpmd_axis, []
    for k in range(mesh.devices.shape[axis]):
        devices = mesh.devices.take([k], axis)
        same = (
            rank
            for rank, own in enumerate(mpmd_mesh.unstack)
            if own.devices.shape == devices.shape and (own.devices == devices).all()
        )
        rank = next(same, None)
        if rank is None:
            return None
        ranks.append(rank)
    return tuple(sorted(ranks)) if len(set(ranks)) == len(ranks) else None


def place_of(sharding: Any, mesh: MpmdMesh, what: str) -> Place:
    """Where a sharding over one rank, or over several, puts an array."""
    if not isinstance(sharding, NamedSharding):
        raise make_error(
            "sharding",
            f"{what}: expected a NamedSharding on the mesh of one rank (mesh.unstack[i]) or "
            f"of several (mesh.mpmd_submesh([...]).jax_mesh), found {shorten(sharding)}",
            wrong_type=True,
        )
    if isinstance(sharding, MpmdSharding) and sharding.mpmd_mesh == mesh:
        return Place(tuple(sorted(sharding.mesh_ids)), sharding.spec_in_rank)
    ranks = _ranks_of_mesh(sharding.mesh, mesh)
    if ranks is None:
        raise make_error(
            "mesh",
            f"{what}: the mesh {shorten(sharding.mesh)} does not belong to the MPMD mesh; "
            "expected mesh.unstack[i] or mesh.mpmd_submesh([...]).jax_mesh",
        )
    spec = mesh.without_pipeline_axis(sharding.spec)
    if len(ranks) > 1 and spec != sharding.spec:
        raise make_error(
            "unsupported",
            f"{what}: {sharding.spec} shards over the ranks {list(ranks)}; expected a spec "
            f"without {mesh.mpmd_axis_name!r}: each of these ranks then has a copy",
        )
    return Place(ranks, spec)


# --- The program that is traced -----------------------------------------------------------


@dataclasses.dataclass
class _Known:
    """A value of the program."""

    tracer: Any
    place: Place
    sent: str | None = None  # the lines that sent it
    donated: str | None = None  # and donated it


_current: contextvars.ContextVar[Program | None] = contextvars.ContextVar(
    "jaxpp_program", default=None
)


class Program:
    """The trace of one program: where its values are and what became of them.

    `fun` runs with arguments that are placed as `in_shardings`, a pytree prefix of them, says.
    """

    def __init__(self, mesh: MpmdMesh, fun: Callable[..., Any], in_shardings: Any) -> None:
        self.mesh = mesh
        self.who = f"mpmd of the function at {definition_line(fun)}"
        self._fun, self._in_shardings = fun, in_shardings
        self._known: dict[int, _Known] = {}
        self._open: list[Transfer] = []
        self._traced: dict[Any, tuple[ClosedJaxpr, list[Any], Any]] = {}  # functions of tasks
        self._kept: list[Any] = []  # what the keys of these name by identity
        types = mesh.jax_mesh.axis_types
        self._explicit = any(t is AxisType.Explicit for t in types)

    def run(self, *args: Any) -> Any:
        """Traces the program; its result."""
        what = f"{self.who}: in_shardings"
        shardings = _prefix(what, self._in_shardings, args)
        for leaf, sharding in zip(jax.tree.leaves(args), shardings, strict=True):
            self._add(leaf, place_of(sharding, self.mesh, what))
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

    def _add(self, tracer: Any, place: Place) -> Any:
        self._known[id(tracer)] = _Known(tracer, place)
        return tracer

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

    def add_task(self, fun: Callable[..., Any], args: tuple[Any, ...], given: _Task) -> Any:
        where = here()
        name = given.name or getattr(fun, "__name__", "task")
        what = f"task {name} at {where}"
        named = [
            (f"argument {jax.tree_util.keystr(path)}", leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(args)
        ]
        # Arrays and numbers that are no values of the program are compiled in.
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
        operands = [leaf for _, leaf in named]
        specs = [k.place.spec if k else PartitionSpec() for k in known]
        jaxpr, consts, out_tree = self._trace(what, fun, args, specs)
        places = self._out_places(what, given.out_shardings, out_tree, ranks)
        self._donate(what, where, args, known, given.donate_argnums)
        outs = task_p.bind(
            *consts,
            *operands,
            jaxpr=jaxpr,
            name=name,
            ranks=ranks,
            out_places=tuple(places),
        )
        return out_tree.unflatten(map(self._add, outs, places))

    def _ranks_of_task(
        self,
        what: str,
        named: Sequence[tuple[str, Any]],
        known: Sequence[_Known | None],
        given: _Task,
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
        """The task's jaxpr, its constants, which are leading arguments, and the tree of its
        results; the same ones for calls of a function with the same types."""
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
        for given in _prefix(f"{what}: out_shardings", shardings, numbered):
            if isinstance(given, PartitionSpec):
                places.append(Place(ranks, self.mesh.without_pipeline_axis(given)))
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

        shardings = _prefix(f"{what}: out_shardings", out_shardings, tree)
        places = [place_of(s, self.mesh, f"{what}: out_shardings") for s in shardings]
        for (text, _), source, place in zip(named, known, places, strict=True):
            if set(source.place.ranks) == set(place.ranks):
                raise make_error(
                    "mesh",
                    f"{what}: {text} is on {source.place} already; expected out_shardings on "
                    "other ranks",
                )
            source.sent = source.sent or where
        reshards = [
            self._resharding(what, k, place) for k, place in zip(known, places, strict=True)
        ]
        outs = transfer_p.bind(
            *(leaf for _, leaf in named), out_places=tuple(places), reshards=tuple(reshards)
        )
        arrays = jax.tree.unflatten(jax.tree.structure(tree), outs)
        transfer = Transfer(self, arrays, outs, places, where)
        self._open.append(transfer)
        return transfer

    def _resharding(self, what: str, source: _Known, place: Place) -> dict[str, Any] | None:
        if source.place.spec == place.spec:
            return None

        def reshard(x: Any) -> Any:
            return jax.sharding.reshard(x, place.spec) if self._explicit else x

        jaxpr, _, _ = self._trace(what, reshard, (source.tracer,), [source.place.spec])
        ranks, places = place.ranks, (place,)
        return {"jaxpr": jaxpr, "name": "reshard", "ranks": ranks, "out_places": places}

    def complete(
        self, transfer: Transfer, outs: Sequence[Any], places: Sequence[Place]
    ) -> None:
        """The arrays that a transfer brought are values of the program from here on."""
        self._open.remove(transfer)
        for out, place in zip(outs, places, strict=True):
            self._add(out, place)


def _prefix(what: str, given: Any, tree: Any) -> list[Any]:
    """A sharding or spec for each leaf of a tree, from a pytree prefix of it."""

    def is_leaf(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec | jax.sharding.Sharding)

    try:
        found: list[Any] = broadcast_prefix(given, tree, is_leaf=is_leaf)
    except ValueError:
        raise make_error(
            "sharding",
            f"{what}: expected a pytree prefix of the arrays\n"
            f"  {what.rpartition(' ')[2]}: {tree_text(given)}\n"
            f"  arrays: {tree_text(tree)}",
        ) from None
    return found


def places_of_results(jaxpr: Jaxpr, arguments: Sequence[Place]) -> list[Place]:
    """Where the results of a program are, from where its arguments are."""
    places: dict[Any, Place] = dict(zip(jaxpr.invars, arguments, strict=True))
    for eqn in jaxpr.eqns:
        _check_equation(eqn)
        places.update(zip(eqn.outvars, eqn.params["out_places"], strict=True))
    return [places[v] for v in jaxpr.outvars]


def _check_equation(eqn: JaxprEqn) -> None:
    if eqn.primitive not in (task_p, transfer_p):
        raise make_error(
            "unsupported",
            f"{user_line(eqn) or '?'}: the program itself computes `{eqn.primitive.name}`; "
            "expected only tasks and transfers in it: compute in a task",
        )


# --- What users call ----------------------------------------------------------------------


def _program(name: str) -> Program:
    program = _current.get()
    if program is None:
        raise make_error(
            "invalid-argument",
            f"{name} at {here()}: expected a call in a function under mpmd(...), outside of "
            "its tasks",
        )
    return program


@dataclasses.dataclass(frozen=True)
class _Task:
    """The options of `task`."""

    out_shardings: Any
    name: str | None
    in_shardings: Any
    mesh: Mesh | None
    donate_argnums: Any


def task(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    out_shardings: Any,
    name: str | None = None,
    in_shardings: Any = None,
    mesh: Mesh | None = None,
    donate_argnums: int | Sequence[int] | None = None,
) -> Any:
    """A function that runs as one program on one rank, or on each of several.

    Args:
      fun: the function, of pytrees of arrays.
      out_shardings: a pytree prefix of its results, with a `NamedSharding` on the mesh of its
        ranks or, where arguments or `mesh` say which these are, a `PartitionSpec`.
      name: for traces and messages; default: that of `fun`.
      in_shardings: the shardings of the arguments, which are known already; they must be on the
        same ranks.
      mesh: the mesh of its ranks, for a function without arguments. On a mesh of several ranks
        each of them computes the same, from the same arguments.
      donate_argnums: arguments that the program does not use again. The plan reuses the memory
        of every value after its last use anyway; this checks that there is no later one.

    Returns:
      The function, to be called on values of the program; a decorator if `fun` is omitted.

    Raises:
      JaxppError: from the call: "mesh" (arguments of several ranks), "sharding", "donated",
        "invalid-argument".
    """
    options = _Task(out_shardings, name, in_shardings, mesh, donate_argnums)

    def decorate(fun: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fun)
        def run(*args: Any) -> Any:
            return _program("task").add_task(fun, args, options)

        return run

    return decorate if fun is None else decorate(fun)


class Transfer:
    """Arrays on their way to other ranks."""

    def __init__(
        self,
        program: Program,
        arrays: Any,
        leaves: Sequence[Any],
        places: Sequence[Place],
        where: str,
    ) -> None:
        self._program, self._arrays = program, arrays
        self._leaves, self._places = leaves, places
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
        self._program.complete(self, self._leaves, self._places)
        return self._arrays


def transfer(tree: Any, *, out_shardings: Any) -> Transfer:
    """Sends arrays to other ranks as soon as they exist.

    Args:
      tree: a pytree of values of the program. out_shardings: a pytree prefix of it, with a
      `NamedSharding` on the mesh of other ranks.
        An array may be sharded differently there.

    Returns:
      A `Transfer`, whose `done()` gives the arrays on their new ranks.

    Raises:
      JaxppError: "mesh" (the array is on these ranks already), "sharding", "donated",
        "invalid-argument".
    """
    return _program("transfer").add_transfer(tree, out_shardings)
