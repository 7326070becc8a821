"""Keys that are equal only for equations that compute the same.

Jaxprs in parameters, such as the body of a scan, are compared by structure: JAX traces the body
again for each stage, so that equal stages have equal bodies, but not the same one. Whatever is
not known to be equal is compared by identity.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jaxpp.jax_internals.jaxprs import is_high, settings_key

__all__ = ["ParamKeys", "literal_key"]

# Most parameters. Equal ones of the same type are equivalent.
_PLAIN = {bool, int, str, type(None)}

# Parameters that only differentiation uses, by primitive. Tasks are not differentiated.
_OF_DERIVATIVES = {
    "checkpoint": {"policy"},
    "custom_jvp_call": {"jvp_jaxpr_fun"},
    "custom_vjp_call": {"fwd_jaxpr_thunk", "bwd", "out_trees"},
}


class _Identity:
    """Equal only for the same object, which lives as long as the key."""

    __slots__ = ("object",)

    def __init__(self, object_: Any) -> None:
        self.object = object_

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.object is other.object

    def __hash__(self) -> int:
        return id(self.object)


@functools.cache
def _is_compared_by_identity(kind: Any) -> bool:
    return issubclass(kind, np.ndarray | jax.Array)


class ParamKeys:
    """Makes keys of parameters, which can be compared with other keys of the same object."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Jaxpr, int]] = {}  # by id of the jaxpr, which is kept
        self._numbers: dict[Any, int] = {}

    def of(self, param: Any) -> Any:
        """A key that is equal only for equivalent parameters; if in doubt, parameters are
        compared by identity."""
        kind: Any = type(param)
        if kind in _PLAIN:
            return (kind, param)
        if isinstance(param, tuple | list):
            return (kind, *[self.of(p) for p in param])
        if isinstance(param, dict):
            return (kind, *[(k, self.of(param[k])) for k in sorted(param)])
        if isinstance(param, ClosedJaxpr):
            return (kind, self._number(param.jaxpr), *map(_Identity, param.consts))
        if isinstance(param, Jaxpr):
            return (kind, self._number(param))
        if _is_compared_by_identity(kind):
            return _Identity(param)
        if isinstance(param, float | complex):
            return (kind, repr(param))  # 0.0 == -0.0
        if isinstance(param, np.generic):
            return (kind, param.dtype, param.tobytes())
        try:
            hash(param)
        except TypeError:
            return _Identity(param)
        return (kind, param)

    def _number(self, jaxpr: Jaxpr) -> int:
        """A number that is equal only for jaxprs that compute the same."""
        if id(jaxpr) not in self._known:
            number = self._numbers.setdefault(self._structure(jaxpr), len(self._numbers))
            self._known[id(jaxpr)] = jaxpr, number
        return self._known[id(jaxpr)][1]

    def _structure(self, jaxpr: Jaxpr) -> Any:
        """The jaxpr with numbers in place of its variables, and without names and lines."""
        if is_high(jaxpr):
            return _Identity(jaxpr)
        numbers: dict[Any, int] = {}
        count = itertools.count()

        def types(variables: Sequence[Var]) -> Any:
            numbers.update(zip(variables, count, strict=False))
            return tuple([self.of(v.aval) for v in variables])

        def read(atoms: Sequence[Any]) -> Any:
            return tuple([_atom_key(a, numbers) for a in atoms])

        arguments = types(jaxpr.constvars), types(jaxpr.invars)
        eqns = [
            (
                eqn.primitive,
                self._params(eqn),
                settings_key(eqn),
                frozenset(eqn.effects),
                read(eqn.invars),
                types(eqn.outvars),
            )
            for eqn in jaxpr.eqns
        ]
        return arguments, tuple(eqns), read(jaxpr.outvars), frozenset(jaxpr.effects)

    def _params(self, eqn: JaxprEqn) -> Any:
        unused = _OF_DERIVATIVES.get(eqn.primitive.name, set())
        return self.of({k: v for k, v in eqn.params.items() if k not in unused})


def _atom_key(atom: Any, numbers: dict[Any, int]) -> Any:
    """The number of a variable, or a key of a constant."""
    if not isinstance(atom, Literal):
        return numbers[atom] if atom in numbers else _Identity(atom)
    if isinstance(atom.val, jax.Array):
        return _Identity(atom.val)
    if np.asarray(atom.val).dtype.hasobject:
        return _Identity(atom.val)
    return literal_key(atom)


def literal_key(literal: Literal) -> Any:
    value = np.asarray(literal.val)
    return (literal.aval, value.dtype, value.tobytes())
