"""A planned step: what lowering, running, saving and explaining it need to know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from jaxpp import _core
from jaxpp.mesh import MpmdMesh, MpmdSharding, parted_sharding
from jaxpp.plan.costs import Collectives, CostSummary, cost_summary
from jaxpp.plan.sharding import Specs
from jaxpp.trace.boxes import Bounds
from jaxpp.trace.call import Static
from jaxpp.trace.front import Graph
from jaxpp.trace.stacked import parts_of_leaves

__all__ = ["Planned", "Traced"]


@dataclasses.dataclass
class Planned:
    """A step's plan with the types of its arguments and results, from a trace or a file."""

    mesh: MpmdMesh
    staged: _core.Staged
    specs: Specs
    plan: _core.Plan
    tree: Any
    out_tree: Any
    in_avals: list[Any]
    out_avals: list[Any]
    arg_names: list[str]
    donated: list[bool]
    # For each of the step's own arguments and results, where it is cut into parts.
    argument_bounds: list[Bounds | None]
    result_bounds: list[Bounds | None]
    consts: list[Any]  # the plan's trailing arguments, which the caller does not pass
    statics: list[Static]
    schedule_text: str  # each schedule's name and sizes, which processes compare
    notes: list[str]  # what `explain` says after the page of `jaxpp plan`, by paragraph

    @property
    def text(self) -> str:
        """The programs of all ranks."""
        return self.plan.text()

    @property
    def program_text(self) -> str:
        """The whole program, printed like a jaxpr."""
        mesh = self.mesh.lowering_mesh()
        return self.plan.program_text(lambda v: str(NamedSharding(mesh, self.specs.of(v))))

    @property
    def in_shardings(self) -> Any:
        """The shardings of the arguments: (args, kwargs) with an `MpmdSharding` per array.

        An unused argument is placed on the first rank.
        """
        return self.tree.unflatten(self._shardings(self.staged.args(), self.argument_bounds))

    @property
    def out_shardings(self) -> Any:
        """The shardings of the results: their tree with an `MpmdSharding` per array."""
        return self.out_tree.unflatten(
            self._shardings(self.staged.outputs(), self.result_bounds)
        )

    @property
    def out_info(self) -> Any:
        """The shapes, dtypes and shardings of the results."""
        shardings = self._shardings(self.staged.outputs(), self.result_bounds)
        parts = parts_of_leaves(self.result_bounds)
        structs = []
        for cut, numbers, sharding in zip(self.result_bounds, parts, shardings, strict=True):
            aval = self.out_avals[numbers[0]]
            shape = cut.whole_shape(aval.shape) if cut else aval.shape
            structs.append(jax.ShapeDtypeStruct(shape, aval.dtype, sharding=sharding))
        return self.out_tree.unflatten(structs)

    def explain(self, collectives: Collectives = ()) -> str:
        """A page on what the step will do. Compiled tasks show their collectives."""
        return "\n\n".join([self.plan.explain(list(collectives)).rstrip(), *self.notes])

    def cost_summary(self, collectives: Collectives = ()) -> CostSummary:
        """The tasks, floating-point operations and bytes of a step, per rank."""
        return cost_summary(self.plan.costs(list(collectives)))

    def _shardings(
        self, placed: Sequence[_core.PlacedValue], bounds: Sequence[Bounds | None]
    ) -> list[MpmdSharding]:
        """One entry per leaf; a leaf may have several values, its parts."""
        found = []
        for cut, numbers in zip(bounds, parts_of_leaves(bounds), strict=True):
            parts = placed[numbers.start : numbers.stop]
            spec, kind = self.specs.of(parts[0].value), parts[0].memory
            if cut:
                ranks = tuple(sorted({rank for part in parts for rank in part.ranks}))
                found.append(
                    parted_sharding(self.mesh, ranks, spec, cut.axis, cut.ends[-1], kind)
                )
            else:
                found.append(MpmdSharding(self.mesh, parts[0].ranks or [0], spec, kind))
        return found


@dataclasses.dataclass
class Traced(Planned):
    """A step that is traced, split, placed and scheduled, before anything is compiled."""

    closed: ClosedJaxpr  # the traced step
    graph: Graph
    schedules: list[_core.Schedule]
    proof: str  # the checker's report on the plan
