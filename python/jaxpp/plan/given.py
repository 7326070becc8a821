"""What a user asks for a step's arguments and results: specs, memories and ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpp.errors import check_prefix, describe, make_error, warn
from jaxpp.mesh import MpmdMesh, MpmdSharding, Ranks, axes_by_dimension, memory_of
from jaxpp.trace.call import Options

__all__ = [
    "broadcast",
    "check_specs",
    "given_memories",
    "memories_of",
    "result_ranks",
    "spec_of",
    "spec_of_leaf",
    "warn_of_pipeline_axis",
]


def warn_of_pipeline_axis(
    given: Sequence[Any], what: str, names: Sequence[str], mesh: MpmdMesh, line: str
) -> None:
    for sharding, name in zip(given, names, strict=False):
        spec = getattr(sharding, "spec", sharding)
        if isinstance(sharding, MpmdSharding) or not isinstance(spec, PartitionSpec):
            continue
        if mesh.without_pipeline_axis(spec) != spec:
            warn(
                f"step at {line}: {what} of {name}: {spec} names {mesh.mpmd_axis_name!r}, the "
                "pipeline axis of the mesh, which shards nothing: each value is stored on the "
                "ranks of the stages that use it",
                line,
            )


def broadcast(given: Any, tree: Any, what: str) -> list[Any]:
    """One spec, sharding, set of ranks or None per leaf."""
    whose = "arguments" if what.startswith("in_") else "results"
    return check_prefix(what, given, tree, f"the step's {whose}")


def memories_of(given: Sequence[Any], what: str, names: Sequence[str]) -> list[str | None]:
    """The memories that shardings name; a spec or None names none."""
    return [
        memory_of(one, f"{what} of {name}") if isinstance(one, jax.sharding.Sharding) else None
        for one, name in zip(given, names, strict=False)
    ]


def given_memories(options: Options, args: Any, names: list[str]) -> list[str | None]:
    """For each leaf of the positional arguments, the memory in which in_shardings place
    it, or None."""
    taken = broadcast(options.in_specs, args, options.in_word)
    return memories_of(taken, options.in_word, names)


def spec_of(given: Any, what: str, mesh: MpmdMesh) -> PartitionSpec | None:
    spec = given if isinstance(given, PartitionSpec) else getattr(given, "spec", None)
    if given is None or isinstance(spec, PartitionSpec):
        return None if spec is None else mesh.without_pipeline_axis(spec)
    raise make_error(
        "sharding",
        f"{what}: expected PartitionSpecs, NamedShardings, MpmdShardings or None, found "
        f"{describe(given)}",
        wrong_type=True,
    )


def _check_spec(spec: PartitionSpec, aval: Any, mesh: Mesh, what: str) -> None:
    """Checks that axes exist, are used once and divide the shape, and that none is unreduced.
    Raises JaxppError("sharding")."""
    sizes = dict(mesh.shape)
    if spec.unreduced:
        raise make_error(
            "sharding",
            f"{what}: spec {spec} has unreduced axes {tuple(sorted(spec.unreduced))}; expected "
            "none: a step takes and returns sums, not their terms. Use jax.reshard in the step",
        )
    parts = axes_by_dimension(spec)
    if len(parts) > len(aval.shape):
        raise make_error(
            "sharding",
            f"{what}: spec {spec} has {len(parts)} entries; expected at most "
            f"{len(aval.shape)}, one per dimension of the array's shape {tuple(aval.shape)}",
        )
    used = [axis for axes in parts for axis in axes]
    for dim, axes in enumerate(parts):
        for axis in axes:
            if axis not in sizes:
                raise make_error(
                    "sharding",
                    f"{what}: spec {spec} names axis {axis!r}; expected one of the mesh's "
                    f"axes {tuple(sizes)}",
                )
            if used.count(axis) > 1:
                raise make_error(
                    "sharding",
                    f"{what}: spec {spec} names axis {axis!r} {used.count(axis)} times; "
                    "expected each axis at most once",
                )
        ways = math.prod(sizes[a] for a in axes)
        if aval.shape[dim] % ways:
            raise make_error(
                "sharding",
                f"{what}: spec {spec} divides dimension {dim} of {tuple(aval.shape)} into "
                f"{ways}; expected a multiple of {ways}, found {aval.shape[dim]}",
            )


def check_specs(
    specs: Sequence[PartitionSpec | None],
    avals: Sequence[Any],
    names: Sequence[str],
    mesh: Mesh,
    what: str,
) -> None:
    """Checks the specs of leaves, if they have one, of these types."""
    for spec, aval, name in zip(specs, avals, names, strict=True):
        if spec is not None:
            _check_spec(spec, aval, mesh, f"{what} of {name}")


def _ranks_of(given: Any, mesh: MpmdMesh) -> tuple[int, ...] | None:
    """The ranks on which a result must stay."""
    if not isinstance(given, MpmdSharding):
        return None
    wrong = [r for r in given.mesh_ids if r >= mesh.mpmd_dim]
    if wrong:
        raise make_error(
            "sharding",
            f"out_shardings: expected ranks below {mesh.mpmd_dim}, found an MpmdSharding of "
            f"ranks {list(given.mesh_ids)}",
        )
    return tuple(sorted(given.mesh_ids))


def result_ranks(
    given: Sequence[Any], results: Any, names: Sequence[str], options: Options
) -> list[tuple[int, ...] | None]:
    """For each leaf of the results the ranks on which it must stay, or None."""
    found = [_ranks_of(sharding, options.mesh) for sharding in given]
    if options.out_ranks is None:
        return found
    asked = broadcast(options.out_ranks, results, "out_refs")
    every = range(options.mesh.mpmd_dim)
    for i, (name, ranks) in enumerate(zip(names, asked, strict=True)):
        is_set = isinstance(ranks, Set | Ranks)
        if not is_set or not ranks or not all(r in every for r in ranks):
            raise make_error(
                "sharding",
                f"{options.who}: out_refs of {name}: expected a set of ranks below "
                f"{len(every)}, found {describe(ranks)}",
                wrong_type=not is_set,
            )
        wanted = tuple(sorted(map(int, ranks)))
        if found[i] not in (None, wanted):
            raise make_error(
                "sharding",
                f"{options.who}: out_refs of {name}: expected the ranks of its out_shardings, "
                f"{found[i]}, found {wanted}",
            )
        found[i] = wanted
    return found


def spec_of_leaf(mesh: MpmdMesh, leaf: Any) -> PartitionSpec | None:
    """The existing sharding of an argument, if its mesh has a rank's axes."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, MpmdSharding):
        return sharding.spec_in_rank if sharding.mpmd_mesh == mesh else None
    if not isinstance(sharding, NamedSharding):
        return None
    sizes = {(a, n) for a, n in sharding.mesh.shape.items() if a != mesh.mpmd_axis_name}
    if not any(sizes <= set(own.shape.items()) for own in mesh.unequal or mesh.unstack[:1]):
        return None
    return mesh.without_pipeline_axis(sharding.spec)
