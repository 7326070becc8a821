"""Transformations of jaxprs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_util, effects
from jax._src import core as jax_core
from jax._src import shard_map as shard_maps
from jax._src.interpreters import partial_eval as pe
from jax._src.sharding_impls import UNSPECIFIED
from jax._src.state import discharge
from jax._src.state.types import AbstractRef
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from jaxpp.jax_internals.lines import at_line_of

# JAX 0.11.2; absent in 0.10.2: how a scan marks its operands as constants and states.
try:
    from jax._src import flattree
except ImportError:
    flattree = None


__all__ = [
    "bind",
    "can_be_undefined",
    "changed_jaxpr",
    "changed_scan",
    "continued",
    "discharged",
    "drop_unused",
    "drop_unused_outputs",
    "drop_unused_passengers",
    "evaluate",
    "has_effects",
    "is_differentiated",
    "is_high",
    "is_ordered",
    "is_recomputed",
    "is_ref",
    "is_transposed",
    "is_undefined",
    "is_unspecified",
    "jaxprs_in",
    "names_of",
    "never_recompute",
    "new_var",
    "passed_by_map",
    "printed_lines",
    "repeat",
    "scan_sizes",
    "settings_key",
    "settings_of",
    "stacked_aval",
    "undefined",
    "with_inlined",
    "without_constants",
]


def jaxprs_in(params: Mapping[str, Any]) -> list[Jaxpr]:
    """The jaxprs in the parameters of an equation, also those in tuples and lists."""
    found: list[Jaxpr] = []
    _collect_jaxprs(params.values(), found)
    return found


def _collect_jaxprs(items: Iterable[Any], found: list[Jaxpr]) -> None:
    for item in items:
        if isinstance(item, tuple | list):
            _collect_jaxprs(item, found)
        elif isinstance(item, ClosedJaxpr):
            found.append(item.jaxpr)
        elif isinstance(item, Jaxpr):
            found.append(item)


# JAX 0.10.2, 0.11.2: partial_eval.dce_jaxpr.
def drop_unused(jaxpr: Jaxpr, used: Sequence[bool] | None = None) -> Jaxpr:
    """The jaxpr without equations that no used result needs. Its arguments stay the same."""
    used = [True] * len(jaxpr.outvars) if used is None else list(used)
    return pe.dce_jaxpr(jaxpr, used, instantiate=True)[0]


# JAX 0.10.2, 0.11.2: partial_eval.dce_rules. In JAX 0.12 a rule also takes which operands are
# read later, for those that are references.
def drop_unused_outputs(
    eqn: JaxprEqn, used: Sequence[bool]
) -> tuple[list[bool], JaxprEqn | None]:
    """The equation with only its used outputs, and which of the operands it still takes."""
    rule = pe.dce_rules.get(eqn.primitive)
    if rule is None:
        return [True] * len(eqn.invars), eqn
    live = [] if jax.__version_info__ < (0, 12) else [[True] * len(eqn.invars)]
    return rule(list(used), *live, eqn)


# JAX 0.10.2, 0.11.2: partial_eval.convert_constvars_jaxpr.
def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with its constants turned into leading arguments."""
    return pe.convert_constvars_jaxpr(jaxpr)


# JAX 0.10.2, 0.11.2: Jaxpr.replace, Jaxpr.debug_info.
def changed_jaxpr(closed: ClosedJaxpr, **changes: Any) -> ClosedJaxpr:
    """A jaxpr with other `invars`, `outvars` or `eqns`, and without debug information."""
    names = closed.jaxpr.debug_info.with_unknown_names()
    return ClosedJaxpr(closed.jaxpr.replace(debug_info=names, **changes), closed.consts)


# JAX 0.10.2, 0.11.2: Jaxpr.debug_info, arg_names and result_paths.
def names_of(closed: ClosedJaxpr) -> tuple[list[str], list[str]]:
    """The user's names of the arguments and of the results, such as "acc['loss']" and
    "result[0]['loss']"; empty where JAX knows none."""
    info = closed.jaxpr.debug_info
    args, results = info.safe_arg_names, info.safe_result_paths
    return list(args(len(closed.in_avals))), list(results(len(closed.out_avals)))


# JAX 0.10.2, 0.11.2: core.Var.
def new_var(aval: Any) -> Any:
    """A new variable of a jaxpr."""
    return jax_core.Var(aval)


