"""From a traced step to the planner's graph.

The step's jaxpr is walked once, and once more if constants become arguments. Calls that only
group equations (`jit`, `remat`, `custom_jvp`, ...) are inlined, so that the planner can place
each equation separately. Inlining keeps the semantics: a rematerialised backward stays behind a
barrier, so that XLA does not merge it with the forward. Any other equation becomes one op.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from jaxpp import _core
from jaxpp.errors import make_error
from jaxpp.jax_internals.jaxprs import drop_unused_outputs, is_transposed, jaxprs_in
from jaxpp.jax_internals.lines import user_line
from jaxpp.operations import Add, kind_of
from jaxpp.placements import physical_type
from jaxpp.trace.bodies import is_recomputation, returned_operands
from jaxpp.trace.builder import GraphBuilder
from jaxpp.trace.cheap import Patterns, is_cheap
from jaxpp.trace.cross import place_p
from jaxpp.trace.custom_calls import check_equation
from jaxpp.trace.front import FrontLoop, Graph, Operand
from jaxpp.trace.gather import Gather, WeightGathers
from jaxpp.trace.inlining import (
    inlined,
    loop_or_mark_in,
    num_splits,
    refuse_hidden_marks,
    splits_for_marks,
)
from jaxpp.trace.loop import loop_p
from jaxpp.trace.marks import MARKS, holds_marks, mark_p, mark_tangent_p
from jaxpp.trace.memories import (
    is_in_host_memory,
    is_move,
    is_put,
    memory_after,
    puts_of_one,
    with_moves_around,
    without_memory,
)
from jaxpp.trace.recomputation import CutRecomputation
from jaxpp.trace.splitting import (
    IN_TWO_PARTS,
    Branch,
    Conditional,
    PartOp,
    Splitter,
)
from jaxpp.trace.terms import is_sum
from jaxpp.trace.written import Place, task_p, transfer_p

__all__ = ["build_graph"]


class _Walker(GraphBuilder):
    """Walks jaxprs and adds to the graph."""

    def __init__(
        self,
        name: str,
        ranks: int,
        loop_length: Callable[[Any, int], int],
        gathers: Mapping[int, Gather],
    ) -> None:
        super().__init__(name, ranks)
        self.loop_length = loop_length
        self.gathers = WeightGathers(gathers, self._add_own) if gathers else None
        self.loops: list[FrontLoop] = []
        self.specs: dict[int, PartitionSpec] = {}
        self.sums: dict[int, Any] = {}  # the operands of sums that the planner may regroup
        self.moved: set[int] = set()  # values that the step has moved to a memory
        self.patterns = Patterns()  # of the loop whose body is being walked
        # By the uid of a mark: the stages whose backward has not begun.
        self.mark_stages: dict[int, list[int]] = {}
        self.num_marks = 0
        self.loop_title: str | None = None  # title of the loop whose body is being walked
        self.recomputing = False
        self.in_backward = False  # inside a call that autodiff generated
        self.splitter = Splitter()
        # For each equation of IN_TWO_PARTS in the body, the results that backward marks need.
        self.splits_for_marks: Iterator[list[bool]] = iter(())
        self.first_results: dict[Any, list[bool]] = {}  # by parameters: what marks need

    def collect_consts(self, jaxpr: ClosedJaxpr | Jaxpr) -> None:
        """Finds the constants of all inlined calls, because arguments precede ops."""
        if isinstance(jaxpr, ClosedJaxpr):
            for const in jaxpr.consts:
                self.add_const(const)
            jaxpr = jaxpr.jaxpr
        for eqn in jaxpr.eqns:
            called = eqn.params["body"] if eqn.primitive is loop_p else inlined(eqn)
            if called is not None:
                self.collect_consts(called)
            for branch in eqn.params.get("branches", ()):
                self.collect_consts(branch)

    # --- Equations ---

    def walk(self, jaxpr: ClosedJaxpr | Jaxpr, args: Sequence[Operand]) -> list[Operand]:
        env: dict[Var, Operand] = {}
        if isinstance(jaxpr, ClosedJaxpr):
            consts = [self.add_const(c) for c in jaxpr.consts]
            env.update(zip(jaxpr.jaxpr.constvars, consts, strict=True))
            jaxpr = jaxpr.jaxpr
        env.update(zip(jaxpr.invars, args, strict=True))
        self.patterns.find_transposes(jaxpr)

        def read(atom: Any) -> Operand:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            outs = self.add_eqn(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def add_eqn(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        if eqn.primitive is loop_p:
            return self.add_loop(eqn, operands)
        if eqn.primitive is task_p:
            return self.add_task(eqn, operands)
        if eqn.primitive is transfer_p:
            return self.add_transfer(eqn, operands)
        if eqn.primitive in MARKS:
            return self.add_mark(eqn, operands)
        if eqn.primitive.name == "stop_gradient":
            return operands  # an op would copy a frozen weight once a step
        called, sharded = inlined(eqn), operands
        if called is None and self.outside is not None and self.gathers:
            for from_shards in (self.gathers.of_shards, self.gathers.reduced):
                if (result := from_shards(eqn, operands)) is not None:
                    return [result]
            # An op that takes part of a weight does not need all of it.
            if not self.takes_by_index(eqn.primitive.name, operands):
                eqn, sharded = self.gathers.cast_before(eqn, operands)
                eqn, operands = self.gathers.gather(eqn, sharded)
        if called is not None:
            outer, self.in_backward = self.in_backward, self.is_backward(eqn)
            add = self.add_recomputation if is_recomputation(eqn) else self.add_called
            outs = add(eqn, called, operands)
            self.in_backward = outer
            return outs
        moving = with_moves_around(eqn) if eqn.primitive.name == "scan" else None
        if moving is not None:
            return self.walk(moving, operands)
        if eqn.primitive.name in IN_TWO_PARTS and self.outside is not None:
            for_marks = next(self.splits_for_marks)
            return self.add_in_two_parts(eqn, operands, sharded, for_marks)
        if self.outside is None and not loop_or_mark_in(eqn):
            # A platform may be unable to compile the branches of other platforms.
            if eqn.primitive.name == "cond" and eqn.params.get("branches_platforms") is None:
                return self.add_conditional(eqn, operands)
            if eqn.primitive.name in ("scan", "while") and not eqn.effects:
                return self.add_parts(eqn, operands, self.splitter.by_result(eqn))
        outs = self.add_call(eqn, operands)
        if self.outside is not None and self.gathers:
            self.gathers.note_elementwise(eqn, sharded, outs, self._is_outside)
        return outs

    def add_called(
        self, eqn: JaxprEqn, called: ClosedJaxpr | Jaxpr, operands: list[Operand]
    ) -> list[Operand]:
        return self.walk(called, operands)

    def is_backward(self, eqn: JaxprEqn) -> bool:
        """Whether autodiff generated the equation or the call that contains it."""
        return self.in_backward or is_transposed(eqn)

    def add_conditional(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """Inlines a cond outside the loops, so that each equation of its branches is placed
        separately."""
        index, *rest = operands
        conditional = Conditional(index, len(eqn.params["branches"]))
        around = self.branches
        cases = []
        for number, branch in enumerate(eqn.params["branches"]):
            self.branches = (*around, Branch(conditional, number))
            cases.append(self.walk(branch, rest))
        self.branches = around
        chosen = []
        for out, *values in zip(eqn.outvars, *cases, strict=True):
            same = all(v is values[0] or v == values[0] for v in values)
            if same and isinstance(values[0], int):
                chosen.append(values[0])
            else:
                chosen.append(self.add_choice(eqn, conditional, values, out.aval))
        return chosen

    def add_choice(
        self, eqn: JaxprEqn, conditional: Conditional, values: list[Operand], aval: Any
    ) -> int:
        """Adds the choice between the results of branches, which a task makes in device
        memory."""
        taken = [self.moved_to("device", v, aval) if isinstance(v, int) else v for v in values]
        around, self.branches = self.branches, (*self.branches, Branch(conditional, None))
        chosen = self._add(eqn, jax.lax.select_n_p, {}, taken, [aval])
        self.branches = around
        if is_in_host_memory(aval):
            chosen = self.moved_to("pinned_host", chosen, aval)
            self.moved.add(chosen)
        return chosen

    def add_in_two_parts(
        self,
        eqn: JaxprEqn,
        operands: list[Operand],
        sharded: list[Operand],
        for_marks: list[bool],
    ) -> list[Operand]:
        """Adds an equation of IN_TWO_PARTS in a body. In a backward pass it is split: the
        results that the previous stage waits for, and the rest, which may run later.
        `sharded`: the operands before weights were gathered."""
        backward = self.is_backward(eqn)
        if not backward and not self.recomputing:
            return self.add_forward(eqn, operands, sharded)
        parts = self.splitter.in_two(eqn, self._first_results(eqn, for_marks))
        if parts is None:
            return self.add_call(eqn, operands)
        return self.add_parts(eqn, operands, parts, _core.FLAG_BACKWARD if backward else 0)

    def add_forward(
        self, eqn: JaxprEqn, operands: list[Operand], sharded: list[Operand]
    ) -> list[Operand]:
        """Adds an equation of IN_TWO_PARTS of a forward pass. The backward pass takes operands,
        and results computed from weights alone, from outside the loop, so microbatches do not
        keep copies of them."""
        returned = {k: sharded[n] for k, n in returned_operands(eqn).items()}
        if not returned:
            return self.add_by_origin(eqn, operands)
        used = [k not in returned for k in range(len(eqn.outvars))]
        taken, rest = drop_unused_outputs(eqn, used)
        made: dict[int, Operand] = {}
        if rest is not None:
            outs = self.add_by_origin(
                rest, [o for o, t in zip(operands, taken, strict=True) if t]
            )
            made = dict(zip(map(id, rest.outvars), outs, strict=True))
        return [
            returned[k] if k in returned else made[id(v)] for k, v in enumerate(eqn.outvars)
        ]

    def add_by_origin(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """Adds an equation of a forward pass, split by the operands that its results need."""
        gathers = self.gathers
        again = [gathers is not None and gathers.in_each_task(o) for o in operands]
        fixed = [not isinstance(o, int) or self._is_outside(o) for o in operands]
        outside = [f and not a for f, a in zip(fixed, again, strict=True)]
        cheap = [f or a for f, a in zip(fixed, again, strict=True)]
        own, parts = self.splitter.by_origin(eqn, outside, cheap)
        if not own and len(parts) < 2:
            return self.add_call(eqn, operands)
        return self.add_parts(eqn, operands, parts, cheap=own)

    def _first_results(self, eqn: JaxprEqn, for_marks: list[bool]) -> list[bool]:
        """Which results of an equation are computed first. No stage waits for the first stage,
        whose equations are split like equal ones of later stages, so that they share code."""
        key = eqn.primitive, self.keys.of(eqn.params)
        if any(for_marks):
            self.first_results[key] = for_marks
        return self.first_results.get(key, for_marks)

    def add_parts(
        self,
        eqn: JaxprEqn,
        operands: list[Operand],
        parts: Sequence[PartOp],
        flags: int = 0,
        cheap: Sequence[PartOp] = (),
    ) -> list[Operand]:
        """Adds an equation as several ops. `cheap`: parts that each task computes itself."""
        refuse_hidden_marks(eqn)
        check_equation(eqn)
        handed: dict[int, Operand] = dict(enumerate(operands))
        results: dict[int, Operand] = {}
        num_operands = len(operands)
        of_each = [(op, flags | _core.FLAG_CHEAP) for op in cheap]
        of_each += [(op, flags) for op in parts]
        for op, of_part in of_each:
            taken = [handed[k] for k in op.part.operands]
            first = self._add(
                eqn, eqn.primitive, op.params, taken, op.avals, of_part, part=op.part
            )
            for k, result in enumerate(op.part.results):
                handed[num_operands + result] = first + k
                if result in op.own:
                    results[result] = first + k
        return [results[k] for k in range(len(eqn.outvars))]

    def add_recomputation(
        self, eqn: JaxprEqn, called: ClosedJaxpr | Jaxpr, operands: list[Operand]
    ) -> list[Operand]:
        """Inlines a rematerialised backward behind a barrier, or cut at its marks."""
        outer, self.recomputing = self.recomputing, True
        if self.outside is not None and holds_marks(eqn.params["jaxpr"]):
            outs = self.add_cut_recomputation(eqn, operands)
        else:
            if eqn.params.get("prevent_cse", True):
                operands = self.add_barrier(eqn, operands)
            outs = self.walk(called, operands)
        self.recomputing = outer
        return outs

    def add_cut_recomputation(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """Adds a rematerialised backward with marks in it, each part behind its own barrier.
        The barrier also keeps recomputed values on the rank of their part, so it is added
        whatever `prevent_cse` says."""
        cut = CutRecomputation(eqn.params["jaxpr"], inlined)
        numbers = [num_splits(item.eqn) for item in cut.items]
        splits = [list(itertools.islice(self.splits_for_marks, n)) for n in numbers]
        after = self.splits_for_marks
        values: dict[int, Operand] = dict(enumerate(operands))
        values.update((v, self.add_const(const)) for v, const in cut.consts.items())
        here = values  # the values as the part sees them
        passed: list[int] = []  # results of the mark before the part
        for part in range(cut.num_parts):
            behind = [*cut.operands_of(part), *passed]
            barred = self.add_barrier(eqn, [values[v] for v in behind])
            here = {**values, **dict(zip(behind, barred, strict=True))}
            values.update((v, here[v]) for v in passed)
            for item, item_splits in zip(cut.items, splits, strict=True):
                if part not in item.parts:
                    continue
                self.splits_for_marks = iter(item_splits)
                taken = [here[o] if isinstance(o, int) else o for o in item.operands]
                made = dict(zip(item.results, self.add_eqn(item.eqn, taken), strict=True))
                here.update(made)
                values.update(made)
                passed = item.results
        self.splits_for_marks = after
        return [here[o] if isinstance(o, int) else o for o in cut.results]

    def add_barrier(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        # A task that needs a pattern computes it anyway.
        values = [o for o in operands if isinstance(o, int) and o not in self.patterns]
        varying = [v for v in values if not self._is_outside(v)]
        if not varying:
            return operands
        avals = [self.avals[o] for o in varying]
        first = self._add(
            eqn, jax.lax.optimization_barrier_p, {}, varying, avals, flags=_core.FLAG_BACKWARD
        )
        behind = {o: first + k for k, o in enumerate(varying)}
        return [behind.get(o, o) if isinstance(o, int) else o for o in operands]

    def add_move(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """Adds a `device_put` to another memory as one op per array. It computes nothing:
        the type of its result contains the memory."""
        outs: list[Operand] = []
        flags = _core.FLAG_BACKWARD if self.is_backward(eqn) else 0
        for k, (operand, out) in enumerate(zip(operands, eqn.outvars, strict=True)):
            memory = memory_after(eqn, k, user_line(eqn))
            primitive, params = without_memory(eqn, k)
            avals = [out.aval]
            outs.append(
                self._add(eqn, primitive, params, [operand], avals, flags, memories=[memory])
            )
        self.moved.update(o for o in outs if isinstance(o, int))
        return outs

    def result_in(self, value: int, memory: str | None, next_memory: str | None) -> int:
        """A result of the step in the memory that the user asked for. Without one, a result
        that the step computes gets the memory of the argument that it becomes; arguments,
        and values that the step moved, stay where they are."""
        if memory is None and value not in self.moved and value >= self.num_args:
            memory = next_memory
        return value if memory is None else self.moved_to(memory, value, self.avals[value])

    def moved_to(self, memory: str, value: int, aval: Any) -> int:
        """The value in a memory; adds a move if it is in another one."""
        if self.memories.get(value, "device") == memory:
            return value
        return self._add(None, jax.lax.copy_p, {}, [value], [aval], memories=[memory])

    def add_call(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        if is_move(eqn):
            return self.add_move(eqn, operands)
        if is_put(eqn) and len(operands) > 1:
            puts = zip(puts_of_one(eqn), operands, strict=True)
            return [out for put, o in puts for out in self.add_call(put, [o])]
        runs_others = bool(jaxprs_in(eqn.params))
        if runs_others:
            refuse_hidden_marks(eqn)
        check_equation(eqn)
        part = self.gathers is not None and self.gathers.is_part(eqn.primitive, operands)
        pattern = self.outside is not None and self.patterns.is_made_by(
            eqn, operands, self._is_outside
        )
        cheap = part or pattern or (not runs_others and is_cheap(eqn))
        flags = _core.FLAG_CHEAP if cheap else 0
        if self.is_backward(eqn):
            flags |= _core.FLAG_BACKWARD
        if eqn.effects:
            flags |= _core.FLAG_EFFECT
        avals = [v.aval for v in eqn.outvars]
        values = all(isinstance(o, int) for o in operands)
        regroups = not pattern and is_sum(eqn) and values and self._may_regroup(eqn)
        regroups = regroups and self._on_devices(operands)
        kind = _core.OP_ADD if regroups else _core.OP_CALL
        if eqn.primitive is place_p and self.outside is None:
            kind = _core.OP_PLACE
        first = self._add(eqn, eqn.primitive, eqn.params, operands, avals, flags, kind)
        if regroups:
            self.sums[first] = operands
        outs: list[Operand] = list(range(first, first + len(avals)))
        if pattern:
            self.patterns.add(range(first, first + len(avals)))
        if part and self.gathers is not None:
            self.gathers.parts.update(outs)
        return outs

    def add_task(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """Adds a task that the user wrote."""
        for value in operands:
            if isinstance(value, int) and value in self.const_values.values():
                self.specs[value] = PartitionSpec()
        return self._add_written(eqn, eqn.params, operands)

    def _add_written(
        self, eqn: JaxprEqn, params: dict[str, Any], operands: list[Operand]
    ) -> list[Operand]:
        avals = params["jaxpr"].out_avals
        flags = _core.FLAG_EFFECT if eqn.effects else 0
        options = {"flags": flags, "kind": _core.OP_TASK, "ranks": params["ranks"]}
        options["memories"] = [place.memory for place in params["out_places"]]
        first = self._add(eqn, task_p, params, operands, avals, **options)
        specs = (place.spec for place in params["out_places"])
        self.specs.update(zip(range(first, first + len(avals)), specs, strict=True))
        return list(range(first, first + len(avals)))

    def add_transfer(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        """The planner sends a value to its users; if it is sharded differently there, a
        task reshards it."""
        reshards = eqn.params["reshards"]
        return [
            operand if params is None else self._add_written(eqn, params, [operand])[0]
            for operand, params in zip(operands, reshards, strict=True)
        ]

    def add_mark(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        if self.outside is None or eqn.primitive is mark_tangent_p:
            return operands  # outside a loop a mark has no effect
        uid = eqn.params["uid"]
        if eqn.primitive is mark_p:
            stage, kind = self.num_marks, _core.OP_MARK
            self.num_marks += 1
            self.mark_stages.setdefault(uid, []).append(stage)
        else:
            # A mark may belong to several stages (if a function is called for each of
            # them). The backward reaches them in reverse order.
            open_stages = self.mark_stages.get(uid)
            if not open_stages:
                return operands
            stage, kind = open_stages.pop(), _core.OP_MARK_BACKWARD
        values = [o for o in operands if isinstance(o, int)]
        avals = [self.avals[o] for o in values]
        first = self._add(eqn, eqn.primitive, eqn.params, values, avals, 0, kind, stage)
        self.constants.begin_stage()
        marked = {o: first + k for k, o in enumerate(values)}
        return [marked[o] if isinstance(o, int) else o for o in operands]

    def add_loop(self, eqn: JaxprEqn, operands: list[Operand]) -> list[Operand]:
        params = eqn.params
        title = params["title"]
        where = title.rpartition(" at ")[2]
        if params["mistake"]:
            raise make_error("stage-marks", f"{title}: {params['mistake']}")
        if self.outside is not None:
            raise make_error(
                "unsupported",
                f"{title} is inside the {self.loop_title}; expected a single loop over "
                "microbatches around the stages, found two.\n"
                "Use jax.lax.scan or jax.lax.map for the inner one.",
            )
        body: ClosedJaxpr = params["body"]
        schedule = params["schedule"]
        core_name = getattr(schedule, "core_name", None)
        stages = getattr(schedule, "num_stages", 0)
        length = self.loop_length(schedule, params["length"])
        index = self.core.begin_loop(length, stages, core_name, where)
        self.avals[index] = jax.core.ShapedArray((), np.dtype(np.int32))
        self.outside, self.loop_title = set(range(index)), title
        self.from_index, self.batches = {index}, set()
        self.patterns.begin_loop(index)
        self.num_marks, self.mark_stages = 0, {}
        self.constants.begin_stage()
        if self.gathers is not None:
            self.gathers.begin_loop(index)
        splits: list[list[bool]] = []
        splits_for_marks(body.jaxpr, [False] * len(body.jaxpr.outvars), splits)
        self.splits_for_marks = reversed(splits)
        outs = [self.as_value(o) for o in self.walk(body, [*operands, index])]
        operations, value_avals = list(params["operations"]), list(body.out_avals)
        for k, operation in enumerate(operations):
            if type(operation) is Add and operation.dtype is not None:
                outs[k] = self._converted(outs[k], operation.dtype)
                operations[k], value_avals[k] = Add(), self.avals[outs[k]]
        self.outside = None
        for name, out in zip(params["names"], outs, strict=True):
            if out in self.memories:
                raise make_error(
                    "unsupported",
                    f"{title}: {name}: expected a value in device memory, where the loop "
                    f"reduces it, found one in {self.memories[out]}; move it after the loop "
                    "with jax.device_put",
                )
        state_avals = [v.aval for v in eqn.outvars]
        kinds = [kind_of(o) for o in operations]
        first = self.core.end_loop(kinds, outs, [physical_type(a) for a in state_avals])
        self._define(first, state_avals)
        self.loops.append(
            FrontLoop(
                params["length"],
                schedule,
                tuple(operations),
                value_avals,
                self.num_ops,
                index,
                outs,
                first,
                params["names"],
                self.num_marks,
                where or "?",
                self.batches,
            )
        )
        self.num_ops += 1
        return list(range(first, first + len(state_avals)))

    def _converted(self, value: int, dtype: Any) -> int:
        """A loop's result in the dtype of its sum. Terms of a sum over stages are converted, so
        that each stage adds up its own terms."""
        aval = self.avals[value]
        if aval.dtype == dtype:
            return value
        flags = _core.FLAG_BACKWARD if value in self.transposed else 0
        terms = self.sums.get(value)
        if terms is None:
            params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
            primitive, avals = jax.lax.convert_element_type_p, [aval.update(dtype=dtype)]
            return self._add(None, primitive, params, [value], avals, flags)
        terms = [self._converted(term, dtype) for term in terms]
        avals = [self.avals[terms[0]]]
        return self._add(None, jax.lax.add_p, {}, terms, avals, flags, _core.OP_ADD)

    def _may_regroup(self, eqn: JaxprEqn) -> bool:
        """Under a condition, the planner only treats sums of scalars (norms) as sums: they are
        computed regardless of the condition."""
        return not self.branches or eqn.outvars[0].aval.shape == ()

    def _on_devices(self, operands: Sequence[Operand]) -> bool:
        return not any(isinstance(o, int) and o in self.memories for o in operands)


def build_graph(
    name: str,
    ranks: int,
    closed_jaxpr: ClosedJaxpr,
    donated: Sequence[bool],
    arg_names: Sequence[str],
    out_names: Sequence[str],
    next_args: Sequence[int],
    out_ranks: Sequence[Sequence[int] | None],
    arg_memories: Sequence[str],
    out_memories: Sequence[str | None],
    loop_length: Callable[[Any, int], int] = lambda schedule, length: length,
    gathers: Mapping[int, Gather] = types.MappingProxyType({}),
    places: Sequence[Place] | None = None,
) -> Graph:
    """Builds the graph of a traced step.

    Args:
      name: for messages and dumps.
      ranks: the number of pipeline ranks.
      closed_jaxpr: the step's jaxpr on flat arguments.
      donated, arg_names: one entry per argument.
      out_names: one entry per result.
      next_args: for each result the argument that it becomes in the next step, or NONE.
      out_ranks: for each result the ranks that it stays on, ascending; None: where it is
        computed.
      arg_memories: the memory of each argument.
      out_memories: the memory of each result; None: as `result_in` says.
      loop_length: the number of microbatches to plan for a loop, from its schedule and its
        length.
      gathers: how a loop gathers the weights that it reads, by their values.
      places: the ranks of the arguments of a program written by hand; None: the planner places
        them.

    Raises:
      JaxppError: a loop in a loop, a mark under a control-flow primitive.
    """
    jaxpr = closed_jaxpr.jaxpr
    ranks_of_args = [place.ranks for place in places] if places else [()] * len(arg_names)

    def walk(constants: Mapping[int, Mapping[int, Literal]]) -> tuple[_Walker, Any, Any]:
        builder = _Walker(name, ranks, loop_length, gathers)
        args = [
            builder.add_arg(v.aval, d, n, m, r)
            for v, d, n, m, r in zip(
                jaxpr.invars, donated, arg_names, arg_memories, ranks_of_args, strict=True
            )
        ]
        if places is not None:
            builder.specs.update(zip(args, (place.spec for place in places), strict=True))
        builder.collect_consts(closed_jaxpr)
        builder.lift(constants)
        return builder, args, builder.walk(closed_jaxpr, args)

    builder, args, outs = walk({})
    if constants := builder.constants.differing():
        builder, args, outs = walk(constants)
    ends = zip(outs, out_names, next_args, out_ranks, out_memories, strict=True)
    found = []
    for out, out_name, number, left_on, memory in ends:
        next_arg, next_memory = _core.NONE, None
        if number != _core.NONE:
            next_arg, next_memory = args[number], arg_memories[number]
        value = builder.result_in(builder.as_value(out), memory, next_memory)
        if next_memory not in (None, builder.memories.get(value, "device")):
            next_arg = _core.NONE
        found.append((value, out_name, next_arg, left_on))
    for value, out_name, next_arg, left_on in found:
        builder.core.add_output(value, out_name, next_arg)
        if left_on is not None:
            builder.core.leave_output(left_on)
    builder.core.finish()
    return Graph(
        builder.core,
        builder.ops,
        builder.loops,
        builder.avals,
        builder.consts,
        len(args),
        builder.num_ops,
        builder.specs,
        builder.gathers.gathered if builder.gathers else set(),
    )
