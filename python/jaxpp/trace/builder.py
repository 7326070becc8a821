"""The planner's graph while it is built, and what JAX needs to lower parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from jaxpp import _core
from jaxpp.jax_internals.jaxprs import jaxprs_in, settings_key
from jaxpp.jax_internals.lines import user_line
from jaxpp.mesh import memory_of
from jaxpp.placements import physical_type
from jaxpp.trace.copies import first_row
from jaxpp.trace.front import FrontOp, Operand
from jaxpp.trace.keys import ParamKeys, literal_key
from jaxpp.trace.literals import StageConstants
from jaxpp.trace.loop import closed_over_error
from jaxpp.trace.splitting import Branch, Part
from jaxpp.trace.work import flops
from jaxpp.trace.zeros import Zeros

__all__ = ["GraphBuilder"]

# Primitives that are linear in each operand if the others are fixed.
_LINEAR = {
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "mul",
    "neg",
    "reshape",
    "squeeze",
    "transpose",
}


class GraphBuilder:
    """Adds arguments, constants and ops to the graph, by the number of each value and op."""

    def __init__(self, name: str, ranks: int) -> None:
        self.core = _core.Graph(name, ranks)
        self.ops: dict[int, FrontOp] = {}
        # Numbers of equations, equal for those that compute the same.
        self.codes: dict[Any, int] = {}
        self.keys = ParamKeys()
        self.avals: dict[int, Any] = {}
        self.num_ops = 0
        self.transposed: set[int] = set()  # values that autodiff computes
        self.zeros = Zeros()
        self.memories: dict[int, str] = {}  # the memories of values outside device memory
        self.num_args = 0  # arguments are the first values
        self.consts: list[Any] = []
        self.const_values: dict[int, int] = {}  # id of a constant -> its value
        self.constants = StageConstants()
        self.outside: set[int] | None = None  # in a body: loop-invariant values
        # In a body: the loop's index and values that depend on it alone, and the values that
        # the index slices.
        self.from_index: set[int] = set()
        self.batches: set[int] = set()
        self.branches: tuple[Branch, ...] = ()  # enclosing conditions

    def add_arg(
        self, aval: Any, donated: bool, name: str, memory: str, ranks: Sequence[int] = ()
    ) -> int:
        value = self.core.add_arg((*physical_type(aval), memory), donated, name)
        if ranks:
            self.core.give_arg(ranks)
        self._define(value, [aval], memory)
        self.num_args += 1
        return value

    def add_const(self, const: Any) -> int:
        """Adds a constant that the step closes over as an argument that never changes."""
        if isinstance(const, jax.core.Tracer):
            raise closed_over_error(const)
        if id(const) not in self.const_values:
            aval = jax.typeof(const)
            name = f"constant {len(self.consts)}"
            memory = memory_of(getattr(const, "sharding", None), name)
            self.const_values[id(const)] = self.add_arg(aval, False, name, memory)
            self.consts.append(const)
        return self.const_values[id(const)]

    def lift(self, constants: Mapping[int, Mapping[int, Literal]]) -> None:
        """Makes arguments of constants, which are given by op and position."""
        arrays: dict[Any, Any] = {}
        for op, own in constants.items():
            for k, literal in own.items():
                array = np.asarray(literal.val, literal.aval.dtype)
                array = arrays.setdefault(literal_key(literal), array)
                self.constants.replace(op, k, self.add_const(array))

    def _define(self, first: int, avals: Sequence[Any], memory: str = "device") -> None:
        for k, aval in enumerate(avals):
            self.avals[first + k] = aval
            if memory != "device":
                self.memories[first + k] = memory

    def _add(
        self,
        eqn: JaxprEqn | None,
        primitive: Any,
        params: dict[str, Any],
        operands: Sequence[Operand],
        avals: Sequence[Any],
        flags: int = 0,
        kind: int = _core.OP_CALL,
        attr: int = 0,
        part: Part | None = None,
        ranks: Sequence[int] = (),
        memories: Sequence[str] = (),
    ) -> int:
        operands = self.constants.replaced(self.num_ops, operands)
        values = [o for o in operands if isinstance(o, int)]
        if kind in (_core.OP_MARK, _core.OP_MARK_BACKWARD, _core.OP_PLACE):
            memories = [self.memories.get(v, "device") for v in values[: len(avals)]]
        else:
            memories = memories or ["device"] * len(avals)
        branches = () if kind in (_core.OP_ADD, _core.OP_PLACE) else self.branches
        indices = [branch.conditional.index for branch in branches]
        guards = [index for index in indices if isinstance(index, int)]
        types = [(*physical_type(a), m) for a, m in zip(avals, memories, strict=True)]
        opaque = kind in (_core.OP_CALL, _core.OP_TASK)
        cost = flops(eqn, params) if eqn and opaque else 0.0
        name = params["name"] if kind == _core.OP_TASK else primitive.name
        where = user_line(eqn) if eqn else None
        if opaque and jaxprs_in(params):
            flags |= _core.FLAG_BODY
        if kind == _core.OP_CALL and len(avals) == 1 and not guards and part is None:
            row = first_row(name, params, operands, self.avals, avals[0])
            if row is not None:
                flags, attr = flags | _core.FLAG_COPY, row
            if self.outside is not None and self._is_linear(name, operands, avals[0]):
                flags |= _core.FLAG_LINEAR
        makes_zeros = len(avals) == 1 and part is None and not branches
        if makes_zeros and self.zeros.is_made_by(primitive, operands):
            flags |= _core.FLAG_ZEROS
        # A task's computation does not depend on its ranks and name.
        of_task = {"jaxpr": params["jaxpr"]} if kind == _core.OP_TASK else None
        settings = settings_key(eqn) if eqn else None
        # Parts that are rejoined become the whole equation.
        whole = self.keys.of(part.whole.eqn.params) if part else None
        computed = (primitive, self.keys.of(of_task or params), settings, whole)
        code = self._code(computed, operands)
        if self.outside is not None and kind not in (_core.OP_MARK, _core.OP_MARK_BACKWARD):
            self.constants.note(self.num_ops, computed, operands)
        # Outside the loops, ranks need different parts of an equation, and share none.
        known = 0 if branches or (part and self.outside is None) else code
        first = self.core.add_op(
            kind, flags, attr, values + guards, types, cost, name, where, known, ranks
        )
        count, operands = len(avals), tuple(operands)
        self.ops[self.num_ops] = FrontOp(
            primitive, params, operands, first, count, code, eqn, branches, part
        )
        self.num_ops += 1
        if flags & _core.FLAG_ZEROS:
            self.zeros.add(first)
        if flags & _core.FLAG_BACKWARD:
            self.transposed.update(range(first, first + len(avals)))
        for k, (aval, own) in enumerate(zip(avals, memories, strict=True)):
            self._define(first + k, [aval], own)
        if self.outside is not None:
            self._note_origin(name, values, range(first, first + len(avals)))
        return first

    def _is_linear(self, name: str, operands: Sequence[Operand], out: Any) -> bool:
        """Whether an equation of a body is linear in each operand that depends on the
        microbatch."""
        assert self.outside is not None
        if name == "div":
            by = operands[1]
            if not isinstance(by, Literal) and by not in self.outside:
                return False
        elif name not in _LINEAR:
            return False
        dtypes = [out.dtype, *(self.avals[o].dtype for o in operands if isinstance(o, int))]
        return all(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes)

    def _note_origin(self, name: str, values: Sequence[int], results: range) -> None:
        """Records whether the results of an op in a body depend on the loop's index."""
        assert self.outside is not None
        if self.outside.issuperset(values):
            self.outside.update(results)
        elif self.from_index.issuperset(values):
            self.from_index.update(results)
        elif self.takes_by_index(name, values):
            self.batches.add(values[0])

    def takes_by_index(self, name: str, operands: Sequence[Operand]) -> bool:
        """Whether an op takes a part of its first operand by the loop's index."""
        indices = [o for o in operands[1:] if isinstance(o, int)]
        return name in ("dynamic_slice", "gather") and not self.from_index.isdisjoint(indices)

    def _code(self, computed: Any, operands: Sequence[Operand]) -> int:
        """A number that is the same for equations that compute the same."""
        literals = tuple([isinstance(o, Literal) and literal_key(o) for o in operands])
        return self.codes.setdefault((computed, literals), len(self.codes) + 1)

    def _is_outside(self, value: int) -> bool:
        return self.outside is None or value in self.outside

    def as_value(self, operand: Operand) -> int:
        """Returns the value of a result; if it is a constant, an op creates it."""
        if isinstance(operand, int):
            return operand
        aval = operand.aval
        params = {"new_dtype": aval.dtype, "weak_type": aval.weak_type, "sharding": None}
        primitive = jax.lax.convert_element_type_p
        return self._add(None, primitive, params, [operand], [aval], _core.FLAG_CHEAP)

    def _add_own(
        self,
        primitive: Any,
        params: dict[str, Any],
        operands: list[Operand],
        aval: Any,
        cheap: bool,
    ) -> int:
        """Adds an op that belongs to no equation. `aval`: the type of its result; None: as its
        first operand."""
        aval = self.avals[operands[0]] if aval is None else aval
        flags = _core.FLAG_CHEAP if cheap else 0
        return self._add(None, primitive, params, operands, [aval], flags)