# JAX 0.10.2, 0.11.2: ShapedArray.mat.
def can_be_undefined(aval: Any) -> bool:
    """Whether `undefined` can make values of this type: not of keys, nor in a shard_map."""
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    return not is_key and not aval.mat.varying


# JAX 0.10.2, 0.11.2: ad_util.empty_like_aval.
def undefined(aval: Any) -> tuple[list[JaxprEqn], Any]:
    """Equations that make a value of this type that nothing uses, and their result."""
    jaxpr = jax.make_jaxpr(lambda: ad_util.empty_like_aval(aval))().jaxpr
    return jaxpr.eqns, jaxpr.outvars[0]


# JAX 0.10.2, 0.11.2: lax.empty2_p.
def is_undefined(eqn: JaxprEqn) -> bool:
    """Whether the equation makes such a value, or the scalar that is broadcast to one."""
    return eqn.primitive.name == "empty2"


# JAX 0.10.2: state.types.AbstractRef.
def is_ref(value: Any) -> bool:
    """Whether a value, or a variable of a jaxpr, is a `jax.Ref`."""
    aval = value.aval if isinstance(value, jax_core.Var) else jax.typeof(value)
    return isinstance(aval, AbstractRef)


# JAX 0.10.2: Jaxpr.is_high.
def is_high(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr has values of types that JAX itself lowers to others, with a state."""
    return bool(getattr(jaxpr, "is_high", False))


# JAX 0.10.2: state.discharge.discharge_state; core.internal_mutable_array_effect, of an
# equation that creates refs.
def discharged(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with the refs that it creates replaced by values."""
    inside = jax_core.internal_mutable_array_effect
    for eqn in closed.jaxpr.eqns:
        if inside in eqn.effects or any(map(is_ref, eqn.outvars)):
            return discharge.discharge_state(closed)
    return closed


# JAX 0.10.2, 0.11.2: core.Var; JaxprEqn.replace.
def continued(closed: ClosedJaxpr, tail: Jaxpr) -> ClosedJaxpr:
    """The jaxpr followed by `tail`, whose arguments are its results and which has no
    constants."""
    given = dict(zip(tail.invars, closed.jaxpr.outvars, strict=True))

    def substitute(atom: Any) -> Any:
        return given.get(atom, atom) if isinstance(atom, jax_core.Var) else atom

    more = [eqn.replace(invars=[substitute(v) for v in eqn.invars]) for eqn in tail.eqns]
    return changed_jaxpr(
        closed,
        eqns=[*closed.jaxpr.eqns, *more],
        outvars=[substitute(v) for v in tail.outvars],
    )


# JAX 0.10.2, 0.11.2: core.unmapped_aval.
def stacked_aval(aval: Any, length: int) -> Any:
    """The abstract value of `length` such values stacked along a new first axis."""
    return jax_core.unmapped_aval(length, 0, aval)


# JAX 0.10.2, 0.11.2: a scan's num_consts and num_carry (0.10.2), or ft_in (0.11.2).
def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and states of a scan."""
    if flattree is None:
        return params["num_consts"], params["num_carry"]
    consts, states, _ = params["ft_in"].unpack()
    return len(consts), len(states)


# JAX 0.10.2, 0.11.2: as in `scan_sizes`; flattree.nones and flattree.pack (0.11.2).
def changed_scan(
    params: Mapping[str, Any], body: ClosedJaxpr, num_consts: int, num_states: int
) -> dict[str, Any]:
    """The parameters of the scan with another body and other numbers of constants and
    states."""
    if flattree is None:
        sizes = {"num_consts": num_consts, "num_carry": num_states}
        return {**params, "jaxpr": body, **sizes}
    consts, states = flattree.nones(num_consts), flattree.nones(num_states)
    slices = flattree.nones(len(body.in_avals) - num_consts - num_states)
    stacked = flattree.nones(len(body.out_avals) - num_states)
    ft_in = flattree.pack((consts, states, slices))
    return {**params, "jaxpr": body, "ft_in": ft_in, "ft_out": flattree.pack((states, stacked))}


# JAX 0.10.2, 0.11.2: JaxprEqn.replace; core.Var; new_jaxpr_eqn; ShapedArray.mat.
def with_inlined(
    closed: ClosedJaxpr,
    called: Callable[[JaxprEqn], ClosedJaxpr | Jaxpr | None],
    is_barred: Callable[[JaxprEqn], bool],
) -> ClosedJaxpr:
    """The jaxpr with the equations of each jaxpr that one of its equations calls in place of
    the call, and behind a barrier if the call is barred. Nothing is traced: inside a shard_map,
    that needs its mesh."""
    eqns: list[JaxprEqn] = []

    def barrier(operands: list[Any]) -> list[Any]:
        """Values behind barriers, one for those that vary over the same axes."""
        groups: dict[Any, list[Any]] = {}
        for v in operands:
            if not isinstance(v, Literal):
                groups.setdefault(v.aval.mat.varying, []).append(v)
        behind: dict[Any, Any] = {}
        for taken in groups.values():
            made = [new_var(v.aval) for v in taken]
            primitive = jax.lax.optimization_barrier_p
            eqns.append(jax_core.new_jaxpr_eqn(taken, made, primitive, {}, set()))
            behind.update(zip(taken, made, strict=True))
        return [v if isinstance(v, Literal) else behind[v] for v in operands]

    def add(inner: Jaxpr, atoms: dict[Any, Any], nested: bool) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else atoms.get(atom, atom)

        for eqn in inner.eqns:
            operands = [read(v) for v in eqn.invars]
            found = called(eqn)
            if isinstance(found, ClosedJaxpr):
                found = None if found.consts else found.jaxpr
            if found is not None and not found.constvars:
                if is_barred(eqn):
                    operands = barrier(operands)
                results = add(found, dict(zip(found.invars, operands, strict=True)), True)
            else:
                results = [new_var(v.aval) for v in eqn.outvars] if nested else eqn.outvars
                eqns.append(eqn.replace(invars=operands, outvars=results))
            atoms.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in inner.outvars]

    outvars = add(closed.jaxpr, {}, False)
    return changed_jaxpr(closed, eqns=eqns, outvars=outvars)


# JAX 0.10.2, 0.11.2: a shard_map's parameters; ShapedArray.nospec; shard_map.unshard_aval.
def passed_by_map(params: Mapping[str, Any], aval: Any) -> tuple[Any, Any]:
    """How a shard_map returns a value of its devices so that another one can take it: the spec,
    and the type outside."""
    mesh, checked = params["mesh"], params["check_vma"]
    names = shard_maps._all_newly_manual_mesh_names(mesh, params["newly_manual_axes"])
    spec = aval.nospec(mesh, checked, names)
    return spec, shard_maps.unshard_aval(mesh, checked, spec, aval)


# JAX 0.10.2, 0.11.2: how autodiff names what it writes in an equation's name stack.
def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether autodiff wrote the equation, in a transposition."""
    return "transpose(" in str(eqn.source_info.name_stack)


# JAX 0.10.2: as above, for the forward pass of a differentiated function.
def is_differentiated(eqn: JaxprEqn) -> bool:
    """Whether the equation belongs to the forward pass of a gradient."""
    return "jvp(" in str(eqn.source_info.name_stack)


# JAX 0.10.2, 0.11.2: the name that remat's transpose gives to recomputed equations.
def is_recomputed(eqn: JaxprEqn) -> bool:
    """Whether an equation of a rematerialised backward recomputes part of the forward."""
    return "rematted_computation" in str(eqn.source_info.name_stack)


# JAX 0.10.2, 0.11.2: partial_eval.partial_eval_jaxpr_custom_rules.
def never_recompute(primitive: Primitive) -> None:
    """Makes `jax.checkpoint`, whatever its policy, save the primitive's results instead
    of recomputing them."""

    def rule(
        policy: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: JaxprEqn
    ) -> tuple[Any, ...]:
        count = len(eqn.outvars)
        if not any(unknown):
            return eqn, None, [False] * count, [False] * count, []
        operands = zip(eqn.invars, instantiated, strict=True)
        kept = [v for v, i in operands if not i and isinstance(v, jax_core.Var)]
        return None, eqn, [True] * count, [True] * count, kept

    pe.partial_eval_jaxpr_custom_rules[primitive] = rule


# JAX 0.10.2, 0.11.2: the `ctx` of an equation.
def settings_of(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """A context manager with the JAX settings that an equation was traced under."""
    return eqn.ctx.manager


# JAX 0.10.2, 0.11.2: the `ctx` of an equation, one object for equal settings.
def settings_key(eqn: JaxprEqn) -> Any:
    """A key that is equal for equations that were traced under equal JAX settings."""
    return eqn.ctx


# JAX 0.10.2, 0.11.2: partial_eval.dce_rules. Where a scan's stacked result gets a symbolic zero
# from a transposition, JAX compares its type with that of one row, and raises ValueError.
def drop_unused_passengers(primitive: Any) -> None:
    """Lets JAX remove the unused results of a primitive that returns its operands."""

    def rule(used: list[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
        *_, eqn = rest
        kept = [k for k, is_used in enumerate(used) if is_used]
        invars, outvars = [eqn.invars[k] for k in kept], [eqn.outvars[k] for k in kept]
        return used, eqn.replace(invars=invars, outvars=outvars) if kept else None

    pe.dce_rules[primitive] = rule


# JAX 0.10.2, 0.11.2: get_bind_params, which returns keyword arguments only.
def bind(primitive: Any, params: dict[str, Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a primitive with the parameters of an equation."""
    outs = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(outs) if primitive.multiple_results else [outs]


# JAX 0.10.2, 0.11.2: core.trace_ctx; DynamicJaxprTrace.to_jaxpr_tracer and emit_eqn.
def repeat(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation on tracers, like `bind`. If they have the types of the
    equation's own operands, JAX does not find the types of the results again."""
    trace = jax_core.trace_ctx.trace
    if isinstance(trace, pe.DynamicJaxprTrace) and not eqn.effects:
        tracers = [trace.to_jaxpr_tracer(operand, eqn.source_info) for operand in operands]
        # A mark of constants has fewer operands than its equation.
        if [tracer.aval for tracer in tracers] == [var.aval for var in eqn.invars]:
            types = [var.aval for var in eqn.outvars]
            rest = (eqn.primitive, eqn.params, eqn.effects, eqn.source_info, eqn.ctx)
            return trace.emit_eqn(tracers, types, *rest)
    with settings_of(eqn), at_line_of(eqn):
        return bind(eqn.primitive, eqn.params, operands)


def evaluate(
    called: ClosedJaxpr | Jaxpr,
    args: Sequence[Any],
    handle: Callable[[JaxprEqn, list[Any]], list[Any] | None],
) -> list[Any]:
    """Evaluates a jaxpr, equation by equation, each under its settings and at its line.
    `handle` returns the results of an equation from its operands, or None for those that the
    equation computes itself."""
    closed = called if isinstance(called, ClosedJaxpr) else ClosedJaxpr(called, ())
    env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.eqns:
        operands = [read(v) for v in eqn.invars]
        with settings_of(eqn), at_line_of(eqn):
            outs = handle(eqn, operands)
            if outs is None:
                outs = bind(eqn.primitive, eqn.params, operands)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in closed.jaxpr.outvars]


# JAX 0.10.2, 0.11.2: sharding_impls.UNSPECIFIED.
def is_unspecified(sharding: Any) -> bool:
    """Whether a jit leaves the sharding of an argument or result unspecified."""
    return sharding is UNSPECIFIED or sharding is None


def _without_chance(line: str) -> str:
    """A printed line in a form that is equal in two runs of a script: without addresses,
    and with sets sorted. Numbers are printed in full precision."""

    def sort(found: re.Match[str]) -> str:
        return "{" + ", ".join(sorted(found[1].split(", "))) + "}"

    def shorten(found: re.Match[str]) -> str:
        return f"{np.float32(found[1])!s}:f32"

    line = re.sub(r"\bat 0x[0-9a-f]+|\b0x[0-9a-f]+", "", line)
    line = re.sub(r"(-?\d+\.\d+(?:e[-+]?\d+)?):f32\b", shorten, line)
    return re.sub(r"\{([^{}]*)\}", sort, line)


# JAX 0.10.2, 0.11.2: Jaxpr.pretty_print with source_info.
def printed_lines(jaxpr: Jaxpr) -> list[tuple[str, str]]:
    """The jaxpr as text, equal in every process that traces the same step, with the
    user's line (file:line:column) from which each of its lines comes."""
    lines, where = [], ""
    for line in jaxpr.pretty_print(source_info=True, use_color=False).splitlines():
        code, found, comment = line.rpartition("  # ")
        if found:
            where = comment.partition(" (")[0].strip() or where
        lines.append((_without_chance((code if found else line).strip()), where))
    return lines


# JAX 0.10.2, 0.11.2: core.NamedAxisEffect, of collectives inside a shard_map.
def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than compute its results."""
    return any(not isinstance(e, jax_core.NamedAxisEffect) for e in eqn.effects)


# JAX 0.10.2, 0.11.2: effects.ordered_effects.
def is_ordered(effect: Any) -> bool:
    """Whether calls with this effect must keep their order."""
    return effects.ordered_effects.contains(effect)
