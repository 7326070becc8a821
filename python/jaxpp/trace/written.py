"""Programs written by hand, as equations: tasks on ranks, and transfers between ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.errors import make_error, shorten
from jaxpp.jax_internals.jaxprs import changed_jaxpr
from jaxpp.jax_internals.lines import user_line
from jaxpp.mesh import MpmdMesh, MpmdSharding, memory_of
from jaxpp.trace.boxes import Bounds

__all__ = [
    "Cut",
    "Place",
    "cut_parted",
    "parts_p",
    "place_of",
    "place_on",
    "task_p",
    "transfer_p",
    "whole_p",
]


# Parameters: the `jaxpr`, `name` and `ranks` of the task, and the `out_places` of its
# results.
task_p = Primitive("task")
task_p.multiple_results = True
# The results are the operands. Parameters: their `out_places`, and the `reshards`: for
# each of them None, or the parameters of a task that shards it differently.
transfer_p = Primitive("transfer")
transfer_p.multiple_results = True
# (whole) -> parts, for an argument that is divided over ranks; and (parts) -> whole. Both
# only relate values: tasks and transfers take parts.
parts_p = Primitive("parts")
parts_p.multiple_results = True
whole_p = Primitive("whole")


def _task_types(*avals: Any, jaxpr: ClosedJaxpr, **_: Any) -> Any:
    types = [jax.core.ShapedArray(a.shape, a.dtype) for a in jaxpr.out_avals]
    return types, jaxpr.effects


task_p.def_effectful_abstract_eval(_task_types)
transfer_p.def_abstract_eval(lambda *avals, **_: list(avals))


def _rows(aval: Any, count: int) -> Any:
    return jax.core.ShapedArray((count, *aval.shape[1:]), aval.dtype)


parts_p.def_abstract_eval(lambda whole, n: [_rows(whole, whole.shape[0] // n)] * n)
whole_p.def_abstract_eval(lambda *parts: _rows(parts[0], sum(p.shape[0] for p in parts)))


# --- Where values are ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """The ranks that hold a value, ascending, each sharded by `spec`: each rank holds all
    of it or, if it is divided over them, an equal number of its rows."""

    ranks: tuple[int, ...]
    spec: PartitionSpec
    memory: str = "device"
    parted: bool = False

    def of_parts(self) -> list[Place]:
        """The places of its parts; a value that is not divided has one part."""
        if not self.parted:
            return [self]
        return [Place((r,), self.spec, self.memory) for r in self.ranks]

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return f"rank{'s' if len(self.ranks) > 1 else ''} {ranks}"


def _ranks_of_mesh(mesh: Any, mpmd_mesh: MpmdMesh) -> tuple[int, ...] | None:
    """The ranks whose devices a mesh consists of, one rank after the other."""
    if not isinstance(mesh, Mesh) or mesh.axis_names != mpmd_mesh.unstack[0].axis_names:
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
    """The place of an array with a sharding over one rank, or over several."""
    if not isinstance(sharding, NamedSharding):
        raise make_error(
            "sharding",
            f"{what}: expected a NamedSharding on the mesh of one rank (mesh.unstack[i]) or "
            f"of several (mesh.mpmd_submesh([...]).jax_mesh), found {shorten(sharding)}",
            wrong_type=True,
        )
    memory = memory_of(sharding, what)
    if isinstance(sharding, MpmdSharding) and sharding.mpmd_mesh == mesh:
        return Place(tuple(sorted(sharding.mesh_ids)), sharding.spec_in_rank, memory)
    ranks = _ranks_of_mesh(sharding.mesh, mesh)
    if ranks is None:
        raise make_error(
            "mesh",
            f"{what}: the mesh {shorten(sharding.mesh)} does not belong to the MPMD mesh; "
            "expected mesh.unstack[i] or mesh.mpmd_submesh([...]).jax_mesh",
        )
    return place_on(ranks, sharding.spec, mesh, what, memory)


def place_on(
    ranks: tuple[int, ...],
    given: PartitionSpec,
    mesh: MpmdMesh,
    what: str,
    memory: str = "device",
) -> Place:
    spec = mesh.without_pipeline_axis(given)
    if len(ranks) == 1 or spec == given:
        return Place(ranks, _shortest(spec), memory)
    axis = mesh.mpmd_axis_name
    if given.partitions[0] not in (axis, (axis,)):
        raise make_error(
            "sharding",
            f"{what}: {given} shards over the ranks {list(ranks)}; expected {axis!r} alone, "
            "in the leading PartitionSpec axis, so that each rank has some of the rows",
        )
    return Place(ranks, _shortest(spec), memory, parted=True)


def _shortest(spec: PartitionSpec) -> PartitionSpec:
    """The spec without trailing entries that shard nothing, so that equal specs compare
    equal."""
    parts = list(spec.partitions)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)


# --- Arguments and results ----------------------------------------------------------------


@dataclasses.dataclass
class Cut:
    """A program whose arguments and results are parts of the values that are divided over
    ranks.

    `argument_bounds`, `result_bounds`: for each whole value the rows at which it is cut;
    None: it is not cut. `arguments`, `results`: the places of the parts and of values
    that are not cut.
    """

    closed: ClosedJaxpr
    argument_bounds: list[Bounds | None]
    arguments: list[Place]
    result_bounds: list[Bounds | None]
    results: list[Place]


def cut_parted(closed: ClosedJaxpr, places: Sequence[Place]) -> Cut:
    """Cuts a program according to the places of its arguments."""
    jaxpr = closed.jaxpr
    parts = {eqn.invars[0]: eqn.outvars for eqn in jaxpr.eqns if eqn.primitive is parts_p}
    wholes = {eqn.outvars[0]: eqn.invars for eqn in jaxpr.eqns if eqn.primitive is whole_p}
    eqns = [eqn for eqn in jaxpr.eqns if eqn.primitive not in (parts_p, whole_p)]
    for eqn in eqns:
        _check_equation(eqn)
    # An unused argument has no parts; each rank receives it as a whole.
    invars = [parts.get(v, [v]) for v in jaxpr.invars]
    outvars = [parts.get(v, wholes.get(v, [v])) for v in jaxpr.outvars]
    arguments = [
        place.of_parts() if len(own) > 1 else [dataclasses.replace(place, parted=False)]
        for own, place in zip(invars, places, strict=True)
    ]
    at = dict(zip(_flat(invars), _flat(arguments), strict=True))
    for eqn in eqns:
        at.update(zip(eqn.outvars, eqn.params["out_places"], strict=True))
    flat = changed_jaxpr(closed, invars=_flat(invars), eqns=eqns, outvars=_flat(outvars))
    results = [at[v] for v in _flat(outvars)]
    return Cut(
        flat, list(map(_bounds, invars)), _flat(arguments), list(map(_bounds, outvars)), results
    )


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [item for group in groups for item in group]


def _bounds(parts: Sequence[Any]) -> Bounds | None:
    if len(parts) == 1:
        return None
    return Bounds(0, (0, *itertools.accumulate(part.aval.shape[0] for part in parts)))


def _check_equation(eqn: JaxprEqn) -> None:
    if eqn.primitive not in (task_p, transfer_p):
        raise make_error(
            "unsupported",
            f"{user_line(eqn) or '?'}: the program itself computes `{eqn.primitive.name}`; "
            "expected only task, transfer, stack and slice in it: compute in a task",
        )
