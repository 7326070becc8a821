"""Stage marks, which end stages, and the diagnosis of mistakes in their use."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, batching, mlir

from jaxpp.errors import check_arrays, counted, here, make_error, shorten
from jaxpp.jax_internals.jaxprs import (
    drop_unused_passengers,
    is_differentiated,
    jaxprs_in,
    never_recompute,
)
from jaxpp.jax_internals.lines import line_of, user_frames

__all__ = [
    "MARKS",
    "calls_marks",
    "find_mistake",
    "first_mark",
    "holds_marks",
    "mark_backward_p",
    "mark_p",
    "mark_stage_end",
    "mark_tangent_p",
    "collecting_marks",
    "pipeline_enter_stage",
]

# --- The primitives ---------------------------------------------------------------------

mark_p = Primitive("stage_mark")  # ends a stage's forward
mark_tangent_p = Primitive("stage_mark_tangent")  # between a mark and its transpose
mark_backward_p = Primitive("stage_mark_backward")  # begins the stage's backward
MARKS = {mark_p, mark_tangent_p, mark_backward_p}

_next_uid = itertools.count()

# The lines of the marks, by uid, called while a loop's body is traced.
_bound: contextvars.ContextVar[dict[int, str] | None] = contextvars.ContextVar(
    "bound", default=None
)


@contextlib.contextmanager
def collecting_marks() -> Iterator[dict[int, str]]:
    """Yields a dict that collects the line of every mark called in the block, by uid."""
    bound: dict[int, str] = {}
    token = _bound.set(bound)
    try:
        yield bound
    finally:
        _bound.reset(token)


def _make_identity(primitive: Primitive) -> None:
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, **params: list(xs))
    primitive.def_abstract_eval(lambda *avals, **params: list(avals))
    mlir.register_lowering(primitive, lambda ctx, *xs, **params: list(xs))
    batching.primitive_batchers[primitive] = lambda xs, dims, **params: (
        primitive.bind(*xs, **params),
        dims,
    )


for _primitive in (mark_p, mark_tangent_p, mark_backward_p):
    _make_identity(_primitive)

drop_unused_passengers(mark_tangent_p)

# A stage keeps its inputs until its backward, so what it computes again begins with them.
never_recompute(mark_p)


def _mark_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    outs = mark_p.bind(*primals, **params)
    live = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    out_tangents = list(tangents)
    if live:
        marked = mark_tangent_p.bind(*(tangents[i] for i in live), **params)
        for i, tangent in zip(live, marked, strict=True):
            out_tangents[i] = tangent
    return outs, out_tangents


def _mark_transpose(cotangents: Any, *operands: Any, **params: Any) -> Any:
    live = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    results = list(cotangents)
    if live:
        marked = mark_backward_p.bind(*(cotangents[i] for i in live), **params)
        for i, ct in zip(live, marked, strict=True):
            results[i] = ct
    return results


ad.primitive_jvps[mark_p] = _mark_jvp
ad.primitive_transposes[mark_tangent_p] = _mark_transpose
ad.primitive_jvps[mark_tangent_p] = lambda primals, tangents, **params: (
    mark_tangent_p.bind(*primals, **params),
    list(tangents),
)
ad.primitive_jvps[mark_backward_p] = lambda primals, tangents, **params: (
    mark_backward_p.bind(*primals, **params),
    list(tangents),
)


def mark_stage_end(anchor: Any, name: str | None = None) -> Any:
    """Ends a pipeline stage, which computes `anchor`; later stages compute everything that uses
    the result.

    It is the identity on any pytree of arrays. A model of S stages has S marks, one at the end
    of each stage. It can be differentiated (its transpose begins the same stage's backward) and
    vmapped. Inside `jax.checkpoint` it ends the stage as elsewhere: each stage recomputes
    the values that it needs from its own inputs. Outside `treduce` it has no effect.

    Args:
      anchor: a pytree of arrays, of any shapes and dtypes.
      name: a name for error messages only.

    Returns:
      `anchor`.
    """
    check_arrays(anchor, f"mark_stage_end at {here()}: anchor")
    if name is not None and not isinstance(name, str):
        raise make_error(
            "stage-marks",
            f"mark_stage_end at {here()}: name={shorten(name)}; expected text or None",
            wrong_type=True,
        )
    leaves, tree = jax.tree.flatten(anchor)
    if not leaves:
        return anchor
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    uid, where = next(_next_uid), here()
    if (bound := _bound.get()) is not None:
        bound[uid] = where
    return tree.unflatten(mark_p.bind(*leaves, name=name, uid=uid, where=where))


pipeline_enter_stage = mark_stage_end

# --- Mistakes ------------------------------------------------------------------


@dataclasses.dataclass
class _Mark:
    """One execution of a mark in a body; a function called twice runs its marks twice."""

    uid: int
    line: str
    calls: tuple[Any, ...]  # the user's calls that lead to its line, innermost first
    differentiated: bool
    used: bool
    follows: bool  # whether it depends on the previous mark


class _MarkCollector:
    """Collects the marks of a body in execution order."""

    def __init__(self) -> None:
        self.marks: list[_Mark] = []
        self.backward: set[int] = set()  # uids of the marks that gradients pass through

    def walk(
        self,
        jaxpr: Jaxpr,
        given: Sequence[int],
        calls: tuple[Any, ...] = (),
        differentiated: bool = False,
    ) -> list[int]:
        """The marks that each result depends on, as bits, given those of each argument."""
        needs: dict[Any, int] = dict(zip(jaxpr.invars, given, strict=True))
        read = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, Var)}
        read.update(v for v in jaxpr.outvars if isinstance(v, Var))
        for eqn in jaxpr.eqns:
            operands = [needs.get(v, 0) if isinstance(v, Var) else 0 for v in eqn.invars]
            forward = differentiated or is_differentiated(eqn)
            if eqn.primitive is mark_p:
                used = any(v in read for v in eqn.outvars)
                needed = functools.reduce(operator.or_, operands)
                outs = self._note(eqn, needed, calls, used, forward)
            else:
                outs = self._inside(eqn, operands, calls, forward)
            needs.update(zip(eqn.outvars, outs, strict=True))
        return [needs.get(v, 0) if isinstance(v, Var) else 0 for v in jaxpr.outvars]

    def _note(
        self, eqn: JaxprEqn, needs: int, calls: Any, used: bool, differentiated: bool
    ) -> list[int]:
        before = len(self.marks) - 1
        follows = before < 0 or bool(needs >> before & 1)
        line, *frames = user_frames(eqn) or ["?"]
        around = (*frames, *calls)
        uid = eqn.params["uid"]
        self.marks.append(_Mark(uid, line_of(line), around, differentiated, used, follows))
        return [needs | 1 << len(self.marks) - 1] * len(eqn.outvars)

    def _inside(
        self, eqn: JaxprEqn, operands: list[int], calls: Any, differentiated: bool
    ) -> list[int]:
        if eqn.primitive is mark_backward_p:
            self.backward.add(eqn.params["uid"])
        everything = functools.reduce(operator.or_, operands, 0)
        outs = [everything] * len(eqn.outvars)
        inners = jaxprs_in(eqn.params)
        if not any(map(holds_marks, inners)):
            return outs
        frames = (*user_frames(eqn), *calls)
        for inner in inners:
            same = len(inner.invars) == len(operands)
            given = operands if same else [everything] * len(inner.invars)
            found = self.walk(inner, given, frames, differentiated)
            if same and len(found) == len(outs):
                outs = found
        return outs


def holds_marks(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr contains a mark, or the backward of one, at any depth."""
    marks = (mark_p, mark_backward_p)
    return any(eqn.primitive in marks or calls_marks(eqn) for eqn in jaxpr.eqns)


def calls_marks(eqn: JaxprEqn) -> bool:
    """Whether a jaxpr that the equation runs contains one."""
    return any(map(holds_marks, jaxprs_in(eqn.params)))


def first_mark(jaxpr: Jaxpr) -> JaxprEqn | None:
    """The first stage mark, at any depth."""
    for eqn in jaxpr.eqns:
        if eqn.primitive is mark_p:
            return eqn
        for inner in jaxprs_in(eqn.params):
            if found := first_mark(inner):
                return found
    return None


def find_mistake(jaxpr: Jaxpr, bound: dict[int, str], stages: int | None) -> str | None:
    """Describes the mistake in the marks of a loop's body, if one can be identified.

    Args:
      jaxpr: the body, before dead code elimination.
      bound: from `collecting_marks`, while it was traced.
      stages: the number of stages of the schedule, if known.
    """
    survey = _MarkCollector()
    survey.walk(jaxpr, [0] * len(jaxpr.invars))
    marks = survey.marks
    used = [m for m in marks if m.used or m.uid in survey.backward]
    unused = [m.line for m in marks if m not in used]
    known = {m.uid for m in marks}, {m.line for m in marks}
    # Marks that JAX dropped, except those that it traced a second time.
    unused += [ln for uid, ln in bound.items() if uid not in known[0] and ln not in known[1]]
    fits = stages is None or len(used) in (stages, stages - 1)
    between = any(m not in used and later in used for m, later in itertools.pairwise(marks))
    if unused and (between or not fits or not used):
        others = f" (and of {len(unused) - 1} more)" if len(unused) > 1 else ""
        return (
            f"the result of the stage mark at {unused[0]}{others} is not used, so it ends no "
            "stage; expected `x = mark_stage_end(x)` with that x used afterwards"
        )
    if fits or stages is None:
        return None
    for each in (stages, stages - 1):
        if each and len(used) % each == 0 and _is_repeated(used, each):
            return _repeated_text(used, each, stages)
    return None


def _is_repeated(marks: list[_Mark], each: int) -> bool:
    """Whether the marks repeat the same `each` marks, from separate calls."""
    starts = range(each, len(marks), each)
    same_lines = all(m.line == marks[k % each].line for k, m in enumerate(marks))
    new_inputs = all(not marks[k].follows for k in starts)
    new_calls = all(
        (marks[k].calls != marks[k - 1].calls) == (k % each == 0) for k in range(1, len(marks))
    )
    return bool(starts) and same_lines and (new_inputs or new_calls)


def _repeated_text(marks: list[_Mark], each: int, stages: int) -> str:
    times = len(marks) // each
    calls = [marks[k * each].calls for k in range(times)]
    lines = dict.fromkeys(line_of(frames[0]) for frames in calls if frames)
    called = f", called at {' and '.join(itertools.islice(lines, 4))}" if lines else ""
    remedy = (
        "Run it once on all its inputs, stacked: jnp.concatenate([a, b]), and jnp.split its "
        "result"
    )
    if len({m.differentiated for m in marks}) > 1:
        remedy = (
            "The loss is computed separately from its gradient: `loss, grads = "
            "jax.value_and_grad(fun)(params, x)` runs it once for both"
        )
    elif all(marks[k * each].follows for k in range(1, times)):
        total = times * stages
        remedy = (
            f"Each run needs the previous one, so there are {total} stages: give the schedule "
            f"{total} stages, several per rank, as in Interleaved1F1B({total}, num_ranks)"
        )
    return (
        f"the schedule has {counted(stages, 'stage')}, so expected "
        f"{counted(stages, 'stage mark')}, found {len(marks)}: the function with the marks at "
        f"{marks[0].line} runs {times} times per microbatch{called}; expected it to run "
        "once.\n"
        f"{remedy}"
    )
