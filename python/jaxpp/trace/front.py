"""The data of a traced step that JAX needs to lower parts of its graph."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

from jax.extend.core import JaxprEqn, Literal
from jax.sharding import PartitionSpec

from jaxpp import _core
from jaxpp.operations import Operation
from jaxpp.trace.splitting import Branch, Part

__all__ = ["FrontLoop", "FrontOp", "Graph", "Operand"]

# An operand of an op: a value id of the graph, or a constant of the equation.
Operand: TypeAlias = int | Literal


@dataclasses.dataclass(eq=False, slots=True)
class FrontOp:
    """What an op of the graph computes: `primitive.bind(*operands, **params)`."""

    primitive: Any
    params: dict[str, Any]
    operands: tuple[Operand, ...]
    first_output: int
    num_outputs: int
    code: int  # equal for ops that compute the same, apart from their branches and parts
    eqn: JaxprEqn | None = None  # the JAX settings for its evaluation
    branches: tuple[Branch, ...] = ()  # the conditions under which it runs, outermost first
    part: Part | None = None  # for an equation that was split into several ops

    @property
    def is_choice(self) -> bool:
        """Whether the op selects between results of branches, its operands."""
        return bool(self.branches) and self.branches[-1].number is None


@dataclasses.dataclass
class FrontLoop:
    """The data of a loop that the planner does not need."""

    length: int
    schedule: Any
    operations: tuple[Operation, ...]
    value_avals: list[Any]  # one microbatch's values, one per result
    op: int  # its id in the graph
    index: int  # value ids: the microbatch number,
    results: list[int]  # the results of one microbatch,
    first_output: int  # and the first reduced result
    names: tuple[str, ...]  # the names of the results: "result[1]['w']"
    num_marks: int  # the number of stages that the body ends
    where: str  # the line of the treduce
    batches: set[int]  # the values that the microbatch number slices


@dataclasses.dataclass
class Graph:
    """The planner's graph and, by its ids, the data that JAX needs to lower parts of it."""

    core: _core.Graph
    ops: dict[int, FrontOp]
    loops: list[FrontLoop]
    avals: dict[int, Any]  # by value id
    consts: list[Any]  # trailing arguments that the user does not pass
    num_args: int  # number of arguments from the user; values 0 .. are all arguments
    num_ops: int
    specs: dict[int, PartitionSpec]  # of values of tasks that the user wrote
    gathered: set[int]  # arguments that a loop gathers, sharded over the batch's devices
